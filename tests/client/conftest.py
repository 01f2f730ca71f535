"""Clients on a fresh database, blocking and asyncio alike: one test describes both."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import psycopg
import pytest

from airflow_provider_queen.client import AsyncQueenClient, QueenClient


class AwaitedClient:
    """An asyncio client that looks like a blocking one: every coroutine runs to its end at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self.inner: Any = AsyncQueenClient(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return _awaited(self._loop, getattr(self.inner, name))

    def __enter__(self) -> AwaitedClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.run_until_complete(self.inner.close())
            self._loop.close()

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        # One task for the whole block, as the client itself would see it.
        block = self.inner.transaction()
        transaction = self._loop.run_until_complete(block.__aenter__())
        try:
            yield _AwaitedTransaction(self._loop, transaction)
        except BaseException as error:
            if not self._loop.run_until_complete(block.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            self._loop.run_until_complete(block.__aexit__(None, None, None))

    def run_in_transaction(self, function: Callable[[Any], Any]) -> Any:
        async def inside(transaction: Any) -> Any:
            # The function blocks, so it gets a thread; its calls come back to this loop.
            return await asyncio.to_thread(function, _Remote(self._loop, transaction))

        return self._loop.run_until_complete(self.inner.run_in_transaction(inside))


class _AwaitedTransaction:
    def __init__(self, loop: asyncio.AbstractEventLoop, inner: Any) -> None:
        self._loop, self.inner = loop, inner

    def __getattr__(self, name: str) -> Any:
        return _awaited(self._loop, getattr(self.inner, name))

    def execute(self, sql: str) -> Any:
        return self._loop.run_until_complete(self.inner.connection.execute(sql))


class _Remote(_AwaitedTransaction):
    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(
                getattr(self.inner, name)(*args, **kwargs), self._loop
            ).result()

        return call


def _awaited(loop: asyncio.AbstractEventLoop, attribute: Any) -> Any:
    if not inspect.iscoroutinefunction(attribute):
        return attribute
    return lambda *args, **kwargs: loop.run_until_complete(attribute(*args, **kwargs))


@pytest.fixture(params=["blocking", "asyncio"])
def client_class(request: pytest.FixtureRequest) -> type[Any]:
    return {"blocking": QueenClient, "asyncio": AwaitedClient}[request.param]


ClientFactory = Callable[..., Any]


@pytest.fixture
def make_client(client_class: type[Any], queen_dsn: str) -> Iterator[ClientFactory]:
    """Makes clients of the test's database, and closes them."""
    with ExitStack() as stack:

        def make(**options: Any) -> Any:
            client: AbstractContextManager[Any] = client_class(queen_dsn, **options)
            return stack.enter_context(client)

        yield make


@pytest.fixture
def client(make_client: ClientFactory) -> Any:
    return make_client()


@pytest.fixture
def orders(client: Any) -> str:
    """A queue."""
    client.configure_queue("orders", retry_delay=0)
    return "orders"


@pytest.fixture
def sql(queen_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A look behind the client's back."""
    with psycopg.connect(queen_dsn, autocommit=True) as connection:
        yield connection


# The clients' sessions, and those that sleep in a waiting pop: they last asked when to look again.
SESSIONS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'queen'"
)
ASLEEP = f"{SESSIONS} AND state = 'idle' AND query LIKE '%next_ready_at%'"


def in_transaction(client: Any, *actions: Callable[[Any], Any]) -> None:
    """Carry out some actions in one transaction."""
    with client.transaction() as tx:
        for action in actions:
            action(tx)


def eventually(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What the condition answers, as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.05)
    return answer
