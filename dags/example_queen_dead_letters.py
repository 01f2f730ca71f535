"""Messages that cannot be processed, and their second chance.

After ``retry_limit`` redeliveries a failing message becomes a dead letter: with its payload and the last
error, out of the way of those behind it. Once the cause is mended it is requeued, as a new message at the end
of its partition.
"""

from __future__ import annotations

from datetime import UTC, datetime

from airflow.sdk import DAG, task

from airflow_provider_queen.client import Message
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.operators.admin import (
    QueenConfigureQueueOperator,
    QueenRequeueDeadLettersOperator,
)
from airflow_provider_queen.operators.pop import QueenPopOperator
from airflow_provider_queen.operators.push import QueenPushOperator
from airflow_provider_queen.sensors.backlog import QueenBacklogSensor

QUEUE = "example_dead_letters"


# [START process]
def parse(message: Message) -> None:
    int(message.payload)


def parse_mended(message: Message) -> None:
    int(message.payload.replace("o", "0"))


# [END process]


with DAG(
    dag_id="example_queen_dead_letters",
    doc_md=__doc__,
    schedule=None,
    start_date=datetime(2025, 1, 1, tzinfo=UTC),
    tags=["queen", "example"],
):
    # [START configure]
    configure = QueenConfigureQueueOperator(
        task_id="configure",
        queue_name=QUEUE,
        options={"retry_limit": 1, "retry_delay": 100},  # milliseconds
    )
    # [END configure]
    push = QueenPushOperator(task_id="push", queue_name=QUEUE, messages=["10", "2o", "30"])

    # [START fail]
    fail = QueenPopOperator(task_id="fail", queue_name=QUEUE, process=parse, fail_on_error=False)
    fail_again = QueenPopOperator(
        task_id="fail_again",
        queue_name=QUEUE,
        process=parse,
        wait_seconds=30,
        fail_on_error=False,
    )
    # [END fail]

    # [START watch]
    alarm = QueenBacklogSensor(task_id="alarm", queue_name=QUEUE, min_dead_letters=1, timeout=600)

    @task
    def show() -> list[str]:
        letters = QueenHook().dead_letters(QUEUE)
        return [f"{letter.partition} no. {letter.seq}: {letter.error_message}" for letter in letters]

    # [END watch]

    # [START requeue]
    requeue = QueenRequeueDeadLettersOperator(task_id="requeue", queue_name=QUEUE)
    # [END requeue]
    succeed = QueenPopOperator(task_id="succeed", queue_name=QUEUE, process=parse_mended)

    configure >> push >> fail >> fail_again >> alarm >> show() >> requeue >> succeed
