"""What somebody should look at: found in the figures per bucket and in where the consumers stand now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import NamedTuple

from airflow_provider_queen.spark.connection import ConnectionInfo, call
from airflow_provider_queen.spark.figures import PRODUCERS, BucketMetrics

STUCK_AFTER = timedelta(minutes=10)
SILENT_AFTER = timedelta(minutes=30)
QUIET_SECONDS = 3600
BURST_FACTOR = 5
BURST_MESSAGES = 100
FAILING_SHARE = 0.5
FAILING_MESSAGES = 10
SLOW_FACTOR = 10
SLOW_MILLISECONDS = 10_000.0
FLASH_FACTOR = 10
FLASH_MILLISECONDS = 5.0
FLASH_MESSAGES = 10
LARGE_SHARE = 0.5
LAG_BUCKETS = 3

CONSUMER_COLUMNS = ("queue_name", "partition_name", "consumer_group", "pending", "popped_at", "settled_at")


@dataclass(frozen=True)
class Anomaly:
    """One row of ``queen.anomalies``, in the order of the arguments of ``queen.record_anomalies``."""

    queue_name: str
    partition_name: str | None
    consumer_group: str | None
    kind: str
    severity: str
    reason: str
    value: float


@dataclass(frozen=True)
class Standing:
    """Where a group stands in a partition."""

    queue_name: str
    partition_name: str
    consumer_group: str
    pending: int
    popped_at: datetime | None
    settled_at: datetime | None

    @property
    def last_seen(self) -> datetime | None:
        seen = [moment for moment in (self.popped_at, self.settled_at) if moment is not None]
        return max(seen, default=None)


class LastChance(NamedTuple):
    """Messages of a partition that the next failure of a group makes dead letters."""

    queue_name: str
    partition_name: str
    consumer_group: str
    messages: int
    failures: int


def find(connection: ConnectionInfo, rows: Sequence[BucketMetrics], queue_name: str | None) -> list[Anomaly]:
    """Everything that is worth a look at this moment: in new figures, and in where the consumers stand."""
    with connection.connect() as database:
        consumers = call(database, "scan_consumers", CONSUMER_COLUMNS, queue_name, None, None)
        last_chances = call(database, "near_dead_letters", LastChance._fields, queue_name)
        limits = dict(call(database, "list_queues", ["name", "max_message_bytes"], None))
    standings, now = [Standing(*row) for row in consumers], datetime.now(UTC)
    return [
        *stuck_partitions(standings, now),
        *silent_consumers(standings, now),
        *near_dead_letters(LastChance(*row) for row in last_chances),
        *bursts(rows),
        *large_payloads(rows, limits),
        *growing_lags(rows),
        *failing(rows),
        *slow_processing(rows),
        *flashes(rows),
    ]


def stuck_partitions(standings: Sequence[Standing], now: datetime) -> Iterator[Anomaly]:
    """Messages wait in a partition, and its group, which is at work elsewhere, has left it alone."""
    working = {
        (s.queue_name, s.consumer_group) for s in standings if s.last_seen and now - s.last_seen < STUCK_AFTER
    }
    for s in standings:
        busy_elsewhere = (s.queue_name, s.consumer_group) in working
        if s.pending and busy_elsewhere and s.last_seen and now - s.last_seen >= STUCK_AFTER:
            minutes = int((now - s.last_seen).total_seconds() // 60)
            reason = (
                f"{s.consumer_group} has not touched partition {s.partition_name!r} of {s.queue_name!r} for"
                f" {minutes} minutes while {s.pending} messages wait in it"
            )
            yield Anomaly(
                s.queue_name,
                s.partition_name,
                s.consumer_group,
                "stuck_partition",
                "critical",
                reason,
                s.pending,
            )


def silent_consumers(standings: Sequence[Standing], now: datetime) -> Iterator[Anomaly]:
    """A group that has read before reads nothing any more, although messages wait."""
    groups: dict[tuple[str, str], list[Standing]] = defaultdict(list)
    for s in standings:
        groups[s.queue_name, s.consumer_group].append(s)
    for (queue_name, group), members in groups.items():
        seen = [s.last_seen for s in members if s.last_seen is not None]
        pending = sum(s.pending for s in members)
        if pending and seen and now - max(seen) >= SILENT_AFTER:
            minutes = int((now - max(seen)).total_seconds() // 60)
            reason = (
                f"{group} has read nothing of {queue_name!r} for {minutes} minutes; {pending} messages wait"
            )
            yield Anomaly(queue_name, None, group, "consumer_silent", "critical", reason, pending)


def near_dead_letters(last_chances: Iterable[LastChance]) -> Iterator[Anomaly]:
    """Messages that have failed as often as they may: what is wrong with them can still be put right."""
    for chance in last_chances:
        queue_name, partition, group, messages, failures = chance
        reason = (
            f"{messages} messages in partition {partition!r} of {queue_name!r} have failed {failures} times"
            f" for {group}; the next failure makes them dead letters"
        )
        yield Anomaly(queue_name, partition, group, "near_dead_letter", "warning", reason, messages)


def bursts(rows: Sequence[BucketMetrics]) -> Iterator[Anomaly]:
    """The newest bucket of a queue took in many times what its buckets usually do."""
    for queue_name, buckets in _by_queue(rows).items():
        usual = median(row.pushed for row in buckets)
        newest = buckets[-1].pushed
        if newest >= BURST_MESSAGES and newest > BURST_FACTOR * usual:
            reason = f"{newest} messages were pushed to {queue_name!r} in a bucket that usually has {usual:g}"
            yield Anomaly(queue_name, None, None, "burst", "info", reason, newest)


def large_payloads(rows: Sequence[BucketMetrics], limits: Mapping[str, int]) -> Iterator[Anomaly]:
    """A message came near the size from which on its queue refuses messages."""
    for queue_name, buckets in _by_queue(rows).items():
        row = max(buckets, key=lambda row: row.largest_payload_bytes)
        size, limit = row.largest_payload_bytes, limits.get(queue_name)
        if limit is not None and size > LARGE_SHARE * limit:
            reason = (
                f"a message of {size} bytes was pushed to {queue_name!r} in the bucket of"
                f" {row.bucket_start:%Y-%m-%d %H:%M:%S} UTC; the queue takes at most {limit}"
            )
            yield Anomaly(queue_name, None, None, "large_payload", "warning", reason, size)


def growing_lags(rows: Sequence[BucketMetrics]) -> Iterator[Anomaly]:
    """In each of the last buckets more was pushed than a group has settled."""
    pushed = {(row.queue_name, row.bucket_start): row.pushed for row in rows if row.pushed}
    for (queue_name, group), buckets in _by_group(rows).items():
        newest = buckets[-LAG_BUCKETS:]
        growth = [
            pushed.get((queue_name, row.bucket_start), 0) - row.completed - row.dead_lettered
            for row in newest
        ]
        if len(growth) == LAG_BUCKETS and min(growth) > 0:
            reason = (
                f"{group} falls behind in {queue_name!r}: {sum(growth)} messages in {LAG_BUCKETS} buckets"
            )
            yield Anomaly(queue_name, None, group, "growing_lag", "warning", reason, sum(growth))


def failing(rows: Sequence[BucketMetrics]) -> Iterator[Anomaly]:
    """Most of what a group settles fails: a poison message that comes again, or a consumer that is broken."""
    for (queue_name, group), buckets in _by_group(rows).items():
        newest = buckets[-1]
        failed = newest.failed + newest.rejected
        total = failed + newest.completed
        if failed >= FAILING_MESSAGES and failed > FAILING_SHARE * total:
            reason = f"{failed} of {total} settlements of {group} in {queue_name!r} failed"
            yield Anomaly(queue_name, None, group, "poison_loop", "warning", reason, failed / total)


def slow_processing(rows: Sequence[BucketMetrics]) -> Iterator[Anomaly]:
    """The slowest deliveries of a group's newest bucket take many times what they usually do."""
    for (queue_name, group), buckets in _by_group(rows).items():
        times = [row.processing_p50_ms for row in buckets if row.processing_p50_ms is not None]
        slowest = buckets[-1].processing_p99_ms
        if slowest is None or not times:
            continue
        if slowest >= SLOW_MILLISECONDS and slowest > SLOW_FACTOR * median(times):
            reason = (
                f"{group} took {slowest / 1000:.0f} s for a delivery of {queue_name!r},"
                f" usually {median(times) / 1000:.1f} s"
            )
            yield Anomaly(queue_name, None, group, "long_processing", "warning", reason, slowest)


