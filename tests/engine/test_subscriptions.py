"""Where a group begins to read: modes, their records, namespaces and tasks, seek."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest

from airflow_provider_queen.client import QueenClient
from airflow_provider_queen.exceptions import LeaseLostError
from tests.engine.conftest import MakeQueue
from tests.engine.support import Sql, drain, pass_time, payloads, pending, put

pytestmark = pytest.mark.postgres

Name = Callable[[str], str]


def now(sql: Sql) -> dt.datetime:
    row = sql.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None
    moment: dt.datetime = row[0]
    return moment


def records(sql: Sql, group: str) -> list[Any]:
    return sql.execute(
        "SELECT queue_name, partition_name, namespace, task, subscription_mode"
        " FROM queen.consumer_groups_metadata WHERE consumer_group = %s ORDER BY created_at",
        [group],
    ).fetchall()


class TestModes:
    def test_all_reads_from_the_first_retained_message(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(retention_enabled=True, retention_seconds=100)
        put(queen, queue, 1)
        pass_time(sql, queue, 101)
        queen.retain(queue)
        put(queen, queue, 2, 3)
        assert payloads(drain(queen, queue, "g", subscription_mode="all")) == [2, 3]

    def test_new_reads_from_now(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        put(queen, queue, 1, 2)
        assert queen.pop(queue, consumer_group="g", subscription_mode="new") == []
        assert pending(sql, queue, "g") == 0
        put(queen, queue, 3)
        assert pending(sql, queue, "g") == 1
        assert payloads(drain(queen, queue, "g", subscription_mode="new")) == [3]

    def test_timestamp_reads_from_a_moment(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        put(queen, queue, 1)
        put(queen, queue, "p1", partition="p")
        moment = now(sql)
        put(queen, queue, 2)
        put(queen, queue, "p2", partition="p")
        delivered = drain(queen, queue, "g", subscription_mode="timestamp", subscription_from=moment)
        assert sorted(payloads(delivered), key=str) == [2, "p2"]

    def test_timestamp_in_the_future(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        put(queen, queue, 1)
        moment = now(sql) + dt.timedelta(seconds=100)
        assert (
            queen.pop(queue, consumer_group="g", subscription_mode="timestamp", subscription_from=moment)
            == []
        )

    def test_queue_mode_subscribes_too(self, queen: QueenClient, queue: str) -> None:
        put(queen, queue, 1)
        assert queen.pop(queue, subscription_mode="new") == []
        put(queen, queue, 2)
        assert payloads(drain(queen, queue)) == [2]


class TestRecords:
    def test_the_first_mode_wins(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        put(queen, queue, 1)
        queen.pop(queue, consumer_group="g", subscription_mode="new")
        for mode in ("all", "new"):
            assert queen.pop(queue, consumer_group="g", subscription_mode=mode) == []
        put(queen, queue, 2, partition="later")
        assert payloads(drain(queen, queue, "g", subscription_mode="all")) == [2]
        assert records(sql, "g")[-1][-1] == "new"
        assert len([r for r in records(sql, "g") if r[0] == queue]) == 1

    def test_until_the_group_is_deleted(self, queen: QueenClient, queue: str, name: Name) -> None:
        group = name("g")
        put(queen, queue, 1)
        queen.pop(queue, consumer_group=group, subscription_mode="new")
        assert queen.delete_consumer_group(group, queue) == 1
        assert payloads(drain(queen, queue, group, subscription_mode="all")) == [1]
        assert queen.delete_consumer_group(group) == 1
        assert queen.pop(queue, consumer_group=group, subscription_mode="new") == []

    def test_groups_are_independent(self, queen: QueenClient, queue: str) -> None:
        put(queen, queue, 1)
        queen.pop(queue, consumer_group="new", subscription_mode="new")
        put(queen, queue, 2)
        assert payloads(drain(queen, queue, "all")) == [1, 2]
        assert payloads(drain(queen, queue, "new")) == [2]

    def test_the_time_is_that_of_the_first_contact_for_every_partition(
        self, queen: QueenClient, sql: Sql, queue: str
    ) -> None:
        put(queen, queue, 1)
        queen.pop(queue, consumer_group="g", subscription_mode="new")
        before = sql.execute(
            "SELECT subscription_timestamp FROM queen.consumer_groups_metadata WHERE queue_name = %s", [queue]
        ).fetchall()
        put(queen, queue, 2, partition="p")
        drain(queen, queue, "g", subscription_mode="new")
        after = sql.execute(
            "SELECT subscription_timestamp FROM queen.consumer_groups_metadata WHERE queue_name = %s", [queue]
        ).fetchall()
        assert before == after

    def test_the_most_specific_record_wins(
        self, queen: QueenClient, make_queue: MakeQueue, name: Name
    ) -> None:
        """A partition's before the queue's before the namespace's, whichever came first."""
        namespace, group = name("n"), name("g")
        queue = make_queue(namespace=namespace)
        put(queen, queue, "a1", partition="a")
        put(queen, queue, "b1", partition="b")
        assert payloads(drain(queen, queue, group, partition="a")) == ["a1"]
        assert queen.pop(queue, consumer_group=group, subscription_mode="new") == []
        put(queen, queue, "a2", partition="a")
        put(queen, queue, "b2", partition="b")
        assert sorted(payloads(drain(queen, None, group, namespace=namespace))) == ["a2", "b2"]

    def test_a_partition_of_its_own_before_the_rest_of_the_queue(
        self, queen: QueenClient, sql: Sql, queue: str
    ) -> None:
        put(queen, queue, "a1", partition="a")
        put(queen, queue, "b1", partition="b")
        assert queen.pop(queue, partition="a", consumer_group="g", subscription_mode="new") == []
        assert payloads(drain(queen, queue, "g", subscription_mode="all")) == ["b1"]
        put(queen, queue, "a2", partition="a", priority=3)
        assert payloads(drain(queen, queue, "g")) == ["a2"], (
            "a lane that came later is read from its beginning"
        )
        assert [(r[1], r[4]) for r in records(sql, "g") if r[0] == queue] == [("a", "new"), (None, "all")]

    def test_two_partitions_two_records(self, queen: QueenClient, queue: str) -> None:
        put(queen, queue, "a1", partition="a")
        put(queen, queue, "b1", partition="b")
        assert queen.pop(queue, partition="a", consumer_group="g", subscription_mode="new") == []
        assert payloads(drain(queen, queue, "g", partition="b")) == ["b1"]

    def test_another_queue_is_another_record(
        self, queen: QueenClient, make_queue: MakeQueue, name: Name
    ) -> None:
        one, two, group = make_queue(), make_queue(), name("g")
        put(queen, one, 1)
        put(queen, two, 2)
        assert queen.pop(one, consumer_group=group, subscription_mode="new") == []
        assert payloads(drain(queen, two, group)) == [2]

    def test_a_pop_of_a_partition_that_does_not_exist_yet(self, queen: QueenClient, queue: str) -> None:
        assert queen.pop(queue, partition="p", consumer_group="g", subscription_mode="new") == []
        put(queen, queue, 1, partition="p")
        assert payloads(drain(queen, queue, "g", partition="p")) == [1]


