"""Every queue option is enforced."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from airflow_provider_queen.client import QueenClient
from airflow_provider_queen.exceptions import EncryptionError, InvalidOptionError, QueueFullError
from tests.engine.conftest import MakeQueue
from tests.engine.support import Sql, drain, eventually, expire_leases, pass_time, payloads, pending, put

pytestmark = pytest.mark.postgres


class TestConfigure:
    def test_the_defaults_are_the_contracts(self, queen: QueenClient, name: Callable[[str], str]) -> None:
        queue = queen.configure_queue(name("q"))
        assert (queue.namespace, queue.task, queue.priority) == (None, None, 0)
        assert (queue.lease_time, queue.retry_limit, queue.retry_delay) == (300, 3, 1000)
        assert queue.dlq_after_max_retries is True
        assert (queue.delayed_processing, queue.window_buffer, queue.max_wait_time_seconds) == (0, 0, 0)
        assert queue.max_queue_size == 0
        assert (queue.retention_enabled, queue.retention_seconds, queue.completed_retention_seconds) == (
            False,
            0,
            0,
        )
        assert queue.encryption_enabled is False

    def test_what_is_not_named_stays(self, queen: QueenClient, name: Callable[[str], str]) -> None:
        queue = name("q")
        before = queen.configure_queue(queue, lease_time=7, namespace="n", dlq_after_max_retries=False)
        after = queen.configure_queue(queue, retry_limit=9)
        assert (after.lease_time, after.namespace, after.dlq_after_max_retries, after.retry_limit) == (
            7,
            "n",
            False,
            9,
        )
        assert after.created_at == before.created_at
        assert queen.configure_queue(queue) == after

    def test_null_takes_a_namespace_away(self, queen: QueenClient, name: Callable[[str], str]) -> None:
        queue = name("q")
        queen.configure_queue(queue, namespace="n")
        assert queen.configure_queue(queue, namespace=None).namespace is None

    def test_an_unknown_option_names_the_nearest(self, sql: Sql, queue: str) -> None:
        with pytest.raises(Exception, match="lease_time") as caught:
            sql.execute("SELECT queen.configure_queue(%s, '{\"leasetime\": 3}')", [queue])
        assert caught.value.sqlstate == "QN004"  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("lease_time", 0),
            ("retry_limit", -1),
            ("retry_delay", -1),
            ("delayed_processing", -1),
            ("window_buffer", -1),
            ("max_wait_time_seconds", -1),
            ("max_queue_size", -1),
            ("max_message_bytes", 0),
            ("retention_seconds", -1),
            ("completed_retention_seconds", -1),
            ("namespace", ""),
            ("task", "x" * 256),
        ],
    )
    def test_an_impossible_value_changes_nothing(self, sql: Sql, queue: str, option: str, value: Any) -> None:
        """By SQL: the client refuses most of these before."""
        before = sql.execute("SELECT q::text FROM queen.queues AS q WHERE name = %s", [queue]).fetchone()
        with pytest.raises(Exception) as caught:  # noqa: PT011
            sql.execute(
                "SELECT queen.configure_queue(%s, %s)", [queue, Jsonb({"priority": 5, option: value})]
            )
        assert caught.value.sqlstate == "QN004"  # type: ignore[attr-defined]
        after = sql.execute("SELECT q::text FROM queen.queues AS q WHERE name = %s", [queue]).fetchone()
        assert after == before


class TestLeaseTime:
    def test_is_how_long_a_pop_holds(self, queen: QueenClient, make_queue: MakeQueue) -> None:
        queue = make_queue(lease_time=77)
        put(queen, queue, 1)
        (message,) = queen.pop(queue)
        assert message.lease_expires_at is not None
        held = message.lease_expires_at - dt.datetime.now(dt.UTC)
        assert dt.timedelta(seconds=70) < held <= dt.timedelta(seconds=77)
        queen.release(message)
        (message,) = queen.pop(queue, lease_seconds=1000)
        assert message.lease_expires_at is not None
        assert message.lease_expires_at - dt.datetime.now(dt.UTC) > dt.timedelta(seconds=900)

    def test_runs_out_by_itself(self, queen: QueenClient, queue: str) -> None:
        """The one test that waits for a real lease: nothing has to reclaim it."""
        put(queen, queue, 1)
        (first,) = queen.pop(queue, lease_seconds=1)
        assert queen.pop(queue) == []
        (again,) = queen.pop(queue, wait_seconds=10)
        assert (again.attempt, again.lease_id != first.lease_id) == (2, True)

    def test_is_extended_by_renew(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        put(queen, queue, 1)
        (message,) = queen.pop(queue, lease_seconds=1)
        (lease,) = queen.renew(message, seconds=500)
        assert queen.pop(queue) == []
        pass_time(sql, queue, 400)
        assert queen.pop(queue) == []
        pass_time(sql, queue, 101)
        assert payloads(queen.pop(queue)) == [1]
        assert lease.lease_id == message.lease_id

    def test_may_be_renewed_to_a_shorter_time(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        """Also where somebody has run into the lease already and knows its old end."""
        put(queen, queue, 1)
        held = queen.pop(queue, lease_seconds=1000)
        assert queen.pop(queue) == []
        (lease,) = queen.renew(held, seconds=100)
        assert lease.lease_expires_at < dt.datetime.now(dt.UTC) + dt.timedelta(seconds=101)
        pass_time(sql, queue, 101)
        assert payloads(queen.pop(queue)) == [1]


class TestRetries:
    def test_the_delay_doubles_per_attempt_up_to_five_minutes(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(retry_limit=50, retry_delay=20_000)
        put(queen, queue, 1)
        waits = []
        for _ in range(7):
            (message,) = queen.pop(queue)
            queen.nack(message)
            assert queen.pop(queue) == []
            row = sql.execute(
                "SELECT extract(epoch FROM p.retry_at - clock_timestamp())::float8"
                " FROM queen.partition_consumers AS p WHERE p.queue_name = %s",
                [queue],
            ).fetchone()
            assert row is not None
            waits.append(round(row[0] / 20) * 20)
            pass_time(sql, queue, row[0] - 1)
            assert queen.pop(queue) == []
            pass_time(sql, queue, 1.1)
        assert waits == [20, 40, 80, 160, 300, 300, 300]

    def test_the_delay_is_that_of_the_messages_that_come_again(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        """Not that of one in the same call that has used up its retries."""
        queue = make_queue(retry_limit=3, retry_delay=10_000)
        put(queen, queue, "often", "once")
        for _ in range(3):
            queen.nack(queen.pop(queue, batch_size=1))
            pass_time(sql, queue, 50)
        result = queen.nack(queen.pop(queue))
        assert (result.dead_lettered, result.retried) == (1, 1)
        pass_time(sql, queue, 9)
        assert queen.pop(queue) == []
        pass_time(sql, queue, 2)
        assert payloads(queen.pop(queue)) == ["once"]

    def test_no_overflow_after_many_attempts(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(retry_limit=1_000_000, retry_delay=2_000_000_000)
        put(queen, queue, 1)
        queen.nack(queen.pop(queue))
        sql.execute(
            "UPDATE queen.redeliveries AS r SET failures = 5000 FROM queen.partition_consumers AS p"
            " WHERE p.id = r.consumer_id AND p.queue_name = %s",
            [queue],
        )
        pass_time(sql, queue, 301)
        (message,) = queen.pop(queue)
        assert message.attempt == 5001
        queen.nack(message)
        pass_time(sql, queue, 301)
        assert len(queen.pop(queue)) == 1

    def test_a_crash_is_redelivered_at_once(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(retry_delay=60_000)
        put(queen, queue, 1)
        queen.pop(queue)
        expire_leases(sql, queue)
        assert [m.attempt for m in queen.pop(queue)] == [2]

    def test_dropped_messages_are_counted(self, queen: QueenClient, sql: Sql, make_queue: MakeQueue) -> None:
        queue = make_queue(retry_limit=1, dlq_after_max_retries=False)
        put(queen, queue, "fails", "dies", "rejected", "good")
        for message in queen.pop(queue, batch_size=1):
            queen.nack(message)
        (message,) = queen.pop(queue, batch_size=1)
        assert queen.nack(message).dropped == 1
        for _ in range(2):
            queen.pop(queue, batch_size=1)
            expire_leases(sql, queue)
        messages = queen.pop(queue)
        assert payloads(messages) == ["rejected", "good"]
        assert queen.settle(rejected=messages[0], completed=messages[1]).dead_lettered == 1
        assert payloads(queen.dead_letters(queue)) == ["rejected"]
        assert sum(row.total_dropped for row in queen.stats(queue)) == 2
        assert pending(sql, queue) == 0

    def test_released_does_not_count(self, queen: QueenClient, make_queue: MakeQueue) -> None:
        queue = make_queue(retry_limit=0)
        put(queen, queue, 1)
        for _ in range(5):
            (message,) = queen.pop(queue)
            assert message.attempt == 1
            queen.release(message)
        assert queen.depth(queue).dead_letters == 0


class TestDelayedProcessing:
    def test_nothing_is_delivered_before_its_time(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(delayed_processing=100)
        put(queen, queue, 1)
        assert queen.pop(queue) == []
        pass_time(sql, queue, 60)
        put(queen, queue, 2)
        assert queen.pop(queue) == []
        assert pending(sql, queue) == 2
        pass_time(sql, queue, 41)
        assert payloads(drain(queen, queue)) == [1], "the second one is not due"
        pass_time(sql, queue, 60)
        assert payloads(drain(queen, queue)) == [2]

    def test_a_woken_lane_waits_too(self, queen: QueenClient, sql: Sql, make_queue: MakeQueue) -> None:
        queue = make_queue(delayed_processing=100)
        put(queen, queue, 1)
        pass_time(sql, queue, 101)
        assert payloads(drain(queen, queue)) == [1]
        put(queen, queue, 2)
        assert queen.pop(queue) == []
        pass_time(sql, queue, 101)
        assert payloads(drain(queen, queue)) == [2]

    def test_a_shorter_delay_holds_at_once(self, queen: QueenClient, make_queue: MakeQueue) -> None:
        queue = make_queue(delayed_processing=1000)
        put(queen, queue, 1)
        assert queen.pop(queue) == []
        queen.configure_queue(queue, delayed_processing=0)
        assert payloads(queen.pop(queue)) == [1]

    def test_another_delay_cuts_no_backoff_short(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(retry_delay=100_000)
        put(queen, queue, 1)
        queen.nack(queen.pop(queue))
        queen.configure_queue(queue, delayed_processing=1)
        queen.configure_queue(queue, delayed_processing=0)
        assert queen.pop(queue) == []
        pass_time(sql, queue, 101)
        assert payloads(queen.pop(queue)) == [1]

    def test_a_waiting_consumer_gets_it_when_it_is_due(
        self, queen: QueenClient, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(delayed_processing=1)
        (pushed,) = put(queen, queue, 1)
        (message,) = queen.pop(queue, wait_seconds=10)
        assert message.id == pushed.message_id
        assert dt.datetime.now(dt.UTC) - message.created_at >= dt.timedelta(seconds=1)


class TestWindowBuffer:
    def test_a_partition_is_poppable_once_it_was_quiet(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(window_buffer=100)
        put(queen, queue, 1, partition="busy")
        put(queen, queue, "q", partition="quiet")
        for n in (2, 3):
            pass_time(sql, queue, 60)
            assert payloads(drain(queen, queue)) == (["q"] if n == 3 else [])
            put(queen, queue, n, partition="busy")
        pass_time(sql, queue, 99)
        assert queen.pop(queue) == []
        pass_time(sql, queue, 2)
        assert payloads(queen.pop(queue)) == [1, 2, 3], "all of it together"

    def test_a_removed_window_holds_at_once(self, queen: QueenClient, make_queue: MakeQueue) -> None:
        queue = make_queue(window_buffer=1000)
        put(queen, queue, 1)
        assert queen.pop(queue) == []
        queen.configure_queue(queue, window_buffer=0)
        assert payloads(queen.pop(queue)) == [1]


class TestMaxWaitTime:
    @pytest.mark.parametrize("by", ["pop", "evict"])
    def test_older_is_evicted_to_the_dead_letters(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue, by: str
    ) -> None:
        queue = make_queue(max_wait_time_seconds=100)
        queen.pop(queue)
        put(queen, queue, "old", "older")
        pass_time(sql, queue, 101)
        put(queen, queue, "new")
        if by == "evict":
            assert [(e.queue_name, e.consumer_group, e.evicted) for e in queen.evict(queue)] == [
                (queue, None, 2)
            ]
            assert queen.evict(queue) == []
        assert payloads(queen.pop(queue)) == ["new"]
        letters = queen.dead_letters(queue)
        assert [(d.payload, d.reason) for d in letters] == [("older", "evicted"), ("old", "evicted")]
        assert pending(sql, queue) == 1

    def test_once_per_group_that_has_it_pending(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(max_wait_time_seconds=100)
        put(queen, queue, 1)
        drain(queen, queue, "quick")
        queen.release(queen.pop(queue, consumer_group="slow"))
        queen.release(queen.pop(queue, consumer_group="slower"))
        pass_time(sql, queue, 101)
        for _ in range(2):
            queen.evict(queue)
            assert sorted(d.consumer_group or "" for d in queen.dead_letters(queue)) == ["slow", "slower"]

    def test_a_live_lease_is_left_to_its_holder(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(max_wait_time_seconds=100)
        put(queen, queue, 1, 2)
        messages = queen.pop(queue, lease_seconds=1000)
        pass_time(sql, queue, 101)
        assert queen.evict(queue) == []
        assert queen.settle(completed=messages[0], released=messages[1]).completed == 1
        assert queen.pop(queue) == []
        assert payloads(queen.dead_letters(queue)) == [2]

    def test_a_redelivery_that_comes_too_late_is_evicted_too(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(max_wait_time_seconds=100, retry_limit=10)
        put(queen, queue, 1)
        queen.nack(queen.pop(queue))
        pass_time(sql, queue, 101)
        assert queen.pop(queue) == []
        assert [d.reason for d in queen.dead_letters(queue)] == ["evicted"]

    def test_partitions_that_the_group_has_not_met_are_evicted_as_well(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(max_wait_time_seconds=100)
        queen.pop(queue, consumer_group="g")
        put(queen, queue, 1, partition="new")
        pass_time(sql, queue, 101)
        assert [e.evicted for e in queen.evict(queue)] == [1]
        assert pending(sql, queue, "g") == 0

    def test_in_steps_of_a_limit(self, queen: QueenClient, sql: Sql, make_queue: MakeQueue) -> None:
        queue = make_queue(max_wait_time_seconds=100)
        queen.pop(queue)
        put(queen, queue, *range(10))
        pass_time(sql, queue, 101)
        counts = []
        while evicted := queen.evict(queue, limit=4):
            counts.append(evicted[0].evicted)
        assert counts == [4, 4, 2]


class TestMaxQueueSize:
    def test_over_it_nothing_is_stored(self, queen: QueenClient, sql: Sql, make_queue: MakeQueue) -> None:
        queue = make_queue(max_queue_size=3)
        put(queen, queue, 1, 2)
        with pytest.raises(QueueFullError, match="3"):
            put(queen, queue, 3, 4)
        assert pending(sql, queue) == 2
        put(queen, queue, 3)
        queen.push(queue, [])

    def test_duplicates_need_no_room(self, queen: QueenClient, make_queue: MakeQueue) -> None:
        queue = make_queue(max_queue_size=1)
        message = {"payload": 1, "transaction_id": "t"}
        queen.push(queue, [message])
        assert [r.status for r in queen.push(queue, [message, message])] == ["duplicate", "duplicate"]

    def test_counts_what_the_slowest_group_has_not_settled(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(max_queue_size=3)
        put(queen, queue, 1, 2, 3)
        drain(queen, queue, "quick")
        put(queen, queue, 4)
        (first, *_) = queen.pop(queue, consumer_group="slow")
        with pytest.raises(QueueFullError):
            put(queen, queue, 5)
        queen.ack(first)
        with pytest.raises(QueueFullError):
            put(queen, queue, 5)
        drain(queen, queue, "quick")
        queen.delete_consumer_group("slow", queue)
        put(queen, queue, 5, 6, 7)
        with pytest.raises(QueueFullError):
            put(queen, queue, 8)

    def test_counts_every_retained_message_where_no_group_exists(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(max_queue_size=2, retention_enabled=True, retention_seconds=10)
        put(queen, queue, 1, 2)
        with pytest.raises(QueueFullError):
            put(queen, queue, 3)
        pass_time(sql, queue, 11)
        queen.retain(queue)
        put(queen, queue, 3, 4)

    def test_over_all_partitions_and_lanes(self, queen: QueenClient, make_queue: MakeQueue) -> None:
        queue = make_queue(max_queue_size=3)
        put(queen, queue, 1, partition="a")
        put(queen, queue, 1, partition="b", priority=9)
        put(queen, queue, 1, partition="b")
        with pytest.raises(QueueFullError):
            put(queen, queue, 1, partition="c")
        assert queen.list_messages(queue, partition="c") == []

    def test_dead_letters_make_room_and_need_it_again(
        self, queen: QueenClient, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(max_queue_size=1)
        put(queen, queue, "dead")
        queen.reject(queen.pop(queue))
        put(queen, queue, "alive")
        with pytest.raises(QueueFullError):
            queen.requeue_dead_letters(queue)
        drain(queen, queue)
        assert len(queen.requeue_dead_letters(queue)) == 1

    def test_a_group_of_the_whole_namespace_counts_too(
        self, queen: QueenClient, make_queue: MakeQueue, name: Callable[[str], str]
    ) -> None:
        """It exists for every queue of its namespace, popped or not."""
        namespace = name("n")
        assert queen.pop(namespace=namespace, consumer_group="wide") == []
        queue = make_queue(namespace=namespace, max_queue_size=2)
        put(queen, queue, 1, 2)
        drain(queen, queue, "narrow")
        with pytest.raises(QueueFullError):
            put(queen, queue, 3)


class TestMessageSize:
    def test_a_larger_payload_is_refused(self, queen: QueenClient, sql: Sql, make_queue: MakeQueue) -> None:
        queue = make_queue(max_message_bytes=100)
        put(queen, queue, "x" * 98)
        with pytest.raises(InvalidOptionError, match="100"):
            put(queen, queue, "ok", "x" * 99)
        with pytest.raises(InvalidOptionError, match="100"):
            put(queen, queue, "ä" * 50)
        assert pending(sql, queue) == 1


class TestPriorities:
    def test_of_messages_higher_first_within_a_queue(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        for priority in (0, 9, 4):
            put(queen, queue, f"{priority}a", f"{priority}b", partition="p", priority=priority)
        put(queen, queue, "9c", partition="q", priority=9)
        delivered = drain(queen, queue, batch_size=1)
        assert [m.priority for m in delivered] == [9, 9, 9, 4, 4, 0, 0]
        for priority in (0, 4, 9):
            lane = [(m.seq, m.payload) for m in delivered if (m.partition, m.priority) == ("p", priority)]
            assert lane == [(1, f"{priority}a"), (2, f"{priority}b")]
        assert pending(sql, queue) == 0

    def test_also_when_the_lease_of_the_higher_one_has_run_out(
        self, queen: QueenClient, sql: Sql, queue: str
    ) -> None:
        for priority in (9, 5, 0):
            put(queen, queue, priority, priority=priority)
        assert payloads(queen.pop(queue, batch_size=1, auto_ack=True)) == [9]
        assert payloads(queen.pop(queue, batch_size=1)) == [5]
        expire_leases(sql, queue)
        again = queen.pop(queue, batch_size=1, max_partitions=3)
        assert [(m.payload, m.attempt) for m in again] == [(5, 2)]

    def test_a_partition_too(self, queen: QueenClient, queue: str) -> None:
        put(queen, queue, "low", partition="p")
        put(queen, queue, "high", partition="p", priority=1)
        assert payloads(drain(queen, queue, partition="p", batch_size=1)) == ["high", "low"]

    def test_lanes_have_leases_of_their_own(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        put(queen, queue, "low", partition="p")
        put(queen, queue, "high", partition="p", priority=1)
        (high,) = queen.pop(queue)
        (low,) = queen.pop(queue)
        assert (high.payload, low.payload) == ("high", "low")
        assert high.lease_id != low.lease_id
        queen.nack(high)
        assert queen.ack(low).completed == 1
        assert pending(sql, queue) == 1

    def test_of_queues_when_a_pop_spans_them(
        self, queen: QueenClient, make_queue: MakeQueue, name: Callable[[str], str]
    ) -> None:
        namespace = name("n")
        queues = {p: make_queue(namespace=namespace, priority=p) for p in (1, 10, -5)}
        for priority, queue in queues.items():
            put(queen, queue, priority, priority)
            put(queen, queue, priority, partition="urgent", priority=5)
        delivered = drain(queen, None, "g", namespace=namespace, batch_size=1)
        assert payloads(delivered) == [10] * 3 + [1] * 3 + [-5] * 3
        assert [m.priority for m in delivered] == [5, 0, 0] * 3

    def test_a_busy_partition_does_not_starve_the_others(self, queen: QueenClient, queue: str) -> None:
        for partition in "abc":
            put(queen, queue, *range(10), partition=partition)
        first = []
        for _ in range(6):
            messages = queen.pop(queue, batch_size=1)
            first.append(messages[0].partition)
            queen.ack(messages)
        assert {first.count(p) for p in "abc"} == {2}


class TestEncryption:
    def test_the_engine_takes_only_what_fits_the_queue(self, sql: Sql, make_queue: MakeQueue) -> None:
        for queue, wrong in ((make_queue(encryption_enabled=True), False), (make_queue(), True)):
            with pytest.raises(Exception) as caught:  # noqa: PT011
                sql.execute("SELECT * FROM queen.push(%s, ARRAY['1'], is_encrypted => %s)", [queue, wrong])
            assert caught.value.sqlstate == "QN005"  # type: ignore[attr-defined]
            assert pending(sql, queue) == 0

    def test_the_client_refuses_without_a_key(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(encryption_enabled=True)
        with pytest.raises(EncryptionError):
            put(queen, queue, 1)
        assert pending(sql, queue) == 0


class TestPopArguments:
    def test_batch_and_partitions_bound_a_pop(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        for partition in "abcd":
            put(queen, queue, *range(5), partition=partition)
        messages = queen.pop(queue, batch_size=12, max_partitions=3)
        assert len(messages) == 12
        assert len({m.partition for m in messages}) == 3
        assert len({m.lease_id for m in messages}) == 3
        for partition in {m.partition for m in messages}:
            seqs = [m.seq for m in messages if m.partition == partition]
            assert seqs == list(range(1, len(seqs) + 1))
        queen.ack(messages)
        assert pending(sql, queue) == 8

    def test_auto_ack_settles_at_once(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        put(queen, queue, 1, 2)
        messages = queen.pop(queue, auto_ack=True)
        assert [m.lease_id for m in messages] == [None, None]
        assert pending(sql, queue) == 0
        row = sql.execute(
            "SELECT completed, attempt FROM queen.deliveries WHERE queue_name = %s", [queue]
        ).fetchall()
        assert row == [(2, 1)]

    def test_auto_ack_knows_the_attempt(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        put(queen, queue, 1, 2)
        queen.nack(queen.pop(queue, batch_size=1))
        messages = queen.pop(queue, auto_ack=True)
        assert [(m.payload, m.attempt) for m in messages] == [(1, 2), (2, 1)]

    def test_a_waiting_consumer_is_woken_by_a_push(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        put(queen, queue, 0)
        drain(queen, queue)
        drain(queen, queue)
        for n in range(3):
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(queen.pop, queue, wait_seconds=20)
                eventually(
                    lambda: sql.execute(
                        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle'"
                        " AND (query LIKE '%next_ready_at%')"
                    ).fetchone()
                )
                put(queen, queue, n)
                messages = waiting.result(4)  # below the client's polling interval of 5 s
            assert payloads(messages) == [n]
            queen.ack(messages)


class TestDeliveries:
    def test_one_row_per_lease_that_ended(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        put(queen, queue, *range(6), partition="p")
        messages = queen.pop(queue, consumer_group="g", batch_size=4)
        queen.ack(messages[0])
        rows = (
            "SELECT partition_name, consumer_group, first_seq, last_seq, completed, failed, rejected,"
            " released, expired, attempt FROM queen.deliveries WHERE queue_name = %s ORDER BY id"
        )
        assert sql.execute(rows, [queue]).fetchall() == []
        queen.settle(failed=messages[1], rejected=messages[2], released=messages[3])
        queen.pop(queue, consumer_group="g")
        expire_leases(sql, queue)
        queen.pop(queue, consumer_group="g", batch_size=1)
        assert sql.execute(rows, [queue]).fetchall() == [
            ("p", "g", 1, 4, 1, 1, 1, 1, 0, 1),
            ("p", "g", 2, 6, 0, 0, 0, 0, 4, 2),
        ]
        times = sql.execute(
            "SELECT bool_and(popped_at <= ended_at) FROM queen.deliveries WHERE queue_name = %s", [queue]
        ).fetchone()
        assert times == (True,)
