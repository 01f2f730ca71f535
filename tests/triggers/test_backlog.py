"""The trigger that waits for a backlog, and the connection that all of them share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest
from airflow.serialization.serialized_objects import BaseSerialization

from airflow_provider_queen.client import Depth, QueenClient
from airflow_provider_queen.client.schema import migrate
from airflow_provider_queen.embedded.postgres import PostgresServer
from airflow_provider_queen.exceptions import InvalidOptionError
from airflow_provider_queen.triggers import _listener
from airflow_provider_queen.triggers.backlog import BacklogCondition, QueenBacklogTrigger
from tests.triggers.conftest import define_connection, sessions

NEVER = 3600.0


async def fired(trigger: QueenBacklogTrigger) -> dict[str, Any]:
    """What the trigger says, once; a trigger that says more would not end here."""
    (event,) = [event async for event in trigger.run()]
    payload: dict[str, Any] = event.payload
    return payload


async def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        await asyncio.sleep(0.02)


async def while_waiting(trigger: QueenBacklogTrigger, action: Callable[[], Any]) -> dict[str, Any]:
    """What the trigger says after an action that comes when it already waits."""
    waiting = asyncio.create_task(fired(trigger))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await asyncio.to_thread(action)
    return await asyncio.wait_for(waiting, 20)


def run(work: Awaitable[Any]) -> Any:
    async def inside() -> Any:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(inside())


def test_it_travels_to_the_triggerer_and_back() -> None:
    trigger = QueenBacklogTrigger(
        queen_conn_id="other",
        namespace="shop",
        task="bill",
        consumer_group="audit",
        min_pending=1,
        max_pending=9,
        min_oldest_age_seconds=1.5,
        min_dead_letters=2,
        ready=True,
        poll_interval=5,
    )
    path, kwargs = trigger.serialize()
    assert path == "airflow_provider_queen.triggers.backlog.QueenBacklogTrigger"
    assert kwargs == {
        "queen_conn_id": "other",
        "queue_name": None,
        "namespace": "shop",
        "task": "bill",
        "consumer_group": "audit",
        "min_pending": 1,
        "max_pending": 9,
        "min_oldest_age_seconds": 1.5,
        "min_dead_letters": 2,
        "ready": True,
        "poll_interval": 5.0,
    }
    sent = BaseSerialization.deserialize(BaseSerialization.serialize(kwargs))
    assert QueenBacklogTrigger(**sent).serialize() == (path, kwargs)
    assert trigger.task is None  # the base class's, not ours


@pytest.mark.parametrize(
    ("kwargs", "complaint"),
    [
        ({"queue_name": "orders"}, "no condition"),
        ({"min_pending": 1}, "name a queue"),
        ({"queue_name": "orders", "namespace": "shop", "min_pending": 1}, "name a queue or a namespace"),
        ({"queue_name": "orders", "min_pending": -1}, "min_pending is -1"),
        ({"queue_name": "orders", "max_pending": 1.5}, "max_pending is 1.5"),
        ({"queue_name": "orders", "min_dead_letters": True}, "min_dead_letters is True"),
        ({"queue_name": "orders", "min_oldest_age_seconds": float("nan")}, "min_oldest_age_seconds is nan"),
        ({"queue_name": "orders", "min_pending": 2, "max_pending": 1}, "no backlog is both"),
        ({"queue_name": "orders", "min_pending": 2, "poll_interval": 0}, "poll_interval is 0"),
    ],
)
def test_what_cannot_work_is_refused_at_once(kwargs: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidOptionError, match=complaint):
        QueenBacklogTrigger(**kwargs)


@pytest.mark.parametrize(
    ("conditions", "depth", "met"),
    [
        ({"min_pending": 3}, Depth(3, 0, 0, 1.0), True),
        ({"min_pending": 3}, Depth(2, 0, 0, 1.0), False),
        ({"min_pending": 0}, Depth(0, 0, 0, None), True),
        ({"max_pending": 0}, Depth(0, 0, 0, None), True),
        ({"max_pending": 0}, Depth(1, 1, 0, 1.0), False),
        ({"min_oldest_age_seconds": 60}, Depth(1, 0, 0, 61.0), True),
        ({"min_oldest_age_seconds": 60}, Depth(1, 0, 0, 59.0), False),
        ({"min_oldest_age_seconds": 0}, Depth(0, 0, 0, None), False),
        ({"min_oldest_age_seconds": 0}, Depth(0, 0, 0, 0.0), False),
        ({"min_dead_letters": 1}, Depth(0, 0, 1, None), True),
        ({"min_dead_letters": 1}, Depth(9, 0, 0, 1.0), False),
        ({"min_pending": 1, "min_oldest_age_seconds": 60}, Depth(5, 0, 0, 10.0), False),
        ({"min_pending": 1, "max_pending": 5}, Depth(5, 0, 0, 10.0), True),
    ],
)
def test_every_condition_must_hold(conditions: dict[str, Any], depth: Depth, met: bool) -> None:
    assert BacklogCondition(**conditions).is_met(depth) is met


@pytest.mark.postgres
def test_it_fires_at_once_when_all_is_as_wanted(queen: QueenClient) -> None:
    queen.push("orders", [{"payload": n} for n in range(3)])
    payload = run(fired(QueenBacklogTrigger(queue_name="orders", min_pending=3, poll_interval=NEVER)))
    age = payload.pop("oldest_age_seconds")
    assert payload == {"status": "success", "pending": 3, "in_flight": 0, "dead_letters": 0}
    assert 0 <= age < 60


@pytest.mark.postgres
@pytest.mark.parametrize(
    "where",
    [{"queue_name": "orders"}, {"namespace": "shop"}, {"queue_name": "orders", "consumer_group": "g"}],
)
def test_a_push_wakes_it(queen: QueenClient, where: dict[str, str]) -> None:
    trigger = QueenBacklogTrigger(**where, min_pending=1, poll_interval=NEVER)
    payload = run(while_waiting(trigger, lambda: queen.push("orders", [{"payload": 1}])))
    assert payload["pending"] == 1


@pytest.mark.postgres
def test_what_no_notification_tells_is_found_by_looking(queen: QueenClient) -> None:
    queen.push("orders", [{"payload": 1}])
    trigger = QueenBacklogTrigger(queue_name="orders", max_pending=0, poll_interval=0.2)
    payload = run(while_waiting(trigger, lambda: queen.pop("orders", auto_ack=True)))
    assert payload["pending"] == 0


@pytest.mark.postgres
def test_an_age_is_met_when_it_is_reached(queen: QueenClient) -> None:
    queen.push("orders", [{"payload": 1}])
    trigger = QueenBacklogTrigger(queue_name="orders", min_oldest_age_seconds=1, poll_interval=NEVER)
    assert 1 <= run(fired(trigger))["oldest_age_seconds"] < 20


@pytest.mark.postgres
def test_dead_letters(queen: QueenClient) -> None:
    queen.push("orders", [{"payload": 1}])
    trigger = QueenBacklogTrigger(queue_name="orders", min_dead_letters=1, poll_interval=0.2)
    payload = run(while_waiting(trigger, lambda: queen.reject(queen.pop("orders"))))
    assert payload["dead_letters"] == 1


@pytest.mark.postgres
def test_ready_means_that_a_message_can_be_popped(queen: QueenClient) -> None:
    queen.push("orders", [{"payload": 1}, {"payload": 2}])
    held = queen.pop("orders", batch_size=1)
    assert queen.pop("orders") == []  # as a consumer does before it waits
    trigger = QueenBacklogTrigger(queue_name="orders", min_pending=1, ready=True, poll_interval=NEVER)
    assert run(while_waiting(trigger, lambda: queen.ack(held)))["pending"] == 1


@pytest.mark.postgres
def test_ready_waits_for_a_retry_to_fall_due(queen: QueenClient) -> None:
    queen.configure_queue("orders", retry_delay=1200)
    queen.push("orders", [{"payload": 1}])
    queen.nack(queen.pop("orders"))
    trigger = QueenBacklogTrigger(queue_name="orders", min_pending=1, ready=True, poll_interval=NEVER)
    assert run(while_waiting(trigger, lambda: None))["pending"] == 1
    assert queen.pop("orders")


@pytest.mark.postgres
def test_ready_hears_of_a_new_partition_behind_a_delayed_one(queen: QueenClient) -> None:
    queen.configure_queue("orders", retry_delay=100_000)
    queen.push("orders", [{"payload": 1}])
    queen.nack(queen.pop("orders"))
    trigger = QueenBacklogTrigger(queue_name="orders", min_pending=1, ready=True, poll_interval=NEVER)
    payload = run(while_waiting(trigger, lambda: queen.push("orders", [{"payload": 2, "partition": "new"}])))
    assert payload["pending"] == 2


@pytest.mark.postgres
def test_where_waiting_is_of_no_use_it_says_so(queen: QueenClient) -> None:
    payload = run(fired(QueenBacklogTrigger(queue_name="order", min_pending=1)))
    assert payload["status"] == "error"
    assert "order" in payload["message"]


def test_a_connection_that_is_missing() -> None:
    payload = run(fired(QueenBacklogTrigger(queen_conn_id="nowhere", queue_name="orders", min_pending=1)))
    assert payload["status"] == "error"
    assert "nowhere" in payload["message"]


@pytest.mark.postgres
def test_a_database_without_the_schema(monkeypatch: pytest.MonkeyPatch, postgres_dsn: str) -> None:
    define_connection(monkeypatch, "queen_default", postgres_dsn)
    payload = run(fired(QueenBacklogTrigger(queue_name="orders", min_pending=1)))
    assert payload["status"] == "error"
    assert "queen_migrate" in payload["message"]


@pytest.mark.postgres
def test_behind_a_transaction_pooler_it_looks_from_time_to_time(
    queen: QueenClient, queen_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    define_connection(monkeypatch, "pooled", queen_dsn, transaction_pooler=True)
    trigger = QueenBacklogTrigger(
        queen_conn_id="pooled", queue_name="orders", min_pending=1, poll_interval=0.2
    )
    assert run(while_waiting(trigger, lambda: queen.push("orders", [{"payload": 1}])))["pending"] == 1


@pytest.mark.postgres
def test_two_hundred_of_them_share_one_connection(queen: QueenClient, sql: psycopg.Connection[Any]) -> None:
    names = [f"queue-{n}" for n in range(100)]
    for name in names:
        queen.configure_queue(name)
    triggers = [
        QueenBacklogTrigger(queue_name=name, consumer_group=group, min_pending=1, poll_interval=NEVER)
        for name in names
        for group in (None, "audit")
    ]

    async def all_of_them() -> list[dict[str, Any]]:
        waiting = [asyncio.create_task(fired(trigger)) for trigger in triggers]
        await eventually(lambda: sessions(sql) == 1)
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in waiting)
        for name in names:
            queen.push(name, [{"payload": 1}])
            assert sessions(sql) <= 1
        payloads = await asyncio.gather(*waiting)
        await eventually(lambda: sessions(sql) == 0)
        return payloads

    assert [payload["pending"] for payload in run(all_of_them())] == [1] * 200


@pytest.mark.postgres
def test_who_waits_for_the_same_shares_each_look(queen: QueenClient, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    read = _listener.AsyncListener.read

    async def counted(self: Any, backlog: Any) -> Any:
        nonlocal looks
        looks += 1
        return await read(self, backlog)

    monkeypatch.setattr(_listener.AsyncListener, "read", counted)

    async def many() -> None:
        trigger = QueenBacklogTrigger(queue_name="orders", min_pending=1, poll_interval=NEVER)
        waiting = [asyncio.create_task(fired(trigger)) for _ in range(50)]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(queen.push, "orders", [{"payload": 1}])
        await asyncio.gather(*waiting)

    run(many())
    assert looks < 10


@pytest.mark.postgres
def test_one_that_is_cancelled_does_not_take_the_others_along(
    queen: QueenClient, sql: psycopg.Connection[Any]
) -> None:
    async def two() -> None:
        trigger = QueenBacklogTrigger(queue_name="orders", min_pending=1, poll_interval=NEVER)
        cancelled, kept = (asyncio.create_task(fired(trigger)) for _ in range(2))
        await asyncio.sleep(0.3)
        cancelled.cancel()
        await asyncio.sleep(0.1)
        assert sessions(sql) == 1
        await asyncio.to_thread(queen.push, "orders", [{"payload": 1}])
        assert (await kept)["pending"] == 1
        assert cancelled.cancelled()

        last = asyncio.create_task(fired(QueenBacklogTrigger(queue_name="orders", min_pending=2)))
        await eventually(lambda: sessions(sql) == 1)
        last.cancel()
        await eventually(lambda: sessions(sql) == 0)
        assert not _listener._keepers[asyncio.get_running_loop()]

    run(two())


@pytest.mark.postgres
def test_an_ended_session_is_replaced(queen: QueenClient, sql: psycopg.Connection[Any]) -> None:
    def end() -> None:
        sql.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'waiting'"
        )
        queen.push("orders", [{"payload": 1}])  # nobody listens now

    trigger = QueenBacklogTrigger(queue_name="orders", min_pending=1, poll_interval=NEVER)
    assert run(while_waiting(trigger, end))["pending"] == 1


@pytest.mark.postgres
def test_airflow_that_does_not_answer_is_asked_again(
    queen: QueenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_listener, "FIRST_RETRY_SECONDS", 0.1)
    get_client = _listener.QueenHook.get_async_client
    answers = iter([False, False])

    async def after_a_while(self: Any) -> Any:
        if next(answers, True):
            return await get_client(self)
        raise RuntimeError("the API server is away")

    monkeypatch.setattr(_listener.QueenHook, "get_async_client", after_a_while)
    queen.push("orders", [{"payload": 1}])
    trigger = QueenBacklogTrigger(queue_name="orders", min_pending=1, poll_interval=NEVER)
    assert run(fired(trigger))["pending"] == 1


@pytest.mark.postgres
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_of_the_database(
    monkeypatch: pytest.MonkeyPatch, own_server: PostgresServer, mode: str
) -> None:
    monkeypatch.setattr(_listener, "FIRST_RETRY_SECONDS", 0.1)
    define_connection(monkeypatch, "queen_default", own_server.dsn())
    with QueenClient(own_server.dsn()) as client:
        client.configure_queue(mode)

    async def through_the_restart() -> None:
        trigger = QueenBacklogTrigger(queue_name=mode, min_pending=1, poll_interval=NEVER)
        waiting = [asyncio.create_task(fired(trigger)) for _ in range(20)]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(own_server.stop, mode)
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in waiting)
        await asyncio.to_thread(own_server.start)
        with QueenClient(own_server.dsn()) as client:
            await asyncio.to_thread(client.push, mode, [{"payload": 1}])
        assert {payload["pending"] for payload in await asyncio.gather(*waiting)} == {1}

    run(through_the_restart())


@pytest.fixture(scope="module")
def own_server() -> Any:
    """A server that may be stopped."""
    with PostgresServer() as server:
        migrate(server.dsn())
        yield server
