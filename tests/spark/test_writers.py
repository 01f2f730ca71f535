"""``df.write.format("queen")``: order, columns, and that nothing is pushed twice."""

from __future__ import annotations

from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from airflow_provider_queen.client import Keyring
from airflow_provider_queen.exceptions import (
    EncryptionError,
    InvalidOptionError,
    QueueFullError,
    QueueNotFoundError,
)
from airflow_provider_queen.spark import ConnectionInfo, Keys, QueenDataSource, register, writers
from airflow_provider_queen.spark.writers import Pushed, QueenWriter

STORED = (
    "SELECT partition_name, priority, seq, transaction_id, trace_id::text, payload->>'n'"
    " FROM queen.messages WHERE queue_name = 'new' ORDER BY 1, 2, 3"
)
TRACE = "00000000-0000-0000-0000-000000000007"


@pytest.fixture
def queue(queen_dsn: str, database: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    database.execute("SELECT queen.configure_queue('new')")
    return database


def numbers(session: SparkSession, count: int) -> DataFrame:
    return session.range(0, count, 1, 3).select(
        F.to_json(F.struct(F.col("id").alias("n"))).alias("payload"),
        F.concat(F.lit("p"), F.col("id") % 2).alias("partition_name"),
    )


def save(frame: DataFrame, **options: str) -> None:
    frame.write.format("queen").mode("append").options(**options).save()


def test_all_columns_arrive(session: SparkSession, queue: psycopg.Connection[Any]) -> None:
    frame = session.createDataFrame(
        [('{"n": 1}', "a", "t-1", TRACE, 3), ('{"n": 2}', None, None, None, None)],
        "payload STRING, partition_name STRING, transaction_id STRING, trace_id STRING, priority SMALLINT",
    ).coalesce(1)
    save(frame, queue_name="new", write_id="job-7")
    assert queue.execute(STORED).fetchall() == [
        ("Default", 0, 1, "job-7-0-1", None, "2"),
        ("a", 3, 1, "t-1", TRACE, "1"),
    ]


def test_a_job_run_again_with_its_id_pushes_nothing_twice(
    session: SparkSession, queue: psycopg.Connection[Any]
) -> None:
    frame = numbers(session, 100)
    save(frame, queue_name="new", write_id="job-8")
    first = queue.execute(STORED).fetchall()
    assert len(first) == 100
    # Spark's partitions are pushed side by side; the rows of each keep their order.
    for task in ("job-8-0-", "job-8-1-", "job-8-2-"):
        values = [int(row[5]) for row in first if row[0] == "p0" and row[3].startswith(task)]
        assert values == sorted(values)
    save(frame, queue_name="new", write_id="job-8")
    assert queue.execute(STORED).fetchall() == first
    save(frame.limit(10), queue_name="new")
    assert len(queue.execute(STORED).fetchall()) == 110


def test_a_task_that_dies_half_way_and_is_repeated(
    queen_dsn: str, queue: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "PUSH_ROWS", 3)
    batches = [
        pa.RecordBatch.from_pydict({"payload": [f'{{"n": {n}}}' for n in range(k, k + 5)]}) for k in (0, 5)
    ]
    writer = QueenWriter(ConnectionInfo(queen_dsn), "new", "w")

    def dying() -> Any:
        yield batches[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.write(dying())
    assert writer.write(iter(batches)) == Pushed(queued=5, duplicates=5)
    assert [row[5] for row in queue.execute(STORED)] == [str(n) for n in range(10)]


def test_a_frame_that_was_read_can_be_written(session: SparkSession, queue: psycopg.Connection[Any]) -> None:
    mails = session.read.format("queen").option("queue_name", "mails").option("numSlices", 1).load()
    save(mails, queue_name="new")
    assert queue.execute(STORED).fetchall() == queue.execute(STORED.replace("'new'", "'mails'")).fetchall()


def test_rows_may_name_their_queue(queen_dsn: str, queue: psycopg.Connection[Any]) -> None:
    batch = pa.RecordBatch.from_pydict({"payload": ["1", "2", "3"], "queue_name": ["new", "mails", "new"]})
    assert QueenWriter(ConnectionInfo(queen_dsn), None, "w").write(iter([batch])) == Pushed(3, 0)
    assert len(queue.execute(STORED).fetchall()) == 2


def test_what_the_database_refuses(queen_dsn: str, queue: psycopg.Connection[Any]) -> None:
    batch = pa.RecordBatch.from_pydict({"payload": ["1", "2", "3"]})
    with pytest.raises(QueueNotFoundError, match="'nwe'"):
        QueenWriter(ConnectionInfo(queen_dsn), "nwe", "w").write(iter([batch]))
    queue.execute("SELECT queen.configure_queue('new', '{\"max_queue_size\": 2}')")
    with pytest.raises(QueueFullError):
        QueenWriter(ConnectionInfo(queen_dsn), "new", "w").write(iter([batch]))


def test_an_encrypted_queue(spark: SparkSession, queen_dsn: str, queue: psycopg.Connection[Any]) -> None:
    key = Keyring.generate_key()
    queue.execute("SELECT queen.configure_queue('new', '{\"encryption_enabled\": true}')")
    register(spark, ConnectionInfo(queen_dsn), Keys(key))
    plain = pa.RecordBatch.from_pydict({"payload": ["1"]})
    with pytest.raises(EncryptionError, match="takes encrypted payloads only"):
        QueenWriter(ConnectionInfo(queen_dsn), "new", "w").write(iter([plain]))
    save(numbers(spark, 4).coalesce(1), queue_name="new", encrypt="true")
    rows = queue.execute(
        "SELECT payload::text, queue_name, transaction_id FROM queen.messages"
        " WHERE queue_name = 'new' ORDER BY transaction_id"
    ).fetchall()
    assert [Keyring([key]).decrypt(*row) for row in rows] == [f'{{"n":{n}}}' for n in range(4)]


@pytest.mark.parametrize(
    ("columns", "options", "sentence"),
    [
        ("payload STRING", {}, "name the queue in option 'queue_name'"),
        ("pay STRING", {"queue_name": "new"}, "needs the column 'payload'"),
        ("payload STRING, partition STRING", {"queue_name": "new"}, "did you mean 'partition_name'"),
        ("payload STRUCT<n: INT>", {"queue_name": "new"}, "to_json"),
        ("payload STRING, priority INT", {"queue_name": "new"}, "cast it to SMALLINT"),
        ("payload STRING", {"queue": "new"}, "did you mean 'queue_name'"),
    ],
)
def test_mistakes_are_named(columns: str, options: dict[str, str], sentence: str) -> None:
    source = QueenDataSource(options)
    source.connection = ConnectionInfo("dbname=q")
    with pytest.raises(InvalidOptionError, match=sentence):
        source.writer(StructType.fromDDL(columns), False)


def test_a_queue_is_not_overwritten() -> None:
    with pytest.raises(InvalidOptionError, match="cannot be overwritten"):
        QueenDataSource({"queue_name": "new"}).writer(StructType.fromDDL("payload STRING"), True)
