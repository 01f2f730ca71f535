"""``make bench-spark``: reading, writing, retention and metrics on Spark, each beside what plain SQL does.

A rate swings with whatever else the machine does, so it is printed with its ratio to a limit of the same run:
binary COPY out for reading, binary COPY in for writing, one DELETE for retention.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from pyspark.sql import SparkSession

from airflow_provider_queen.client import schema
from airflow_provider_queen.embedded.java import find_java_home
from airflow_provider_queen.embedded.postgres import PostgresServer
from airflow_provider_queen.spark import ConnectionInfo, register
from airflow_provider_queen.spark.archive import Archive
from airflow_provider_queen.spark.jobs import OnSpark
from airflow_provider_queen.spark.metrics import Window, compute
from airflow_provider_queen.spark.retention import archive_lanes, deletable, delete_archived

PARTITIONS = 20
BATCH = 10_000

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


def copy_out(dsn: str, path: Path) -> None:
    with (
        psycopg.connect(dsn) as connection,
        connection.cursor() as cursor,
        path.open("wb") as file,
        cursor.copy("COPY queen.message_log TO STDOUT (FORMAT BINARY)") as copy,
    ):
        for data in copy:
            file.write(data)


def copy_in(dsn: str, path: Path) -> None:
    with psycopg.connect(dsn) as connection, connection.cursor() as cursor, path.open("rb") as file:
        cursor.execute("CREATE TABLE bare (LIKE queen.message_log INCLUDING INDEXES)")
        with cursor.copy("COPY bare FROM STDIN (FORMAT BINARY)") as copy:
            while data := file.read(1 << 20):
                copy.write(data)


def read_all(session: SparkSession, slices: int) -> None:
    frame = session.read.format("queen").option("numSlices", slices).load()
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

        before = written()
        seconds = timed(work)
        wal = written() - before
        time.sleep(1.5)  # the statistics of other sessions arrive a moment later
        dead = connection.execute(
            "SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'message_log'"
        ).fetchone()
    return {"seconds": round(seconds, 1), "wal_mb": round(wal / 1e6), "dead_rows": dead[0] if dead else 0}


def retain(session: SparkSession, dsn: str, folder: Path) -> None:
    connection, archive = ConnectionInfo(dsn), Archive(str(folder))
    archive.prepare()
    plan = deletable(connection, None)
    manifest = archive_lanes(connection, archive, OnSpark(session), plan, say)
    delete_archived(connection, plan, archive.archived_through([manifest]), 10_000, say)


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


def read_seconds(dsn: str, cores: int, folder: Path) -> float:
    with spark_session(f"local[{cores}]", folder) as session:
        register(session, ConnectionInfo(dsn))
        read_all(session, cores)  # the first query pays for Spark's start
        return timed(lambda: read_all(session, cores))


def measure(server: PostgresServer, messages: int, folder: Path) -> dict[str, Any]:
    say(f"filling {messages} messages")
    dsn = server.create_database("bench")
    fill(dsn, messages)
    deleted = server.create_database("deleted", "bench")
    retained = server.create_database("retained", "bench")
    copied = folder / "copied"
    out_limit = timed(lambda: copy_out(dsn, copied))
    results: dict[str, Any] = {"messages": messages, "copy_out_krows_s": round(messages / out_limit / 1000)}
    for cores in (1, 2):
        results[f"read_local{cores}"] = rate(messages, read_seconds(dsn, cores, folder), out_limit)
    with spark_session("local[2]", folder) as session:
        register(session, ConnectionInfo(dsn))
        read_all(session, 2)
        figures = timed(lambda: compute(session, ConnectionInfo(dsn), Window()))
        results["metrics_seconds"] = round(figures, 1)
        results["retention_with_archive"] = database_cost(
            retained, lambda: retain(session, retained, folder / "archive")
        )
        writing = timed(lambda: write_all(session, messages))
    results["retention_as_one_delete"] = database_cost(deleted, lambda: delete_all(deleted))
    in_limit = timed(lambda: copy_in(deleted, copied))
    results["copy_in_krows_s"] = round(messages / in_limit / 1000)
    results["write_local2"] = rate(messages, writing, in_limit)
    return results


def rate(messages: int, seconds: float, limit: float) -> dict[str, float]:
    return {"krows_s": round(messages / seconds / 1000, 1), "of_limit": round(limit / seconds, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=2_000_000)
    arguments = parser.parse_args()
    os.environ.setdefault("JAVA_HOME", str(find_java_home()))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="queen-bench-") as folder, PostgresServer() as server:
        os.environ["SPARK_LOCAL_DIRS"] = folder
        print(json.dumps(measure(server, arguments.messages, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
