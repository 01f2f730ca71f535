"""Callers in repeatable read and serializable: the right thing or an error, never a wrong state.

Their snapshot is older than the locks that they wait for, so they cannot see what the last holder did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from airflow_provider_queen.client import QueenClient
from airflow_provider_queen.exceptions import (
    InvalidOptionError,
    LeaseLostError,
    QueueFullError,
    QueueNotFoundError,
    TransactionConflictError,
)
from tests.engine.conftest import IMPATIENT, MakeQueue
from tests.engine.support import (
    Sql,
    drain,
    eventually,
    expire_leases,
    is_waiting,
    pass_time,
    payloads,
    pending,
    put,
    together,
)

pytestmark = pytest.mark.postgres

LEVELS = ["repeatable read", "serializable"]


@pytest.fixture(params=LEVELS)
def strict(request: pytest.FixtureRequest, engine_dsn: str) -> Iterator[QueenClient]:
    # By the connection string: a program in another language asks no client option for leave.
    level = request.param.replace(" ", "\\ ")
    dsn = make_conninfo(engine_dsn, options=f"-c default_transaction_isolation={level}")
    with QueenClient(dsn, options=IMPATIENT) as client:
        yield client


@contextmanager
def old_snapshot(client: QueenClient) -> Iterator[Any]:
    """A transaction that looked at the database some time ago."""
    with client.transaction() as tx:
        tx.connection.execute("SELECT count(*) FROM queen.queues").fetchone()
        yield tx


def attempt(client: QueenClient, between: Callable[[], Any], action: Callable[[Any], Any]) -> bool:
    """Whether an action in a transaction with an old snapshot went through.

    If not, then because of a conflict, after which one repeats it, or because it refuses such transactions.
    """
    try:
        with old_snapshot(client) as tx:
            between()
            action(tx)
    except TransactionConflictError:
        return False
    except InvalidOptionError as error:
        if "read committed" in str(error):
            return False
        raise
    return True


def test_the_plain_life_of_a_message(strict: QueenClient, sql: Sql, queue: str) -> None:
    put(strict, queue, 1, 2, 3, partition="a")
    messages = strict.pop(queue, consumer_group="g")
    strict.settle(completed=messages[0], failed=messages[1], rejected=messages[2])
    assert pending(sql, queue, "g") == 1
    assert payloads(drain(strict, queue, "g")) == [2]
    put(strict, queue, 4, partition="a")
    assert payloads(drain(strict, queue, "g")) == [4]


def test_a_push_after_another_in_the_same_partition(
    strict: QueenClient, queen: QueenClient, sql: Sql, queue: str
) -> None:
    put(queen, queue, 0)
    went = attempt(strict, lambda: put(queen, queue, 1), lambda tx: put(tx, queue, 2))
    assert payloads(drain(queen, queue)) == [0, 1] + [2] * went


def test_a_push_that_waited_for_another(
    strict: QueenClient, queen: QueenClient, sql: Sql, queue: str
) -> None:
    """No transaction of its own: the client repeats it until it has gone through."""
    put(queen, queue, 0)
    with ThreadPoolExecutor(1) as pool:
        with queen.transaction() as tx:
            put(tx, queue, 1)
            later = pool.submit(put, strict, queue, 2)
            eventually(lambda: _anybody_waits(sql))
        assert [r.seq for r in later.result(20)] == [3]
    assert payloads(drain(queen, queue)) == [0, 1, 2]


def test_a_push_to_a_lane_that_was_drained_meanwhile(
    strict: QueenClient, queen: QueenClient, sql: Sql, queue: str
) -> None:
    """The snapshot still shows the lane as ready, so nobody would be woken."""
    put(queen, queue, 0)
    drain(queen, queue)
    put(queen, queue, 1)

    def run_dry() -> None:
        drain(queen, queue)
        sql.execute("SELECT * FROM queen.pop('" + queue + "')")  # by the simple protocol too
        assert queen.pop(queue) == []

    went = attempt(strict, run_dry, lambda tx: put(tx, queue, "late"))
    assert pending(sql, queue) == went
    assert payloads(drain(queen, queue)) == ["late"] * went


def test_a_push_with_a_transaction_id_that_another_lane_got_meanwhile(
    strict: QueenClient, queen: QueenClient, sql: Sql, queue: str
) -> None:
    put(queen, queue, 0, priority=1)
    put(queen, queue, 0, priority=2)
    message = {"payload": 1, "transaction_id": "t"}
    attempt(
        strict,
        lambda: queen.push(queue, [{**message, "priority": 1}]),
        lambda tx: tx.push(queue, [{**message, "priority": 2}]),
    )
    assert pending(sql, queue) == 3


def test_a_push_to_a_queue_that_filled_up_meanwhile(
    strict: QueenClient, queen: QueenClient, sql: Sql, make_queue: MakeQueue
) -> None:
    queue = make_queue(max_queue_size=3)
    put(queen, queue, 0, partition="a")
    put(queen, queue, 0, partition="b")
    with suppress(QueueFullError):
        attempt(
            strict,
            lambda: put(queen, queue, 1, partition="a"),
            lambda tx: put(tx, queue, 1, partition="b"),
        )
    assert pending(sql, queue) == 3


def test_a_push_to_a_queue_that_was_deleted_meanwhile(
    strict: QueenClient, queen: QueenClient, sql: Sql, queue: str
) -> None:
    put(queen, queue, 0)
    with suppress(QueueNotFoundError):
        attempt(strict, lambda: queen.delete_queue(queue), lambda tx: put(tx, queue, 1))
    left = sql.execute(
        "SELECT count(*) FROM queen.message_log AS m"
        " WHERE NOT EXISTS (SELECT 1 FROM queen.lanes AS l WHERE l.id = m.lane_id)"
    ).fetchone()
    assert left == (0,)


def test_a_push_that_creates_the_lane_that_another_created_meanwhile(
    strict: QueenClient, queen: QueenClient, sql: Sql, queue: str
) -> None:
    went = attempt(strict, lambda: put(queen, queue, 1), lambda tx: put(tx, queue, 2))
    assert payloads(drain(queen, queue)) == [1] + [2] * went


def test_a_pop_of_what_another_popped_meanwhile(
    strict: QueenClient, queen: QueenClient, sql: Sql, queue: str
) -> None:
    put(queen, queue, 1)
    queen.release(queen.pop(queue))
    mine: list[Any] = []
    theirs: list[Any] = []
    went = attempt(strict, lambda: mine.extend(queen.pop(queue)), lambda tx: theirs.extend(tx.pop(queue)))
    assert len(mine) == 1
    assert not (went and theirs), "two live leases"
    assert queen.ack(mine).completed == 1


def test_a_first_contact_that_another_made_meanwhile(
    strict: QueenClient, queen: QueenClient, sql: Sql, queue: str
) -> None:
    put(queen, queue, 1)
    mine: list[Any] = []
    theirs: list[Any] = []
    went = attempt(
        strict,
        lambda: mine.extend(queen.pop(queue, consumer_group="g")),
        lambda tx: theirs.extend(tx.pop(queue, consumer_group="g", subscription_mode="new")),
    )
    assert len(mine) == 1
    assert not (went and theirs)
    assert [g.subscription_mode for g in queen.list_consumer_groups(queue)] == ["all"]
    queen.ack(mine)


@pytest.mark.parametrize("outcome", ["completed", "failed", "rejected", "released"])
def test_a_settlement_after_a_takeover(
    strict: QueenClient, queen: QueenClient, sql: Sql, queue: str, outcome: str
) -> None:
    put(queen, queue, 1)
    lost = queen.pop(queue)
    taken: list[Any] = []

    def take_over() -> None:
        expire_leases(sql, queue)
        taken.extend(queen.pop(queue))

    with suppress(LeaseLostError):
        assert not attempt(strict, take_over, lambda tx: tx.settle(**{outcome: lost}))
    assert pending(sql, queue) == 1
    assert queen.depth(queue).dead_letters == 0
    assert queen.ack(taken).completed == 1


def test_a_renewal_after_a_takeover(strict: QueenClient, queen: QueenClient, sql: Sql, queue: str) -> None:
    put(queen, queue, 1)
    lost = queen.pop(queue)
    taken: list[Any] = []

    def take_over() -> None:
        expire_leases(sql, queue)
        taken.extend(queen.pop(queue))

    with suppress(LeaseLostError):
        assert not attempt(strict, take_over, lambda tx: tx.renew(lost))
    assert queen.ack(taken).completed == 1


def test_a_seek_after_a_settlement(strict: QueenClient, queen: QueenClient, sql: Sql, queue: str) -> None:
    put(queen, queue, 1, 2)
    messages = queen.pop(queue)
    went = attempt(strict, lambda: queen.ack(messages), lambda tx: tx.seek(queue, to="beginning"))
    assert pending(sql, queue) == 2 * went


def test_retention_beside_a_pop(
    strict: QueenClient, queen: QueenClient, sql: Sql, make_queue: MakeQueue
) -> None:
    """What a lease holds now must stay, though the snapshot does not show the lease."""
    queue = make_queue(retention_enabled=True, retention_seconds=10)
    put(queen, queue, 1)
    queen.release(queen.pop(queue))
    pass_time(sql, queue, 11)
    held: list[Any] = []
    attempt(strict, lambda: held.extend(queen.pop(queue)), lambda tx: tx.retain(queue))
    assert len(queen.list_messages(queue)) == 1
    queen.ack(held)


def test_retention_beside_a_group_that_came_meanwhile(
    strict: QueenClient, queen: QueenClient, sql: Sql, make_queue: MakeQueue
) -> None:
    queue = make_queue(retention_enabled=True, completed_retention_seconds=10)
    put(queen, queue, 1)
    drain(queen, queue)
    pass_time(sql, queue, 11)
    held: list[Any] = []
    attempt(strict, lambda: held.extend(queen.pop(queue, consumer_group="late")), lambda tx: tx.retain(queue))
    assert len(queen.list_messages(queue)) == 1
    queen.ack(held)


def test_eviction_beside_a_pop(
    strict: QueenClient, queen: QueenClient, sql: Sql, make_queue: MakeQueue
) -> None:
    """What a lease holds now is not evicted, though the snapshot does not show the lease."""
    queue = make_queue(max_wait_time_seconds=100)
    put(queen, queue, 1)
    queen.release(queen.pop(queue))
    pass_time(sql, queue, 99.5)
    held: list[Any] = []

    def pop_just_in_time() -> None:
        held.extend(queen.pop(queue))
        eventually(lambda: (queen.depth(queue).oldest_age_seconds or 0) > 100.1)

    attempt(strict, pop_just_in_time, lambda tx: tx.evict(queue))
    assert queen.depth(queue).dead_letters == 0
    assert queen.ack(held).completed == 1


def test_a_requeue_that_another_did_meanwhile(
    strict: QueenClient, queen: QueenClient, sql: Sql, queue: str
) -> None:
    put(queen, queue, 1)
    queen.reject(queen.pop(queue))
    attempt(strict, lambda: queen.requeue_dead_letters(queue), lambda tx: tx.requeue_dead_letters(queue))
    assert pending(sql, queue) == 1


def test_many_at_once(strict: QueenClient, queen: QueenClient, sql: Sql, queue: str, scale: float) -> None:
    """The client repeats what conflicts: everything arrives once, in order."""
    count = int(20 * scale)
    delivered: list[tuple[str, int]] = []

    def produce(producer: int) -> None:
        for n in range(count):
            _insist(lambda n=n: put(strict, queue, [producer, n], partition=f"p{n % 2}"))

    def consume() -> None:
        def done() -> bool:
            messages = _insist(lambda: strict.pop(queue, batch_size=5))
            if messages:
                _insist(lambda: strict.ack(messages))
                delivered.extend((m.partition, m.seq) for m in messages)
            return len(delivered) == 3 * count

        eventually(done, seconds=60)

    together(*[lambda p=p: produce(p) for p in range(3)], consume)
    assert pending(sql, queue) == 0
    for partition in ("p0", "p1"):
        seqs = [seq for p, seq in delivered if p == partition]
        assert seqs == list(range(1, len(seqs) + 1))


def _insist(action: Callable[[], Any]) -> Any:
    for _ in range(50):
        try:
            return action()
        except TransactionConflictError:
            continue
    raise AssertionError("it never went through")


def _anybody_waits(sql: Sql) -> bool:
    pids = sql.execute("SELECT pid FROM pg_stat_activity WHERE datname = current_database()").fetchall()
    return any(is_waiting(sql, pid) for (pid,) in pids)


def test_the_levels_are_what_they_say(strict: QueenClient) -> None:
    with strict.transaction() as tx:
        level = tx.connection.execute("SHOW transaction_isolation").fetchone()
    assert level is not None
    assert level[0] in LEVELS
