"""Databases of Queen v2 to migrate: all that such a database may hold, from a seed.

What matters is decided by counting, so that a small database has it too; only how much of it there is and in
which order is left to chance. No time here depends on the clock: two databases of one seed are the same.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import UUID

import psycopg

from airflow_provider_queen import resources

Sql = psycopg.Connection[Any]

QUEUE_MODE = "__QUEUE_MODE__"
EPOCH = datetime(2025, 3, 1, tzinfo=UTC)
PAST = datetime(2025, 6, 1, tzinfo=UTC)  # after all messages, before today
FUTURE = datetime(2099, 1, 1, tzinfo=UTC)
STEP = timedelta(milliseconds=7, microseconds=1)  # between two transactions of a partition

# What SQL, COPY and format strings stumble over; the second is filled up to the longest that a name may be.
ODD_NAMES = ('it\'s "quoted" back\\slash\\N %s {x} $1', "очередь\t队列 🐝")

# retry_limit and the two dead letter options in all combinations that matter, and the others at all.
QUEUE_OPTIONS: tuple[dict[str, Any], ...] = (
    {"dlq_after_max_retries": True, "namespace": "shop", "task": "bill", "priority": 7},
    {"retry_limit": 0, "dead_letter_queue": True, "namespace": "o'shop", "lease_time": 1, "retry_delay": 0},
    {"retry_limit": 1, "task": "ship", "priority": -3, "encryption_enabled": True, "max_queue_size": 10**6},
    {"dlq_after_max_retries": True, "dead_letter_queue": True, "retention_enabled": True,
     "retention_seconds": 86400, "completed_retention_seconds": 3600, "delayed_processing": 5,
     "window_buffer": 2, "max_wait_time_seconds": 10**9},
)  # fmt: skip
PAYLOADS = (
    '{{"n": {n}, "a": {{"z": [1, {{"y": null}}], "b": "c"}}}}', '{{"n": {n}}}', '[{n}, "2", [], {{}}, null]',
    '"text {n}"', "{n}", "null", "true", '"ünï ☃ 🐝 \\" \\\\ \\n"', "-{n}.50", "0.12345678901234567890123{n}",
    "1234567890123456789012{n}", '""', '{{"": {{"é": "{n}"}}, "big": 1e40}}',
)  # fmt: skip

# (status, retries beyond the limit or None for no retries at all): below the cursor, and beyond it.
SETTLED = (
    ("completed", None),
    ("completed", -1),
    ("dead_letter", 0),
    ("failed", 0),
    ("failed", 2),
    ("evicted", None),
)
UNSETTLED = (("pending", None), ("processing", 1), ("failed", -1), ("pending", -2))

COLUMNS = {
    "queues": "id name namespace task priority lease_time retry_limit retry_delay dead_letter_queue"
    " dlq_after_max_retries delayed_processing window_buffer retention_seconds completed_retention_seconds"
    " retention_enabled encryption_enabled max_wait_time_seconds max_queue_size",
    "partitions": "id queue_id name",
    "messages": "id transaction_id trace_id partition_id payload created_at is_encrypted",
    "messages_status": "id message_id consumer_group status error_message retry_count",
    "partition_cursors": "id partition_id consumer_group last_consumed_created_at last_consumed_id",
    "partition_leases": "id partition_id consumer_group lease_expires_at message_batch batch_size"
    " released_at",
    "consumer_groups": "id queue_id name subscription_start_from active",
    "dead_letter_queue": "id message_id partition_id consumer_group error_message retry_count"
    " original_created_at failed_at",
    "retention_history": "id partition_id messages_deleted retention_type executed_at",
}


@dataclass(slots=True)
class _Message:
    id: str
    at: datetime


@dataclass
class _Database:
    chance: random.Random
    rows: dict[str, list[Sequence[Any]]] = field(default_factory=lambda: {table: [] for table in COLUMNS})

    def add(self, table: str, *values: Any) -> str:
        """A row with an id of its own, which is returned."""
        new = self.new_id()
        self.rows[table].append((new, *values))
        return new

    def new_id(self) -> str:
        bits = f"{self.chance.getrandbits(128):032x}"  # as str(UUID(…)), in a third of the time
        return f"{bits[:8]}-{bits[8:12]}-{bits[12:16]}-{bits[16:20]}-{bits[20:]}"


def generate_schema(connection: Sql) -> None:
    """The tables of v2, empty, in the schema ``queen``."""
    connection.execute("CREATE SCHEMA queen")
    connection.execute((resources.sql_folder() / "migrations" / "0000_v2.up.sql").read_text(encoding="utf-8"))


def generate(
    connection: Sql, *, messages: int, seed: int = 7, queues: int = 4, partitions: int = 6, groups: int = 3
) -> None:
    """Fill v2's tables in the schema ``queen``, which are there and empty.

    :param queues: with partitions; the last of them has no groups. There is one more that is all empty
    :param partitions: of each queue; the last of them has lost its messages to retention
    :param groups: of each queue, queue mode among them; some queues have an odd one in addition
    """
    db = _Database(random.Random(seed))  # noqa: S311 - reproducible is what it has to be
    full = [(queue, partition) for queue in range(queues) for partition in range(max(partitions - 1, 1))]
    shares = _shares(db.chance, messages, len(full))
    number = 0
    for queue in range(queues):
        options = QUEUE_OPTIONS[queue % len(QUEUE_OPTIONS)]
        queue_id = _add_queue(db, _name("queue", queue), options)
        readers = [] if queue == queues - 1 else [_reader(group) for group in range(groups)]
        _add_groups(db, queue, queue_id, readers)
        for partition in range(partitions):
            partition_id = db.add(
                "partitions", queue_id, _name("partition", partition, None if partition else "Default")
            )
            count = shares[full.index((queue, partition))] if (queue, partition) in full else 0
            stored = _add_messages(db, partition_id, number, count, options)
            number += count
            for group, reader in enumerate(readers):
                kind = (queue * partitions + partition) * groups + group
                _add_consumer(db, kind, partition_id, reader, stored, options)
            if partition % 2 or not count:
                _add_retention(db, partition_id, partition)
            if readers and partition == 0:
                _add_odd_groups(db, queue, partition_id, stored)
    # Every option may be NULL in v2.
    _add_queue(db, "no partitions", dict.fromkeys(COLUMNS["queues"].split()[2:]))
    db.add("retention_history", None, 3, "evicted", PAST)  # v2 evicts from a queue without saying from which
    _store(connection, db)


def _name(kind: str, number: int, plain: str | None = None) -> str:
    """An ordinary name, then two odd ones, the second as long as can be, then ordinary ones."""
    if number not in (1, 2):
        return plain or f"{kind}-{number}"
    odd = f"{kind} {ODD_NAMES[number - 1]}"
    return odd.ljust(255, "ß") if number == 2 else odd


def _reader(group: int) -> str:
    return QUEUE_MODE if group == 0 else _name("group", group)


def _shares(chance: random.Random, total: int, parts: int) -> list[int]:
    """Parts of different sizes."""
    cuts = sorted(chance.sample(range(1, parts * 20), parts - 1))
    bounds = [0, *(cut * total // (parts * 20) for cut in cuts), total]
    return [after - before for before, after in pairwise(bounds)]


def _add_queue(db: _Database, name: str, options: dict[str, Any]) -> str:
    defaults = dict.fromkeys(COLUMNS["queues"].split()[2:], 0) | {
        "namespace": None, "task": None, "lease_time": 300, "retry_limit": 3, "retry_delay": 1000,
        "dead_letter_queue": False, "dlq_after_max_retries": False, "retention_enabled": False,
        "encryption_enabled": False,
    }  # fmt: skip
    return db.add("queues", name, *(defaults | options).values())


def _add_groups(db: _Database, queue: int, queue_id: str, readers: list[str]) -> None:
    for group, reader in enumerate(readers):
        # Queue mode has no row, as in v2; of the others every third is known by what it consumed alone.
        if reader != QUEUE_MODE and (queue + group) % 3:
            since = EPOCH + STEP * 20 if (queue + group) % 3 == 2 else None
            db.add("consumer_groups", queue_id, reader, since, queue != group)
    if readers and queue == 0:
        db.add("consumer_groups", queue_id, "subscribed, never seen", None, False)
        db.add("consumer_groups", queue_id, "subscribed since", EPOCH + STEP * 5, True)


def _add_messages(
    db: _Database, partition_id: str, first: int, count: int, options: dict[str, Any]
) -> list[_Message]:
    """In transactions of up to five messages, which share a time; in order as consumers see them."""
    at, left, stored = EPOCH, 0, []
    for number in range(first, first + count):
        if left == 0:
            left, at = db.chance.randrange(1, 6), at + STEP * db.chance.randrange(3)
        left -= 1
        encrypted = options.get("encryption_enabled", False) and number % 10 != 0
        payload = PAYLOADS[number % len(PAYLOADS)].format(n=number)
        if encrypted:
            payload = f'{{"encrypted": "{number:x}", "iv": "00", "authTag": "ff"}}'
        trace_id = None if number % 50 == 0 else db.new_id()
        flag = encrypted or (None if number % 70 == 0 else False)
        new = db.add("messages", _transaction_id(number), trace_id, partition_id, payload, at, flag)
        stored.append(_Message(new, at))
    return sorted(stored, key=lambda message: (message.at, message.id))


def _transaction_id(number: int) -> str:
    if number % 40:
        return f"tx-{number}"
    odd = f"{number} {ODD_NAMES[number // 40 % len(ODD_NAMES)]}"
    return odd.ljust(255, "☃") if number % 80 else odd


def _add_consumer(
    db: _Database, kind: int, partition_id: str, reader: str, stored: list[_Message], options: dict[str, Any]
) -> None:
    """What a group has done in a partition: a cursor, statuses around it, dead letters, a lease."""
    position = _add_cursor(db, kind, partition_id, reader, stored)
    limit = options.get("retry_limit", 3)
    unsettled = [_Message(db.new_id(), EPOCH)]  # a message that is gone, or never was
    for place, message in enumerate(stored):
        draw = db.chance.random()
        if draw > 0.4:
            if place >= position:
                unsettled.append(message)
            continue
        # Mostly settled, below the cursor and in islands beyond it; the others are left over on both sides.
        likely, rare = (SETTLED, UNSETTLED) if place < position or place // 7 % 2 else (UNSETTLED, SETTLED)
        statuses = likely if draw > 0.06 else rare
        status, beyond = statuses[place % len(statuses)]
        retries = 0 if beyond is None else max(limit + beyond, 0)
        if (status, beyond) in UNSETTLED:
            unsettled.append(message)
        group = None if reader == QUEUE_MODE and place % 3 else reader
        error = f"it's {status} \\ {retries}" if beyond is not None else None
        if draw < 0.39:
            db.add("messages_status", message.id, group, status, error, retries)
        # Beside a status of any kind, or alone; once, or several times.
        if (status == "dead_letter" and place % 2) or draw < 0.01 or draw >= 0.39:
            _add_dead_letters(db, message, partition_id, group, place % 3 + 1)
    _add_lease(db, kind, partition_id, reader, stored, unsettled)


def _add_cursor(db: _Database, kind: int, partition_id: str, reader: str, stored: list[_Message]) -> int:
    """How many messages the cursor is beyond."""
    position = len(stored) * (1 + kind % 9) // 10
    if kind % 11 == 1 or (kind % 7 == 5 and stored):  # none at all
        return 0
    if kind % 7 == 3:
        nil = str(UUID(int=0)) if kind % 2 else None
        db.add("partition_cursors", partition_id, reader, None, nil)
        return 0
    if kind % 7 == 1 or not position:  # what it points at is gone; so may be all that came before
        at = stored[position - 1].at if position else EPOCH - STEP
        gone = db.new_id()
        db.add("partition_cursors", partition_id, reader, at, gone)
        return sum((message.at, message.id) <= (at, gone) for message in stored)
    position = len(stored) if kind % 7 == 6 else position
    last = stored[position - 1]
    db.add("partition_cursors", partition_id, reader, last.at, last.id)
    return position


def _add_dead_letters(
    db: _Database, message: _Message, partition_id: str, group: str | None, times: int
) -> None:
    for time in range(times):
        # The second at the same moment as the first: then the lower id is the earlier one.
        failed_at = PAST + STEP * (time // 2)
        error = None if message.id[0] == "0" else f'"{time}" ☃'
        created_at = None if message.id[1] == "0" else message.at
        db.add("dead_letter_queue", message.id, partition_id, group, error, time, created_at, failed_at)


def _add_lease(
    db: _Database,
    kind: int,
    partition_id: str,
    reader: str,
    stored: list[_Message],
    unsettled: list[_Message],
) -> None:
    chosen = [message.id for message in db.chance.sample(unsettled, min(len(unsettled), 9))]
    chosen += [message.id for message in stored[:2]]
    objects = [{"id": each, "transactionId": "x", "retryCount": 0} for each in chosen]
    # (message_batch, batch_size, expires, released): live ones as v2 wrote them over time, then the others.
    leases: tuple[tuple[Any, int, datetime, datetime | None], ...] = (
        (chosen, 100, FUTURE, None),
        (objects, len(objects), FUTURE, None),
        (None, 7, FUTURE, None),
        (chosen, 100, PAST, None),
        ({"ids": chosen}, 3, FUTURE, None),
        (objects, 5, FUTURE, PAST),
        ([], 5, FUTURE, None),
        (None, 10**6, FUTURE, None),
        (None, 0, FUTURE, None),
        (None, 9, PAST, PAST),
    )
    if kind % 13 < len(leases):
        batch, size, expires, released = leases[kind % 13]
        text = None if batch is None else json.dumps(batch)
        db.add("partition_leases", partition_id, reader, expires + STEP * kind, text, size, released)


def _add_odd_groups(db: _Database, queue: int, partition_id: str, stored: list[_Message]) -> None:
    """Groups that nothing but one row of one kind speaks of."""
    if queue == 0:
        db.add("partition_leases", partition_id, "only a 'lease'", FUTURE, None, 5, None)
        db.add("dead_letter_queue", None, partition_id, "only a dead letter, gone", "?", 1, EPOCH, PAST)
    elif queue == 1:
        db.add("partition_leases", partition_id, "only a lease that ran out", PAST, None, 5, None)
        db.add("partition_cursors", partition_id, "only a cursor", None, None)
    else:
        for message in stored[:1]:
            db.add("dead_letter_queue", message.id, partition_id, "only a letter", "?", 1, message.at, PAST)
            db.add("messages_status", message.id, "only a status", "processing", None, 2)


def _add_retention(db: _Database, partition_id: str, partition: int) -> None:
    for time, kind in enumerate(("retention", "completed", "evicted")):
        db.add("retention_history", partition_id, partition * 10 + time, kind, PAST + STEP * time)


def _store(connection: Sql, db: _Database) -> None:
    # Rows do not lie in the order of their times.
    db.chance.shuffle(db.rows["messages"])
    with connection.transaction():
        # v2's trigger updates the partition for every message: quadratic in one transaction.
        connection.execute("SET LOCAL session_replication_role = replica")
        for table, columns in COLUMNS.items():
            _copy(connection, f"COPY queen.{table} ({', '.join(columns.split())}) FROM STDIN", db.rows[table])
        connection.execute("SET LOCAL session_replication_role = origin")
    connection.execute("ANALYZE")


def _copy(connection: Sql, statement: str, rows: Iterable[Sequence[Any]]) -> None:
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        for row in rows:
            copy.write_row(row)
