"""``make bench-spark``: reading, writing, retention and metrics on Spark, each beside what plain SQL does.

A rate swings with whatever else the machine does, so it is printed with its ratio to a limit of the same run:
binary COPY over as many connections as Spark has cores, out for reading and in for writing; one DELETE for
retention; one SQL statement for metrics.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from pyspark.sql import SparkSession

from airflow_provider_queen.client import schema
from airflow_provider_queen.embedded.java import find_java_home
from airflow_provider_queen.embedded.postgres import PostgresServer
from airflow_provider_queen.spark import ConnectionInfo, register
from airflow_provider_queen.spark.archive import Archive
from airflow_provider_queen.spark.figures import Window, compute_here
from airflow_provider_queen.spark.jobs import OnSpark
from airflow_provider_queen.spark.metrics import compute
from airflow_provider_queen.spark.retention import (
    archive_lanes,
    deletable,
    delete_archived,
    delete_without_archive,
)

PARTITIONS = 20
BATCH = 10_000
CHUNK = 10_000

FILL = """
SELECT count(*) FROM generate_series(1, %(batches)s) AS b
CROSS JOIN LATERAL (
    SELECT array_agg(json_build_object('n', n, 'note', repeat('x', 150))::text) AS payloads
    FROM generate_series(1, %(batch)s) AS n
) AS p
CROSS JOIN LATERAL queen.push('bench', p.payloads, ARRAY['p' || b %% %(partitions)s])
"""
DELIVER = """
INSERT INTO queen.deliveries (
    lane_id, first_seq, last_seq, completed, failed, rejected, released, expired, attempt, priority,
    popped_at, ended_at, queue_name, partition_name, consumer_group
)
SELECT
    lane_id, min(seq), max(seq), count(*), 0, 0, 0, 0, 1, 0,
    max(created_at) + '5 ms', max(created_at) + '25 ms', 'bench', max(partition_name), 'g'
FROM queen.messages GROUP BY lane_id, seq / 100
"""


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextmanager
def spark_session(master: str, folder: Path) -> Iterator[SparkSession]:
    java = f"-XX:-UsePerfData -Duser.timezone=UTC -Djava.io.tmpdir={folder} -Dderby.system.home={folder}"
    session = (
        SparkSession.builder.master(master)
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", java)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()


def at_once(work: Callable[[int], None], connections: int) -> None:
    """Do it in as many threads; libpq lets go of the interpreter while it waits."""
    with ThreadPoolExecutor(connections) as pool:
        list(pool.map(work, range(connections)))


def copy_out(dsn: str, connections: int, files: list[Path] | None = None) -> None:
    """All messages, each connection its share of the lanes; to nowhere unless there are files."""

    def copy_share(number: int) -> None:
        share = (
            "COPY (SELECT * FROM queen.message_log WHERE lane_id / 10 %% %(connections)s = %(number)s)"
            " TO STDOUT (FORMAT BINARY)"
        )
        target = files[number] if files else Path(os.devnull)
        with psycopg.connect(dsn) as connection, target.open("wb") as file:
            cursor = psycopg.ClientCursor(connection)
            with cursor.copy(share, {"connections": connections, "number": number}) as copy:
                for data in copy:
                    file.write(data)

    at_once(copy_share, connections)


def copy_in(dsn: str, files: list[Path]) -> None:
    """What the files hold into a table with the same indexes, each file over a connection."""
    with psycopg.connect(dsn) as connection:
        connection.execute("DROP TABLE IF EXISTS bare")
        connection.execute("CREATE TABLE bare (LIKE queen.message_log INCLUDING INDEXES)")

    def copy_share(number: int) -> None:
        with (
            psycopg.connect(dsn) as connection,
            files[number].open("rb") as file,
            connection.cursor().copy("COPY bare FROM STDIN (FORMAT BINARY)") as copy,
        ):
            while data := file.read(1 << 20):
                copy.write(data)

    at_once(copy_share, len(files))


def read_all(session: SparkSession, slices: int, condition: str = "true") -> None:
    frame = session.read.format("queen").option("numSlices", slices).load().where(condition)
    frame.write.format("noop").mode("overwrite").save()


def write_all(session: SparkSession, messages: int) -> None:
    frame = session.range(0, messages, 1, 2).selectExpr(
        "to_json(struct(id AS n, repeat('x', 150) AS note)) AS payload",
        f"concat('p', id % {PARTITIONS}) AS partition_name",
    )
    frame.write.format("queen").mode("append").option("queue_name", "copy").save()


def database_cost(dsn: str, work: Callable[[], Any]) -> dict[str, float]:
    """Time, WAL and dead rows of ``work``."""
    with psycopg.connect(dsn, autocommit=True) as connection:

        def written() -> int:
            row = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'").fetchone()
            return int(row[0]) if row else 0

        connection.execute("CHECKPOINT")
        before = written()
        seconds = timed(work)
        wal = written() - before
        time.sleep(1.5)  # the statistics of other sessions arrive a moment later
        dead = connection.execute(
            "SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'message_log'"
        ).fetchone()
    return {"seconds": round(seconds, 1), "wal_mb": round(wal / 1e6), "dead_rows": dead[0] if dead else 0}


def retain_with_archive(session: SparkSession, dsn: str, folder: Path) -> None:
    connection, archive = ConnectionInfo(dsn), Archive(str(folder))
    archive.prepare()
    plan = deletable(connection, None)
    manifest = archive_lanes(connection, archive, OnSpark(session), plan, say)
    delete_archived(connection, plan, archive.archived_through([manifest]), CHUNK, say)


def retain(dsn: str) -> None:
    delete_without_archive(ConnectionInfo(dsn), None, CHUNK, say)


def delete_all(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("DELETE FROM queen.message_log")


def fill(dsn: str, messages: int) -> None:
    schema.migrate(dsn)
    with psycopg.connect(dsn, autocommit=True) as connection:
        for queue in ("bench", "copy"):
            connection.execute("SELECT queen.configure_queue(%s)", [queue])
        arguments = {"batches": messages // BATCH, "batch": BATCH, "partitions": PARTITIONS}
        connection.execute(FILL, arguments)
        connection.execute(DELIVER)
        connection.execute(
            "SELECT queen.configure_queue('bench', '{\"retention_enabled\": true, \"retention_seconds\": 1}')"
        )
        connection.execute("VACUUM ANALYZE")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def warm_session(dsn: str, cores: int, folder: Path) -> Iterator[SparkSession]:
    """The first query of each kind pays for Spark's start: here none that is measured."""
    with spark_session(f"local[{cores}]", folder) as session:
        register(session, ConnectionInfo(dsn))
        read_all(session, cores, "created_at < '2000-01-01'")
        compute(session, ConnectionInfo(dsn), Window(until=datetime(2000, 1, 1, tzinfo=UTC)))
        yield session


