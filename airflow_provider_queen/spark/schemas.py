"""The tables that the data source offers, column by column, as Spark and as Arrow see them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import pyarrow as pa
from pyspark.sql.types import (
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from airflow_provider_queen.exceptions import InvalidOptionError
from airflow_provider_queen.spark.payloads import arrow_type, converter

MESSAGES = StructType(
    [
        StructField("id", StringType()),
        StructField("lane_id", LongType()),
        StructField("seq", LongType()),
        StructField("queue_name", StringType()),
        StructField("partition_name", StringType()),
        StructField("priority", ShortType()),
        StructField("transaction_id", StringType()),
        StructField("trace_id", StringType()),
        StructField("payload", StringType()),
        StructField("is_encrypted", BooleanType()),
        StructField("origin_transaction_id", StringType()),
        StructField("requeued_from", StringType()),
        StructField("created_at", TimestampType()),
    ]
)

DELIVERIES = StructType(
    [
        StructField("id", LongType()),
        StructField("queue_name", StringType()),
        StructField("partition_name", StringType()),
        StructField("priority", ShortType()),
        StructField("consumer_group", StringType()),
        StructField("lane_id", LongType()),
        StructField("first_seq", LongType()),
        StructField("last_seq", LongType()),
        StructField("completed", IntegerType()),
        StructField("failed", IntegerType()),
        StructField("rejected", IntegerType()),
        StructField("released", IntegerType()),
        StructField("expired", IntegerType()),
        StructField("attempt", IntegerType()),
        StructField("popped_at", TimestampType()),
        StructField("ended_at", TimestampType()),
    ]
)

DEAD_LETTERS = StructType(
    [
        StructField("id", LongType()),
        StructField("queue_name", StringType()),
        StructField("partition_name", StringType()),
        StructField("priority", ShortType()),
        StructField("consumer_group", StringType()),
        StructField("lane_id", LongType()),
        StructField("seq", LongType()),
        StructField("message_id", StringType()),
        StructField("transaction_id", StringType()),
        StructField("trace_id", StringType()),
        StructField("payload", StringType()),
        StructField("is_encrypted", BooleanType()),
        StructField("origin_transaction_id", StringType()),
        StructField("reason", StringType()),
        StructField("error_message", StringType()),
        StructField("retry_count", IntegerType()),
        StructField("original_created_at", TimestampType()),
        StructField("failed_at", TimestampType()),
        StructField("requeued_at", TimestampType()),
    ]
)

CONSUMERS = StructType(
    [
        StructField("queue_name", StringType()),
        StructField("partition_name", StringType()),
        StructField("priority", ShortType()),
        StructField("consumer_group", StringType()),
        StructField("lane_id", LongType()),
        StructField("cursor", LongType()),
        StructField("last_seq", LongType()),
        StructField("pending", LongType()),
        StructField("in_flight", LongType()),
        StructField("lease_expires_at", TimestampType()),
        StructField("popped_at", TimestampType()),
        StructField("settled_at", TimestampType()),
        StructField("total_completed", LongType()),
        StructField("total_dropped", LongType()),
        StructField("retry_limit", IntegerType()),
    ]
)

TABLES = {
    "messages": MESSAGES,
    "deliveries": DELIVERIES,
    "dead_letters": DEAD_LETTERS,
    "consumers": CONSUMERS,
}

#: Columns that are read only where ``.schema(...)`` names them, because they are computed.
ON_REQUEST = {"messages": StructType([StructField("payload_bytes", IntegerType())])}

#: The tables whose column ``payload`` may be asked for with another type than STRING.
WITH_PAYLOAD = ("messages", "dead_letters")


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known name was probably meant."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"


def select(table: str, names: Iterable[str]) -> StructType:
    """Return the schema of some columns of ``table``, for ``.schema(...)``."""
    known = known_columns(table)
    return StructType([StructField(name, known[name]) for name in names])


def known_columns(table: str) -> dict[str, DataType]:
    """What may be asked for, and its type."""
    return {field.name: field.dataType for field in [*TABLES[table], *ON_REQUEST.get(table, [])]}


def with_payload_schema(table: str, fields: str) -> str:
    """The table's schema as DDL with the payload as a structure of ``fields``, which are DDL themselves.

    Spark parses it: where a data source is planned there is no session that could.
    """
    columns = {field.name: field.dataType.simpleString() for field in TABLES[table]}
    return ", ".join(
        f"{name} {columns[name] if name != 'payload' else f'STRUCT<{fields}>'}" for name in columns
    )


def check_columns(table: str, wanted: StructType) -> None:
    """Refuse columns that the table lacks, and types that would need a cast inside the data source."""
    known = known_columns(table)
    for field in wanted:
        if field.name not in known:
            raise InvalidOptionError(f"{table} has no column {field.name!r}; {nearest(field.name, known)}")
        if field.name == "payload" and table in WITH_PAYLOAD:
            converter(field.dataType)
        elif field.dataType != known[field.name]:
            raise InvalidOptionError(
                f"column {field.name!r} of {table} is {known[field.name].simpleString()},"
                f" not {field.dataType.simpleString()}; cast it after reading"
            )


def arrow_schema(schema: StructType) -> pa.Schema:
    """Spark compares the Arrow schema of a batch field by field with its own and refuses any difference."""
    return pa.schema([pa.field(field.name, arrow_type(field.dataType), field.nullable) for field in schema])
