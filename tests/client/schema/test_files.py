"""The sql folder as the runner reads it: what is wrong with a file is said before any database is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_provider_queen.client.schema import head_version
from airflow_provider_queen.client.schema.files import SchemaFiles, read_sql, schema_files
from airflow_provider_queen.exceptions import InvalidOptionError, QueenError
from tests.client.schema.conftest import SqlFolder


def test_revisions_and_repeatables_come_in_order(sql_folder: SqlFolder) -> None:
    files = SchemaFiles(sql_folder.path)
    assert files.ids == ("0001_things", "0002_colour")
    assert files.head == "0002_colour"
    assert [file.name for file in files.repeatables] == [
        "views/10_red.sql",
        "functions/10_reds.sql",
        "functions/20_more.sql",
    ]
    assert [revision.title for revision in files.revisions] == ["Things, to begin with.", ""]


def test_the_packages_own_files_are_in_order() -> None:
    files = schema_files()
    assert head_version() == [revision.id for revision in files.revisions if not revision.optional][-1]
    # Of what comes after it, nothing is needed: a database there works too, and head does not lead back.
    assert files.works(files.ids[-1])
    assert files.resolve("head", files.ids[-1]) == files.ids[-1]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("migrations/0003_sizes.up.sql", r"0003_sizes .* has no \.down\.sql"),
        ("migrations/0004_sizes.up.sql", r"0004_sizes .* should have the number 0003"),
        ("migrations/0002_sizes.up.sql", r"0002_sizes .* should have the number 0003"),
        ("migrations/sizes.sql", r"sizes\.sql is not named like"),
        (f"migrations/0003_{'x' * 28}.up.sql", "at most 32 characters"),
    ],
)
def test_a_misnamed_migration_is_refused(sql_folder: SqlFolder, name: str, complaint: str) -> None:
    sql_folder.write(name, "SELECT 1;")
    with pytest.raises(QueenError, match=complaint):
        _ = SchemaFiles(sql_folder.path).revisions


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QueenError, match="there are no migrations"):
        head_version(sql_folder=tmp_path)


@pytest.mark.parametrize(
    ("target", "current", "goal"),
    [
        ("head", None, "0002_colour"),
        ("base", "0002_colour", None),
        ("0001", None, "0001_things"),
        ("0002_colour", None, "0002_colour"),
        ("+1", None, "0001_things"),
        ("-1", "0001_things", None),
        ("-2", "0002_colour", None),
    ],
)
def test_targets(sql_folder: SqlFolder, target: str, current: str | None, goal: str | None) -> None:
    assert SchemaFiles(sql_folder.path).resolve(target, current) == goal


def test_an_unknown_target_names_the_nearest(sql_folder: SqlFolder) -> None:
    with pytest.raises(InvalidOptionError, match="'0003_color'; the nearest is '0002_colour'"):
        SchemaFiles(sql_folder.path).resolve("0003_color", None)


def test_files_can_be_joined(tmp_path: Path) -> None:
    file = tmp_path / "x.sql"
    file.write_bytes(b"SELECT 1 -- the last one\r\n\r\n")
    assert read_sql(file) == "SELECT 1 -- the last one\n;\n"
    file.write_bytes(b"SELECT 1;\r\n")
    assert read_sql(file) == "SELECT 1;\n"
