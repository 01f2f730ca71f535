"""How driver and executors reach the database without showing the password to anybody.

Spark shows the options of a data source in plans, in its UI and in the event log, and application arguments
and ``spark.*`` settings as well. So credentials come from the environment of the driver and travel to the
executors inside the pickled reader, which Spark sends between its own processes and displays nowhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import adbc_driver_manager.dbapi as adbc
import adbc_driver_postgresql.dbapi
import psycopg
import pyarrow as pa
from psycopg import pq, sql
from psycopg.adapt import PyFormat
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_provider_queen.client import Keyring
from airflow_provider_queen.client.encryption import KEYS_VARIABLE
from airflow_provider_queen.client.errors import translate
from airflow_provider_queen.exceptions import (
    DatabaseUnreachableError,
    InvalidOptionError,
    QueenError,
    QueueNotFoundError,
)

DSN_VARIABLE = "QUEEN_DSN"
CONNECT_TIMEOUT_SECONDS = 10


@dataclass(frozen=True)
class ConnectionInfo:
    """A libpq connection string that never prints its password."""

    conninfo: str

    def __post_init__(self) -> None:
        try:
            conninfo_to_dict(self.conninfo)
        except psycopg.ProgrammingError:
            # libpq quotes the string in its message, and with it the password.
            raise InvalidOptionError(
                f"the Queen connection string (for example in {DSN_VARIABLE}) is no libpq connection string"
            ) from None

    def __repr__(self) -> str:
        return f"ConnectionInfo({self.target})"

    @property
    def target(self) -> str:
        """Where the connection leads, for messages: host, port, database and user."""
        parts = conninfo_to_dict(self.conninfo)
        known = [f"{name}={parts[name]}" for name in ("host", "port", "dbname", "user") if parts.get(name)]
        return " ".join(known) or "libpq's defaults"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> ConnectionInfo:
        """Take ``QUEEN_DSN``, or else libpq's own ``PG*`` variables.

        The variables are copied into the string, because an executor on another machine does not have them.
        """
        environ = os.environ if environ is None else environ
        if dsn := environ.get(DSN_VARIABLE):
            return cls(dsn)
        known = {
            option.keyword.decode(): environ[option.envvar.decode()]
            for option in pq.Conninfo.get_defaults()
            if option.envvar and environ.get(option.envvar.decode())
        }
        if not known:
            raise InvalidOptionError(
                f"no database to read: set {DSN_VARIABLE}, or libpq's PGHOST, PGDATABASE, PGUSER and"
                " PGPASSWORD, in the environment of the Spark driver"
            )
        return cls(make_conninfo("", **known))

    def connect(self) -> psycopg.Connection[Any]:
        """Open a connection in autocommit, so that no scan holds a snapshot between two of its statements."""
        try:
            # No prepared statements: the plan must fit the ranges at hand, and poolers do not keep them.
            connection = psycopg.connect(self._with_timeout, autocommit=True, prepare_threshold=None)
        except psycopg.OperationalError as error:
            raise self._unreachable(error) from None
        # psycopg hands out timestamps in the session's zone; UTC is the one that costs no conversion.
        connection.execute("SELECT pg_catalog.set_config('TimeZone', 'UTC', false)")
        return connection

    def connect_arrow(self) -> adbc.Connection:
        """The same for reading in bulk: rows come as Arrow batches and never are Python objects."""
        try:
            # Arrow knows no text but UTF-8, whatever the database stores it in.
            conninfo = make_conninfo(self._with_timeout, client_encoding="UTF8")
            connection: adbc.Connection = adbc_driver_postgresql.dbapi.connect(conninfo, autocommit=True)
        except adbc.Error as error:
            raise self._unreachable(error) from None
        return connection

    @property
    def _with_timeout(self) -> str:
        timeout = conninfo_to_dict(self.conninfo).get("connect_timeout") or CONNECT_TIMEOUT_SECONDS
        return make_conninfo(self.conninfo, connect_timeout=timeout)

    def _unreachable(self, error: Exception) -> DatabaseUnreachableError:
        reason = " ".join(str(error).split())
        return DatabaseUnreachableError(f"cannot connect to PostgreSQL at {self.target}: {reason}")


def call(
    connection: psycopg.Connection[Any], function: str, columns: Sequence[str], *arguments: object
) -> list[tuple[Any, ...]]:
    """Return ``columns`` of ``queen.function(arguments)``.

    Arguments go in binary form: in a text array psycopg looks for characters to escape, message by message.
    """
    statement = _selection(function, columns, [sql.Placeholder(format=PyFormat.BINARY)] * len(arguments))
    failure: psycopg.Error
    try:
        return connection.cursor(binary=True).execute(statement, arguments).fetchall()
    except psycopg.Error as error:
        failure = error
    # Outside of the except block: the driver's error may quote a payload, and would be attached.
    raise translate(failure, connection_closed=connection.closed)


def call_arrow(
    connection: adbc.Connection, function: str, columns: Sequence[str], *arguments: object
) -> pa.RecordBatch:
    """The same as one Arrow batch. Arguments are written out: with parameters the driver uses no COPY."""
    statement = _selection(function, columns, [sql.Literal(argument) for argument in arguments])
    try:
        with connection.cursor() as cursor:
            cursor.execute(statement.as_string())
            table = cursor.fetch_arrow_table()
            return pa.RecordBatch.from_struct_array(table.to_struct_array().combine_chunks())
    except (adbc.Error, pa.ArrowException, OSError) as error:
        failure = " ".join(str(error).split())
    raise QueenError(f"reading {function.removeprefix('scan_')} failed: {failure}")


def _selection(function: str, columns: Sequence[str], arguments: Sequence[sql.Composable]) -> sql.Composed:
    """The only SQL that the Spark side composes."""
    return sql.SQL("SELECT {} FROM {}({})").format(
        sql.SQL(", ").join(map(sql.Identifier, columns)),
        sql.Identifier("queen", function),
        sql.SQL(", ").join(arguments),
    )


@dataclass(frozen=True)
class Keys:
    """Encryption keys on their way to the executors; never prints one."""

    text: str

    def __repr__(self) -> str:
        return "Keys(...)"

    @classmethod
    def from_environment(cls, required: bool = True) -> Keys | None:
        """The keys in ``QUEEN_ENCRYPTION_KEYS``; None where there are none and none are required."""
        text = os.environ.get(KEYS_VARIABLE)
        if text is None and required:
            raise InvalidOptionError(
                f"no keys to encrypt or decrypt with: set {KEYS_VARIABLE} for the driver"
            )
        return cls(text) if text is not None else None

    def keyring(self) -> Keyring:
        return Keyring.parse(self.text)


def check_queue(connection: psycopg.Connection[Any], queue_name: str | None) -> None:
    """Tell a mistyped queue from an empty one; without a name, see that the schema is there at all."""
    found = call(connection, "queue_exists", ["queue_exists"], queue_name)[0][0]
    if queue_name is not None and not found:
        raise QueueNotFoundError(f"there is no queue {queue_name!r}")
