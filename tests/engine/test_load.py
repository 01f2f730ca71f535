"""Many producers and consumers at once: every message accounted for, in order, and none left behind."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from airflow_provider_queen.client import QueenClient
from airflow_provider_queen.exceptions import LeaseLostError
from tests.engine.conftest import IMPATIENT, MakeQueue
from tests.engine.support import PATIENCE, Sql, check, depths, first_deliveries, pending, together

pytestmark = [pytest.mark.postgres, pytest.mark.slow]


@pytest.fixture
def quick_dsn(engine_dsn: str) -> str:
    """Commits that do not wait for the disk: more interleavings in less time."""
    return make_conninfo(engine_dsn, options="-c synchronous_commit=off")


class Ledger:
    """What was pushed, delivered and settled, per partition."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pushed: dict[str, dict[int, Any]] = defaultdict(dict)
        self.delivered: dict[str, list[int]] = defaultdict(list)
        self.settled: dict[str, set[int]] = defaultdict(set)
        self.count = 0
        self.problems: list[str] = []

    def push(self, results: list[Any], payloads: list[Any]) -> None:
        with self.lock:
            for result, payload in zip(results, payloads, strict=True):
                if result.seq in self.pushed[result.partition]:
                    self.problems.append(f"{result.partition} {result.seq} was given twice")
                self.pushed[result.partition][result.seq] = payload

    def deliver(self, messages: list[Any]) -> None:
        """The first message may follow only what somebody settles, or has settled."""
        with self.lock:
            before: dict[str, set[int]] = defaultdict(set)
            for message in messages:
                known, done = self.delivered[message.partition], self.settled[message.partition]
                if message.seq in done:
                    self.problems.append(f"{message.partition} {message.seq} came after it was settled")
                if message.seq not in known:
                    missing = set(range(1, message.seq)) - done - before[message.partition]
                    if missing:
                        self.problems.append(f"{message.partition} {message.seq} came before {missing}")
                known.append(message.seq)
                before[message.partition].add(message.seq)

    def settle(self, messages: list[Any]) -> None:
        """Called before the settlement: afterwards others may be faster than this thread."""
        with self.lock:
            for message in messages:
                self.settled[message.partition].add(message.seq)

    def completed(self, count: int) -> None:
        with self.lock:
            self.count += count


class Hands:
    """Clients for the threads of a test, one each: a shared one would keep opening connections."""

    def __init__(self, dsn: str, queue: str, stack: ExitStack) -> None:
        self.dsn, self.queue, self.stack = dsn, queue, stack
        self.ledger = Ledger()

    def client(self) -> QueenClient:
        return self.stack.enter_context(QueenClient(self.dsn, options=IMPATIENT))

    def produce(self, client: QueenClient, number: int, partitions: int, batches: int) -> int:
        chance = random.Random(number)  # noqa: S311
        pushed = 0
        for batch in range(batches):
            partition = f"p{chance.randrange(partitions)}"
            values = [[number, batch, n] for n in range(chance.randint(1, 6))]
            messages = [
                {"payload": value, "partition": partition, "transaction_id": "-".join(map(str, value))}
                for value in values
            ]
            kind = chance.random()
            if kind < 0.2:  # thinks better of it
                with client.transaction() as tx:
                    tx.push(self.queue, messages)
                    raise psycopg.Rollback
            if kind < 0.6:  # takes its time to commit
                with client.transaction() as tx:
                    results = tx.push(self.queue, messages)
                    tx.connection.execute("SELECT pg_sleep(%s)", [chance.random() * 0.004])
            else:
                results = client.push(self.queue, messages)
            self.ledger.push(results, values)
            if kind > 0.95:  # has not heard the answer
                again = client.push(self.queue, messages)
                if [(r.status, r.seq) for r in again] != [("duplicate", r.seq) for r in results]:
                    self.ledger.problems.append(f"a repeated push was answered with {again}")
            pushed += len(values)
        return pushed

    def consume(self, client: QueenClient, number: int, done: threading.Event, total: list[int]) -> int:
        chance = random.Random(1000 + number)  # noqa: S311
        deadline = time.monotonic() + 100
        while not (done.is_set() and self.ledger.count >= total[0]) and not self.ledger.problems:
            assert time.monotonic() < deadline, f"{self.ledger.count} of {total} arrived"
            messages = client.pop(
                self.queue, batch_size=chance.randint(1, 10), max_partitions=chance.randint(1, 3)
            )
            if not messages:
                time.sleep(0.002)
                continue
            self.ledger.deliver(messages)
            kind = chance.random()
            if kind < 0.05:  # dies: the lease runs out
                expire(client, messages)
                continue
            keep = [m for m in messages if kind > 0.3 or chance.random() < 0.5]
            rest = [m for m in messages if m not in keep]
            self.ledger.settle(keep)
            try:
                client.settle(completed=keep, **{"failed" if kind < 0.2 else "released": rest})
            except LeaseLostError:
                self.ledger.problems.append("a live lease was lost")
            self.ledger.completed(len(keep))
        return 0


