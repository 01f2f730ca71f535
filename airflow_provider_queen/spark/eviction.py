"""Eviction: messages that waited longer than ``max_wait_time_seconds`` become dead letters.

The database does it, once per group that still has the message pending: a statement moves some 250,000
messages a second, without any of them leaving the server. What Spark adds is several queues at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from airflow_provider_queen.spark.application import Say
from airflow_provider_queen.spark.connection import ConnectionInfo, call
from airflow_provider_queen.spark.jobs import Here, Runner, call_until_nothing

JOB = "queen-eviction"


class Evictable(NamedTuple):
    """What a group would lose to the dead letters now."""

    queue_name: str
    consumer_group: str
    messages: int


def evictable(connection: ConnectionInfo, queue_name: str | None) -> list[Evictable]:
    """Count what waits too long, in the partitions that groups have met."""
    with connection.connect() as database:
        return [Evictable(*row) for row in call(database, "evictable", Evictable._fields, queue_name)]


def evicting_queues(connection: ConnectionInfo, queue_name: str | None) -> list[str]:
    """The queues that evict at all."""
    with connection.connect() as database:
        return [row[0] for row in call(database, "evicting_queues", ["queue_name"], queue_name)]


def evict(
    connection: ConnectionInfo, runner: Runner, queues: Sequence[str], chunk: int, say: Say
) -> dict[str, int]:
    """Evict in short transactions, each queue as a piece of its own; returns how many messages, per queue."""
    # What a Spark task would say stays on its executor; there the stages are reported instead.
    heard = say if isinstance(runner, Here) else _silent
    counts = runner.map(partial(evict_queue, connection, chunk, heard), queues)
    return dict(zip(queues, counts, strict=True))


def evict_queue(connection: ConnectionInfo, chunk: int, say: Say, queue_name: str) -> int:
    return call_until_nothing(connection, say, "evict", "evicted", queue_name, chunk)


def _silent(line: str) -> None:
    """Nobody listens."""
