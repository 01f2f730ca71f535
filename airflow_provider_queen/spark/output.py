"""Figures and anomalies as Parquet files, for those who read them elsewhere than in the database.

    <location>/queue_metrics/<run>.parquet    the columns of queen.queue_metrics
    <location>/anomalies/<run>.parquet        the columns of queen.anomalies, but for its id

One file of each kind per run. A later run computes the last buckets of an earlier one again: of two rows with
the same queue, group and bucket, the one with the newer ``computed_at`` counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq

from airflow_provider_queen.spark.anomalies import Anomaly
from airflow_provider_queen.spark.archive import new_run_id
from airflow_provider_queen.spark.figures import BucketMetrics, Window, as_columns
from airflow_provider_queen.spark.folders import Folder

METRICS = "queue_metrics"
ANOMALIES = "anomalies"
MOMENT = pa.timestamp("us", tz="UTC")

METRICS_SCHEMA = pa.schema(
    [
        ("queue_name", pa.string()),
        ("consumer_group", pa.string()),
        ("bucket_start", MOMENT),
        ("bucket_seconds", pa.int32()),
        *[(name, pa.int64()) for name in ("pushed", "completed", "failed", "dead_lettered")],
        ("throughput", pa.float64()),
        *[(f"latency_{share}_ms", pa.float64()) for share in ("p50", "p95", "p99")],
        *[(f"processing_{share}_ms", pa.float64()) for share in ("p50", "p95", "p99")],
        ("partitions", pa.int64()),
        ("skew", pa.float64()),
        ("payload_bytes", pa.int64()),
        ("largest_payload_bytes", pa.int64()),
        *[(name, pa.int64()) for name in ("deliveries", "redeliveries", "rejected", "released", "expired")],
        ("busy_seconds", pa.float64()),
        ("pending", pa.int64()),
        ("pending_at", MOMENT),
        ("pending_slope", pa.float64()),
        ("oldest_age_seconds", pa.float64()),
        ("computed_at", MOMENT),
    ]
)
ANOMALIES_SCHEMA = pa.schema(
    [
        ("detected_at", MOMENT),
        *[(name, pa.string()) for name in ("queue_name", "partition_name", "consumer_group")],
        *[(name, pa.string()) for name in ("kind", "severity", "reason")],
        ("value", pa.float64()),
    ]
)


class Output(Folder):
    """The folder that a run of the metrics writes its files to."""

    def prepare(self) -> None:
        """Find out before any work whether it can be written."""
        for folder in (METRICS, ANOMALIES):
            self.create(folder)

    def write(self, window: Window, rows: Sequence[BucketMetrics], anomalies: Sequence[Anomaly]) -> str:
        """Write both files and return the run that they are named after."""
        run_id, now = new_run_id(), datetime.now(UTC)
        metrics = [
            {
                **as_columns(row, window),
                "throughput": (row.pushed + row.completed) / window.bucket_seconds,
                "computed_at": now,
            }
            for row in rows
        ]
        found = [{**asdict(anomaly), "detected_at": now} for anomaly in anomalies]
        for folder, columns, schema in (
            (METRICS, metrics, METRICS_SCHEMA),
            (ANOMALIES, found, ANOMALIES_SCHEMA),
        ):
            with self.appearing(folder, f"{run_id}.parquet") as stream:
                pq.write_table(pa.Table.from_pylist(columns, schema=schema), stream, compression="zstd")
        return run_id
