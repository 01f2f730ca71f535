"""What both clients need to know of a psycopg connection: how to open, set up, check and read it."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Any, TypeAlias

import psycopg
from psycopg.adapt import AdaptersMap
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import ConnStatus
from psycopg.types.string import TextLoader

from airflow_provider_queen.client.operations import CHANNEL, Call, Step
from airflow_provider_queen.client.options import ClientOptions, RetryPolicy
from airflow_provider_queen.exceptions import (
    ConnectionLostError,
    DatabaseError,
    DatabaseUnreachableError,
    InvalidOptionError,
    QueenError,
    TransactionConflictError,
)

CONNECT_TIMEOUT_SECONDS = 10
MAX_IDLE = 4
LISTEN = f"LISTEN {CHANNEL}".encode()
UNLISTEN = f"UNLISTEN {CHANNEL}".encode()
OVER = "this transaction is over: begin another one"
ABORTED = "an earlier call in this transaction failed, so PostgreSQL had to roll all of it back"
# Long for a lock, short for somebody who waits for himself.
_NESTED_LOCK_TIMEOUT = "5s"
_LOCK_NOT_AVAILABLE = "55P03"

Settings: TypeAlias = tuple[tuple[str, str], ...]


class Target:
    """Where to connect and how; never prints its password."""

    def __init__(self, conninfo: str, options: ClientOptions) -> None:
        parts: dict[str, Any] | None = None
        try:
            parts = conninfo_to_dict(conninfo)
        except psycopg.ProgrammingError:
            parts = None  # libpq quotes the string in its error, and with it the password
        if parts is None:
            raise InvalidOptionError("the connection string is none that libpq understands")
        self.options = options
        self._name = " ".join(
            f"{name}={parts[name]}" for name in ("host", "port", "dbname", "user") if parts.get(name)
        )
        defaults: dict[str, Any] = {
            "connect_timeout": CONNECT_TIMEOUT_SECONDS,
            "fallback_application_name": "queen",
            # What is sent is UTF-8 whatever the database is kept in.
            "client_encoding": "UTF8",
        }
        self.conninfo = make_conninfo("", **{**defaults, **parts, "client_encoding": "UTF8"})

    def __repr__(self) -> str:
        return f"Target({self._name or 'defaults of libpq'})"

    def __str__(self) -> str:
        return self._name or "libpq's defaults"

    @property
    def connect_arguments(self) -> dict[str, Any]:
        # A transaction pooler gives each transaction another session, which does not know the prepared ones.
        pooled = self.options.transaction_pooler
        return {"autocommit": True, "prepare_threshold": None if pooled else 5}

    @property
    def session_settings(self) -> Settings:
        """Set once per session. A pooled session is not ours to set."""
        # psycopg gives times in the session's zone; UTC is the one that costs no conversion.
        return () if self.options.transaction_pooler else (("TimeZone", "UTC"), *self.options.settings)

    @property
    def transaction_settings(self) -> Settings:
        """Set in each transaction, where the session cannot be set."""
        return self.options.settings if self.options.transaction_pooler else ()

    @property
    def isolation_level(self) -> psycopg.IsolationLevel | None:
        """For BEGIN: no statement can set it later."""
        level = self.options.isolation_level
        return None if level is None else psycopg.IsolationLevel[level.replace(" ", "_").upper()]


def set_config(settings: Settings, *, local: bool) -> tuple[bytes, list[object]]:
    """One statement that makes all settings."""
    calls = ", ".join(["pg_catalog.set_config(%s, %s, %s)"] * len(settings))
    return f"SELECT {calls}".encode(), [part for setting in settings for part in (*setting, local)]


def read_as_text(adapters: AdaptersMap) -> None:
    """Leave ids and payloads as text: most are never looked into, and parsing costs more than the rest."""
    for type_name in ("uuid", "json", "jsonb"):
        adapters.register_loader(type_name, TextLoader)


def is_alive(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Whether an idle connection is still there, without asking the server.

    A server that went away, or ended this session, has closed the socket: it is readable, and to read fails.
    """
    if connection.closed:
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    try:
        while poll.poll(0):
            connection.pgconn.consume_input()
    except psycopg.Error:
        return False
    return connection.pgconn.status == ConnStatus.OK


def finish(connections: Sequence[psycopg.Connection[Any] | psycopg.AsyncConnection[Any]]) -> None:
    """Close connections of a client that nobody closed: works without an event loop too."""
    for connection in connections:
        connection.pgconn.finish()


def retry_delay(policy: RetryPolicy, step: Step, error: QueenError, attempt: int) -> float | None:
    """Seconds until a failed step is repeated; None where that is of no use or not safe."""
    if not isinstance(step, Call):
        return None
    if isinstance(error, TransactionConflictError):
        return policy.delay(attempt)
    # Unreachable is met here only while reconnecting: a first connect fails before any step.
    if isinstance(error, ConnectionLostError | DatabaseUnreachableError) and step.statement.repeatable:
        return policy.delay(attempt)
    return None


def nested_settings(options: ClientOptions) -> Settings:
    """Settings for a call beside a transaction that the same caller has open.

    The call may wait for a lock of that transaction, which in turn waits for the call. PostgreSQL cannot see
    that circle, so the wait gets an end.
    """
    return () if options.lock_timeout is not None else (("lock_timeout", _NESTED_LOCK_TIMEOUT),)


def explain_own_lock(error: QueenError) -> QueenError:
    """Say what a lock timeout beside an own transaction probably means."""
    if isinstance(error, DatabaseError) and error.sqlstate == _LOCK_NOT_AVAILABLE:
        return DatabaseError(
            f"{error}: the client was called inside its own transaction, which probably holds the lock; call"
            " the method on the transaction instead",
            error.sqlstate,
        )
    return error
