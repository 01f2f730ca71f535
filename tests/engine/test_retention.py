"""Guarantee 9: retention deletes only what it may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from airflow_provider_queen.client import QueenClient
from tests.engine.conftest import MakeQueue
from tests.engine.support import Sql, drain, expire_leases, pass_time, payloads, pending, put

pytestmark = pytest.mark.postgres


def stored(queen: QueenClient, queue: str) -> list[Any]:
    return payloads(sorted(queen.list_messages(queue), key=lambda m: (m.partition, m.seq)))


def deleted(queen: QueenClient, queue: str, **options: Any) -> dict[str, int]:
    answer: dict[str, int] = {}
    for row in queen.retain(queue, **options):
        answer[row.retention_type] = answer.get(row.retention_type, 0) + row.deleted
    return answer


def test_nothing_unless_it_is_enabled(queen: QueenClient, sql: Sql, make_queue: MakeQueue) -> None:
    queue = make_queue(retention_seconds=10, completed_retention_seconds=10)
    put(queen, queue, 1)
    drain(queen, queue)
    pass_time(sql, queue, 1000)
    assert deleted(queen, queue) == {}
    queen.configure_queue(queue, retention_enabled=True)
    assert sum(deleted(queen, queue).values()) == 1


def test_nothing_where_neither_age_is_set(queen: QueenClient, sql: Sql, make_queue: MakeQueue) -> None:
    queue = make_queue(retention_enabled=True)
    put(queen, queue, 1)
    drain(queen, queue)
    pass_time(sql, queue, 100_000_000)
    assert deleted(queen, queue) == {}


def test_unconsumed_messages_only_under_retention_seconds(
    queen: QueenClient, sql: Sql, make_queue: MakeQueue
) -> None:
    queue = make_queue(retention_enabled=True, completed_retention_seconds=10)
    put(queen, queue, 1, 2)
    queen.ack(queen.pop(queue, batch_size=1))
    pass_time(sql, queue, 11)
    assert deleted(queen, queue) == {"completed": 1}
    assert stored(queen, queue) == [2]
    queen.configure_queue(queue, retention_seconds=20)
    assert deleted(queen, queue) == {}
    pass_time(sql, queue, 10)
    assert deleted(queen, queue) == {"retention": 1}
    assert pending(sql, queue) == 0
    assert queen.pop(queue) == []


def test_consumed_means_by_every_group_that_exists(
    queen: QueenClient, sql: Sql, make_queue: MakeQueue
) -> None:
    queue = make_queue(retention_enabled=True, completed_retention_seconds=10)
    put(queen, queue, 1, 2, 3)
    drain(queen, queue, "quick")
    queen.ack(queen.pop(queue, consumer_group="slow", batch_size=1))
    pass_time(sql, queue, 11)
    assert deleted(queen, queue) == {"completed": 1}
    assert payloads(drain(queen, queue, "slow")) == [2, 3]
    assert deleted(queen, queue) == {"completed": 2}


def test_a_group_that_reads_one_partition_keeps_the_others(
    queen: QueenClient, sql: Sql, make_queue: MakeQueue
) -> None:
    queue = make_queue(retention_enabled=True, completed_retention_seconds=10)
    put(queen, queue, "a", partition="a")
    put(queen, queue, "b", partition="b")
    drain(queen, queue, "both")
    drain(queen, queue, "one", partition="a")
    pass_time(sql, queue, 11)
    assert deleted(queen, queue) == {"completed": 1}
    assert stored(queen, queue) == ["b"]


def test_at_least_one_group_must_exist(queen: QueenClient, sql: Sql, make_queue: MakeQueue) -> None:
    queue = make_queue(retention_enabled=True, completed_retention_seconds=10)
    put(queen, queue, 1)
    pass_time(sql, queue, 11)
    assert deleted(queen, queue) == {}
    drain(queen, queue, "g")
    queen.delete_consumer_group("g", queue)
    assert deleted(queen, queue) == {}
    drain(queen, queue, "h")
    assert deleted(queen, queue) == {"completed": 1}


def test_what_a_group_of_the_whole_namespace_needs_stays(
    queen: QueenClient, sql: Sql, make_queue: MakeQueue, name: Callable[[str], str]
) -> None:
    """It subscribed before the queue was there, and is to read it from its first message."""
    namespace, group = name("n"), name("g")
    assert queen.pop(namespace=namespace, consumer_group=group) == []
    queue = make_queue(namespace=namespace, retention_enabled=True, completed_retention_seconds=10)
    put(queen, queue, 1)
    drain(queen, queue, "quick")
    pass_time(sql, queue, 11)
    assert deleted(queen, queue) == {}
    assert payloads(drain(queen, None, group, namespace=namespace)) == [1]


def test_settled_ahead_of_the_cursor_is_no_prefix(
    queen: QueenClient, sql: Sql, make_queue: MakeQueue
) -> None:
    queue = make_queue(retention_enabled=True, completed_retention_seconds=10)
    put(queen, queue, *range(5))
    messages = queen.pop(queue)
    queen.settle(completed=[messages[0], messages[2], messages[4]], released=[messages[1], messages[3]])
    pass_time(sql, queue, 11)
    assert deleted(queen, queue) == {"completed": 1}
    assert stored(queen, queue) == [1, 2, 3, 4]
    assert payloads(drain(queen, queue)) == [1, 3]
    assert deleted(queen, queue) == {"completed": 4}


@pytest.mark.parametrize("age", ["retention_seconds", "completed_retention_seconds"])
def test_what_a_live_lease_holds_stays(queen: QueenClient, sql: Sql, make_queue: MakeQueue, age: str) -> None:
    queue = make_queue(retention_enabled=True, **{age: 10})
    put(queen, queue, 1, 2, 3)
    queen.ack(queen.pop(queue, batch_size=1))
    held = queen.pop(queue, batch_size=1, lease_seconds=1000)
    pass_time(sql, queue, 11)
    assert sum(deleted(queen, queue).values()) == 1
    assert stored(queen, queue) == [2, 3]
    queen.nack(held)
    assert payloads(queen.pop(queue, lease_seconds=1000)) == [2, 3]


def test_a_lease_that_ran_out_holds_nothing(queen: QueenClient, sql: Sql, make_queue: MakeQueue) -> None:
    queue = make_queue(retention_enabled=True, retention_seconds=10, retry_limit=5)
    put(queen, queue, 1, 2)
    queen.nack(queen.pop(queue))
    held = queen.pop(queue)
    pass_time(sql, queue, 11)
    put(queen, queue, 3)
    expire_leases(sql, queue)
    assert deleted(queen, queue) == {"retention": 2}
    assert pending(sql, queue) == 1
    assert payloads(drain(queen, queue)) == [3]
    with pytest.raises(Exception, match="lease"):
        queen.ack(held)


def test_the_late_holder_may_still_settle(queen: QueenClient, sql: Sql, make_queue: MakeQueue) -> None:
    queue = make_queue(retention_enabled=True, retention_seconds=10)
    put(queen, queue, 1, 2)
    held = queen.pop(queue)
    pass_time(sql, queue, 11)
    expire_leases(sql, queue)
    assert deleted(queen, queue) == {"retention": 2}
    put(queen, queue, 3)
    assert queen.settle(completed=held[0], failed=held[1]).completed == 1
    assert payloads(drain(queen, queue)) == [3]
    assert pending(sql, queue) == 0


def test_a_prefix_of_each_partition(queen: QueenClient, sql: Sql, make_queue: MakeQueue) -> None:
    queue = make_queue(retention_enabled=True, retention_seconds=100)
    put(queen, queue, "a1", partition="a")
    put(queen, queue, "b1", "b2", partition="b")
    pass_time(sql, queue, 101)
    put(queen, queue, "a2", partition="a")
    put(queen, queue, "a3", partition="a", priority=4)
    assert deleted(queen, queue) == {"retention": 3}
    assert sorted(stored(queen, queue)) == ["a2", "a3"]
    assert [r.seq for r in put(queen, queue, "b3", partition="b")] == [3], (
        "seqs go on after an empty partition"
    )
    assert sorted(payloads(drain(queen, queue))) == ["a2", "a3", "b3"]


def test_a_lagging_group_goes_on_after_the_gap(queen: QueenClient, sql: Sql, make_queue: MakeQueue) -> None:
    queue = make_queue(retention_enabled=True, retention_seconds=100)
    put(queen, queue, *range(5))
    queen.ack(queen.pop(queue, batch_size=1))
    pass_time(sql, queue, 101)
    put(queen, queue, 5, 6)
    assert deleted(queen, queue) == {"retention": 5}
    assert pending(sql, queue) == 2
    assert [m.seq for m in drain(queen, queue)] == [6, 7]


def test_dead_letters_survive_with_their_payload(queen: QueenClient, sql: Sql, make_queue: MakeQueue) -> None:
    queue = make_queue(retention_enabled=True, retention_seconds=100)
    put(queen, queue, {"evidence": 1})
    queen.reject(queen.pop(queue), error="why")
    pass_time(sql, queue, 101)
    assert deleted(queen, queue) == {"retention": 1}
    (letter,) = queen.dead_letters(queue)
    assert (letter.payload, letter.error_message) == ({"evidence": 1}, "why")
    queen.requeue_dead_letters(queue)
    assert payloads(drain(queen, queue)) == [{"evidence": 1}]


def test_in_steps_of_a_limit_with_a_history(queen: QueenClient, sql: Sql, make_queue: MakeQueue) -> None:
    queue = make_queue(retention_enabled=True, retention_seconds=100)
    put(queen, queue, *range(10))
    pass_time(sql, queue, 101)
    steps = []
    while step := deleted(queen, queue, limit=4):
        steps.append(step)
        pending(sql, queue)
    assert steps == [{"retention": 4}, {"retention": 4}, {"retention": 2}]
    history = sql.execute(
        "SELECT partition_name, retention_type, messages_deleted, first_seq, last_seq"
        " FROM queen.retention_history WHERE queue_name = %s ORDER BY id",
        [queue],
    ).fetchall()
    assert history == [
        ("Default", "retention", 4, 1, 4),
        ("Default", "retention", 4, 5, 8),
        ("Default", "retention", 2, 9, 10),
    ]
