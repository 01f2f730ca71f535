"""``readStream`` and ``writeStream``: offsets per lane, limits, restarts without loss or doubles."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from airflow_provider_queen.exceptions import InvalidOptionError
from airflow_provider_queen.spark import ConnectionInfo, QueenDataSource
from airflow_provider_queen.spark.ranges import Range
from airflow_provider_queen.spark.readers import MessagesReader, Slice
from airflow_provider_queen.spark.schemas import MESSAGES, select
from airflow_provider_queen.spark.streams import MessagesStream, shared

SLIM = select("messages", ["lane_id", "seq", "transaction_id"])


def stream(session: SparkSession, **options: str) -> DataFrame:
    return session.readStream.format("queen").schema(SLIM).options(**options).load()


def run_to_the_end(frame: DataFrame, folder: Path) -> list[dict[str, Any]]:
    query = (
        frame.writeStream.format("parquet")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .option("path", str(folder / "out"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]


def test_into_parquet_and_on_from_the_checkpoint(
    session: SparkSession, database: psycopg.Connection[Any], tmp_path: Path
) -> None:
    frame = stream(session, maxMessagesPerTrigger="700")
    assert run_to_the_end(frame, tmp_path) == [700, 700, 177]
    database.execute("SELECT queen.push('orders', ARRAY['1', '2'], ARRAY['a'])")
    database.execute("SELECT queen.push('orders', ARRAY['3'], ARRAY['born later'])")
    assert run_to_the_end(frame, tmp_path) == [3]
    read = Counter(tuple(row) for row in session.read.parquet(str(tmp_path / "out")).collect())
    stored = database.execute("SELECT lane_id, seq, transaction_id FROM queen.message_log").fetchall()
    assert read == Counter(stored)
    assert set(read.values()) == {1}


def reading(dsn: str, **more: Any) -> MessagesStream:
    return MessagesStream(MessagesReader(ConnectionInfo(dsn), MESSAGES, "orders", 2), **more)


def rows_of(source: MessagesStream, start: dict[str, int], end: dict[str, int]) -> list[tuple[int, int]]:
    return [
        (row["lane_id"], row["seq"])
        for part in source.partitions(start, end)
        for batch in source.read(part)
        for row in batch.to_pylist()
    ]


def test_a_repeated_micro_batch_is_the_same(queen_dsn: str, database: psycopg.Connection[Any]) -> None:
    source = reading(queen_dsn)
    end = source.latestOffset({}, ReadMaxRows(500))
    first = rows_of(source, {}, end)
    assert len(first) == 500
    database.execute("SELECT queen.push('orders', ARRAY['1'], ARRAY['a'])")
    assert rows_of(reading(queen_dsn), {}, end) == first
    rest = rows_of(source, end, source.latestOffset(end, ReadAllAvailable()))
    assert len(first) + len(rest) == len(set(first) | set(rest)) == 1501


def test_from_the_end(queen_dsn: str, database: psycopg.Connection[Any]) -> None:
    source = reading(queen_dsn, from_end=True)
    start = source.initialOffset()
    assert source.latestOffset(start, ReadAllAvailable()) == start
    assert source.partitions(start, start) == []
    database.execute("SELECT queen.push('orders', ARRAY['1'], ARRAY['empty'])")
    assert [seq for _, seq in rows_of(source, start, source.reportLatestOffset())] == [8]


def test_available_now_ends_where_it_began(queen_dsn: str, database: psycopg.Connection[Any]) -> None:
    source = reading(queen_dsn)
    source.prepareForTriggerAvailableNow()
    database.execute("SELECT queen.push('orders', ARRAY['1'], ARRAY['a'])")
    end = source.latestOffset({}, ReadAllAvailable())
    assert len(rows_of(source, {}, end)) == 1500
    assert source.latestOffset(end, ReadAllAvailable()) == end


def test_slices_of_a_micro_batch_are_even(queen_dsn: str, database: psycopg.Connection[Any]) -> None:
    parts = reading(queen_dsn).partitions({}, reading(queen_dsn).reportLatestOffset())
    sizes = [sum(last - first + 1 for _, first, last in p.ranges) for p in parts if isinstance(p, Slice)]
    assert sizes == [750, 750]


@pytest.mark.parametrize(
    ("room", "taken"),
    [(6, [1, 3, 2]), (100, [1, 5, 50]), (3, [1, 1, 1]), (2, [0, 1, 1])],
)
def test_room_is_shared(room: int, taken: list[int]) -> None:
    waiting = {str(lane): Range(lane, 11, 10 + n) for lane, n in ((1, 1), (2, 5), (3, 50))}
    chosen = shared(waiting, room)
    sizes = [chosen[lane].last_seq - 10 if lane in chosen else 0 for lane in waiting]
    assert sizes == taken


def test_a_stream_into_a_queue(
    session: SparkSession, database: psycopg.Connection[Any], tmp_path: Path
) -> None:
    database.execute("SELECT queen.configure_queue('copy')")
    source = session.readStream.format("queen").option("queue_name", "mails").load()
    for checkpoint in ("first", "lost"):  # a new checkpoint reads everything again
        query = (
            source.select("payload", "partition_name", "transaction_id", "trace_id")
            .writeStream.format("queen")
            .option("queue_name", "copy")
            .option("checkpointLocation", str(tmp_path / checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)
    copied = "SELECT transaction_id, payload::text FROM queen.messages WHERE queue_name = '{}' ORDER BY 1"
    expected = database.execute(copied.format("mails")).fetchall()
    assert database.execute(copied.format("copy")).fetchall() == expected


def test_mistakes_are_named() -> None:
    with pytest.raises(InvalidOptionError, match="earliest or latest, not 'middle'"):
        source({"startingOffsets": "middle"}).streamReader(MESSAGES)
    with pytest.raises(InvalidOptionError, match="maxMessagesPerTrigger is a number"):
        source({"maxMessagesPerTrigger": "0"}).streamReader(MESSAGES)
    with pytest.raises(InvalidOptionError, match="needs the column 'transaction_id'"):
        source({"queue_name": "mails"}).streamWriter(select("messages", ["payload"]), False)


def source(options: dict[str, str]) -> QueenDataSource:
    made = QueenDataSource(options)
    made.connection = ConnectionInfo("dbname=q")
    return made
