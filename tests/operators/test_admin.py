"""Operators that look after queues."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.serialization.serialized_objects import DagSerialization

from airflow_provider_queen.exceptions import InvalidOptionError, QueueNotFoundError
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.operators.admin import (
    QueenConfigureQueueOperator,
    QueenEvictOperator,
    QueenPurgeDeadLettersOperator,
    QueenReclaimOperator,
    QueenRequeueDeadLettersOperator,
    QueenRetainOperator,
    QueenSeekOperator,
)
from tests.airflow_tasks import Figures, make_context

OPERATORS: list[tuple[Any, dict[str, Any]]] = [
    (QueenConfigureQueueOperator, {"queue_name": "orders", "options": {"lease_time": 5}}),
    (QueenSeekOperator, {"queue_name": "orders", "to": "end"}),
    (QueenRequeueDeadLettersOperator, {"queue_name": "orders"}),
    (QueenPurgeDeadLettersOperator, {"queue_name": "orders"}),
    (QueenReclaimOperator, {}),
    (QueenEvictOperator, {}),
    (QueenRetainOperator, {}),
]


def run(operator: type[Any], **parameters: Any) -> Any:
    return operator(task_id="admin", **parameters).execute(make_context())


@pytest.mark.parametrize(
    ("operator", "parameters", "said"),
    [
        (QueenConfigureQueueOperator, {"queue_name": None}, "queue_name is None"),
        (QueenConfigureQueueOperator, {"options": {"lease_tim": 5}}, "nearest is 'lease_time'"),
        (QueenSeekOperator, {"to": "start"}, "unknown position 'start'"),
        (QueenSeekOperator, {"to": datetime(2025, 1, 1)}, "no time zone"),
        (QueenSeekOperator, {"to": "end", "partition": ""}, "partition is ''"),
        (QueenRequeueDeadLettersOperator, {"ids": ["x"]}, "no number"),
        (QueenRequeueDeadLettersOperator, {"ids": "17"}, "needed is a list"),
        (QueenRequeueDeadLettersOperator, {"limit": 0}, "limit is 0"),
        (QueenPurgeDeadLettersOperator, {"older_than_seconds": -1}, "older_than_seconds is -1"),
        (QueenReclaimOperator, {"limit": 0}, "limit is 0"),
        (QueenEvictOperator, {"queue_name": ""}, "queue_name is ''"),
    ],
)
def test_literals_are_checked_when_the_dag_is_parsed(
    operator: type[Any], parameters: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        operator(**{"task_id": "admin", "queue_name": "orders", **parameters})


@pytest.mark.parametrize(("operator", "parameters"), OPERATORS)
def test_names_are_templated_and_serialised(operator: type[Any], parameters: dict[str, Any]) -> None:
    with DAG("shop", schedule=None, start_date=datetime(2025, 1, 1, tzinfo=UTC)) as dag:
        task = operator(task_id="admin", **{**parameters, "queue_name": "{{ q }}"})
    assert DagSerialization.from_dict(DagSerialization.to_dict(dag)).get_task("admin").queue_name == "{{ q }}"
    task.render_template_fields({"q": "x"})
    assert task.queue_name == "x"
    assert "queen_conn_id" in operator.template_fields


@pytest.mark.postgres
def test_configure_creates_and_merges(hook: QueenHook) -> None:
    configured = run(QueenConfigureQueueOperator, queue_name="orders", options={"lease_time": 5})
    assert configured["lease_time"] == 5
    json.dumps(configured)
    assert run(QueenConfigureQueueOperator, queue_name="orders")["lease_time"] == 5
    with pytest.raises(InvalidOptionError):
        run(QueenConfigureQueueOperator, queue_name="orders", options={"lease_time": -1})


@pytest.mark.postgres
def test_seek(hook: QueenHook) -> None:
    hook.configure_queue("orders")
    hook.push("orders", [{"payload": 1}])
    hook.ack(hook.pop("orders", consumer_group="audit"))
    assert run(QueenSeekOperator, queue_name="orders", consumer_group="audit", to="beginning") == 1
    assert hook.depth("orders", "audit").pending == 1
    run(QueenSeekOperator, queue_name="orders", consumer_group="audit", to="2999-01-01T00:00+00:00")
    assert hook.depth("orders", "audit").pending == 0
    with pytest.raises(QueueNotFoundError):
        run(QueenSeekOperator, queue_name="order", to="end")


@pytest.mark.postgres
def test_dead_letters_are_requeued_once_and_purged(hook: QueenHook, figures: Figures) -> None:
    hook.configure_queue("orders")
    hook.push("orders", [{"payload": n} for n in range(3)])
    hook.reject(hook.pop("orders"), error="no")
    first, *_ = (letter.id for letter in hook.dead_letters("orders"))
    ids = run(QueenRequeueDeadLettersOperator, queue_name="orders", ids=[str(first)])
    assert run(QueenRequeueDeadLettersOperator, queue_name="orders", ids=[first]) == ids
    assert [message.id for message in hook.pop("orders")] == ids
    assert figures.sent["queen.requeued"] == 2
    assert run(QueenPurgeDeadLettersOperator, queue_name="orders", older_than_seconds=3600) == 0
    assert run(QueenPurgeDeadLettersOperator, queue_name="orders") >= 2
    assert hook.dead_letters("orders") == []


@pytest.mark.postgres
def test_maintenance_goes_on_until_nothing_is_left(hook: QueenHook) -> None:
    hook.configure_queue("orders", retention_enabled=True, completed_retention_seconds=1)
    hook.configure_queue("late", max_wait_time_seconds=1)
    for name in ("orders", "late"):
        hook.push(name, [{"payload": n, "partition": str(n % 3)} for n in range(9)])
    hook.pop("late", lease_seconds=1)
    hook.pop("orders", batch_size=100, max_partitions=9, auto_ack=True)
    time.sleep(1.2)
    assert run(QueenReclaimOperator, limit=1) == 1
    assert run(QueenReclaimOperator) == 0
    assert run(QueenEvictOperator, limit=2) == {"late/": 9}
    assert run(QueenRetainOperator, queue_name="orders", limit=2) == {"orders/completed": 9}
    assert run(QueenRetainOperator) == {}
    assert hook.depth("late").dead_letters == 9
