"""Hearing which queues got messages, and looking at their depth, over one connection."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import psycopg

from airflow_provider_queen.client import inputs
from airflow_provider_queen.client.asynchronous import AsyncQueenClient, _Session
from airflow_provider_queen.client.interface import AsyncQueueMethods, QueueMethods
from airflow_provider_queen.client.operations import (
    _NEXT_READY,
    Call,
    Listen,
    Operation,
    Operations,
    Pause,
    Progress,
)
from airflow_provider_queen.client.results import Depth
from airflow_provider_queen.client.sessions import is_alive
from airflow_provider_queen.exceptions import ConnectionLostError

T = TypeVar("T")

# A busy queue notifies many times a second; nobody needs to look at it more often than this.
SHORTEST_PAUSE = 0.1


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits for one group in a queue, or in every queue with a namespace and a task."""

    queue_name: str | None = None
    namespace: str | None = None
    task: str | None = None
    consumer_group: str | None = None

    def __post_init__(self) -> None:
        inputs.selection(self.queue_name, None, self.consumer_group, self.namespace, self.task)

    def __str__(self) -> str:
        names = {"queue": self.queue_name, "namespace": self.namespace, "task": self.task}
        where = " and ".join(f"{what} {name!r}" for what, name in names.items() if name is not None)
        return f"{where}, group {self.consumer_group!r}" if self.consumer_group else where


@dataclass(frozen=True, slots=True)
class Reading:
    """A backlog at one moment."""

    depth: Depth
    ready_in: float | None
    """Seconds until a message may be popped, 0 or less where one may be at once. None where nobody knows:
    nothing waits, or only in partitions that the group has not met yet."""

    @property
    def waiting(self) -> int:
        """How many messages no consumer holds."""
        return self.depth.pending - self.depth.in_flight


class AsyncListener(AsyncQueueMethods):
    """The queue over one connection, which also hears of queues that get messages. For one task at a time.

    It reconnects to nothing: after ``ConnectionLostError`` close it and open another one, which has missed
    what was said in between. Behind a transaction pooler nothing is ever heard.
    """

    def __init__(self, client: AsyncQueenClient, connection: psycopg.AsyncConnection[object]) -> None:
        self._client = client
        self._connection = connection
        self._session = _Session(connection, client._target.transaction_settings)
        self._heard: set[str] = set()
        self._woken = asyncio.Event()
        # Those that arrive beside the answer of a call; the others are taken from the socket by wait().
        connection.add_notify_handler(lambda notification: self._heard.add(notification.payload))

    @classmethod
    async def open(cls, client: AsyncQueenClient) -> AsyncListener:
        """Connect and begin to listen.

        :param client: whose connection string, options and keys to use; it keeps its own connections
        """
        listener = cls(client, await client._connect())
        try:
            if not client._options.transaction_pooler:
                await listener._session.perform(Listen(True))
        except BaseException:
            await listener.close()
            raise
        return listener

    async def close(self) -> None:
        await self._connection.close()

    def wake(self) -> None:
        """Let ``wait`` return now."""
        self._woken.set()

    async def wait(self, seconds: float) -> set[str]:
        """Sleep until a queue gets messages, somebody calls ``wake``, or the time is over.

        :return: the names of queues that were heard of since the last call
        """
        if not self._heard:
            await self._sleep(seconds)
        self._woken.clear()
        if not is_alive(self._connection):  # which also reads what has come
            await self.close()
            raise ConnectionLostError("the connection to the database broke while nothing was going on")
        while notification := self._connection.pgconn.notifies():
            self._heard.add(notification.extra.decode())
        heard, self._heard = self._heard, set()
        return heard

    async def read(self, backlog: Backlog) -> Reading:
        """Look at a backlog."""
        depth = await self.depth(
            backlog.queue_name,
            consumer_group=backlog.consumer_group,
            namespace=backlog.namespace,
            task=backlog.task,
        )
        ready_in = await self._run(_ready_in(backlog)) if depth.pending else None
        return Reading(depth, ready_in)

    async def _sleep(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        socket = self._connection.fileno()
        # Between two calls nobody else waits for this socket.
        loop.add_reader(socket, self._woken.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(seconds, 0)):
                    await self._woken.wait()
        finally:
            loop.remove_reader(socket)

    @property
    def _operations(self) -> Operations:
        return self._client._operations

    async def _run(self, operation: Operation[T]) -> T:
        progress = Progress(operation)
        while progress.step is not None:
            progress.answer(await self._session.perform(progress.step))
        return progress.result


def wait_for_depth(
    queue: QueueMethods, backlog: Backlog, condition: Callable[[Depth], bool], seconds: float
) -> Depth:
    """Wait until a backlog meets a condition, or the time is over; look whenever its queues get messages.

    :return: the depth as last seen
    """
    operations = queue._operations
    return queue._run(_until(operations, backlog, condition, time.monotonic() + seconds))


def _until(
    operations: Operations, backlog: Backlog, condition: Callable[[Depth], bool], deadline: float
) -> Operation[Depth]:
    listening = not operations._options.transaction_pooler
    if listening:
        yield Listen(True)
    while True:
        # Directly after LISTEN too: what came before it rang no bell for us.
        depth = yield from operations.depth(
            backlog.queue_name, backlog.consumer_group, backlog.namespace, backlog.task
        )
        remaining = deadline - time.monotonic()
        if condition(depth) or remaining <= 0:
            break
        yield Pause(min(remaining, SHORTEST_PAUSE), None, False)
        yield Pause(max(deadline - time.monotonic(), 0), backlog.queue_name, listening)
    if listening:
        yield Listen(False)
    return depth


def _ready_in(backlog: Backlog) -> Operation[float | None]:
    where = (backlog.queue_name, None, backlog.consumer_group, backlog.namespace, backlog.task)
    rows = yield Call(_NEXT_READY, where)
    return None if not rows or rows[0][0] is None else float(rows[0][0])
