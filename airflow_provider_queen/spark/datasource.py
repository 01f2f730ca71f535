"""The format ``queen``: which options it takes, and what reads and writes for them."""

from __future__ import annotations

import uuid

from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StringType, StructType

from airflow_provider_queen.exceptions import InvalidOptionError
from airflow_provider_queen.spark.connection import ConnectionInfo, Keys
from airflow_provider_queen.spark.readers import READERS, MessagesReader
from airflow_provider_queen.spark.schemas import (
    TABLES,
    WITH_PAYLOAD,
    check_columns,
    nearest,
    with_payload_schema,
)
from airflow_provider_queen.spark.streams import MessagesStream
from airflow_provider_queen.spark.writers import QueenStreamWriter, QueenWriter, check_frame

DEFAULT_SLICES = 2
READ_OPTIONS = ("table", "queue_name", "payloadSchema", "numSlices", "decrypt")
STREAM_OPTIONS = (
    "queue_name",
    "payloadSchema",
    "numSlices",
    "decrypt",
    "startingOffsets",
    "maxMessagesPerTrigger",
)
WRITE_OPTIONS = ("queue_name", "write_id", "encrypt")
STREAM_WRITE_OPTIONS = ("queue_name", "encrypt")
#: What Spark itself adds to the options of a stream's sink.
SPARKS_OWN = frozenset({"checkpointlocation", "path"})


class QueenDataSource(DataSource):
    """The format ``queen``; docs/spark.md lists its options."""

    #: Set by :func:`register`; where they are not, the environment of the planning process decides.
    connection: ConnectionInfo | None = None
    keys: Keys | None = None

    @classmethod
    def name(cls) -> str:
        return "queen"

    def schema(self) -> StructType | str:
        fields = self.options.get("payloadSchema")
        if fields is None:
            return TABLES[self._table]
        if self._table not in WITH_PAYLOAD:
            raise InvalidOptionError(f"{self._table} has no payload, so that payloadSchema says nothing")
        return with_payload_schema(self._table, fields)

    def reader(self, schema: StructType) -> DataSourceReader:
        self._check_options(READ_OPTIONS)
        self._check_payload(schema)
        check_columns(self._table, schema)
        keys = self._keys_for("decrypt") if self._table in WITH_PAYLOAD else None
        return READERS[self._table](self._connection, schema, self._queue_name, self._slices, keys)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        self._check_options(STREAM_OPTIONS)
        self._check_payload(schema)
        check_columns("messages", schema)
        reader = MessagesReader(
            self._connection, schema, self._queue_name, self._slices, self._keys_for("decrypt")
        )
        start = self._one_of("startingOffsets", "earliest", "latest")
        return MessagesStream(reader, start == "latest", self._number("maxMessagesPerTrigger", None))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        self._check_options(WRITE_OPTIONS)
        if overwrite:
            raise InvalidOptionError("a queue cannot be overwritten: use mode('append')")
        check_frame(schema, self._queue_name)
        write_id = self.options.get("write_id") or f"spark-{uuid.uuid4().hex}"
        return QueenWriter(self._connection, self._queue_name, write_id, self._keys_for("encrypt"))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        self._check_options(STREAM_WRITE_OPTIONS)
        check_frame(schema, self._queue_name)
        if "transaction_id" not in schema.fieldNames():
            raise InvalidOptionError(
                "a stream into format queen needs the column 'transaction_id': a repeated micro-batch must"
                " bring the same ids"
            )
        return QueenStreamWriter(self._connection, self._queue_name, "", self._keys_for("encrypt"))

    @property
    def _connection(self) -> ConnectionInfo:
        return self.connection or ConnectionInfo.from_environment()

    @property
    def _queue_name(self) -> str | None:
        return self.options.get("queue_name")

    @property
    def _table(self) -> str:
        table = self.options.get("table", "messages")
        if table not in TABLES:
            raise InvalidOptionError(f"no table {table!r} to read; {nearest(table, TABLES)}")
        return table

    @property
    def _slices(self) -> int:
        return self._number("numSlices", DEFAULT_SLICES) or DEFAULT_SLICES

    def _number(self, option: str, default: int | None) -> int | None:
        text = self.options.get(option)
        if text is None:
            return default
        if not text.isdecimal() or not 1 <= int(text) <= 1_000_000_000:
            raise InvalidOptionError(f"{option} is a number from 1 to 1000000000, not {text!r}")
        return int(text)

    def _one_of(self, option: str, default: str, *others: str) -> str:
        value = self.options.get(option, default)
        if value not in (default, *others):
            raise InvalidOptionError(f"{option} is {' or '.join((default, *others))}, not {value!r}")
        return value

    def _keys_for(self, option: str) -> Keys | None:
        if self._one_of(option, "false", "true") == "false":
            return None
        return self.keys or Keys.from_environment()

    def _check_payload(self, schema: StructType) -> None:
        # A schema of the caller's own replaces ours, and with it what the option says.
        if "payloadSchema" in self.options and any(
            field.name == "payload" and field.dataType == StringType() for field in schema
        ):
            raise InvalidOptionError("payloadSchema and .schema(...) contradict each other about 'payload'")

    def _check_options(self, known: tuple[str, ...]) -> None:
        # Spark hands option names over without their case.
        folded = {name.lower() for name in known} | SPARKS_OWN
        for name in self.options:
            if name.lower() not in folded:
                raise InvalidOptionError(f"format queen has no option {name!r}; {nearest(name, known)}")


def register(spark: SparkSession, connection: ConnectionInfo | None = None, keys: Keys | None = None) -> None:
    """Make ``format("queen")`` known to the session, and let Spark hand filters down to it.

    Connection and keys are taken now, from the environment of this process unless given, and go with the
    class: the processes in which Spark plans and reads have an environment of their own.
    """
    bound_connection = connection or ConnectionInfo.from_environment()
    bound_keys = keys or Keys.from_environment(required=False)

    class BoundQueenDataSource(QueenDataSource):
        connection = bound_connection
        keys = bound_keys

    spark.dataSource.register(BoundQueenDataSource)
    # Without it Spark refuses readers that take filters, instead of not handing them any.
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