def in_turns(rounds: int, *works: Callable[[], Any]) -> list[float]:
    """The best time of each, measured one after the other so that a slow minute of the machine meets all."""
    times = [[timed(work) for work in works] for _ in range(rounds)]
    return [min(column) for column in zip(*times, strict=True)]


def measure_reading(dsn: str, messages: int, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    best: dict[int, float] = {}
    for cores in (1, 2):
        with warm_session(dsn, cores, folder) as session:
            limit, best[cores] = in_turns(3, partial(copy_out, dsn, cores), partial(read_all, session, cores))
        results[f"copy_out_{cores}_connections"] = {"krows_s": round(messages / limit / 1000, 1)}
        results[f"read_local{cores}"] = rate(messages, best[cores], limit)
    return {**results, "read_scaling_1_to_2": round(best[1] / best[2], 2)}


def measure_writing(dsn: str, messages: int, folder: Path) -> dict[str, Any]:
    files = [folder / f"copied-{number}" for number in range(2)]
    copy_out(dsn, len(files), files)
    with warm_session(dsn, 2, folder) as session:
        limit, best = in_turns(2, lambda: copy_in(dsn, files), lambda: write_all(session, messages))
    for file in files:
        file.unlink()
    return {
        "copy_in_2_connections": {"krows_s": round(messages / limit / 1000, 1)},
        "write_local2": rate(messages, best, limit),
    }


def measure_retention(server: PostgresServer, folder: Path) -> dict[str, Any]:
    archived, chunked, deleted = (
        server.create_database(name, "bench") for name in ("archived", "chunked", "deleted")
    )
    with spark_session("local[2]", folder) as session:
        with_archive = database_cost(
            archived, lambda: retain_with_archive(session, archived, folder / "archive")
        )
    return {
        "retention_as_one_delete": database_cost(deleted, lambda: delete_all(deleted)),
        "retention_in_chunks": database_cost(chunked, lambda: retain(chunked)),
        "retention_with_archive": with_archive,
    }


def measure_metrics(dsn: str, messages: int, folder: Path) -> dict[str, Any]:
    connection, window = ConnectionInfo(dsn), Window()
    seconds: dict[str, float] = {}
    for cores in (1, 2):
        with warm_session(dsn, cores, folder) as session:
            seconds[f"local{cores}"] = timed(partial(compute, session, connection, window))
    return {
        "metrics_messages": messages,
        "metrics_sql_seconds": round(timed(lambda: compute_here(connection, window)), 1),
        "metrics_spark_seconds": {cores: round(value, 1) for cores, value in seconds.items()},
        "metrics_scaling_1_to_2": round(seconds["local1"] / seconds["local2"], 2),
    }


def measure(server: PostgresServer, messages: int, metrics_messages: int, folder: Path) -> dict[str, Any]:
    say(f"filling {messages} messages")
    dsn = server.create_database("bench")
    fill(dsn, messages)
    results: dict[str, Any] = {"messages": messages}
    for part in (
        lambda: measure_retention(server, folder),
        lambda: measure_reading(dsn, messages, folder),
        lambda: measure_writing(dsn, messages, folder),
    ):
        results |= part()
        say(json.dumps(results))
    for name in ("archived", "chunked", "deleted", "bench"):
        server.drop_database(name)
    say(f"filling {metrics_messages} messages")
    dsn = server.create_database("metrics")
    fill(dsn, metrics_messages)
    return {**results, **measure_metrics(dsn, metrics_messages, folder)}


def rate(messages: int, seconds: float, limit: float) -> dict[str, float]:
    return {"krows_s": round(messages / seconds / 1000, 1), "of_limit": round(limit / seconds, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--metrics-messages", type=int, default=5_000_000)
    arguments = parser.parse_args()
    os.environ.setdefault("JAVA_HOME", str(find_java_home()))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="queen-bench-") as folder, PostgresServer() as server:
        os.environ["SPARK_LOCAL_DIRS"] = folder
        print(
            json.dumps(
                measure(server, arguments.messages, arguments.metrics_messages, Path(folder)), indent=1
            )
        )


if __name__ == "__main__":
    main()
