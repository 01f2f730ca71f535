"""Payloads with a schema: read as Spark's own ``from_json`` reads them, NULL where something does not fit."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from airflow_provider_queen.exceptions import InvalidOptionError
from airflow_provider_queen.spark import ConnectionInfo, QueenDataSource
from airflow_provider_queen.spark.payloads import arrow_type, parser
from airflow_provider_queen.spark.schemas import DEAD_LETTERS, MESSAGES

FIELDS = (
    "id BIGINT, small SMALLINT, name STRING, ok BOOLEAN, ratio DOUBLE, total DECIMAL(6, 2), at TIMESTAMP,"
    " day DATE, tags ARRAY<STRING>, sizes MAP<STRING, INT>, `in ner` STRUCT<n: INT>"
)
PAYLOADS = [
    {
        "id": 2**60,
        "small": 7,
        "name": 'ä "q"\n',
        "ok": True,
        "ratio": 1.5e3,
        "total": 12.345,
        "at": "2026-03-01T12:00:00.000001Z",
        "day": "2026-03-01",
        "tags": ["a", None, "b"],
        "sizes": {"x": 1, "y": None},
        "in ner": {"n": 3, "unknown": 1},
        "unknown": [1],
    },
    {},
    {"id": None, "ratio": 3, "total": 5, "name": "", "tags": [], "sizes": {}, "in ner": {}},
    {"name": {"deep": [1, "x"]}, "tags": [1, {"a": "b"}]},
    {"id": "1", "ok": "true", "ratio": "x", "day": "soon", "at": "soon", "sizes": [1], "in ner": 5},
    {"small": 70000, "total": 99999.0, "sizes": {"big": 2**40}},
]


@pytest.mark.parametrize(
    ("wanted", "text", "value"),
    [
        (StringType(), '"ü"', "ü"),
        (StringType(), '"\\ud800!"', "?!"),
        (StringType(), '{"a": 1.5}', '{"a": 1.5}'),
        (LongType(), "7", 7),
        (LongType(), "true", None),
        (LongType(), "7.0", None),
        (LongType(), str(2**63), None),
        (ShortType(), "-32768", -32768),
        (IntegerType(), str(2**31), None),
        (DoubleType(), "1", 1.0),
        (DoubleType(), "false", None),
        (BooleanType(), "1", None),
        (DecimalType(4, 1), "12.35", Decimal("12.4")),
        (DecimalType(4, 1), "999.96", None),
        (DecimalType(4, 1), "1e30", None),
        (DateType(), '"2026-03-01"', date(2026, 3, 1)),
        (TimestampType(), '"2026-03-01T12:00"', datetime(2026, 3, 1, 12, tzinfo=UTC)),
        (TimestampType(), "5", None),
        (ArrayType(LongType()), "[1, null, false]", [1, None, None]),
        (ArrayType(LongType()), "{}", None),
        (MapType(StringType(), LongType()), '{"a": 1}', [("a", 1)]),
        (StructType([StructField("a", LongType())]), "[1]", None),
    ],
)
def test_values(wanted: DataType, text: str, value: Any) -> None:
    found = parser(wanted)(text)
    assert found == value
    assert len(pa.array([found], arrow_type(wanted))) == 1


def test_as_spark_reads_them(session: SparkSession, database: psycopg.Connection[Any]) -> None:
    database.execute("SELECT queen.configure_queue('typed')")
    payloads = [json.dumps(payload, indent=1) for payload in PAYLOADS]
    database.execute("SELECT queen.push('typed', %s)", [payloads])
    reader = session.read.format("queen").option("queue_name", "typed")
    typed = reader.option("payloadSchema", FIELDS).load()
    assert [field.name for field in typed.schema] == MESSAGES.fieldNames()
    ours = [row.payload.asDict(recursive=True) for row in typed.orderBy("seq").collect()]

    plain = session.read.format("queen").option("queue_name", "typed").load()
    read = F.from_json("payload", FIELDS, {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss[.SSSSSS]X"})
    theirs = [
        row.payload.asDict(recursive=True)
        for row in plain.select("seq", read.alias("payload")).orderBy("seq").collect()
    ]
    assert ours[:3] == theirs[:3]
    # Text of a structure is the same JSON, if not the same text.
    assert json.loads(ours[3]["name"]) == json.loads(theirs[3]["name"])
    assert ours[5] == {**theirs[5], "sizes": {"big": None}}
    assert set(ours[4].values()) == {None}


def test_a_schema_of_ones_own(session: SparkSession, database: psycopg.Connection[Any]) -> None:
    frame = session.read.format("queen").schema("payload STRUCT<n: BIGINT>, seq BIGINT").load()
    rows = frame.where("payload.n = 7 OR seq = 1200").collect()
    assert {(row.payload.n, row.seq) for row in rows} == {(7, 7), (1200, 1200)}


def test_of_a_table_without_payloads_it_is_refused() -> None:
    assert isinstance(QueenDataSource({"payloadSchema": "n INT", "table": "dead_letters"}).schema(), str)
    with pytest.raises(InvalidOptionError, match="consumers has no payload"):
        QueenDataSource({"payloadSchema": "n INT", "table": "consumers"}).schema()


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        (BinaryType(), "cannot be read as binary"),
        (MapType(LongType(), StringType()), "cannot be read as map<bigint,string>"),
        (StructType([StructField("a", LongType(), nullable=False)]), "'a' may be missing"),
        (ArrayType(LongType(), containsNull=False), "none of them NOT NULL"),
    ],
)
def test_types_that_json_has_not(payload: DataType, sentence: str) -> None:
    source = QueenDataSource({"table": "dead_letters"})
    source.connection = ConnectionInfo("dbname=q")
    with pytest.raises(InvalidOptionError, match=sentence):
        source.reader(StructType([StructField("payload", payload)]))
    source.reader(DEAD_LETTERS)


def test_two_opinions_about_the_payload_are_refused() -> None:
    source = QueenDataSource({"payloadSchema": "n INT"})
    source.connection = ConnectionInfo("dbname=q")
    with pytest.raises(InvalidOptionError, match="contradict each other"):
        source.reader(MESSAGES)


def test_a_schema_that_spark_does_not_understand_is_its_error(
    session: SparkSession, database: psycopg.Connection[Any]
) -> None:
    with pytest.raises(PySparkException, match=r"(?i)parse|syntax|unsupported"):
        session.read.format("queen").option("payloadSchema", "n NUMBER!").load()
