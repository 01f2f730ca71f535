"""A queue behind Airflow's default connection."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_provider_queen.client import QueenClient
from airflow_provider_queen.embedded.postgres import PostgresServer

APPLICATION = "waiting"


def define_connection(monkeypatch: pytest.MonkeyPatch, conn_id: str, dsn: str, **extra: Any) -> None:
    """An Airflow connection whose sessions can be told from the test's own."""
    parts = conninfo_to_dict(dsn)
    connection = {
        "conn_type": "queen",
        "host": parts["host"],
        "port": int(str(parts["port"])),
        "login": parts["user"],
        "password": parts["password"],
        "schema": parts["dbname"],
        "extra": {"application_name": APPLICATION, **extra},
    }
    monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(connection))


@pytest.fixture
def postgres_server(postgres_18: PostgresServer) -> PostgresServer:
    """One of the two is enough: what differs between them is below the client."""
    return postgres_18


@pytest.fixture
def queen(monkeypatch: pytest.MonkeyPatch, queen_dsn: str) -> Iterator[QueenClient]:
    """The test's own view of the database behind ``queen_default``, with the queue ``orders``."""
    define_connection(monkeypatch, "queen_default", queen_dsn)
    with QueenClient(queen_dsn) as client:
        client.configure_queue("orders", namespace="shop", retry_delay=0)
        yield client


@pytest.fixture
def sql(queen_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A look behind everybody's back."""
    with psycopg.connect(queen_dsn, autocommit=True) as connection:
        yield connection


def sessions(sql: psycopg.Connection[Any]) -> int:
    """How many connections the triggers and sensors have."""
    row = sql.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s",
        (APPLICATION,),
    ).fetchone()
    assert row is not None
    return int(row[0])


def all_gone(sql: psycopg.Connection[Any]) -> bool:
    """Whether none is left, soon: the server ends a session some time after the client closed it."""
    deadline = time.monotonic() + 10
    while sessions(sql):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