class TestWhatComesLater:
    def test_a_new_group_misses_nothing_of_a_partition_created_later(
        self, queen: QueenClient, queue: str
    ) -> None:
        """The public Queen used the time of the first pop of each partition instead."""
        put(queen, queue, "M1", partition="p1")
        queen.pop(queue, consumer_group="g", subscription_mode="new")
        put(queen, queue, "M2", "M3", partition="p2")
        assert payloads(drain(queen, queue, "g", subscription_mode="new")) == ["M2", "M3"]

    def test_nor_of_one_whose_messages_are_stamped_before_it_subscribed(
        self, queen: QueenClient, sql: Sql, queue: str
    ) -> None:
        with queen.transaction() as tx:
            put(tx, queue, 1, 2, partition="late")
            queen.pop(queue, consumer_group="g", subscription_mode="new")
        assert pending(sql, queue, "g") == 2
        assert payloads(drain(queen, queue, "g")) == [1, 2]

    @pytest.mark.parametrize("mode", ["new", "timestamp"])
    def test_a_partition_created_later_is_read_from_its_first_message(
        self, queen: QueenClient, sql: Sql, queue: str, mode: str
    ) -> None:
        moment = now(sql) - dt.timedelta(seconds=10) if mode == "timestamp" else None
        put(queen, queue, 0)
        drain(queen, queue, "g", subscription_mode=mode, subscription_from=moment)
        put(queen, queue, 1, 2, partition="p")
        pass_time(sql, queue, 3600)  # old by now, and yet never seen
        assert payloads(drain(queen, queue, "g")) == [1, 2]

    def test_by_namespace_queues_that_appear_later(
        self, queen: QueenClient, make_queue: MakeQueue, name: Name
    ) -> None:
        namespace, group = name("n"), name("g")
        one = make_queue(namespace=namespace)
        put(queen, one, "before")
        assert queen.pop(namespace=namespace, consumer_group=group, subscription_mode="new") == []
        two = make_queue(namespace=namespace)
        put(queen, two, 1)
        put(queen, one, 2)
        assert sorted(payloads(drain(queen, None, group, namespace=namespace))) == [1, 2]

    def test_by_namespace_before_any_queue_is_there(
        self, queen: QueenClient, make_queue: MakeQueue, name: Name
    ) -> None:
        namespace, group = name("n"), name("g")
        assert queen.pop(namespace=namespace, consumer_group=group, subscription_mode="new") == []
        queue = make_queue(namespace=namespace)
        put(queen, queue, 1, 2)
        assert payloads(drain(queen, None, group, namespace=namespace)) == [1, 2]

    def test_a_queue_deleted_and_made_again_is_a_new_one(
        self, queen: QueenClient, make_queue: MakeQueue, name: Name
    ) -> None:
        namespace, group = name("n"), name("g")
        queue = make_queue(namespace=namespace)
        put(queen, queue, "before")
        queen.pop(namespace=namespace, consumer_group=group, subscription_mode="new")
        queen.delete_queue(queue)
        queen.configure_queue(queue, namespace=namespace)
        put(queen, queue, 1)
        assert payloads(drain(queen, None, group, namespace=namespace)) == [1]