def flashes(rows: Sequence[BucketMetrics]) -> Iterator[Anomaly]:
    """A group that takes its time suddenly acknowledges at once: probably it processes nothing any more."""
    for (queue_name, group), buckets in _by_group(rows).items():
        times = [row.processing_p50_ms for row in buckets[:-1] if row.processing_p50_ms is not None]
        newest = buckets[-1]
        quickest = newest.processing_p50_ms
        if quickest is None or not times or newest.completed < FLASH_MESSAGES:
            continue
        if quickest < FLASH_MILLISECONDS and FLASH_FACTOR * quickest < median(times):
            reason = (
                f"{group} acknowledged {newest.completed} messages of {queue_name!r} within {quickest:.1f} ms"
                f" of their delivery, where it usually takes {median(times):.0f} ms"
            )
            yield Anomaly(queue_name, None, group, "flash_message", "warning", reason, newest.completed)


def _by_queue(rows: Sequence[BucketMetrics]) -> dict[str, list[BucketMetrics]]:
    found: dict[str, list[BucketMetrics]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.bucket_start):
        if row.consumer_group == PRODUCERS:
            found[row.queue_name].append(row)
    return found


def _by_group(rows: Sequence[BucketMetrics]) -> dict[tuple[str, str], list[BucketMetrics]]:
    found: dict[tuple[str, str], list[BucketMetrics]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.bucket_start):
        if row.consumer_group != PRODUCERS:
            found[row.queue_name, row.consumer_group].append(row)
    return found


def record_anomalies(connection: ConnectionInfo, anomalies: Sequence[Anomaly]) -> int:
    """Store them, but for those that were stored within the last hour; return how many were new."""
    rows = [replace(anomaly, value=float(anomaly.value)) for anomaly in anomalies]
    columns = [[getattr(row, field.name) for row in rows] for field in fields(Anomaly)]
    with connection.connect() as database:
        written: int = call(database, "record_anomalies", ["written"], QUIET_SECONDS, *columns)[0][0]
    return written
