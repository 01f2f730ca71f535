"""The other tables of ``format("queen")``, bounds from filters, and decryption."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, LessThan, LessThanOrEqual

from airflow_provider_queen.client import Keyring
from airflow_provider_queen.exceptions import InvalidOptionError
from airflow_provider_queen.spark import ConnectionInfo, Keys, QueenDataSource, register
from airflow_provider_queen.spark.ranges import Range, size
from airflow_provider_queen.spark.readers import (
    READERS,
    Bounds,
    DeadLettersReader,
    DeliveriesReader,
    MessagesReader,
    Slice,
)
from airflow_provider_queen.spark.schemas import CONSUMERS, DEAD_LETTERS, DELIVERIES, MESSAGES, TABLES
from tests.spark.apps import BOTH_SERVERS

T0 = datetime(2026, 3, 1, 12, 0, 0, 1, tzinfo=UTC)


@pytest.fixture
def rejected(database: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    """Group g has rejected three messages of ``mails``, completed two and holds four."""
    for settle, messages in (("reject", 3), ("ack", 2), (None, 4)):
        leases = database.execute(
            "SELECT lease_id FROM queen.pop('mails', NULL, 'g', %s) LIMIT 1", [messages]
        )
        lease = leases.fetchone()
        if settle:
            database.execute(f"SELECT queen.{settle}(%s)", lease)
    return database


def test_dead_letters_and_consumers(session: SparkSession, rejected: psycopg.Connection[Any]) -> None:
    dead = session.read.format("queen").option("table", "dead_letters").option("queue_name", "mails").load()
    assert dead.schema == DEAD_LETTERS
    rows = dead.orderBy("id").collect()
    assert [(row.seq, row.reason, row.transaction_id) for row in rows] == [
        (seq, "rejected", f"Default-{seq}") for seq in (1, 2, 3)
    ]
    consumers = session.read.format("queen").option("table", "consumers").load()
    assert consumers.schema == CONSUMERS
    (row,) = consumers.where("queue_name = 'mails'").collect()
    assert (row.cursor, row.pending, row.in_flight, row.total_completed) == (5, 72, 4, 2)


def test_bounds_of_filters() -> None:
    moment = datetime(2026, 3, 1, tzinfo=UTC)
    filters: list[Filter] = [
        EqualTo(("queue_name",), "orders"),
        EqualTo(("partition_name",), "a"),
        EqualTo(("consumer_group",), "g"),
        GreaterThan(("created_at",), moment),
        LessThanOrEqual(("created_at",), moment),
        LessThan(("ended_at",), moment),
        GreaterThan(("seq",), 7),
    ]
    bounds = Bounds()
    for condition in filters:
        bounds = bounds.narrowed(condition, "created_at")
    after = moment.replace(microsecond=1)
    assert bounds == Bounds("orders", "a", "g", after, after)
    assert Bounds("mails").narrowed(filters[0], "created_at") == Bounds("mails")


@BOTH_SERVERS
def test_bounds_limit_what_is_planned(queen_dsn: str, deliver: psycopg.Connection[Any]) -> None:
    def planned(reader: MessagesReader | DeliveriesReader, *filters: Filter) -> list[Slice]:
        assert list(reader.pushFilters(list(filters))) == list(filters)
        return [part for part in reader.partitions() if isinstance(part, Slice)]

    noon = datetime(2026, 3, 1, 12, 1, tzinfo=UTC)
    expected = deliver.execute(
        "SELECT count(*) FROM queen.messages WHERE queue_name = 'orders' AND created_at < %s", [noon]
    ).fetchone()
    reader = MessagesReader(ConnectionInfo(queen_dsn), MESSAGES, "orders", 3)
    parts = planned(reader, LessThan(("created_at",), noon))
    assert (sum(size([Range(*bounds) for bounds in part.ranges]) for part in parts),) == expected
    reader = MessagesReader(ConnectionInfo(queen_dsn), MESSAGES, None, 3)
    (nothing,) = planned(reader, EqualTo(("partition_name",), "nowhere"))
    assert nothing.ranges == []
    late = deliver.execute("SELECT min(id), max(id) FROM queen.deliveries WHERE ended_at >= %s", [noon])
    bounds = late.fetchone()
    deliveries = DeliveriesReader(ConnectionInfo(queen_dsn), DELIVERIES, None, 1)
    (part,) = planned(deliveries, GreaterThan(("ended_at",), noon))
    assert tuple(part.ranges[0]) == bounds


@pytest.mark.parametrize("table", ["deliveries", "dead_letters", "consumers"])
def test_names_in_filters_are_looked_for_by_the_database(
    queen_dsn: str, rejected: psycopg.Connection[Any], table: str
) -> None:
    rejected.execute("SELECT queen.pop('orders', 'a', 'other', 1, auto_ack => TRUE)")

    def rows(**names: str) -> int:
        reader = READERS[table](ConnectionInfo(queen_dsn), TABLES[table], None, 1)
        reader.pushFilters([EqualTo((column,), name) for column, name in names.items()])
        return sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part))

    of_g = rows(consumer_group="g")
    assert of_g > 0
    assert rows() == of_g + rows(consumer_group="other")
    assert rows(consumer_group="g", partition_name="a") == 0
    assert rows(queue_name="mails", partition_name="Default") == of_g


@BOTH_SERVERS
def test_dead_letters_are_read_from_a_moment_on(queen_dsn: str, rejected: psycopg.Connection[Any]) -> None:
    rejected.execute(
        "UPDATE queen.dead_letter_queue SET failed_at = failed_at - interval '1 hour' WHERE seq = 1"
    )
    reader = DeadLettersReader(ConnectionInfo(queen_dsn), DEAD_LETTERS, None, 1)
    reader.pushFilters([GreaterThan(("failed_at",), datetime.now(UTC) - timedelta(minutes=30))])
    (part,) = reader.partitions()
    assert [batch["seq"].to_pylist() for batch in reader.read(part)] == [[2, 3]]


def test_filters_reach_the_database_and_change_no_result(
    session: SparkSession, database: psycopg.Connection[Any]
) -> None:
    noon = datetime(2026, 3, 1, 12, 1, tzinfo=UTC)
    frame = (
        session.read.format("queen")
        .load()
        .where(
            (F.col("queue_name") == "orders") & (F.col("created_at") >= F.lit(noon)) & (F.col("seq") % 2 == 0)
        )
    )
    expected = database.execute(
        "SELECT count(*) FROM queen.messages"
        " WHERE queue_name = 'orders' AND created_at >= %s AND mod(seq, 2) = 0",
        [noon],
    ).fetchone()
    assert (frame.count(),) == expected
    # A queue that only a filter names need not exist.
    assert session.read.format("queen").load().where("queue_name = 'ordres'").count() == 0


def test_encrypted_payloads_are_opened_on_the_executors(
    spark: SparkSession, queen_dsn: str, database: psycopg.Connection[Any]
) -> None:
    key = Keyring.generate_key()
    database.execute("SELECT queen.configure_queue('secrets', '{\"encryption_enabled\": true}')")
    ids = ["a", "b", "c"]
    envelopes = [Keyring([key]).encrypt(f'{{"n":{n}}}', "secrets", ids[n]) for n in range(3)]
    push = "SELECT queen.push('secrets', %s, transaction_ids => %s, is_encrypted => TRUE)"
    database.execute(push, [envelopes, ids])
    register(spark, ConnectionInfo(queen_dsn), Keys(key))
    reader = spark.read.format("queen").schema("payload STRING, seq BIGINT").option("queue_name", "secrets")
    closed = reader.load().collect()
    assert all('"kid"' in row.payload for row in closed)
    opened = reader.option("decrypt", "true").load()
    assert opened.columns == ["payload", "seq"]
    assert [row.payload for row in opened.orderBy("seq").collect()] == ['{"n":0}', '{"n":1}', '{"n":2}']
    assert key not in repr(Keys(key))


def test_decrypting_without_keys_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUEEN_ENCRYPTION_KEYS", raising=False)
    source = QueenDataSource({"decrypt": "true"})
    source.connection = ConnectionInfo("dbname=q")
    with pytest.raises(InvalidOptionError, match="set QUEEN_ENCRYPTION_KEYS"):
        source.reader(MESSAGES)
