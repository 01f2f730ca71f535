"""Start a Dag when messages arrive.

The asset has a watcher, a doorbell: it rings when messages wait for the group ``billing``, and again while
they still wait. It takes none of them: the Dag that it starts pops what is there, however many. Start
``example_queen_event_driven_producer`` to push some.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from airflow.providers.common.messaging.triggers.msg_queue import MessageQueueTrigger
from airflow.sdk import DAG, Asset, AssetWatcher

from airflow_provider_queen.client import Message
from airflow_provider_queen.operators.admin import QueenConfigureQueueOperator
from airflow_provider_queen.operators.pop import QueenPopOperator
from airflow_provider_queen.operators.push import QueenPushOperator

log = logging.getLogger(__name__)

QUEUE = "example_event_driven"


def bill(message: Message) -> None:
    log.info("billing order %s", message.payload["order"])


# [START asset]
orders = Asset(
    "example_queen_orders",
    watchers=[
        AssetWatcher(
            name="doorbell",
            trigger=MessageQueueTrigger(scheme="queen", queue_name=QUEUE, consumer_group="billing"),
        )
    ],
)
# [END asset]

# [START consumer]
with DAG(
    dag_id="example_queen_event_driven",
    doc_md=__doc__,
    schedule=[orders],
    start_date=datetime(2025, 1, 1, tzinfo=UTC),
    max_active_runs=1,
    tags=["queen", "example"],
):
    configure = QueenConfigureQueueOperator(task_id="configure", queue_name=QUEUE)
    pop = QueenPopOperator(
        task_id="pop",
        queue_name=QUEUE,
        consumer_group="billing",
        process=bill,
        max_messages=None,
    )
    configure >> pop
# [END consumer]

with DAG(
    dag_id="example_queen_event_driven_producer",
    doc_md="Pushes orders, which start `example_queen_event_driven`.",
    schedule=None,
    start_date=datetime(2025, 1, 1, tzinfo=UTC),
    tags=["queen", "example"],
):
    configure = QueenConfigureQueueOperator(task_id="configure", queue_name=QUEUE)
    push = QueenPushOperator(
        task_id="push",
        queue_name=QUEUE,
        messages=[{"payload": {"order": n}, "partition": f"customer-{n % 5}"} for n in range(20)],
    )
    configure >> push
