"""Push messages to a queue, pop and process them.

The first task creates the queue, or changes nothing where it exists. A pushed message has an id that follows
from the Dag run and its position, so a task that runs again pushes nothing twice. A popped message is
acknowledged when ``process`` returns, and comes again when it raises.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

from airflow.sdk import DAG

from airflow_provider_queen.client import Message
from airflow_provider_queen.operators.admin import QueenConfigureQueueOperator
from airflow_provider_queen.operators.pop import QueenPopOperator
from airflow_provider_queen.operators.push import QueenPushOperator

log = logging.getLogger(__name__)

QUEUE = "example_push_pop"


# [START process]
def process(message: Message) -> None:
    order: dict[str, Any] = message.payload
    log.info("%s no. %s: order %s", message.partition, message.seq, order["order"])


# [END process]


with DAG(
    dag_id="example_queen_push_pop",
    doc_md=__doc__,
    schedule=None,
    start_date=datetime(2025, 1, 1, tzinfo=UTC),
    tags=["queen", "example"],
):
    # [START configure]
    configure = QueenConfigureQueueOperator(
        task_id="configure",
        queue_name=QUEUE,
        options={"lease_time": 60, "retry_limit": 3},
    )
    # [END configure]

    # [START push]
    push = QueenPushOperator(
        task_id="push",
        queue_name=QUEUE,
        messages=[
            {"payload": {"order": 1}, "partition": "customer-1"},
            {"payload": {"order": 2}, "partition": "customer-2"},
            {"payload": {"order": 3}, "partition": "customer-1"},
        ],
    )
    # [END push]

    # [START pop]
    pop = QueenPopOperator(task_id="pop", queue_name=QUEUE, process=process)
    # [END pop]

    configure >> push >> pop
