"""Two consumer groups, each of which gets every message.

A group has its own cursors and leases: ``billing`` may be a week behind ``shipping`` without either noticing.
Within a group, consumers share the messages.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from airflow.sdk import DAG

from airflow_provider_queen.client import Message
from airflow_provider_queen.operators.admin import QueenConfigureQueueOperator
from airflow_provider_queen.operators.pop import QueenPopOperator
from airflow_provider_queen.operators.push import QueenPushOperator

log = logging.getLogger(__name__)

QUEUE = "example_fan_out"


def bill(message: Message) -> None:
    log.info("bill for %s: %s cents", message.partition, message.payload["cents"])


def ship(message: Message) -> None:
    log.info("parcel for %s", message.partition)


with DAG(
    dag_id="example_queen_fan_out",
    doc_md=__doc__,
    schedule=None,
    start_date=datetime(2025, 1, 1, tzinfo=UTC),
    tags=["queen", "example"],
):
    configure = QueenConfigureQueueOperator(task_id="configure", queue_name=QUEUE)
    push = QueenPushOperator(
        task_id="push",
        queue_name=QUEUE,
        messages=[{"payload": {"cents": 100 * n}, "partition": f"customer-{n % 2}"} for n in range(6)],
    )

    # [START groups]
    billing = QueenPopOperator(task_id="bill", queue_name=QUEUE, consumer_group="billing", process=bill)
    shipping = QueenPopOperator(task_id="ship", queue_name=QUEUE, consumer_group="shipping", process=ship)
    # [END groups]

    configure >> push >> [billing, shipping]
