"""Two calls at once, for each pair that shares something; some orders are forced with open transactions."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from airflow_provider_queen.client import QueenClient
from airflow_provider_queen.exceptions import LeaseLostError, QueueFullError, QueueNotFoundError
from tests.engine.conftest import MakeQueue
from tests.engine.support import (
    Sql,
    drain,
    eventually,
    expire_leases,
    pass_time,
    payloads,
    pending,
    put,
    together,
    undone,
)

pytestmark = pytest.mark.postgres


@pytest.fixture
def rounds(scale: float) -> range:
    """How often a race is run; enough to hit both orders many times."""
    return range(max(8, int(30 * scale)))


class TestFirstContact:
    def test_new_partition_and_new_group(
        self, queen: QueenClient, sql: Sql, queue: str, rounds: range
    ) -> None:
        for n in rounds:
            for mode in ("all", "new"):
                group = f"{mode}-{n}"
                _, early = together(
                    lambda n=n, mode=mode: put(queen, queue, n, partition=f"{mode}{n}"),
                    lambda group=group, mode=mode: drain(
                        queen, queue, group, subscription_mode=mode, max_partitions=100
                    ),
                )
                late = drain(queen, queue, group, max_partitions=100)
                got = [(m.partition, m.seq) for m in [*early, *late]]
                assert len(set(got)) == len(got), "none twice"
                assert pending(sql, queue, group) == 0
                # Who wants new ones only gets this one if it came later.
                assert len(got) == 2 * n + 1 if mode == "all" else got in ([], [(f"new{n}", 1)])

    def test_push_and_subscribe_on_a_partition_that_exists(
        self, queen: QueenClient, sql: Sql, queue: str, rounds: range
    ) -> None:
        put(queen, queue, "first")
        for n in rounds:
            group = f"g{n}"
            _, early = together(
                lambda n=n: put(queen, queue, n), lambda group=group: drain(queen, queue, group)
            )
            assert payloads([*early, *drain(queen, queue, group)]) == ["first", *range(n + 1)]
            assert pending(sql, queue, group) == 0

    def test_two_first_contacts_of_one_group(
        self, queen: QueenClient, sql: Sql, queue: str, rounds: range
    ) -> None:
        put(queen, queue, "before")
        for n in rounds:
            group = f"g{n}"
            popped = together(
                lambda group=group: queen.pop(queue, consumer_group=group, subscription_mode="all"),
                lambda group=group: queen.pop(queue, consumer_group=group, subscription_mode="new"),
                lambda group=group: queen.pop(queue, consumer_group=group, subscription_mode="all"),
            )
            (mode,) = [
                g.subscription_mode for g in queen.list_consumer_groups(queue) if g.consumer_group == group
            ]
            leased = [m for messages in popped for m in messages]
            queen.ack(leased)
            delivered = payloads([*leased, *drain(queen, queue, group)])
            assert delivered == (["before"] if mode == "all" else [])

    def test_a_first_contact_does_not_wait_for_another_that_stays_open(
        self, queen: QueenClient, sql: Sql, queue: str
    ) -> None:
        put(queen, queue, 1)
        with queen.transaction() as tx:
            held = tx.pop(queue, consumer_group="g")
            assert payloads(held) == [1]
            assert queen.pop(queue, consumer_group="g") == []
            put(queen, queue, 2, partition="new")
            assert queen.pop(queue, consumer_group="g") == []
        queen.ack(held)
        assert payloads(drain(queen, queue, "g")) == [2]

    def test_a_first_contact_by_namespace_does_not_wait_for_another_that_stays_open(
        self, queen: QueenClient, make_queue: MakeQueue, name: Callable[[str], str]
    ) -> None:
        """The first one met no queue at all, the second one does."""
        namespace = name("n")
        with queen.transaction() as tx:
            assert tx.pop(namespace=namespace, consumer_group="g") == []
            queue = make_queue(namespace=namespace)
            put(queen, queue, 1)
            queen.pop(namespace=namespace, consumer_group="g")
        eventually(lambda: payloads(drain(queen, None, "g", namespace=namespace)) == [1])

    def test_a_first_contact_that_is_rolled_back_never_was(self, queen: QueenClient, queue: str) -> None:
        put(queen, queue, 1)
        with undone(queen) as tx:
            tx.pop(queue, consumer_group="g", subscription_mode="new")
        assert queen.list_consumer_groups(queue) == []
        assert payloads(drain(queen, queue, "g")) == [1]

    def test_many_new_partitions_while_a_group_reads(
        self, queen: QueenClient, sql: Sql, queue: str, scale: float
    ) -> None:
        count = int(100 * scale)
        done = threading.Event()
        delivered: list[Any] = []

        def produce() -> None:
            for n in range(count):
                with queen.transaction() as tx:
                    put(tx, queue, n, partition=f"p{n}")
            done.set()

        def consume() -> None:
            while not done.is_set():
                delivered.extend(payloads(drain(queen, queue, "g", max_partitions=10)))

        together(produce, consume, consume)
        delivered += payloads(drain(queen, queue, "g"))
        assert sorted(delivered) == list(range(count))


class TestPopAndSeek:
    def test_at_once(self, queen: QueenClient, sql: Sql, queue: str, rounds: range) -> None:
        put(queen, queue, *range(5))
        for n in rounds:
            to = "beginning" if n % 2 else "end"
            popped, _ = together(
                lambda: queen.pop(queue, batch_size=2), lambda to=to: queen.seek(queue, to=to)
            )
            leased = queen.depth(queue).in_flight
            if leased:
                assert len(popped) == leased
                assert queen.ack(popped).completed == leased
            elif popped:
                with pytest.raises(LeaseLostError):
                    queen.ack(popped)
            pending(sql, queue)
        queen.seek(queue, to="beginning")
        assert payloads(drain(queen, queue)) == list(range(5))

    def test_a_seek_waits_for_a_settlement_under_way_and_then_holds(
        self, queen: QueenClient, sql: Sql, queue: str
    ) -> None:
        put(queen, queue, *range(3))
        messages = queen.pop(queue)
        with ThreadPoolExecutor(1) as pool:
            with queen.transaction() as tx:
                tx.ack(messages)
                seek = pool.submit(queen.seek, queue, to="beginning")
                eventually(lambda: _waits(sql))
            assert seek.result(10) == 1
        assert payloads(drain(queen, queue)) == [0, 1, 2]

    def test_a_seek_is_not_lost_on_a_group_whose_first_contact_is_under_way(
        self, queen: QueenClient, sql: Sql, queue: str
    ) -> None:
        """Before it or after it: in either case the group stands at the end afterwards."""
        put(queen, queue, *range(3))
        with ThreadPoolExecutor(1) as pool:
            with queen.transaction() as tx:
                held = tx.pop(queue, consumer_group="g")
                assert len(held) == 3
                seek = pool.submit(queen.seek, queue, "g", to="end")
                with suppress(TimeoutError):
                    seek.result(0.5)
            seek.result(10)
        expire_leases(sql, queue)
        assert drain(queen, queue, "g") == []

    def test_a_seek_reaches_partitions_that_a_pop_is_just_discovering(
        self, queen: QueenClient, sql: Sql, queue: str
    ) -> None:
        put(queen, queue, 1, partition="old")
        drain(queen, queue, "g")
        put(queen, queue, 2, partition="new")
        with ThreadPoolExecutor(1) as pool:
            with queen.transaction() as tx:
                held = tx.pop(queue, consumer_group="g")
                assert payloads(held) == [2]
                seek = pool.submit(queen.seek, queue, "g", to="end")
                with suppress(TimeoutError):
                    seek.result(0.5)
            seek.result(10)
        expire_leases(sql, queue)
        assert drain(queen, queue, "g") == []


class TestRetention:
    def test_and_pop(self, queen: QueenClient, sql: Sql, make_queue: MakeQueue, rounds: range) -> None:
        queue = make_queue(retention_enabled=True, retention_seconds=100)
        for n in rounds:
            put(queen, queue, n)
            pass_time(sql, queue, 101)
            popped, removed = together(lambda: queen.pop(queue), lambda: queen.retain(queue))
            assert len(popped) + sum(r.deleted for r in removed) == 1, "delivered or deleted"
            queen.ack(popped)
            queen.retain(queue)
            assert pending(sql, queue) == 0

    def test_and_push(self, queen: QueenClient, sql: Sql, make_queue: MakeQueue, rounds: range) -> None:
        """Seqs go on, whether the partition is empty or not."""
        queue = make_queue(retention_enabled=True, retention_seconds=100)
        put(queen, queue, 0)
        for n in rounds:
            pass_time(sql, queue, 101)
            (pushed,), _ = together(lambda n=n: put(queen, queue, n), lambda: queen.retain(queue))
            assert pushed.seq == n + 2
            assert [m.seq for m in queen.list_messages(queue, limit=1)] == [n + 2]
            pending(sql, queue)

    def test_and_retention(self, queen: QueenClient, sql: Sql, make_queue: MakeQueue) -> None:
        queue = make_queue(retention_enabled=True, retention_seconds=100)
        for partition in "abc":
            put(queen, queue, *range(20), partition=partition)
        pass_time(sql, queue, 101)
        answers = together(*[lambda: queen.retain(queue, limit=7)] * 4)
        while more := queen.retain(queue, limit=7):
            answers.append(more)
        assert sum(r.deleted for r in itertools.chain(*answers)) == 60
        history = sql.execute(
            "SELECT sum(messages_deleted), sum(last_seq - first_seq + 1) FROM queen.retention_history"
            " WHERE queue_name = %s",
            [queue],
        ).fetchone()
        assert history == (60, 60)

    def test_and_a_group_that_begins(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue, rounds: range
    ) -> None:
        queue = make_queue(retention_enabled=True, completed_retention_seconds=100)
        for n in rounds:
            put(queen, queue, *range(3))
            drain(queen, queue)
            pass_time(sql, queue, 101)
            popped, removed = together(
                lambda n=n: queen.pop(queue, consumer_group=f"g{n}"), lambda: queen.retain(queue)
            )
            assert len(popped) in (0, 3)
            assert sum(r.deleted for r in removed) == 3 - len(popped)
            queen.delete_consumer_group(f"g{n}")
            queen.retain(queue)


class TestDeadLetters:
    def test_requeue_and_pop(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue, rounds: range
    ) -> None:
        queue = make_queue(retry_limit=0)
        put(queen, queue, "x")
        drain(queen, queue, "other")
        for _ in rounds:
            queen.reject(queen.pop(queue))
            popped = together(
                lambda: queen.requeue_dead_letters(queue),
                lambda: queen.pop(queue),
                lambda: queen.pop(queue, consumer_group="other"),
            )
            assert popped[2] == [], "it was settled there"
            queen.release(popped[1])
            assert (pending(sql, queue), pending(sql, queue, "other")) == (1, 0)

    def test_requeue_and_requeue(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        put(queen, queue, *range(10))
        queen.reject(queen.pop(queue))
        ids = [letter.id for letter in queen.dead_letters(queue)]
        answers = together(*[lambda: queen.requeue_dead_letters(queue, ids=ids)] * 4)
        assert all(sorted(answer) == sorted(answers[0]) for answer in answers)
        assert pending(sql, queue) == 10

    def test_eviction_and_pop(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue, rounds: range
    ) -> None:
        queue = make_queue(max_wait_time_seconds=100)
        total = 0
        for n in rounds:
            put(queen, queue, n, n)
            pass_time(sql, queue, 101)
            popped, _, _ = together(
                lambda: queen.pop(queue), lambda: queen.evict(queue), lambda: queen.evict(queue)
            )
            queen.evict(queue)
            total += 2
            assert popped == [], "older than max_wait_time_seconds is never delivered"
            assert queen.depth(queue).dead_letters == total, "each once"
            assert pending(sql, queue) == 0


class TestDeletion:
    def test_of_a_queue_and_push_and_pop(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue, rounds: range
    ) -> None:
        queues = []
        for n in rounds:
            queue = make_queue()
            queues.append(queue)
            put(queen, queue, 0)

            def push(queue: str = queue, n: int = n) -> None:
                with suppress(QueueNotFoundError):
                    put(queen, queue, 1, partition=f"p{n % 2}")

            def pop(queue: str = queue) -> None:
                with suppress(QueueNotFoundError, LeaseLostError):
                    queen.ack(queen.pop(queue, consumer_group="g"))

            together(push, pop, lambda queue=queue: queen.delete_queue(queue))
        _nothing_without_a_queue(sql, *queues)

    def test_of_a_queue_waits_for_producers_and_ends_leases(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue()
        put(queen, queue, 0)
        held = queen.pop(queue)
        with ThreadPoolExecutor(1) as pool:
            with queen.transaction() as tx:
                put(tx, queue, 1)
                deletion = pool.submit(queen.delete_queue, queue)
                eventually(lambda: _waits(sql))
            assert deletion.result(10) is True
        with pytest.raises(LeaseLostError):
            queen.ack(held)
        with pytest.raises(QueueNotFoundError):
            put(queen, queue, 2)
        _nothing_without_a_queue(sql, queue)

    def test_of_a_queue_and_requeue(self, queen: QueenClient, sql: Sql, make_queue: MakeQueue) -> None:
        for _ in range(5):
            queue = make_queue()
            put(queen, queue, *range(5))
            queen.reject(queen.pop(queue))

            def requeue(queue: str = queue) -> None:
                with suppress(QueueNotFoundError):
                    queen.requeue_dead_letters(queue)

            together(requeue, lambda queue=queue: queen.delete_queue(queue))
        _nothing_without_a_queue(sql)

    def test_of_a_group_and_pop(self, queen: QueenClient, sql: Sql, queue: str, rounds: range) -> None:
        put(queen, queue, *range(3))
        for _ in rounds:
            popped, _ = together(
                lambda: queen.pop(queue, consumer_group="g"), lambda: queen.delete_consumer_group("g", queue)
            )
            exists = bool(queen.list_consumer_groups(queue))
            if popped and not exists:
                with pytest.raises(LeaseLostError):
                    queen.ack(popped)
            elif popped:
                assert queen.ack(popped).completed == 3
            queen.delete_consumer_group("g")
            assert queen.list_consumer_groups(queue) == []
            assert pending(sql, queue, "g") == 3
        left = sql.execute(
            "SELECT count(*) FROM queen.consumers AS c WHERE NOT EXISTS"
            " (SELECT 1 FROM queen.queue_groups AS g"
            " WHERE g.queue_id = c.queue_id AND g.consumer_group = c.consumer_group)"
        ).fetchone()
        assert left == (0,)


class TestCapacity:
    @pytest.mark.parametrize("partitions", [1, 8])
    def test_is_exact_with_eight_producers(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue, partitions: int, scale: float
    ) -> None:
        limit = int(100 * scale)
        queue = make_queue(max_queue_size=limit)
        accepted = itertools.count()

        def produce(producer: int) -> int:
            stored = 0
            for n in range(limit):
                size = 1 + n % 3
                try:
                    put(queen, queue, *range(size), partition=f"p{(producer + n) % partitions}")
                except QueueFullError:
                    if size == 1:
                        break
                else:
                    stored += size
                    next(accepted)
            return stored

        stored = together(*[lambda p=p: produce(p) for p in range(8)])
        assert sum(stored) == limit
        assert pending(sql, queue) == limit
        queen.ack(queen.pop(queue, batch_size=4, max_partitions=4))
        put(queen, queue, *range(4))
        with pytest.raises(QueueFullError):
            put(queen, queue, 1)

    def test_with_consumers_beside(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue, scale: float
    ) -> None:
        queue = make_queue(max_queue_size=5)
        done = threading.Event()
        highest = 0

        def produce(producer: int) -> int:
            stored = 0
            for n in range(int(60 * scale)):
                with suppress(QueueFullError):
                    put(queen, queue, n, partition=f"p{producer % 2}")
                    stored += 1
            return stored

        def consume() -> int:
            count = 0
            while True:
                over = done.is_set()
                if messages := queen.pop(queue, batch_size=2):
                    queen.ack(messages)
                    count += len(messages)
                elif over:
                    return count

        def watch() -> int:
            nonlocal highest
            while not done.is_set():
                highest = max(highest, pending(sql, queue))
            return 0

        def produce_all() -> int:
            try:
                return sum(together(*[lambda p=p: produce(p) for p in range(3)]))
            finally:
                done.set()

        stored, consumed, _ = together(produce_all, consume, watch)
        assert consumed == stored
        assert highest <= 5

    def test_a_limit_that_comes_while_a_push_is_under_way_counts_it(
        self, queen: QueenClient, sql: Sql, queue: str
    ) -> None:
        with ThreadPoolExecutor(1) as pool:
            with queen.transaction() as tx:
                put(tx, queue, 1, 2)
                configuration = pool.submit(queen.configure_queue, queue, max_queue_size=2)
                eventually(lambda: _waits(sql))
            configuration.result(10)
        with pytest.raises(QueueFullError):
            put(queen, queue, 3)
        assert pending(sql, queue) == 2


def test_settling_one_lease_while_another_is_popped(
    queen: QueenClient, sql: Sql, queue: str, rounds: range
) -> None:
    """Partial settlements, pops and pushes of one partition, all at once."""
    put(queen, queue, *range(4))
    for n in rounds:
        messages = queen.pop(queue)
        assert len(messages) == 4
        together(
            lambda m=messages: queen.ack(m[1]),
            lambda m=messages: queen.release(m[0]),
            lambda m=messages: queen.settle(failed=m[2], released=m[3]),
            lambda: queen.pop(queue, consumer_group="other", auto_ack=True),
            lambda n=n: put(queen, queue, n),
        )
        assert pending(sql, queue) == 4
        queen.configure_queue(queue, retry_limit=1000)


def test_a_restored_database_finds_new_partitions(queen: QueenClient, sql: Sql, queue: str) -> None:
    """A dump carries transaction ids of another server, which may be far ahead of this one's."""
    put(queen, queue, 1)
    drain(queen, queue, "g", subscription_mode="new")
    ahead = "(pg_current_xact_id()::text::bigint + 1000000000)"
    sql.execute(
        f"UPDATE queen.queue_groups AS g SET discovered_xid = {ahead}::text::xid8 FROM queen.queues AS q"
        " WHERE q.id = g.queue_id AND q.name = %s",
        [queue],
    )
    sql.execute(
        f"UPDATE queen.lanes AS l SET created_xid = {ahead}::text::xid8 FROM queen.queues AS q"
        " WHERE q.id = l.queue_id AND q.name = %s",
        [queue],
    )
    sql.execute(
        "UPDATE queen.consumer_groups_metadata"
        f" SET subscription_snapshot = ({ahead} || ':' || {ahead} || ':')::pg_snapshot WHERE queue_name = %s",
        [queue],
    )
    put(queen, queue, 2, partition="new")
    assert pending(sql, queue, "g") == 1
    assert payloads(drain(queen, queue, "g")) == [2]


