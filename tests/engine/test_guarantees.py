"""The contract's guarantees, one after the other. The tenth is in test_crashes.py, load in test_load.py."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from airflow_provider_queen.client import QueenClient
from airflow_provider_queen.exceptions import LeaseLostError, QueueFullError
from tests.engine.conftest import MakeQueue
from tests.engine.support import (
    Sql,
    depths,
    drain,
    eventually,
    expire_leases,
    is_waiting,
    pass_time,
    payloads,
    pending,
    put,
    together,
    undone,
)

pytestmark = pytest.mark.postgres


class TestNothingIsSkipped:
    """Guarantee 1."""

    @pytest.mark.parametrize("contact", ["first", "later"])
    @pytest.mark.parametrize("partition", ["new", "existing"])
    def test_a_producer_holds_its_transaction_open(
        self, queen: QueenClient, sql: Sql, queue: str, partition: str, contact: str
    ) -> None:
        if partition == "existing":
            put(queen, queue, "before", partition="held")
        if contact == "later":
            drain(queen, queue)
            drain(queen, queue, "audit")
        with queen.transaction() as tx:
            put(tx, queue, "held", partition="held")
            put(queen, queue, 1, 2, partition="other")
            put(queen, queue, 3, partition="another")
            for group in (None, "audit"):
                delivered = payloads(drain(queen, queue, group))
                assert sorted(p for p in delivered if p != "before") == [1, 2, 3]
                assert drain(queen, queue, group) == []
                assert pending(sql, queue, group) == 0
        for group in (None, "audit"):
            assert pending(sql, queue, group) == 1
            assert payloads(drain(queen, queue, group)) == ["held"]

    def test_a_producer_holds_its_transaction_open_at_the_very_first_contact(
        self, queen: QueenClient, queue: str
    ) -> None:
        with queen.transaction() as tx:
            put(tx, queue, "held")
            for mode in ("all", "new"):
                assert queen.pop(queue, consumer_group=mode, subscription_mode=mode) == []
        for mode in ("all", "new"):
            assert payloads(drain(queen, queue, mode, subscription_mode=mode)) == ["held"]

    def test_a_producer_of_a_known_partition_commits_after_a_new_group_came(
        self, queen: QueenClient, queue: str
    ) -> None:
        put(queen, queue, "before")
        with queen.transaction() as tx:
            put(tx, queue, "held")
            assert queen.pop(queue, consumer_group="g", subscription_mode="new") == []
            assert payloads(queen.pop(queue, consumer_group="h")) == ["before"]
        assert payloads(drain(queen, queue, "g")) == ["held"]

    def test_the_second_producer_of_a_partition_comes_after_the_first_whatever_it_does(
        self, queen: QueenClient, sql: Sql, queue: str, engine_dsn: str
    ) -> None:
        put(queen, queue, 0)
        assert payloads(drain(queen, queue)) == [0]
        with psycopg.connect(engine_dsn, autocommit=True) as second, ThreadPoolExecutor(1) as pool:
            with queen.transaction() as tx:
                put(tx, queue, 1)
                later = pool.submit(
                    lambda: second.execute("SELECT seq FROM queen.push(%s, ARRAY['2'])", [queue]).fetchall()
                )
                eventually(lambda: is_waiting(sql, second.info.backend_pid))
                assert queen.pop(queue) == []
            assert later.result(10) == [(3,)]
        assert [(m.seq, m.payload) for m in drain(queen, queue)] == [(2, 1), (3, 2)]

    def test_a_producer_that_gives_up_leaves_no_gap(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        with undone(queen) as tx:
            assert [r.seq for r in put(tx, queue, "never", "ever")] == [1, 2]
            assert queen.pop(queue) == []
        assert [r.seq for r in put(queen, queue, "first")] == [1]
        assert pending(sql, queue) == 1
        assert payloads(drain(queen, queue)) == ["first"]

    def test_a_consumer_that_stays_in_its_transaction_stops_no_producer(
        self, queen: QueenClient, sql: Sql, queue: str
    ) -> None:
        put(queen, queue, 1)
        drain(queen, queue)
        with queen.transaction() as tx:
            assert tx.pop(queue) == []
            put(queen, queue, 2)
            assert pending(sql, queue) == 1
        assert payloads(drain(queen, queue)) == [2]

    def test_a_push_to_more_partitions_than_it_can_lock_one_by_one(
        self, queen: QueenClient, sql: Sql, queue: str
    ) -> None:
        for value in (1, 2):
            results = queen.push(queue, [{"payload": value, "partition": f"p{n}"} for n in range(1100)])
            assert {r.seq for r in results} == {value}
            assert pending(sql, queue) == 1100
            delivered = []
            while messages := queen.pop(queue, batch_size=2000, max_partitions=2000, auto_ack=True):
                delivered += messages
            assert len({m.partition for m in delivered}) == len(delivered) == 1100

    def test_producers_commit_in_any_order(self, queen: QueenClient, queue: str) -> None:
        """Ten transactions begin one after the other and end in another order."""
        order = [3, 0, 9, 1, 7, 2, 8, 4, 6, 5]
        blocks = [queen.transaction() for _ in range(10)]
        for n, block in enumerate(blocks):
            put(block.__enter__(), queue, n, partition=f"p{n}")
        delivered = []
        for n in order:
            blocks[n].__exit__(None, None, None)
            delivered += payloads(drain(queen, queue))
        assert delivered == order

    def test_a_clock_that_steps_back_changes_nothing(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        put(queen, queue, 1)
        pass_time(sql, queue, -3600)  # as if the clock had been an hour ahead
        put(queen, queue, 2)
        stored = sorted(queen.list_messages(queue), key=lambda m: m.seq)
        assert stored[0].created_at <= stored[1].created_at
        assert payloads(drain(queen, queue)) == [1, 2]


class TestFifo:
    """Guarantee 2."""

    def test_messages_come_in_the_order_of_their_commits(self, queen: QueenClient, queue: str) -> None:
        for n in range(10):
            put(queen, queue, n, n + 0.5)
        assert [m.seq for m in drain(queen, queue, batch_size=3)] == list(range(1, 21))

    def test_the_next_waits_until_the_ones_before_are_settled(
        self, queen: QueenClient, sql: Sql, queue: str
    ) -> None:
        put(queen, queue, *range(6))
        first, second = queen.pop(queue, batch_size=2)
        assert queen.pop(queue) == []
        queen.ack(second)
        assert queen.pop(queue) == [], "the first one is still in flight"
        queen.nack(first)
        assert payloads(queen.pop(queue, batch_size=3)) == [0, 2, 3]
        assert pending(sql, queue) == 5

    def test_a_message_that_waits_for_its_retry_holds_back_those_behind_it(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(retry_delay=60_000)
        put(queen, queue, *range(4))
        messages = queen.pop(queue, batch_size=2)
        queen.settle(failed=messages[0], completed=messages[1])
        assert queen.pop(queue) == []
        pass_time(sql, queue, 61)
        assert payloads(queen.pop(queue)) == [0, 2, 3]

    def test_released_messages_come_first_again(self, queen: QueenClient, queue: str) -> None:
        put(queen, queue, *range(5))
        messages = queen.pop(queue, batch_size=3)
        queen.settle(completed=messages[1], released=[messages[0], messages[2]])
        again = queen.pop(queue)
        assert payloads(again) == [0, 2, 3, 4]
        assert [m.attempt for m in again] == [1, 1, 1, 1]

    def test_groups_and_partitions_do_not_wait_for_each_other(self, queen: QueenClient, queue: str) -> None:
        put(queen, queue, "a", partition="a")
        put(queen, queue, "b", partition="b")
        held = queen.pop(queue, consumer_group="slow")
        assert payloads(held) == ["a"]
        assert payloads(queen.pop(queue, consumer_group="slow")) == ["b"]
        assert sorted(payloads(drain(queen, queue, "quick"))) == ["a", "b"]


class TestOneHolder:
    """Guarantee 3."""

    def test_a_lease_excludes_everybody_else(self, queen: QueenClient, queue: str) -> None:
        put(queen, queue, *range(10))
        popped = together(*[lambda: queen.pop(queue, batch_size=2)] * 8)
        assert [len(p) for p in sorted(popped, key=len)] == [0] * 7 + [2]

    def test_two_consumers_race_for_one_expired_lease(
        self, queen: QueenClient, sql: Sql, queue: str, scale: float
    ) -> None:
        put(queen, queue, "x")
        old = queen.pop(queue)
        queen.configure_queue(queue, retry_limit=1000)
        for attempt in range(2, 2 + int(25 * scale)):
            expire_leases(sql, queue)
            winners = [m for popped in together(*[lambda: queen.pop(queue)] * 4) for m in popped]
            assert [m.attempt for m in winners] == [attempt]
            assert winners[0].lease_id != old[0].lease_id
            with pytest.raises(LeaseLostError):
                queen.ack(old)
            old = winners
        assert queen.ack(old).completed == 1

    @pytest.mark.parametrize("outcome", ["completed", "failed", "rejected", "released"])
    def test_a_holder_whose_lease_was_taken_over_settles_nothing(
        self, queen: QueenClient, sql: Sql, queue: str, outcome: str
    ) -> None:
        put(queen, queue, *range(5))
        lost = queen.pop(queue, batch_size=1)
        expire_leases(sql, queue)
        taken = queen.pop(queue, batch_size=1)
        assert payloads(taken) == payloads(lost) == [0]
        before = _everything(sql, queue)
        with pytest.raises(LeaseLostError):
            queen.settle(**{outcome: lost})
        with pytest.raises(LeaseLostError):
            queen.renew(lost)
        assert _everything(sql, queue) == before
        assert queen.ack(taken).completed == 1

    def test_a_lost_lease_undoes_the_whole_settlement(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        put(queen, queue, "lost", partition="a")
        lost = queen.pop(queue)
        expire_leases(sql, queue)
        taken = queen.pop(queue)
        put(queen, queue, "mine", partition="b")
        mine = queen.pop(queue)
        before = _everything(sql, queue)
        with pytest.raises(LeaseLostError):
            queen.settle(completed=mine, failed=lost)
        assert _everything(sql, queue) == before
        assert queen.ack([*mine, *taken]).completed == 2

    def test_a_lease_that_ran_out_is_its_holders_until_somebody_takes_it(
        self, queen: QueenClient, sql: Sql, queue: str
    ) -> None:
        put(queen, queue, 1, 2)
        messages = queen.pop(queue)
        expire_leases(sql, queue)
        queen.renew(messages[0], seconds=60)
        assert queen.pop(queue) == []
        expire_leases(sql, queue)
        assert queen.ack(messages).completed == 2
        assert pending(sql, queue) == 0

    def test_nothing_is_settled_twice(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        put(queen, queue, *range(3))
        messages = queen.pop(queue)
        queen.ack(messages[1])
        before = _everything(sql, queue)
        with pytest.raises(LeaseLostError):
            queen.ack(messages[:2])
        assert _everything(sql, queue) == before
        queen.ack([messages[0], messages[2]])
        with pytest.raises(LeaseLostError):
            queen.nack(messages[0])
        assert pending(sql, queue) == 0

    def test_a_settlement_and_a_takeover_exclude_each_other(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue, scale: float
    ) -> None:
        queue = make_queue(retry_limit=10_000)
        settled = 0
        for n in range(int(60 * scale)):
            put(queen, queue, n)
            (message,) = queen.pop(queue)
            expire_leases(sql, queue)

            def settle(message: Any = message) -> bool:
                try:
                    return queen.ack(message).completed == 1
                except LeaseLostError:
                    return False

            won, taken = together(settle, lambda: queen.pop(queue))
            assert won != bool(taken)
            settled += won
            if taken:
                queen.ack(taken)
            assert pending(sql, queue) == 0


class TestOnceInsideTheDatabase:
    """Guarantee 4."""

    def test_settling_and_pushing_onward_commit_together(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        source, target = make_queue(), make_queue()
        put(queen, source, 1, 2)
        with queen.transaction() as tx:
            messages = tx.pop(source)
            tx.ack(messages)
            tx.push(target, [{"payload": m.payload * 10} for m in messages])
            assert (pending(sql, source), pending(sql, target)) == (2, 0)
        assert (pending(sql, source), pending(sql, target)) == (0, 2)
        assert payloads(drain(queen, target)) == [10, 20]

    def test_or_not_at_all(self, queen: QueenClient, sql: Sql, make_queue: MakeQueue) -> None:
        source, target = make_queue(), make_queue()
        put(queen, source, 1, 2)
        messages = queen.pop(source)
        with undone(queen) as tx:
            tx.settle(completed=messages[0], rejected=messages[1])
            put(tx, target, 10)
        assert (pending(sql, source), pending(sql, target)) == (2, 0)
        assert queen.depth(source).dead_letters == 0
        assert queen.ack(messages).completed == 2

    def test_a_push_that_fails_takes_the_settlement_back(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        source, target = make_queue(), make_queue(max_queue_size=1)
        put(queen, source, 1)
        messages = queen.pop(source)

        def forward(tx: Any) -> None:
            tx.ack(messages)
            put(tx, target, 1, 2)

        with pytest.raises(QueueFullError):
            queen.run_in_transaction(forward)
        assert (pending(sql, source), pending(sql, target)) == (1, 0)
        queen.ack(messages)


class TestIdempotentPush:
    """Guarantee 5."""

    def test_the_same_transaction_id_is_stored_once(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        (first,) = queen.push(queue, [{"payload": 1, "transaction_id": "t"}])
        again = queen.push(
            queue,
            [
                {"payload": 2, "transaction_id": "t"},
                {"payload": 3, "transaction_id": "u"},
                {"payload": 4, "transaction_id": "u"},
                {"payload": 5, "transaction_id": "v"},
            ],
        )
        assert [r.status for r in again] == ["duplicate", "queued", "duplicate", "queued"]
        assert (again[0].message_id, again[0].seq) == (first.message_id, first.seq)
        assert [r.seq for r in again] == [1, 2, 2, 3], "duplicates leave no gap"
        assert again[1].message_id == again[2].message_id
        assert pending(sql, queue) == 3
        assert payloads(drain(queen, queue)) == [1, 3, 5]

    def test_messages_with_and_without_an_id_in_one_batch(self, sql: Sql, queue: str) -> None:
        push = "SELECT status, seq FROM queen.push(%s, ARRAY['1','2','3','4'], transaction_ids => %s)"
        ids = [None, "a", None, "a"]
        queued, duplicate = ("queued", 1), ("duplicate", 2)
        assert sql.execute(push, [queue, ids]).fetchall() == [queued, ("queued", 2), ("queued", 3), duplicate]
        assert sql.execute(push, [queue, ids]).fetchall() == [
            ("queued", 4),
            duplicate,
            ("queued", 5),
            duplicate,
        ]
        assert pending(sql, queue) == 5

    def test_an_id_that_looks_like_one_of_ours(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        """A message without a transaction id is given one; somebody else may have used that very text."""
        push = "SELECT status, seq, message_id::text FROM queen.push(%s, ARRAY['1'])"
        (first,) = sql.execute(push, [queue]).fetchall()
        number = int(first[2].replace("-", ""), 16)
        coming = [str(uuid.UUID(int=number + n)) for n in range(1, 5)]
        queen.push(queue, [{"payload": 2, "transaction_id": text} for text in coming])
        assert [row[:2] for row in sql.execute(push, [queue]).fetchall()] == [("queued", 6)]
        assert pending(sql, queue) == 6

    def test_another_partition_is_another_matter(self, queen: QueenClient, queue: str) -> None:
        results = queen.push(
            queue, [{"payload": p, "partition": p, "transaction_id": "t"} for p in ("a", "b", "a")]
        )
        assert [r.status for r in results] == ["queued", "queued", "duplicate"]

    def test_over_all_lanes_of_a_partition(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        (first,) = queen.push(queue, [{"payload": 1, "transaction_id": "t", "priority": 2}])
        results = queen.push(
            queue,
            [
                {"payload": 2, "transaction_id": "t", "priority": 7},
                {"payload": 3, "transaction_id": "u", "priority": 7},
                {"payload": 4, "transaction_id": "u", "priority": 0},
            ],
        )
        assert [r.status for r in results] == ["duplicate", "queued", "duplicate"]
        assert (results[0].message_id, results[0].seq) == (first.message_id, 1)
        assert results[2].message_id == results[1].message_id
        assert pending(sql, queue) == 2

    def test_settled_is_still_retained(self, queen: QueenClient, queue: str) -> None:
        queen.push(queue, [{"payload": 1, "transaction_id": "t"}])
        drain(queen, queue)
        (again,) = queen.push(queue, [{"payload": 1, "transaction_id": "t"}])
        assert again.status == "duplicate"
        assert queen.pop(queue) == []

    def test_after_retention_the_id_is_free_again(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(retention_enabled=True, retention_seconds=10)
        queen.push(queue, [{"payload": 1, "transaction_id": "t"}])
        pass_time(sql, queue, 11)
        queen.retain(queue)
        (again,) = queen.push(queue, [{"payload": 2, "transaction_id": "t"}])
        assert (again.status, again.seq) == ("queued", 2)

    def test_many_producers_at_once_store_one(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        def push() -> list[Any]:
            return queen.push(queue, [{"payload": n, "transaction_id": f"t{n}"} for n in range(20)])

        answers = together(*[push] * 8)
        for n in range(20):
            of_one = [answer[n] for answer in answers]
            assert sorted(r.status for r in of_one) == ["duplicate"] * 7 + ["queued"]
            assert len({(r.message_id, r.seq) for r in of_one}) == 1
        assert pending(sql, queue) == 20

    def test_a_producer_that_repeats_itself_after_a_rollback_is_heard(
        self, queen: QueenClient, queue: str
    ) -> None:
        message = {"payload": 1, "transaction_id": "t"}
        with undone(queen) as tx:
            tx.push(queue, [message])
        assert queen.push(queue, [message])[0].status == "queued"


class TestExactDepth:
    """Guarantee 6."""

    def test_after_every_step(self, queen: QueenClient, sql: Sql, make_queue: MakeQueue) -> None:
        queue = make_queue(retry_limit=1)

        def expect(count: int, in_flight: int, dead: int = 0) -> None:
            assert pending(sql, queue) == count
            depth = queen.depth(queue)
            assert (depth.pending, depth.in_flight, depth.dead_letters) == (count, in_flight, dead)
            assert (depth.oldest_age_seconds is None) == (count == 0)
            rows = [row for row in queen.stats(queue) if row.subscribed]
            if rows:
                assert sum(row.pending for row in rows) == count
                assert sum(row.in_flight for row in rows) == in_flight

        expect(0, 0)
        put(queen, queue, *range(4), partition="a")
        expect(4, 0)
        put(queen, queue, *range(4), partition="b", priority=3)
        expect(8, 0)
        first = queen.pop(queue, batch_size=3)
        expect(8, 3)
        queen.ack(first[1])
        expect(7, 2)
        queen.settle(failed=first[0], released=first[2])
        expect(7, 0)
        second = queen.pop(queue, batch_size=10, max_partitions=2)
        expect(7, 7)
        queen.nack([m for m in second if m.attempt == 2])
        expect(6, 6, dead=1)
        queen.reject(second[-1])
        expect(5, 5, dead=2)
        expire_leases(sql, queue)
        expect(5, 0, dead=2)
        assert len(queen.pop(queue)) == 1
        expect(5, 1, dead=2)
        queen.seek(queue, to="beginning")
        expect(8, 0, dead=2)
        queen.seek(queue, to="end", partition="b")
        expect(4, 0, dead=2)
        queen.requeue_dead_letters(queue)
        expect(6, 0)
        drain(queen, queue)
        expect(0, 0)

    def test_of_a_group_that_never_popped_it_is_every_retained_message(
        self, queen: QueenClient, sql: Sql, queue: str
    ) -> None:
        put(queen, queue, *range(5))
        drain(queen, queue)
        assert (pending(sql, queue), pending(sql, queue, "never")) == (0, 5)

    def test_over_a_namespace_and_a_task(
        self, queen: QueenClient, make_queue: MakeQueue, name: Callable[[str], str]
    ) -> None:
        namespace = name("billing")
        for task, count in (("a", 2), ("a", 3), ("b", 4)):
            put(queen, make_queue(namespace=namespace, task=task), *range(count))
        assert queen.depth(namespace=namespace).pending == 9
        assert queen.depth(namespace=namespace, task="a").pending == 5
        messages = queen.pop(namespace=namespace, task="b", consumer_group="g")
        assert queen.depth(namespace=namespace, consumer_group="g").in_flight == 4
        queen.ack(messages)
        assert queen.depth(namespace=namespace, consumer_group="g").pending == 5

    def test_at_every_moment_while_others_work(
        self, queen: QueenClient, sql: Sql, queue: str, scale: float
    ) -> None:
        done = threading.Event()
        looks: list[tuple[int, int]] = []

        def work() -> None:
            try:
                for n in range(int(120 * scale)):
                    put(queen, queue, n, n, partition=f"p{n % 3}")
                    if messages := queen.pop(queue, batch_size=3):
                        queen.settle(completed=messages[1:], failed=messages[:1] if n % 5 == 0 else None)
            finally:
                done.set()

        def look() -> None:
            while not done.is_set():
                looks.append(depths(sql, queue))

        together(work, look)
        assert len(looks) > 10
        assert [pair for pair in looks if pair[0] != pair[1]] == []


class TestPartialSettlement:
    """Guarantee 7."""

    def test_any_subset_completes_and_the_others_come_again_in_order(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(retry_limit=10)
        put(queen, queue, *range(10))
        messages = queen.pop(queue)
        queen.ack([messages[n] for n in (9, 1, 4)])
        assert pending(sql, queue) == 7
        queen.nack([messages[n] for n in (8, 0)])
        queen.release([messages[n] for n in (2, 3, 5, 6, 7)])
        again = queen.pop(queue)
        assert payloads(again) == [0, 2, 3, 5, 6, 7, 8]
        assert [m.attempt for m in again] == [2, 1, 1, 1, 1, 1, 2]
        queen.ack(again)
        assert pending(sql, queue) == 0
        assert queen.pop(queue) == []

    def test_a_failed_message_is_not_lost_because_a_later_one_completed(
        self, queen: QueenClient, sql: Sql, queue: str
    ) -> None:
        put(queen, queue, "fails", "completes")
        first, second = queen.pop(queue)
        queen.settle(failed=first, completed=second)
        assert pending(sql, queue) == 1
        (again,) = queen.pop(queue)
        assert (again.payload, again.attempt) == ("fails", 2)

    def test_what_is_not_named_stays_leased(self, queen: QueenClient, sql: Sql, queue: str) -> None:
        put(queen, queue, *range(3))
        messages = queen.pop(queue)
        assert queen.ack(messages[2]).remaining == 2
        assert queen.pop(queue) == []
        expire_leases(sql, queue)
        assert payloads(drain(queen, queue)) == [0, 1], "the completed one is never redelivered"

    def test_settled_ahead_survives_a_crashed_holder_and_retention(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(retention_enabled=True, retention_seconds=100)
        put(queen, queue, 0, 1)
        pass_time(sql, queue, 101)
        put(queen, queue, 2, 3, 4)
        messages = queen.pop(queue)
        queen.ack([messages[2], messages[4]])
        expire_leases(sql, queue)
        queen.retain(queue)
        assert pending(sql, queue) == 1
        assert payloads(drain(queen, queue)) == [3]


class TestPoisonEnds:
    """Guarantee 8."""

    @pytest.mark.parametrize("retry_limit", [0, 1, 3])
    def test_a_message_that_keeps_failing(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue, retry_limit: int
    ) -> None:
        queue = make_queue(retry_limit=retry_limit)
        put(queen, queue, "poison", "good")
        attempts = []
        for _ in range(retry_limit + 1):
            messages = queen.pop(queue, batch_size=1)
            attempts.append(messages[0].attempt)
            assert payloads(messages) == ["poison"]
            queen.nack(messages, error="it burns")
        assert attempts == list(range(1, retry_limit + 2))
        (letter,) = queen.dead_letters(queue)
        assert (letter.payload, letter.reason, letter.error_message) == ("poison", "failed", "it burns")
        assert letter.retry_count == retry_limit
        assert pending(sql, queue) == 1
        assert payloads(drain(queen, queue)) == ["good"]

    @pytest.mark.parametrize("retry_limit", [0, 2])
    def test_a_message_whose_consumer_keeps_dying(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue, retry_limit: int
    ) -> None:
        queue = make_queue(retry_limit=retry_limit)
        put(queen, queue, "poison")
        for attempt in range(1, retry_limit + 2):
            (message,) = queen.pop(queue)
            assert message.attempt == attempt
            expire_leases(sql, queue)
        assert queen.pop(queue) == []
        (letter,) = queen.dead_letters(queue)
        assert (letter.payload, letter.reason, letter.retry_count) == ("poison", "expired", retry_limit)
        assert pending(sql, queue) == 0

    def test_a_poison_that_kills_does_not_take_its_batch_mates_along(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(retry_limit=2)
        put(queen, queue, *[n if n != 6 else "poison" for n in range(10)])
        done: list[Any] = []
        for _ in range(100):
            if not (messages := queen.pop(queue)):
                break
            for message in messages:
                if message.payload == "poison":
                    expire_leases(sql, queue)  # the consumer dies here
                    break
                queen.ack(message)
                done.append(message.payload)
        assert done == [n for n in range(10) if n != 6]
        assert payloads(queen.dead_letters(queue)) == ["poison"]
        assert pending(sql, queue) == 0

    @pytest.mark.parametrize("retry_limit", [0, 1, 3])
    def test_nor_when_nothing_of_the_batch_was_settled_before(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue, retry_limit: int
    ) -> None:
        """All ten fail together until it is known which one kills; nine of them must survive that."""
        queue = make_queue(retry_limit=retry_limit)
        put(queen, queue, *[n if n != 6 else "poison" for n in range(10)])
        done: list[Any] = []
        for _ in range(100):
            if not (messages := queen.pop(queue)):
                break
            if "poison" in payloads(messages):
                expire_leases(sql, queue)
                continue
            queen.ack(messages)
            done += payloads(messages)
        assert done == [n for n in range(10) if n != 6]
        assert payloads(queen.dead_letters(queue)) == ["poison"]

    def test_failing_and_dying_count_together(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(retry_limit=3)
        put(queen, queue, "poison")
        for attempt, ends in enumerate(["fails", "dies", "fails", "dies"], start=1):
            (message,) = queen.pop(queue)
            assert message.attempt == attempt
            if ends == "fails":
                queen.nack(message)
            else:
                expire_leases(sql, queue)
        assert queen.pop(queue) == []
        assert queen.depth(queue).dead_letters == 1

    def test_the_other_group_still_gets_it(self, queen: QueenClient, make_queue: MakeQueue) -> None:
        queue = make_queue(retry_limit=0)
        put(queen, queue, "poison")
        queen.nack(queen.pop(queue, consumer_group="weak"))
        assert payloads(drain(queen, queue, "strong")) == ["poison"]


class TestFlatCost:
    """Guarantee 11, by the buffers that a call touches. The plans are looked at in test_plans.py."""

    @staticmethod
    def buffers(sql: Sql, call: str, *parameters: Any) -> int:
        """Pages that a call touches."""
        statement = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM {call}"
        ((plan,),) = sql.execute(statement, parameters).fetchall()
        root = plan[0]["Plan"]
        return int(root["Shared Hit Blocks"] + root["Shared Read Blocks"])

    @classmethod
    def least(cls, sql: Sql, call: str, *parameters: Any) -> int:
        """Of three, since page splits and the like come in between."""
        return min(cls.buffers(sql, call, *parameters) for _ in range(3))

    @classmethod
    def costs(cls, sql: Sql, queue: str) -> dict[str, int]:
        rows = sql.execute(
            "SELECT lease_id, seq FROM queen.pop(%s, batch_size => 30, lease_seconds => 1000)", [queue]
        ).fetchall()
        settle = [cls.buffers(sql, "queen.ack(%s, ARRAY[%s::bigint])", lease, seq) for lease, seq in rows[:3]]
        sql.execute("SELECT * FROM queen.ack(%s)", [rows[0][0]])
        return {
            "settle": min(settle),
            "push": cls.least(sql, "queen.push(%s, ARRAY['1','2','3'])", queue),
            "pop": cls.least(sql, "queen.pop(%s, batch_size => 3, auto_ack => TRUE)", queue),
        }

    @pytest.mark.parametrize("where", ["ahead", "behind"])
    def test_whatever_lies_ahead_of_the_cursor_or_behind_it(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue, where: str
    ) -> None:
        costs = []
        for size in (200, 40_000):
            queue = make_queue()
            put(queen, queue, 0)
            drain(queen, queue)
            sql.execute(
                "INSERT INTO queen.message_log (lane_id, seq, created_at, transaction_id, payload)"
                " SELECT l.id, 1 + i, clock_timestamp(), 'x' || i, '1'"
                " FROM queen.lanes AS l, generate_series(1, %s) AS i"
                " WHERE l.queue_id = (SELECT id FROM queen.queues WHERE name = %s)",
                [size, queue],
            )
            queen.seek(queue, to="end" if where == "behind" else "beginning")
            put(queen, queue, *range(100))
            costs.append(self.costs(sql, queue))
        small, large = costs
        for call in small:
            assert large[call] <= small[call] * 1.5 + 12, (call, small, large)

    def test_however_many_partitions_are_idle(
        self, queen: QueenClient, sql: Sql, make_queue: MakeQueue
    ) -> None:
        costs = []
        for partitions in (10, 3000):
            queue = make_queue()
            queen.push(queue, [{"payload": 0, "partition": f"p{n}"} for n in range(partitions)])
            while queen.pop(queue, batch_size=1000, max_partitions=1000, auto_ack=True):
                pass
            queen.pop(queue)
            sql.execute("VACUUM queen.consumers, queen.consumer_states")  # as autovacuum does
            idle = self.least(sql, "queen.pop(%s)", queue)
            put(queen, queue, *range(50), partition="p7")
            pop = self.least(sql, "queen.pop(%s, batch_size => 3, auto_ack => TRUE)", queue)
            costs.append({"idle": idle, "pop": pop})
        few, many = costs
        for call in few:
            assert many[call] <= few[call] * 1.5 + 12, (call, few, many)
        assert few["idle"] < 80, "an idle pop is a few index probes"


def _everything(sql: Sql, queue: str) -> list[Any]:
    """The state that a refused call must leave as it was."""
    return [
        sql.execute(query, [queue]).fetchall()
        for query in (
            "SELECT s.* FROM queen.consumer_states AS s JOIN queen.consumers AS c ON c.id = s.consumer_id"
            " JOIN queen.queues AS q ON q.id = c.queue_id WHERE q.name = %s ORDER BY s.consumer_id, s.gen",
            "SELECT r.* FROM queen.redeliveries AS r JOIN queen.consumers AS c ON c.id = r.consumer_id"
            " JOIN queen.queues AS q ON q.id = c.queue_id WHERE q.name = %s ORDER BY 1, 2",
            "SELECT c.* FROM queen.consumers AS c JOIN queen.queues AS q ON q.id = c.queue_id"
            " WHERE q.name = %s ORDER BY c.id",
            "SELECT count(*) FROM queen.deliveries WHERE queue_name = %s",
            "SELECT d.* FROM queen.dead_letter_queue AS d JOIN queen.queues AS q ON q.id = d.queue_id"
            " WHERE q.name = %s ORDER BY d.id",
        )
    ]
