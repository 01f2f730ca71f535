"""Look after queues: configure, seek, requeue and purge dead letters, and maintenance in plain SQL."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

from airflow_provider_queen import metrics
from airflow_provider_queen.client import inputs
from airflow_provider_queen.exceptions import InvalidOptionError
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.links.queen import QueenLink
from airflow_provider_queen.operators._messages import is_literal

if TYPE_CHECKING:
    from airflow.sdk import Context


class _QueueOperator(BaseOperator):
    """One call of the hook. A subclass says which, and checks its own literals."""

    operator_extra_links = (QueenLink(),)

    def __init__(self, *, queen_conn_id: str = QueenHook.default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.queen_conn_id = queen_conn_id

    @cached_property
    def hook(self) -> QueenHook:
        return QueenHook(queen_conn_id=self.queen_conn_id)

    def execute(self, context: Context) -> Any:
        with closing(self.hook) as hook:
            return self.call(hook)

    @abstractmethod
    def call(self, hook: QueenHook) -> Any:
        """Do it, and return what other tasks may want to know."""


class QueenConfigureQueueOperator(_QueueOperator):
    """Create a queue, or change the named options of an existing one; the others stay. Returns all of them.

    :param queue_name: the queue (templated)
    :param options: ``lease_time``, ``retry_limit`` and so on, by name (templated)
    :param queen_conn_id: connection of type ``queen`` or ``postgres`` (templated)
    """

    template_fields: Sequence[str] = ("queue_name", "options", "queen_conn_id")
    template_fields_renderers: ClassVar[dict[str, str]] = {"options": "json"}

    def __init__(self, *, queue_name: str, options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.queue_name = queue_name
        self.options = {} if options is None else options
        _check_name("queue_name", queue_name)
        if isinstance(self.options, Mapping):
            # The values may be templates still, and are the database's to judge.
            inputs.queue_options(dict.fromkeys(self.options))

    def call(self, hook: QueenHook) -> dict[str, Any]:
        queue = asdict(hook.configure_queue(self.queue_name, **self.options))
        return {**queue, "created_at": queue["created_at"].isoformat()}


class QueenSeekOperator(_QueueOperator):
    """Move a consumer group's cursor, to read again or to skip. Returns how many cursors were moved.

    :param queue_name: the queue (templated)
    :param consumer_group: the group (templated); None is queue mode
    :param to: ``beginning``, ``end``, or a datetime with a zone or its ISO text (templated)
    :param partition: only this one (templated)
    :param queen_conn_id: connection of type ``queen`` or ``postgres`` (templated)
    """

    template_fields: Sequence[str] = ("queue_name", "consumer_group", "to", "partition", "queen_conn_id")

    def __init__(
        self,
        *,
        queue_name: str,
        to: str | datetime,
        consumer_group: str | None = None,
        partition: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.queue_name = queue_name
        self.consumer_group = consumer_group
        self.to = to
        self.partition = partition
        _check_name("queue_name", queue_name)
        _check_optional_name("consumer_group", consumer_group)
        _check_optional_name("partition", partition)
        if is_literal(to):
            inputs.seek_target(to)

    def call(self, hook: QueenHook) -> int:
        moved = hook.seek(self.queue_name, self.consumer_group, self.to, self.partition)
        self.log.info("Moved %s cursors of %s to %s", moved, self.queue_name, self.to)
        return moved


class QueenRequeueDeadLettersOperator(_QueueOperator):
    """Push dead letters again, oldest first, each once however often this runs. Returns their new ids.

    :param queue_name: the queue (templated)
    :param ids: numbers of dead letters (templated); None is all of them
    :param consumer_group: only those of this group (templated); None is any group
    :param limit: how many at most
    :param queen_conn_id: connection of type ``queen`` or ``postgres`` (templated)
    """

    template_fields: Sequence[str] = ("queue_name", "ids", "consumer_group", "queen_conn_id")

    def __init__(
        self,
        *,
        queue_name: str,
        ids: Sequence[int | str] | None = None,
        consumer_group: str | None = None,
        limit: int = 1000,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.queue_name = queue_name
        self.ids = ids
        self.consumer_group = consumer_group
        self.limit = limit
        _check_name("queue_name", queue_name)
        _check_optional_name("consumer_group", consumer_group)
        _check_ids(ids)
        inputs.positive("limit", limit)

    def call(self, hook: QueenHook) -> list[str]:
        requeued = hook.requeue_dead_letters(
            self.queue_name, _numbers(self.ids), consumer_group=self.consumer_group, limit=self.limit
        )
        self.log.info("Requeued %s dead letters of %s", len(requeued), self.queue_name)
        metrics.count("requeued", len(requeued), queue_name=self.queue_name)
        return [one.message_id for one in requeued]


class QueenPurgeDeadLettersOperator(_QueueOperator):
    """Delete dead letters, and with them the evidence. Returns how many.

    :param queue_name: the queue (templated)
    :param ids: numbers of dead letters (templated); None is all of them
    :param consumer_group: only those of this group (templated); None is any group
    :param older_than_seconds: only those that failed so long ago
    :param queen_conn_id: connection of type ``queen`` or ``postgres`` (templated)
    """

    template_fields: Sequence[str] = ("queue_name", "ids", "consumer_group", "queen_conn_id")

    def __init__(
        self,
        *,
        queue_name: str,
        ids: Sequence[int | str] | None = None,
        consumer_group: str | None = None,
        older_than_seconds: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.queue_name = queue_name
        self.ids = ids
        self.consumer_group = consumer_group
        self.older_than_seconds = older_than_seconds
        _check_name("queue_name", queue_name)
        _check_optional_name("consumer_group", consumer_group)
        _check_ids(ids)
        if older_than_seconds is not None:
            inputs.not_negative("older_than_seconds", older_than_seconds)

    def call(self, hook: QueenHook) -> int:
        purged = hook.purge_dead_letters(
            self.queue_name,
            _numbers(self.ids),
            consumer_group=self.consumer_group,
            older_than_seconds=self.older_than_seconds,
        )
        self.log.info("Deleted %s dead letters of %s", purged, self.queue_name)
        return purged


class _MaintenanceOperator(_QueueOperator):
    """Calls a bounded job of the database until it finds nothing more to do; each call is a transaction."""

    template_fields: Sequence[str] = ("queue_name", "queen_conn_id")

    def __init__(self, *, queue_name: str | None = None, limit: int = 10_000, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.queue_name = queue_name
        self.limit = limit
        _check_optional_name("queue_name", queue_name)
        inputs.positive("limit", limit)

    def _until_done(
        self, job: Callable[..., Sequence[Any]], keys: Sequence[str], amount: str
    ) -> dict[str, int]:
        """What the calls did, added up per queue and whatever else the keys name."""
        totals: dict[str, int] = {}
        while rows := job(self.queue_name, limit=self.limit):
            for row in rows:
                key = "/".join(str(getattr(row, name) or "") for name in keys)
                totals[key] = totals.get(key, 0) + getattr(row, amount)
        return totals


class QueenReclaimOperator(_MaintenanceOperator):
    """End leases that have run out. Returns how many.

    No queue needs it: a pop does so for what it meets. It is for figures that should not wait for a pop.

    :param queue_name: the queue (templated); None is every queue
    :param limit: how many at a time
    :param queen_conn_id: connection of type ``queen`` or ``postgres`` (templated)
    """

    def call(self, hook: QueenHook) -> int:
        total = 0
        while reclaimed := hook.reclaim(self.queue_name, limit=self.limit):
            total += reclaimed
        self.log.info("Ended %s leases that had run out", total)
        return total


class QueenEvictOperator(_MaintenanceOperator):
    """Dead-letter messages that waited longer than their queue's ``max_wait_time_seconds``.

    Returns how many, by ``queue/group``; the group is empty in queue mode.

    :param queue_name: the queue (templated); None is every queue
    :param limit: how many messages at a time
    :param queen_conn_id: connection of type ``queen`` or ``postgres`` (templated)
    """

    def call(self, hook: QueenHook) -> dict[str, int]:
        evicted = self._until_done(hook.evict, ("queue_name", "consumer_group"), "evicted")
        self.log.info("Evicted %s messages", sum(evicted.values()))
        metrics.count("evicted", sum(evicted.values()), queue_name=self.queue_name)
        return evicted


class QueenRetainOperator(_MaintenanceOperator):
    """Delete messages as far as the queues' retention options allow.

    Returns how many, by ``queue/rule``; the rule is ``retention`` or ``completed``. For installations that
    are too small for Spark.

    :param queue_name: the queue (templated); None is every queue
    :param limit: how many messages at a time
    :param queen_conn_id: connection of type ``queen`` or ``postgres`` (templated)
    """

    def call(self, hook: QueenHook) -> dict[str, int]:
        deleted = self._until_done(hook.retain, ("queue_name", "retention_type"), "deleted")
        self.log.info("Deleted %s messages", sum(deleted.values()))
        metrics.count("deleted", sum(deleted.values()), queue_name=self.queue_name)
        return deleted


def _check_name(what: str, value: Any) -> None:
    if is_literal(value):
        inputs.name(what, value)


def _check_optional_name(what: str, value: Any) -> None:
    if value is not None:
        _check_name(what, value)


def _check_ids(ids: Any) -> None:
    if is_literal(ids):
        _numbers(ids)


def _numbers(ids: Sequence[int | str] | str | None) -> list[int] | None:
    """Dead letters by number; a rendered template is text."""
    if ids is None:
        return None
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise InvalidOptionError(f"ids is a {type(ids).__name__}, needed is a list of numbers")
    numbers = [int(one) if isinstance(one, str) and one.isdecimal() else one for one in ids]
    return inputs.dead_letter_ids(numbers)
