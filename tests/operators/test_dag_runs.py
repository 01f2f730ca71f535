"""Operators and decorator as Airflow runs them: task runner, supervisor, task state store, XCom, triggers.

The first run of a process costs ten seconds and more, so each Dag here has several things to show.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from airflow.sdk import DAG, task

from airflow_provider_queen.client import Message
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.operators._consumer import Consumer
from airflow_provider_queen.operators._leases import LeaseMemory
from airflow_provider_queen.operators.pop import QueenPopOperator
from airflow_provider_queen.operators.push import QueenPushOperator
from tests.airflow_tasks import run_dag

pytestmark = [
    pytest.mark.airflow,
    pytest.mark.postgres,
    pytest.mark.slow,
    pytest.mark.usefixtures("airflow_db"),
]


@pytest.fixture
def queues(hook: QueenHook) -> QueenHook:
    for name in ("orders", "next", "late", "long"):
        hook.configure_queue(name, retry_delay=0)
    return hook


@pytest.fixture
def dag() -> Iterator[DAG]:
    with DAG(
        f"run_{uuid.uuid4().hex}",
        schedule=None,
        start_date=datetime(2025, 1, 1, tzinfo=UTC),
        default_args={"retries": 1, "retry_delay": timedelta(0)},
    ) as dag:
        yield dag


def returned(run: Any, task_id: str, map_index: int = -1, key: str = "return_value") -> Any:
    ti = run.get_task_instance(task_id, map_index=map_index)
    return ti.xcom_pull(task_ids=task_id, map_indexes=map_index, key=key)


def fail_the_first_try(context: Any, result: Any = None) -> None:
    if context["ti"].try_number == 1:
        raise RuntimeError("after the work was done")


def test_a_pipeline(queues: QueenHook, dag: DAG) -> None:
    """Push by XCom and by mapping, pop and forward, consume by TaskFlow."""

    @task
    def produce() -> list[dict[str, Any]]:
        return [{"payload": {"n": n}, "partition": f"p{n % 2}"} for n in range(4)]

    push = QueenPushOperator(
        task_id="push", queue_name="orders", messages=produce(), post_execute=fail_the_first_try
    )
    mapped = QueenPushOperator.partial(task_id="mapped", queue_name="orders").expand(
        messages=[[{"n": 10}], [{"n": 11}]]
    )
    pop = QueenPopOperator(
        task_id="pop",
        queue_name="orders",
        process=lambda message, ti: {"n": message.payload["n"], "by": ti.task_id},
        forward_to="next",
    )

    @task.queen(queue_name="next")
    def consume(messages: list[Message], factor: int) -> dict[str, Any]:
        return {"by": messages[0].payload["by"], "n": sorted(m.payload["n"] * factor for m in messages)}

    [push, mapped] >> pop >> consume(2)
    run = run_dag(dag)
    assert run.state == "success"
    # The first try of the task had pushed already, and the second did not push again.
    assert run.get_task_instance("push").try_number == 2
    assert len(returned(run, "push")) == 4
    assert [len(returned(run, "mapped", map_index=n)) for n in (0, 1)] == [1, 1]
    assert returned(run, "pop")["forwarded"] == 6
    assert returned(run, "consume") == {"by": "pop", "n": [0, 2, 4, 6, 20, 22]}
    assert "/plugin/queen?queue_name=orders" in returned(run, "pop", key="_link_QueenLink")
    assert queues.depth("orders").pending == queues.depth("next").pending == 0


def test_tries_and_waiting(queues: QueenHook, dag: DAG) -> None:
    """Tries that die with their lease, are killed, or fail; and a task that waits in the triggerer."""
    queues.push("next", [{"payload": "deadly"}])
    queues.push("long", [{"payload": n} for n in range(2)])
    queues.push("orders", [{"payload": n} for n in range(3)])
    death = pytest.MonkeyPatch()
    attempts: list[int] = []
    kills: list[tuple[int, int, int]] = []
    tries: list[tuple[int, int, int]] = []

    def die_once(message: Message, ti: Any) -> None:
        if ti.try_number == 1:
            # As if by kill -9: nothing is settled or given back, nothing forgotten.
            for owner, name in ((Consumer, "_settle_last"), (Consumer, "give_back"), (LeaseMemory, "forget")):
                death.setattr(owner, name, lambda *_: None)
            raise SystemExit(9)
        attempts.append(message.attempt)

    def kill_once(message: Message, ti: Any) -> None:
        if ti.try_number == 1 and message.payload == 1:
            os.kill(os.getpid(), signal.SIGTERM)  # as the supervisor does
            time.sleep(30)
        kills.append((ti.try_number, message.payload, message.attempt))

    def fail_once(message: Message, ti: Any) -> None:
        tries.append((ti.try_number, message.payload, message.attempt))
        if message.payload == 1 and message.attempt == 1:
            raise ValueError("not now")

    def push_when_somebody_waits() -> None:
        with closing(QueenHook()) as hook:
            while not hook.list_consumer_groups("late"):
                time.sleep(0.1)
            hook.push("late", [{"payload": "at last"}])

    dying = QueenPopOperator(
        task_id="dying", queue_name="next", process=die_once, on_retry_callback=lambda _: death.undo()
    )
    killed = QueenPopOperator(task_id="killed", queue_name="long", process=kill_once)
    failing = QueenPopOperator(
        task_id="failing", queue_name="orders", process=fail_once, max_messages=3, batch_size=3
    )
    waiting = QueenPopOperator(task_id="waiting", queue_name="late", deferrable=True)
    dying >> killed >> failing >> waiting
    pusher = threading.Thread(target=push_when_somebody_waits, daemon=True)
    pusher.start()
    before = signal.getsignal(signal.SIGTERM)
    try:
        run = run_dag(dag)
    finally:
        signal.signal(signal.SIGTERM, before)  # the task runner leaves its own
    pusher.join(10)
    assert run.state == "success"
    # The second try ended the first one's lease, which would have lasted 300 seconds.
    assert attempts == [2]
    # What was done was acknowledged; the rest was given back at once, and no attempt counted.
    assert kills == [(1, 0, 1), (2, 1, 1)]
    # What succeeded was acknowledged in the first try; the second got what had failed.
    assert tries == [(1, 0, 1), (1, 1, 1), (1, 2, 1), (2, 1, 2)]
    # It found nothing at first: the message came after it had looked.
    assert [message["payload"] for message in returned(run, "waiting")] == ["at last"]
    assert queues.depth("late").pending == 0
