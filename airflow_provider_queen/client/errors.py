"""The driver's errors in the product's words.

None of these is raised while the driver's error is being handled: it would be attached as the context, and
its detail and context lines may quote a payload.
"""

from __future__ import annotations

import psycopg

from airflow_provider_queen.exceptions import (
    ConnectionLostError,
    DatabaseError,
    DatabaseUnreachableError,
    EncryptionError,
    InvalidOptionError,
    LeaseLostError,
    QueenError,
    QueueFullError,
    QueueNotFoundError,
    SchemaVersionError,
    TransactionConflictError,
)


class EncryptionChangedError(EncryptionError):
    """The queue's encryption was switched since the client last looked; the push was refused as a whole."""


_BY_SQLSTATE: dict[str, type[QueenError]] = {
    "QN001": QueueNotFoundError,
    "QN002": QueueFullError,
    "QN003": LeaseLostError,
    "QN004": InvalidOptionError,
    "QN005": EncryptionChangedError,
}
_CONFLICTS = frozenset({"40001", "40P01"})
_NO_SCHEMA = frozenset({"3F000", "42P01", "42883", "42703"})
# admin_shutdown, crash_shutdown, cannot_connect_now: the session is over, whatever else is said.
_SHUTDOWN = frozenset({"57P01", "57P02", "57P03"})


def translate(error: psycopg.Error, *, connection_closed: bool) -> QueenError:
    """What to raise instead of ``error``, which came from one of our own calls."""
    sqlstate = error.sqlstate
    text = error.diag.message_primary or type(error).__name__
    if sqlstate in _BY_SQLSTATE:
        return _BY_SQLSTATE[sqlstate](". ".join(filter(None, (text, error.diag.message_hint))))
    if sqlstate in _CONFLICTS:
        return TransactionConflictError(text, sqlstate)
    if connection_closed or sqlstate in _SHUTDOWN or (sqlstate or "").startswith("08"):
        return ConnectionLostError(
            f"the connection to the database broke during a call ({_one_line(error)}): whether the call took"
            " effect is unknown",
            sqlstate,
        )
    if sqlstate in _NO_SCHEMA:
        return SchemaVersionError(
            f"the database has no schema queen as this package needs it ({text}): run the Dag queen_migrate"
            " or QueenHook.migrate()"
        )
    # Data exceptions and constraint violations name values, and a value may be a payload.
    if sqlstate is not None and sqlstate.startswith("22"):
        return InvalidOptionError(f"PostgreSQL cannot use a value of this call ({_condition(error)})")
    if sqlstate is not None and sqlstate.startswith("23"):
        return DatabaseError(f"PostgreSQL refused the call ({_condition(error)})", sqlstate)
    if sqlstate is None:  # the driver's own, about what it was given or about the network
        return DatabaseError(f"the database driver failed ({_condition(error)})")
    return DatabaseError(f"{text} ({sqlstate})", sqlstate)


def unreachable(error: psycopg.Error, target: str) -> QueenError:
    """What to raise where no connection could be opened. libpq names hosts and users, not passwords."""
    return DatabaseUnreachableError(
        f"cannot connect to PostgreSQL at {target}: {' '.join(str(error).split())}", error.sqlstate
    )


def is_conflict(error: BaseException) -> bool:
    """Whether the transaction may simply be repeated, ours or the caller's own statement in it."""
    if isinstance(error, psycopg.Error):
        return error.sqlstate in _CONFLICTS
    return isinstance(error, TransactionConflictError)


def _condition(error: psycopg.Error) -> str:
    return f"{type(error).__name__}, {error.sqlstate}" if error.sqlstate else type(error).__name__


def _one_line(error: psycopg.Error) -> str:
    # A server that shuts down says so in the primary message; libpq itself has no other lines.
    return " ".join((error.diag.message_primary or str(error)).split())
