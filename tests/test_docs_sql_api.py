"""docs/sql-api.md is true: its examples give what it shows, its signatures and columns are the database's."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_provider_queen.embedded.postgres import PostgresServer, bundled_postgres, find_system_postgres

pytestmark = pytest.mark.postgres

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "sql-api.md").read_text()
EXAMPLES = re.findall(r"^```psql\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SIGNATURES = re.findall(
    r"^```sql\nqueen\.(\w+)\((.*?)\)\s+RETURNS (.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL
)
TABLES = re.findall(r"^\| `queen\.(\w+)` \| .* \| (.*) \|$", PAGE, re.MULTILINE)

# Of the page only: what differs from run to run. Widths stay, so that tables stay aligned.
VARYING = {
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}": "00000000-0000-0000-0000-000000000000",
    r"PID \d+": "PID 0",
}


def statements(example: str) -> list[tuple[str, str]]:
    """What is typed after => and ->, and what psql answers."""
    found: list[tuple[str, str]] = []
    for line in example.splitlines():
        if line.startswith("=> "):
            found.append((line[3:], ""))
        elif line.startswith("-> "):
            found[-1] = (found[-1][0] + "\n" + line[3:], "")
        else:
            found[-1] = (found[-1][0], found[-1][1] + line.rstrip() + "\n")
    return found


def run_psql(psql: Path, dsn: str, typed: list[str]) -> list[str]:
    """One session; what it prints after each of the statements, errors included."""
    parts = conninfo_to_dict(dsn)
    environment = os.environ | {
        "PGHOST": str(parts["host"]),
        "PGPORT": str(parts["port"]),
        "PGUSER": str(parts["user"]),
        "PGPASSWORD": str(parts["password"]),
        "PGDATABASE": str(parts["dbname"]),
    }
    script = "\\set SHOW_CONTEXT never\n" + "".join(f"\\echo @@{i}\n{text}\n" for i, text in enumerate(typed))
    answer = subprocess.run(
        [psql, "--no-psqlrc", "--quiet", "--file", "-"],
        input=script,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    printed = re.split(r"^@@\d+\n", answer.stdout, flags=re.MULTILINE)[1:]
    return ["".join(_tidy(line) for line in part.splitlines()) for part in printed]


def _tidy(line: str) -> str:
    # With a file psql says where an error is, and with --quiet it leaves out the location.
    line = re.sub(r"^psql:<stdin>:\d+: ", "", line.rstrip())
    return "" if line.startswith("LOCATION:") else line + "\n"


def steady(text: str) -> str:
    for pattern, value in VARYING.items():
        text = re.sub(pattern, value, text)
    return text


def test_every_example_gives_what_the_page_shows(queen_dsn: str, postgres_server: PostgresServer) -> None:
    bundled = postgres_server.version.startswith("18")
    psql = (bundled_postgres() if bundled else find_system_postgres()[0]) / "psql"
    session = [statement for example in EXAMPLES for statement in statements(example)]
    printed = run_psql(psql, queen_dsn, [typed for typed, _ in session])
    assert len(printed) == len(session)
    for (typed, expected), actual in zip(session, printed, strict=True):
        assert steady(actual) == steady(expected), typed


def test_signatures_are_the_functions(queen_dsn: str) -> None:
    with psycopg.connect(queen_dsn) as connection:
        functions = {
            name: (arguments, result)
            for name, arguments, result in connection.execute(
                "SELECT proname, pg_get_function_arguments(oid), pg_get_function_result(oid)"
                " FROM pg_proc WHERE pronamespace = 'queen'::regnamespace"
            )
        }
    assert SIGNATURES
    for name, arguments, result in SIGNATURES:
        assert f"### `queen.{name}`" in PAGE
        assert (_plain(arguments), _plain(result)) == tuple(map(_plain, functions[name])), name


def _plain(signature: str) -> str:
    """Without casts of defaults, with short names of types."""
    signature = re.sub(r"::[a-z0-9_ ]+(\[\])?", "", " ".join(signature.split()))
    return signature.replace("timestamp with time zone", "timestamptz").replace("TABLE (", "TABLE(")


def test_each_function_that_the_client_calls_is_on_the_page() -> None:
    sources = (ROOT / "airflow_provider_queen" / "client").glob("*.py")
    called = {name for path in sources for name in re.findall(r"\bqueen\.(\w+)\(", path.read_text())}
    assert called <= {name for name, _, _ in SIGNATURES} | {"message_id", "message_lane", "message_seq"}


def test_tables_have_the_columns_that_the_page_names(queen_dsn: str) -> None:
    with psycopg.connect(queen_dsn) as connection:
        rows = connection.execute(
            "SELECT table_name, array_agg(column_name::text ORDER BY ordinal_position)"
            " FROM information_schema.columns WHERE table_schema = 'queen' GROUP BY table_name"
        )
        columns = dict(rows.fetchall())
    assert {"queues", "messages", "deliveries", "dead_letter_queue"} <= {name for name, _ in TABLES}
    for name, named in TABLES:
        assert re.findall(r"`(\w+)`", named) == columns[name], name
