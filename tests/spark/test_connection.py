"""Where the connection comes from, and that nothing prints its password."""

from __future__ import annotations

import pickle

import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_provider_queen.exceptions import (
    DatabaseUnreachableError,
    InvalidOptionError,
    QueenError,
    SchemaVersionError,
)
from airflow_provider_queen.spark.connection import ConnectionInfo, call, call_arrow

SECRET = "tr0ub4dor"


def test_the_dsn_variable_comes_first() -> None:
    info = ConnectionInfo.from_environment({"QUEEN_DSN": "host=a dbname=q", "PGHOST": "b"})
    assert info.conninfo == "host=a dbname=q"


def test_libpq_variables_are_copied_for_the_executors() -> None:
    info = ConnectionInfo.from_environment(
        {"PGHOST": "db", "PGPORT": "5433", "PGDATABASE": "q", "PGUSER": "u", "PGPASSWORD": f"{SECRET} '\\"}
    )
    assert conninfo_to_dict(info.conninfo) == {
        "host": "db",
        "port": "5433",
        "dbname": "q",
        "user": "u",
        "password": f"{SECRET} '\\",
    }


def test_no_connection_at_all_is_said() -> None:
    with pytest.raises(InvalidOptionError, match="set QUEEN_DSN"):
        ConnectionInfo.from_environment({"PATH": "/bin"})


def test_no_text_form_shows_the_password() -> None:
    info = ConnectionInfo(f"postgresql://u:{SECRET}@db:5433/q")
    assert SECRET not in repr(info) + str(info) + info.target
    assert "db" in repr(info)
    assert pickle.loads(pickle.dumps(info)) == info


def test_a_malformed_string_is_not_quoted() -> None:
    with pytest.raises(InvalidOptionError) as caught:
        ConnectionInfo(f"host=db {SECRET}")
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__


def test_an_unreachable_database_is_one_sentence() -> None:
    info = ConnectionInfo(f"host=127.0.0.1 port=1 dbname=q password={SECRET}")
    for connect in (info.connect, info.connect_arrow):
        with pytest.raises(DatabaseUnreachableError, match="cannot connect to PostgreSQL at host=") as caught:
            connect()
        assert "\n" not in str(caught.value)
        assert SECRET not in str(caught.value)


def test_a_database_without_the_schema_names_the_dag(queen_dsn: str) -> None:
    with (
        ConnectionInfo(queen_dsn).connect() as connection,
        pytest.raises(SchemaVersionError, match="queen_migrate"),
    ):
        call(connection, "not_there", ["x"])


def test_a_read_that_fails_is_one_sentence(queen_dsn: str) -> None:
    with (
        ConnectionInfo(queen_dsn).connect_arrow() as connection,
        pytest.raises(QueenError, match="reading messages failed: ") as caught,
    ):
        call_arrow(connection, "scan_messages", ["no_such_column"], [1], [1], [1])
    assert "\n" not in str(caught.value)


def test_names_are_quoted_for_arrow_too(queen_dsn: str) -> None:
    odd = 'it\'s \\ "odd" ü {1}'
    info = ConnectionInfo(queen_dsn)
    with info.connect() as connection, info.connect_arrow() as arrow:
        call(connection, "configure_queue", ["name"], odd)
        call(connection, "push", ["status"], odd, ["1"])
        call(connection, "pop", ["seq"], odd)
        found = call_arrow(arrow, "scan_consumers", ["queue_name", "pending"], odd, None, None)
        nothing = call_arrow(arrow, "scan_consumers", ["queue_name", "pending"], "other", None, None)
    assert found.to_pydict() == {"queue_name": [odd], "pending": [1]}
    assert nothing.to_pydict() == {"queue_name": [], "pending": []}
