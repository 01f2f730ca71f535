"""How a job works: one run at a time, in pieces, here or on Spark, in short transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pyspark.sql import SparkSession

from airflow_provider_queen.exceptions import QueenError
from airflow_provider_queen.spark.application import Say, session
from airflow_provider_queen.spark.connection import ConnectionInfo, call

SAY_EVERY = 100_000

Item = TypeVar("Item")
Result = TypeVar("Result")


class JobRunningError(QueenError):
    """Another run of the same job has not ended."""


@contextmanager
def exclusive(connection: ConnectionInfo, job: str) -> Iterator[None]:
    """Let one run of a job work at a time; the lock goes with the connection, however this process ends."""
    with connection.connect() as database:
        if not call(database, "lock_job", ["locked"], job)[0][0]:
            raise JobRunningError(f"another run of {job} has not ended")
        yield


def call_until_nothing(
    connection: ConnectionInfo, say: Say, function: str, column: str, *arguments: object
) -> int:
    """Call a bounded function again and again; each call is a transaction of its own. Returns the total."""
    total = said = 0
    with connection.connect() as database:
        while done := sum(row[0] for row in call(database, function, [column], *arguments)):
            total += done
            if total - said >= SAY_EVERY:
                say(f"{total} messages {column}")
                said = total
    return total


class Here:
    """Runs the pieces of a job in this process: for work that is smaller than the start of Spark."""

    parallelism = 1

    def map(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        return [work(item) for item in items]


class OnSpark:
    """Runs the pieces of a job as tasks on Spark's executors; Spark repeats a piece that fails."""

    def __init__(self, spark: SparkSession) -> None:
        self._context: Any = spark.sparkContext
        self.parallelism: int = max(2, self._context.defaultParallelism)

    def map(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        if not items:
            return []
        results: list[Result] = self._context.parallelize(items, len(items)).map(work).collect()
        return results


Runner = Here | OnSpark


@contextmanager
def runner_for(job: str, messages: int, threshold: int, say: Say) -> Iterator[Runner]:
    """Spark costs some 20 seconds before it does anything: work up to the threshold stays in this process."""
    if messages <= threshold:
        yield Here()
    else:
        with session(job, say) as spark:
            yield OnSpark(spark)
