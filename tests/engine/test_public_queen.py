"""Bugs of the public Queen 0.15, found by running it: one test each, named after it."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from airflow_provider_queen.client import QueenClient
from airflow_provider_queen.exceptions import LeaseLostError
from tests.engine.conftest import MakeQueue
from tests.engine.support import Sql, drain, expire_leases, pass_time, payloads, pending, put

pytestmark = pytest.mark.postgres


def test_a_failed_before_a_completed_in_one_batch_loses_the_failed_one(
    queen: QueenClient, sql: Sql, queue: str
) -> None:
    put(queen, queue, "fails", "completes")
    first, second = queen.pop(queue)
    result = queen.settle(failed=first, completed=second)
    assert (result.retried, result.completed) == (1, 1)
    assert pending(sql, queue) == 1
    assert payloads(drain(queen, queue)) == ["fails"]


def test_an_ack_moves_the_cursor_backwards(queen: QueenClient, sql: Sql, queue: str) -> None:
    put(queen, queue, *range(4))
    old = queen.pop(queue, batch_size=2)
    expire_leases(sql, queue)
    for _ in range(2):
        queen.ack(queen.pop(queue, batch_size=1))
    newer = queen.pop(queue, batch_size=2)
    queen.ack(newer)
    with pytest.raises(LeaseLostError):
        queen.ack(old)
    cursor = "SELECT cursor FROM queen.partition_consumers WHERE queue_name = %s"
    assert sql.execute(cursor, [queue]).fetchall() == [(4,)]
    assert queen.pop(queue) == []


def test_a_new_partition_stays_invisible_to_a_wildcard_pop_if_a_later_call_is_lost(
    queen: QueenClient, sql: Sql, make_queue: MakeQueue, engine_dsn: str, name: Callable[[str], str]
) -> None:
    namespace = name("n")
    queue = make_queue(namespace=namespace)
    put(queen, queue, 0)
    drain(queen, None, "g", namespace=namespace)
    # The producer pushes and is gone at once: there is no later call.
    with psycopg.connect(engine_dsn, autocommit=True) as producer:
        producer.execute("SELECT * FROM queen.push(%s, ARRAY['1'], ARRAY['new'])", [queue])
        sql.execute("SELECT pg_terminate_backend(%s)", [producer.info.backend_pid])
    assert payloads(drain(queen, None, "g", namespace=namespace)) == [1]


def test_a_delayed_message_in_one_partition_starves_due_messages_in_others(
    queen: QueenClient, sql: Sql, make_queue: MakeQueue
) -> None:
    queue = make_queue(delayed_processing=100)
    queen.pop(queue)
    put(queen, queue, "due", partition="b")
    pass_time(sql, queue, 101)
    for n in range(20):
        put(queen, queue, "delayed", partition=f"a{n}")
    assert payloads(queen.pop(queue)) == ["due"]
    assert queen.pop(queue) == []


def test_a_message_that_waits_for_its_retry_starves_messages_in_other_partitions(
    queen: QueenClient, make_queue: MakeQueue
) -> None:
    queue = make_queue(retry_delay=100_000)
    put(queen, queue, "fails", partition="a")
    queen.nack(queen.pop(queue))
    put(queen, queue, "due", partition="b")
    assert payloads(queen.pop(queue)) == ["due"]


def test_seeking_a_new_group_to_before_its_subscription_replays_nothing(
    queen: QueenClient, sql: Sql, queue: str
) -> None:
    put(queen, queue, 1, 2)
    put(queen, queue, 3, partition="p")
    assert queen.pop(queue, consumer_group="g", subscription_mode="new") == []
    queen.seek(queue, "g", to="beginning")
    assert pending(sql, queue, "g") == 3
    assert sorted(payloads(drain(queen, queue, "g", subscription_mode="new"))) == [1, 2, 3]


def test_retention_deletes_dead_letters_by_cascade(
    queen: QueenClient, sql: Sql, make_queue: MakeQueue
) -> None:
    queue = make_queue(
        retention_enabled=True, retention_seconds=100, completed_retention_seconds=50, retry_limit=0
    )
    put(queen, queue, "evidence")
    queen.nack(queen.pop(queue), error="why")
    pass_time(sql, queue, 101)
    assert sum(row.deleted for row in queen.retain(queue)) == 1
    assert queen.list_messages(queue) == []
    assert payloads(queen.dead_letters(queue)) == ["evidence"]


def test_deleting_a_queue_leaves_its_subscriptions_behind(
    queen: QueenClient, sql: Sql, make_queue: MakeQueue
) -> None:
    queue = make_queue()
    put(queen, queue, 1, partition="p")
    queen.pop(queue, consumer_group="g", subscription_mode="new")
    queen.pop(queue, partition="p", consumer_group="h", subscription_mode="new")
    assert queen.delete_queue(queue) is True
    left = sql.execute(
        "SELECT count(*) FROM queen.consumer_groups_metadata WHERE queue_name = %s", [queue]
    ).fetchone()
    assert left == (0,)
    queen.configure_queue(queue)
    put(queen, queue, 2, partition="p")
    for group in ("g", "h"):
        assert payloads(drain(queen, queue, group, subscription_mode="all")) == [2]
    assert queen.delete_queue(queue) is True
    assert queen.delete_queue(queue) is False


def test_inside_a_transaction_a_failed_goes_straight_to_the_dead_letters(
    queen: QueenClient, sql: Sql, queue: str
) -> None:
    put(queen, queue, 1)
    messages = queen.pop(queue)
    with queen.transaction() as tx:
        assert tx.nack(messages, error="why").retried == 1
    assert queen.dead_letters(queue) == []
    assert [m.attempt for m in queen.pop(queue)] == [2]


def test_inside_a_transaction_a_duplicate_aborts_everything(
    queen: QueenClient, sql: Sql, make_queue: MakeQueue
) -> None:
    source, target = make_queue(), make_queue()
    put(queen, source, 1)
    (first,) = queen.push(target, [{"payload": 1, "transaction_id": "t"}])
    messages = queen.pop(source)
    with queen.transaction() as tx:
        tx.ack(messages)
        duplicate, new = tx.push(
            target, [{"payload": 1, "transaction_id": "t"}, {"payload": 2, "transaction_id": "u"}]
        )
    assert (duplicate.status, duplicate.message_id) == ("duplicate", first.message_id)
    assert new.status == "queued"
    assert (pending(sql, source), pending(sql, target)) == (0, 2)


def test_a_consumer_that_crashes_never_uses_up_a_retry(
    queen: QueenClient, sql: Sql, make_queue: MakeQueue
) -> None:
    queue = make_queue(retry_limit=2)
    put(queen, queue, "poison")
    attempts = []
    while messages := queen.pop(queue):
        attempts.append(messages[0].attempt)
        assert len(attempts) < 10, "it never ends"
        expire_leases(sql, queue)
    assert attempts == [1, 2, 3]
    assert [(d.payload, d.reason) for d in queen.dead_letters(queue)] == [("poison", "expired")]


def test_a_cursor_on_time_loses_what_commits_late(queen: QueenClient, queue: str) -> None:
    """2,200 of 69,360 messages with 8 producers on 1 partition; in full in test_load.py."""
    put(queen, queue, "first")
    with queen.transaction() as tx:
        put(tx, queue, "late", partition="p")
        put(queen, queue, "early")
        assert payloads(drain(queen, queue)) == ["first", "early"]
    assert payloads(drain(queen, queue)) == ["late"]
