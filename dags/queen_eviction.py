"""Moves messages that waited longer than ``max_wait_time_seconds`` to the dead letters.

``QUEEN_CONN_ID`` and ``QUEEN_SPARK_CONN_ID`` in the environment name other connections than the defaults.
They are no Dag parameters: whoever may start a run may not thereby choose a connection to send work to.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime

from airflow.sdk import DAG, Param

from airflow_provider_queen.operators.spark import QueenSparkOperator
from airflow_provider_queen.resources import spark_app

with DAG(
    dag_id="queen_eviction",
    doc_md=__doc__,
    schedule="*/5 * * * *",
    start_date=datetime(2025, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 1},
    params={
        "queue_name": Param("", type="string", description="only this queue; empty means all"),
        "chunk": Param(10_000, type="integer", minimum=1, description="messages per transaction"),
        "spark_threshold": Param(
            5_000_000, type="integer", minimum=1, description="without Spark up to so many messages"
        ),
        "dry_run": Param(False, type="boolean", description="log what would go, change nothing"),
    },
    tags=["queen", "spark", "maintenance"],
):
    QueenSparkOperator(
        task_id="evict",
        application=str(spark_app("eviction.py")),
        name="queen-eviction",
        conn_id=os.environ.get("QUEEN_SPARK_CONN_ID", "spark_default"),
        queen_conn_id=os.environ.get("QUEEN_CONN_ID", "queen_default"),
        application_args=[
            "--chunk={{ params.chunk }}",
            "{{ '--queue-name=' ~ params.queue_name if params.queue_name else '' }}",
            "--spark-threshold={{ params.spark_threshold }}",
            "{{ '--dry-run' if params.dry_run else '' }}",
        ],
    )
