"""Push archived messages of a queue back into it, or into another one.

    QUEEN_DSN=… spark-submit restore.py --archive /archive/queen --queue-name orders --since 2026-01-01T00:00Z

Transaction and trace ids are kept, so that running it again restores nothing twice. Spark is started for more
than --spark-threshold messages. Prints progress while it works and one JSON line at the end. Bad arguments
and an unreachable database end with one sentence on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from airflow_provider_queen.spark import ConnectionInfo, register
from airflow_provider_queen.spark.application import Parser, Say, Summary, moment, number, run, session
from airflow_provider_queen.spark.archive import Archive
from airflow_provider_queen.spark.connection import check_queue
from airflow_provider_queen.spark.restore import (
    JOB,
    Selection,
    messages_in,
    restore_here,
    restore_on_spark,
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(JOB, __doc__)
    parser.add_argument("--archive", required=True, help="folder or URI that retention.py wrote to")
    parser.add_argument("--queue-name", required=True, help="the queue whose messages come back")
    parser.add_argument("--to-queue", help="the queue they go to (the same)")
    parser.add_argument("--since", type=moment, help="pushed at or after, ISO with time zone")
    parser.add_argument("--until", type=moment, help="pushed before, ISO with time zone")
    parser.add_argument(
        "--spark-threshold",
        type=number("a number of messages", 1, 2_000_000_000),
        default=200_000,
        help="restore without Spark up to here (200000)",
    )
    parser.add_argument("--dry-run", action="store_true", help="say how much is there, change nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    target = arguments.to_queue or arguments.queue_name
    chosen = Selection(arguments.queue_name, target, arguments.since, arguments.until)
    archive = Archive(arguments.archive)

    def work(connection: ConnectionInfo, say: Say) -> Summary:
        with connection.connect() as database:
            check_queue(database, target)
        files = chosen.files(archive)
        say(f"connected to {connection.target}; {len(files)} files with {messages_in(files)} messages")
        if arguments.dry_run:
            return {"files": len(files), "messages": 0, "dry_run": True}
        if messages_in(files) <= arguments.spark_threshold:
            messages, queued = restore_here(connection, archive, chosen)
            return {"files": len(files), "messages": messages, "queued": queued, "dry_run": False}
        with session(JOB, say) as spark:
            register(spark, connection)
            messages = restore_on_spark(spark, archive, chosen)
        return {"files": len(files), "messages": messages, "dry_run": False}

    return run(JOB, work)


if __name__ == "__main__":
    sys.exit(main())
