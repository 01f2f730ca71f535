"""Writing: each Spark task pushes its rows in order, under transaction ids that a retry gives again.

A retried task, or a whole job that is run again with the same ids, pushes nothing twice: the database answers
``duplicate`` while the first message is retained. A job that fails half-way has pushed a part; run it again.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import psycopg
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import DataType, ShortType, StringType, StructType

from airflow_provider_queen.client import Keyring
from airflow_provider_queen.exceptions import InvalidOptionError
from airflow_provider_queen.spark.connection import ConnectionInfo, Keys, call
from airflow_provider_queen.spark.schemas import MESSAGES, nearest

PUSH_ROWS = 2_000
#: Columns of a message that a frame may bring along; where it is and since when is decided anew.
IGNORED = frozenset({"id", "lane_id", "seq", "created_at", "payload_bytes"})
TYPES: dict[str, DataType] = {field.name: field.dataType for field in MESSAGES if field.name not in IGNORED}


class NewMessage(NamedTuple):
    """One row of the frame; what the frame has no column for is None."""

    queue_name: str
    is_encrypted: bool
    payload: str
    partition_name: str | None
    transaction_id: str
    trace_id: str | None
    priority: int | None
    origin_transaction_id: str | None
    requeued_from: str | None


@dataclass
class Pushed(WriterCommitMessage):
    """What a task has done."""

    queued: int
    duplicates: int


@dataclass
class QueenWriter(DataSourceArrowWriter):
    """Pickled on its way to the executors, with the connection string inside.

    :param queue_name: where all rows go; None: each row's column ``queue_name`` says it
    :param write_id: begins the transaction ids of rows that have none
    :param keys: encrypt payloads with them; None: payloads go as they are
    """

    connection: ConnectionInfo
    queue_name: str | None
    write_id: str
    keys: Keys | None = None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        keyring = self.keys.keyring() if self.keys else None
        queued = total = 0
        with self.connection.connect() as connection:
            for batch in iterator:
                for start in range(0, batch.num_rows, PUSH_ROWS):
                    messages = self._messages(batch.slice(start, PUSH_ROWS), total)
                    queued += push(connection, messages, keyring)
                    total += len(messages)
        return Pushed(queued, total - queued)

    def _messages(self, batch: pa.RecordBatch, position: int) -> list[NewMessage]:
        """The rows of a batch; those without a transaction id get one from their place in the job."""
        columns = {name: batch[name].to_pylist() for name in batch.schema.names if name not in IGNORED}
        context = TaskContext.get()
        place = f"{self.write_id}-{context.partitionId() if context else 0}"
        messages: list[NewMessage] = []
        for number, values in enumerate(zip(*columns.values(), strict=True), start=position):
            row = dict(zip(columns, values, strict=True))
            messages.append(
                NewMessage(
                    queue_name=self.queue_name or row.get("queue_name") or "",
                    is_encrypted=bool(row.get("is_encrypted")),
                    payload=row["payload"],
                    partition_name=row.get("partition_name"),
                    transaction_id=row.get("transaction_id") or f"{place}-{number}",
                    trace_id=row.get("trace_id"),
                    priority=row.get("priority"),
                    origin_transaction_id=row.get("origin_transaction_id"),
                    requeued_from=row.get("requeued_from"),
                )
            )
        return messages


@dataclass
class QueenStreamWriter(QueenWriter, DataSourceStreamArrowWriter):
    """The same for a stream: a micro-batch that Spark repeats pushes nothing twice.

    A task does not know which micro-batch it belongs to, so no ids can be made up for it: the frame needs
    the column ``transaction_id``.
    """

    def commit(self, messages: Any, batchId: int = 0) -> None:
        """Nothing is left to do: what a task has pushed is there."""

    def abort(self, messages: Any, batchId: int = 0) -> None:
        """Nothing is taken back: the repeated micro-batch finds what is there already."""


def push(connection: psycopg.Connection[Any], messages: Sequence[NewMessage], keyring: Keyring | None) -> int:
    """Push messages in order, one call per run of the same queue; return how many were not there yet."""
    if keyring is not None:
        messages = [sealed(message, keyring) for message in messages]
    queued = 0
    for (queue_name, is_encrypted, returns), group in groupby(
        messages, key=lambda m: (m.queue_name, m.is_encrypted, m.requeued_from is not None)
    ):
        _, _, payloads, partitions, ids, traces, priorities, origins, sources = zip(*group, strict=True)
        results = call(
            connection,
            "push",
            ["status"],
            queue_name,
            list(payloads),
            list(partitions),
            list(ids),
            [trace and uuid.UUID(trace) for trace in traces] if any(traces) else None,
            list(priorities) if any(priorities) else None,
            is_encrypted,
            list(origins) if any(origins) else None,
            [uuid.UUID(source) for source in sources] if returns else None,
        )
        queued += sum(status == "queued" for (status,) in results)
    return queued


def sealed(message: NewMessage, keyring: Keyring) -> NewMessage:
    """The message with its payload encrypted, where it is not yet."""
    if message.is_encrypted:
        return message
    payload = keyring.encrypt(message.payload, message.queue_name, message.transaction_id)
    return message._replace(payload=payload, is_encrypted=True)


def check_frame(schema: StructType, queue_name: str | None) -> None:
    """Refuse a frame that cannot be written, before any task runs."""
    names = schema.fieldNames()
    if "payload" not in names:
        raise InvalidOptionError("a frame for format queen needs the column 'payload' with JSON text")
    if queue_name is None and "queue_name" not in names:
        raise InvalidOptionError("name the queue in option 'queue_name' or in a column 'queue_name'")
    for field in schema:
        if field.name in IGNORED:
            continue
        if field.name not in TYPES:
            raise InvalidOptionError(f"a message has no column {field.name!r}; {nearest(field.name, TYPES)}")
        if field.dataType != TYPES[field.name]:
            raise InvalidOptionError(
                f"column {field.name!r} is {field.dataType.simpleString()}, needed is"
                f" {TYPES[field.name].simpleString()}; {hint(TYPES[field.name])}"
            )


def hint(wanted: DataType) -> str:
    """How to get there."""
    if wanted == StringType():
        return "to_json(...) makes text of a structure"
    return "cast it to SMALLINT" if wanted == ShortType() else "cast it"
