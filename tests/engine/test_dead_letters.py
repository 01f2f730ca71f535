"""Dead letters: what they keep, how they go back, how they are removed."""

from __future__ import annotations

import uuid

import pytest

from airflow_provider_queen.client import QueenClient
from airflow_provider_queen.exceptions import InvalidOptionError
from tests.engine.conftest import MakeQueue
from tests.engine.support import Sql, drain, pass_time, payloads, pending, put

pytestmark = pytest.mark.postgres


def test_they_keep_everything_of_the_message(queen: QueenClient, queue: str) -> None:
    trace = str(uuid.uuid4())
    (pushed,) = queen.push(
        queue,
        [{"payload": [1], "partition": "p", "transaction_id": "t", "trace_id": trace, "priority": 3}],
    )
    (message,) = queen.pop(queue, consumer_group="g")
    queen.reject(message, error="no good")
    (letter,) = queen.dead_letters(queue)
    assert (letter.payload, letter.partition, letter.priority, letter.seq) == ([1], "p", 3, 1)
    assert (letter.message_id, letter.transaction_id, letter.trace_id) == (pushed.message_id, "t", trace)
    assert (letter.consumer_group, letter.reason, letter.error_message) == ("g", "rejected", "no good")
    assert (letter.retry_count, letter.original_created_at) == (0, message.created_at)


def test_requeued_they_keep_payload_trace_and_a_link(queen: QueenClient, sql: Sql, queue: str) -> None:
    trace = str(uuid.uuid4())
    (pushed,) = queen.push(
        queue, [{"payload": "x", "partition": "p", "transaction_id": "t", "trace_id": trace, "priority": 2}]
    )
    queen.reject(queen.pop(queue))
    (requeued,) = queen.requeue_dead_letters(queue)
    assert pending(sql, queue) == 1
    assert queen.depth(queue).dead_letters == 0
    (message,) = queen.pop(queue)
    assert (message.id, message.seq, message.partition) == (requeued.message_id, requeued.seq, "p")
    assert (message.payload, message.trace_id, message.priority, message.attempt) == ("x", trace, 2, 1)
    newest = queen.list_messages(queue)[0]
    assert newest.requeued_from == pushed.message_id
    (letter,) = queen.dead_letters(queue, include_requeued=True)
    assert letter.requeued_message_id == message.id


def test_requeue_is_idempotent(queen: QueenClient, sql: Sql, queue: str) -> None:
    put(queen, queue, 1, 2)
    queen.reject(queen.pop(queue))
    ids = [letter.id for letter in queen.dead_letters(queue)]
    first = queen.requeue_dead_letters(queue, ids=ids)
    assert queen.requeue_dead_letters(queue, ids=ids) == first
    assert queen.requeue_dead_letters(queue) == []
    assert pending(sql, queue) == 2
    drain(queen, queue)
    assert queen.requeue_dead_letters(queue, ids=ids) == first
    assert pending(sql, queue) == 0


def test_only_the_group_that_gave_up_gets_it_again(queen: QueenClient, sql: Sql, queue: str) -> None:
    put(queen, queue, "x", "y")
    drain(queen, queue, "strong")
    slow = queen.pop(queue, consumer_group="slow", batch_size=1)
    messages = queen.pop(queue, consumer_group="weak")
    queen.settle(rejected=messages[0], completed=messages[1])
    queen.requeue_dead_letters(queue)
    assert [pending(sql, queue, group) for group in ("weak", "strong", "slow")] == [1, 0, 2]
    assert payloads(drain(queen, queue, "weak")) == ["x"]
    assert drain(queen, queue, "strong") == []
    assert queen.ack(slow).completed == 1, "its lease is untouched"
    assert payloads(drain(queen, queue, "slow")) == ["y"]


def test_a_group_that_exists_but_has_not_met_the_partition_gets_only_the_original(
    queen: QueenClient, sql: Sql, queue: str
) -> None:
    put(queen, queue, "a", partition="a")
    drain(queen, queue, "other", partition="a")
    put(queen, queue, "b", partition="b")
    queen.reject(queen.pop(queue, partition="b", consumer_group="weak"))
    queen.requeue_dead_letters(queue)
    assert payloads(drain(queen, queue, "other")) == ["b"]


