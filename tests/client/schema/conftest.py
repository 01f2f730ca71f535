"""A small sql folder to migrate with: the runner is tested here, whatever the queue's own files say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

FILES = {
    "migrations/0001_things.up.sql": """
        -- Things, to begin with.
        CREATE TABLE queen.things (id bigint PRIMARY KEY, name text NOT NULL DEFAULT '100 % {of} :it');
    """,
    "migrations/0001_things.down.sql": "DROP TABLE queen.things;",
    "migrations/0002_colour.up.sql": """
        ALTER TABLE queen.things ADD COLUMN colour text;
        CREATE INDEX things_colour ON queen.things (colour);
    """,
    "migrations/0002_colour.down.sql": "ALTER TABLE queen.things DROP COLUMN colour;",
    "views/10_red.sql": """
        CREATE VIEW queen.red AS SELECT t.id, t.name FROM queen.things AS t WHERE t.colour = 'red';
    """,
    "functions/10_reds.sql": """
        CREATE FUNCTION queen.reds() RETURNS bigint LANGUAGE sql AS $$ SELECT count(*) FROM queen.red; $$;
    """,
    "functions/20_more.sql": """
        CREATE FUNCTION queen.more(step int) RETURNS bigint LANGUAGE sql AS $$ SELECT queen.reds() + step; $$;
    """,
}


class SqlFolder:
    """Files that a test may change between two runs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, text: str) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def remove(self, *names: str) -> None:
        for name in names:
            (self.path / name).unlink()


@pytest.fixture
def sql_folder(tmp_path: Path) -> SqlFolder:
    """Two revisions, a view and two functions of which one calls the other."""
    folder = SqlFolder(tmp_path / "sql")
    for name, text in FILES.items():
        folder.write(name, text)
    return folder


@pytest.fixture
def older(tmp_path: Path) -> SqlFolder:
    """The same before its second revision."""
    folder = SqlFolder(tmp_path / "older")
    folder.write("migrations/0001_things.up.sql", FILES["migrations/0001_things.up.sql"])
    folder.write("migrations/0001_things.down.sql", FILES["migrations/0001_things.down.sql"])
    return folder


@pytest.fixture
def connection(postgres_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        yield connection
