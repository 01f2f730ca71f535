"""One database connection per event loop and Airflow connection, however many triggers wait.

The first trigger to wait opens it, the last to leave closes it. One task, the keeper's, is the only one that
uses the connection: it listens, and looks at a backlog when a notification names one of its queues or when
somebody's time to look is over. Triggers that wait for the same backlog share each look.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from airflow.sdk.exceptions import AirflowNotFoundException

from airflow_provider_queen.client.listening import SHORTEST_PAUSE, AsyncListener, Backlog, Reading
from airflow_provider_queen.exceptions import (
    ConnectionLostError,
    DatabaseUnreachableError,
    QueenError,
    TransactionConflictError,
)
from airflow_provider_queen.hooks.queen import QueenHook

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 30.0
# A look takes milliseconds. Where it takes this long, the network has lost the connection without a word.
LONGEST_LOOK_SECONDS = 60.0
_LONGEST_SLEEP_SECONDS = 3600.0
_TRANSIENT = (ConnectionLostError, DatabaseUnreachableError, TransactionConflictError, TimeoutError)

_keepers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Keeper]] = WeakKeyDictionary()


@asynccontextmanager
async def shared_listener(queen_conn_id: str) -> AsyncIterator[Keeper]:
    """The keeper of an Airflow connection in this event loop, as long as the block lasts."""
    keepers = _keepers.setdefault(asyncio.get_running_loop(), {})
    keeper = keepers.get(queen_conn_id)
    if keeper is None:
        keeper = keepers[queen_conn_id] = Keeper(queen_conn_id)
    keeper.users += 1
    try:
        yield keeper
    finally:
        keeper.users -= 1
        if not keeper.users:
            # First out of the list, then closed: whoever comes in between gets a new one.
            del keepers[queen_conn_id]
            await keeper.close()


class _Watch:
    """Everybody who waits for one backlog."""

    def __init__(self) -> None:
        self.answers: dict[asyncio.Future[Reading], float] = {}
        """Who waits, and when to look on his behalf at the latest."""
        self.heard = True
        """Whether something was said of it since the last look, or may have been."""
        self.not_before = float("-inf")
        """Until then even what was heard waits, so that a busy queue costs a tenth of the time at most."""
        self.last_look = float("-inf")

    @property
    def due(self) -> float:
        """When to look next, in the loop's time."""
        if not self.answers:
            return float("inf")
        latest = min(self.answers.values())
        return min(latest, self.not_before) if self.heard else latest

    def answer(self, reading: Reading) -> None:
        for answer in self._take():
            answer.set_result(reading)

    def fail(self, error: Exception) -> None:
        for answer in self._take():
            answer.set_exception(error)

    def _take(self) -> Iterable[asyncio.Future[Reading]]:
        answers = [answer for answer in self.answers if not answer.done()]
        self.answers.clear()
        return answers


class Keeper:
    """Keeps one listening connection and answers all who wait on it."""

    def __init__(self, queen_conn_id: str) -> None:
        self.users = 0
        self._queen_conn_id = queen_conn_id
        self._watches: dict[Backlog, _Watch] = {}
        self._listener: AsyncListener | None = None
        # In an empty context: what it logs belongs to no single trigger.
        self._task = asyncio.create_task(
            self._keep(), name=f"queen listener {queen_conn_id}", context=contextvars.Context()
        )

    async def read(self, backlog: Backlog, within: float) -> Reading:
        """Look at a backlog when one of its queues gets messages, or ``within`` so many seconds.

        A database that cannot be reached is waited for. Other errors are raised.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Reading] = loop.create_future()
        watch = self._watches.setdefault(backlog, _Watch())
        watch.answers[answer] = loop.time() + within
        if self._listener is not None:
            self._listener.wake()
        try:
            return await answer
        finally:
            watch.answers.pop(answer, None)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        delay = FIRST_RETRY_SECONDS
        try:
            while True:
                try:
                    if self._listener is None:
                        self._listener = await self._connect()
                    await self._serve(self._listener)
                    delay = FIRST_RETRY_SECONDS
                    continue
                except _TRANSIENT as error:
                    log.warning(
                        "Queen connection %s: %s; trying again in %.1f s",
                        self._queen_conn_id,
                        str(error) or "no answer",
                        delay,
                    )
                except (QueenError, AirflowNotFoundException) as error:
                    # Of the whole connection, not of one backlog: everybody has to know.
                    for watch in self._watches.values():
                        watch.fail(error)
                except Exception:
                    # Airflow itself may be away for a while, when it is asked for the connection.
                    log.exception("Queen connection %s; trying again in %.1f s", self._queen_conn_id, delay)
                await self._disconnect()
                await asyncio.sleep(delay)
                delay = min(2 * delay, LONGEST_RETRY_SECONDS)
        finally:
            await self._disconnect()

    async def _connect(self) -> AsyncListener:
        # Looked up anew each time: the password may be another one by now.
        client = await QueenHook(queen_conn_id=self._queen_conn_id).get_async_client()
        listener = await AsyncListener.open(client)
        for watch in self._watches.values():
            watch.heard = True
        return listener

    async def _disconnect(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()

    async def _serve(self, listener: AsyncListener) -> None:
        """Sleep until there is something to look at, and look."""
        loop = asyncio.get_running_loop()
        next_look = min((watch.due for watch in self._watches.values()), default=float("inf"))
        heard = await listener.wait(min(next_look - loop.time(), _LONGEST_SLEEP_SECONDS))
        for backlog, watch in self._watches.items():
            # Which queues a namespace has, the database knows: any may be one.
            watch.heard |= backlog.queue_name in heard or (backlog.queue_name is None and bool(heard))
        now = loop.time()
        for backlog in [backlog for backlog, watch in self._watches.items() if watch.due <= now]:
            await self._look(listener, backlog)
        for backlog in [backlog for backlog, watch in self._watches.items() if not watch.answers]:
            if now - self._watches[backlog].last_look > LONGEST_LOOK_SECONDS:
                del self._watches[backlog]

    async def _look(self, listener: AsyncListener, backlog: Backlog) -> None:
        watch = self._watches[backlog]
        watch.heard = False
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            async with asyncio.timeout(LONGEST_LOOK_SECONDS):
                reading = await listener.read(backlog)
        except _TRANSIENT:
            watch.heard = True
            raise
        except QueenError as error:
            watch.fail(error)
        else:
            watch.answer(reading)
        finally:
            watch.last_look = loop.time()
            watch.not_before = watch.last_look + max(SHORTEST_PAUSE, 10 * (watch.last_look - begun))
