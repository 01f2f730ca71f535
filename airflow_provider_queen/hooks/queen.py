"""The queue on an Airflow connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from airflow.sdk import BaseHook
from psycopg.conninfo import make_conninfo

from airflow_provider_queen.client import (
    AsyncQueenClient,
    ClientOptions,
    Keyring,
    QueenClient,
    Transaction,
    schema,
)
from airflow_provider_queen.client.encryption import split_keys
from airflow_provider_queen.client.interface import QueueMethods
from airflow_provider_queen.client.options import OPTION_NAMES, nearest
from airflow_provider_queen.client.sessions import Target
from airflow_provider_queen.exceptions import InvalidOptionError, QueenError

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from airflow_provider_queen.client.operations import Operation, Operations

T = TypeVar("T")

# By name, because whoever may edit a connection is not thereby allowed to run code: `options`, `service`,
# `passfile` and the like stay out.
LIBPQ_EXTRAS = frozenset(
    {
        "application_name",
        "channel_binding",
        "connect_timeout",
        "gssencmode",
        "hostaddr",
        "keepalives",
        "keepalives_count",
        "keepalives_idle",
        "keepalives_interval",
        "load_balance_hosts",
        "sslcert",
        "sslcrl",
        "sslkey",
        "sslmode",
        "sslnegotiation",
        "sslpassword",
        "sslrootcert",
        "ssl_min_protocol_version",
        "target_session_attrs",
        "tcp_user_timeout",
    }
)
KEYS_EXTRA = "encryption_keys"
_KNOWN_EXTRAS = LIBPQ_EXTRAS | OPTION_NAMES | {KEYS_EXTRA}


# Not a PostgresHook: that one hands every extra to libpq, and what it inherits from DbApiHook logs parameters
# (run) and rows (insert_rows), which here are payloads. What is left of it are the few lines of `_conninfo`.
class QueenHook(QueueMethods, BaseHook):
    """Push to, pop from and look after queues in a PostgreSQL database.

    The methods are those of :class:`~airflow_provider_queen.client.QueenClient`. The connection may be of
    type ``queen`` or ``postgres``. Its extra may have libpq's TLS, keepalive and time-out options,
    ``encryption_keys`` (separated by commas, newest first), ``statement_timeout``, ``lock_timeout``,
    ``isolation_level``, ``transaction_pooler`` and ``poll_seconds``; nothing else is taken from there.

    :param queen_conn_id: the connection
    """

    conn_name_attr = "queen_conn_id"
    default_conn_name = "queen_default"
    conn_type = "queen"
    hook_name = "Queen"

    def __init__(self, queen_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.queen_conn_id = queen_conn_id

    @property
    def dsn(self) -> str:
        """The connection as libpq's string, with the password: for a child's environment, not for a log."""
        return _conninfo(self._airflow_connection, self._extra)

    @cached_property
    def client(self) -> QueenClient:
        """The client that does the work; its connections live as long as the hook, or until ``close()``."""
        return QueenClient(self.dsn, keyring=self._keyring(), options=_options(self._extra))

    async def get_async_client(self) -> AsyncQueenClient:
        """A new client for asyncio; the caller closes it: ``async with await hook.get_async_client()``."""
        from airflow.sdk.log import amask_secret

        connection = await self.aget_connection(self.queen_conn_id)
        extra = self._allowed(await connection.aextra_dejson())
        for key in _keys(extra):
            await amask_secret(key)
        keyring = Keyring(keys) if (keys := _keys(extra)) else None
        return AsyncQueenClient(_conninfo(connection, extra), keyring=keyring, options=_options(extra))

    def get_conn(self) -> psycopg.Connection[Any]:
        """A new connection for the caller's own SQL; the caller closes it."""
        connection: psycopg.Connection[Any] = psycopg.connect(Target(self.dsn, ClientOptions()).conninfo)
        return connection

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Everything that is called on the transaction commits together, or not at all when the block raises.

        The transaction has the hook's own methods, and ``connection`` for the caller's own SQL.
        """
        return self.client.transaction()

    def run_in_transaction(self, function: Callable[[Transaction], T]) -> T:
        """Call ``function`` with a transaction, and again with a new one after a conflict with another.

        :param function: must have no effect outside of the transaction: it may run several times
        """
        return self.client.run_in_transaction(function)

    def migrate(self, target: str = "head") -> schema.MigrationReport:
        """Bring the schema ``queen`` to a version; what the Dag ``queen_migrate`` does.

        :param target: ``head``, ``base`` (deletes every queue), a revision, or a step such as ``-1``
        """
        self.close()  # its connections were checked against what is there now
        return schema.migrate(self.dsn, target)

    def schema_version(self) -> str | None:
        """The version of the schema ``queen`` in the database; None where there is none."""
        with QueenClient(self.dsn, check_schema=False) as client:
            return client.schema_version()

    def test_connection(self) -> tuple[bool, str]:
        """Connect and look at the schema, for the button in Airflow's connection form."""
        try:
            version = self.schema_version()
        except QueenError as error:
            return False, str(error)
        if version is None:
            return True, "Connected; the schema queen is missing: run the Dag queen_migrate"
        if version != schema.head_version():
            return True, f"Connected; the schema queen has version {version}, run the Dag queen_migrate"
        return True, f"Connected; the schema queen has version {version}"

    def close(self) -> None:
        """Close the connections to the database. The hook opens new ones when it is used again."""
        if (client := self.__dict__.pop("client", None)) is not None:
            client.close()

    @cached_property
    def _airflow_connection(self) -> Connection:
        return self.get_connection(self.queen_conn_id)

    @cached_property
    def _extra(self) -> dict[str, Any]:
        return self._allowed(self._airflow_connection.extra_dejson)

    def _keyring(self) -> Keyring | None:
        from airflow.sdk.log import mask_secret

        keys = _keys(self._extra)
        for key in keys:
            mask_secret(key)
        return Keyring(keys) if keys else None

    def _allowed(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """The extras that are ours. What looks like a misspelt one is an error: no sslmode may get lost."""
        given = {name: value for name, value in extra.items() if value is not None and value != ""}
        for name in given.keys() - _KNOWN_EXTRAS:
            if near := nearest(name, _KNOWN_EXTRAS, cutoff=0.8):
                raise InvalidOptionError(
                    f"connection {self.queen_conn_id!r} has the unknown extra {name!r};"
                    f" the nearest is {near!r}"
                )
            self.log.warning("Connection %s: extra %r is not used by Queen", self.queen_conn_id, name)
        return {name: value for name, value in given.items() if name in _KNOWN_EXTRAS}

    @property
    def _operations(self) -> Operations:
        return self.client._operations

    def _run(self, operation: Operation[T]) -> T:
        return self.client._run(operation)


def _conninfo(connection: Connection, extra: Mapping[str, Any]) -> str:
    parts = {
        "host": connection.host,
        "port": connection.port,
        "dbname": connection.schema,
        "user": connection.login,
        "password": connection.password,
    }
    parts |= {name: extra[name] for name in LIBPQ_EXTRAS & extra.keys()}
    return make_conninfo("", **{name: value for name, value in parts.items() if value not in (None, "")})


def _options(extra: Mapping[str, Any]) -> ClientOptions:
    return ClientOptions.from_mapping({name: extra[name] for name in OPTION_NAMES & extra.keys()})


def _keys(extra: Mapping[str, Any]) -> list[str]:
    return split_keys(extra.get(KEYS_EXTRA, ()))
