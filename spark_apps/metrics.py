"""Compute the figures of Queen's queues per time bucket into ``queen.queue_metrics``.

    QUEEN_DSN=… spark-submit metrics.py --bucket-seconds 60 --since 2026-01-01T00:00:00Z

Prints progress while it works and one JSON line at the end. Bad arguments and an unreachable database end
with one sentence on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import NoReturn

from pyspark.sql import SparkSession

from airflow_provider_queen.exceptions import QueenError, QueueNotFoundError
from airflow_provider_queen.spark import ConnectionInfo, register
from airflow_provider_queen.spark.datasource import queue_exists
from airflow_provider_queen.spark.metrics import BucketMetrics, Window, compute, record
from airflow_provider_queen.spark.progress import reported

APPLICATION = "queen-metrics"
USAGE_ERROR = 2
SHOWN_ROWS = 20


class OneSentenceParser(argparse.ArgumentParser):
    """Reports a bad argument in one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{APPLICATION}: {message}\n")


def moment(text: str) -> datetime:
    """Read an ISO time; without a zone nobody can know which moment is meant."""
    try:
        value = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no ISO time") from None
    if value.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{text!r} has no time zone; write for example {text}Z")
    return value


def bucket(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 86_400:
        raise argparse.ArgumentTypeError(f"a number of seconds from 1 to 86400 is needed, not {text!r}")
    return int(text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneSentenceParser(prog="metrics.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--bucket-seconds", type=bucket, default=60, help="length of a bucket (60)")
    parser.add_argument(
        "--since", type=moment, help="first moment, ISO with time zone (all that is retained)"
    )
    parser.add_argument("--until", type=moment, help="end, exclusive, ISO with time zone (now)")
    parser.add_argument("--queue-name", help="only this queue")
    parser.add_argument("--dry-run", action="store_true", help="compute and show, store nothing")
    arguments = parser.parse_args(argv)
    if arguments.since and arguments.until and arguments.since >= arguments.until:
        parser.error("--since must lie before --until")
    return arguments


def say(line: str) -> None:
    print(f"{APPLICATION}: {line}", flush=True)


def check_database(connection: ConnectionInfo, queue_name: str | None) -> None:
    """Fail in a second rather than after Spark has started."""
    with connection.connect() as database:
        found = queue_exists(database, queue_name or "")
    if queue_name is not None and not found:
        raise QueueNotFoundError(f"there is no queue {queue_name!r}")
    say(f"connected to {connection.target}")


def show(rows: Sequence[BucketMetrics]) -> None:
    for row in rows[:SHOWN_ROWS]:
        say(f"would record {json.dumps(asdict(row), default=str)}")
    if len(rows) > SHOWN_ROWS:
        say(f"and {len(rows) - SHOWN_ROWS} more")


def run(spark: SparkSession, connection: ConnectionInfo, arguments: argparse.Namespace) -> dict[str, object]:
    window = Window(arguments.bucket_seconds, arguments.since, arguments.until)
    register(spark, connection)
    with reported(spark, say):
        rows = compute(spark, window, arguments.queue_name, say)
    say(f"{len(rows)} buckets computed")
    if arguments.dry_run:
        show(rows)
    written = 0 if arguments.dry_run else record(connection, window, rows)
    return {
        "buckets": len(rows),
        "written": written,
        "dry_run": arguments.dry_run,
        "queues": len({row.queue_name for row in rows}),
        "pushed": sum(row.pushed for row in rows),
        "completed": sum(row.completed for row in rows),
        "failed": sum(row.failed for row in rows),
        "dead_lettered": sum(row.dead_lettered for row in rows),
    }


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    started = time.monotonic()
    try:
        connection = ConnectionInfo.from_environment()
        check_database(connection, arguments.queue_name)
    except QueenError as error:
        print(f"{APPLICATION}: {error}", file=sys.stderr)
        return USAGE_ERROR
    # A session that somebody else started (a notebook, a test) is used and left running.
    found = SparkSession.getActiveSession()
    spark = found or SparkSession.builder.appName(APPLICATION).getOrCreate()
    try:
        summary = run(spark, connection, arguments)
    finally:
        if found is None:
            spark.stop()
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({"application": APPLICATION, **summary, "seconds": seconds}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
