"""Queues with TaskFlow.

``@task.queen`` passes messages to a function. What it returns is the task's result or, with ``forward_to``,
messages of the next queue. Its success acknowledges the messages; what it raises fails them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from airflow.sdk import dag, task

from airflow_provider_queen.client import Message
from airflow_provider_queen.operators.admin import QueenConfigureQueueOperator
from airflow_provider_queen.operators.push import QueenPushOperator

READINGS = "example_taskflow_readings"
AVERAGES = "example_taskflow_averages"


@dag(
    dag_id="example_queen_taskflow",
    doc_md=__doc__,
    schedule=None,
    start_date=datetime(2025, 1, 1, tzinfo=UTC),
    tags=["queen", "example"],
)
def example_queen_taskflow() -> None:
    configure = [
        QueenConfigureQueueOperator(task_id="configure_readings", queue_name=READINGS),
        QueenConfigureQueueOperator(task_id="configure_averages", queue_name=AVERAGES),
    ]

    # [START push]
    @task
    def measure() -> list[dict[str, Any]]:
        return [{"payload": {"celsius": 20 + n}, "partition": "room-1"} for n in range(4)]

    push = QueenPushOperator(task_id="push", queue_name=READINGS, messages=measure())
    # [END push]

    # [START forward]
    @task.queen(queue_name=READINGS, forward_to=AVERAGES)
    def average(messages: list[Message]) -> dict[str, float]:
        values = [message.payload["celsius"] for message in messages]
        return {"celsius": sum(values) / len(values)}

    # [END forward]

    # [START result]
    @task.queen(queue_name=AVERAGES)
    def report(messages: list[Message]) -> list[float]:
        return [message.payload["celsius"] for message in messages]

    # [END result]

    configure >> push >> average() >> report()


example_queen_taskflow()
