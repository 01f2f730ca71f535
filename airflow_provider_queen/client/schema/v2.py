"""From the tables of Queen v2 to the present ones, and back: the order of the scripts in ``sql/v2``.

Up: an expansion of many transactions, beside v2's producers and consumers, then a cutover in the transaction
of the migration. An expansion that was interrupted is gone on with. Down: one transaction.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import psycopg
from psycopg.rows import namedtuple_row, tuple_row

from airflow_provider_queen.client.schema.files import SchemaFiles, read_sql, statement
from airflow_provider_queen.client.schema.state import V2
from airflow_provider_queen.exceptions import InvalidOptionError, QueenError

log = logging.getLogger(__name__)

Script = tuple[str, str]
"""The name of a script, for errors, and its text."""


class Verification(NamedTuple):
    """Of one queue and group, when v2 was migrated: messages copied, and what was pending on either side."""

    queue_name: str
    consumer_group: str | None
    messages: int
    checksum: str
    """A sum over all messages of the queue, the same for v2's and for ours."""
    pending_in_v2: int | None
    pending: int | None


# Producers queue behind whoever waits for these locks: one wait is short (lock_timeout in the scripts), and
# there are several.
LOCK_ATTEMPTS = 20
COPY_CHUNK = 10_000
"""Messages that one transaction of an expansion copies."""
_LOCKED = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)


class Expansion:
    """The scripts that lead from v2 to the present tables."""

    def __init__(self, files: SchemaFiles) -> None:
        self._files = files

    def begin(self) -> Iterator[Script]:
        """In one transaction: the present tables, empty and aside; notes of what v2's producers do."""
        yield from self._begin()
        yield "v2 (checksum)", f"COMMENT ON SCHEMA queen_next IS '{self.checksum}';\n"

    def copy(self) -> Script:
        """As often as wanted, in transactions of its own."""
        return "v2/expand.sql (copy)", f"CALL queen_v2.copy({COPY_CHUNK});\n"

    def cutover(self, *, producers_first: bool) -> Iterator[Script]:
        """In the migration's transaction. Producers first: where the usual order of locks met a deadlock."""
        if producers_first:
            yield "v2/stop.sql", self._files.script("v2/stop.sql")
        yield "v2/cutover.sql", self._files.script("v2/cutover.sql")

    def verify(self) -> Script:
        return "v2/verify.sql", self._files.script("v2/verify.sql")

    def abandon(self) -> Script:
        return "v2/abandon.sql", self._files.script("v2/abandon.sql")

    def restore(self) -> Iterator[Script]:
        """The way back, in the migration's transaction."""
        for name in ("bookkeeping", "set_aside"):
            yield f"v2/{name}.sql", self._files.script(f"v2/{name}.sql")
        yield V2, read_sql(self._files.revisions[0].up)
        yield "v2/restore.sql", self._files.script("v2/restore.sql")

    @property
    def checksum(self) -> str:
        """Of all that :meth:`begin` makes: an expansion is gone on with by the version that began it."""
        texts = "".join(text for _, text in self._begin())
        return hashlib.sha256(texts.encode()).hexdigest()

    def _begin(self) -> Iterator[Script]:
        # The present tables as their migration makes them, in the schema that stands aside until the cutover.
        present = self._files.after(V2)
        tables = re.sub(r"\bqueen\.", "queen_next.", read_sql(present.up))
        yield "v2/bookkeeping.sql", self._files.script("v2/bookkeeping.sql")
        yield present.up.name, f"CREATE SCHEMA queen_next;\n{tables}"
        yield "v2/expand.sql", self._files.script("v2/expand.sql")
        yield "v2/consumers.sql", self._files.script("v2/consumers.sql")


_STAMP = (statement("create_schema"), statement("stamp_v2"))


def stamp(raw: psycopg.Connection[Any]) -> None:
    """Record that a database has v2's tables; nothing where a version is recorded."""
    with raw.transaction():
        for text in _STAMP:
            _execute(raw, "stamp_v2.sql", text)


def require_two_steps(goal: str | None, files: SchemaFiles) -> None:
    """From v2 one goes up to head, looks at it, and drops v2's tables afterwards."""
    if goal is not None and files.position(goal) > files.position(files.head):
        raise InvalidOptionError(
            f"from {V2} to {goal} takes two steps: to head, and when that has proved itself, to {goal},"
            " which drops v2's tables"
        )


