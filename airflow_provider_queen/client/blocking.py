"""The blocking client."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from airflow_provider_queen.client import schema
from airflow_provider_queen.client.encryption import Keyring
from airflow_provider_queen.client.errors import EncryptionChangedError, is_conflict, translate, unreachable
from airflow_provider_queen.client.interface import QueueMethods
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


class QueenClient(QueueMethods):
    """The queue for blocking code. Threads may share one: each call borrows a connection of its own.

    Connections are opened when needed and kept; ``close()``, or the end of a ``with`` block, closes them.

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
        self._idle: list[psycopg.Connection[Any]] = []
        self._lock = threading.Lock()
        self._closed = False
        # Threads that have a transaction of this client open.
        self._transacting: set[int] = set()
        weakref.finalize(self, finish, self._idle)

    def __repr__(self) -> str:
        return f"QueenClient({self._target})"

    def __enter__(self) -> QueenClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; one that is in use is closed when its call ends."""
        with self._lock:
            self._closed = True
            idle = self._idle[:]
            self._idle.clear()
        for connection in idle:
            connection.close()

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Everything that is called on the transaction commits together, or not at all when the block raises.

        Calls on the client itself go over other connections and take no part in it.
        """
        connection = self._acquire()
        thread = threading.get_ident()
        outermost = thread not in self._transacting
        self._transacting.add(thread)
        transaction = Transaction(connection, self._operations.in_transaction())
        try:
            with _committed(connection, self._target.transaction_settings):
                yield transaction
        finally:
            transaction._over = True
            if outermost:
                self._transacting.discard(thread)
            self._give_back(connection)

    def run_in_transaction(self, function: Callable[[Transaction], T]) -> T:
        """Call ``function`` with a transaction, and again with a new one after a conflict with another.

        :param function: must have no effect outside of the transaction: it may run several times
        """
        attempt = 1
        while True:
            try:
                with self.transaction() as transaction:
                    return function(transaction)
            except (QueenError, psycopg.Error) as error:
                again = is_conflict(error) or (attempt == 1 and isinstance(error, EncryptionChangedError))
                delay = self._options.retry.delay(attempt) if again else None
                if delay is None:
                    raise
            time.sleep(delay)
            attempt += 1

    def schema_version(self) -> str | None:
        """The version of the schema ``queen``; None where there is none."""
        with self._session() as session:
            return schema.current_version(session.connection)

    @property
    def _operations(self) -> Operations:
        return self._client_operations

    def _run(self, operation: Operation[T]) -> T:
        progress = Progress(operation)
        if progress.step is None:
            return progress.result
        with self._session() as session:
            while progress.step is not None:
                try:
                    answer = self._perform(session, progress.step)
                except QueenError as error:
                    progress.fail(error)
                else:
                    progress.answer(answer)
        return progress.result

    def _perform(self, session: _Session, step: Step) -> Any:
        attempt = 1
        while True:
            try:
                if session.connection.closed:
                    session.connection = self._connect()
                return session.perform(step)
            except QueenError as error:
                delay = retry_delay(self._options.retry, step, error, attempt)
                if delay is None:
                    raise
            time.sleep(delay)
            attempt += 1

    @contextmanager
    def _session(self) -> Iterator[_Session]:
        nested = threading.get_ident() in self._transacting
        session = _Session(self._acquire(), self._target.transaction_settings)
        if nested:
            session.settings += nested_settings(self._options)
        try:
            yield session
        except QueenError as error:
            self._give_back(session.connection, listening=session.listening)
            if nested and (explained := explain_own_lock(error)) is not error:
                raise explained from None
            raise
        except BaseException:  # interrupted in the middle of something
            session.connection.close()
            raise
        else:
            self._give_back(session.connection)

    def _acquire(self) -> psycopg.Connection[Any]:
        while True:
            with self._lock:
                if self._closed:
                    raise QueenError(f"{self!r} is closed")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect()
            if is_alive(connection):
                return connection
            connection.close()

    def _give_back(self, connection: psycopg.Connection[Any], *, listening: bool = False) -> None:
        idle = not connection.closed and connection.info.transaction_status == TransactionStatus.IDLE
        with self._lock:
            if idle and not listening and not self._closed and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self) -> psycopg.Connection[Any]:
        try:
            connection = psycopg.Connection.connect(self._target.conninfo, **self._target.connect_arguments)
        except psycopg.Error as error:
            problem = unreachable(error, str(self._target))
        else:
            try:
                self._set_up(connection)
            except psycopg.Error as error:
                problem = translate(error, connection_closed=connection.closed)
            except BaseException:
                connection.close()
                raise
            else:
                return connection
            connection.close()
        raise problem

    def _set_up(self, connection: psycopg.Connection[Any]) -> None:
        connection.isolation_level = self._target.isolation_level
        if settings := self._target.session_settings:
            connection.execute(*set_config(settings, local=False))
        if self._check_schema:
            schema.check(connection)


