"""Whether a migration can start, and what it would meet. Reads only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row

from airflow_provider_queen.client.schema import v2
from airflow_provider_queen.client.schema.files import SchemaFiles, statement
from airflow_provider_queen.client.schema.runner import connect, recorded_state
from airflow_provider_queen.client.schema.state import V2, require_known
from airflow_provider_queen.exceptions import QueenError

OLDEST_POSTGRES = 14  # the first with multiranges, which hold what was settled ahead of a cursor


@dataclass(frozen=True)
class Preflight:
    """A database that can be migrated. ``None`` as its version is base: no schema."""

    version: str | None
    server_version: str
    running_leases: int
    """Their holders wait while the migration runs, and settle after it."""
    schema_bytes: int
    """What the schema ``queen`` takes on the server's disk, indexes included."""

    @property
    def copies(self) -> bool:
        """Whether a migration to head copies every message: about as much disk again is needed."""
        return self.version == V2


def preflight(conninfo: str, files: SchemaFiles) -> Preflight:
    """What the database has; an error that names everything that stands in the way."""
    with connect(conninfo) as raw:
        raw.autocommit = True  # reading the version of a schema that is not there must not abort the rest
        found = _row(raw, "preflight")
        problems = _problems(found, raw.info.user)
        version = recorded_state(raw, files).version
        running_leases = 0
        if version == V2:
            looked = v2.look(raw)
            problems += looked.problems
            running_leases = looked.running_leases
        elif found.has_leases:
            running_leases = _row(raw, "running_leases").running
        if problems:
            raise QueenError(f"the schema queen cannot be migrated here: {'; '.join(problems)}")
        require_known(version, files)
        return Preflight(version, found.server_version, running_leases, found.schema_bytes)


def _problems(found: Any, user: str) -> list[str]:
    problems = []
    if found.server_version_num < OLDEST_POSTGRES * 10_000:
        problems.append(f"PostgreSQL {found.server_version} is too old, {OLDEST_POSTGRES} or newer is needed")
    if found.read_only:
        problems.append("the server or the session is read-only: connect to the primary")
    if not found.may_create:
        problems.append(
            f"role {user!r} may not create the schema queen, or in it: its owner can GRANT CREATE"
        )
    if found.other_owners:
        problems.append(
            f"parts of the schema are owned by {', '.join(found.other_owners)}: connect as that role"
        )
    return problems


def _row(raw: psycopg.Connection[Any], name: str) -> Any:
    with raw.cursor(row_factory=namedtuple_row) as cursor:
        return cursor.execute(statement(name).encode()).fetchone()
