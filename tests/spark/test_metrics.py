"""Figures against plain SQL and against numpy, on data that both can see."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import psycopg
import pytest
from pyspark.sql import SparkSession

from airflow_provider_queen.spark import ConnectionInfo
from airflow_provider_queen.spark.figures import (
    COMPUTED,
    PRODUCERS,
    BucketMetrics,
    Window,
    compute_here,
    current_lags,
    next_window,
    record,
    with_lags,
    work_size,
)
from airflow_provider_queen.spark.metrics import DELIVERY_COLUMNS, MESSAGE_COLUMNS, compute, latency
from airflow_provider_queen.spark.schemas import select
from tests.spark.apps import BOTH_SERVERS

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
    "SELECT queue_name, date_bin('60 s', created_at, 'epoch'), count(*), sum(octet_length(payload::text)),"
    " max(octet_length(payload::text)) FROM queen.messages GROUP BY 1, 2"
)
# What consumers did, a row per delivery; Python sums it up.
CONSUMED = """
SELECT
    queue_name, consumer_group, date_bin('60 s', ended_at, 'epoch'),
    partition_name, completed + failed + rejected, attempt, rejected, released, expired,
    extract(epoch FROM ended_at - popped_at)::float8
FROM queen.deliveries
"""

Key = tuple[str, str, datetime]


@pytest.fixture
def settled(deliver: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    """The same after some redeliveries, some leases given back, and some dead letters."""
    deliver.execute(
        "UPDATE queen.deliveries SET attempt = 2, released = expired, expired = 0 WHERE mod(id, 3) = 0"
    )
    deliver.execute(
        "INSERT INTO queen.dead_letter_queue ("
        "  queue_id, lane_id, seq, message_id, consumer_group, partition_name, priority, transaction_id,"
        "  payload, is_encrypted, reason, retry_count, original_created_at, failed_at)"
        " SELECT queue_id, lane_id, seq, id, CASE WHEN seq < 30 THEN 'audit' ELSE 'only-dead' END,"
        "  partition_name, priority, transaction_id, payload, FALSE, 'evicted', 0, created_at,"
        "  created_at + interval '1 minute'"
        " FROM queen.messages WHERE partition_name = 'a' AND mod(seq, 10) = 0 ORDER BY created_at"
    )
    return deliver


def by_key(rows: list[BucketMetrics]) -> dict[Key, BucketMetrics]:
    keyed = {(row.queue_name, row.consumer_group, row.bucket_start): row for row in rows}
    assert len(keyed) == len(rows)
    return keyed


def latencies(row: BucketMetrics) -> list[float | None]:
    return [row.latency_p50_ms, row.latency_p95_ms, row.latency_p99_ms]


@pytest.fixture
def figures(queen_dsn: str, settled: psycopg.Connection[Any]) -> dict[Key, BucketMetrics]:
    """As the database computes them: Spark agrees, says a test below."""
    return by_key(compute_here(ConnectionInfo(queen_dsn), WINDOW))


@BOTH_SERVERS
def test_figures_equal_plain_sql_and_numpy(
    figures: dict[Key, BucketMetrics], settled: psycopg.Connection[Any]
) -> None:
    pushed = {(row[0], PRODUCERS, row[1]): tuple(row[2:]) for row in settled.execute(PUSHED)}
    assert {
        key: (row.pushed, row.payload_bytes, row.largest_payload_bytes)
        for key, row in figures.items()
        if row.pushed
    } == pushed

    outcomes = settled.execute(SETTLED).fetchall()
    assert {key for key, row in figures.items() if row.deliveries} == {tuple(row[:3]) for row in outcomes}
    for *key, completed, failed, rejected, processing in outcomes:
        row = figures[tuple(key)]
        assert (row.completed, row.failed, row.rejected) == (completed, failed, rejected)
        assert [row.processing_p50_ms, row.processing_p95_ms, row.processing_p99_ms] == pytest.approx(
            processing
        )

    samples: dict[Key, list[float]] = {}
    for queue, group, bucket, ms in settled.execute(LATENCIES):
        samples.setdefault((queue, group, bucket), []).append(ms)
    for queue, group, bucket, expected, count in settled.execute(LATENCY_PERCENTILES):
        row = figures[queue, group, bucket]
        assert count == row.completed
        assert latencies(row) == pytest.approx(expected)
        assert latencies(row) == pytest.approx(
            list(np.percentile(samples[queue, group, bucket], [50, 95, 99]))
        )


def test_consumer_statistics_and_skew(
    figures: dict[Key, BucketMetrics], settled: psycopg.Connection[Any]
) -> None:
    rows: dict[Key, list[Any]] = {}
    for queue, group, bucket, *delivery in settled.execute(CONSUMED):
        rows.setdefault((queue, group, bucket), []).append(delivery)
    for key, deliveries in rows.items():
        row = figures[key]
        per_partition: dict[str, int] = {}
        for partition, count, *_ in deliveries:
            per_partition[partition] = per_partition.get(partition, 0) + count
        assert row.partitions == len(per_partition)
        mean = np.mean(list(per_partition.values()))
        assert row.skew == (pytest.approx(max(per_partition.values()) / mean) if mean else None)
        assert row.deliveries == len(deliveries)
        assert row.redeliveries == sum(delivery[2] > 1 for delivery in deliveries)
        assert (row.rejected, row.released, row.expired) == tuple(
            sum(delivery[at] for delivery in deliveries) for at in (3, 4, 5)
        )
        assert row.busy_seconds == pytest.approx(sum(delivery[6] for delivery in deliveries))
    assert any(row.skew and row.skew > 1 for row in figures.values() if row.pushed)


def test_dead_letters_count_whatever_made_them(figures: dict[Key, BucketMetrics]) -> None:
    counted: dict[str, int] = {}
    for row in figures.values():
        counted[row.consumer_group] = counted.get(row.consumer_group, 0) + row.dead_lettered
    assert {group: count for group, count in counted.items() if count} == {"audit": 2, "only-dead": 118}


TWO_MINUTES = Window(
    60, datetime(2026, 3, 1, 12, 1, 30, tzinfo=UTC), datetime(2026, 3, 1, 12, 2, 30, tzinfo=UTC)
)


@pytest.mark.parametrize(("window", "queue_name"), [(WINDOW, None), (TWO_MINUTES, "orders")])
def test_spark_agrees_with_sql(
    session: SparkSession,
    queen_dsn: str,
    settled: psycopg.Connection[Any],
    window: Window,
    queue_name: str | None,
) -> None:
    info = ConnectionInfo(queen_dsn)
    on_spark, here = compute(session, info, window, queue_name), compute_here(info, window, queue_name)
    assert [row.key for row in on_spark] == [row.key for row in here]
    for ours, theirs in zip(here, on_spark, strict=True):
        figures = [{name: getattr(row, name) for name in COMPUTED[3:]} for row in (ours, theirs)]
        assert figures[0] == pytest.approx(figures[1])


def test_listed_messages_are_not_broadcast(session: SparkSession) -> None:
    """Spark estimates as many of them as there are deliveries; of 5 million its memory was not enough."""
    messages = session.createDataFrame([], select("messages", MESSAGE_COLUMNS))
    deliveries = session.createDataFrame([], select("deliveries", DELIVERY_COLUMNS))
    plan = latency(messages, deliveries, WINDOW)._jdf.queryExecution().sparkPlan().toString()
    assert "SortMergeJoin" in plan
    assert "Broadcast" not in plan


@BOTH_SERVERS
def test_lag_now_and_its_slope(queen_dsn: str, database: psycopg.Connection[Any]) -> None:
    info = ConnectionInfo(queen_dsn)
    database.execute("SELECT queen.pop('mails', NULL, 'g', 5, auto_ack => TRUE)")
    first = {lag[:2]: lag for lag in current_lags(info, 60)}
    assert {key: lag.pending for key, lag in first.items()} == {
        ("mails", PRODUCERS): 72,
        ("mails", "g"): 72,
        ("orders", PRODUCERS): 1500,
    }
    assert {lag.pending_slope for lag in first.values()} == {None}
    assert (first["mails", "g"].oldest_age_seconds or 0) > 86_400

    rows = with_lags(compute_here(info, WINDOW), list(first.values()))
    row = by_key(rows)[first["mails", "g"][:3]]
    assert (row.completed, row.pending) == (5, 72)
    record(info, WINDOW, rows)
    database.execute("UPDATE queen.queue_metrics SET pending_at = pending_at - interval '50 s'")
    database.execute("SELECT queen.push('mails', array_fill('1'::text, ARRAY[100]))")
    second = {lag[:2]: lag for lag in current_lags(info, 60, "mails")}
    assert set(second) == {("mails", PRODUCERS), ("mails", "g")}
    lag = second["mails", "g"]
    seconds = (lag.pending_at - first["mails", "g"].pending_at).total_seconds() + 50
    assert lag.pending == 172
    assert lag.pending_slope == pytest.approx(100 / seconds)


def test_a_bucket_computed_again_keeps_its_lag(queen_dsn: str, deliver: psycopg.Connection[Any]) -> None:
    info = ConnectionInfo(queen_dsn)
    rows = compute_here(info, WINDOW, "mails")
    now = datetime.now(UTC)
    record(info, WINDOW, [replace(row, pending=7, pending_at=now, pending_slope=0.5) for row in rows])
    record(info, WINDOW, rows)
    stored = deliver.execute(
        "SELECT DISTINCT pending, pending_at, pending_slope FROM queen.queue_metrics"
    ).fetchall()
    assert stored == [(7, now, 0.5)]


def test_throughput_is_a_column(queen_dsn: str, deliver: psycopg.Connection[Any]) -> None:
    info = ConnectionInfo(queen_dsn)
    rows = by_key(compute_here(info, WINDOW))
    record(info, WINDOW, list(rows.values()))
    stored = "SELECT queue_name, consumer_group, bucket_start, throughput FROM queen.queue_metrics"
    for *key, throughput in deliver.execute(stored):
        row = rows[tuple(key)]
        assert throughput == (row.completed if row.consumer_group else row.pushed) / 60


def test_how_much_work_a_window_is(queen_dsn: str, deliver: psycopg.Connection[Any]) -> None:
    info = ConnectionInfo(queen_dsn)
    rows = compute_here(info, WINDOW)
    assert work_size(info, WINDOW, None) == sum(row.pushed + row.completed for row in rows)
    window = Window(60, until=datetime(2026, 3, 1, 12, 1, tzinfo=UTC))
    inside = compute_here(info, window, "orders")
    assert {row.bucket_start for row in inside} == {datetime(2026, 3, 1, 12, tzinfo=UTC)}
    assert work_size(info, window, "orders") == sum(row.pushed + row.completed for row in inside)


def test_a_window_gives_whole_buckets(queen_dsn: str, deliver: psycopg.Connection[Any]) -> None:
    info = ConnectionInfo(queen_dsn)
    everything = by_key(compute_here(info, WINDOW))
    since = datetime(2026, 3, 1, 12, 1, 30, tzinfo=UTC)
    until = datetime(2026, 3, 1, 12, 2, 0, tzinfo=UTC)
    inside = by_key(compute_here(info, Window(60, since, until)))
    minute = datetime(2026, 3, 1, 12, 1, tzinfo=UTC)
    assert inside
    assert inside == {key: row for key, row in everything.items() if row.bucket_start == minute}


def test_recording_twice_changes_nothing(queen_dsn: str, deliver: psycopg.Connection[Any]) -> None:
    info = ConnectionInfo(queen_dsn)
    rows = compute_here(info, WINDOW, "orders")
    stored = "SELECT to_jsonb(m) - 'computed_at' FROM queen.queue_metrics AS m ORDER BY 1"
    assert record(info, WINDOW, rows) == len(rows)
    first = deliver.execute(stored).fetchall()
    assert record(info, WINDOW, rows) == len(rows)
    assert deliver.execute(stored).fetchall() == first
    assert {row["queue_name"] for (row,) in first} == {"orders"}
    assert len(first) == len(rows)


def test_what_retention_removed_does_not_lower_earlier_figures(
    queen_dsn: str, deliver: psycopg.Connection[Any]
) -> None:
    info = ConnectionInfo(queen_dsn)
    record(info, WINDOW, compute_here(info, WINDOW))
    deliver.execute(
        "SELECT queen.delete_prefix(q, l, 600, 'retention') FROM queen.lanes AS l"
        " INNER JOIN queen.queues AS q ON q.id = l.queue_id WHERE l.name = 'a'"
    )
    record(info, WINDOW, compute_here(info, WINDOW))
    total = deliver.execute("SELECT sum(pushed)::int FROM queen.queue_metrics").fetchone()
    assert total == (1577,)


def test_nothing_to_record(session: SparkSession, queen_dsn: str) -> None:
    info = ConnectionInfo(queen_dsn)
    assert compute(session, info, WINDOW) == compute_here(info, WINDOW) == []
    assert record(info, WINDOW, []) == 0


def test_the_next_run_reads_only_what_is_new(
    session: SparkSession, queen_dsn: str, deliver: psycopg.Connection[Any]
) -> None:
    info = ConnectionInfo(queen_dsn)
    assert next_window(info, 60, "orders") == WINDOW
    everything = compute_here(info, WINDOW, "orders")
    record(info, WINDOW, everything)
    window = next_window(info, 60, "orders")
    newest = max(row.bucket_start for row in everything if row.consumer_group == PRODUCERS)
    assert window.first == newest - timedelta(minutes=1)
    said: list[str] = []
    again = compute(session, info, window, "orders", say=said.append)
    expected = {k: r for k, r in by_key(everything).items() if k[2] >= window.first}
    assert by_key(again).keys() == expected.keys()
    read = [int(line.split()[0]) for line in said]
    held = deliver.execute(
        "SELECT (SELECT count(*) FROM queen.deliveries WHERE queue_name = 'orders'), count(*)"
        " FROM queen.messages WHERE queue_name = 'orders'"
    )
    assert [part < whole for part, whole in zip(read, held.fetchone() or (), strict=True)] == [True, True]
    assert work_size(info, window, "orders") < work_size(info, WINDOW, "orders")


@BOTH_SERVERS
def test_a_run_for_one_queue_does_not_hide_the_others(
    queen_dsn: str, deliver: psycopg.Connection[Any]
) -> None:
    info = ConnectionInfo(queen_dsn)

    def run(queue_name: str | None) -> None:
        window = next_window(info, 60, queue_name)
        record(
            info,
            window,
            with_lags(compute_here(info, window, queue_name), current_lags(info, 60, queue_name)),
        )

    def starts(queue_name: str | None) -> datetime | None:
        return next_window(info, 60, queue_name).since

    assert starts(None) is None
    run(None)
    bucket = Window(60, datetime.now(UTC)).first
    assert bucket is not None
    assert starts(None) in (bucket - timedelta(minutes=2), bucket - timedelta(minutes=1))
    # As though the run had been an hour ago: since then only one of the queues was looked at.
    deliver.execute("UPDATE queen.queue_metrics SET bucket_start = bucket_start - interval '1 hour'")
    before = starts(None)
    run("mails")
    assert starts("mails") != before
    assert starts(None) == starts("orders") == before
    # A queue that no run has seen begins with its creation.
    run("orders")
    deliver.execute("SELECT queen.configure_queue('young')")
    created = deliver.execute(
        "UPDATE queen.queues SET created_at = now() - interval '30 minutes' WHERE name = 'young'"
        " RETURNING created_at"
    ).fetchone()
    assert starts("young") is None
    assert (starts(None),) == created
