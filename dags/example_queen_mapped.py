"""One mapped task for each partition that has something to do.

Messages of a partition are in order and held by one consumer at a time, so partitions are what can be worked
on side by side. Mapped tasks make this visible: a customer whose messages fail is one red task.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from airflow.sdk import DAG, task

from airflow_provider_queen.client import Message
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.operators.admin import QueenConfigureQueueOperator
from airflow_provider_queen.operators.pop import QueenPopOperator
from airflow_provider_queen.operators.push import QueenPushOperator

log = logging.getLogger(__name__)

QUEUE = "example_mapped"


def process(message: Message) -> None:
    log.info("%s: step %s", message.partition, message.payload["step"])


with DAG(
    dag_id="example_queen_mapped",
    doc_md=__doc__,
    schedule=None,
    start_date=datetime(2025, 1, 1, tzinfo=UTC),
    tags=["queen", "example"],
):
    configure = QueenConfigureQueueOperator(task_id="configure", queue_name=QUEUE)
    push = QueenPushOperator(
        task_id="push",
        queue_name=QUEUE,
        messages=[
            {"payload": {"step": step}, "partition": f"customer-{customer}"}
            for customer in (1, 2, 3)
            for step in (1, 2)
        ],
    )

    # [START mapped]
    @task
    def partitions_with_messages() -> list[str]:
        return sorted({row.partition for row in QueenHook().stats(QUEUE) if row.pending})

    partitions = partitions_with_messages()
    pop = QueenPopOperator.partial(
        task_id="pop",
        queue_name=QUEUE,
        process=process,
        max_active_tis_per_dagrun=8,
    ).expand(partition=partitions)
    # [END mapped]

    configure >> push >> partitions
