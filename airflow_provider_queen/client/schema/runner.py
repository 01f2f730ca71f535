"""Runs migrations: Alembic decides the steps and keeps the version table, plain SQL files do the work.

Alembic wants one Python module per revision. Ours would all say "run the file of my name", so
:class:`SqlScripts` makes those modules in memory; adding a pair of SQL files adds a revision. It needs little
more than Alembic offers in public: a :class:`~alembic.script.Script` takes any module object, and a
:class:`~alembic.script.revision.RevisionMap` any callable that yields scripts.

A run and a dry run are the same code with another ``emit``: one executes each script, the other writes it
down.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import psycopg
from alembic.runtime.migration import MigrationContext, MigrationStep, RevisionStep
from alembic.script import Script, ScriptDirectory
from alembic.script.revision import RevisionMap
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from sqlalchemy import create_engine
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool

from airflow_provider_queen.client.schema import v2
from airflow_provider_queen.client.schema.files import Revision, SchemaFiles, read_sql, statement
from airflow_provider_queen.client.schema.report import MigrationPlan, MigrationReport
from airflow_provider_queen.client.schema.state import V2, State, is_v2, read_state, require_known
from airflow_provider_queen.exceptions import InvalidOptionError, QueenError

Emit = Callable[[str, str], None]
"""Takes the name of a script, for errors, and its text."""

Direction = Literal["up", "down"]

_VERSION_TABLE = {"version_table": "alembic_version", "version_table_schema": "queen"}


class SqlScripts(ScriptDirectory):
    """Alembic's script directory over pairs of SQL files instead of Python modules."""

    def __init__(self, files: SchemaFiles, emit: Emit, instead: Mapping[Path, Iterable[v2.Script]]) -> None:
        """``instead``: scripts that take a file's place, where a revision has more than one way."""
        super().__init__(files.folder)
        self._files = files
        self._emit = emit
        self._instead = instead
        self.revision_map = RevisionMap(self._scripts)

    def steps(self, current: str | None, target: str | None) -> list[RevisionStep]:
        """The way from one revision to another, up or down."""
        if self._files.position(target) >= self._files.position(current):
            up = reversed(list(self.iterate_revisions(target, current or "base")))
            return [MigrationStep.upgrade_from_script(self.revision_map, script) for script in up]
        down = self.iterate_revisions(current, target or "base")
        return [MigrationStep.downgrade_from_script(self.revision_map, script) for script in down]

    def _scripts(self) -> Iterator[Script]:
        previous = None
        for revision in self._files.revisions:
            yield Script(self._module(revision, previous), revision.id, revision.up)
            previous = revision.id

    def _module(self, revision: Revision, previous: str | None) -> ModuleType:
        module = ModuleType(revision.id, revision.title)
        vars(module).update(
            revision=revision.id,
            down_revision=previous,
            upgrade=lambda: self._emit_file(revision.up),
            downgrade=lambda: self._emit_file(revision.down),
        )
        return module

    def _emit_file(self, path: Path) -> None:
        for name, text in self._instead.get(path, [(path.name, read_sql(path))]):
            self._emit(name, text)


def migrate(
    conninfo: str, target: str, files: SchemaFiles, *, only: Direction | None = None
) -> MigrationReport:
    """Bring the database to ``target`` in one transaction; from v2 up, in a short one after many others.

    :param only: refuse a target that lies in the other direction
    """
    with connect(conninfo) as raw:
        state = recorded_state(raw, files)
        raw.rollback()
        goal = _goal(target, state, files, only)
        if state.version != V2:
            return _migrate(raw, target, files, only)
        _hold_session(raw)
        if goal == V2 and v2.abandon(raw, files):
            return MigrationReport(V2, V2, [], [], abandoned=True)
        # Asked again: whoever had the session's lock may have done it all.
        state = recorded_state(raw, files)
        if state.version == V2 and goal != V2:
            v2.stamp(raw)
        if _expands(state, goal, files):
            v2.require_two_steps(goal, files)
            v2.expand(raw, files)
        return _cut_over(raw, target, files, only)


def _cut_over(
    raw: psycopg.Connection[Any], target: str, files: SchemaFiles, only: Direction | None
) -> MigrationReport:
    for attempt in range(v2.LOCK_ATTEMPTS):
        try:
            return _migrate(raw, target, files, only, producers_first=attempt > 0)
        except QueenError as error:
            if not v2.was_locked(error):
                raise
            failed = error
        # v2's producers and consumers had their turn; now what they did in it.
        v2.copy(raw, files)
    raise failed


