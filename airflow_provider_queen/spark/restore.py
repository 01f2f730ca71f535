"""Archived messages back into a queue, in their old order, with their transaction and trace ids.

They become new messages: with a new seq and the time of the restoration; ``requeued_from`` names what they
were. Running it again restores nothing twice, while what was restored is retained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from airflow_provider_queen.exceptions import InvalidOptionError
from airflow_provider_queen.spark.archive import Archive, ArchivedFile, folder_name
from airflow_provider_queen.spark.connection import ConnectionInfo
from airflow_provider_queen.spark.writers import Pushed, QueenWriter

JOB = "queen-restore"
BATCH_ROWS = 10_000


@dataclass(frozen=True)
class Selection:
    """Which archived messages, and the queue they go to."""

    queue_name: str
    target: str
    since: datetime | None = None
    until: datetime | None = None

    def files(self, archive: Archive) -> list[ArchivedFile]:
        """The archive's files of the queue, without the days that are not asked for."""
        folder = f"queue={folder_name(self.queue_name)}/"
        named = [file for manifest in archive.manifests() for file in manifest.files]
        return [file for file in named if file.path.startswith(folder) and self._has_day(file)]

    def _has_day(self, file: ArchivedFile) -> bool:
        day = file.path.split("/day=")[1][:10]
        before_end = self.until is None or day <= _utc_day(self.until)
        return before_end and (self.since is None or day >= _utc_day(self.since))


def restore_here(connection: ConnectionInfo, archive: Archive, chosen: Selection) -> tuple[int, int]:
    """Push the selection from this process; return how many messages were chosen and how many were new."""
    table = read_here(archive, chosen)
    pushed = QueenWriter(connection, chosen.target, JOB).write(_batches(table))
    assert isinstance(pushed, Pushed)  # noqa: S101
    return table.num_rows, pushed.queued


def read_here(archive: Archive, chosen: Selection) -> pa.Table:
    """The chosen messages, each lane in seq order."""
    filesystem, root = archive.open()
    parts = [
        pq.ParquetFile(f"{root}/{file.path}", filesystem=filesystem).read() for file in chosen.files(archive)
    ]
    if not parts:
        return pa.table({"payload": pa.array([], pa.string())})
    table = pa.concat_tables(parts)
    if chosen.since is not None:
        table = table.filter(pc.greater_equal(table["created_at"], pa.scalar(chosen.since)))
    if chosen.until is not None:
        table = table.filter(pc.less(table["created_at"], pa.scalar(chosen.until)))
    _refuse_sealed(chosen, bool(table.num_rows) and pc.any(table["is_encrypted"]).as_py())
    position = table.schema.get_field_index("requeued_from")
    table = table.set_column(position, "requeued_from", table["id"])
    return table.sort_by([("lane_id", "ascending"), ("seq", "ascending")])


def read_on_spark(spark: SparkSession, archive: Archive, chosen: Selection) -> DataFrame:
    """The chosen messages, each lane in seq order inside one Spark partition."""
    frame = spark.read.parquet(*archive.paths(chosen.files(archive)))
    if chosen.since is not None:
        frame = frame.where(F.col("created_at") >= F.lit(chosen.since))
    if chosen.until is not None:
        frame = frame.where(F.col("created_at") < F.lit(chosen.until))
    _refuse_sealed(chosen, chosen.target != chosen.queue_name and not frame.where("is_encrypted").isEmpty())
    return (
        frame.withColumn("requeued_from", F.col("id"))
        .repartition(max(2, spark.sparkContext.defaultParallelism), "lane_id")
        .sortWithinPartitions("lane_id", "seq")
    )


def restore_on_spark(spark: SparkSession, archive: Archive, chosen: Selection) -> int:
    """Push the selection by Spark's tasks; return how many messages were chosen."""
    frame = read_on_spark(spark, archive, chosen)
    frame.write.format("queen").mode("append").option("queue_name", chosen.target).save()
    return frame.count()


def _refuse_sealed(chosen: Selection, any_encrypted: bool) -> None:
    if any_encrypted and chosen.target != chosen.queue_name:
        raise InvalidOptionError(
            f"messages of {chosen.queue_name!r} are encrypted for that queue alone and cannot be read in"
            f" {chosen.target!r}: restore them to their own queue"
        )


def _batches(table: pa.Table) -> Iterator[pa.RecordBatch]:
    return iter(table.to_batches(max_chunksize=BATCH_ROWS))


def _utc_day(moment: datetime) -> str:
    return f"{datetime.fromtimestamp(moment.timestamp(), UTC):%Y-%m-%d}"


def messages_in(files: Sequence[ArchivedFile]) -> int:
    """How many messages files hold."""
    return sum(file.messages for file in files)
