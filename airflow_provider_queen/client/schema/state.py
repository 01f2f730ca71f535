"""What version a database has, and whether this package can work with it. No Alembic: each connect asks."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from airflow_provider_queen.client.schema.files import SchemaFiles, statement
from airflow_provider_queen.exceptions import SchemaVersionError

V2 = "0000_v2"
"""The revision of a database with the tables of Queen v2."""

_HOW_TO = "run the Dag queen_migrate or QueenHook.migrate()"


class State(NamedTuple):
    """What is recorded in the database. Without a schema: no version, no objects."""

    version: str | None
    objects: dict[str, str]


def read_state(connection: psycopg.Connection[Any]) -> State:
    """Read the recorded state with one query.

    A connection that was idle is idle again afterwards. Inside the caller's transaction a missing schema
    aborts that transaction, as any failed statement does.
    """
    was_idle = connection.info.transaction_status == TransactionStatus.IDLE
    try:
        with connection.cursor(row_factory=tuple_row) as cursor:
            row = cursor.execute(_state_query()).fetchone()
    except psycopg.errors.UndefinedTable:
        return State(None, {})
    except psycopg.errors.InsufficientPrivilege as error:
        raise SchemaVersionError(
            f"role {connection.info.user!r} may not read the version of the schema queen"
            f" ({error.diag.message_primary}); its owner can GRANT USAGE ON SCHEMA queen and"
            " SELECT ON queen.alembic_version, queen.schema_objects to it"
        ) from error
    finally:
        if was_idle and connection.info.transaction_status != TransactionStatus.IDLE:
            connection.rollback()
    assert row is not None  # noqa: S101
    version, objects = row
    return State(version, json.loads(objects) if objects else {})


def is_v2(connection: psycopg.Connection[Any]) -> bool:
    """Whether the schema ``queen`` is that of Queen v2, which recorded no version."""
    was_idle = connection.info.transaction_status == TransactionStatus.IDLE
    with connection.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(statement("is_v2").encode()).fetchone()
    if was_idle:
        connection.rollback()
    return row == (True,)


def require_known(version: str | None, files: SchemaFiles) -> None:
    """Refuse a version that is not among the package's migrations."""
    if version is None or version in files.ids:
        return
    newer = version[:4] > files.head[:4]
    raise SchemaVersionError(
        f"the schema queen has version {version}, {'newer than' if newer else 'unknown to'} this package,"
        f" which needs {files.head}: install the airflow-provider-queen that made it, here or to go down to"
        f" {files.head} with its Dag queen_migrate"
    )


def require_current(state: State, files: SchemaFiles) -> None:
    """Refuse everything but the package's own version, functions and views included."""
    if state.version is None:
        raise SchemaVersionError(
            f"the database has no schema queen of ours, needed is version {files.head}: {_HOW_TO}"
        )
    require_known(state.version, files)
    if not files.works(state.version):
        raise SchemaVersionError(
            f"the schema queen has the older version {state.version}, needed is {files.head}: {_HOW_TO}"
        )
    if state.objects != files.checksums:
        names = sorted(name for name, _ in state.objects.items() ^ files.checksums.items())
        different = ", ".join(dict.fromkeys(names))
        raise SchemaVersionError(
            f"the schema queen has version {state.version}, as needed, but its functions or views are not"
            f" those of this package ({different}): {_HOW_TO}"
        )


@lru_cache(maxsize=1)
def _state_query() -> bytes:
    return statement("state").encode()