def _migrate(
    raw: psycopg.Connection[Any],
    target: str,
    files: SchemaFiles,
    only: Direction | None,
    *,
    producers_first: bool = False,
) -> MigrationReport:
    with _transaction(raw) as connection:
        state = recorded_state(raw, files)
        goal = _goal(target, state, files, only)
        if not _to_do(state, goal, files):
            return MigrationReport(state.version, goal, [], [])

        def online(opts: dict[str, Any]) -> MigrationContext:
            return MigrationContext.configure(connection, opts=opts)

        return _run(files, state, goal, partial(_execute, raw), online, producers_first=producers_first)


def dry_run(conninfo: str | None, target: str, files: SchemaFiles, *, only: Direction | None = None) -> str:
    """The script that :func:`migrate` would run: on this database, or on an empty one."""
    return plan(conninfo, target, files, only=only).sql


def plan(
    conninfo: str | None, target: str, files: SchemaFiles, *, only: Direction | None = None
) -> MigrationPlan:
    """The same script, with what :func:`migrate` would report."""
    state = State(None, {})
    if conninfo is not None:
        with connect(conninfo) as raw:
            state = recorded_state(raw, files)
    goal = _goal(target, state, files, only)
    if not _to_do(state, goal, files):
        nothing = f"-- Nothing to do: the schema queen is at {goal or 'base'}.\n"
        return MigrationPlan(MigrationReport(state.version, goal, [], []), nothing)

    output = io.StringIO()
    expands = _expands(state, goal, files)
    output.write(
        f"-- Schema queen from {state.version or 'base'} to {goal or 'base'},"
        f" in {'a transaction after some others' if expands else 'one transaction'}.\n"
        "-- Run it with: psql -v ON_ERROR_STOP=1 -f FILE\n\n"
    )
    if expands:
        v2.require_two_steps(goal, files)
        output.write(f"{v2.script(files)}\n")

    def write(name: str, text: str) -> None:
        output.write(f"-- {name}\n{text}\n")

    def offline(opts: dict[str, Any]) -> MigrationContext:
        opts |= {"as_sql": True, "output_buffer": output, "starting_rev": state.version}
        return MigrationContext.configure(dialect_name="postgresql", opts=opts)

    output.write("BEGIN;\n\n")
    write("begin.sql", statement("begin"))
    if state.version is not None:
        write("require_version.sql", _filled("require_version", version=state.version))
    report = _run(files, state, goal, write, offline)
    output.write("COMMIT;\n")
    return MigrationPlan(report, output.getvalue())


def stamp(conninfo: str, target: str, files: SchemaFiles) -> None:
    """Record ``target`` as the database's version and change nothing else."""
    if target[:1] in ("+", "-"):
        raise InvalidOptionError(f"stamp needs a revision, not a step such as {target!r}")
    goal = files.resolve(target, None)
    with connect(conninfo) as raw, _transaction(raw) as connection:
        execute = partial(_execute, raw)
        if goal is None:
            execute("drop_version.sql", statement("drop_version"))
            return
        execute("create_schema.sql", statement("create_schema"))
        scripts = SqlScripts(files, execute, {})
        # Whatever was recorded before is replaced, even a revision we do not know: stamping is for repairs.
        opts = {
            **_VERSION_TABLE,
            "purge": True,
            "fn": lambda heads, context: scripts._stamp_revs(goal, heads),
        }
        MigrationContext.configure(connection, opts=opts).run_migrations()


def current(conninfo: str, files: SchemaFiles) -> str | None:
    """The version that the database records; of v2, which recorded none, its revision."""
    with connect(conninfo) as raw:
        return recorded_state(raw, files).version


def _goal(target: str, state: State, files: SchemaFiles, only: Direction | None) -> str | None:
    require_known(state.version, files)
    goal = files.resolve(target, state.version)
    here, there = files.position(state.version), files.position(goal)
    if (only == "up" and there < here) or (only == "down" and there > here):
        raise InvalidOptionError(
            f"from {state.version or 'base'} to {goal or 'base'} is not {only}: use the other command"
        )
    return goal


def _to_do(state: State, goal: str | None, files: SchemaFiles) -> bool:
    # Views and functions are written for the newest tables: below head there are none, and no caller
    # gets that far, since check() refuses an older schema.
    wanted = files.checksums if files.works(goal) else {}
    return state.version != goal or state.objects != wanted


def _expands(state: State, goal: str | None, files: SchemaFiles) -> bool:
    return state.version == V2 and files.position(goal) > files.position(V2)


