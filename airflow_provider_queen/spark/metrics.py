"""Throughput, latency and processing time per queue, consumer group and time bucket.

The functions on DataFrames are pure; :func:`compute` reads, :func:`record` writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from airflow_provider_queen.spark.connection import ConnectionInfo, call
from airflow_provider_queen.spark.schemas import select

#: The consumer group of the rows that count pushes: no consumer has taken part in them.
PRODUCERS = ""
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
RECORD_ROWS = 5_000

MESSAGE_COLUMNS = ("lane_id", "seq", "queue_name", "created_at")
DELIVERY_COLUMNS = (
    "queue_name",
    "consumer_group",
    "lane_id",
    "first_seq",
    "last_seq",
    "completed",
    "failed",
    "rejected",
    "popped_at",
    "ended_at",
)
KEY = ("queue_name", "consumer_group", "bucket_start")


@dataclass(frozen=True)
class Window:
    """Which buckets to compute; ``since`` and ``until`` widen to whole ones, as half of one is no figure."""

    bucket_seconds: int = 60
    since: datetime | None = None
    until: datetime | None = None

    @property
    def first(self) -> datetime | None:
        """The start of the first bucket."""
        if self.since is None:
            return None
        seconds = int(self.since.timestamp() // self.bucket_seconds) * self.bucket_seconds
        return datetime.fromtimestamp(seconds, UTC)

    def contains(self, moment: Column) -> Column:
        bucket = bucket_start(moment, self.bucket_seconds)
        inside = F.lit(True)
        if self.first is not None:
            # The comparison of the column itself is one that Spark can hand down to the database.
            inside = inside & (moment >= F.lit(self.first))
        if self.until is not None:
            inside = inside & (bucket < F.lit(self.until.timestamp()))
        return inside


@dataclass(frozen=True)
class BucketMetrics:
    """One row of ``queen.queue_metrics``, in the order of the arguments of ``queen.record_metrics``."""

    queue_name: str
    consumer_group: str
    bucket_start: datetime
    pushed: int
    completed: int
    failed: int
    dead_lettered: int
    latency_p50_ms: float | None
    latency_p95_ms: float | None
    latency_p99_ms: float | None
    processing_p50_ms: float | None
    processing_p95_ms: float | None
    processing_p99_ms: float | None


def bucket_start(moment: Column, bucket_seconds: int) -> Column:
    """Epoch seconds of the bucket: whole numbers know no time zone."""
    seconds = F.unix_seconds(moment)
    return seconds - seconds % F.lit(bucket_seconds)


def milliseconds(start: str, end: str) -> Column:
    """The time between two moments; timestamps are exact to the microsecond."""
    return (F.unix_micros(F.col(end)) - F.unix_micros(F.col(start))) / F.lit(1000.0)


def percentiles(prefix: str, value: str) -> list[Column]:
    """Exact, interpolated percentiles, as PostgreSQL's ``percentile_cont`` and numpy's default give them."""
    return [F.percentile(value, share).alias(f"{prefix}_{name}_ms") for name, share in PERCENTILES.items()]


def pushed(messages: DataFrame, window: Window) -> DataFrame:
    """Messages pushed, per queue and bucket."""
    return (
        messages.where(window.contains(F.col("created_at")))
        .groupBy(
            "queue_name",
            F.lit(PRODUCERS).alias("consumer_group"),
            bucket_start(F.col("created_at"), window.bucket_seconds).alias("bucket_start"),
        )
        .agg(F.count("*").alias("pushed"))
    )


def ended(deliveries: DataFrame, window: Window) -> DataFrame:
    """The deliveries that ended inside the window, with their bucket."""
    return deliveries.where(window.contains(F.col("ended_at"))).withColumn(
        "bucket_start", bucket_start(F.col("ended_at"), window.bucket_seconds)
    )


def settled(deliveries: DataFrame, window: Window) -> DataFrame:
    """Outcomes and processing time (pop to settlement, per delivery), per queue, group and bucket.

    A lease that only expired or was only given back processed nothing: it does not count as processing time.
    """
    settlements = F.col("completed") + F.col("failed") + F.col("rejected")
    return (
        ended(deliveries, window)
        .withColumn("processing_ms", F.when(settlements > 0, milliseconds("popped_at", "ended_at")))
        .groupBy(*KEY)
        .agg(
            F.sum("completed").alias("completed"),
            F.sum("failed").alias("failed"),
            F.sum("rejected").alias("dead_lettered"),
            *percentiles("processing", "processing_ms"),
        )
    )


def completed_messages(deliveries: DataFrame) -> DataFrame:
    """One row per completed message of a delivery.

    A delivery says how many of its messages completed, not which. Where all did, these are all; where only
    some did, that many are taken at even distances over the batch. The seqs are listed, because an equality
    join is linear where a range join would compare each delivery of a partition with each of its messages.
    """
    batch_size = F.col("last_seq") - F.col("first_seq") + F.lit(1)
    offset = F.col("seq") - F.col("first_seq")

    def completed_before(position: Column) -> Column:
        return F.floor(position * F.col("completed") / batch_size)

    return (
        deliveries.where(F.col("completed") > 0)
        .withColumn("seq", F.explode(F.sequence("first_seq", "last_seq")))
        .where(completed_before(offset + F.lit(1)) > completed_before(offset))
    )


def latency(messages: DataFrame, deliveries: DataFrame, window: Window) -> DataFrame:
    """End-to-end latency (push to settlement) of completed messages, per queue, group and bucket."""
    return (
        completed_messages(ended(deliveries, window))
        .join(messages.select("lane_id", "seq", "created_at"), on=["lane_id", "seq"], how="inner")
        .withColumn("latency_ms", milliseconds("created_at", "ended_at"))
        .groupBy(*KEY)
        .agg(*percentiles("latency", "latency_ms"))
    )


def bucket_metrics(messages: DataFrame, deliveries: DataFrame, window: Window) -> DataFrame:
    """All figures, one row per queue, group and bucket in which something happened."""
    key = list(KEY)
    joined = (
        pushed(messages, window)
        .join(settled(deliveries, window), on=key, how="full")
        .join(latency(messages, deliveries, window), on=key, how="left")
    )
    counts = [
        F.coalesce(name, F.lit(0)).alias(name) for name in ("pushed", "completed", "failed", "dead_lettered")
    ]
    times = [f"{kind}_{name}_ms" for kind in ("latency", "processing") for name in PERCENTILES]
    return joined.select(*key, *counts, *times).orderBy(*key)


def read(spark: SparkSession, table: str, columns: Sequence[str], queue_name: str | None) -> DataFrame:
    """Read only the columns that the figures need; the payload stays in the database."""
    reader = spark.read.format("queen").option("table", table).schema(select(table, columns))
    if queue_name is not None:
        reader = reader.option("queue_name", queue_name)
    parallelism = max(2, spark.sparkContext.defaultParallelism)
    return reader.option("numSlices", parallelism).load()


def first_needed(connection: ConnectionInfo, window: Window, deliveries: DataFrame) -> datetime | None:
    """From when on messages must be read: those pushed inside the window, and those delivered inside it."""
    if window.first is None:
        return None
    firsts = deliveries.groupBy("lane_id").agg(F.min("first_seq").alias("seq")).collect()
    with connection.connect() as database:
        lanes, seqs = [row["lane_id"] for row in firsts], [row["seq"] for row in firsts]
        oldest: datetime | None = call(database, "oldest_created", ["created_at"], lanes, seqs)[0][0]
    return window.first if oldest is None else min(window.first, oldest)


def next_window(connection: ConnectionInfo, bucket_seconds: int, queue_name: str | None) -> Window:
    """What an earlier run has not seen, and a little of what it has; everything where there was none."""
    with connection.connect() as database:
        since = call(database, "metrics_from", ["computed_from"], bucket_seconds, queue_name)[0][0]
    return Window(bucket_seconds, since)


def compute(
    spark: SparkSession,
    connection: ConnectionInfo,
    window: Window,
    queue_name: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[BucketMetrics]:
    """Read the tables and return the figures; they are few, however many messages stand behind them.

    Deliveries are read before messages: whatever had been delivered by then had been pushed before, so that
    no delivery misses its messages.
    """
    deliveries = read(spark, "deliveries", DELIVERY_COLUMNS, queue_name)
    deliveries = deliveries.where(window.contains(F.col("ended_at"))).persist(StorageLevel.MEMORY_AND_DISK)
    messages = read(spark, "messages", MESSAGE_COLUMNS, queue_name)
    try:
        say(f"{deliveries.count()} deliveries read")
        oldest = first_needed(connection, window, deliveries)
        if oldest is not None:
            messages = messages.where(F.col("created_at") >= F.lit(oldest))
        messages = messages.persist(StorageLevel.MEMORY_AND_DISK)
        say(f"{messages.count()} messages read")
        rows = bucket_metrics(messages, deliveries, window).collect()
    finally:
        messages.unpersist()
        deliveries.unpersist()
    return [
        BucketMetrics(**{**row.asDict(), "bucket_start": datetime.fromtimestamp(row["bucket_start"], UTC)})
        for row in rows
    ]


def record(connection: ConnectionInfo, window: Window, rows: Sequence[BucketMetrics]) -> int:
    """Store the figures in ``queen.queue_metrics``, all or none; return how many rows were new or renewed."""
    names = [field.name for field in fields(BucketMetrics)]
    written = 0
    with connection.connect() as database, database.transaction():
        for start in range(0, len(rows), RECORD_ROWS):
            portion = rows[start : start + RECORD_ROWS]
            columns = [[getattr(row, name) for row in portion] for name in names]
            written += call(database, "record_metrics", ["written"], window.bucket_seconds, *columns)[0][0]
    return written
