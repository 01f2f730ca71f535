"""A queue that delivers later, and one that waits for silence.

``delayed_processing`` holds each message back for so many seconds. ``window_buffer`` holds a partition back
until nothing has been pushed to it for so many seconds: changes that come in bursts are then popped together.
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

DELAYED = "example_delayed"
WINDOWED = "example_windowed"


def remind(message: Message) -> None:
    age = datetime.now(UTC) - message.created_at
    log.info("reminder of %s, %.1f s later", message.payload, age.total_seconds())


def index(messages: list[Message]) -> None:
    log.info("indexing %s once, for %s changes", messages[0].partition, len(messages))


with DAG(
    dag_id="example_queen_delayed_windowed",
    doc_md=__doc__,
    schedule=None,
    start_date=datetime(2025, 1, 1, tzinfo=UTC),
    tags=["queen", "example"],
):
    # [START delayed]
    configure_delayed = QueenConfigureQueueOperator(
        task_id="configure_delayed", queue_name=DELAYED, options={"delayed_processing": 2}
    )
    push_delayed = QueenPushOperator(task_id="push_delayed", queue_name=DELAYED, messages=["the oven"])
    pop_delayed = QueenPopOperator(task_id="pop_delayed", queue_name=DELAYED, process=remind, wait_seconds=60)
    # [END delayed]

    # [START windowed]
    configure_windowed = QueenConfigureQueueOperator(
        task_id="configure_windowed", queue_name=WINDOWED, options={"window_buffer": 2}
    )
    push_windowed = QueenPushOperator(
        task_id="push_windowed",
        queue_name=WINDOWED,
        partition="document-7",
        messages=[{"change": n} for n in range(5)],
    )
    pop_windowed = QueenPopOperator(
        task_id="pop_windowed", queue_name=WINDOWED, process_batch=index, wait_seconds=60
    )
    # [END windowed]

    configure_delayed >> push_delayed >> pop_delayed
    configure_windowed >> push_windowed >> pop_windowed
