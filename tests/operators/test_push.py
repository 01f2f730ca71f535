"""Pushing from a task: what may be written, what is checked when, and that nothing is pushed twice."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

import pytest
from airflow.sdk import DAG, XComArg
from airflow.serialization.serialized_objects import DagSerialization

from airflow_provider_queen.exceptions import InvalidOptionError, QueueFullError, QueueNotFoundError
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.operators.push import QueenPushOperator
from tests.airflow_tasks import Figures, make_context

TRACE = str(uuid.uuid4())


def push(messages: Any, **parameters: Any) -> QueenPushOperator:
    return QueenPushOperator(task_id="push", queue_name="orders", messages=messages, **parameters)


@pytest.fixture
def orders(hook: QueenHook) -> QueenHook:
    hook.configure_queue("orders")
    return hook


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"queue_name": ""}, "queue_name"),
        ({"queue_name": "x" * 256}, "256 characters"),
        ({"messages": [{"payload": 1, "partion": "a"}]}, "nearest is 'partition'"),
        ({"messages": [{"payload": 1, "priority": 10}]}, "priority is 10"),
        ({"messages": [{"at": datetime(2025, 1, 1)}]}, "no JSON"),
        ({"messages": [float("nan")]}, "no JSON"),
        ({"messages": {"n": 1}}, "messages is a dict, needed is a list"),
        ({"messages": "[1"}, "no JSON"),
        ({"messages": 5}, "messages is a int"),
        ({"partition": ""}, "partition"),
        ({"trace_id": "no"}, "no uuid"),
        ({"priority": 11}, "priority is 11"),
        ({"priority": "high"}, "priority is 'high'"),
    ],
)
def test_literals_are_checked_when_the_dag_is_parsed(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        QueenPushOperator(**{"task_id": "push", "queue_name": "orders", "messages": [1], **parameters})


@pytest.mark.parametrize(
    "parameters",
    [
        {"messages": "{{ ti.xcom_pull('other') }}"},
        {"messages": ["{{ ds }}", {"payload": 1, "trace_id": "{{ params.trace }}"}]},
        {"messages": lambda: [float("nan")]},
        {"queue_name": "{{ params.queue }}"},
        {"trace_id": "{{ params.trace }}"},
        {"priority": "{{ params.priority }}"},
    ],
)
def test_templates_and_callables_wait_until_the_task_runs(parameters: dict[str, Any]) -> None:
    QueenPushOperator(**{"task_id": "push", "queue_name": "orders", "messages": [], **parameters})


def test_the_output_of_another_task_is_a_dependency() -> None:
    with DAG("shop", schedule=None):
        first = push([1])
        second = QueenPushOperator(task_id="second", queue_name="next", messages=XComArg(first))
    assert second.upstream_task_ids == {"push"}


def test_it_is_keyword_only_and_has_no_parameter_queue() -> None:
    with pytest.raises(TypeError):
        QueenPushOperator("orders", [1])  # type: ignore[misc]
    assert push([1], queue="heavy").queue == "heavy"  # the executor's


def test_every_field_is_templated() -> None:
    operator = QueenPushOperator(
        task_id="push",
        queue_name="{{ a }}",
        messages=[{"n": "{{ b }}"}, {"payload": "{{ b }}", "partition": "{{ a }}"}],
        partition="{{ a }}",
        trace_id="{{ c }}",
        priority="{{ d }}",
        queen_conn_id="{{ a }}",
    )
    operator.render_template_fields({"a": "x", "b": "y", "c": TRACE, "d": 3})
    assert operator.queue_name == operator.partition == operator.queen_conn_id == "x"
    assert operator.messages == [{"n": "y"}, {"payload": "y", "partition": "x"}]
    assert (operator.trace_id, operator.priority) == (TRACE, "3")


def test_a_dag_with_it_is_serialised_the_same_each_time() -> None:
    def serialised() -> Any:
        with DAG("shop", schedule=None, start_date=datetime(2025, 1, 1, tzinfo=UTC)) as dag:
            QueenPushOperator(task_id="push", queue_name="orders", messages=produce)
        return DagSerialization.to_dict(dag)

    first = serialised()
    assert first == serialised()
    operator = DagSerialization.from_dict(first).get_task("push")
    assert "produce" in str(operator.messages)
    assert [link.name for link in operator.operator_extra_links] == ["Queen"]


def produce() -> list[int]:
    return [1]


@pytest.mark.postgres
def test_payloads_and_messages_with_defaults(orders: QueenHook, figures: Figures) -> None:
    operator = push(
        [{"n": 1}, "text", {"payload": {"n": 3}, "partition": "b", "priority": 0, "transaction_id": "own"}],
        partition="a",
        trace_id=TRACE,
        priority=2,
    )
    ids = operator.execute(make_context("push"))
    stored = {message.id: message for message in orders.list_messages("orders")}
    first, second, third = (stored[one] for one in ids)
    assert [one.payload for one in (first, second, third)] == [{"n": 1}, "text", {"n": 3}]
    assert [(one.partition, one.priority) for one in (first, second, third)] == [("a", 2), ("a", 2), ("b", 0)]
    assert {one.trace_id for one in stored.values()} == {TRACE}
    assert first.transaction_id == "shop/manual__1/push/-1/0"
    assert third.transaction_id == "own"
    assert figures.sent == {"queen.pushed": 3}
    assert figures.tags["queen.pushed"] == {"queue_name": "orders"}


@pytest.mark.postgres
def test_a_callable_asks_for_context_by_name(orders: QueenHook) -> None:
    push(lambda run_id, **_: [run_id]).execute(make_context("push"))
    push(list).execute(make_context("builtin"))
    assert [one.payload for one in orders.list_messages("orders")] == ["manual__1"]


@pytest.mark.postgres
def test_json_text_as_a_template_renders_it(orders: QueenHook) -> None:
    operator = push("{{ messages | tojson }}", priority="{{ priority }}")
    operator.render_template_fields({"messages": [{"n": 1}], "priority": 4})
    operator.execute(make_context("push"))
    (stored,) = orders.list_messages("orders")
    assert (stored.payload, stored.priority) == ({"n": 1}, 4)


@pytest.mark.postgres
def test_a_second_try_pushes_nothing_twice(orders: QueenHook, figures: Figures) -> None:
    first = push([1, 2]).execute(make_context("push"))
    # Dies half way, in effect: the second try brings one more.
    assert push([1, 2, 3]).execute(make_context("push"))[:2] == first
    assert orders.depth("orders").pending == 3
    assert figures.sent == {"queen.pushed": 3, "queen.duplicates": 2}
    # Another map index, task or run is another producer.
    push([1]).execute(make_context("push", map_index=0))
    push([1]).execute(make_context("other"))
    assert orders.depth("orders").pending == 5


@pytest.mark.postgres
def test_a_long_name_is_hashed(orders: QueenHook) -> None:
    for _ in range(2):
        push([1, 2]).execute(make_context("t" * 250))
    ids = {message.transaction_id for message in orders.list_messages("orders")}
    assert len(ids) == 2
    assert all(one.startswith("sha256/") and len(one) <= 255 for one in ids)


@pytest.mark.postgres
def test_errors_are_the_products_own(orders: QueenHook) -> None:
    with pytest.raises(QueueNotFoundError, match="'orders'"):
        QueenPushOperator(task_id="push", queue_name="order", messages=[1]).execute(make_context())
    with pytest.raises(InvalidOptionError, match="no JSON"):
        push(lambda: [float("nan")]).execute(make_context())
    orders.configure_queue("orders", max_queue_size=1)
    with pytest.raises(QueueFullError):
        push([1, 2]).execute(make_context())
    assert orders.depth("orders").pending == 0
