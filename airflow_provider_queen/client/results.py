"""What the queue answers. Results are read-only; none shows a payload in its ``repr``.

Messages come by the thousand: they keep the row as the driver delivered it, ids and payload as text, and turn
a payload into Python objects when it is first asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, ClassVar, NamedTuple, TypeAlias

from airflow_provider_queen.exceptions import EncryptionError, QueenError

QUEUE_MODE = "__QUEUE_MODE__"

Row: TypeAlias = tuple[Any, ...]


def group_name(stored: str | None) -> str | None:
    """A consumer group as Python names it: None for queue mode."""
    return None if stored == QUEUE_MODE else stored


class PushResult(NamedTuple):
    """What became of one pushed message. A duplicate has the id and the seq of the first."""

    status: str
    message_id: str
    transaction_id: str
    partition: str
    seq: int
    priority: int


class PushedBatch(NamedTuple):
    """What ``queen.push_batch`` answers: for most batches a lane and the first seq, whatever their size."""

    lane_ids: list[int]
    first_seq: int | None
    seqs: list[int] | None
    is_new: list[bool] | None

    def results(self, transaction_ids: list[str], partitions: list[str] | None) -> list[PushResult]:
        """The same, a result for each message. A list may hold one element for all, as in the call."""
        count = len(transaction_ids)
        if self.seqs is not None:
            seqs: Iterable[int] = self.seqs
        else:
            assert self.first_seq is not None  # noqa: S101
            seqs = range(self.first_seq, self.first_seq + count)
        lanes = self.lane_ids if len(self.lane_ids) == count else self.lane_ids * count
        names = partitions or ["Default"]
        names = names if len(names) == count else names * count
        statuses = ["queued" if new else "duplicate" for new in self.is_new or [True] * count]
        return [
            PushResult(status, message_id(lane, seq), transaction_id, name, seq, lane % 10)
            for status, lane, seq, transaction_id, name in zip(
                statuses, lanes, seqs, transaction_ids, names, strict=True
            )
        ]


def message_id(lane_id: int, seq: int) -> str:
    """A message's address as its id: SQL's ``queen.message_id``, so that a push need not send them all."""
    digits = f"{lane_id:012x}80008{seq:015x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _column(columns: tuple[str, ...], name: str, convert: Callable[[Any], Any] | None = None) -> Any:
    """A read-only attribute that looks into the row."""
    at = columns.index(name)
    if convert is None:
        return property(lambda self: self._row[at])
    return property(lambda self: convert(self._row[at]))


# What every row with a payload begins with. Encryption and settlement look no further.
_COMMON = (
    "transaction_id",
    "queue_name",
    "payload",
    "is_encrypted",
    "origin_transaction_id",
    "trace_id",
    "priority",
    "seq",
)
TRANSACTION_ID, QUEUE_NAME, PAYLOAD, IS_ENCRYPTED, ORIGIN_TRANSACTION_ID = range(5)


class _RowWithPayload:
    """A row of the database whose payload is parsed when it is first read."""

    __slots__ = ("_body", "_payload", "_row")

    COLUMNS: ClassVar[tuple[str, ...]] = _COMMON
    _SHOWN: ClassVar[tuple[str, ...]] = ()

    transaction_id: str = _column(_COMMON, "transaction_id")
    """The producer's name for the message."""
    queue_name: str = _column(_COMMON, "queue_name")
    trace_id: str | None = _column(_COMMON, "trace_id")
    priority: int = _column(_COMMON, "priority")
    seq: int = _column(_COMMON, "seq")
    """The position among the messages of the same partition and priority."""

    def __init__(self, row: Row, body: str | EncryptionError) -> None:
        self._row = row
        self._body = body

    @property
    def payload(self) -> Any:
        """The payload as Python objects. ``EncryptionError`` where no key fits."""
        if not hasattr(self, "_payload"):
            self._payload: Any = self._parse()
        return self._payload

    @property
    def payload_text(self) -> str:
        """The payload as JSON text, decrypted: for passing it on without parsing it."""
        if isinstance(self._body, EncryptionError):
            raise EncryptionError(*self._body.args)
        return self._body

    def _parse(self) -> Any:
        text = self.payload_text
        with suppress(ValueError, RecursionError):
            return json.loads(text)
        # Raised out here: the parser's error has the whole text in it.
        raise QueenError(f"the payload of {self!r} is beyond Python's JSON parser")

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._SHOWN)
        return f"{type(self).__name__}({shown})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _RowWithPayload) or type(other) is not type(self):
            return NotImplemented
        return self._row == other._row

    def __hash__(self) -> int:
        return hash((type(self), self.queue_name, self.transaction_id, self.seq))

    def __getstate__(self) -> tuple[Row, str | EncryptionError]:
        return self._row, self._body

    def __setstate__(self, state: tuple[Row, str | EncryptionError]) -> None:
        self._row, self._body = state


