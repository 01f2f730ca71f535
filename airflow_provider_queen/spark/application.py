"""What the Spark applications share: arguments, progress lines, exit codes, the session, one summary line."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import NoReturn

from pyspark.sql import SparkSession

from airflow_provider_queen.exceptions import (
    DatabaseUnreachableError,
    InvalidOptionError,
    QueenError,
    QueueNotFoundError,
    SchemaVersionError,
)
from airflow_provider_queen.spark.connection import ConnectionInfo
from airflow_provider_queen.spark.progress import reported

USAGE_ERROR = 2
FAILURE = 1
#: What the caller has to put right before a retry can help.
USAGE_ERRORS = (DatabaseUnreachableError, InvalidOptionError, QueueNotFoundError, SchemaVersionError)

Say = Callable[[str], None]
Summary = dict[str, object]


class Parser(argparse.ArgumentParser):
    """Reports a bad argument in one line instead of the whole usage, and takes no abbreviations."""

    def __init__(self, application: str, description: str | None) -> None:
        super().__init__(
            prog=application,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message}\n")


def moment(text: str) -> datetime:
    """Read an ISO time; without a zone nobody can know which moment is meant."""
    try:
        value = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no ISO time") from None
    if value.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{text!r} has no time zone; write for example {text}Z")
    return value


def number(what: str, lowest: int, highest: int) -> Callable[[str], int]:
    """Return a reader for whole numbers between two bounds, for ``type=``."""

    def read(text: str) -> int:
        if not text.isdecimal() or not lowest <= int(text) <= highest:
            raise argparse.ArgumentTypeError(f"{what} from {lowest} to {highest} is needed, not {text!r}")
        return int(text)

    return read


def run(application: str, work: Callable[[ConnectionInfo, Say], Summary]) -> int:
    """Do the work and return the exit code; the summary is the last line on stdout."""

    def say(line: str) -> None:
        sys.stdout.write(f"{application}: {line}\n")
        sys.stdout.flush()

    started = time.monotonic()
    try:
        summary = work(ConnectionInfo.from_environment(), say)
    except QueenError as error:
        sys.stderr.write(f"{application}: {error}\n")
        return USAGE_ERROR if isinstance(error, USAGE_ERRORS) else FAILURE
    seconds = round(time.monotonic() - started, 1)
    sys.stdout.write(json.dumps({"application": application, **summary, "seconds": seconds}) + "\n")
    sys.stdout.flush()
    return 0


@contextmanager
def session(application: str, say: Say) -> Iterator[SparkSession]:
    """A Spark session with progress lines. One that somebody else started is used and left running."""
    found = SparkSession.getActiveSession()
    if found is None:
        say("starting Spark")
    spark = found or SparkSession.builder.appName(application).getOrCreate()
    try:
        with reported(spark, say):
            yield spark
    finally:
        if found is None:
            spark.stop()
