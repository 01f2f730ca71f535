"""The schema ``queen``: its versions, how to reach them, and whether a database has the right one.

Importing this package, :func:`check`, :func:`current_version` and :func:`head_version` load neither
Alembic nor SQLAlchemy: a hook calls them at each connect.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from airflow_provider_queen.client.schema.files import schema_files
from airflow_provider_queen.client.schema.report import MigrationPlan, MigrationReport
from airflow_provider_queen.client.schema.state import V2, is_v2, read_state, require_current

if TYPE_CHECKING:
    from airflow_provider_queen.client.schema.readiness import Preflight
    from airflow_provider_queen.client.schema.v2 import Verification

__all__ = [
    "MigrationPlan",
    "MigrationReport",
    "backup",
    "check",
    "current_version",
    "dry_run",
    "head_version",
    "migrate",
    "plan",
    "preflight",
    "stamp",
    "verification",
]


def migrate(conninfo: str, target: str = "head", *, sql_folder: Path | None = None) -> MigrationReport:
    """Bring the database to ``target``, up or down, in one transaction.

    A second run at the same time waits for the first and then finds nothing to do. Views and functions are
    applied again whenever one of their files changed; what was granted on them stays granted.

    :param conninfo: a libpq connection string or URI
    :param target: ``head``, ``base`` (removes the schema and every message), a revision or the beginning
        of its name, or a step such as ``-1``
    :param sql_folder: another folder of SQL files than the package's own
    """
    from airflow_provider_queen.client.schema import runner

    return runner.migrate(conninfo, target, schema_files(sql_folder))


def dry_run(conninfo: str | None, target: str = "head", *, sql_folder: Path | None = None) -> str:
    """The SQL that :func:`migrate` would run, for ``psql -f``; nothing is changed.

    :param conninfo: the database to start from, which is only read; ``None`` means an empty one
    """
    from airflow_provider_queen.client.schema import runner

    return runner.dry_run(conninfo, target, schema_files(sql_folder))


def plan(conninfo: str | None, target: str = "head", *, sql_folder: Path | None = None) -> MigrationPlan:
    """What :func:`migrate` would do: the script of :func:`dry_run`, and the report of a run.

    :param conninfo: the database to start from, which is only read; ``None`` means an empty one
    """
    from airflow_provider_queen.client.schema import runner

    return runner.plan(conninfo, target, schema_files(sql_folder))


def preflight(conninfo: str, *, sql_folder: Path | None = None) -> Preflight:
    """Look at the database before a migration; raise with everything that stands in its way.

    Asks for PostgreSQL 14 or newer, a server that can be written to, a version that this package knows, and
    the rights to create and to replace. Nothing is changed.
    """
    from airflow_provider_queen.client.schema.readiness import preflight

    return preflight(conninfo, schema_files(sql_folder))


def backup(conninfo: str, folder: Path) -> Path:
    """``pg_dump`` of the schema ``queen`` into a new file of ``folder``; its path."""
    from airflow_provider_queen.client.schema import dump

    return dump.backup(conninfo, folder)


def stamp(conninfo: str, revision: str, *, sql_folder: Path | None = None) -> None:
    """Record ``revision`` as the database's version and run nothing: for tables made by other means."""
    from airflow_provider_queen.client.schema import runner

    runner.stamp(conninfo, revision, schema_files(sql_folder))


def current_version(connection: psycopg.Connection[Any]) -> str | None:
    """The version that the database records; ``None`` where there is no schema ``queen`` of ours.

    Of a database with the tables of Queen v2, which recorded none: ``0000_v2``.
    """
    version = read_state(connection).version
    return V2 if version is None and is_v2(connection) else version


def verification(connection: psycopg.Connection[Any]) -> list[Verification]:
    """What was compared when v2 was migrated, queue by queue; empty where v2's tables are not kept."""
    from airflow_provider_queen.client.schema import v2

    return v2.verification(connection)


def head_version(*, sql_folder: Path | None = None) -> str:
    """The version that this package needs."""
    return schema_files(sql_folder).head


def check(connection: psycopg.Connection[Any], *, sql_folder: Path | None = None) -> None:
    """Raise ``SchemaVersionError`` unless the database has this package's tables, views and functions.

    One query, and the connection is left as it was found.
    """
    require_current(read_state(connection), schema_files(sql_folder))
