"""``@task.queen``: a function that gets messages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk.bases.decorator import DecoratedOperator, TaskDecorator, task_decorator_factory

from airflow_provider_queen.client import Message
from airflow_provider_queen.exceptions import InvalidOptionError
from airflow_provider_queen.operators._consumer import Consumer, Tally
from airflow_provider_queen.operators.pop import QueenPopOperator, json_size

if TYPE_CHECKING:
    from airflow.sdk import Context

# Stands in the first place of the arguments until there are messages.
_MESSAGES = None


class _QueenDecoratedOperator(DecoratedOperator, QueenPopOperator):
    """The pop operator around a decorated function."""

    custom_operator_name = "@task.queen"
    template_fields: Sequence[str] = (*DecoratedOperator.template_fields, *QueenPopOperator.template_fields)
    template_fields_renderers: ClassVar[dict[str, str]] = {**DecoratedOperator.template_fields_renderers}
    shallow_copy_attrs: Sequence[str] = ("python_callable", *QueenPopOperator.shallow_copy_attrs)

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        for name in ("process", "process_batch"):
            if name in kwargs:
                raise InvalidOptionError(f"{name} is given: with @task.queen, that is the decorated function")
        _check_signature(python_callable)
        self._once = "max_messages" not in kwargs
        batch_size = kwargs.setdefault("batch_size", 100)
        kwargs.setdefault("max_partitions", batch_size)
        self._returned: list[Any] = []
        super().__init__(
            python_callable=python_callable,
            op_args=(_MESSAGES, *(op_args or ())),
            op_kwargs=op_kwargs,
            kwargs_to_upstream={"process_batch": python_callable},
            **kwargs,
        )

    def execute(self, context: Context) -> Any:
        self._returned = []
        return super().execute(context)

    def _work(self, consumer: Consumer, wait_seconds: float) -> None:
        if self._once:
            consumer.run_once(self.batch_size, wait_seconds)
        else:
            super()._work(consumer, wait_seconds)

    def _handle(self, messages: list[Message], context: Context) -> Any:
        arguments = (messages, *tuple(self.op_args)[1:])
        wanted = {**self.determine_kwargs(context), **self.op_kwargs}
        returned = self.python_callable(*arguments, **wanted)
        if self.forward_to is None and returned is not None:
            size = json_size(returned)
            if size > self.max_xcom_bytes:
                raise InvalidOptionError(
                    f"{self.python_callable.__name__} returned {size} bytes and max_xcom_bytes is"
                    f" {self.max_xcom_bytes}: raise it, forward the result, or store it elsewhere"
                )
        self._returned.append(returned)
        return returned

    def _result(self, tally: Tally) -> Any:
        if self.forward_to is not None:
            return super()._result(tally)
        if len(self._returned) <= 1:
            return self._returned[0] if self._returned else None
        if all(isinstance(returned, list) for returned in self._returned):
            return [item for returned in self._returned for item in returned]
        return self._returned


def queen_task(python_callable: Callable[..., Any] | None = None, **kwargs: Any) -> TaskDecorator:
    """Make a function a task that pops messages.

    The function gets a list of messages as its first argument, besides the arguments it is called with and
    context variables that it asks for by name. Its success acknowledges them; what it raises fails all of
    them, to be redelivered. It is not called where no message is ready.

    It is usually called once, with up to ``batch_size`` messages of any partition. A message that failed
    before comes alone, in a call of its own; and ``max_messages`` asks for one batch after the other, until
    so many were popped or none is ready. The task returns what the function returned; lists of several calls
    are joined, other values listed. With ``forward_to``, what it returns is pushed there in the transaction
    that acknowledges, and the task returns the counts of what happened.

    :param python_callable: the function
    :param kwargs: parameters of :class:`~airflow_provider_queen.operators.pop.QueenPopOperator`
    """
    if kwargs.pop("multiple_outputs", False):
        raise InvalidOptionError("multiple_outputs: @task.queen returns one value")
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=False,
        decorated_operator_class=_QueenDecoratedOperator,
        **kwargs,
    )


def _check_signature(function: Callable[..., Any]) -> None:
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    if not kinds & {
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    }:
        raise InvalidOptionError(
            f"{getattr(function, '__name__', function)!r} takes no argument: @task.queen passes messages"
        )
