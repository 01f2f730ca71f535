"""Generated queues for the Spark tests: small, irregular, and known exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession

from airflow_provider_queen.spark import ConnectionInfo, register

# Two queues, lanes of uneven length, one of them with a floor as retention leaves it, one empty.
FILL = """
INSERT INTO queen.queues (name) VALUES ('orders'), ('mails');
INSERT INTO queen.partitions (queue_id, name, floor_seq)
SELECT q.id, l.name, l.floor_seq
FROM (VALUES ('orders', 'a', 0), ('orders', 'b', 40), ('orders', 'empty', 7), ('mails', 'Default', 0))
    AS l (queue_name, name, floor_seq)
INNER JOIN queen.queues AS q ON q.name = l.queue_name;
INSERT INTO queen.message_log (partition_id, seq, created_at, transaction_id, trace_id, payload)
SELECT
    p.id, n, '2026-03-01 12:00:00.000001+00'::timestamptz + n * '137 ms'::interval, p.name || '-' || n,
    CASE WHEN n % 2 = 0 THEN '00000000-0000-0000-0000-000000000007'::uuid END,
    json_build_object('n', n, 'text', 'ä "quoted"')
FROM (VALUES ('a', 1200), ('b', 340), ('Default', 77)) AS l (name, last_seq)
INNER JOIN queen.partitions AS p ON p.name = l.name
CROSS JOIN generate_series(p.floor_seq + 1, l.last_seq) AS n;
"""

# Batches of uneven size; every seventh only half completed, every eleventh expired without any settlement.
DELIVER = """
INSERT INTO queen.deliveries (
    partition_id, first_seq, last_seq, completed, failed, rejected, released, expired, attempt, priority,
    popped_at, ended_at, queue_name, partition_name, consumer_group
)
SELECT
    m.partition_id, min(m.seq), max(m.seq),
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
GROUP BY g.consumer_group, m.partition_id, m.queue_name, m.partition_name, b.batch
"""


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