class Message(_RowWithPayload):
    """A delivered message and the lease that it is held by."""

    __slots__ = ()

    COLUMNS = (
        *_COMMON,
        "message_id",
        "partition",
        "created_at",
        "attempt",
        "consumer_group",
        "lease_id",
        "lease_expires_at",
    )
    _SHOWN = ("id", "queue_name", "partition", "priority", "seq", "attempt", "consumer_group", "lease_id")

    id: str = _column(COLUMNS, "message_id")
    partition: str = _column(COLUMNS, "partition")
    created_at: datetime = _column(COLUMNS, "created_at")
    attempt: int = _column(COLUMNS, "attempt")
    """1 for the first delivery."""
    lease_id: str | None = _column(COLUMNS, "lease_id")
    """The token that settles it; None where the pop acknowledged it at once."""
    lease_expires_at: datetime | None = _column(COLUMNS, "lease_expires_at")
    """As of the delivery: ``renew`` answers with the later time."""
    consumer_group: str | None = _column(COLUMNS, "consumer_group", group_name)
    """None in queue mode."""

    def without_lease(self) -> Message:
        """The same message after it was settled."""
        return Message((*self._row[:-2], None, None), self._body)


class StoredMessage(_RowWithPayload):
    """A message as it lies in its queue, delivered or not."""

    __slots__ = ()

    COLUMNS = (*_COMMON, "id", "partition_name", "created_at", "requeued_from")
    _SHOWN = ("id", "queue_name", "partition", "priority", "seq")

    id: str = _column(COLUMNS, "id")
    partition: str = _column(COLUMNS, "partition_name")
    created_at: datetime = _column(COLUMNS, "created_at")
    requeued_from: str | None = _column(COLUMNS, "requeued_from")
    """The id of the message that was a dead letter before it became this one."""


class DeadLetter(_RowWithPayload):
    """A message that a group gave up, with its own copy of the payload."""

    __slots__ = ()

    COLUMNS = (
        *_COMMON,
        "id",
        "message_id",
        "partition",
        "consumer_group",
        "reason",
        "error_message",
        "retry_count",
        "original_created_at",
        "failed_at",
        "requeued_at",
        "requeued_message_id",
    )
    _SHOWN = ("id", "queue_name", "partition", "priority", "seq", "consumer_group", "reason")

    id: int = _column(COLUMNS, "id")
    """The number of the dead letter; ``message_id`` is the message's."""
    message_id: str = _column(COLUMNS, "message_id")
    partition: str = _column(COLUMNS, "partition")
    consumer_group: str | None = _column(COLUMNS, "consumer_group", group_name)
    """The group that gave it up; None in queue mode."""
    reason: str = _column(COLUMNS, "reason")
    error_message: str | None = _column(COLUMNS, "error_message")
    """What the last consumer said."""
    retry_count: int = _column(COLUMNS, "retry_count")
    original_created_at: datetime = _column(COLUMNS, "original_created_at")
    failed_at: datetime = _column(COLUMNS, "failed_at")
    requeued_at: datetime | None = _column(COLUMNS, "requeued_at")
    requeued_message_id: str | None = _column(COLUMNS, "requeued_message_id")
    """The id of the message that it became when it was requeued."""


@dataclass(frozen=True, slots=True)
class SettleResult:
    """How many messages ended in which way, over all leases of one call."""

    completed: int = 0
    retried: int = 0
    dead_lettered: int = 0
    dropped: int = 0
    released: int = 0
    remaining: int = 0
    """Still held by the leases."""


class Lease(NamedTuple):
    """A renewed lease."""

    lease_id: str
    lease_expires_at: datetime


@dataclass(frozen=True, slots=True)
class Depth:
    """How much waits for a group. Exact."""

    pending: int
    """Not settled, those in flight included."""
    in_flight: int
    dead_letters: int
    oldest_age_seconds: float | None
    """None where nothing is pending."""


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A queue and its options."""

    name: str
    namespace: str | None
    task: str | None
    priority: int
    lease_time: int
    retry_limit: int
    retry_delay: int
    dlq_after_max_retries: bool
    delayed_processing: int
    window_buffer: int
    max_wait_time_seconds: int
    max_queue_size: int
    max_message_bytes: int
    retention_enabled: bool
    retention_seconds: int
    completed_retention_seconds: int
    encryption_enabled: bool
    created_at: datetime

    @property
    def queue_name(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class PartitionStats:
    """One partition, priority and group of a queue; ``subscribed`` is False where no group reads it yet."""

    queue_name: str
    namespace: str | None
    task: str | None
    partition: str
    priority: int
    consumer_group: str | None
    first_seq: int | None
    last_seq: int
    retained: int
    cursor: int | None
    pending: int
    in_flight: int
    lease_expires_at: datetime | None
    ready_at: datetime | None
    oldest_age_seconds: float | None
    dead_letters: int
    total_completed: int
    total_dropped: int
    last_pushed_at: datetime | None
    last_settled_at: datetime | None
    subscribed: bool = True


@dataclass(frozen=True, slots=True)
class ConsumerGroupInfo:
    """A group's subscription to a queue."""

    consumer_group: str | None
    queue_name: str | None
    subscription_mode: str | None
    subscribed_at: datetime | None
    partitions: int
    pending: int
    in_flight: int
    last_settled_at: datetime | None


class Requeued(NamedTuple):
    """A dead letter (by its number) and the message that it became."""

    id: int
    message_id: str
    seq: int
    partition: str


class Evicted(NamedTuple):
    """Messages of a queue that waited too long for a group, and are dead letters now."""

    queue_name: str
    consumer_group: str | None
    evicted: int


class Retained(NamedTuple):
    """What retention deleted from one partition."""

    queue_name: str
    partition: str
    retention_type: str
    deleted: int


# Every option of configure_queue by name; the rules of their values are the database's.
QUEUE_OPTIONS = frozenset(option.name for option in fields(QueueInfo)) - {"name", "created_at"}
