"""Payloads with a schema: JSON text into Arrow values of the types that a query asks for.

What does not fit becomes NULL, as Spark's own ``from_json`` has it: a queue's messages need not be all alike,
and one that is different must not end the query.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
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
    StructType,
    TimestampType,
)

from airflow_provider_queen.exceptions import InvalidOptionError

Convert = Callable[[Any], Any]


def parser(wanted: DataType) -> Callable[[str | None], Any]:
    """Return what turns a payload into a value of the type, for :func:`pyarrow.array`."""
    convert = converter(wanted)
    return lambda text: None if text is None else convert(json.loads(text, parse_float=Decimal))


def arrow_type(wanted: DataType) -> pa.DataType:
    """The Arrow type that Spark expects for a type; any other is refused."""
    match wanted:
        case StructType():
            return pa.struct([pa.field(f.name, arrow_type(f.dataType), f.nullable) for f in wanted])
        case ArrayType():
            return pa.list_(pa.field("element", arrow_type(wanted.elementType), wanted.containsNull))
        case MapType():
            value = pa.field("value", arrow_type(wanted.valueType), wanted.valueContainsNull)
            return pa.map_(pa.field("key", pa.string(), nullable=False), value)
        case DecimalType():
            return pa.decimal128(wanted.precision, wanted.scale)
        case _:
            return SIMPLE[wanted][0]


def converter(wanted: DataType) -> Convert:
    """Return what turns a value of :mod:`json` into one of the type, or into None where it does not fit."""
    match wanted:
        case StructType():
            return _struct(wanted)
        case ArrayType(containsNull=True):
            return _array(converter(wanted.elementType))
        case MapType(keyType=StringType(), valueContainsNull=True):
            return _map(converter(wanted.valueType))
        case DecimalType():
            return _decimal(wanted)
        case _ if wanted in SIMPLE:
            return SIMPLE[wanted][1]
    raise InvalidOptionError(
        f"a payload cannot be read as {wanted.simpleString()}: there are STRUCT, ARRAY, MAP<STRING, ...>,"
        " STRING, BOOLEAN, SMALLINT, INT, BIGINT, DOUBLE, DECIMAL, DATE and TIMESTAMP, none of them NOT NULL"
    )


def _struct(wanted: StructType) -> Convert:
    for field in wanted:
        if not field.nullable:
            raise InvalidOptionError(f"the payload's field {field.name!r} may be missing: leave out NOT NULL")
    fields = [(field.name, converter(field.dataType)) for field in wanted]

    def convert(value: Any) -> dict[str, Any] | None:
        if not isinstance(value, dict):
            return None
        return {name: inner(value.get(name)) for name, inner in fields}

    return convert


def _array(inner: Convert) -> Convert:
    return lambda value: [inner(item) for item in value] if isinstance(value, list) else None


def _map(inner: Convert) -> Convert:
    def convert(value: Any) -> list[tuple[str, Any]] | None:
        return [(_text(key), inner(item)) for key, item in value.items()] if isinstance(value, dict) else None

    return convert


def _decimal(wanted: DecimalType) -> Convert:
    step = Decimal(1).scaleb(-wanted.scale)
    limit = Decimal(10 ** (wanted.precision - wanted.scale))

    def convert(value: Any) -> Decimal | None:
        if not isinstance(value, int | Decimal) or isinstance(value, bool):
            return None
        number = Decimal(value)
        rounded = number.quantize(step, ROUND_HALF_UP) if abs(number) < limit else limit
        return rounded if abs(rounded) < limit else None

    return convert


def _integer(bits: int) -> Convert:
    limit = 1 << (bits - 1)

    def convert(value: Any) -> int | None:
        return value if type(value) is int and -limit <= value < limit else None

    return convert


def _double(value: Any) -> float | None:
    return float(value) if isinstance(value, int | Decimal) and not isinstance(value, bool) else None


def _boolean(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _text(value: Any) -> Any:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=float)
    # JSON may name half of a surrogate pair, which no encoding has.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _timestamp(value: Any) -> datetime | None:
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _date(value: Any) -> date | None:
    try:
        return date.fromisoformat(value)
    except (TypeError, ValueError):
        return None


SIMPLE: dict[DataType, tuple[pa.DataType, Convert]] = {
    BooleanType(): (pa.bool_(), _boolean),
    DateType(): (pa.date32(), _date),
    DoubleType(): (pa.float64(), _double),
    IntegerType(): (pa.int32(), _integer(32)),
    LongType(): (pa.int64(), _integer(64)),
    ShortType(): (pa.int16(), _integer(16)),
    StringType(): (pa.string(), _text),
    TimestampType(): (pa.timestamp("us", tz="UTC"), _timestamp),
}