class Transaction(QueueMethods):
    """The queue inside one transaction of the database. Made by :meth:`QueenClient.transaction`."""

    def __init__(self, connection: psycopg.Connection[Any], operations: Operations) -> None:
        self._session = _Session(connection)
        self._transaction_operations = operations
        self._over = False

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """For the caller's own SQL, which commits with the rest."""
        self._check_open()
        return self._session.connection

    @property
    def _operations(self) -> Operations:
        return self._transaction_operations

    def _run(self, operation: Operation[T]) -> T:
        self._check_open()
        progress = Progress(operation)
        while progress.step is not None:
            try:
                answer = self._session.perform(progress.step)
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

    def __init__(self, connection: psycopg.Connection[Any], settings: Settings = ()) -> None:
        self.connection = connection
        self.settings = settings
        self.listening = False

    def perform(self, step: Step) -> Any:
        try:
            if isinstance(step, Pause):
                return self._pause(step)
            if isinstance(step, Listen):
                self.connection.execute(LISTEN if step.on else UNLISTEN)
                self.listening = step.on
                return None
            if not self.settings:
                return self._rows(step)
            with self.connection.transaction():
                self.connection.execute(*set_config(self.settings, local=True))
                return self._rows(step)
        except psycopg.Error as error:
            problem = translate(error, connection_closed=self.connection.closed)
        raise problem

    def _rows(self, call: Call) -> list[Row]:
        with self.connection.cursor() as cursor:
            read_as_text(cursor.adapters)
            return cursor.execute(call.statement.sql, call.parameters).fetchall()

    def _pause(self, pause: Pause) -> None:
        if not pause.listening:
            time.sleep(pause.seconds)
            return
        with closing(self.connection.notifies(timeout=pause.seconds)) as notifications:
            for notification in notifications:
                if pause.queue_name is None or notification.payload in ("", pause.queue_name):
                    return


@contextmanager
def _committed(connection: psycopg.Connection[Any], settings: Settings) -> Iterator[None]:
    """A transaction around the caller's block, whose own errors pass through untouched."""
    block = connection.transaction()
    problem: QueenError | None = None
    try:
        block.__enter__()
        if settings:
            connection.execute(*set_config(settings, local=True))
    except psycopg.Error as error:
        problem = translate(error, connection_closed=connection.closed)
    if problem is not None:
        connection.close()
        raise problem
    try:
        yield
        if connection.info.transaction_status == TransactionStatus.INERROR:
            raise DatabaseError(ABORTED)
    except BaseException as error:
        if block.__exit__(type(error), error, error.__traceback__):
            return  # psycopg.Rollback: the caller wants it undone, and nothing else
        raise
    try:
        block.__exit__(None, None, None)
    except psycopg.Error as error:
        problem = translate(error, connection_closed=connection.closed)
    if problem is not None:
        raise problem