def expire(client: QueenClient, messages: list[Any]) -> None:
    """Let these leases run out now."""
    with client.transaction() as tx:
        for lease in {m.lease_id for m in messages}:
            tx.connection.execute(
                "UPDATE queen.consumer_states SET lease_expires_at = clock_timestamp() - interval '1 ms'"
                " WHERE consumer_id = queen.lease_consumer(%s) AND lease_id = %s",
                [lease, lease],
            )
            tx.connection.execute(
                "UPDATE queen.consumers SET ready_at = least(ready_at, clock_timestamp())"
                " WHERE id = queen.lease_consumer(%s)",
                [lease],
            )


@pytest.fixture
def hands(quick_dsn: str, make_queue: MakeQueue) -> Iterator[Hands]:
    with ExitStack() as stack:
        yield Hands(quick_dsn, make_queue(retry_limit=1_000_000), stack)


@pytest.mark.parametrize("partitions", [1, 4, 64])
def test_eight_producers_and_eight_consumers(hands: Hands, sql: Sql, scale: float, partitions: int) -> None:
    """Producers commit late, roll back and repeat themselves; consumers fail, give back and die."""
    ledger, done, total = hands.ledger, threading.Event(), [0]
    producers = [hands.client() for _ in range(8)]
    consumers = [hands.client() for _ in range(8)]
    batches = int(40 * scale)
    looks: list[tuple[int, int]] = []

    def produce_all() -> int:
        try:
            total[0] = sum(
                together(
                    *[
                        lambda n=n, c=c: hands.produce(c, n, partitions, batches)
                        for n, c in enumerate(producers)
                    ]
                )
            )
        finally:
            done.set()
        return total[0]

    def look() -> int:
        while not (done.is_set() and ledger.count >= total[0]) and not ledger.problems:
            looks.append(depths(sql, hands.queue))
            done.wait(0.05)
        return 0

    together(
        produce_all,
        *[lambda n=n, c=c: hands.consume(c, n, done, total) for n, c in enumerate(consumers)],
        look,
    )
    assert ledger.problems == []
    assert sum(len(seqs) for seqs in ledger.pushed.values()) == total[0] == ledger.count
    for partition, pushed in ledger.pushed.items():
        everything = list(range(1, len(pushed) + 1))
        assert sorted(pushed) == everything, f"{partition}: seqs are dense"
        assert first_deliveries(ledger.delivered[partition]) == everything, f"{partition}: in order"
        assert ledger.settled[partition] == set(everything)
        for producer in range(8):
            sent = [value for _, value in sorted(pushed.items()) if value[0] == producer]
            assert sent == sorted(sent), f"{partition}: producer {producer} in its own order"
    assert [pair for pair in looks if pair[0] != pair[1]] == [], "depth is COUNT at every moment"
    assert pending(sql, hands.queue) == 0
    check(sql, hands.queue)


def test_ten_thousand_pushes_to_a_partition_that_is_just_running_empty(
    quick_dsn: str, sql: Sql, make_queue: MakeQueue, scale: float
) -> None:
    """Push, settle and the pop that finds the partition empty at the same moment: each message arrives.

    The producer pushes as soon as the last message is popped, so that its push meets the settlement and then
    the empty pops, one of which calls the partition drained.
    """
    pairs = 5
    rounds = int((10_000 if scale == 1 else 1_000) / pairs)
    shared = make_queue()

    def run_pair(number: int) -> None:
        # Some have a queue of their own, some a partition of a common one.
        queue, partition = (make_queue(), "Default") if number < 2 else (shared, f"p{number}")
        chosen = None if number < 2 else partition
        wanted = threading.Semaphore(1)
        failed = threading.Event()

        def produce() -> None:
            with psycopg.connect(quick_dsn, autocommit=True) as connection:
                for n in range(rounds):
                    while not wanted.acquire(timeout=1):
                        if failed.is_set():
                            return
                    connection.execute(
                        "SELECT seq FROM queen.push(%s, ARRAY[%s], ARRAY[%s])", [queue, str(n), partition]
                    )

        def consume() -> None:
            with psycopg.connect(quick_dsn, autocommit=True) as connection:
                for n in range(rounds):
                    deadline = time.monotonic() + PATIENCE
                    while not (
                        rows := connection.execute(
                            "SELECT lease_id, seq, payload::text FROM queen.pop(%s, %s)", [queue, chosen]
                        ).fetchall()
                    ):
                        if time.monotonic() > deadline:
                            failed.set()
                            raise AssertionError(f"message {n} of {queue} never became available")
                    (lease, seq, payload) = rows[0]
                    assert (seq, payload) == (n + 1, str(n))
                    wanted.release()
                    connection.execute("SELECT FROM queen.ack(%s)", [lease])

        together(produce, consume, seconds=250)

    together(*[lambda n=n: run_pair(n) for n in range(pairs)], seconds=280)
    assert pending(sql, shared) == 0
