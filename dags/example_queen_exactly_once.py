"""A pipeline of two stages whose messages arrive exactly once, and can be traced.

``forward_to`` pushes what ``process`` returns in the transaction that acknowledges the message: both happen,
or neither. A worker may die anywhere, and the next stage still gets each order once. Every message keeps the
``trace_id`` of the one it was made of, so the way of an order can be read afterwards.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

from airflow.sdk import DAG, task

from airflow_provider_queen.client import Message
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.operators.admin import QueenConfigureQueueOperator
from airflow_provider_queen.operators.pop import QueenPopOperator
from airflow_provider_queen.operators.push import QueenPushOperator

log = logging.getLogger(__name__)

RECEIVED = "example_exactly_once_received"
PRICED = "example_exactly_once_priced"
# One trace for each Dag run.
TRACE_ID = "{{ macros.uuid.uuid5(macros.uuid.NAMESPACE_URL, dag.dag_id ~ run_id) }}"


# [START price]
def price(message: Message) -> dict[str, Any]:
    order = message.payload
    return {**order, "cents": order["pieces"] * 250}


# [END price]


def ship(message: Message) -> None:
    log.info("shipping %s pieces for %s cents", message.payload["pieces"], message.payload["cents"])


with DAG(
    dag_id="example_queen_exactly_once",
    doc_md=__doc__,
    schedule=None,
    start_date=datetime(2025, 1, 1, tzinfo=UTC),
    tags=["queen", "example"],
):
    configure = [
        QueenConfigureQueueOperator(task_id="configure_received", queue_name=RECEIVED),
        QueenConfigureQueueOperator(task_id="configure_priced", queue_name=PRICED),
    ]
    receive = QueenPushOperator(
        task_id="receive",
        queue_name=RECEIVED,
        messages=[{"pieces": 2}, {"pieces": 3}],
        trace_id=TRACE_ID,
    )

    # [START stages]
    first_stage = QueenPopOperator(task_id="price", queue_name=RECEIVED, process=price, forward_to=PRICED)
    second_stage = QueenPopOperator(task_id="ship", queue_name=PRICED, process=ship)
    # [END stages]

    # [START trace]
    @task
    def trace(trace_id: str) -> list[str]:
        """The way of this run's orders, in the order of time."""
        return [f"{message.queue_name} {message.seq}" for message in QueenHook().trace(trace_id)]

    # [END trace]

    configure >> receive >> first_stage >> second_stage >> trace(TRACE_ID)
