"""Leases while a task works: kept alive by a thread, remembered for the task's next try."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from airflow_provider_queen.client import Message
from airflow_provider_queen.exceptions import LeaseLostError, QueenError
from airflow_provider_queen.hooks.queen import QueenHook

log = logging.getLogger(__name__)

# Most callables are done before that. It is short because the length of the lease is known only by comparing
# the database's clock with ours: the first renewal makes us independent of it.
_LONGEST_FIRST_PAUSE = 1.0
_LENGTH_IF_UNKNOWN = 60
_STATE_KEY = "queen_leases"
# The least that a lease can be renewed by.
_SHORTEST_LEASE = 1


class LeaseKeeper:
    """Renews leases from a thread of its own, over connections of its own, as long as they are held.

    :param hook: not shared with anybody; its connection is looked up here, because the supervisor talks to
        the main thread
    :param seconds: how long leases are; None: as the messages say
    """

    def __init__(self, hook: QueenHook, seconds: int | None) -> None:
        self._client = hook.client
        self._seconds = seconds
        self._changed = threading.Condition()
        self._held: dict[str, Message] = {}
        self._length = _LENGTH_IF_UNKNOWN
        self._due = math.inf
        self._closing = False
        self._thread: threading.Thread | None = None

    def hold(self, messages: Iterable[Message]) -> None:
        """Renew the leases of these messages from now on, and no others."""
        held = {message.lease_id: message for message in messages if message.lease_id is not None}
        with self._changed:
            new = held.keys() - self._held.keys()
            self._held = held
            if not held:
                self._due = math.inf
            elif new:
                self._length = min(self._length_of(message) for message in held.values())
                self._due = time.monotonic() + min(self._length / 3, _LONGEST_FIRST_PAUSE)
            if self._thread is None and held:
                self._thread = threading.Thread(target=self._keep, name="queen lease keeper", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Stop renewing. The leases stay as they are."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=5)
        self._client.close()

    def _length_of(self, message: Message) -> int:
        if self._seconds is not None:
            return self._seconds
        if message.lease_expires_at is None:
            return _LENGTH_IF_UNKNOWN
        length = math.ceil((message.lease_expires_at - datetime.now(UTC)).total_seconds())
        return length if length > 0 else _LENGTH_IF_UNKNOWN  # a clock is wrong

    def _keep(self) -> None:
        while leases := self._wait_until_due():
            self._renew(leases)

    def _wait_until_due(self) -> list[Message]:
        """The leases to renew, when it is time to; none when it is all over."""
        with self._changed:
            while not self._closing:
                pause = self._due - time.monotonic()
                if pause <= 0:
                    # Set before the renewal: leases that come meanwhile may bring it forward.
                    self._due = time.monotonic() + self._length / 3
                    return list(self._held.values())
                self._changed.wait(None if math.isinf(pause) else pause)
        return []

    def _renew(self, leases: list[Message]) -> None:
        try:
            self._client.renew(leases, self._length)
        except LeaseLostError:
            # All or none were renewed: so those that are left, one by one.
            for lease in leases:
                self._renew_alone(lease)
        except QueenError as error:
            log.warning("Leases could not be renewed: %s", error)
            self._bring_forward()

    def _renew_alone(self, lease: Message) -> None:
        try:
            self._client.renew(lease, self._length)
        except LeaseLostError:
            # Settled a moment ago, or taken over: settling will say which.
            with self._changed:
                self._held = {key: held for key, held in self._held.items() if key != lease.lease_id}
        except QueenError as error:
            log.warning("A lease could not be renewed: %s", error)
            self._bring_forward()

    def _bring_forward(self) -> None:
        with self._changed:
            self._due = min(self._due, time.monotonic() + min(self._length / 3, _LONGEST_FIRST_PAUSE))


class LeaseMemory:
    """What a task holds, in Airflow's task state store: its next try finds it there.

    A task that ends by itself forgets its leases, so what is found was held by a try that died.
    """

    def __init__(self, context: Mapping[str, Any]) -> None:
        self._store: Any = context.get("task_state_store")
        self._remembered = False

    def take(self) -> list[str]:
        """The leases that an earlier try held when it died."""
        found = self._safely("get", _STATE_KEY)
        if not isinstance(found, list):
            return []
        self._remembered = True
        return [lease_id for lease_id in found if isinstance(lease_id, str)]

    def remember(self, messages: Iterable[Message]) -> None:
        lease_ids = dict.fromkeys(message.lease_id for message in messages)
        self._safely("set", _STATE_KEY, list(lease_ids))
        self._remembered = True

    def forget(self) -> None:
        if self._remembered:
            self._safely("delete", _STATE_KEY)
            self._remembered = False

    def _safely(self, method: str, *arguments: Any) -> Any:
        if self._store is None:
            return None
        try:
            return getattr(self._store, method)(*arguments)
        except Exception as error:
            # Only speed is lost: leases that nobody renews run out.
            log.warning("The task state store does not work, so a retry waits out old leases: %s", error)
            self._store = None
            return None


def let_run_out(hook: QueenHook, lease_ids: Iterable[str]) -> int:
    """Shorten leases of a task that died, and wait until they are over; returns how many there were.

    They are not released: the database has to see that a consumer died with these messages, to count it as a
    failed attempt and to find out which message did it. A holder that is alive after all goes on renewing.
    """
    shortened = 0
    for lease_id in lease_ids:
        with suppress(LeaseLostError):
            hook.renew(_token(lease_id), _SHORTEST_LEASE)
            shortened += 1
    if shortened:
        time.sleep(_SHORTEST_LEASE + 0.05)
    return shortened


def _token(lease_id: str) -> Message:
    """As much of a message as names its lease."""
    return Message(tuple(lease_id if name == "lease_id" else None for name in Message.COLUMNS), "null")
