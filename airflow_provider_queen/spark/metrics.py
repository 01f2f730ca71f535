"""The figures per bucket, on Spark: for more messages than SQL gets through before Spark has started.

The functions on DataFrames are pure; :func:`compute` reads. What the figures are: see :mod:`.figures`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from airflow_provider_queen.spark.connection import ConnectionInfo, call
from airflow_provider_queen.spark.figures import PRODUCERS, BucketMetrics, Window
from airflow_provider_queen.spark.schemas import select

PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

MESSAGE_COLUMNS = ("lane_id", "seq", "queue_name", "created_at", "payload_bytes")
DELIVERY_COLUMNS = (
    "queue_name",
    "consumer_group",
    "lane_id",
    "first_seq",
    "last_seq",
    "completed",
    "failed",
    "rejected",
    "released",
    "expired",
    "attempt",
    "popped_at",
    "ended_at",
)
DEAD_LETTER_COLUMNS = ("queue_name", "consumer_group", "failed_at")
KEY = ("queue_name", "consumer_group", "bucket_start")
#: A lane is a partition and a message priority; its id is ten times the partition's, and the priority.
PARTITION = "lane_id DIV 10"
COUNTS = (
    "pushed",
    "completed",
    "failed",
    "dead_lettered",
    "partitions",
    "payload_bytes",
    "largest_payload_bytes",
    "deliveries",
    "redeliveries",
    "rejected",
    "released",
    "expired",
)


def inside(window: Window, moment: Column) -> Column:
    """Whether a moment lies in the window: comparisons that Spark can hand down to the database."""
    condition = F.lit(True)
    if window.first is not None:
        condition = condition & (moment >= F.lit(window.first))
    if window.end is not None:
        condition = condition & (moment < F.lit(window.end))
    return condition


def bucket_start(moment: Column, bucket_seconds: int) -> Column:
    """Epoch seconds of the bucket: whole numbers know no time zone."""
    seconds = F.unix_seconds(moment)
    return seconds - seconds % F.lit(bucket_seconds)


def microseconds(start: str, end: str) -> Column:
    """The time between two moments, which is a whole number."""
    return F.unix_micros(F.col(end)) - F.unix_micros(F.col(start))


def percentiles(value: str) -> Column:
    """Exact, interpolated percentiles, as PostgreSQL's ``percentile_cont`` and numpy's default give them.

    All in one array: each aggregate of its own would keep all values once more.
    """
    return F.percentile(value, list(PERCENTILES.values())).alias(value)


def pushed(messages: DataFrame, window: Window) -> DataFrame:
    """Messages pushed, per queue and bucket: how many, over how many partitions, how evenly, how large."""
    bucket = bucket_start(F.col("created_at"), window.bucket_seconds)
    per_partition = (
        messages.where(inside(window, F.col("created_at")))
        .groupBy("queue_name", bucket.alias("bucket_start"), F.expr(PARTITION))
        .agg(
            F.count("*").alias("messages"),
            F.sum("payload_bytes").alias("bytes"),
            F.max("payload_bytes").alias("largest"),
        )
    )
    return per_partition.groupBy("queue_name", F.lit(PRODUCERS).alias("consumer_group"), "bucket_start").agg(
        F.sum("messages").alias("pushed"),
        F.count("*").alias("pushed_partitions"),
        (F.max("messages") / F.avg("messages")).alias("pushed_skew"),
        F.sum("bytes").alias("payload_bytes"),
        F.max("largest").alias("largest_payload_bytes"),
    )


def ended(deliveries: DataFrame, window: Window) -> DataFrame:
    """The deliveries that ended inside the window, with their bucket and how many messages they settled."""
    return (
        deliveries.where(inside(window, F.col("ended_at")))
        .withColumn("bucket_start", bucket_start(F.col("ended_at"), window.bucket_seconds))
        .withColumn("settled", F.col("completed") + F.col("failed") + F.col("rejected"))
    )


def settled(deliveries: DataFrame, window: Window) -> DataFrame:
    """Outcomes and processing time (pop to settlement, per delivery), per queue, group and bucket.

    A lease that only expired or was only given back processed nothing: it does not count as processing time.
    """
    took = microseconds("popped_at", "ended_at")
    return (
        ended(deliveries, window)
        .withColumn("processing_ms", F.when(F.col("settled") > 0, took / F.lit(1000.0)))
        .groupBy(*KEY)
        .agg(
            *[F.sum(name).alias(name) for name in ("completed", "failed", "rejected", "released", "expired")],
            F.count("*").alias("deliveries"),
            F.count_if(F.col("attempt") > 1).alias("redeliveries"),
            (F.sum(took) / F.lit(1_000_000.0)).alias("busy_seconds"),
            percentiles("processing_ms"),
        )
    )


def spread(deliveries: DataFrame, window: Window) -> DataFrame:
    """Over how many partitions a group's work went, and how evenly, per queue, group and bucket."""
    per_partition = (
        ended(deliveries, window).groupBy(*KEY, F.expr(PARTITION)).agg(F.sum("settled").alias("n"))
    )
    return per_partition.groupBy(*KEY).agg(
        F.count("*").alias("settled_partitions"),
        (F.max("n") / F.nullif(F.avg("n"), F.lit(0.0))).alias("settled_skew"),
    )


