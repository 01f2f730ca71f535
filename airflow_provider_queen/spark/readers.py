"""Batch reading: planned once on the driver, read on the executors as Arrow batches.

One state for all executors: the ranges are fixed when Spark plans the query. Messages are immutable, dense in
seq, and become visible in seq order, so the rows below the fixed bounds are the same for every task and every
retry of it. Only retention may remove rows meanwhile. No snapshot is held open.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import adbc_driver_manager.dbapi as adbc
import psycopg
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import DataType, StringType, StructType

from airflow_provider_queen.client import Keyring
from airflow_provider_queen.spark.connection import ConnectionInfo, Keys, call, call_arrow, check_queue
from airflow_provider_queen.spark.payloads import arrow_type, parser
from airflow_provider_queen.spark.ranges import BATCH_ROWS, Range, scan_messages
from airflow_provider_queen.spark.schemas import arrow_schema

MICROSECOND = timedelta(microseconds=1)
#: What decryption needs to know of a message.
SEALED_COLUMNS = ("payload", "is_encrypted", "queue_name", "transaction_id", "origin_transaction_id")


class IdRange(NamedTuple):
    """Consecutive ids, both ends included."""

    first_id: int
    last_id: int


class Slice(InputPartition):
    """What one Spark task reads."""

    def __init__(self, ranges: Sequence[tuple[int, ...]]) -> None:
        self.ranges = ranges


@dataclass(frozen=True)
class Bounds:
    """What a query's filters say about where its rows are. Spark still applies the filters themselves."""

    queue_name: str | None = None
    partition_name: str | None = None
    consumer_group: str | None = None
    time_from: datetime | None = None
    time_before: datetime | None = None

    def narrowed(self, condition: Filter, time_column: str) -> Bounds:
        """These bounds with those of one filter, where it says anything about them."""
        match condition:
            case EqualTo(attribute=("queue_name",), value=str(name)) if self.queue_name is None:
                return replace(self, queue_name=name)
            case EqualTo(attribute=("partition_name",), value=str(name)):
                return replace(self, partition_name=name)
            case EqualTo(attribute=("consumer_group",), value=str(name)):
                return replace(self, consumer_group=name)
            case GreaterThan() | GreaterThanOrEqual() | LessThan() | LessThanOrEqual() | EqualTo():
                value = condition.value
                if condition.attribute == (time_column,) and isinstance(value, datetime) and value.tzinfo:
                    return self._narrowed_in_time(condition, value)
        return self

    @property
    def names(self) -> tuple[str | None, str | None, str | None]:
        """Queue, partition and group: what the functions that scan a table take."""
        return self.queue_name, self.partition_name, self.consumer_group

    def _narrowed_in_time(self, condition: Filter, moment: datetime) -> Bounds:
        bounds = self
        if isinstance(condition, GreaterThan | GreaterThanOrEqual | EqualTo):
            lowest = moment + MICROSECOND if isinstance(condition, GreaterThan) else moment
            bounds = replace(bounds, time_from=max(bounds.time_from or lowest, lowest))
        if isinstance(condition, LessThan | LessThanOrEqual | EqualTo):
            end = moment if isinstance(condition, LessThan) else moment + MICROSECOND
            bounds = replace(bounds, time_before=min(bounds.time_before or end, end))
        return bounds


