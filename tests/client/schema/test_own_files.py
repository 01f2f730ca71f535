"""The queue's own files: every way up has its way down, and the second way up leads to the same place."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from airflow_provider_queen.client.schema import check, dry_run, head_version, migrate
from airflow_provider_queen.client.schema.files import schema_files
from tests.client.schema.snapshot import snapshot

pytestmark = pytest.mark.postgres


def test_up_down_and_up_again(postgres_dsn: str, connection: psycopg.Connection[Any]) -> None:
    ways = {"base": snapshot(connection)}
    for revision in schema_files().ids:
        migrate(postgres_dsn, revision)
        ways[revision] = snapshot(connection)
    check(connection)
    for before in list(ways.values())[-2::-1]:
        migrate(postgres_dsn, "-1")
        assert snapshot(connection) == before
    assert migrate(postgres_dsn).to_version == head_version()
    assert snapshot(connection) == ways[head_version()]


def test_a_dry_run_is_what_a_run_does(postgres_dsn: str, connection: psycopg.Connection[Any]) -> None:
    connection.execute(dry_run(None).encode())
    written = snapshot(connection)
    migrate(postgres_dsn, "base")
    migrate(postgres_dsn)
    assert snapshot(connection) == written


def test_all_views_and_functions_can_be_applied_again(
    postgres_dsn: str, connection: psycopg.Connection[Any]
) -> None:
    migrate(postgres_dsn)
    before = snapshot(connection)
    connection.execute("UPDATE queen.schema_objects SET checksum = 'of an older file'")
    assert migrate(postgres_dsn).reapplied == list(schema_files().checksums)
    assert snapshot(connection) == before