def buried(dead_letters: DataFrame, window: Window) -> DataFrame:
    """Messages that became dead letters, for whatever reason, per queue, group and bucket."""
    return (
        dead_letters.where(inside(window, F.col("failed_at")))
        .withColumn("bucket_start", bucket_start(F.col("failed_at"), window.bucket_seconds))
        .groupBy(*KEY)
        .agg(F.count("*").alias("dead_lettered"))
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
    """End-to-end latency (push to settlement) of completed messages, per queue, group and bucket.

    Spark takes the listed messages for as few as there are deliveries, and would broadcast them: the hint
    keeps it from that.
    """
    pushed_at = messages.select("lane_id", "seq", "created_at")
    return (
        completed_messages(ended(deliveries, window))
        .hint("merge")
        .join(pushed_at, on=["lane_id", "seq"], how="inner")
        .withColumn("latency_ms", microseconds("created_at", "ended_at") / F.lit(1000.0))
        .groupBy(*KEY)
        .agg(percentiles("latency_ms"))
    )


def bucket_metrics(
    messages: DataFrame, deliveries: DataFrame, dead_letters: DataFrame, window: Window
) -> DataFrame:
    """All figures, one row per queue, group and bucket in which something happened."""
    key = list(KEY)
    joined = (
        pushed(messages, window)
        .join(settled(deliveries, window), on=key, how="full")
        .join(buried(dead_letters, window), on=key, how="full")
        .join(spread(deliveries, window), on=key, how="left")
        .join(latency(messages, deliveries, window), on=key, how="left")
        .withColumn("partitions", F.coalesce("pushed_partitions", "settled_partitions"))
        .withColumn("skew", F.coalesce("pushed_skew", "settled_skew"))
    )
    counts = [F.coalesce(name, F.lit(0)).alias(name) for name in COUNTS]
    times = [
        F.get(f"{kind}_ms", F.lit(place)).alias(f"{kind}_{name}_ms")
        for kind in ("latency", "processing")
        for place, name in enumerate(PERCENTILES)
    ]
    busy = F.coalesce("busy_seconds", F.lit(0.0)).alias("busy_seconds")
    return joined.select(*key, *counts, *times, busy, "skew").orderBy(*key)


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
    deliveries = deliveries.where(inside(window, F.col("ended_at"))).persist(StorageLevel.MEMORY_AND_DISK)
    messages = read(spark, "messages", MESSAGE_COLUMNS, queue_name)
    dead_letters = read(spark, "dead_letters", DEAD_LETTER_COLUMNS, queue_name)
    try:
        say(f"{deliveries.count()} deliveries read")
        oldest = first_needed(connection, window, deliveries)
        if oldest is not None:
            messages = messages.where(F.col("created_at") >= F.lit(oldest))
        if window.end is not None:  # what was delivered before it was pushed before it, too
            messages = messages.where(F.col("created_at") < F.lit(window.end))
        messages = messages.persist(StorageLevel.MEMORY_AND_DISK)
        say(f"{messages.count()} messages read")
        rows = bucket_metrics(messages, deliveries, dead_letters, window).collect()
    finally:
        messages.unpersist()
        deliveries.unpersist()
    return [
        BucketMetrics(**{**row.asDict(), "bucket_start": datetime.fromtimestamp(row["bucket_start"], UTC)})
        for row in rows
    ]
