"""Gate a Dag on how much waits in a queue.

One sensor waits until a batch is worth the effort, another until everything is processed. With
``deferrable=True`` they wait in the triggerer, where all sensors share one database connection.
"""

from __future__ import annotations

from datetime import UTC, datetime

from airflow.sdk import DAG

from airflow_provider_queen.operators.admin import QueenConfigureQueueOperator
from airflow_provider_queen.operators.pop import QueenPopOperator
from airflow_provider_queen.operators.push import QueenPushOperator
from airflow_provider_queen.sensors.backlog import QueenBacklogSensor

QUEUE = "example_gate"

with DAG(
    dag_id="example_queen_gate",
    doc_md=__doc__,
    schedule=None,
    start_date=datetime(2025, 1, 1, tzinfo=UTC),
    tags=["queen", "example"],
):
    configure = QueenConfigureQueueOperator(task_id="configure", queue_name=QUEUE)
    push = QueenPushOperator(task_id="push", queue_name=QUEUE, messages=[{"reading": n} for n in range(10)])

    # [START gate]
    enough = QueenBacklogSensor(
        task_id="enough",
        queue_name=QUEUE,
        min_pending=10,
        deferrable=True,
        timeout=600,
    )
    # [END gate]

    load = QueenPopOperator(task_id="load", queue_name=QUEUE, process_batch=len, max_messages=None)

    # [START drained]
    drained = QueenBacklogSensor(
        task_id="drained",
        queue_name=QUEUE,
        max_pending=0,
        mode="poke",
        poke_interval=5,
        timeout=600,
    )
    # [END drained]

    configure >> push >> enough >> load >> drained
