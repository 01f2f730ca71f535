"""Lines for the log while Spark works: a job that says nothing for minutes looks like one that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

INTERVAL_SECONDS = 5.0


def describe(spark: SparkSession) -> str | None:
    """Say how far the running stages are, or nothing where none runs."""
    tracker = spark.sparkContext.statusTracker()
    infos = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    running = [f"stage {i.stageId}: {i.numCompletedTasks}/{i.numTasks} tasks" for i in infos if i is not None]
    return ", ".join(sorted(running)) or None


@contextmanager
def reported(
    spark: SparkSession, say: Callable[[str], None], every: float = INTERVAL_SECONDS
) -> Iterator[None]:
    """Report the running stages through ``say`` until the block ends."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(every):
            if line := describe(spark):
                say(line)

    watcher = threading.Thread(target=watch, name="queen-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
