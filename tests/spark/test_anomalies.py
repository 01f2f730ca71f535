"""What counts as an anomaly, and that it is stored once an hour."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from airflow_provider_queen.spark import ConnectionInfo, anomalies
from airflow_provider_queen.spark.anomalies import Standing
from airflow_provider_queen.spark.metrics import PRODUCERS, BucketMetrics
from tests.spark.apps import BOTH_SERVERS

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def bucket(minute: int, group: str = PRODUCERS, **figures: Any) -> BucketMetrics:
    counts = {name: figures.get(name, 0) for name in ("pushed", "completed", "failed", "dead_lettered")}
    times = {
        f"{kind}_{share}_ms": figures.get(f"{kind}_{share}_ms")
        for kind in ("latency", "processing")
        for share in ("p50", "p95", "p99")
    }
    return BucketMetrics("orders", group, NOW + timedelta(minutes=minute), **counts, **times)


def standing(partition: str, pending: int, minutes_ago: float | None) -> Standing:
    seen = None if minutes_ago is None else NOW - timedelta(minutes=minutes_ago)
    return Standing("orders", partition, "g", pending, seen, None)


def kinds(found: Any) -> list[tuple[str, str | None, float]]:
    return [(anomaly.kind, anomaly.partition_name, anomaly.value) for anomaly in found]


def test_a_partition_is_stuck_where_its_group_works_elsewhere() -> None:
    standings = [standing("a", 0, 1), standing("b", 7, 15), standing("c", 0, 15), standing("d", 3, None)]
    assert kinds(anomalies.stuck_partitions(standings, NOW)) == [("stuck_partition", "b", 7)]
    assert kinds(anomalies.stuck_partitions(standings[1:], NOW)) == []


def test_a_group_is_silent_where_all_of_it_is() -> None:
    assert kinds(anomalies.silent_consumers([standing("a", 2, 31), standing("b", 7, 45)], NOW)) == [
        ("consumer_silent", None, 9)
    ]
    assert kinds(anomalies.silent_consumers([standing("a", 2, 31), standing("b", 7, 5)], NOW)) == []
    assert kinds(anomalies.silent_consumers([standing("a", 0, 31)], NOW)) == []


@pytest.mark.parametrize(("newest", "found"), [(600, [("burst", None, 600)]), (500, []), (99, [])])
def test_bursts(newest: int, found: list[Any]) -> None:
    usual = 100 if newest > 99 else 1
    rows = [bucket(minute, pushed=usual) for minute in range(4)] + [bucket(4, pushed=newest)]
    assert kinds(anomalies.bursts(rows)) == found


def test_a_lag_that_grows_bucket_by_bucket() -> None:
    rows = [bucket(minute, pushed=10) for minute in range(4)]
    behind = [bucket(minute, "g", completed=8) for minute in range(4)]
    assert kinds(anomalies.growing_lags(rows + behind)) == [("growing_lag", None, 6)]
    caught_up = [*behind[:3], bucket(3, "g", completed=10)]
    assert kinds(anomalies.growing_lags(rows + caught_up)) == []


def test_most_settlements_fail() -> None:
    assert kinds(anomalies.failing([bucket(0, "g", completed=5, failed=12, dead_lettered=3)])) == [
        ("poison_loop", None, 0.75)
    ]
    assert kinds(anomalies.failing([bucket(0, "g", completed=15, failed=15)])) == []


def test_processing_that_takes_many_times_as_long() -> None:
    usual = [bucket(minute, "g", processing_p50_ms=900.0, processing_p99_ms=2000.0) for minute in range(3)]
    slow = bucket(3, "g", processing_p50_ms=1000.0, processing_p99_ms=15_000.0)
    assert kinds(anomalies.slow_processing([*usual, slow])) == [("long_processing", None, 15_000.0)]
    assert kinds(anomalies.slow_processing(usual)) == []


@BOTH_SERVERS
def test_found_in_a_database_and_stored_once_an_hour(
    queen_dsn: str, database: psycopg.Connection[Any]
) -> None:
    info = ConnectionInfo(queen_dsn)
    database.execute("SELECT queen.pop('mails', NULL, 'g', 5, auto_ack => TRUE)")
    assert anomalies.find(info, [], None) == []
    database.execute("UPDATE queen.consumer_states SET settled_at = settled_at - interval '1 hour'")
    database.execute("UPDATE queen.consumer_states SET popped_at = popped_at - interval '1 hour'")
    found = anomalies.find(info, [], "mails")
    assert kinds(found) == [("consumer_silent", None, 72)]
    assert anomalies.record_anomalies(info, found) == 1
    assert anomalies.record_anomalies(info, found) == 0
    database.execute("UPDATE queen.anomalies SET detected_at = detected_at - interval '2 hours'")
    assert anomalies.record_anomalies(info, found) == 1
