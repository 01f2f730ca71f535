"""Pop messages from a queue, have them processed, and settle them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, conf
from airflow.sdk.exceptions import AirflowSkipException

from airflow_provider_queen import metrics
from airflow_provider_queen.client import Message, inputs
from airflow_provider_queen.exceptions import InvalidOptionError, ProcessingError, QueenError
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.lineage import QueueLineage
from airflow_provider_queen.links.queen import QueenLink
from airflow_provider_queen.operators._consumer import Consumer, Tally
from airflow_provider_queen.operators._leases import LeaseKeeper, LeaseMemory, let_run_out
from airflow_provider_queen.operators._messages import call_with_context, is_literal
from airflow_provider_queen.triggers.backlog import DEFAULT_POLL_INTERVAL, QueenBacklogTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context

DEFAULT_MAX_MESSAGES = 1000
DEFAULT_MAX_XCOM_BYTES = 1_048_576


class QueenPopOperator(QueueLineage, BaseOperator):
    """Pop messages, process them, and settle each by what became of it.

    ``process`` is called with one message after the other, or ``process_batch`` with a list. What succeeded
    is acknowledged. What raised is nacked with the error, so that it comes again after the queue's
    ``retry_delay``, and is a dead letter in the end. The leases are renewed while the callable works. Results
    are settled per batch, in a long one every few seconds. Returned are the counts of what happened.

    With ``forward_to``, what the callable returns is pushed to another queue in the transaction that
    acknowledges the message: none, one (anything but a list), or a list of several, each a payload or a
    mapping as for :class:`~airflow_provider_queen.operators.push.QueenPushOperator`. It keeps the partition,
    priority and ``trace_id`` of the message it comes from, unless it names others. A list from
    ``process_batch`` that is as long as the batch is taken as one result per message.

    A message that failed before is passed to ``process_batch`` alone, so that it cannot take others along to
    the dead letters.

    With neither callable, the messages themselves are returned, acknowledged, as mappings; as many of them as
    ``max_messages`` and ``max_xcom_bytes`` allow. The others stay in the queue.

    A task that is killed gives back what it holds. One whose process died leaves its leases to its next try,
    which ends them, so that it need not wait until they run out.

    :param queue_name: the queue (templated); or leave it out and name ``namespace``, ``task`` or both
    :param namespace: pop from every queue of this namespace (templated)
    :param task: pop from every queue of this task (templated)
    :param partition: only this one (templated)
    :param consumer_group: an independent reader (templated); None is queue mode
    :param batch_size: how many messages are popped, and passed to ``process_batch``, at a time
    :param max_messages: how many at most; None, for callables only: until none is ready
    :param max_partitions: from how many partitions at a time
    :param lease_seconds: how long messages are leased; the queue's ``lease_time`` by default
    :param subscription_mode: where a new group begins: ``all``, ``new`` or ``timestamp``
    :param subscription_from: for ``timestamp``: a datetime with a zone, or its ISO text (templated)
    :param wait_seconds: how long to wait for the first message; with ``deferrable``, None waits without end,
        and the task fails when the time is over
    :param process: called with each message, and with context variables that it asks for by name
    :param process_batch: the same with lists of messages; instead of ``process``
    :param forward_to: an existing queue for what the callable returns (templated)
    :param fail_on_error: let the task fail, at its end, when a message did
    :param skip_on_empty: skip the task, and what depends on it, when there was no message
    :param max_xcom_bytes: how much may be returned, as JSON
    :param deferrable: where no message is ready, wait in the triggerer, without a worker slot
    :param poll_interval: with ``deferrable``: seconds between two looks where no notification comes
    :param queen_conn_id: connection of type ``queen`` or ``postgres`` (templated)
    """

    template_fields: Sequence[str] = (
        "queue_name",
        "namespace",
        "task",
        "partition",
        "consumer_group",
        "subscription_from",
        "forward_to",
        "queen_conn_id",
    )
    operator_extra_links = (QueenLink(),)
    shallow_copy_attrs: Sequence[str] = ("process", "process_batch")
    ui_color = "#f2ece6"

    _consumer: Consumer | None = None
    _queues_read: Collection[str] = ()

    def __init__(
        self,
        *,
        queue_name: str | None = None,
        namespace: str | None = None,
        task: str | None = None,
        partition: str | None = None,
        consumer_group: str | None = None,
        batch_size: int = 100,
        max_messages: int | None = DEFAULT_MAX_MESSAGES,
        max_partitions: int = 1,
        lease_seconds: int | None = None,
        subscription_mode: str = "all",
        subscription_from: datetime | str | None = None,
        wait_seconds: float | None = None,
        process: Callable[..., Any] | None = None,
        process_batch: Callable[..., Any] | None = None,
        forward_to: str | None = None,
        fail_on_error: bool = True,
        skip_on_empty: bool = False,
        max_xcom_bytes: int = DEFAULT_MAX_XCOM_BYTES,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        poll_interval: float = DEFAULT_POLL_INTERVAL,
        queen_conn_id: str = QueenHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.queue_name = queue_name
        self.namespace = namespace
        self.task = task
        self.partition = partition
        self.consumer_group = consumer_group
        self.batch_size = batch_size
        self.max_messages = max_messages
        self.max_partitions = max_partitions
        self.lease_seconds = lease_seconds
        self.subscription_mode = subscription_mode
        self.subscription_from = subscription_from
        self.wait_seconds = wait_seconds
        self.process = process
        self.process_batch = process_batch
        self.forward_to = forward_to
        self.fail_on_error = fail_on_error
        self.skip_on_empty = skip_on_empty
        self.max_xcom_bytes = max_xcom_bytes
        self.deferrable = deferrable
        self.poll_interval = poll_interval
        self.queen_conn_id = queen_conn_id
        self._check_callables()
        self._check_literals()

    @cached_property
    def hook(self) -> QueenHook:
        return QueenHook(queen_conn_id=self.queen_conn_id)

    def execute(self, context: Context) -> Any:
        wait_seconds = 0 if self.deferrable else self.wait_seconds or 0
        with self._consuming(context) as consumer:
            if not self._has_callable():
                returned: Any = self._collect(consumer, wait_seconds)
            else:
                self._work(consumer, wait_seconds)
                returned = self._result(consumer.tally)
        tally = consumer.tally
        if not tally.popped:
            return self._none_was_ready(returned)
        self.log.info(
            "Popped %s messages: %s completed, %s failed, %s given back, %s lost; forwarded %s",
            tally.popped,
            tally.completed,
            tally.failed,
            tally.released,
            tally.leases_lost,
            tally.forwarded,
        )
        self._complain(tally)
        return returned

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """Pop what the trigger saw; where others were faster, wait again."""
        if event["status"] != "success":
            raise QueenError(event["message"])
        return self.execute(context)

    def on_kill(self) -> None:
        """Stop, and give back what is held."""
        if self._consumer is not None:
            self._consumer.kill()

    def queues_read(self) -> Collection[str]:
        return self._queues_read or ([self.queue_name] if self.queue_name else [])

    def queues_written(self) -> Collection[str]:
        return [self.forward_to] if self.forward_to else []

    def _has_callable(self) -> bool:
        return self.process is not None or self.process_batch is not None

    def _work(self, consumer: Consumer, wait_seconds: float) -> None:
        consumer.run(self.max_messages, self.batch_size, wait_seconds)

    def _handle(self, messages: list[Message], context: Context) -> Any:
        """Process messages that succeed or fail together."""
        if self.process_batch is not None:
            return call_with_context(self.process_batch, (messages,), context)
        assert self.process is not None  # noqa: S101  (for mypy: _check_callables has seen to it)
        return call_with_context(self.process, (messages[0],), context)

    def _result(self, tally: Tally) -> Any:
        """What the task returns after processing."""
        counts = asdict(tally)
        del counts["queue_names"]
        return counts

    @contextmanager
    def _consuming(self, context: Context) -> Iterator[Consumer]:
        """A consumer that owns nothing any more when the block is left, by whatever way."""
        hook = self.hook
        memory = LeaseMemory(context)
        if (leases := memory.take()) and (ended := let_run_out(hook, leases)):
            self.log.info("An earlier try of this task died and left %s leases, which were ended", ended)
        keeper = LeaseKeeper(QueenHook(queen_conn_id=self.queen_conn_id), self.lease_seconds)
        consumer = Consumer(
            hook,
            keeper,
            memory,
            pop=self._pop_arguments(),
            handler=lambda messages: self._handle(messages, context),
            together=self.process_batch is not None,
            forward_to=self.forward_to,
        )
        self._consumer = consumer
        try:
            yield consumer
        finally:
            try:
                consumer.give_back()
                memory.forget()
                self._emit(consumer.tally)
            finally:
                self._consumer = None
                self._queues_read = consumer.tally.queue_names
                keeper.close()
                hook.close()

    def _pop_arguments(self) -> dict[str, Any]:
        return {
            "queue_name": self.queue_name,
            "namespace": self.namespace,
            "task": self.task,
            "partition": self.partition,
            "consumer_group": self.consumer_group,
            "max_partitions": self.max_partitions,
            "lease_seconds": self.lease_seconds,
            "subscription_mode": self.subscription_mode,
            "subscription_from": self.subscription_from,
        }

    def _collect(self, consumer: Consumer, wait_seconds: float) -> list[dict[str, Any]]:
        assert self.max_messages is not None  # noqa: S101  (for mypy: _check_callables has seen to it)
        collected: list[dict[str, Any]] = []
        room = self.max_xcom_bytes

        def fits(message: Message) -> bool:
            nonlocal room
            entry = as_mapping(message)
            size = json_size(entry)
            if size > room:
                if not collected:
                    raise QueenError(
                        f"{message!r} has {size} bytes and max_xcom_bytes is {self.max_xcom_bytes}: raise it,"
                        " or use process; the message was given back"
                    )
                self.log.info("max_xcom_bytes is reached: the other messages stay in the queue")
                return False
            room -= size
            collected.append(entry)
            return True

        consumer.collect(self.max_messages, self.batch_size, wait_seconds, fits)
        return collected

    def _none_was_ready(self, returned: Any) -> Any:
        if self.deferrable:
            self.defer(
                trigger=QueenBacklogTrigger(
                    queen_conn_id=self.queen_conn_id,
                    queue_name=self.queue_name,
                    namespace=self.namespace,
                    task=self.task,
                    consumer_group=self.consumer_group,
                    min_pending=1,
                    ready=True,  # what others hold is pending too, and would wake us for nothing
                    poll_interval=self.poll_interval,
                ),
                method_name="execute_complete",
                timeout=None if self.wait_seconds is None else timedelta(seconds=self.wait_seconds),
            )
        if self.skip_on_empty:
            raise AirflowSkipException("no message was ready")
        self.log.info("No message was ready")
        return returned

    def _complain(self, tally: Tally) -> None:
        if not self.fail_on_error or not (tally.failed or tally.leases_lost):
            return
        problems = []
        if tally.failed:
            first = tally.failures[0]
            problems.append(f"{tally.failed} failed, the first with {first['error']}")
        if tally.leases_lost:
            problems.append(f"{tally.leases_lost} were lost to another consumer, their lease had run out")
        raise ProcessingError(f"of {tally.popped} messages {'; '.join(problems)}")

    def _emit(self, tally: Tally) -> None:
        tags = {
            "queue_name": self.queue_name,
            "namespace": self.namespace,
            "task": self.task,
            "consumer_group": self.consumer_group,
        }
        for what in ("popped", "completed", "failed", "forwarded", "leases_lost"):
            metrics.count(what, getattr(tally, what), **tags)
        with suppress(QueenError):  # the task's own error, if there is one, says more
            depth = self.hook.depth(
                self.queue_name, self.consumer_group, namespace=self.namespace, task=self.task
            )
            metrics.gauge("pending", depth.pending, **tags)

    def _check_callables(self) -> None:
        for name in ("process", "process_batch"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise InvalidOptionError(f"{name} is a {type(value).__name__}, needed is a callable")
        if self.process is not None and self.process_batch is not None:
            raise InvalidOptionError("process and process_batch are both given: choose one")
        if self._has_callable():
            return
        if self.forward_to is not None:
            raise InvalidOptionError(
                "forward_to needs process or process_batch: what they return is forwarded"
            )
        if self.max_messages is None:
            raise InvalidOptionError("max_messages is None, which needs process or process_batch")

    def _check_literals(self) -> None:
        """Say at parse time what can be said then; the rest is checked before anything is popped."""
        selection = (self.queue_name, self.partition, self.consumer_group, self.namespace, self.task)
        if all(map(is_literal, selection)):
            inputs.selection(*selection)
        for name in ("batch_size", "max_partitions", "max_xcom_bytes"):
            inputs.positive(name, getattr(self, name))
        for name in ("max_messages", "lease_seconds"):
            inputs.optional_positive(name, getattr(self, name))
        if self.wait_seconds is not None:
            inputs.seconds("wait_seconds", self.wait_seconds)
        if is_literal(self.subscription_from):
            inputs.subscription(self.subscription_mode, self.subscription_from)
        if is_literal(self.forward_to):
            inputs.optional_name("forward_to", self.forward_to)
        if self.deferrable and self.partition is not None:
            raise InvalidOptionError(
                "deferrable waits for messages of any partition, so it would be woken for nothing: leave out"
                " partition, or set deferrable=False"
            )


def as_mapping(message: Message) -> dict[str, Any]:
    """A message as a task returns it: plain values, and no lease."""
    return {
        "id": message.id,
        "transaction_id": message.transaction_id,
        "trace_id": message.trace_id,
        "queue_name": message.queue_name,
        "partition": message.partition,
        "priority": message.priority,
        "seq": message.seq,
        "attempt": message.attempt,
        "created_at": message.created_at.isoformat(),
        "payload": message.payload,
    }


def json_size(value: Any) -> int:
    """How many bytes a value has as JSON; what JSON does not know counts as its text."""
    return len(json.dumps(value, default=str).encode())
