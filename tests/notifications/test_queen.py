"""The notifier, as Airflow calls it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG, TaskInstanceState

from airflow_provider_queen.exceptions import InvalidOptionError, QueueNotFoundError
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.notifications.queen import QueenNotifier
from tests.airflow_tasks import Figures


@pytest.fixture
def alerts(hook: QueenHook) -> QueenHook:
    hook.configure_queue("alerts")
    return hook


def context(**more: Any) -> Any:
    ti = SimpleNamespace(
        dag_id="shop",
        run_id="r1",
        task_id="work",
        map_index=-1,
        try_number=2,
        state=TaskInstanceState.FAILED,
    )
    dag = DAG("shop", schedule=None, start_date=datetime(2025, 1, 1, tzinfo=UTC))
    return {"dag": dag, "ti": ti, "run_id": "r1", **more}


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"queue_name": ""}, "queue_name"),
        ({"priority": 10}, "priority is 10"),
        ({"trace_id": "no"}, "no uuid"),
        ({"payload": {"at": datetime(2025, 1, 1)}}, "no JSON"),
        ({"transaction_id": "x" * 256}, "transaction_id"),
    ],
)
def test_literals_are_checked_when_the_dag_is_parsed(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        QueenNotifier(**{"queue_name": "alerts", **parameters})


@pytest.mark.postgres
def test_by_default_it_says_what_happened_and_not_what_the_error_said(alerts: QueenHook) -> None:
    QueenNotifier(queue_name="alerts")(context(exception=ValueError("card 4111")))
    (message,) = alerts.pop("alerts")
    assert message.payload == {
        "dag_id": "shop",
        "run_id": "r1",
        "task_id": "work",
        "map_index": -1,
        "try_number": 2,
        "state": "failed",
        "error": "ValueError",
    }


@pytest.mark.postgres
def test_it_is_templated(alerts: QueenHook, figures: Figures) -> None:
    notifier = QueenNotifier(
        queue_name="{{ 'alerts' }}",
        payload={"text": "{{ ti.task_id }} failed"},
        partition="{{ dag.dag_id }}",
        transaction_id="{{ run_id }}-{{ ti.task_id }}",
        priority=9,
    )
    notifier(context())
    notifier(context())
    (message,) = alerts.pop("alerts")
    assert message.payload == {"text": "work failed"}
    assert figures.sent == {"queen.pushed": 1, "queen.duplicates": 1}
    assert (message.partition, message.transaction_id, message.priority) == ("shop", "r1-work", 9)


@pytest.mark.postgres
def test_it_is_awaited_in_the_triggerer(alerts: QueenHook) -> None:
    async def notify() -> None:
        await QueenNotifier(queue_name="alerts", payload={"late": True})
        await QueenNotifier(queue_name="alerts", context={"run_id": "r1"})

    asyncio.run(notify())
    assert [message.payload for message in alerts.pop("alerts")] == [{"late": True}, {"run_id": "r1"}]


@pytest.mark.postgres
def test_an_error_is_raised(alerts: QueenHook) -> None:
    with pytest.raises(QueueNotFoundError):
        QueenNotifier(queue_name="alert")(context())
