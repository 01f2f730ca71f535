"""``python -m airflow_provider_queen.client.schema``: the schema from a terminal.

Exit code 0: done, 1: failed, nothing changed, 2: wrong arguments.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from airflow_provider_queen.client.schema import runner
from airflow_provider_queen.client.schema.files import SchemaFiles, schema_files
from airflow_provider_queen.client.schema.report import MigrationReport
from airflow_provider_queen.exceptions import InvalidOptionError, QueenError

_DIRECTIONS: dict[str, runner.Direction] = {"upgrade": "up", "downgrade": "down"}
_LIBPQ = ("PGSERVICE", "PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m airflow_provider_queen.client.schema",
        description="Creates, changes and removes the schema queen.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--dsn",
        help="libpq connection string; default QUEEN_DSN, then libpq's PG* variables."
        " Other users see a command line: give a password by QUEEN_DSN, PGPASSWORD or ~/.pgpass",
    )
    parser.add_argument("--sql-folder", type=Path, help="SQL files to use instead of the package's own")
    commands = parser.add_subparsers(dest="command", required=True)

    upgrade = commands.add_parser("upgrade", help="go up; re-apply changed views and functions")
    upgrade.add_argument("target", nargs="?", default="head", help="head (default), a revision, or +N")
    downgrade = commands.add_parser("downgrade", help="go down; base removes everything")
    downgrade.add_argument("target", help="a revision, -N, or base")
    for command in (upgrade, downgrade):
        command.add_argument(
            "--sql",
            action="store_true",
            help="print the SQL and change nothing; with no database named: from base",
        )
    stamp = commands.add_parser("stamp", help="record a version without running anything")
    stamp.add_argument("revision", help="a revision, head or base")
    commands.add_parser("current", help="print the database's version")
    commands.add_parser("history", help="print the versions there are")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        files = schema_files(options.sql_folder)
        dsn: str | None = options.dsn or os.environ.get("QUEEN_DSN")
        if dsn is None and any(name in os.environ for name in _LIBPQ):
            dsn = ""
        if options.command == "history":
            _history(files)
        elif options.command == "current":
            print(_current(dsn or "", files))
        elif options.command == "stamp":
            runner.stamp(dsn or "", options.revision, files)
            print(f"stamped {_current(dsn or '', files)}")
        elif options.sql:
            print(runner.dry_run(dsn, options.target, files, only=_DIRECTIONS[options.command]), end="")
        else:
            _print(runner.migrate(dsn or "", options.target, files, only=_DIRECTIONS[options.command]))
    except InvalidOptionError as error:
        print(error, file=sys.stderr)
        return 2
    except QueenError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _current(dsn: str, files: SchemaFiles) -> str:
    version = runner.current(dsn, files)
    return f"{version or 'base'}{' (head)' if version and files.works(version) else ''}"


def _history(files: SchemaFiles) -> None:
    for revision in files.revisions:
        print(f"{revision.id}{' (head)' if revision.id == files.head else ''}  {revision.title}".rstrip())


def _print(report: MigrationReport) -> None:
    if not report.changed:
        print(f"nothing to do: {report.to_version or 'base'}")
        return
    if report.abandoned:
        print(f"the upgrade that was begun is given up: {report.to_version}")
        return
    print(f"{report.from_version or 'base'} -> {report.to_version or 'base'}")
    for revision in report.applied:
        print(f"  {revision}")
    if report.reapplied:
        print(f"  views and functions: {len(report.reapplied)} files")


if __name__ == "__main__":
    sys.exit(main())