@dataclass
class QueenReader(DataSourceReader):
    """Pickled on its way to the executors, with the connection string inside."""

    connection: ConnectionInfo
    schema: StructType
    queue_name: str | None
    slices: int
    keys: Keys | None = None

    #: The column that bounds in time are about.
    time_column = ""

    def __post_init__(self) -> None:
        self.bounds = Bounds(queue_name=self.queue_name)

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        for condition in filters:
            self.bounds = self.bounds.narrowed(condition, self.time_column)
        return filters

    def partitions(self) -> list[InputPartition]:
        with self.connection.connect() as connection:
            check_queue(connection, self.queue_name)
            slices = self.plan(connection)
        # Without any partition Spark would make one up, of a type of its own.
        return list(slices) or [Slice([])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Slice)  # noqa: S101
        if not partition.ranges:
            return
        names = self.schema.fieldNames()
        fetched = names + [name for name in SEALED_COLUMNS if self.keys and name not in names]
        keyring = self.keys.keyring() if self.keys else None
        wanted = self.schema["payload"].dataType if "payload" in names else StringType()
        changed = "payload" in names and (keyring is not None or wanted != StringType())
        schema = arrow_schema(self.schema)
        with self.connection.connect_arrow() as connection:
            for batch in self.scan(connection, fetched, partition):
                columns = {name: batch[name] for name in names}
                if changed:
                    columns["payload"] = payloads(batch, keyring, wanted)
                if batch.num_rows:
                    yield pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)

    @abstractmethod
    def plan(self, connection: psycopg.Connection[Any]) -> list[Slice]:
        """What each task reads; on the driver."""

    @abstractmethod
    def scan(
        self, connection: adbc.Connection, columns: Sequence[str], part: Slice
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a slice, a bounded number at a time; on an executor."""


def payloads(batch: pa.RecordBatch, keyring: Keyring | None, wanted: DataType) -> pa.Array:
    """The payloads as the query wants them: in clear where there are keys, parsed where there is a schema."""
    texts = opened(batch, keyring) if keyring else batch["payload"].to_pylist()
    if wanted != StringType():
        parse = parser(wanted)
        texts = [parse(text) for text in texts]
    return pa.array(texts, type=arrow_type(wanted))


def opened(batch: pa.RecordBatch, keyring: Keyring) -> list[str]:
    """The payloads, with those of encrypted messages in clear."""
    rows = zip(*(batch[name].to_pylist() for name in SEALED_COLUMNS), strict=True)
    return [
        keyring.decrypt(payload, queue, origin or transaction) if is_encrypted else payload
        for payload, is_encrypted, queue, transaction, origin in rows
    ]


class MessagesReader(QueenReader):
    """Reads ``queen.messages`` by ranges of (lane, seq)."""

    time_column = "created_at"

    def plan(self, connection: psycopg.Connection[Any]) -> list[Slice]:
        wanted = self.bounds
        packed: dict[int, list[Range]] = {}
        for slice_number, *bounds in call(
            connection,
            "message_ranges",
            ("slice", *Range._fields),
            wanted.queue_name,
            wanted.partition_name,
            wanted.time_from,
            wanted.time_before,
            self.slices,
        ):
            packed.setdefault(slice_number, []).append(Range(*bounds))
        return [Slice(ranges) for ranges in packed.values()]

    def scan(
        self, connection: adbc.Connection, columns: Sequence[str], part: Slice
    ) -> Iterator[pa.RecordBatch]:
        return scan_messages(connection, columns, [Range(*bounds) for bounds in part.ranges])


class _RowsById(QueenReader):
    """Reads a log by ranges of ids.

    Ids are taken before the commit: a row that was not committed when the query was planned may be read or
    not. No row is read twice.
    """

    function = ""

    def scan(
        self, connection: adbc.Connection, columns: Sequence[str], part: Slice
    ) -> Iterator[pa.RecordBatch]:
        for first_id, last_id in part.ranges:
            for start in range(first_id, last_id + 1, BATCH_ROWS):
                end = min(last_id, start + BATCH_ROWS - 1)
                yield call_arrow(connection, self.function, columns, *self.bounds.names, start, end)


class DeliveriesReader(_RowsById):
    """Reads ``queen.deliveries``."""

    time_column = "ended_at"
    function = "scan_deliveries"

    def plan(self, connection: psycopg.Connection[Any]) -> list[Slice]:
        wanted = (self.bounds.time_from, self.bounds.time_before)
        rows = call(connection, "delivery_ranges", IdRange._fields, *wanted, self.slices)
        return [Slice([IdRange(*bounds)]) for bounds in rows]


class DeadLettersReader(_RowsById):
    """Reads ``queen.dead_letter_queue``."""

    time_column = "failed_at"
    function = "scan_dead_letters"

    def plan(self, connection: psycopg.Connection[Any]) -> list[Slice]:
        rows = call(connection, "dead_letter_ranges", IdRange._fields, self.bounds.time_from, self.slices)
        return [Slice([IdRange(*bounds)]) for bounds in rows]


class ConsumersReader(QueenReader):
    """Reads ``queen.partition_consumers`` in one statement: it is small, and its rows belong together."""

    def plan(self, connection: psycopg.Connection[Any]) -> list[Slice]:
        return [Slice([(0,)])]

    def scan(
        self, connection: adbc.Connection, columns: Sequence[str], part: Slice
    ) -> Iterator[pa.RecordBatch]:
        yield call_arrow(connection, "scan_consumers", columns, *self.bounds.names)


READERS: dict[str, type[QueenReader]] = {
    "messages": MessagesReader,
    "deliveries": DeliveriesReader,
    "dead_letters": DeadLettersReader,
    "consumers": ConsumersReader,
}
