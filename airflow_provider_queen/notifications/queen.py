"""Push a message when something happens to a Dag or a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseNotifier

from airflow_provider_queen import metrics
from airflow_provider_queen.client import inputs
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.operators._messages import is_literal, with_defaults

if TYPE_CHECKING:
    from airflow.sdk import Context


class QueenNotifier(BaseNotifier):
    """Push one message, for ``on_failure_callback`` and its like, and for deadline alerts.

    By default its payload names the Dag, the run and, where there is one, the task with its state, try and
    error type. A triggerer, where deadline alerts run, may know less of them.

    :param queue_name: an existing queue (templated)
    :param payload: the payload instead of the default one (templated)
    :param partition: ``Default`` where none is named (templated)
    :param transaction_id: stored once in its partition (templated); None stores a message each time
    :param trace_id: the pipeline that it belongs to (templated)
    :param priority: 0 to 9, higher first
    :param queen_conn_id: connection of type ``queen`` or ``postgres`` (templated)
    """

    template_fields: Sequence[str] = (
        "queue_name",
        "payload",
        "partition",
        "transaction_id",
        "trace_id",
        "queen_conn_id",
    )

    def __init__(
        self,
        *,
        queue_name: str,
        payload: Any = None,
        partition: str | None = None,
        transaction_id: str | None = None,
        trace_id: str | None = None,
        priority: int | None = None,
        queen_conn_id: str = QueenHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.queue_name = queue_name
        self.payload = payload
        self.partition = partition
        self.transaction_id = transaction_id
        self.trace_id = trace_id
        self.priority = priority
        self.queen_conn_id = queen_conn_id
        if is_literal(queue_name):
            inputs.name("queue_name", queue_name)
        literal = {name: value for name, value in self._message({}).items() if is_literal(value)}
        inputs.batch([{"payload": None, **literal}])

    def notify(self, context: Context) -> None:
        with closing(QueenHook(queen_conn_id=self.queen_conn_id)) as hook:
            results = hook.push(self.queue_name, [self._message(context)])
        metrics.count_pushed(self.queue_name, results)

    async def async_notify(self, context: Context) -> None:
        hook = QueenHook(queen_conn_id=self.queen_conn_id)
        async with await hook.get_async_client() as client:
            results = await client.push(self.queue_name, [self._message(context)])
        metrics.count_pushed(self.queue_name, results)

    def _message(self, context: Mapping[str, Any]) -> dict[str, Any]:
        return with_defaults(
            {"payload": describe(context) if self.payload is None else self.payload},
            partition=self.partition,
            transaction_id=self.transaction_id,
            trace_id=self.trace_id,
            priority=self.priority,
        )


def describe(context: Mapping[str, Any]) -> dict[str, Any]:
    """What a callback's context says, in plain values: names and states, no message of an error."""
    ti = context.get("ti") or context.get("task_instance")
    run = context.get("dag_run")
    error = context.get("exception")
    known = {
        "dag_id": _first(ti, run, context.get("dag"), name="dag_id"),
        "run_id": _first(ti, run, name="run_id") or context.get("run_id"),
        "task_id": _first(ti, name="task_id"),
        "map_index": _first(ti, name="map_index"),
        "try_number": _first(ti, name="try_number"),
        "state": _first(ti, run, name="state"),
        "reason": context.get("reason"),
        "error": type(error).__name__ if isinstance(error, BaseException) else None,
    }
    return {
        name: value if isinstance(value, int) else str(getattr(value, "value", value))
        for name, value in known.items()
        if value is not None
    }


def _first(*places: Any, name: str) -> Any:
    return next((value for place in places if (value := getattr(place, name, None)) is not None), None)
