"""Ranges of messages: seqs have no gaps, so a range says how many messages it holds without counting them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import adbc_driver_manager.dbapi as adbc
import pyarrow as pa

from airflow_provider_queen.spark.connection import call_arrow

BATCH_ROWS = 10_000


class Range(NamedTuple):
    """Consecutive seqs of one lane (partition and priority), both ends included."""

    lane_id: int
    first_seq: int
    last_seq: int


def size(ranges: Iterable[Range]) -> int:
    """How many messages the ranges hold."""
    return sum(last - first + 1 for _, first, last in ranges)


def cut_ranges(ranges: Sequence[Range], rows: int) -> Iterator[list[Range]]:
    """Regroup ranges into portions of at most ``rows`` messages."""
    portion: list[Range] = []
    room = rows
    for lane_id, first, last in ranges:
        while first <= last:
            end = min(last, first + room - 1)
            portion.append(Range(lane_id, first, end))
            room -= end - first + 1
            first = end + 1
            if room == 0:
                yield portion
                portion, room = [], rows
    if portion:
        yield portion


def bounds(ranges: Sequence[Range]) -> tuple[list[int], list[int], list[int]]:
    """The ranges as the three arrays that the SQL functions take."""
    return [r.lane_id for r in ranges], [r.first_seq for r in ranges], [r.last_seq for r in ranges]


def scan_messages(
    connection: adbc.Connection, columns: Sequence[str], ranges: Sequence[Range]
) -> Iterator[pa.RecordBatch]:
    """Read the ranges in order, a bounded number of rows per statement."""
    for portion in cut_ranges(ranges, BATCH_ROWS):
        yield call_arrow(connection, "scan_messages", columns, *bounds(portion))
