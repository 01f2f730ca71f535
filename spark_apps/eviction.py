"""Move messages that waited longer than their queue's max_wait_time_seconds to the dead letters.

    QUEEN_DSN=… spark-submit eviction.py

The database does it; Spark is started only to work on several queues at a time, where more than
--spark-threshold messages are to be moved. Prints progress while it works and one JSON line at the end. Bad
arguments and an unreachable database end with one sentence on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from airflow_provider_queen.spark import ConnectionInfo
from airflow_provider_queen.spark.application import Parser, Say, Summary, number, run
from airflow_provider_queen.spark.connection import check_queue
from airflow_provider_queen.spark.eviction import JOB, evict, evictable, evicting_queues
from airflow_provider_queen.spark.jobs import exclusive, runner_for


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(JOB, __doc__)
    rows = number("a number of messages", 1, 2_000_000_000)
    parser.add_argument("--queue-name", help="only this queue")
    parser.add_argument("--chunk", type=rows, default=10_000, help="messages per transaction (10000)")
    parser.add_argument(
        "--spark-threshold", type=rows, default=5_000_000, help="evict without Spark up to here (5000000)"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would go, change nothing")
    return parser.parse_args(argv)


def work_on(connection: ConnectionInfo, arguments: argparse.Namespace, say: Say) -> Summary:
    plan = evictable(connection, arguments.queue_name)
    for queue_name, consumer_group, messages in plan:
        say(f"{queue_name}: {messages} messages have waited too long for {consumer_group}")
    expected = sum(group.messages for group in plan)
    summary: Summary = {"evictable": expected, "dry_run": arguments.dry_run}
    if arguments.dry_run:
        return {**summary, "evicted": 0, "queues": {}}
    queues = evicting_queues(connection, arguments.queue_name)
    # One queue is one piece of work: Spark could not do it any faster.
    with runner_for(JOB, expected if len(queues) > 1 else 0, arguments.spark_threshold, say) as runner:
        evicted = evict(connection, runner, queues, arguments.chunk, say)
    counts = {queue_name: count for queue_name, count in evicted.items() if count}
    return {**summary, "evicted": sum(counts.values()), "queues": counts}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)

    def work(connection: ConnectionInfo, say: Say) -> Summary:
        with connection.connect() as database:
            check_queue(database, arguments.queue_name)
        say(f"connected to {connection.target}")
        with exclusive(connection, JOB):
            return work_on(connection, arguments, say)

    return run(JOB, work)


if __name__ == "__main__":
    sys.exit(main())