def _waits(sql: Sql) -> bool:
    """Whether anybody in this database waits for a lock."""
    row = sql.execute(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
    ).fetchone()
    return row is not None and row[0] > 0


def _nothing_without_a_queue(sql: Sql, *queues: str) -> None:
    for table, key in {
        "partitions": "queue_id",
        "lanes": "queue_id",
        "consumers": "queue_id",
        "queue_groups": "queue_id",
        "dead_letter_queue": "queue_id",
    }.items():
        row = sql.execute(
            f"SELECT count(*) FROM queen.{table} AS t"
            f" WHERE NOT EXISTS (SELECT 1 FROM queen.queues AS q WHERE q.id = t.{key})"
        ).fetchone()
        assert row == (0,), table
    for query in (
        "SELECT count(*) FROM queen.message_log AS m WHERE NOT EXISTS"
        " (SELECT 1 FROM queen.lanes AS l WHERE l.id = m.lane_id)",
        "SELECT count(*) FROM queen.consumer_states AS s WHERE NOT EXISTS"
        " (SELECT 1 FROM queen.consumers AS c WHERE c.id = s.consumer_id)",
        "SELECT count(*) FROM queen.redeliveries AS r WHERE NOT EXISTS"
        " (SELECT 1 FROM queen.consumers AS c WHERE c.id = r.consumer_id)",
    ):
        assert sql.execute(query).fetchone() == (0,), query
    subscriptions = sql.execute(
        "SELECT consumer_group FROM queen.consumer_groups_metadata WHERE queue_name = ANY (%s)",
        [list(queues)],
    ).fetchall()
    assert subscriptions == []