def test_twice_given_up_twice_requeued(queen: QueenClient, sql: Sql, queue: str) -> None:
    put(queen, queue, "x")
    for round_ in range(3):
        queen.reject(queen.pop(queue), error=str(round_))
        assert len(queen.requeue_dead_letters(queue)) == 1
    assert payloads(drain(queen, queue)) == ["x"]
    assert len(queen.dead_letters(queue, include_requeued=True)) == 3


def test_both_groups_gave_up(queen: QueenClient, sql: Sql, queue: str) -> None:
    put(queen, queue, "x")
    for group in ("a", "b"):
        queen.reject(queen.pop(queue, consumer_group=group))
    queen.requeue_dead_letters(queue, consumer_group="a")
    assert (pending(sql, queue, "a"), pending(sql, queue, "b")) == (1, 0)
    queen.requeue_dead_letters(queue)
    assert (pending(sql, queue, "a"), pending(sql, queue, "b")) == (1, 1)
    assert payloads(drain(queen, queue, "a")) == payloads(drain(queen, queue, "b")) == ["x"]


def test_in_the_order_in_which_they_died(queen: QueenClient, queue: str) -> None:
    put(queen, queue, *range(5))
    for message in reversed(queen.pop(queue)):
        queen.reject(message)
    queen.requeue_dead_letters(queue)
    assert payloads(drain(queen, queue)) == [4, 3, 2, 1, 0]


def test_an_id_of_another_queue_is_refused_and_nothing_is_requeued(
    queen: QueenClient, sql: Sql, make_queue: MakeQueue
) -> None:
    one, two = make_queue(), make_queue()
    for queue in (one, two):
        put(queen, queue, 1)
        queen.reject(queen.pop(queue))
    ids = [queen.dead_letters(queue)[0].id for queue in (one, two)]
    with pytest.raises(InvalidOptionError, match=str(ids[1])):
        queen.requeue_dead_letters(one, ids=ids)
    assert pending(sql, one) == 0


def test_listed_in_pages_newest_first(queen: QueenClient, queue: str) -> None:
    put(queen, queue, *range(7))
    for message in queen.pop(queue):
        queen.reject(message)
    seen, after = [], None
    while page := queen.dead_letters(queue, after=after, limit=3):
        seen += payloads(page)
        after = page[-1]
    assert seen == [6, 5, 4, 3, 2, 1, 0]


def test_purged_by_id_group_or_age(queen: QueenClient, sql: Sql, queue: str) -> None:
    put(queen, queue, *range(4))
    queen.reject(queen.pop(queue, consumer_group="a"))
    queen.reject(queen.pop(queue, consumer_group="b", batch_size=1))
    newest = queen.dead_letters(queue, consumer_group="a")[0]
    assert queen.purge_dead_letters(queue, ids=[newest]) == 1
    assert queen.purge_dead_letters(queue, consumer_group="b") == 1
    assert queen.purge_dead_letters(queue, older_than_seconds=100) == 0
    sql.execute("UPDATE queen.dead_letter_queue SET failed_at = failed_at - interval '101 s' WHERE seq = 1")
    assert queen.purge_dead_letters(queue, older_than_seconds=100) == 1
    assert sorted(payloads(queen.dead_letters(queue))) == [1, 2]
    assert queen.purge_dead_letters(queue) == 2


def test_a_requeued_message_that_retention_removed_is_not_requeued_twice(
    queen: QueenClient, sql: Sql, make_queue: MakeQueue
) -> None:
    queue = make_queue(retention_enabled=True, retention_seconds=100)
    put(queen, queue, 1)
    queen.reject(queen.pop(queue))
    ids = [letter.id for letter in queen.dead_letters(queue)]
    first = queen.requeue_dead_letters(queue, ids=ids)
    drain(queen, queue)
    pass_time(sql, queue, 101)
    queen.retain(queue)
    assert queen.requeue_dead_letters(queue, ids=ids) == first
    assert pending(sql, queue) == 0