class TestWildcards:
    def test_by_namespace_task_or_both(self, queen: QueenClient, make_queue: MakeQueue, name: Name) -> None:
        n, m, t, u = (name(word) for word in "nmtu")
        for namespace, task in ((n, t), (n, u), (m, t), (None, t), (n, None)):
            put(queen, make_queue(namespace=namespace, task=task), f"{namespace}/{task}")

        def read(**scope: Any) -> list[str]:
            return sorted(payloads(drain(queen, None, name(str(scope)), **scope)))

        assert read(namespace=n) == sorted([f"{n}/{t}", f"{n}/{u}", f"{n}/None"])
        assert read(task=t) == sorted([f"{n}/{t}", f"{m}/{t}", f"None/{t}"])
        assert read(namespace=n, task=t) == [f"{n}/{t}"]

    def test_one_group_has_one_cursor_however_it_pops(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue, name: Name
    ) -> None:
        namespace, group = name("n"), name("g")
        queue = make_queue(namespace=namespace)
        put(queen, queue, 1, 2, 3)
        queen.ack(queen.pop(namespace=namespace, consumer_group=group, batch_size=1))
        queen.ack(queen.pop(queue, consumer_group=group, batch_size=1))
        assert payloads(queen.pop(queue, partition="Default", consumer_group=group)) == [3]
        assert queen.pop(namespace=namespace, consumer_group=group) == []

    def test_several_queues_in_one_pop(self, queen: QueenClient, make_queue: MakeQueue, name: Name) -> None:
        namespace = name("n")
        queues = [make_queue(namespace=namespace) for _ in range(3)]
        for queue in queues:
            put(queen, queue, 1)
        messages = queen.pop(namespace=namespace, max_partitions=10)
        assert sorted(m.queue_name for m in messages) == sorted(queues)
        assert queen.ack(messages).completed == 3


