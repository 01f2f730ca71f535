"""Generated queues for the Spark tests: small, irregular, and known exactly."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession

from airflow_provider_queen.embedded.postgres import PostgresServer
from airflow_provider_queen.spark import ConnectionInfo, register
from tests.spark.submissions import Submission

# Two queues, lanes of uneven length, one of them with a floor as retention leaves it, one emptied.
# What is pushed is stamped with the clock: the times are then set to known ones, rising with seq as always.
FILL = """
SELECT queen.configure_queue('orders'), queen.configure_queue('mails');
SELECT count(*)
FROM (VALUES ('orders', 'a', 1200), ('orders', 'b', 340), ('orders', 'empty', 7), ('mails', 'Default', 77))
    AS l (queue_name, name, messages)
CROSS JOIN LATERAL (
    SELECT
        array_agg(json_build_object('n', n, 'text', 'ä "quoted"')::text ORDER BY n) AS payloads,
        array_agg(l.name || '-' || n ORDER BY n) AS transaction_ids,
        array_agg(CASE WHEN n % 2 = 0 THEN '00000000-0000-0000-0000-000000000007'::uuid END ORDER BY n)
            AS trace_ids
    FROM generate_series(1, l.messages) AS n
) AS b
CROSS JOIN LATERAL queen.push(l.queue_name, b.payloads, ARRAY[l.name], b.transaction_ids, b.trace_ids);
UPDATE queen.message_log
SET created_at = '2026-03-01 12:00:00.000001+00'::timestamptz + seq * '137 ms'::interval;
SELECT queen.delete_prefix(q, l, f.floor_seq, 'retention')
FROM (VALUES ('b', 40), ('empty', 7)) AS f (name, floor_seq)
INNER JOIN queen.lanes AS l ON l.name = f.name
INNER JOIN queen.queues AS q ON q.id = l.queue_id;
"""

# Batches of uneven size; every seventh only half completed, every eleventh expired without any settlement.
DELIVER = """
INSERT INTO queen.deliveries (
    lane_id, first_seq, last_seq, completed, failed, rejected, released, expired, attempt, priority,
    popped_at, ended_at, queue_name, partition_name, consumer_group
)
SELECT
    m.lane_id, min(m.seq), max(m.seq),
    CASE WHEN b.batch % 11 = 0 THEN 0 WHEN b.batch % 7 = 0 THEN count(*) / 2 ELSE count(*) END,
    CASE WHEN b.batch % 11 <> 0 AND b.batch % 7 = 0 THEN count(*) - count(*) / 2 - 1 ELSE 0 END,
    CASE WHEN b.batch % 11 <> 0 AND b.batch % 7 = 0 THEN 1 ELSE 0 END,
    0, CASE WHEN b.batch % 11 = 0 THEN count(*) ELSE 0 END, 1, 0,
    max(m.created_at) + b.batch * '23 ms'::interval,
    max(m.created_at) + b.batch * '23 ms'::interval + (b.batch * 7919 % 997 + 3) * '1.7 ms'::interval,
    m.queue_name, m.partition_name, g.consumer_group
FROM (VALUES ('__QUEUE_MODE__', 13), ('audit', 5)) AS g (consumer_group, size)
CROSS JOIN queen.messages AS m
CROSS JOIN LATERAL (SELECT (m.seq / g.size)::int AS batch) AS b
GROUP BY g.consumer_group, m.lane_id, m.queue_name, m.partition_name, b.batch
"""


@pytest.fixture(params=["18"])
def postgres_server(request: pytest.FixtureRequest) -> PostgresServer:
    """The newer server alone; tests of SQL functions ask for both with ``BOTH_SERVERS``."""
    server: PostgresServer = request.getfixturevalue(f"postgres_{request.param}")
    return server


@pytest.fixture(autouse=True, scope="session")
def quiet_py4j() -> None:
    """It logs each call to the JVM, and goes on when the log is closed."""
    logging.getLogger("py4j").setLevel(logging.WARNING)


@pytest.fixture
def database(queen_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A migrated database with messages, and no deliveries yet."""
    with psycopg.connect(queen_dsn, autocommit=True) as connection:
        connection.execute(FILL)
        yield connection


@pytest.fixture
def deliver(database: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    """The same database after two groups have read it."""
    database.execute(DELIVER)
    return database


@pytest.fixture
def session(spark: SparkSession, queen_dsn: str) -> SparkSession:
    """The shared session with ``format("queen")`` bound to the test's own database."""
    register(spark, ConnectionInfo(queen_dsn))
    return spark


@pytest.fixture
def submission(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    queen_dsn: str,
) -> Submission:
    return Submission(tmp_path, monkeypatch, caplog, capfd, queen_dsn)
