"""What is looked at before a migration, on real servers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from airflow_provider_queen.client import QueenClient
from airflow_provider_queen.client.schema import head_version, migrate, plan, preflight, stamp
from airflow_provider_queen.exceptions import QueenError, SchemaVersionError

pytestmark = pytest.mark.postgres


@pytest.fixture
def role(connection: psycopg.Connection[Any]) -> Iterator[str]:
    """A role that may log in and nothing else. Roles are the server's, not the database's."""
    name = f"role_{uuid.uuid4().hex}"
    connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'x'")
    yield name
    connection.execute(f"REASSIGN OWNED BY {name} TO postgres")
    connection.execute(f"DROP OWNED BY {name}")
    connection.execute(f"DROP ROLE {name}")


def test_an_empty_database(postgres_dsn: str) -> None:
    found = preflight(postgres_dsn)
    assert (found.version, found.running_leases, found.schema_bytes) == (None, 0, 0)
    assert int(found.server_version.split(".")[0]) >= 14


def test_a_migrated_database_with_running_leases(queen_dsn: str) -> None:
    with QueenClient(queen_dsn) as queen:
        queen.configure_queue("orders")
        queen.push("orders", [{"payload": 1, "partition": name} for name in ("a", "b", "c")])
        first, *_ = queen.pop("orders", max_partitions=2)
        assert preflight(queen_dsn).running_leases == 2
        queen.release(first)
        assert preflight(queen_dsn).running_leases == 1
    found = preflight(queen_dsn)
    assert found.version == head_version()
    assert found.schema_bytes > 0


def test_a_role_without_rights_is_told_so(
    connection: psycopg.Connection[Any], postgres_dsn: str, role: str
) -> None:
    theirs = make_conninfo(postgres_dsn, user=role, password="x")
    with pytest.raises(QueenError, match=f"role '{role}' may not create the schema queen"):
        preflight(theirs)
    connection.execute(f"GRANT CREATE ON DATABASE {connection.info.dbname} TO {role}")
    assert preflight(theirs).version is None
    migrate(theirs)
    assert preflight(theirs).version == head_version()


def test_a_schema_of_its_own_is_right_enough(
    connection: psycopg.Connection[Any], postgres_dsn: str, role: str
) -> None:
    connection.execute(f"CREATE SCHEMA queen AUTHORIZATION {role}")
    theirs = make_conninfo(postgres_dsn, user=role, password="x")
    assert preflight(theirs).version is None
    migrate(theirs)


def test_what_belongs_to_somebody_else_is_named(
    connection: psycopg.Connection[Any], postgres_dsn: str, role: str
) -> None:
    migrate(postgres_dsn)
    connection.execute(f"GRANT ALL ON SCHEMA queen TO {role}")
    connection.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA queen TO {role}")
    with pytest.raises(QueenError, match="are owned by postgres: connect as that role"):
        preflight(make_conninfo(postgres_dsn, user=role, password="x"))


def test_a_server_that_only_reads_is_refused(postgres_dsn: str) -> None:
    with pytest.raises(QueenError, match="read-only: connect to the primary"):
        preflight(make_conninfo(postgres_dsn, options="-c default_transaction_read_only=on"))


def test_a_version_of_the_future_is_refused(connection: psycopg.Connection[Any], postgres_dsn: str) -> None:
    stamp(postgres_dsn, "head")
    connection.execute("UPDATE queen.alembic_version SET version_num = '9999_tomorrow'")
    with pytest.raises(SchemaVersionError, match="9999_tomorrow, newer than this package"):
        preflight(postgres_dsn)


def test_a_plan_says_what_the_run_then_reports(postgres_dsn: str) -> None:
    planned = plan(postgres_dsn)
    assert planned.report == migrate(postgres_dsn)
    assert planned.sql.endswith("COMMIT;\n")
    again = plan(postgres_dsn)
    assert (again.report.changed, again.sql.startswith("-- Nothing to do")) == (False, True)
    assert again.report == migrate(postgres_dsn)
    assert plan(postgres_dsn, "base").report == migrate(postgres_dsn, "base")
