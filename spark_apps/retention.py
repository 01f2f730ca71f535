"""Delete the messages that Queen's queues need not keep, with a copy in Parquet where an archive is given.

    QUEEN_DSN=… spark-submit retention.py --archive /archive/queen

The database decides what may go and deletes it; Spark is started only to archive more than --spark-threshold
messages. Prints progress while it works and one JSON line at the end. Bad arguments and an unreachable
database end with one sentence on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from airflow_provider_queen.spark import ConnectionInfo
from airflow_provider_queen.spark.application import Parser, Say, Summary, number, run
from airflow_provider_queen.spark.archive import Archive
from airflow_provider_queen.spark.connection import check_queue
from airflow_provider_queen.spark.jobs import exclusive, runner_for
from airflow_provider_queen.spark.retention import (
    JOB,
    Deletable,
    archive_lanes,
    deletable,
    delete_archived,
    delete_without_archive,
    not_archived,
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(JOB, __doc__)
    rows = number("a number of messages", 1, 2_000_000_000)
    parser.add_argument("--archive", help="folder or URI that driver and executors share (none: no copy)")
    parser.add_argument("--queue-name", help="only this queue")
    parser.add_argument(
        "--chunk", type=rows, default=10_000, help="messages per deleting transaction (10000)"
    )
    parser.add_argument(
        "--spark-threshold", type=rows, default=200_000, help="archive without Spark up to here (200000)"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would go, change nothing")
    return parser.parse_args(argv)


def announce(plan: Sequence[Deletable], say: Say) -> None:
    per_queue: dict[tuple[str, str], int] = {}
    for lane in plan:
        key = (lane.queue_name, lane.retention_type)
        per_queue[key] = per_queue.get(key, 0) + lane.messages
    for (queue_name, retention_type), messages in sorted(per_queue.items()):
        say(f"{queue_name}: {messages} messages may go under the rule {retention_type!r}")


def retain(connection: ConnectionInfo, arguments: argparse.Namespace, say: Say) -> Summary:
    plan = deletable(connection, arguments.queue_name)
    announce(plan, say)
    summary: Summary = {"deletable": sum(lane.messages for lane in plan), "dry_run": arguments.dry_run}
    if arguments.dry_run:
        return {**summary, "archived": 0, "deleted": 0}
    if arguments.archive is None:
        deleted = delete_without_archive(connection, arguments.queue_name, arguments.chunk, say)
        return {**summary, "archived": 0, "deleted": deleted}
    return {**summary, **retain_with_archive(connection, Archive(arguments.archive), plan, arguments, say)}


def retain_with_archive(
    connection: ConnectionInfo,
    archive: Archive,
    plan: Sequence[Deletable],
    arguments: argparse.Namespace,
    say: Say,
) -> Summary:
    archive.prepare()
    manifests = archive.manifests()
    if leftovers := archive.remove_leftovers(manifests):
        say(f"{leftovers} files of a run that did not end were removed")
    lanes = not_archived(plan, archive.archived_through(manifests))
    messages = sum(lane.messages for lane in lanes)
    if lanes:
        with runner_for(JOB, messages, arguments.spark_threshold, say) as runner:
            manifests.append(archive_lanes(connection, archive, runner, lanes, say))
    deleted = delete_archived(connection, plan, archive.archived_through(manifests), arguments.chunk, say)
    return {"archived": messages, "deleted": deleted, "run_id": manifests[-1].run_id if lanes else None}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)

    def work(connection: ConnectionInfo, say: Say) -> Summary:
        with connection.connect() as database:
            check_queue(database, arguments.queue_name)
        say(f"connected to {connection.target}")
        with exclusive(connection, JOB):
            return retain(connection, arguments, say)

    return run(JOB, work)


if __name__ == "__main__":
    sys.exit(main())
