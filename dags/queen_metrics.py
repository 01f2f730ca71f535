"""Figures of all queues, per minute and consumer group, into ``queen.queue_metrics`` by Spark.

``QUEEN_METRICS_OUTPUT`` in the environment is a folder or URI for the same figures as Parquet.
``QUEEN_CONN_ID`` and ``QUEEN_SPARK_CONN_ID`` name other connections than the defaults.
They are no Dag parameters: whoever may start a run may not thereby choose a connection to send work to.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime

from airflow.sdk import DAG, Param, task

from airflow_provider_queen.operators.spark import QueenSparkOperator
from airflow_provider_queen.resources import spark_app

OUTPUT = os.environ.get("QUEEN_METRICS_OUTPUT")


@task
def alert(summary: dict[str, int] | None) -> None:
    """Fail where something is critical, so that whatever watches failed tasks hears of it."""
    if summary and summary["critical"]:
        raise RuntimeError(
            f"{summary['critical']} critical anomalies: see queen.anomalies and the log of compute_metrics"
        )


with DAG(
    dag_id="queen_metrics",
    doc_md=__doc__,
    schedule="*/10 * * * *",
    start_date=datetime(2025, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 1},
    params={
        "bucket_seconds": Param(
            60, type="integer", minimum=1, maximum=86_400, description="length of a bucket"
        ),
        "lookback_hours": Param(
            0, type="integer", minimum=0, description="compute so far back again; 0: only what is new"
        ),
        "spark_threshold": Param(
            2_000_000, type="integer", minimum=1, description="without Spark up to so many messages"
        ),
        "dry_run": Param(False, type="boolean", description="compute and log, store nothing"),
    },
    tags=["queen", "spark", "maintenance"],
):
    computed = QueenSparkOperator(
        task_id="compute_metrics",
        application=str(spark_app("metrics.py")),
        name="queen-metrics",
        conn_id=os.environ.get("QUEEN_SPARK_CONN_ID", "spark_default"),
        queen_conn_id=os.environ.get("QUEEN_CONN_ID", "queen_default"),
        application_args=[
            f"--output={OUTPUT}" if OUTPUT else "",
            "--bucket-seconds={{ params.bucket_seconds }}",
            "{{ '--since=' ~ (dag_run.run_after - macros.timedelta(hours=params.lookback_hours)).isoformat()"
            " if params.lookback_hours else '--incremental' }}",
            "--spark-threshold={{ params.spark_threshold }}",
            "{{ '--dry-run' if params.dry_run else '' }}",
        ],
    )
    alert.override(retries=0)(computed.output)
