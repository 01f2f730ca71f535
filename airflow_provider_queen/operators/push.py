"""Push messages to a queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

from airflow_provider_queen import metrics
from airflow_provider_queen.client import inputs
from airflow_provider_queen.exceptions import InvalidOptionError
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.lineage import QueueLineage
from airflow_provider_queen.links.queen import QueenLink
from airflow_provider_queen.operators._messages import (
    call_with_context,
    derived_id,
    is_literal,
    task_id_parts,
    to_messages,
    with_defaults,
)

if TYPE_CHECKING:
    from airflow.sdk import Context, XComArg


class QueenPushOperator(QueueLineage, BaseOperator):
    """Push messages to a queue, all or none, and return their ids.

    A message without a ``transaction_id`` gets one of Dag, run, task, map index and position. So a task that
    runs again, as a retry or because it was cleared, pushes nothing twice while the queue retains the first:
    the ids are those of the first time.

    :param queue_name: an existing queue (templated)
    :param messages: a list of payloads, or of mappings with ``payload`` and, as wanted, ``partition``,
        ``transaction_id``, ``trace_id`` and ``priority``; or another task's output, the JSON text of such a
        list, or a callable that returns one and may ask for context variables by name (templated)
    :param partition: for messages that name none; ``Default`` where this names none either (templated)
    :param trace_id: for messages that name none: the pipeline that they belong to (templated)
    :param priority: for messages that name none: 0 to 9, higher first (templated)
    :param queen_conn_id: connection of type ``queen`` or ``postgres`` (templated)
    """

    template_fields: Sequence[str] = (
        "queue_name",
        "messages",
        "partition",
        "trace_id",
        "priority",
        "queen_conn_id",
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {"messages": "json"}
    operator_extra_links = (QueenLink(),)
    ui_color = "#e6f2ec"

    def __init__(
        self,
        *,
        queue_name: str,
        messages: Sequence[Any] | Callable[..., Sequence[Any]] | XComArg | str,
        partition: str | None = None,
        trace_id: str | None = None,
        priority: int | str | None = None,
        queen_conn_id: str = QueenHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.queue_name = queue_name
        self.messages = messages
        self.partition = partition
        self.trace_id = trace_id
        self.priority = priority
        self.queen_conn_id = queen_conn_id
        self._check_literals()

    @cached_property
    def hook(self) -> QueenHook:
        return QueenHook(queen_conn_id=self.queen_conn_id)

    def execute(self, context: Context) -> list[str]:
        messages = self._messages(context)
        with closing(self.hook) as hook:
            results = hook.push(self.queue_name, messages)
        metrics.count_pushed(self.queue_name, results)
        duplicates = sum(result.status == "duplicate" for result in results)
        self.log.info(
            "Pushed %s messages to %s; %s more were there already",
            len(results) - duplicates,
            self.queue_name,
            duplicates,
        )
        return [result.message_id for result in results]

    def queues_written(self) -> Sequence[str]:
        return [self.queue_name]

    def _messages(self, context: Context) -> list[dict[str, Any]]:
        given = self.messages
        items = call_with_context(given, (), context) if callable(given) else given
        stem = task_id_parts(context)
        return [
            with_defaults(message, transaction_id=derived_id((*stem, position)), **self._defaults())
            for position, message in enumerate(to_messages(items))
        ]

    def _defaults(self) -> dict[str, Any]:
        return {
            "partition": self.partition,
            "trace_id": self.trace_id,
            "priority": _priority(self.priority),
        }

    def _check_literals(self) -> None:
        """Say at parse time what can be said then; the rest is checked before anything is sent."""
        if is_literal(self.queue_name):
            inputs.name("queue_name", self.queue_name)
        defaults = self._defaults() if is_literal(self.priority) else {}
        defaults = {name: value for name, value in defaults.items() if is_literal(value)}
        inputs.batch([with_defaults({"payload": None}, **defaults)])
        if is_literal(self.messages):
            inputs.batch(to_messages(self.messages))


def _priority(value: int | str | None) -> int | None:
    if not isinstance(value, str):
        return value
    if value.isdecimal():  # as a template renders it
        return int(value)
    raise InvalidOptionError(
        f"priority is {value!r}, allowed are whole numbers from 0 to {inputs.MAX_PRIORITY}"
    )
