"""The doorbell: when it rings, what it says, and that nothing is lost between two rings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import psycopg
import pytest
from airflow.serialization.serialized_objects import BaseSerialization
from airflow.triggers.base import BaseEventTrigger

from airflow_provider_queen.client import Depth, QueenClient
from airflow_provider_queen.client.listening import Reading
from airflow_provider_queen.exceptions import InvalidOptionError
from airflow_provider_queen.triggers.messages import Bell, QueenMessageTrigger
from tests.triggers.conftest import all_gone, sessions

NEVER = 3600.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def reading(pending: int, in_flight: int = 0, age: float = 0.0, ready_in: float | None = 0.0) -> Reading:
    return Reading(Depth(pending, in_flight, 0, age if pending else None), ready_in)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bell(clock: Clock) -> Bell:
    return Bell(10.0, 60.0, clock)


def ring_times(bell: Bell, clock: Clock, look: Callable[[float], Reading], seconds: int) -> list[float]:
    """When it rings, asked every second."""
    begun = clock.now
    times = []
    for second in range(seconds):
        clock.now = begun + second
        now = look(second)
        if bell.seconds_to_ring(now) <= 0:
            bell.rung(now)
            times.append(second)
    return times


def test_it_rings_at_once_and_not_for_nothing(bell: Bell) -> None:
    assert bell.seconds_to_ring(reading(0)) == float("inf")
    assert bell.seconds_to_ring(reading(5, in_flight=5)) == float("inf")
    assert bell.seconds_to_ring(reading(1)) <= 0


def test_it_rings_less_and_less_while_nobody_comes(bell: Bell, clock: Clock) -> None:
    assert ring_times(bell, clock, lambda t: reading(5, age=t), 200) == [0, 20, 60, 120, 180]


def test_it_rings_steadily_while_runs_take_their_share(bell: Bell, clock: Clock) -> None:
    # Each run takes one message within five seconds.
    times = ring_times(bell, clock, lambda t: reading(100 - int((t + 5) // 10), age=t), 60)
    assert times == [0, 10, 20, 30, 40, 50]


def test_it_rings_seldom_while_a_consumer_is_at_work(bell: Bell, clock: Clock) -> None:
    # A long run, one batch after the other.
    times = ring_times(bell, clock, lambda t: reading(1000 - int(t), in_flight=10, age=t), 300)
    assert times == [0, 20, 60, 120, 180, 240]


def test_what_comes_after_a_drained_queue_is_rung_for_at_once(bell: Bell, clock: Clock) -> None:
    assert bell.seconds_to_ring(reading(1)) <= 0
    bell.rung(reading(1))
    clock.now += 3
    assert bell.seconds_to_ring(reading(0)) == float("inf")
    clock.now += 3
    assert bell.seconds_to_ring(reading(1)) == pytest.approx(4)
    clock.now += 4
    assert bell.seconds_to_ring(reading(1, age=4)) <= 0


def test_the_same_number_of_others_is_news_too(bell: Bell, clock: Clock) -> None:
    bell.seconds_to_ring(reading(1, age=100))
    bell.rung(reading(1, age=100))
    clock.now += 10
    assert bell.seconds_to_ring(reading(1, age=110)) == pytest.approx(10)
    assert bell.seconds_to_ring(reading(1, age=2)) <= 0


def test_what_is_delayed_is_rung_for_when_it_falls_due(bell: Bell, clock: Clock) -> None:
    times = ring_times(bell, clock, lambda t: reading(1, age=t, ready_in=45.0 - t), 60)
    assert times == [0, 45]


def test_delayed_messages_hide_no_others_for_ever(bell: Bell, clock: Clock) -> None:
    assert ring_times(bell, clock, lambda t: reading(2, age=t, ready_in=NEVER), 130) == [0, 60, 120]


def test_it_is_asked_again_when_a_delay_ends(bell: Bell, clock: Clock) -> None:
    bell.seconds_to_ring(reading(1))
    bell.rung(reading(1))
    clock.now += 11
    assert bell.seconds_to_ring(reading(1, age=11, ready_in=2.5)) == pytest.approx(2.5)


def test_equal_ones_share_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    path, kwargs = QueenMessageTrigger(queue_name="orders", ring_interval=10).serialize()
    assert path == "airflow_provider_queen.triggers.messages.QueenMessageTrigger"
    same = QueenMessageTrigger(**BaseSerialization.deserialize(BaseSerialization.serialize(kwargs)))
    assert same.serialize() == (path, kwargs)
    other = QueenMessageTrigger(queue_name="orders", consumer_group="audit").serialize()
    assert BaseEventTrigger.hash(path, kwargs) == BaseEventTrigger.hash(*same.serialize())
    assert BaseEventTrigger.hash(path, kwargs) != BaseEventTrigger.hash(*other)


@pytest.mark.parametrize(
    ("kwargs", "complaint"),
    [
        ({}, "name a queue"),
        ({"queue_name": ""}, "queue_name is ''"),
        ({"queue_name": "orders", "task": "bill"}, "name a queue or a namespace"),
        ({"queue_name": "orders", "ring_interval": 0}, "ring_interval is 0"),
        ({"queue_name": "orders", "ring_interval": 20, "max_ring_interval": 10}, "less than ring_interval"),
    ],
)
def test_what_cannot_work_is_refused_at_once(kwargs: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidOptionError, match=complaint):
        QueenMessageTrigger(**kwargs)


class Rings:
    """What a running trigger has said so far."""

    def __init__(self) -> None:
        self.payloads: list[dict[str, Any]] = []
        self._new = asyncio.Event()

    def add(self, payload: dict[str, Any]) -> None:
        self.payloads.append(payload)
        self._new.set()

    async def next(self) -> dict[str, Any]:
        await asyncio.wait_for(self._new.wait(), 20)
        self._new.clear()
        return self.payloads[-1]

    async def silent_for(self, seconds: float) -> None:
        self._new.clear()
        await asyncio.sleep(seconds)
        assert not self._new.is_set()


@asynccontextmanager
async def running(trigger: QueenMessageTrigger) -> AsyncIterator[Rings]:
    """The trigger as a triggerer runs it: until it is cancelled."""
    rings = Rings()

    async def run() -> None:
        async with aclosing(trigger.run()) as events:  # type: ignore[type-var]
            async for event in events:
                rings.add(event.payload)

    task = asyncio.create_task(run())
    try:
        yield rings
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def doorbell(**kwargs: Any) -> QueenMessageTrigger:
    defaults = {"queue_name": "orders", "ring_interval": 0.3, "max_ring_interval": 0.6}
    return QueenMessageTrigger(**(defaults | {"poll_interval": NEVER} | kwargs))


@pytest.mark.postgres
def test_it_says_where_and_how_much_but_not_what(queen: QueenClient) -> None:
    async def ring() -> dict[str, Any]:
        async with running(doorbell(consumer_group="audit")) as rings:
            await rings.silent_for(0.3)
            queen.push("orders", [{"payload": "secret"}, {"payload": "secret"}])
            return await rings.next()

    payload = asyncio.run(ring())
    assert 0 <= payload.pop("oldest_age_seconds") < 20
    assert payload == {
        "queue_name": "orders",
        "namespace": None,
        "task": None,
        "consumer_group": "audit",
        "pending": 2,
        "in_flight": 0,
    }
    assert queen.depth("orders", consumer_group="audit").pending == 2
    assert queen.list_consumer_groups("orders") == []  # not even the group was met


@pytest.mark.postgres
def test_a_burst_rings_few_times_and_the_bell_goes_on_until_all_is_taken(queen: QueenClient) -> None:
    async def ring() -> int:
        async with running(doorbell()) as rings:
            await rings.silent_for(0.2)
            for n in range(200):
                queen.push("orders", [{"payload": n, "partition": f"p{n % 20}"}])
                await asyncio.sleep(0)
            while await rings.next():
                if not queen.pop("orders", batch_size=40, max_partitions=20, auto_ack=True):
                    break
                if not queen.depth("orders").pending:
                    break
            await rings.silent_for(1.0)
            return len(rings.payloads)

    assert asyncio.run(ring()) < 20
    assert queen.depth("orders").pending == 0


@pytest.mark.postgres
def test_a_restarted_triggerer_rings_again(queen: QueenClient, sql: psycopg.Connection[Any]) -> None:
    queen.push("orders", [{"payload": 1}])

    async def ring() -> dict[str, Any]:
        async with running(doorbell()) as rings:
            return await rings.next()

    assert asyncio.run(ring())["pending"] == 1
    assert all_gone(sql)
    assert asyncio.run(ring())["pending"] == 1


@pytest.mark.postgres
def test_an_event_that_started_no_run_is_followed_by_another(queen: QueenClient) -> None:
    queen.push("orders", [{"payload": 1}])

    async def ring() -> None:
        async with running(doorbell()) as rings:
            for _ in range(3):
                assert (await rings.next())["pending"] == 1

    asyncio.run(ring())


@pytest.mark.postgres
def test_what_a_consumer_holds_does_not_ring_until_its_lease_ends(queen: QueenClient) -> None:
    queen.push("orders", [{"payload": 1}])
    queen.pop("orders", lease_seconds=1)

    async def ring() -> None:
        async with running(doorbell(poll_interval=0.2)) as rings:
            await rings.silent_for(0.5)
            assert (await rings.next())["in_flight"] == 0

    asyncio.run(ring())


@pytest.mark.postgres
def test_a_queue_that_is_created_later(queen: QueenClient) -> None:
    async def ring() -> None:
        async with running(doorbell(queue_name="later", poll_interval=0.2)) as rings:
            await rings.silent_for(0.5)
            queen.configure_queue("later")
            queen.push("later", [{"payload": 1}])
            assert (await rings.next())["pending"] == 1

    asyncio.run(ring())


@pytest.mark.postgres
def test_a_wildcard_hears_of_queues_that_did_not_exist(queen: QueenClient) -> None:
    async def ring() -> None:
        async with running(doorbell(queue_name=None, namespace="shop")) as rings:
            await rings.silent_for(0.3)
            queen.configure_queue("later", namespace="shop")
            queen.push("later", [{"payload": 1}])
            assert (await rings.next())["pending"] == 1

    asyncio.run(ring())


@pytest.mark.postgres
def test_doorbells_share_the_connection_with_each_other(
    queen: QueenClient, sql: psycopg.Connection[Any]
) -> None:
    async def ring() -> None:
        async with running(doorbell()) as one, running(doorbell(consumer_group="audit")) as two:
            await one.silent_for(0.3)
            assert sessions(sql) == 1
            queen.push("orders", [{"payload": 1}])
            await asyncio.gather(one.next(), two.next())
        assert all_gone(sql)

    asyncio.run(ring())
