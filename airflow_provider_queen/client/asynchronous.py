"""The asyncio client: the same steps as the blocking one, awaited."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from airflow_provider_queen.client.encryption import Keyring
from airflow_provider_queen.client.errors import EncryptionChangedError, is_conflict, translate, unreachable
from airflow_provider_queen.client.interface import AsyncQueueMethods
from airflow_provider_queen.client.operations import (
    Call,
    Listen,
    Operation,
    Operations,
    Pause,
    Progress,
    Step,
)
from airflow_provider_queen.client.options import ClientOptions
from airflow_provider_queen.client.results import Row
from airflow_provider_queen.client.schema.files import schema_files, statement
from airflow_provider_queen.client.schema.state import State, require_current
from airflow_provider_queen.client.sessions import (
    ABORTED,
    LISTEN,
    MAX_IDLE,
    OVER,
    UNLISTEN,
    Settings,
    Target,
    explain_own_lock,
    finish,
    is_alive,
    nested_settings,
    read_as_text,
    retry_delay,
    set_config,
)
from airflow_provider_queen.exceptions import DatabaseError, QueenError

T = TypeVar("T")


class AsyncQueenClient(AsyncQueueMethods):
    """The queue for asyncio code. Tasks of one event loop may share one: each call borrows a connection.

    Connections are opened when needed and kept; ``close()``, or the end of ``async with``, closes them.

    :param conninfo: a libpq connection string or URI
    :param keyring: keys for encrypted queues; by default those of ``QUEEN_ENCRYPTION_KEYS``
    :param options: time limits, isolation level, pooling, retries
    :param check_schema: refuse, at each connect, a database without the schema that this package needs
    """

    def __init__(
        self,
        conninfo: str,
        *,
        keyring: Keyring | None = None,
        options: ClientOptions | None = None,
        check_schema: bool = True,
    ) -> None:
        self._options = options or ClientOptions()
        self._target = Target(conninfo, self._options)
        self._client_operations = Operations(keyring or Keyring.from_environment(), self._options)
        self._check_schema = check_schema
        self._idle: list[psycopg.AsyncConnection[Any]] = []
        self._closed = False
        # Tasks that have a transaction of this client open.
        self._transacting: set[asyncio.Task[Any] | None] = set()
        weakref.finalize(self, finish, self._idle)

    def __repr__(self) -> str:
        return f"AsyncQueenClient({self._target})"

    async def __aenter__(self) -> AsyncQueenClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; one that is in use is closed when its call ends."""
        self._closed = True
        idle = self._idle[:]
        self._idle.clear()
        for connection in idle:
            await connection.close()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncTransaction]:
        """Everything that is called on the transaction commits together, or not at all when the block raises.

        Calls on the client itself go over other connections and take no part in it.
        """
        connection = await self._acquire()
        task = asyncio.current_task()
        outermost = task not in self._transacting
        self._transacting.add(task)
        transaction = AsyncTransaction(connection, self._operations.in_transaction())
        try:
            async with _committed(connection, self._target.transaction_settings):
                yield transaction
        finally:
            transaction._over = True
            if outermost:
                self._transacting.discard(task)
            await self._give_back(connection)

    async def run_in_transaction(self, function: Callable[[AsyncTransaction], Awaitable[T]]) -> T:
        """Await ``function`` with a transaction, and again with a new one after a conflict with another.

        :param function: must have no effect outside of the transaction: it may run several times
        """
        attempt = 1
        while True:
            try:
                async with self.transaction() as transaction:
                    return await function(transaction)
            except (QueenError, psycopg.Error) as error:
                again = is_conflict(error) or (attempt == 1 and isinstance(error, EncryptionChangedError))
                delay = self._options.retry.delay(attempt) if again else None
                if delay is None:
                    raise
            await asyncio.sleep(delay)
            attempt += 1

    @property
    def _operations(self) -> Operations:
        return self._client_operations

    async def _run(self, operation: Operation[T]) -> T:
        progress = Progress(operation)
        if progress.step is None:
            return progress.result
        async with self._session() as session:
            while progress.step is not None:
                try:
                    answer = await self._perform(session, progress.step)
                except QueenError as error:
                    progress.fail(error)
                else:
                    progress.answer(answer)
        return progress.result

    async def _perform(self, session: _Session, step: Step) -> Any:
        attempt = 1
        while True:
            try:
                if session.connection.closed:
                    session.connection = await self._connect()
                return await session.perform(step)
            except QueenError as error:
                delay = retry_delay(self._options.retry, step, error, attempt)
                if delay is None:
                    raise
            await asyncio.sleep(delay)
            attempt += 1

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[_Session]:
        nested = asyncio.current_task() in self._transacting
        session = _Session(await self._acquire(), self._target.transaction_settings)
        if nested:
            session.settings += nested_settings(self._options)
        try:
            yield session
        except QueenError as error:
            await self._give_back(session.connection, listening=session.listening)
            if nested and (explained := explain_own_lock(error)) is not error:
                raise explained from None
            raise
        except BaseException:  # cancelled in the middle of something
            await session.connection.close()
            raise
        else:
            await self._give_back(session.connection)

    async def _acquire(self) -> psycopg.AsyncConnection[Any]:
        while not self._closed:
            if not self._idle:
                return await self._connect()
            connection = self._idle.pop()
            if is_alive(connection):
                return connection
            await connection.close()
        raise QueenError(f"{self!r} is closed")

    async def _give_back(self, connection: psycopg.AsyncConnection[Any], *, listening: bool = False) -> None:
        idle = not connection.closed and connection.info.transaction_status == TransactionStatus.IDLE
        if idle and not listening and not self._closed and len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            await connection.close()

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        try:
            connection = await psycopg.AsyncConnection.connect(
                self._target.conninfo, **self._target.connect_arguments
            )
        except psycopg.Error as error:
            problem = unreachable(error, str(self._target))
        else:
            try:
                await self._set_up(connection)
            except psycopg.Error as error:
                problem = translate(error, connection_closed=connection.closed)
            except BaseException:
                await connection.close()
                raise
            else:
                return connection
            await connection.close()
        raise problem

    async def _set_up(self, connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.set_isolation_level(self._target.isolation_level)
        if settings := self._target.session_settings:
            await connection.execute(*set_config(settings, local=False))
        if self._check_schema:
            await _check_schema(connection)


class AsyncTransaction(AsyncQueueMethods):
    """The queue inside one transaction of the database. Made by :meth:`AsyncQueenClient.transaction`."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], operations: Operations) -> None:
        self._session = _Session(connection)
        self._transaction_operations = operations
        self._over = False

    @property
    def connection(self) -> psycopg.AsyncConnection[Any]:
        """For the caller's own SQL, which commits with the rest."""
        self._check_open()
        return self._session.connection

    @property
    def _operations(self) -> Operations:
        return self._transaction_operations

    async def _run(self, operation: Operation[T]) -> T:
        self._check_open()
        progress = Progress(operation)
        while progress.step is not None:
            try:
                answer = await self._session.perform(progress.step)
            except QueenError as error:
                progress.fail(error)
            else:
                progress.answer(answer)
        return progress.result

    def _check_open(self) -> None:
        if self._over:
            raise QueenError(OVER)


class _Session:
    """Carries out steps on one connection, each once.

    :param settings: made for each call alone, in a transaction around it
    """

    def __init__(self, connection: psycopg.AsyncConnection[Any], settings: Settings = ()) -> None:
        self.connection = connection
        self.settings = settings
        self.listening = False

    async def perform(self, step: Step) -> Any:
        try:
            if isinstance(step, Pause):
                return await self._pause(step)
            if isinstance(step, Listen):
                await self.connection.execute(LISTEN if step.on else UNLISTEN)
                self.listening = step.on
                return None
            if not self.settings:
                return await self._rows(step)
            async with self.connection.transaction():
                await self.connection.execute(*set_config(self.settings, local=True))
                return await self._rows(step)
        except psycopg.Error as error:
            problem = translate(error, connection_closed=self.connection.closed)
        raise problem

    async def _rows(self, call: Call) -> list[Row]:
        async with self.connection.cursor() as cursor:
            read_as_text(cursor.adapters)
            await cursor.execute(call.statement.sql, call.parameters)
            return await cursor.fetchall()

    async def _pause(self, pause: Pause) -> None:
        if not pause.listening:
            await asyncio.sleep(pause.seconds)
            return
        async with aclosing(self.connection.notifies(timeout=pause.seconds)) as notifications:
            async for notification in notifications:
                if pause.queue_name is None or notification.payload in ("", pause.queue_name):
                    return


@asynccontextmanager
async def _committed(connection: psycopg.AsyncConnection[Any], settings: Settings) -> AsyncIterator[None]:
    """A transaction around the caller's block, whose own errors pass through untouched."""
    block = connection.transaction()
    problem: QueenError | None = None
    try:
        await block.__aenter__()
        if settings:
            await connection.execute(*set_config(settings, local=True))
    except psycopg.Error as error:
        problem = translate(error, connection_closed=connection.closed)
    if problem is not None:
        await connection.close()
        raise problem
    try:
        yield
        if connection.info.transaction_status == TransactionStatus.INERROR:
            raise DatabaseError(ABORTED)
    except BaseException as error:
        if await block.__aexit__(type(error), error, error.__traceback__):
            return  # psycopg.Rollback: the caller wants it undone, and nothing else
        raise
    try:
        await block.__aexit__(None, None, None)
    except psycopg.Error as error:
        problem = translate(error, connection_closed=connection.closed)
    if problem is not None:
        raise problem


async def _check_schema(connection: psycopg.AsyncConnection[Any]) -> None:
    """What ``schema.check`` does for a blocking connection."""
    try:
        async with connection.cursor(row_factory=tuple_row) as cursor:
            await cursor.execute(statement("state").encode())
            row = await cursor.fetchone()
    except psycopg.errors.UndefinedTable:
        row = None
    version, objects = row or (None, None)
    require_current(State(version, json.loads(objects) if objects else {}), schema_files())
