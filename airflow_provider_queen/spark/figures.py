"""Figures per queue, consumer group and time bucket: what they are, where they go, and how SQL computes them.

:mod:`airflow_provider_queen.spark.metrics` computes the same on Spark.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from psycopg.types.json import Json

from airflow_provider_queen.spark.connection import ConnectionInfo, call

#: The consumer group of the rows about a queue itself: no consumer has taken part in what producers push.
PRODUCERS = ""
RECORD_ROWS = 5_000

Key = tuple[str, str, datetime]


@dataclass(frozen=True)
class Window:
    """Which buckets to compute; ``since`` and ``until`` widen to whole ones, as half of one is no figure."""

    bucket_seconds: int = 60
    since: datetime | None = None
    until: datetime | None = None

    @property
    def first(self) -> datetime | None:
        """The start of the first bucket."""
        return None if self.since is None else self._bucket(self.since)

    @property
    def end(self) -> datetime | None:
        """The end of the last bucket."""
        if self.until is None:
            return None
        start = self._bucket(self.until)
        return start if start == self.until else start + timedelta(seconds=self.bucket_seconds)

    def _bucket(self, moment: datetime) -> datetime:
        seconds = int(moment.timestamp() // self.bucket_seconds) * self.bucket_seconds
        return datetime.fromtimestamp(seconds, UTC)


@dataclass(frozen=True)
class BucketMetrics:
    """One row of ``queen.queue_metrics``, by its column names; docs/spark.md says what each is."""

    queue_name: str
    consumer_group: str
    bucket_start: datetime
    pushed: int = 0
    completed: int = 0
    failed: int = 0
    dead_lettered: int = 0
    latency_p50_ms: float | None = None
    latency_p95_ms: float | None = None
    latency_p99_ms: float | None = None
    processing_p50_ms: float | None = None
    processing_p95_ms: float | None = None
    processing_p99_ms: float | None = None
    partitions: int = 0
    skew: float | None = None
    payload_bytes: int = 0
    largest_payload_bytes: int = 0
    deliveries: int = 0
    redeliveries: int = 0
    rejected: int = 0
    released: int = 0
    expired: int = 0
    busy_seconds: float = 0.0
    pending: int | None = None
    pending_at: datetime | None = None
    pending_slope: float | None = None
    oldest_age_seconds: float | None = None

    @property
    def key(self) -> Key:
        return self.queue_name, self.consumer_group, self.bucket_start


class Lag(NamedTuple):
    """What waits for a group now, and by how many messages a second that grows."""

    queue_name: str
    consumer_group: str
    bucket_start: datetime
    pending: int
    pending_at: datetime
    pending_slope: float | None
    oldest_age_seconds: float | None


#: What a window's messages and deliveries say; the rest is measured at this moment.
COMPUTED = tuple(field.name for field in fields(BucketMetrics) if field.name not in Lag._fields[3:])


def next_window(connection: ConnectionInfo, bucket_seconds: int, queue_name: str | None) -> Window:
    """What an earlier run has not seen, and a little of what it has; everything where there was none."""
    with connection.connect() as database:
        since = call(database, "metrics_from", ["computed_from"], bucket_seconds, queue_name)[0][0]
    return Window(bucket_seconds, since)


def work_size(connection: ConnectionInfo, window: Window, queue_name: str | None) -> int:
    """How many messages the figures of a window are about."""
    with connection.connect() as database:
        arguments = (window.first, window.end, queue_name)
        messages: int = call(database, "metrics_size", ["messages"], *arguments)[0][0]
    return messages


def compute_here(
    connection: ConnectionInfo, window: Window, queue_name: str | None = None
) -> list[BucketMetrics]:
    """The figures by one SQL statement."""
    with connection.connect() as database:
        arguments = (window.bucket_seconds, window.first, window.end, queue_name)
        rows = call(database, "compute_metrics", COMPUTED, *arguments)
    return sorted((BucketMetrics(*row) for row in rows), key=lambda row: row.key)


def current_lags(connection: ConnectionInfo, bucket_seconds: int, queue_name: str | None = None) -> list[Lag]:
    """What waits at this moment, per queue and group."""
    with connection.connect() as database:
        return [Lag(*row) for row in call(database, "current_lags", Lag._fields, bucket_seconds, queue_name)]


def with_lags(rows: Sequence[BucketMetrics], lags: Sequence[Lag]) -> list[BucketMetrics]:
    """The figures with each group's lag in the bucket of now, where something else happened in it or not."""
    keyed = {row.key: row for row in rows}
    for lag in lags:
        row = keyed.get(lag[:3]) or BucketMetrics(*lag[:3])
        keyed[row.key] = replace(row, **lag._asdict())
    return [keyed[key] for key in sorted(keyed)]


def as_columns(row: BucketMetrics, window: Window) -> dict[str, Any]:
    """A row of ``queen.queue_metrics``, but for what the table computes itself."""
    return {**asdict(row), "bucket_seconds": window.bucket_seconds}


def record(connection: ConnectionInfo, window: Window, rows: Sequence[BucketMetrics]) -> int:
    """Store the figures in ``queen.queue_metrics``, all or none; return how many rows were new or renewed."""
    written = 0
    with connection.connect() as database, database.transaction():
        for start in range(0, len(rows), RECORD_ROWS):
            portion = [as_columns(row, window) for row in rows[start : start + RECORD_ROWS]]
            argument = Json(portion, dumps=lambda value: json.dumps(value, default=str))
            written += call(database, "record_metrics", ["written"], argument)[0][0]
    return written
