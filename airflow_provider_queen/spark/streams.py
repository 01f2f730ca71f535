"""Streaming read: an offset is the last seq of each lane, so a micro-batch always names the same messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from airflow_provider_queen.spark.connection import call, check_queue
from airflow_provider_queen.spark.ranges import Range, cut_ranges, size
from airflow_provider_queen.spark.readers import MessagesReader, Slice

#: Lane, as text because JSON has no other keys, to the last seq that was read.
Offset = dict[str, int]
Spans = dict[str, Range]


@dataclass
class MessagesStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads messages as they are pushed, each lane in seq order.

    Seq order is commit order: a lane's messages up to a seq that was seen never change any more, so neither a
    restart nor a repeated micro-batch loses or doubles anything.

    :param reader: reads the messages
    :param from_end: a new query starts with what is pushed from now on
    :param max_messages: per micro-batch; None: as many as there are
    """

    reader: MessagesReader
    from_end: bool = False
    max_messages: int | None = None

    def __post_init__(self) -> None:
        self.target: Offset | None = None

    def initialOffset(self) -> Offset:
        return ends(self._spans()) if self.from_end else {}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable() if self.max_messages is None else ReadMaxRows(self.max_messages)

    def prepareForTriggerAvailableNow(self) -> None:
        self.target = ends(self._spans())

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        waiting = unread(self._spans(), start, self.target)
        room = limit.max_rows if isinstance(limit, ReadMaxRows) else size(waiting.values())
        return {**start, **ends(shared(waiting, room))}

    def reportLatestOffset(self) -> Offset:
        return ends(self._spans())

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        ranges = list(unread(self._spans(), start, end).values())
        if not ranges:
            return []
        return [Slice(part) for part in cut_ranges(ranges, -(-size(ranges) // self.reader.slices))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.reader.read(partition)

    def _spans(self) -> Spans:
        with self.reader.connection.connect() as connection:
            check_queue(connection, self.reader.queue_name)
            rows: list[tuple[Any, ...]] = call(
                connection, "message_spans", Range._fields, self.reader.queue_name, None, None, None
            )
        return {str(row[0]): Range(*row) for row in sorted(rows)}


def ends(spans: Mapping[str, Range]) -> Offset:
    """The offset behind everything that the spans hold."""
    return {lane: span.last_seq for lane, span in spans.items()}


def unread(spans: Spans, start: Offset, end: Offset | None) -> Spans:
    """What of the spans lies behind ``start`` and, where there is an ``end``, not behind that."""
    rest: Spans = {}
    for lane, span in spans.items():
        first = max(span.first_seq, start.get(lane, 0) + 1)
        last = span.last_seq if end is None else min(span.last_seq, end.get(lane, 0))
        if first <= last:
            rest[lane] = Range(span.lane_id, first, last)
    return rest


def shared(waiting: Spans, room: int) -> Spans:
    """At most ``room`` messages: each lane the same share, and what short lanes leave goes to longer ones.

    Where there are more lanes than room, the longest come first: no lane waits for ever.
    """
    chosen: Spans = {}
    lanes = sorted(waiting, key=lambda lane: size([waiting[lane]]))[-room:]
    for position, lane in enumerate(lanes):
        lane_id, first, last = waiting[lane]
        share = min(last - first + 1, -(-room // (len(lanes) - position)))
        if share > 0:
            chosen[lane] = Range(lane_id, first, first + share - 1)
            room -= share
    return chosen
