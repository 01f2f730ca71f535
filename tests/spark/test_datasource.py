"""``format("queen")``: what it reads, how it splits, and what one query sees."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from airflow_provider_queen.exceptions import InvalidOptionError
from airflow_provider_queen.spark import ConnectionInfo, QueenDataSource, ranges, readers
from airflow_provider_queen.spark.schemas import DELIVERIES, MESSAGES

TOTAL = 1200 + 300 + 77


def load(session: SparkSession, **options: Any) -> DataFrame:
    return session.read.format("queen").options(**options).load()


def test_reads_every_retained_message_once(session: SparkSession, database: psycopg.Connection[Any]) -> None:
    frame = load(session, numSlices=3)
    assert frame.schema == MESSAGES
    rows = frame.select("partition_name", "seq").collect()
    assert len(rows) == len(set(rows)) == TOTAL
    assert min(row.seq for row in rows if row.partition_name == "b") == 41


def test_content_and_types(session: SparkSession, database: psycopg.Connection[Any]) -> None:
    frame = load(session, queue_name="orders").where("partition_name = 'a' AND seq IN (7, 8)")
    seventh, eighth = frame.withColumn("micros", F.unix_micros("created_at")).orderBy("seq").collect()
    expected = database.execute(
        "SELECT id::text, payload::text FROM queen.messages WHERE partition_name = 'a' AND seq = 7"
    ).fetchone()
    assert expected is not None
    assert (seventh.id, seventh.payload) == expected
    assert json.loads(seventh.payload) == {"n": 7, "text": 'ä "quoted"'}
    assert seventh.transaction_id == "a-7"
    assert seventh.trace_id is None
    assert eighth.trace_id == "00000000-0000-0000-0000-000000000007"
    created = datetime(2026, 3, 1, 12, 0, 0, 1, tzinfo=UTC) + 7 * timedelta(milliseconds=137)
    assert seventh.micros == (created - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    assert (seventh.priority, seventh.is_encrypted, seventh.queue_name) == (0, False, "orders")


def test_deliveries(session: SparkSession, deliver: psycopg.Connection[Any]) -> None:
    frame = load(session, table="deliveries", queue_name="mails", numSlices=4)
    assert frame.schema == DELIVERIES
    expected = deliver.execute(
        "SELECT count(*), sum(completed), sum(last_seq) FROM queen.deliveries WHERE queue_name = 'mails'"
    ).fetchone()
    assert tuple(frame.agg(F.count("*"), F.sum("completed"), F.sum("last_seq")).collect()[0]) == expected


@pytest.mark.parametrize("slices", [1, 2, 3, 7, 64])
def test_slices_are_even_and_cover_all(
    queen_dsn: str, database: psycopg.Connection[Any], slices: int
) -> None:
    reader = readers.MessagesReader(ConnectionInfo(queen_dsn), MESSAGES, None, slices)
    parts = reader.partitions()
    slices_read = [
        [ranges.Range(*bounds) for bounds in part.ranges] for part in parts if isinstance(part, readers.Slice)
    ]
    sizes = [sum(r.last_seq - r.first_seq + 1 for r in part) for part in slices_read]
    assert len(sizes) <= slices
    assert sum(sizes) == TOTAL
    assert set(sizes[:-1]) <= {-(-TOTAL // slices)}
    seqs = [
        (r.lane_id, seq) for part in slices_read for r in part for seq in range(r.first_seq, r.last_seq + 1)
    ]
    assert len(set(seqs)) == TOTAL


def test_ranges_are_cut_to_batches() -> None:
    three = [ranges.Range(1, 1, 25), ranges.Range(2, 5, 5), ranges.Range(3, 1, 10)]
    portions = list(ranges.cut_ranges(three, 10))
    assert [sum(r.last_seq - r.first_seq + 1 for r in portion) for portion in portions] == [10, 10, 10, 6]
    assert portions[2] == [ranges.Range(1, 21, 25), ranges.Range(2, 5, 5), ranges.Range(3, 1, 4)]


def test_a_slice_is_read_in_bounded_batches(
    queen_dsn: str, database: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "BATCH_ROWS", 500)
    reader = readers.MessagesReader(ConnectionInfo(queen_dsn), MESSAGES, None, 1)
    (part,) = reader.partitions()
    assert [batch.num_rows for batch in reader.read(part)] == [500, 500, 500, 77]


def test_rows_pushed_after_planning_are_not_read(queen_dsn: str, database: psycopg.Connection[Any]) -> None:
    """All executors see the state at planning time, whenever they run."""
    reader = readers.MessagesReader(ConnectionInfo(queen_dsn), MESSAGES, None, 2)
    parts = reader.partitions()
    first = sum(batch.num_rows for batch in reader.read(parts[0]))
    for queue_name, partition in (("orders", "a"), ("orders", "b"), ("mails", "Default")):
        database.execute("SELECT queen.push(%s, ARRAY['{}'], ARRAY[%s])", [queue_name, partition])
    second = sum(batch.num_rows for batch in reader.read(parts[1]))
    assert first + second == TOTAL


def test_a_frame_is_planned_at_its_first_action(
    session: SparkSession, database: psycopg.Connection[Any]
) -> None:
    frame = load(session, queue_name="mails")
    database.execute("SELECT queen.push('mails', ARRAY['{}'])")
    assert frame.count() == 78


def test_schema_prunes_columns_in_the_database(
    session: SparkSession, queen_dsn: str, database: psycopg.Connection[Any]
) -> None:
    frame = session.read.format("queen").schema("seq BIGINT, partition_name STRING").load()
    assert frame.columns == ["seq", "partition_name"]
    assert frame.count() == TOTAL
    plan = database.execute(
        "EXPLAIN (VERBOSE, COSTS OFF) SELECT seq FROM queen.scan_messages('{1}', '{1}', '{5}')"
    ).fetchall()
    text = "\n".join(line for (line,) in plan)
    # Inlined: neither a call of the function nor the payload is left.
    assert "scan_messages" not in text
    assert "payload" not in text


def test_an_empty_queue_has_no_rows(session: SparkSession, database: psycopg.Connection[Any]) -> None:
    database.execute("SELECT queen.configure_queue('silent')")
    assert load(session, queue_name="silent").count() == 0
    assert load(session, table="deliveries").count() == 0


@pytest.mark.parametrize(
    ("options", "columns", "sentence"),
    [
        ({"tabel": "messages"}, "seq BIGINT", "did you mean 'table'"),
        ({"table": "mesages"}, "seq BIGINT", "did you mean 'messages'"),
        ({"numSlices": "many"}, "seq BIGINT", "numSlices is a number"),
        ({}, "sequ BIGINT", "did you mean 'seq'"),
        ({}, "seq STRING", "is bigint, not string"),
    ],
)
@pytest.mark.usefixtures("spark")  # which StructType.fromDDL asks
def test_mistakes_are_named(options: dict[str, str], columns: str, sentence: str) -> None:
    source = QueenDataSource(options)
    source.connection = ConnectionInfo("dbname=q")
    with pytest.raises(InvalidOptionError, match=sentence):
        source.reader(StructType.fromDDL(columns))


def test_an_unknown_queue_is_an_error_in_spark(
    session: SparkSession, database: psycopg.Connection[Any]
) -> None:
    with pytest.raises(PySparkException, match="there is no queue 'ordres'"):
        load(session, queue_name="ordres").count()