def script(files: SchemaFiles) -> str:
    """What :func:`expand` does, for ``psql -f``."""
    expansion = Expansion(files)
    parts = [
        "-- Beside v2's producers and consumers, in transactions of its own.",
        statement("session"),
        *_STAMP,
        statement("index_v2"),
        "BEGIN;",
        *(f"-- {name}\n{text}" for name, text in expansion.begin()),
        "COMMIT;",
        expansion.copy()[1],
    ]
    return "\n".join(parts) + "\n"


class Findings(NamedTuple):
    """What a look at v2's tables gives."""

    problems: list[str]
    """Each stands in the way of an upgrade."""
    running_leases: int


def look(raw: psycopg.Connection[Any]) -> Findings:
    """Whether all of v2's rows can be taken over; nothing is changed."""
    with raw.cursor(row_factory=namedtuple_row) as cursor:
        found: Any = cursor.execute(statement("preflight_v2").encode()).fetchone()
    problems = []
    if not found.may_create:
        problems.append(f"role {raw.info.user!r} may not create schemas: GRANT CREATE ON DATABASE to it")
    if found.without_time:
        problems.append(f"{found.without_time} messages have no created_at: give them one")
    if found.without_queue:
        problems.append(f"{found.without_queue} messages belong to no partition or queue: delete them")
    if found.without_name:
        problems.append(f"{found.without_name} queues, partitions or groups have an empty name: rename them")
    return Findings(problems, found.running)


def expand(raw: psycopg.Connection[Any], files: SchemaFiles) -> None:
    """Copy v2's messages to the present tables, beside its producers and consumers.

    The connection is in autocommit and keeps the session's lock: a second run waits for the first.
    """
    if problems := look(raw).problems:
        raise QueenError(f"the tables of Queen v2 cannot be migrated: {'; '.join(problems)}")
    expansion = Expansion(files)
    begun = _begun_for(raw)
    if begun not in (None, expansion.checksum):
        log.warning("An expansion that another version of this package began is begun anew")
        _attempt(raw, [expansion.abandon()])
        begun = None
    if begun is None:
        log.info("Expanding v2: producers and consumers go on meanwhile")
        _execute(raw, "index_v2.sql", statement("index_v2"))
        _attempt(raw, list(expansion.begin()))
    else:
        log.info("Going on with an expansion that was begun before")
    copy(raw, files)


def copy(raw: psycopg.Connection[Any], files: SchemaFiles) -> None:
    """Bring the copies up to date, a chunk a transaction, and say how far it is."""
    name, text = Expansion(files).copy()
    with _notices(raw, log.info):
        _execute(raw, name, text)


def abandon(raw: psycopg.Connection[Any], files: SchemaFiles) -> bool:
    """End an expansion; whether there was one."""
    if _begun_for(raw) is None:
        return False
    _attempt(raw, [Expansion(files).abandon()])
    return True


def verification(raw: psycopg.Connection[Any]) -> list[Verification]:
    """What was compared at the migration from v2; nothing where v2's tables are not kept."""
    with raw.cursor(row_factory=tuple_row) as cursor:
        if cursor.execute(statement("keeps_v2").encode()).fetchone() != (True,):
            return []
        return [Verification(*row) for row in cursor.execute(statement("verification").encode())]


def was_locked(error: QueenError) -> bool:
    """Whether a script failed because somebody held a lock for longer than it waits."""
    return isinstance(error.__cause__, _LOCKED)


def _begun_for(raw: psycopg.Connection[Any]) -> str | None:
    with raw.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(statement("expansion").encode()).fetchone()
    return row[0] if row else None


def _attempt(raw: psycopg.Connection[Any], scripts: list[Script]) -> None:
    for attempt in range(1, LOCK_ATTEMPTS + 1):
        try:
            with raw.transaction():
                for name, text in scripts:
                    _execute(raw, name, text)
            return
        except QueenError as error:
            if attempt == LOCK_ATTEMPTS or not was_locked(error):
                raise
            log.info("Somebody holds a lock on v2's messages; attempt %d of %d", attempt + 1, LOCK_ATTEMPTS)


def _execute(raw: psycopg.Connection[Any], name: str, text: str) -> None:
    try:
        raw.execute(text.encode())
    except psycopg.Error as error:
        raise QueenError(f"{name} failed, v2 is as it was before: {error}") from error


@contextmanager
def _notices(raw: psycopg.Connection[Any], say: Callable[[str], None]) -> Iterator[None]:
    """Hand what a procedure says to ``say``, while it runs."""

    def handler(notice: psycopg.errors.Diagnostic) -> None:
        say(notice.message_primary or "")

    raw.add_notice_handler(handler)
    try:
        yield
    finally:
        raw.remove_notice_handler(handler)
