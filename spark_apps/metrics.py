"""Compute figures of Queen's queues per time bucket into ``queen.queue_metrics``, and find what is unusual.

    QUEEN_DSN=… spark-submit metrics.py --bucket-seconds 60 --since 2026-01-01T00:00:00Z

Spark is started for more than --spark-threshold messages; below that one SQL statement is faster. Prints
progress while it works and one JSON line at the end. Bad arguments and an unreachable database end with one
sentence on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from airflow_provider_queen.spark import ConnectionInfo, register
from airflow_provider_queen.spark.anomalies import Anomaly, find, record_anomalies
from airflow_provider_queen.spark.application import Parser, Say, Summary, moment, number, run, session
from airflow_provider_queen.spark.connection import check_queue
from airflow_provider_queen.spark.figures import (
    BucketMetrics,
    Window,
    compute_here,
    current_lags,
    next_window,
    record,
    with_lags,
    work_size,
)
from airflow_provider_queen.spark.metrics import compute
from airflow_provider_queen.spark.output import Output

APPLICATION = "queen-metrics"
SHOWN_ROWS = 20


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(APPLICATION, __doc__)
    parser.add_argument(
        "--bucket-seconds",
        type=number("a number of seconds", 1, 86_400),
        default=60,
        help="length of a bucket (60)",
    )
    parser.add_argument(
        "--since", type=moment, help="first moment, ISO with time zone (all that is retained)"
    )
    parser.add_argument(
        "--incremental", action="store_true", help="begin where the last run ended, instead of --since"
    )
    parser.add_argument("--until", type=moment, help="end, exclusive, ISO with time zone (now)")
    parser.add_argument("--queue-name", help="only this queue")
    parser.add_argument("--output", help="folder or URI for the figures as Parquet, too (none)")
    parser.add_argument(
        "--spark-threshold",
        type=number("a number of messages", 1, 2_000_000_000),
        default=2_000_000,
        help="compute without Spark up to here (2000000)",
    )
    parser.add_argument("--dry-run", action="store_true", help="compute and show, store nothing")
    arguments = parser.parse_args(argv)
    if arguments.since and arguments.until and arguments.since >= arguments.until:
        parser.error("--since must lie before --until")
    if arguments.incremental and (arguments.since or arguments.until):
        parser.error("--incremental takes neither --since nor --until")
    return arguments


def show(rows: Sequence[BucketMetrics], say: Say) -> None:
    for row in rows[:SHOWN_ROWS]:
        say(f"would record {json.dumps(asdict(row), default=str)}")
    if len(rows) > SHOWN_ROWS:
        say(f"and {len(rows) - SHOWN_ROWS} more")


def announce(anomalies: Sequence[Anomaly], say: Say) -> None:
    for anomaly in anomalies[:SHOWN_ROWS]:
        say(f"{anomaly.severity}: {anomaly.kind}: {anomaly.reason}")


def chosen_window(connection: ConnectionInfo, arguments: argparse.Namespace) -> Window:
    if arguments.incremental:
        return next_window(connection, arguments.bucket_seconds, arguments.queue_name)
    return Window(arguments.bucket_seconds, arguments.since, arguments.until)


def figures(
    connection: ConnectionInfo, window: Window, arguments: argparse.Namespace, say: Say
) -> list[BucketMetrics]:
    messages = work_size(connection, window, arguments.queue_name)
    say(f"{messages} messages to look at since {window.first or 'the first'}")
    if messages <= arguments.spark_threshold:
        return compute_here(connection, window, arguments.queue_name)
    with session(APPLICATION, say) as spark:
        register(spark, connection)
        return compute(spark, connection, window, arguments.queue_name, say)


def measure(connection: ConnectionInfo, arguments: argparse.Namespace, say: Say) -> Summary:
    output = Output(arguments.output) if arguments.output and not arguments.dry_run else None
    if output:
        output.prepare()
    window = chosen_window(connection, arguments)
    rows = figures(connection, window, arguments, say)
    say(f"{len(rows)} buckets computed")
    anomalies = find(connection, rows, arguments.queue_name)
    announce(anomalies, say)
    if window.end is None:
        rows = with_lags(rows, current_lags(connection, window.bucket_seconds, arguments.queue_name))
    if arguments.dry_run:
        show(rows, say)
    # The figures last: an incremental run begins where they end, so one that dies before is simply repeated.
    run_id = output.write(window, rows, anomalies) if output else None
    written = 0
    if not arguments.dry_run:
        record_anomalies(connection, anomalies)
        written = record(connection, window, rows)
    return {
        "anomalies": len(anomalies),
        "critical": sum(anomaly.severity == "critical" for anomaly in anomalies),
        "buckets": len(rows),
        "written": written,
        "run_id": run_id,
        "dry_run": arguments.dry_run,
        "queues": len({row.queue_name for row in rows}),
        "pushed": sum(row.pushed for row in rows),
        "completed": sum(row.completed for row in rows),
        "failed": sum(row.failed for row in rows),
        "dead_lettered": sum(row.dead_lettered for row in rows),
    }


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)

    def work(connection: ConnectionInfo, say: Say) -> Summary:
        with connection.connect() as database:
            check_queue(database, arguments.queue_name)
        say(f"connected to {connection.target}")
        return measure(connection, arguments, say)

    return run(APPLICATION, work)


if __name__ == "__main__":
    sys.exit(main())
