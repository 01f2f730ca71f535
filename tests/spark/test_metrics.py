"""Figures against plain SQL and against numpy, on data that both can see."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import psycopg
import pytest
from pyspark.sql import SparkSession

from airflow_provider_queen.spark import ConnectionInfo
from airflow_provider_queen.spark.metrics import (
    PRODUCERS,
    BucketMetrics,
    Window,
    compute,
    next_window,
    record,
)

WINDOW = Window(bucket_seconds=60)

# The same definitions in PostgreSQL: a range join is fine at this size.
LATENCIES = """
SELECT
    d.queue_name, d.consumer_group, date_bin('60 s', d.ended_at, 'epoch') AS bucket,
    extract(epoch FROM d.ended_at - m.created_at)::float8 * 1000 AS ms
FROM queen.deliveries AS d
INNER JOIN queen.messages AS m ON m.lane_id = d.lane_id AND m.seq BETWEEN d.first_seq AND d.last_seq
WHERE
    (m.seq - d.first_seq + 1) * d.completed / (d.last_seq - d.first_seq + 1)
    > (m.seq - d.first_seq) * d.completed / (d.last_seq - d.first_seq + 1)
"""
LATENCY_PERCENTILES = f"""
SELECT
    queue_name, consumer_group, bucket,
    percentile_cont(ARRAY[0.5, 0.95, 0.99]) WITHIN GROUP (ORDER BY ms), count(*)
FROM ({LATENCIES}) AS l GROUP BY 1, 2, 3
"""
SETTLED = """
SELECT
    queue_name, consumer_group, date_bin('60 s', ended_at, 'epoch'),
    sum(completed), sum(failed), sum(rejected),
    percentile_cont(ARRAY[0.5, 0.95, 0.99])
    WITHIN GROUP (ORDER BY extract(epoch FROM ended_at - popped_at)::float8 * 1000)
    FILTER (WHERE completed + failed + rejected > 0)
FROM queen.deliveries GROUP BY 1, 2, 3
"""
PUSHED = (
    "SELECT queue_name, date_bin('60 s', created_at, 'epoch'), count(*) FROM queen.messages GROUP BY 1, 2"
)

Key = tuple[str, str, datetime]


def by_key(rows: list[BucketMetrics]) -> dict[Key, BucketMetrics]:
    keyed = {(row.queue_name, row.consumer_group, row.bucket_start): row for row in rows}
    assert len(keyed) == len(rows)
    return keyed


def latencies(row: BucketMetrics) -> list[float | None]:
    return [row.latency_p50_ms, row.latency_p95_ms, row.latency_p99_ms]


def test_figures_equal_plain_sql_and_numpy(
    session: SparkSession, queen_dsn: str, deliver: psycopg.Connection[Any]
) -> None:
    figures = by_key(compute(session, ConnectionInfo(queen_dsn), WINDOW))

    pushed = {(queue, PRODUCERS, bucket): n for queue, bucket, n in deliver.execute(PUSHED)}
    assert {key: row.pushed for key, row in figures.items() if row.pushed} == pushed

    settled = deliver.execute(SETTLED).fetchall()
    assert {key for key in figures if key[1] != PRODUCERS} == {tuple(row[:3]) for row in settled}
    for *key, completed, failed, rejected, processing in settled:
        row = figures[tuple(key)]
        assert (row.completed, row.failed, row.dead_lettered) == (completed, failed, rejected)
        assert [row.processing_p50_ms, row.processing_p95_ms, row.processing_p99_ms] == pytest.approx(
            processing
        )

    samples: dict[Key, list[float]] = {}
    for queue, group, bucket, ms in deliver.execute(LATENCIES):
        samples.setdefault((queue, group, bucket), []).append(ms)
    for queue, group, bucket, expected, count in deliver.execute(LATENCY_PERCENTILES):
        row = figures[queue, group, bucket]
        assert count == row.completed
        assert latencies(row) == pytest.approx(expected)
        assert latencies(row) == pytest.approx(
            list(np.percentile(samples[queue, group, bucket], [50, 95, 99]))
        )


def test_a_window_gives_whole_buckets(
    session: SparkSession, queen_dsn: str, deliver: psycopg.Connection[Any]
) -> None:
    info = ConnectionInfo(queen_dsn)
    everything = by_key(compute(session, info, WINDOW))
    since = datetime(2026, 3, 1, 12, 1, 30, tzinfo=UTC)
    until = datetime(2026, 3, 1, 12, 2, 0, tzinfo=UTC)
    inside = by_key(compute(session, info, Window(60, since, until)))
    minute = datetime(2026, 3, 1, 12, 1, tzinfo=UTC)
    assert inside
    assert inside == {key: row for key, row in everything.items() if row.bucket_start == minute}


def test_recording_twice_changes_nothing(
    session: SparkSession, queen_dsn: str, deliver: psycopg.Connection[Any]
) -> None:
    info = ConnectionInfo(queen_dsn)
    rows = compute(session, info, WINDOW, "orders")
    stored = (
        "SELECT queue_name, consumer_group, bucket_start, bucket_seconds, pushed, completed, failed,"
        " dead_lettered, latency_p50_ms, latency_p95_ms, latency_p99_ms, processing_p50_ms,"
        " processing_p95_ms, processing_p99_ms"
        " FROM queen.queue_metrics ORDER BY 1, 2, 3"
    )
    assert record(info, WINDOW, rows) == len(rows)
    first = deliver.execute(stored).fetchall()
    assert record(info, WINDOW, rows) == len(rows)
    assert deliver.execute(stored).fetchall() == first
    assert {row[0] for row in first} == {"orders"}
    assert len(first) == len(rows)


def test_what_retention_removed_does_not_lower_earlier_figures(
    session: SparkSession, queen_dsn: str, deliver: psycopg.Connection[Any]
) -> None:
    info = ConnectionInfo(queen_dsn)
    record(info, WINDOW, compute(session, info, WINDOW))
    deliver.execute(
        "SELECT queen.delete_prefix(q, l, 600, 'retention') FROM queen.lanes AS l"
        " INNER JOIN queen.queues AS q ON q.id = l.queue_id WHERE l.name = 'a'"
    )
    record(info, WINDOW, compute(session, info, WINDOW))
    total = deliver.execute("SELECT sum(pushed)::int FROM queen.queue_metrics").fetchone()
    assert total == (1577,)


def test_nothing_to_record(session: SparkSession, queen_dsn: str) -> None:
    info = ConnectionInfo(queen_dsn)
    assert compute(session, info, WINDOW) == []
    assert record(info, WINDOW, []) == 0


def test_the_next_run_reads_only_what_is_new(
    session: SparkSession, queen_dsn: str, deliver: psycopg.Connection[Any]
) -> None:
    info = ConnectionInfo(queen_dsn)
    assert next_window(info, 60, None) == WINDOW
    everything = compute(session, info, WINDOW)
    record(info, WINDOW, everything)
    window = next_window(info, 60, None)
    newest = max(row.bucket_start for row in everything)
    assert window.first == newest - timedelta(minutes=1)
    said: list[str] = []
    again = compute(session, info, window, say=said.append)
    assert by_key(again) == {k: r for k, r in by_key(everything).items() if k[2] >= window.first}
    read = [int(line.split()[0]) for line in said]
    held = deliver.execute("SELECT (SELECT count(*) FROM queen.deliveries), count(*) FROM queen.message_log")
    assert [part < whole for part, whole in zip(read, held.fetchone() or (), strict=True)] == [True, True]