def _run(
    files: SchemaFiles,
    state: State,
    goal: str | None,
    emit: Emit,
    configure: Callable[[dict[str, Any]], MigrationContext],
    *,
    producers_first: bool = False,
) -> MigrationReport:
    expands = _expands(state, goal, files)
    expansion = v2.Expansion(files)
    instead: dict[Path, Iterable[v2.Script]] = {}
    if V2 in files.ids:
        if state.version is None and goal != V2:
            instead[files.revisions[0].up] = []  # a new database passes v2 by
        elif expands:
            instead[files.after(V2).up] = expansion.cutover(producers_first=producers_first)
        elif goal == V2:
            instead[files.after(V2).down] = expansion.restore()
    if state.version in (None, V2):  # below are no objects of ours
        emit("create_schema.sql", statement("create_schema"))
    else:
        emit("drop_objects.sql", statement("drop_objects"))

    applied: list[str] = []
    scripts = SqlScripts(files, emit, instead)

    def steps(heads: tuple[str, ...], context: MigrationContext) -> Iterator[RevisionStep]:
        for step in scripts.steps(state.version, goal):
            applied.append(step.revision.revision)
            yield step

    configure({**_VERSION_TABLE, "fn": steps}).run_migrations()

    reapplied = files.repeatables if files.works(goal) else ()
    for file in reapplied:
        emit(file.name, file.text)
        emit("record_object.sql", _filled("record_object", name=file.name, checksum=file.checksum))
    if goal is None:
        emit("drop_schema.sql", statement("drop_schema"))
    elif expands:
        emit(*expansion.verify())
    elif state.version is not None:
        emit("restore_grants.sql", statement("restore_grants"))
    return MigrationReport(state.version, goal, applied, [file.name for file in reapplied])


def _filled(name: str, /, **values: str) -> str:
    return statement(name).format(
        **{key: sql.Literal(value).as_string(None) for key, value in values.items()}
    )


def recorded_state(raw: psycopg.Connection[Any], files: SchemaFiles) -> State:
    # A savepoint: reading a schema that is not there must not abort the run.
    with raw.transaction() as savepoint:
        state = read_state(raw)
        if raw.info.transaction_status == TransactionStatus.INERROR:
            raise psycopg.Rollback(savepoint)
    if state.version is None and V2 in files.ids and is_v2(raw):
        return State(V2, {})
    return state


def _hold_session(raw: psycopg.Connection[Any]) -> None:
    """Autocommit, and the session's lock until the connection ends."""
    raw.autocommit = True
    _execute(raw, "session.sql", statement("session"), TransactionStatus.IDLE)


@contextmanager
def _transaction(raw: psycopg.Connection[Any]) -> Iterator[Connection]:
    """One locked transaction on the driver's connection, as Alembic sees it."""
    autocommit = raw.autocommit
    raw.autocommit = False
    engine = create_engine(
        "postgresql+psycopg://", creator=lambda: raw, poolclass=StaticPool, use_native_hstore=False
    )
    try:
        with engine.connect() as connection, connection.begin():
            _execute(raw, "begin.sql", statement("begin"))
            yield connection
    except DBAPIError as error:
        raise QueenError(f"the migration failed, the schema is as it was before: {error.orig}") from error
    finally:
        if not raw.closed:
            raw.rollback()
            raw.autocommit = autocommit


def _execute(
    raw: psycopg.Connection[Any],
    name: str,
    text: str,
    expected: TransactionStatus = TransactionStatus.INTRANS,
) -> None:
    # Bytes and no parameters: the simple query protocol takes many statements at once and leaves % alone.
    try:
        raw.execute(text.encode())
    except psycopg.Error as error:
        raise QueenError(f"{name} failed, the schema is as it was before: {error}") from error
    if raw.info.transaction_status != expected:
        # Too late to undo it; a file that does this does not get past its first test.
        raise QueenError(f"{name} ended the transaction; a migration must not contain COMMIT or ROLLBACK")


@contextmanager
def connect(conninfo: str) -> Iterator[psycopg.Connection[Any]]:
    """Connect without letting any part of a password into an error.

    libpq quotes what it could not parse, and of a password with a bare ``@`` a part becomes the host name.
    """
    try:
        parts = conninfo_to_dict(conninfo)
    except psycopg.Error:
        raise InvalidOptionError(
            "the connection string cannot be parsed (not shown: it may hold a password)"
        ) from None
    if "://" in conninfo and "@" in f"{parts.get('host')}{parts.get('dbname')}":
        raise InvalidOptionError(
            "the connection string's host or database contains '@': in the password write @ as %40, / as %2F"
        )
    try:
        raw = psycopg.connect(
            conninfo,
            # Nothing prepared, so that a transaction pooler in between does not matter; our files are UTF-8.
            prepare_threshold=None,
            client_encoding="utf8",
            fallback_application_name="queen schema",
        )
    except psycopg.Error as error:
        message = str(error).replace(str(parts.get("password") or "\0"), "***")
        raise QueenError(f"cannot connect to migrate the schema queen: {message}") from None
    with raw:
        yield raw
