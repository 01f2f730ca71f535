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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
from sqlalchemy.pool import NullPool

from airflow_provider_queen.client.schema.files import Revision, SchemaFiles, read_sql, statement
from airflow_provider_queen.client.schema.report import MigrationPlan, MigrationReport
from airflow_provider_queen.client.schema.state import State, read_state, require_known
from airflow_provider_queen.exceptions import InvalidOptionError, QueenError

Emit = Callable[[str, str], None]
"""Takes the name of a script, for errors, and its text."""

Direction = Literal["up", "down"]

_VERSION_TABLE = {"version_table": "alembic_version", "version_table_schema": "queen"}


class SqlScripts(ScriptDirectory):
    """Alembic's script directory over pairs of SQL files instead of Python modules."""

    def __init__(self, files: SchemaFiles, emit: Emit) -> None:
        super().__init__(files.folder)
        self._files = files
        self._emit = emit
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
            upgrade=lambda: self._emit(revision.up.name, read_sql(revision.up)),
            downgrade=lambda: self._emit(revision.down.name, read_sql(revision.down)),
        )
        return module


def migrate(
    conninfo: str, target: str, files: SchemaFiles, *, only: Direction | None = None
) -> MigrationReport:
    """Bring the database to ``target`` in one transaction.

    :param only: refuse a target that lies in the other direction
    """
    with _transaction(conninfo) as (connection, raw):
        state = _recorded_state(raw)
        goal = _goal(target, state, files, only)
        if not _to_do(state, goal, files):
            return MigrationReport(state.version, goal, [], [])

        def online(opts: dict[str, Any]) -> MigrationContext:
            return MigrationContext.configure(connection, opts=opts)

        return _run(files, state, goal, partial(_execute, raw), online)


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
            state = read_state(raw)
    goal = _goal(target, state, files, only)
    if not _to_do(state, goal, files):
        nothing = f"-- Nothing to do: the schema queen is at {goal or 'base'}.\n"
        return MigrationPlan(MigrationReport(state.version, goal, [], []), nothing)

    output = io.StringIO()
    output.write(
        f"-- Schema queen from {state.version or 'base'} to {goal or 'base'}, in one transaction.\n"
        "-- Run it with: psql -v ON_ERROR_STOP=1 -f FILE\n\n"
    )

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
    with _transaction(conninfo) as (connection, raw):
        execute = partial(_execute, raw)
        if goal is None:
            execute("drop_version.sql", statement("drop_version"))
            return
        execute("create_schema.sql", statement("create_schema"))
        scripts = SqlScripts(files, execute)
        # Whatever was recorded before is replaced, even a revision we do not know: stamping is for repairs.
        opts = {
            **_VERSION_TABLE,
            "purge": True,
            "fn": lambda heads, context: scripts._stamp_revs(goal, heads),
        }
        MigrationContext.configure(connection, opts=opts).run_migrations()


def current(conninfo: str) -> str | None:
    """The version that the database records."""
    with connect(conninfo) as raw:
        return read_state(raw).version


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
    wanted = files.checksums if goal == files.head else {}
    return state.version != goal or state.objects != wanted


def _run(
    files: SchemaFiles,
    state: State,
    goal: str | None,
    emit: Emit,
    configure: Callable[[dict[str, Any]], MigrationContext],
) -> MigrationReport:
    if state.version is None:
        emit("create_schema.sql", statement("create_schema"))
    else:
        emit("drop_objects.sql", statement("drop_objects"))

    applied: list[str] = []
    scripts = SqlScripts(files, emit)

    def steps(heads: tuple[str, ...], context: MigrationContext) -> Iterator[RevisionStep]:
        for step in scripts.steps(state.version, goal):
            applied.append(step.revision.revision)
            yield step

    configure({**_VERSION_TABLE, "fn": steps}).run_migrations()

    reapplied = files.repeatables if goal == files.head else ()
    for file in reapplied:
        emit(file.name, file.text)
        emit("record_object.sql", _filled("record_object", name=file.name, checksum=file.checksum))
    if goal is None:
        emit("drop_schema.sql", statement("drop_schema"))
    elif state.version is not None:
        emit("restore_grants.sql", statement("restore_grants"))
    return MigrationReport(state.version, goal, applied, [file.name for file in reapplied])


def _filled(name: str, /, **values: str) -> str:
    return statement(name).format(
        **{key: sql.Literal(value).as_string(None) for key, value in values.items()}
    )


def _recorded_state(raw: psycopg.Connection[Any]) -> State:
    # A savepoint: reading a schema that is not there must not abort the run.
    with raw.transaction() as savepoint:
        state = read_state(raw)
        if raw.info.transaction_status == TransactionStatus.INERROR:
            raise psycopg.Rollback(savepoint)
    return state


@contextmanager
def _transaction(conninfo: str) -> Iterator[tuple[Connection, psycopg.Connection[Any]]]:
    """One locked transaction, as Alembic sees it and as the driver does."""
    with connect(conninfo) as raw:
        engine = create_engine(
            "postgresql+psycopg://", creator=lambda: raw, poolclass=NullPool, use_native_hstore=False
        )
        try:
            with engine.connect() as connection, connection.begin():
                _execute(raw, "begin.sql", statement("begin"))
                yield connection, raw
        except DBAPIError as error:
            raise QueenError(f"the migration failed, the schema is as it was before: {error.orig}") from error


def _execute(raw: psycopg.Connection[Any], name: str, text: str) -> None:
    # Bytes and no parameters: the simple query protocol takes many statements at once and leaves % alone.
    try:
        raw.execute(text.encode())
    except psycopg.Error as error:
        raise QueenError(f"{name} failed, the schema is as it was before: {error}") from error
    if raw.info.transaction_status != TransactionStatus.INTRANS:
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
