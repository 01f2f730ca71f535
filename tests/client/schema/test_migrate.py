"""The runner against real servers: up, down, written down, recorded, refused, and several at once."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row
from psycopg.types.string import TextLoader

from airflow_provider_queen.client.schema import (
    MigrationReport,
    check,
    current_version,
    dry_run,
    head_version,
    migrate,
    stamp,
)
from airflow_provider_queen.embedded.postgres import PostgresServer
from airflow_provider_queen.exceptions import InvalidOptionError, QueenError, SchemaVersionError
from tests.client.schema.conftest import SqlFolder
from tests.client.schema.snapshot import snapshot

pytestmark = pytest.mark.postgres

REPEATABLES = ["views/10_red.sql", "functions/10_reds.sql", "functions/20_more.sql"]


@pytest.fixture
def stranger(postgres_dsn: str, connection: psycopg.Connection[Any]) -> Iterator[str]:
    """A connection string for a role that was given nothing."""
    name = f"stranger_{connection.info.dbname}"
    role = sql.Identifier(name)
    connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'stranger'").format(role))
    yield make_conninfo(postgres_dsn, user=name, password="stranger")
    connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
    connection.execute(sql.SQL("DROP ROLE {}").format(role))


def value(connection: psycopg.Connection[Any], query: str) -> Any:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def test_up_down_and_up_again(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder
) -> None:
    folder = sql_folder.path
    assert snapshot(connection) == []

    report = migrate(postgres_dsn, sql_folder=folder)
    assert report == MigrationReport(None, "0002_colour", ["0001_things", "0002_colour"], REPEATABLES)
    assert report.changed
    assert current_version(connection) == "0002_colour" == head_version(sql_folder=folder)
    check(connection, sql_folder=folder)
    assert value(connection, "SELECT queen.more(3)") == 3
    at_head = snapshot(connection)

    again = migrate(postgres_dsn, sql_folder=folder)
    assert again == MigrationReport("0002_colour", "0002_colour", [], [])
    assert not again.changed

    assert migrate(postgres_dsn, "-1", sql_folder=folder).applied == ["0002_colour"]
    assert current_version(connection) == "0001_things"
    assert value(connection, "SELECT to_regproc('queen.more') IS NULL AND to_regclass('queen.red') IS NULL")

    assert migrate(postgres_dsn, "base", sql_folder=folder).applied == ["0001_things"]
    assert snapshot(connection) == []
    assert not migrate(postgres_dsn, "base", sql_folder=folder).changed

    migrate(postgres_dsn, "0001", sql_folder=folder)
    migrate(postgres_dsn, "+1", sql_folder=folder)
    assert snapshot(connection) == at_head


def test_down_over_several_revisions_keeps_their_order(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder
) -> None:
    migrate(postgres_dsn, sql_folder=sql_folder.path)
    report = migrate(postgres_dsn, "base", sql_folder=sql_folder.path)
    assert report == MigrationReport("0002_colour", None, ["0002_colour", "0001_things"], [])
    assert snapshot(connection) == []


def test_rows_survive_what_does_not_touch_them(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder
) -> None:
    migrate(postgres_dsn, "0001", sql_folder=sql_folder.path)
    connection.execute("INSERT INTO queen.things VALUES (7, 'seven')")
    migrate(postgres_dsn, sql_folder=sql_folder.path)
    migrate(postgres_dsn, "0001", sql_folder=sql_folder.path)
    assert connection.execute("SELECT * FROM queen.things").fetchall() == [(7, "seven")]


@pytest.mark.parametrize(
    ("start", "target"), [("base", "head"), ("0001", "head"), ("head", "0001"), ("head", "base")]
)
def test_a_dry_run_is_what_a_run_does(
    postgres_dsn: str,
    connection: psycopg.Connection[Any],
    sql_folder: SqlFolder,
    start: str,
    target: str,
) -> None:
    folder = sql_folder.path
    if start != "base":
        migrate(postgres_dsn, start, sql_folder=folder)
    before = snapshot(connection)
    script = dry_run(postgres_dsn, target, sql_folder=folder)
    assert snapshot(connection) == before

    connection.execute(script.encode())
    written = snapshot(connection)
    migrate(postgres_dsn, start, sql_folder=folder)
    assert snapshot(connection) == before
    migrate(postgres_dsn, target, sql_folder=folder)
    assert snapshot(connection) == written


def test_a_dry_run_without_a_database_starts_from_nothing(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder
) -> None:
    script = dry_run(None, sql_folder=sql_folder.path)
    assert script == dry_run(postgres_dsn, sql_folder=sql_folder.path)
    connection.execute(script.encode())
    check(connection, sql_folder=sql_folder.path)
    assert dry_run(postgres_dsn, sql_folder=sql_folder.path).startswith("-- Nothing to do")


def test_psql_takes_the_dry_run(postgres_15: PostgresServer, sql_folder: SqlFolder, tmp_path: Path) -> None:
    psql = postgres_15._installation / "psql"
    if not psql.exists():
        pytest.skip(f"{psql.parent} has no psql")
    dsn = postgres_15.create_database("dry_run_by_psql")
    try:
        file = tmp_path / "up.sql"
        file.write_text(dry_run(None, sql_folder=sql_folder.path), encoding="utf-8")
        command = [psql, "--no-psqlrc", "-v", "ON_ERROR_STOP=1", "-f", file, dsn]
        subprocess.run(command, check=True, capture_output=True)
        with psycopg.connect(dsn) as connection:
            check(connection, sql_folder=sql_folder.path)
    finally:
        postgres_15.drop_database("dry_run_by_psql")


def test_a_dry_run_refuses_a_database_that_has_moved_on(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder
) -> None:
    migrate(postgres_dsn, "0001", sql_folder=sql_folder.path)
    script = dry_run(postgres_dsn, sql_folder=sql_folder.path)
    migrate(postgres_dsn, sql_folder=sql_folder.path)
    before = snapshot(connection)
    with pytest.raises(psycopg.errors.RaiseException, match="this script is for version 0001_things"):
        connection.execute(script.encode())
    connection.execute("ROLLBACK")
    assert snapshot(connection) == before


def test_stamp_records_and_runs_nothing(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder
) -> None:
    folder = sql_folder.path
    connection.execute("CREATE SCHEMA queen")
    connection.execute("CREATE TABLE queen.things (id bigint PRIMARY KEY, name text)")
    stamp(postgres_dsn, "0001", sql_folder=folder)
    assert current_version(connection) == "0001_things"
    assert migrate(postgres_dsn, sql_folder=folder).applied == ["0002_colour"]
    check(connection, sql_folder=folder)


def test_a_stamped_head_still_gets_its_functions(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder
) -> None:
    migrate(postgres_dsn, sql_folder=sql_folder.path)
    stamp(postgres_dsn, "base", sql_folder=sql_folder.path)
    assert current_version(connection) is None
    stamp(postgres_dsn, "head", sql_folder=sql_folder.path)
    with pytest.raises(SchemaVersionError, match=r"functions/10_reds\.sql"):
        check(connection, sql_folder=sql_folder.path)
    assert migrate(postgres_dsn, sql_folder=sql_folder.path).reapplied == REPEATABLES
    check(connection, sql_folder=sql_folder.path)


def test_stamp_repairs_a_version_that_nobody_knows(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder
) -> None:
    migrate(postgres_dsn, sql_folder=sql_folder.path)
    connection.execute("UPDATE queen.alembic_version SET version_num = '0002_lost'")
    with pytest.raises(SchemaVersionError, match="0002_lost, unknown to this package"):
        migrate(postgres_dsn, sql_folder=sql_folder.path)
    stamp(postgres_dsn, "0002", sql_folder=sql_folder.path)
    check(connection, sql_folder=sql_folder.path)


@pytest.mark.parametrize("target", ["+1", "-1"])
def test_stamp_takes_no_steps(postgres_dsn: str, sql_folder: SqlFolder, target: str) -> None:
    with pytest.raises(InvalidOptionError, match="not a step"):
        stamp(postgres_dsn, target, sql_folder=sql_folder.path)


@pytest.mark.parametrize("runs", [2, 8])
def test_runs_at_once_do_not_collide(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder, runs: int
) -> None:
    # Whatever a database is set to: these two would fail those that wait.
    for setting in ("default_transaction_isolation = 'serializable'", "lock_timeout = '1ms'"):
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET {setting}".encode())
    # The first holds its lock until the others wait for it: otherwise a fast machine would run them in turn.
    connection.execute("CREATE TABLE public.waits (runs int)")
    sql_folder.write(
        "migrations/0001_things.up.sql",
        f"""
        CREATE TABLE queen.things (id bigint PRIMARY KEY, name text);
        DO $$
        DECLARE
            waiting int := 0;
        BEGIN
            FOR attempt IN 1..1000 LOOP
                SELECT count(*) INTO waiting FROM pg_locks
                WHERE locktype = 'advisory' AND NOT granted
                AND database = (SELECT oid FROM pg_database WHERE datname = current_database());
                EXIT WHEN waiting = {runs - 1};
                PERFORM pg_sleep(0.01);
            END LOOP;
            INSERT INTO public.waits VALUES (waiting);
        END
        $$;
        """,
    )
    with ThreadPoolExecutor(runs) as pool:
        reports = list(pool.map(lambda _: migrate(postgres_dsn, sql_folder=sql_folder.path), range(runs)))
    assert connection.execute("SELECT runs FROM public.waits").fetchall() == [(runs - 1,)]
    assert sorted(report.changed for report in reports) == [False] * (runs - 1) + [True]
    assert {report.to_version for report in reports} == {"0002_colour"}
    check(connection, sql_folder=sql_folder.path)


def test_a_changed_function_is_applied_again(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder
) -> None:
    migrate(postgres_dsn, sql_folder=sql_folder.path)
    # Another result type, which CREATE OR REPLACE would refuse, under a function that is in use by another.
    sql_folder.write(
        "functions/10_reds.sql",
        "CREATE FUNCTION queen.reds() RETURNS int LANGUAGE sql STABLE AS $$ SELECT 40; $$",
    )
    with pytest.raises(SchemaVersionError, match=r"functions/10_reds\.sql.*queen_migrate"):
        check(connection, sql_folder=sql_folder.path)
    report = migrate(postgres_dsn, sql_folder=sql_folder.path)
    assert report == MigrationReport("0002_colour", "0002_colour", [], REPEATABLES)
    assert value(connection, "SELECT queen.more(2)") == 42
    check(connection, sql_folder=sql_folder.path)


def test_what_a_removed_file_made_is_gone(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder
) -> None:
    migrate(postgres_dsn, sql_folder=sql_folder.path)
    sql_folder.remove("functions/20_more.sql")
    migrate(postgres_dsn, sql_folder=sql_folder.path)
    assert value(connection, "SELECT to_regproc('queen.more') IS NULL")
    assert value(connection, "SELECT queen.reds()") == 0
    check(connection, sql_folder=sql_folder.path)


def test_grants_survive_a_new_application(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder, stranger: str
) -> None:
    folder = sql_folder.path
    migrate(postgres_dsn, sql_folder=folder)
    role = f'"stranger_{connection.info.dbname}"'
    connection.execute(
        f"""
        GRANT USAGE ON SCHEMA queen TO {role};
        GRANT SELECT ON queen.red TO {role};
        REVOKE EXECUTE ON FUNCTION queen.reds() FROM PUBLIC;
        GRANT EXECUTE ON FUNCTION queen.reds() TO {role} WITH GRANT OPTION;
        REVOKE EXECUTE ON FUNCTION queen.more(int) FROM PUBLIC;
        """.encode()
    )
    before = snapshot(connection)
    text = (folder / "views/10_red.sql").read_text()
    sql_folder.write("views/10_red.sql", f"-- changed\n{text}")
    assert migrate(postgres_dsn, sql_folder=folder).changed
    after = snapshot(connection)
    assert [line for line in after if not line.startswith("views/")] == [
        line for line in before if not line.startswith("views/")
    ]
    with psycopg.connect(stranger) as guest:
        assert value(guest, "SELECT count(*) FROM queen.red") == 0
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            guest.execute("SELECT queen.more(1)")


def test_what_others_built_on_our_views_is_named_and_kept(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder
) -> None:
    migrate(postgres_dsn, sql_folder=sql_folder.path)
    connection.execute("CREATE VIEW public.report AS SELECT count(*) FROM queen.red")
    before = snapshot(connection)
    sql_folder.remove("functions/20_more.sql")
    with pytest.raises(QueenError, match=r"view (public\.)?report depends on view (queen\.)?red"):
        migrate(postgres_dsn, sql_folder=sql_folder.path)
    assert snapshot(connection) == before


def test_check_names_the_dag_when_there_is_no_schema(
    connection: psycopg.Connection[Any], sql_folder: SqlFolder
) -> None:
    with pytest.raises(SchemaVersionError, match=r"no schema queen.*0002_colour.*queen_migrate"):
        check(connection, sql_folder=sql_folder.path)
    # Nor is somebody else's schema of that name ours.
    connection.execute("CREATE SCHEMA queen")
    with pytest.raises(SchemaVersionError, match=r"no schema queen.*queen_migrate"):
        check(connection, sql_folder=sql_folder.path)


def test_check_names_the_dag_when_the_schema_is_older(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder
) -> None:
    migrate(postgres_dsn, "0001", sql_folder=sql_folder.path)
    with pytest.raises(SchemaVersionError, match=r"older version 0001_things.*0002_colour.*queen_migrate"):
        check(connection, sql_folder=sql_folder.path)


def test_a_newer_schema_is_refused_and_left_alone(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder, older: SqlFolder
) -> None:
    migrate(postgres_dsn, sql_folder=sql_folder.path)
    before = snapshot(connection)
    expected = r"0002_colour, newer than this package.*0001_things.*queen_migrate"
    with pytest.raises(SchemaVersionError, match=expected):
        check(connection, sql_folder=older.path)
    for target in ("head", "base"):
        with pytest.raises(SchemaVersionError, match=expected):
            migrate(postgres_dsn, target, sql_folder=older.path)
    assert snapshot(connection) == before


def test_check_leaves_the_connection_as_it_was(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder
) -> None:
    idle = psycopg.pq.TransactionStatus.IDLE
    with psycopg.connect(postgres_dsn) as mine:
        with pytest.raises(SchemaVersionError):
            check(mine, sql_folder=sql_folder.path)
        assert mine.info.transaction_status == idle
        migrate(postgres_dsn, sql_folder=sql_folder.path)
        check(mine, sql_folder=sql_folder.path)
        assert mine.info.transaction_status == idle
        mine.execute("CREATE TABLE public.mine ()")
        check(mine, sql_folder=sql_folder.path)
        mine.commit()
    assert value(connection, "SELECT to_regclass('public.mine') IS NOT NULL")


def test_check_works_on_a_session_that_leaves_json_as_text(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder
) -> None:
    migrate(postgres_dsn, sql_folder=sql_folder.path)
    for name in ("json", "jsonb"):
        connection.adapters.register_loader(name, TextLoader)
    connection.row_factory = dict_row
    check(connection, sql_folder=sql_folder.path)


@pytest.mark.parametrize("start", ["base", "0001"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("migrations/0002_colour.up.sql", "CREATE TABLE queen.half (); SELECT 1 / 0;"),
        (
            "functions/20_more.sql",
            "CREATE FUNCTION queen.more() RETURNS nonsense LANGUAGE sql AS $$ SELECT 1 $$",
        ),
    ],
    ids=["migration", "function"],
)
def test_a_failure_leaves_everything_as_before(
    postgres_dsn: str,
    connection: psycopg.Connection[Any],
    sql_folder: SqlFolder,
    start: str,
    name: str,
    text: str,
) -> None:
    if start != "base":
        migrate(postgres_dsn, start, sql_folder=sql_folder.path)
    before = snapshot(connection)
    sql_folder.write(name, text)
    with pytest.raises(QueenError, match=re.escape(Path(name).name)):
        migrate(postgres_dsn, sql_folder=sql_folder.path)
    assert snapshot(connection) == before


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_a_file_that_ends_the_transaction_is_found(
    postgres_dsn: str, sql_folder: SqlFolder, end: str
) -> None:
    sql_folder.write("migrations/0002_colour.up.sql", f"CREATE TABLE queen.half (); {end};")
    with pytest.raises(QueenError, match=r"0002_colour\.up\.sql ended the transaction"):
        migrate(postgres_dsn, sql_folder=sql_folder.path)


def test_a_way_down_that_forgets_something_is_stopped(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder
) -> None:
    sql_folder.write("migrations/0001_things.down.sql", "SELECT 1;")
    migrate(postgres_dsn, sql_folder=sql_folder.path)
    before = snapshot(connection)
    with pytest.raises(QueenError, match=r"drop_schema\.sql failed"):
        migrate(postgres_dsn, "base", sql_folder=sql_folder.path)
    assert snapshot(connection) == before


def test_a_name_without_its_schema_fails(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder
) -> None:
    sql_folder.write("migrations/0002_colour.up.sql", "CREATE TABLE unqualified (id int);")
    with pytest.raises(QueenError, match=r"0002_colour\.up\.sql failed"):
        migrate(postgres_dsn, sql_folder=sql_folder.path)
    assert snapshot(connection) == []


def test_a_role_without_rights_is_told_so(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder, stranger: str
) -> None:
    with pytest.raises(QueenError, match=r"create_schema\.sql failed.*permission denied for database"):
        migrate(stranger, sql_folder=sql_folder.path)
    assert snapshot(connection) == []

    migrate(postgres_dsn, sql_folder=sql_folder.path)
    before = snapshot(connection)
    with psycopg.connect(stranger) as guest:
        with pytest.raises(SchemaVersionError, match=r"may not read.*GRANT USAGE ON SCHEMA queen"):
            check(guest, sql_folder=sql_folder.path)
        assert guest.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    with pytest.raises(SchemaVersionError, match="may not read"):
        migrate(stranger, sql_folder=sql_folder.path)
    assert snapshot(connection) == before


def test_a_ready_schema_of_ones_own_is_enough(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder, stranger: str
) -> None:
    connection.execute(f'CREATE SCHEMA queen AUTHORIZATION "stranger_{connection.info.dbname}"'.encode())
    migrate(stranger, sql_folder=sql_folder.path)
    check(connection, sql_folder=sql_folder.path)


def test_the_rights_that_the_error_names_are_enough(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder, stranger: str
) -> None:
    migrate(postgres_dsn, sql_folder=sql_folder.path)
    role = f'"stranger_{connection.info.dbname}"'
    connection.execute(f"GRANT USAGE ON SCHEMA queen TO {role}".encode())
    connection.execute(f"GRANT SELECT ON queen.alembic_version, queen.schema_objects TO {role}".encode())
    with psycopg.connect(stranger) as guest:
        check(guest, sql_folder=sql_folder.path)


@pytest.mark.parametrize("target", ["0003", "0002_color", "000", "-1", "+3"])
def test_an_unknown_target_is_refused(
    postgres_dsn: str, connection: psycopg.Connection[Any], sql_folder: SqlFolder, target: str
) -> None:
    with pytest.raises(InvalidOptionError, match=re.escape(target)):
        migrate(postgres_dsn, target, sql_folder=sql_folder.path)
    assert snapshot(connection) == []
