"""``spark.read.format("queen")``: messages and deliveries as Arrow batches, in even ranges.

One state for all executors: the ranges are fixed once, on the driver, when Spark plans the query. Messages
are immutable, dense in seq, and become visible in seq order, so the rows below the fixed bounds are the same
for every task and every retry of it. Only retention may remove rows meanwhile. No snapshot is held open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import psycopg
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from airflow_provider_queen.exceptions import InvalidOptionError, QueueNotFoundError
from airflow_provider_queen.spark.connection import ConnectionInfo, call
from airflow_provider_queen.spark.schemas import TABLES, arrow_schema, check_columns, nearest

BATCH_ROWS = 10_000
DEFAULT_SLICES = 2
OPTIONS = ("table", "queue_name", "numSlices")


class Range(NamedTuple):
    """Consecutive seqs of one partition, both ends included."""

    partition_id: int
    first_seq: int
    last_seq: int


class IdRange(NamedTuple):
    """Consecutive delivery ids, both ends included."""

    first_id: int
    last_id: int


class Slice(InputPartition):
    """What one Spark task reads."""

    def __init__(self, ranges: Sequence[tuple[int, ...]]) -> None:
        self.ranges = ranges


def cut_ranges(ranges: Sequence[Range], rows: int) -> Iterator[list[Range]]:
    """Regroup ranges into portions of at most ``rows`` messages; seqs are dense, so a range says its size."""
    portion: list[Range] = []
    room = rows
    for partition_id, first, last in ranges:
        while first <= last:
            end = min(last, first + room - 1)
            portion.append(Range(partition_id, first, end))
            room -= end - first + 1
            first = end + 1
            if room == 0:
                yield portion
                portion, room = [], rows
    if portion:
        yield portion


def to_batch(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    """Turn rows into columns of exactly the types that Spark expects."""
    columns = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)],
        schema=schema,
    )


class QueenReader(DataSourceReader):
    """Plans on the driver, reads on the executors; pickled in between, with the connection string inside."""

    def __init__(
        self, connection: ConnectionInfo, schema: StructType, queue_name: str | None, slices: int
    ) -> None:
        self.connection = connection
        self.schema = schema
        self.queue_name = queue_name
        self.slices = slices

    def partitions(self) -> list[InputPartition]:
        with self.connection.connect() as connection:
            if self.queue_name is not None and not queue_exists(connection, self.queue_name):
                raise QueueNotFoundError(f"there is no queue {self.queue_name!r}")
            slices = self.plan(connection)
        # Without any partition Spark would make one up, of a type of its own.
        return list(slices) or [Slice([])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Slice)  # noqa: S101
        if not partition.ranges:
            return
        schema = arrow_schema(self.schema)
        with self.connection.connect() as connection:
            for rows in self.fetch(connection, partition):
                if rows:
                    yield to_batch(rows, schema)

    def plan(self, connection: psycopg.Connection[Any]) -> list[Slice]:
        raise NotImplementedError

    def fetch(self, connection: psycopg.Connection[Any], part: Slice) -> Iterator[list[tuple[Any, ...]]]:
        raise NotImplementedError


class MessagesReader(QueenReader):
    """Reads ``queen.messages`` by ranges of (partition, seq)."""

    def plan(self, connection: psycopg.Connection[Any]) -> list[Slice]:
        columns = ("slice", *Range._fields)
        packed: dict[int, list[Range]] = {}
        for slice_number, *bounds in call(
            connection, "message_ranges", columns, self.queue_name, self.slices
        ):
            packed.setdefault(slice_number, []).append(Range(*bounds))
        return [Slice(ranges) for ranges in packed.values()]

    def fetch(self, connection: psycopg.Connection[Any], part: Slice) -> Iterator[list[tuple[Any, ...]]]:
        ranges = [Range(*bounds) for bounds in part.ranges]
        for portion in cut_ranges(ranges, BATCH_ROWS):
            partition_ids, first_seqs, last_seqs = (list(column) for column in zip(*portion, strict=True))
            yield call(
                connection, "scan_messages", self.schema.fieldNames(), partition_ids, first_seqs, last_seqs
            )


class DeliveriesReader(QueenReader):
    """Reads ``queen.deliveries`` by ranges of ids.

    Ids are taken before the commit: a settlement that was not committed when the query was planned may be
    read or not. No row is read twice.
    """

    def plan(self, connection: psycopg.Connection[Any]) -> list[Slice]:
        rows = call(connection, "delivery_ranges", IdRange._fields, self.slices)
        return [Slice([IdRange(*bounds)]) for bounds in rows]

    def fetch(self, connection: psycopg.Connection[Any], part: Slice) -> Iterator[list[tuple[Any, ...]]]:
        for first_id, last_id in part.ranges:
            for start in range(first_id, last_id + 1, BATCH_ROWS):
                end = min(last_id, start + BATCH_ROWS - 1)
                yield call(
                    connection, "scan_deliveries", self.schema.fieldNames(), self.queue_name, start, end
                )


READERS: dict[str, type[QueenReader]] = {"messages": MessagesReader, "deliveries": DeliveriesReader}


def queue_exists(connection: psycopg.Connection[Any], queue_name: str) -> bool:
    """Tell a mistyped queue from an empty one."""
    return bool(call(connection, "queue_exists", ["queue_exists"], queue_name)[0][0])


class QueenDataSource(DataSource):
    """The format ``queen``. Options: ``table`` (messages | deliveries), ``queue_name``, ``numSlices``."""

    #: Set by :func:`register`; where it is not, the environment of the planning process decides.
    connection: ConnectionInfo | None = None

    @classmethod
    def name(cls) -> str:
        return "queen"

    def schema(self) -> StructType:
        self._check_options()
        return TABLES[self._table]

    def reader(self, schema: StructType) -> DataSourceReader:
        self._check_options()
        check_columns(self._table, schema)
        connection = self.connection or ConnectionInfo.from_environment()
        return READERS[self._table](connection, schema, self.options.get("queue_name"), self._slices)

    @property
    def _table(self) -> str:
        table = self.options.get("table", "messages")
        if table not in TABLES:
            raise InvalidOptionError(f"no table {table!r} to read; {nearest(table, TABLES)}")
        return table

    @property
    def _slices(self) -> int:
        text = self.options.get("numSlices", str(DEFAULT_SLICES))
        if not text.isdecimal() or not 1 <= int(text) <= 100_000:
            raise InvalidOptionError(f"numSlices is a number from 1 to 100000, not {text!r}")
        return int(text)

    def _check_options(self) -> None:
        # Spark hands option names over without their case.
        known = {name.lower() for name in OPTIONS}
        for name in self.options:
            if name.lower() not in known:
                raise InvalidOptionError(f"format queen has no option {name!r}; {nearest(name, OPTIONS)}")


def register(spark: SparkSession, connection: ConnectionInfo | None = None) -> None:
    """Make ``format("queen")`` known to the session.

    The connection is taken now, from the environment of this process unless given, and goes with the class:
    the processes in which Spark plans and reads have an environment of their own.
    """
    bound_connection = connection or ConnectionInfo.from_environment()

    class BoundQueenDataSource(QueenDataSource):
        connection = bound_connection

    spark.dataSource.register(BoundQueenDataSource)
