"""The Dag of ``test_burst.py``, which copies this file into a Dags folder of its own.

Both tasks of a run take a bounded part of the backlog, so that the doorbell has to start run after run.
"""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow.sdk import DAG, Asset, AssetWatcher

from airflow_provider_queen.client import Message
from airflow_provider_queen.operators.pop import QueenPopOperator
from airflow_provider_queen.triggers.messages import QueenMessageTrigger

SOURCE, TARGET = "burst", "burst_done"
GROUP = "workers"
TASKS = 2
MESSAGES_PER_TASK = 125
BATCH = 75
"""More than a partition has: a worker holds two at a time."""
HELD_AT = 60
"""The first worker to come so far, in the middle of its first batch, goes no further until it is killed."""
FOLDER = "BURST_FOLDER"
"""The environment variable that names the folder of the two files."""
JOURNAL, HELD = "journal", "held"
_WORK_SECONDS = 0.01
_LONGEST_HOLD_SECONDS = 120.0

_seen = 0


def work(message: Message) -> dict[str, int]:
    global _seen
    _seen += 1
    folder = Path(os.environ[FOLDER])
    _note(folder / JOURNAL, message)
    if _seen == HELD_AT:
        _hold(folder / HELD)
    time.sleep(_WORK_SECONDS)
    return {"number": message.payload["number"]}


def _note(journal: Path, message: Message) -> None:
    line = json.dumps([os.getpid(), message.partition, message.payload["number"]]) + "\n"
    file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode())  # in one piece, so that lines of several processes do not mix
    finally:
        os.close(file)


def _hold(held: Path) -> None:
    try:
        with held.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return
    deadline = time.monotonic() + _LONGEST_HOLD_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.1)
    raise TimeoutError("nobody killed this worker")


backlog = Asset(
    "burst",
    watchers=[
        AssetWatcher(
            name="doorbell",
            trigger=QueenMessageTrigger(
                queue_name=SOURCE,
                consumer_group=GROUP,
                ring_interval=2,
                max_ring_interval=4,
                poll_interval=2,
            ),
        )
    ],
)

with DAG(
    dag_id="burst",
    schedule=[backlog],
    start_date=datetime(2025, 1, 1, tzinfo=UTC),
    max_active_runs=1,
):
    for task in range(TASKS):
        QueenPopOperator(
            task_id=f"work_{task}",
            queue_name=SOURCE,
            consumer_group=GROUP,
            process=work,
            forward_to=TARGET,
            max_messages=MESSAGES_PER_TASK,
            batch_size=BATCH,
            max_partitions=2,
            retries=3,
            retry_delay=timedelta(seconds=1),
        )
