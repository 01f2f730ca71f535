"""``@task.queen``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from airflow.sdk import DAG, task
from airflow.sdk.exceptions import TaskDeferred
from airflow.serialization.serialized_objects import DagSerialization

from airflow_provider_queen.client import Message
from airflow_provider_queen.decorators.queen import queen_task
from airflow_provider_queen.exceptions import InvalidOptionError, ProcessingError
from airflow_provider_queen.hooks.queen import QueenHook
from tests.airflow_tasks import make_context


def operator(function: Any, *arguments: Any, **parameters: Any) -> Any:
    """The operator that calling a decorated function makes."""
    with DAG("shop", schedule=None, start_date=datetime(2025, 1, 1, tzinfo=UTC)):
        return queen_task(**{"task_id": "work", "queue_name": "orders", **parameters})(function)(
            *arguments
        ).operator


@pytest.fixture
def orders(hook: QueenHook) -> QueenHook:
    hook.configure_queue("orders", retry_delay=0)
    hook.configure_queue("next")
    hook.push("orders", [{"payload": n, "partition": str(n)} for n in range(3)])
    return hook


def payloads(messages: list[Message]) -> list[Any]:
    return sorted(message.payload for message in messages)


def test_airflow_knows_it_by_its_name() -> None:
    with DAG("shop", schedule=None, start_date=datetime(2025, 1, 1, tzinfo=UTC)) as dag:

        @task.queen(queue_name="{{ params.queue }}", consumer_group="audit", batch_size=7)
        def handle(messages: list[Message], factor: int) -> dict[str, int]:
            """Says what it is."""
            return {"n": factor}

        handle(3)

    made: Any = dag.get_task("handle")
    assert (made.batch_size, made.max_partitions) == (7, 7)
    assert made.doc_md == "Says what it is."
    assert not made.multiple_outputs
    same = DagSerialization.from_dict(DagSerialization.to_dict(dag)).get_task("handle")
    assert same.queue_name == "{{ params.queue }}"
    made.render_template_fields({"params": {"queue": "x"}})
    assert (made.queue_name, list(made.op_args)) == ("x", [None, 3])


def test_what_makes_no_sense_is_refused_at_parse_time() -> None:
    with pytest.raises(InvalidOptionError, match="name a queue"):
        operator(payloads, queue_name=None)
    with pytest.raises(InvalidOptionError, match="takes no argument"):
        operator(lambda: None)
    with pytest.raises(InvalidOptionError, match="process_batch is given"):
        operator(payloads, process_batch=payloads)
    with pytest.raises(InvalidOptionError, match="one value"):
        queen_task(queue_name="orders", multiple_outputs=True)
    with pytest.raises(TypeError, match="too many"):
        operator(payloads, 1)


@pytest.mark.postgres
def test_the_function_gets_the_messages_and_its_success_acknowledges(orders: QueenHook) -> None:
    def handle(messages: list[Message], factor: int, run_id: str, offset: int = 0) -> Any:
        return [run_id, offset, *(n * factor for n in payloads(messages))]

    assert operator(handle, 10).execute(make_context()) == ["manual__1", 0, 0, 10, 20]
    assert orders.depth("orders").pending == 0
    # It is not called for nothing.
    assert operator(handle, 10).execute(make_context()) is None


@pytest.mark.postgres
def test_what_it_raises_fails_all_and_then_each_alone(orders: QueenHook) -> None:
    calls: list[list[int]] = []

    def handle(messages: list[Message]) -> list[int]:
        calls.append(payloads(messages))
        if len(calls) == 1:
            raise RuntimeError("not now")
        return calls[-1]

    with pytest.raises(ProcessingError, match="of 3 messages 3 failed, the first with RuntimeError: not now"):
        operator(handle).execute(make_context())
    assert orders.depth("orders").pending == 3  # it pops once: the redelivery is for another task
    assert sorted(operator(handle).execute(make_context())) == [0, 1, 2]
    assert sorted(calls[1:]) == [[0], [1], [2]]
    assert orders.depth("orders").pending == 0


@pytest.mark.postgres
def test_it_waits_in_the_triggerer(orders: QueenHook) -> None:
    waiting = operator(payloads, queue_name="next", deferrable=True)
    with pytest.raises(TaskDeferred):
        waiting.execute(make_context())
    orders.push("next", [{"payload": 7}])
    assert waiting.execute_complete(make_context(), {"status": "success", "pending": 1}) == [7]


@pytest.mark.postgres
def test_it_is_mapped_over_its_other_arguments(orders: QueenHook) -> None:
    def handle(messages: list[Message], factor: int) -> Any:
        return [n * factor for n in payloads(messages)]

    with DAG("shop", schedule=None, start_date=datetime(2025, 1, 1, tzinfo=UTC)) as dag:
        queen_task(queue_name="orders")(handle).expand(factor=[10, 20])
    mapped: Any = dag.get_task("handle")
    DagSerialization.to_dict(dag)
    one = mapped.unmap({"op_kwargs": {"factor": 20}})
    assert one.execute(make_context()) == [0, 20, 40]


@pytest.mark.postgres
def test_values_of_several_calls_are_listed(orders: QueenHook) -> None:
    once_each = {"batch_size": 1, "max_messages": 2}
    assert operator(len, **once_each).execute(make_context()) == [1, 1]


@pytest.mark.postgres
def test_its_result_is_forwarded(orders: QueenHook) -> None:
    counts = operator(
        lambda messages: [{"doubled": message.payload * 2} for message in messages], forward_to="next"
    ).execute(make_context())
    assert (counts["completed"], counts["forwarded"]) == (3, 3)
    forwarded = orders.list_messages("next")
    assert {(m.partition, m.payload["doubled"]) for m in forwarded} == {("0", 0), ("1", 2), ("2", 4)}


@pytest.mark.postgres
def test_what_does_not_fit_into_xcom_fails(orders: QueenHook) -> None:
    with pytest.raises(ProcessingError, match="max_xcom_bytes is 10"):
        operator(lambda messages: "x" * 11, max_xcom_bytes=10).execute(make_context())
    assert orders.depth("orders").pending == 3
