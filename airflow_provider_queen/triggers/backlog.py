"""Waiting in the triggerer until a backlog is as wanted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_queen.client import Depth
from airflow_provider_queen.client.listening import Backlog, Reading
from airflow_provider_queen.exceptions import InvalidOptionError, QueenError
from airflow_provider_queen.triggers._listener import shared_listener

DEFAULT_POLL_INTERVAL = 10.0


@dataclass(frozen=True, slots=True)
class BacklogCondition:
    """What a backlog has to be like. Of several conditions each must hold; at least one is needed."""

    min_pending: int | None = None
    max_pending: int | None = None
    min_oldest_age_seconds: float | None = None
    min_dead_letters: int | None = None

    def __post_init__(self) -> None:
        limits = {field.name: getattr(self, field.name) for field in fields(self)}
        if all(limit is None for limit in limits.values()):
            raise InvalidOptionError(f"no condition is given: name at least one of {', '.join(limits)}")
        for name, limit in limits.items():
            kinds = (int, float) if name == "min_oldest_age_seconds" else (int,)
            if limit is None:
                continue
            if isinstance(limit, bool) or not isinstance(limit, kinds) or not limit >= 0:
                raise InvalidOptionError(f"{name} is {limit!r}, allowed are numbers from 0")
        if None not in (self.min_pending, self.max_pending) and self.min_pending > self.max_pending:  # type: ignore[operator]
            raise InvalidOptionError(
                f"min_pending is {self.min_pending} and max_pending {self.max_pending}: no backlog is both"
            )

    def is_met(self, depth: Depth) -> bool:
        return (
            (self.min_pending is None or depth.pending >= self.min_pending)
            and (self.max_pending is None or depth.pending <= self.max_pending)
            and (self.min_dead_letters is None or depth.dead_letters >= self.min_dead_letters)
            and (self.min_oldest_age_seconds is None or _age(depth) >= self.min_oldest_age_seconds)
        )

    def next_look(self, depth: Depth, interval: float) -> float:
        """Seconds until it is worth to look again though nothing was heard, at most the interval."""
        if self.min_oldest_age_seconds is None or not depth.pending:
            return interval
        missing = self.min_oldest_age_seconds - _age(depth)
        return min(interval, missing + 0.05) if missing > 0 else interval


class QueenBacklogTrigger(BaseTrigger):
    """Fires once, when a backlog meets every condition that is given.

    All triggers of a triggerer process share one database connection per Airflow connection. They look when
    the database notifies them of messages, and at least every ``poll_interval`` seconds. A database that
    cannot be reached is waited for.

    The event is ``{"status": "success", "pending": …, "in_flight": …, "dead_letters": …,
    "oldest_age_seconds": …}``, or ``{"status": "error", "message": …}`` where waiting is of no use, such as
    for a queue that does not exist.

    :param queen_conn_id: the connection
    :param queue_name: the queue; or leave it out and name ``namespace``, ``task`` or both
    :param namespace: every queue of this namespace
    :param task: every queue of this task
    :param consumer_group: whose backlog; None is queue mode
    :param min_pending: at least so many messages are not settled
    :param max_pending: at most so many are not settled; 0 is drained
    :param min_oldest_age_seconds: the oldest one has waited that long
    :param min_dead_letters: at least so many dead letters
    :param ready: in addition, a message could be popped now, or has come since the trigger began: what other
        consumers hold, and what is delayed, wakes nobody
    :param poll_interval: seconds between two looks where nothing is heard
    """

    def __init__(
        self,
        *,
        queen_conn_id: str = "queen_default",
        queue_name: str | None = None,
        namespace: str | None = None,
        task: str | None = None,
        consumer_group: str | None = None,
        min_pending: int | None = None,
        max_pending: int | None = None,
        min_oldest_age_seconds: float | None = None,
        min_dead_letters: int | None = None,
        ready: bool = False,
        poll_interval: float = DEFAULT_POLL_INTERVAL,
    ) -> None:
        super().__init__()
        self.queen_conn_id = queen_conn_id
        # `task` itself is taken: a trigger's task is the operator that it serves.
        self.backlog = Backlog(queue_name, namespace, task, consumer_group)
        self.condition = BacklogCondition(min_pending, max_pending, min_oldest_age_seconds, min_dead_letters)
        self.ready = ready
        self.poll_interval = positive_seconds("poll_interval", poll_interval)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "queen_conn_id": self.queen_conn_id,
                **asdict(self.backlog),
                **asdict(self.condition),
                "ready": self.ready,
                "poll_interval": self.poll_interval,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        try:
            payload = {"status": "success", **asdict(await self._wait())}
        except (QueenError, AirflowNotFoundException) as error:
            payload = {"status": "error", "message": str(error)}
        yield TriggerEvent(payload)

    async def _wait(self) -> Depth:
        async with shared_listener(self.queen_conn_id) as listener:
            first = reading = await listener.read(self.backlog, within=0)
            while not self._is_met(reading, first):
                reading = await listener.read(self.backlog, within=self._next_look(reading))
        return reading.depth

    def _is_met(self, reading: Reading, first: Reading) -> bool:
        return self.condition.is_met(reading.depth) and (not self.ready or _is_ready(reading, first))

    def _next_look(self, reading: Reading) -> float:
        seconds = self.condition.next_look(reading.depth, self.poll_interval)
        if self.ready and reading.ready_in is not None and reading.ready_in > 0:
            return min(seconds, reading.ready_in)
        return seconds


def positive_seconds(name: str, value: Any) -> float:
    """A duration of more than 0 seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InvalidOptionError(f"{name} is {value!r}, allowed are seconds, more than 0")
    return float(value)


def _age(depth: Depth) -> float:
    # Where nothing is pending there is nothing old, not even something of age 0.
    return depth.oldest_age_seconds or 0.0 if depth.pending else -1.0


def _is_ready(reading: Reading, first: Reading) -> bool:
    if reading.waiting <= 0:
        return False
    # Beside delayed partitions there may be new ones, of whose times nobody knows before somebody pops.
    return reading.ready_in is None or reading.ready_in <= 0 or reading.depth.pending > first.depth.pending
