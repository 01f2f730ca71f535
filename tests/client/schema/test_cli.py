"""``python -m airflow_provider_queen.client.schema``: exit codes, output, and never a password."""

from __future__ import annotations

import subprocess
import sys

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_provider_queen.client.schema import __main__ as cli
from airflow_provider_queen.client.schema import current_version, migrate
from airflow_provider_queen.embedded.postgres import PostgresServer
from airflow_provider_queen.exceptions import QueenError
from tests.client.schema.conftest import SqlFolder

SECRET = "s3cr3t"
REST = "0ther"  # of a password that libpq takes apart


@pytest.fixture
def run(sql_folder: SqlFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the program in this process: its exit code, output and errors."""

    def run(*arguments: str, dsn: str | None = None) -> tuple[int, str, str]:
        monkeypatch.delenv("QUEEN_DSN", raising=False)
        if dsn is not None:
            monkeypatch.setenv("QUEEN_DSN", dsn)
        code = cli.main(["--sql-folder", str(sql_folder.path), *arguments])
        return code, *capsys.readouterr()

    return run


@pytest.mark.postgres
def test_a_life_of_a_schema(postgres_dsn: str, run) -> None:
    dsn = postgres_dsn
    assert run("current", dsn=dsn) == (0, "base\n", "")
    assert run("upgrade", "+1", dsn=dsn) == (0, "base -> 0001_things\n  0001_things\n", "")
    assert run("current", dsn=dsn) == (0, "0001_things\n", "")
    expected = "0001_things -> 0002_colour\n  0002_colour\n  views and functions: 3 files\n"
    assert run("upgrade", dsn=dsn) == (0, expected, "")
    assert run("upgrade", dsn=dsn) == (0, "nothing to do: 0002_colour\n", "")
    assert run("downgrade", "-1", dsn=dsn)[0] == 0
    assert run("stamp", "head", dsn=dsn) == (0, "stamped 0002_colour (head)\n", "")
    assert run("stamp", "0001", dsn=dsn) == (0, "stamped 0001_things\n", "")
    assert run("downgrade", "base", dsn=dsn) == (0, "0001_things -> base\n  0001_things\n", "")


@pytest.mark.postgres
def test_the_sql_is_printed_and_changes_nothing(postgres_dsn: str, run) -> None:
    code, script, errors = run("upgrade", "--sql", dsn=postgres_dsn)
    assert (code, errors) == (0, "")
    assert run("current", dsn=postgres_dsn)[1] == "base\n"
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(script.encode())
        assert current_version(connection) == "0002_colour"
    code, script, errors = run("downgrade", "base", "--sql", dsn=postgres_dsn)
    assert (code, errors) == (0, "")
    assert "DROP SCHEMA queen;" in script


def test_without_a_database_the_sql_starts_from_base(run) -> None:
    code, script, _ = run("upgrade", "--sql")
    assert code == 0
    assert script.startswith("-- Schema queen from base to 0002_colour")


def test_history_needs_no_database(run) -> None:
    expected = "0001_things  Things, to begin with.\n0002_colour (head)\n"
    assert run("history") == (0, expected, "")


@pytest.mark.postgres
def test_a_wrong_argument_exits_with_2(postgres_dsn: str, run) -> None:
    code, _, errors = run("upgrade", "0009", dsn=postgres_dsn)
    assert code == 2
    assert "unknown schema revision '0009'" in errors
    run("upgrade", dsn=postgres_dsn)
    code, _, errors = run("upgrade", "0001", dsn=postgres_dsn)
    assert code == 2
    assert "use the other command" in errors
    with pytest.raises(SystemExit) as wrong:
        run("sidegrade")
    assert wrong.value.code == 2


@pytest.mark.postgres
def test_a_failure_exits_with_1(postgres_dsn: str, run, sql_folder: SqlFolder) -> None:
    sql_folder.write("functions/20_more.sql", "SELECT 1 / 0;")
    code, output, errors = run("upgrade", dsn=postgres_dsn)
    assert (code, output) == (1, "")
    assert "functions/20_more.sql failed, the schema is as it was before: division by zero" in errors
    assert "Traceback" not in errors


@pytest.mark.postgres
def test_the_program_runs_on_libpqs_variables(postgres_18: PostgresServer, sql_folder: SqlFolder) -> None:
    parts = conninfo_to_dict(postgres_18.create_database("schema_by_program"))
    variables = {
        "PGHOST": parts["host"],
        "PGPORT": str(parts["port"]),
        "PGUSER": parts["user"],
        "PGPASSWORD": parts["password"],
        "PGDATABASE": "schema_by_program",
    }
    program = [sys.executable, "-m", "airflow_provider_queen.client.schema", "--sql-folder", sql_folder.path]
    try:
        for command, code, output in (("upgrade", 0, "base -> 0002_colour"), ("nonsense", 2, "")):
            answer = subprocess.run([*program, command], env=variables, capture_output=True, text=True)
            assert answer.returncode == code, answer.stderr
            assert answer.stdout.startswith(output)
    finally:
        postgres_18.drop_database("schema_by_program")


@pytest.mark.postgres
@pytest.mark.parametrize(
    "form",
    [
        "postgresql://postgres:{secret}@127.0.0.1:{port}/postgres",
        "postgresql://postgres:{secret}%40@127.0.0.1:{port}/postgres",
        "postgresql://postgres:{secret}@{rest}@127.0.0.1:{port}/postgres",
        "postgresql://postgres:{secret}/{rest}@127.0.0.1:{port}/postgres",
        "postgresql://postgres:{secret}?{rest}@127.0.0.1:{port}/postgres",
        "postgresql://postgres:{secret}#{rest}@127.0.0.1:{port}/postgres",
        "postgresql://postgres:{secret}%zz@127.0.0.1:{port}/postgres",
        "host=127.0.0.1 port={port} user=postgres dbname=postgres password={secret}",
        "host=127.0.0.1 port={port} user=postgres password={secret} {rest}",
        "host=127.0.0.1 port={port} user=postgres password='{secret}",
    ],
)
def test_no_error_shows_a_password(
    postgres_18: PostgresServer, sql_folder: SqlFolder, run, form: str
) -> None:
    dsn = form.format(secret=SECRET, rest=REST, port=postgres_18.port)
    code, output, errors = run("upgrade", dsn=dsn)
    assert code in (1, 2)
    assert SECRET not in output + errors
    assert REST not in output + errors
    with pytest.raises(QueenError) as failure:
        migrate(dsn, sql_folder=sql_folder.path)
    error: BaseException | None = failure.value
    while error is not None:
        assert SECRET not in str(error)
        assert REST not in str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@pytest.mark.postgres
def test_an_unreachable_server_is_named_without_the_password(postgres_dsn: str, run) -> None:
    dsn = make_conninfo(postgres_dsn, port=1, password=SECRET)
    code, _, errors = run("current", dsn=dsn)
    assert code == 1
    assert "cannot connect" in errors
    assert "port 1 " in errors
    assert SECRET not in errors
