"""The ``sql`` folder as the runner sees it: revisions, repeatable files, checksums. No database here."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from airflow_provider_queen import resources
from airflow_provider_queen.exceptions import InvalidOptionError, QueenError

# Alembic's version column is varchar(32).
_REVISION_FILE = re.compile(r"(?P<id>(?P<number>\d{4})_[a-z0-9_]{1,27})\.(?P<direction>up|down)\.sql")
_RELATIVE = re.compile(r"[+-]\d+")
_STATEMENTS = Path(__file__).parent / "statements"


@dataclass(frozen=True)
class Revision:
    """One step of the tables' history. The id is the file's stem, for example ``0001_queue``."""

    id: str
    up: Path
    down: Path

    @property
    def title(self) -> str:
        """The first comment line of the up file, or nothing."""
        first = self.up.read_text(encoding="utf-8").lstrip().partition("\n")[0]
        return first.removeprefix("--").strip() if first.startswith("--") else ""

    @property
    def optional(self) -> bool:
        """Whether the package works without it: it is applied where somebody names it, and only there."""
        return self.title.startswith("optional:")


@dataclass(frozen=True)
class Repeatable:
    """A file of views or functions, named by its path under the ``sql`` folder."""

    name: str
    text: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


class SchemaFiles:
    """The files of one ``sql`` folder; read once, when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def revisions(self) -> tuple[Revision, ...]:
        """In order, from 0000 or 0001 on without a gap, each with its way down."""
        found: dict[str, set[str]] = {}
        folder = self.folder / "migrations"
        for path in sorted(folder.glob("*.sql")):
            match = _REVISION_FILE.fullmatch(path.name)
            if match is None:
                raise QueenError(
                    f"{path} is not named like 0002_what_it_does.up.sql (at most 32 characters before .up)"
                )
            found.setdefault(match["id"], set()).add(match["direction"])
        if not found:
            raise QueenError(f"there are no migrations in {folder}")
        first = min(int(next(iter(found))[:4]), 1)
        for position, (revision, directions) in enumerate(found.items(), start=first):
            if int(revision[:4]) != position:
                raise QueenError(f"migration {revision} in {folder} should have the number {position:04d}")
            if missing := {"up", "down"} - directions:
                raise QueenError(f"migration {revision} in {folder} has no .{missing.pop()}.sql")
        return tuple(Revision(r, folder / f"{r}.up.sql", folder / f"{r}.down.sql") for r in found)

    @cached_property
    def repeatables(self) -> tuple[Repeatable, ...]:
        """In the order of application. Views first: a function may be declared with a view's row type."""
        return tuple(
            Repeatable(f"{kind}/{path.name}", read_sql(path))
            for kind in ("views", "functions")
            for path in sorted((self.folder / kind).glob("*.sql"))
        )

    @cached_property
    def checksums(self) -> dict[str, str]:
        return {repeatable.name: repeatable.checksum for repeatable in self.repeatables}

    @cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(revision.id for revision in self.revisions)

    @cached_property
    def head(self) -> str:
        """The revision that the package needs: the newest one that is not optional."""
        return [revision.id for revision in self.revisions if not revision.optional][-1]

    def works(self, revision: str | None) -> bool:
        """Whether the package's functions and views stand on the tables of ``revision``."""
        return self.position(revision) >= self.position(self.head)

    def after(self, revision: str) -> Revision:
        """The revision that comes next."""
        return self.revisions[self.position(revision)]

    def script(self, name: str) -> str:
        """A script beside the migrations, such as ``v2/restore.sql``."""
        return read_sql(self.folder / name)

    def resolve(self, target: str, current: str | None) -> str | None:
        """The revision that ``target`` means when the database is at ``current``; ``None`` is base.

        :param target: ``head``, ``base``, an id or the beginning of one, or a relative step such as ``-1``.
        """
        if target == "head":
            return current if self.works(current) else self.head
        if target == "base":
            return None
        if _RELATIVE.fullmatch(target):
            position = self.position(current) + int(target)
            if not 0 <= position <= len(self.ids):
                raise InvalidOptionError(f"there is no revision {target} from {current or 'base'}")
            return self.ids[position - 1] if position else None
        matches = [revision for revision in self.ids if revision == target] or [
            revision for revision in self.ids if target and revision.startswith(target)
        ]
        if len(matches) != 1:
            raise InvalidOptionError(f"unknown schema revision {target!r}; {_nearest(target, self.ids)}")
        return matches[0]

    def position(self, revision: str | None) -> int:
        """How many revisions lead to ``revision``; 0 for base."""
        return 0 if revision is None else self.ids.index(revision) + 1


def read_sql(path: Path) -> str:
    """A file's text with its last statement ended, so that files can be joined."""
    text = path.read_text(encoding="utf-8").rstrip()
    return f"{text}\n" if text.endswith(";") else f"{text}\n;\n"


def statement(name: str) -> str:
    """One of the runner's own scripts."""
    return read_sql(_STATEMENTS / f"{name}.sql")


def schema_files(folder: Path | None = None) -> SchemaFiles:
    """The files in ``folder``, or the package's own.

    The package's own are read once per process: it goes on needing the schema its code was loaded with.
    """
    return _package_files() if folder is None else SchemaFiles(folder)


@lru_cache(maxsize=1)
def _package_files() -> SchemaFiles:
    return SchemaFiles(resources.sql_folder())


def _nearest(target: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(target, known, n=1, cutoff=0.0)
    return f"the nearest is {near[0]!r}, the newest {known[-1]!r}"
