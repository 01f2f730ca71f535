"""A doorbell for event-driven scheduling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_provider_queen.client.listening import Backlog, Reading
from airflow_provider_queen.exceptions import InvalidOptionError, QueenError
from airflow_provider_queen.triggers._listener import Keeper, shared_listener
from airflow_provider_queen.triggers.backlog import DEFAULT_POLL_INTERVAL, positive_seconds

# Ages are measured by two looks over the network: less than this is no difference.
_CLOCK_TOLERANCE = 1.0
_MOMENT = 1.0


class QueenMessageTrigger(BaseEventTrigger):
    """Rings when messages wait for a group, and again while they still wait. Takes none of them.

    For an ``AssetWatcher``, by itself or as ``MessageQueueTrigger(scheme="queen", …)``. An event says that
    the Dag has something to pop, not what: there is no event per message, and no message in an event. What
    waits is in the database alone, so a restarted triggerer, an unpaused Dag or an event that started no run
    lose nothing: the bell rings again.

    It rings at once, and never sooner than ``ring_interval`` seconds after the last time. While the same
    messages wait and nobody takes any, or a consumer is still at work on others, the interval doubles, up to
    ``max_ring_interval``; the same where all of them are delayed. Messages that a consumer holds do not wait.

    The event's payload has ``queue_name``, ``namespace``, ``task``, ``consumer_group``, ``pending``,
    ``in_flight`` and ``oldest_age_seconds``.

    :param queen_conn_id: the connection
    :param queue_name: the queue; or leave it out and name ``namespace``, ``task`` or both
    :param namespace: every queue of this namespace
    :param task: every queue of this task
    :param consumer_group: the group that the Dag pops for; None is queue mode
    :param ring_interval: seconds between two rings at least
    :param max_ring_interval: seconds between two rings at most, while messages wait
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
        ring_interval: float = 10.0,
        max_ring_interval: float = 300.0,
        poll_interval: float = DEFAULT_POLL_INTERVAL,
    ) -> None:
        super().__init__()
        self.queen_conn_id = queen_conn_id
        # `task` itself is taken: a trigger's task is the operator that it serves.
        self.backlog = Backlog(queue_name, namespace, task, consumer_group)
        self.ring_interval = positive_seconds("ring_interval", ring_interval)
        self.max_ring_interval = positive_seconds("max_ring_interval", max_ring_interval)
        self.poll_interval = positive_seconds("poll_interval", poll_interval)
        if self.max_ring_interval < self.ring_interval:
            raise InvalidOptionError(
                f"max_ring_interval is {max_ring_interval!r}, less than ring_interval, {ring_interval!r}"
            )

    def serialize(self) -> tuple[str, dict[str, Any]]:
        # The same for 10 and 10.0: equal ones share one row, and one doorbell.
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "queen_conn_id": self.queen_conn_id,
                **asdict(self.backlog),
                "ring_interval": self.ring_interval,
                "max_ring_interval": self.max_ring_interval,
                "poll_interval": self.poll_interval,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        bell = Bell(self.ring_interval, self.max_ring_interval, asyncio.get_running_loop().time)
        moment = min(_MOMENT, self.ring_interval)
        async with shared_listener(self.queen_conn_id) as listener:
            reading = await self._read(listener, 0)
            while True:
                pause = bell.seconds_to_ring(reading)
                if pause <= 0 and not bell.is_new:
                    # A consumer is between two batches perhaps: in a moment it will have the next one.
                    reading = await self._read(listener, 0, asleep=moment)
                    pause = bell.seconds_to_ring(reading)
                if pause <= 0:
                    bell.rung(reading)
                    yield self._event(reading)
                    # Nothing could ring it sooner, so nothing is looked at either.
                    reading = await self._read(listener, 0, asleep=self.ring_interval)
                else:
                    # While messages wait, a busy queue says much that does not matter.
                    asleep = 0 if bell.is_new else min(pause, moment)
                    reading = await self._read(listener, min(pause, self.poll_interval), asleep=asleep)

    async def _read(self, listener: Keeper, within: float, asleep: float = 0) -> Reading:
        """Look when something is heard, or ``within`` so many seconds, of which the first ones are slept.

        Errors are waited out: a queue or a connection may yet be created.
        """
        await asyncio.sleep(asleep)
        within = max(within - asleep, 0)
        while True:
            try:
                return await listener.read(self.backlog, within)
            except (QueenError, AirflowNotFoundException) as error:
                self.log.warning("Cannot look at %s: %s", self.backlog, error)
            await asyncio.sleep(self.poll_interval)

    def _event(self, reading: Reading) -> TriggerEvent:
        depth = reading.depth
        return TriggerEvent(
            {
                **asdict(self.backlog),
                "pending": depth.pending,
                "in_flight": depth.in_flight,
                "oldest_age_seconds": depth.oldest_age_seconds,
            }
        )


class Bell:
    """When to ring: at once, then after an interval, which grows while ringing changes nothing.

    :param shortest: seconds between two rings at least
    :param longest: seconds between two rings at most, while messages wait
    :param clock: seconds that only grow
    """

    def __init__(self, shortest: float, longest: float, clock: Callable[[], float]) -> None:
        self._shortest = shortest
        self._longest = longest
        self._clock = clock
        self._last_ring = float("-inf")
        self._interval = self._due_after = shortest
        self._rung_for: Reading | None = None
        self._rung_for_oldest = 0.0
        self._was_delayed = False

    @property
    def is_new(self) -> bool:
        """Whether nothing waits of what it last rang for: the next ring is not a repetition."""
        return self._rung_for is None

    def seconds_to_ring(self, reading: Reading) -> float:
        """Seconds until it is to ring, or to be asked again, if nothing changes; 0 or less is now."""
        if reading.waiting <= 0:
            self._rung_for = None
            return float("inf")
        delayed = reading.ready_in is not None and reading.ready_in > 0
        if self.is_new or self._has_news(reading, delayed):
            interval = self._shortest
        elif delayed:
            # Or behind a lease. Not infinite: of partitions that the group has not met yet, nobody knows.
            interval = self._longest
        else:
            interval = self._interval
        self._was_delayed |= delayed
        self._due_after = interval
        pause = self._last_ring + interval - self._clock()
        return min(pause, reading.ready_in) if delayed and reading.ready_in and pause > 0 else pause

    def rung(self, reading: Reading) -> None:
        self._last_ring = self._clock()
        self._interval = min(2 * self._due_after, self._longest)
        self._rung_for = reading
        self._rung_for_oldest = self._oldest(reading)
        self._was_delayed = False

    def _has_news(self, reading: Reading, delayed: bool) -> bool:
        """Whether messages came, went or fell due since the last ring, and no consumer is at work."""
        last = self._rung_for
        if last is None or reading.depth.in_flight:
            return False
        return (
            (self._was_delayed and not delayed)
            or reading.depth.pending != last.depth.pending
            or abs(self._oldest(reading) - self._rung_for_oldest) > _CLOCK_TOLERANCE
        )

    def _oldest(self, reading: Reading) -> float:
        return self._clock() - (reading.depth.oldest_age_seconds or 0.0)