class TestSeek:
    def test_to_the_beginning_the_end_and_a_moment(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        put(queen, queue, 1)
        moment = now(sql)
        put(queen, queue, 2)
        for to, expected in (("beginning", [1, 2]), ("end", []), (moment, [2])):
            queen.seek(queue, "g", to=to)
            assert pending(sql, queue, "g") == len(expected)
            assert payloads(drain(queen, queue, "g")) == expected

    def test_one_partition_only(self, queen: QueenClient, queue: str) -> None:
        for partition in "ab":
            put(queen, queue, partition, partition=partition)
        drain(queen, queue, "g")
        assert queen.seek(queue, "g", to="beginning", partition="a") == 1
        assert payloads(drain(queen, queue, "g")) == ["a"]

    def test_takes_leases_away(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        put(queen, queue, 1, 2)
        held = queen.pop(queue)
        queen.seek(queue, to="end")
        with pytest.raises(LeaseLostError):
            queen.ack(held)
        assert pending(sql, queue) == 0
        queen.seek(queue, to="beginning")
        again = queen.pop(queue)
        assert [(m.payload, m.attempt) for m in again] == [(1, 1), (2, 1)]

    def test_forgets_what_was_settled_ahead_and_what_failed(self, queen: QueenClient, queue: str) -> None:
        put(queen, queue, *range(4))
        messages = queen.pop(queue)
        queen.settle(completed=messages[2], failed=messages[0], released=[messages[1], messages[3]])
        queen.seek(queue, to="beginning")
        again = queen.pop(queue)
        assert [(m.payload, m.attempt) for m in again] == [(0, 1), (1, 1), (2, 1), (3, 1)]

    def test_makes_a_group_that_never_popped(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        put(queen, queue, 1)
        queen.seek(queue, "g", to="end")
        put(queen, queue, 2)
        assert pending(sql, queue, "g") == 1
        assert payloads(drain(queen, queue, "g")) == [2]

    def test_what_comes_after_a_seek_to_the_end_is_delivered(self, queen: QueenClient, queue: str) -> None:
        put(queen, queue, 1)
        drain(queen, queue)
        queen.seek(queue, to="end")
        put(queen, queue, 2)
        put(queen, queue, 3, partition="new")
        assert sorted(payloads(drain(queen, queue))) == [2, 3]


def test_the_groups_of_a_queue_are_listed(queen: QueenClient, queue: str) -> None:
    put(queen, queue, 1, 2)
    queen.pop(queue, consumer_group="a", batch_size=1)
    queen.pop(queue, consumer_group="b", subscription_mode="new")
    listed = {
        g.consumer_group: (g.subscription_mode, g.pending, g.in_flight, g.partitions)
        for g in queen.list_consumer_groups(queue)
    }
    assert listed == {"a": ("all", 2, 1, 1), "b": ("new", 0, 0, 1)}


def test_deleting_a_group_touches_no_other(
    queen: QueenClient, sql: Sql, make_queue: MakeQueue, name: Name
) -> None:
    one, two, group = make_queue(), make_queue(), name("g")
    for queue in (one, two):
        put(queen, queue, 1)
        drain(queen, queue, group)
        drain(queen, queue, "other")
    assert queen.delete_consumer_group(group, one) == 1
    assert [pending(sql, q, g) for q in (one, two) for g in (group, "other")] == [1, 0, 0, 0]
    assert queen.delete_consumer_group(group) == 1
    assert records(sql, group) == []
    assert queen.delete_consumer_group(group) == 0
