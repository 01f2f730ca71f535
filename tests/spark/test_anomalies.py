"""What counts as an anomaly, and that it is stored once an hour."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from airflow_provider_queen.spark import ConnectionInfo, anomalies
from airflow_provider_queen.spark.anomalies import LastChance, Standing
from airflow_provider_queen.spark.figures import (
    PRODUCERS,
    BucketMetrics,
    Window,
    compute_here,
    current_lags,
    next_window,
    record,
    with_lags,
)
from tests.spark.apps import BOTH_SERVERS

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def bucket(minute: int, group: str = PRODUCERS, **figures: Any) -> BucketMetrics:
    return BucketMetrics("orders", group, NOW + timedelta(minutes=minute), **figures)


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
    assert kinds(anomalies.failing([bucket(0, "g", completed=5, failed=12, rejected=3)])) == [
        ("poison_loop", None, 0.75)
    ]
    assert kinds(anomalies.failing([bucket(0, "g", completed=15, failed=15)])) == []


def test_processing_that_takes_many_times_as_long() -> None:
    usual = [bucket(minute, "g", processing_p50_ms=900.0, processing_p99_ms=2000.0) for minute in range(3)]
    slow = bucket(3, "g", processing_p50_ms=1000.0, processing_p99_ms=15_000.0)
    assert kinds(anomalies.slow_processing([*usual, slow])) == [("long_processing", None, 15_000.0)]
    assert kinds(anomalies.slow_processing(usual)) == []


def test_a_group_that_acknowledges_at_once_all_of_a_sudden() -> None:
    usual = [bucket(minute, "g", completed=20, processing_p50_ms=200.0) for minute in range(3)]
    flash = bucket(3, "g", completed=20, processing_p50_ms=1.5)
    (found,) = anomalies.flashes([*usual, flash])
    assert (found.kind, found.severity, found.value) == ("flash_message", "warning", 20)
    assert "within 1.5 ms" in found.reason
    # One that is always as quick, or that is quick for a few messages, or not that quick, is none.
    assert kinds(anomalies.flashes([bucket(0, "g", completed=20, processing_p50_ms=2.0), flash])) == []
    assert kinds(anomalies.flashes([*usual, replace(flash, completed=9)])) == []
    assert kinds(anomalies.flashes([*usual, replace(flash, processing_p50_ms=6.0)])) == []
    assert kinds(anomalies.flashes([flash])) == []


def test_the_next_failure_would_be_the_last() -> None:
    (found,) = anomalies.near_dead_letters([LastChance("orders", "a", "g", 2, 3)])
    assert (found.kind, found.severity, found.partition_name, found.value) == (
        "near_dead_letter",
        "warning",
        "a",
        2,
    )
    assert "failed 3 times for g" in found.reason


@pytest.mark.parametrize(("size", "found"), [(501, [("large_payload", None, 501)]), (500, [])])
def test_a_payload_near_the_limit(size: int, found: list[Any]) -> None:
    rows = [bucket(0, largest_payload_bytes=size), bucket(1, largest_payload_bytes=10)]
    assert kinds(anomalies.large_payloads(rows, {"orders": 1000})) == found
    # A queue that was deleted meanwhile has no limit any more.
    assert kinds(anomalies.large_payloads(rows, {})) == []


@BOTH_SERVERS
def test_messages_at_their_last_attempt_are_found(queen_dsn: str, database: psycopg.Connection[Any]) -> None:
    """The default retry_limit is 3: after the third failure there is one delivery left, after it none."""
    info = ConnectionInfo(queen_dsn)
    database.execute("SELECT queen.configure_queue('mails', '{\"retry_delay\": 0}')")
    seen = []
    for _ in range(4):
        database.execute("SELECT queen.nack(lease_id) FROM queen.pop('mails', NULL, 'g', 2) LIMIT 1")
        found = [a for a in anomalies.find(info, [], None) if a.kind == "near_dead_letter"]
        seen.append(kinds(found))
    assert seen == [[], [], [("near_dead_letter", "Default", 2)], []]
    assert database.execute("SELECT count(*) FROM queen.dead_letter_queue").fetchone() == (2,)


@BOTH_SERVERS
def test_large_payloads_are_found_in_new_figures_only(
    queen_dsn: str, database: psycopg.Connection[Any]
) -> None:
    info = ConnectionInfo(queen_dsn)
    database.execute("SELECT queen.configure_queue('mails', '{\"max_message_bytes\": 1000}')")
    database.execute("SELECT queen.push('mails', ARRAY[to_json(repeat('x', 598))::text])")
    first = compute_here(info, Window(), "mails")
    assert kinds(anomalies.find(info, first, "mails")) == [("large_payload", None, 600)]
    record(info, Window(), with_lags(first, current_lags(info, 60)))
    database.execute(
        "UPDATE queen.queue_metrics SET bucket_start = bucket_start + interval '10 minutes'"
        " WHERE bucket_start = (SELECT max(bucket_start) FROM queen.queue_metrics)"
    )
    again = compute_here(info, next_window(info, 60, "mails"), "mails")
    assert kinds(anomalies.find(info, again, "mails")) == []


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
