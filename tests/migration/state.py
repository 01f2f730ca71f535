"""What a database holds for those who use it, whichever schema it is in: a migration must not change it.

``v2_state`` reads a database of Queen v2, ``present_state`` one of the present schema. Neither speaks of ids:
messages are known by their transaction ids, everything else by name. v2's rules are written out here a second
time and take nothing from the migration: a test of its own rules would not find what they get wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import datetime
from decimal import Decimal
from itertools import groupby
from operator import itemgetter
from typing import Any
from uuid import UUID

import psycopg

Sql = psycopg.Connection[Any]
Group = tuple[str, str]  # queue, group
Partition = tuple[str, str]  # queue, partition
Reader = tuple[str, str, str]  # queue, partition, group

QUEUE_MODE = "__QUEUE_MODE__"

# Options that both schemas have, and what a NULL of v2's stands for: the column's default there.
_OPTIONS: dict[str, str] = {
    "namespace": "NULL",
    "task": "NULL",
    "priority": "0",
    "lease_time": "300",
    "retry_limit": "3",
    "retry_delay": "1000",
    "delayed_processing": "0",
    "window_buffer": "0",
    "max_wait_time_seconds": "0",
    "max_queue_size": "0",
    "retention_enabled": "FALSE",
    "retention_seconds": "0",
    "completed_retention_seconds": "0",
    "encryption_enabled": "FALSE",
}


@dataclass(frozen=True)
class State:
    """Equal for two databases that nobody can tell apart by pushing, popping and looking."""

    queues: dict[str, dict[str, Any]]
    # (transaction id, trace id, payload, created at, is encrypted), in order; empty partitions are here too.
    messages: dict[Partition, tuple[tuple[str, str | None, str, datetime, bool], ...]]
    # (transaction id, failures), in order; only where something is pending.
    pending: dict[Reader, tuple[tuple[str, int], ...]]
    # What is held, in order, and until when; live leases only.
    leases: dict[Reader, tuple[tuple[str, ...], datetime]]
    # (queue, partition, group, transaction id, payload, error, retry count, created at), sorted.
    dead_letters: tuple[tuple[str, str, str, str, str, str | None, int, datetime], ...]
    # (mode, since when) of every group that exists; the mode "none" says that a record is missing.
    subscriptions: dict[Group, tuple[str, datetime | None]]
    # (pending, in flight) of every group that exists.
    depth: dict[Group, tuple[int, int]]
    # (queue, partition, type, how many, when), sorted.
    retention_history: tuple[tuple[str, str, str | None, int, datetime], ...]


# v2. The tables are named without their schema, which is the search path's only one.
_V2_QUEUES = f"""
    SELECT
        name, dlq_after_max_retries IS TRUE OR dead_letter_queue IS TRUE,
        {", ".join(f"coalesce({option}, {default})" for option, default in _OPTIONS.items())}
    FROM queues
"""

_V2_MESSAGES = """
    SELECT
        m.partition_id::text, m.transaction_id, m.trace_id::text, m.payload::text, m.created_at,
        m.is_encrypted IS TRUE
    FROM messages AS m
    JOIN partitions AS p ON p.id = m.partition_id AND p.queue_id IS NOT NULL
    ORDER BY m.partition_id, m.created_at, m.id
"""

_V2_PARTITIONS = (
    "SELECT p.id::text, q.name, p.name FROM partitions AS p JOIN queues AS q ON q.id = p.queue_id"
)

# A unique constraint does not hold for NULLs, so queue mode may have several rows for a message: the one that
# says pending decides (delivered twice at worst), then the one that leaves a dead letter.
_V2_STATUSES = f"""
    SELECT DISTINCT ON (x.message_id, x.reader)
        x.message_id, x.reader, x.partition_id, x.verdict, coalesce(x.retry_count, 0) AS retry_count,
        x.error_message
    FROM (
        SELECT
            s.*, m.partition_id, coalesce(s.consumer_group, '{QUEUE_MODE}') AS reader,
            CASE
                WHEN s.status = 'completed' THEN 'settled'
                WHEN s.status IN ('dead_letter', 'evicted') THEN 'dead letter'
                WHEN s.status = 'failed' AND coalesce(s.retry_count, 0) >= coalesce(q.retry_limit, 3)
                    THEN CASE
                        WHEN q.dlq_after_max_retries OR q.dead_letter_queue THEN 'dead letter' ELSE 'settled'
                    END
                ELSE 'pending'
            END AS verdict
        FROM messages_status AS s
        JOIN messages AS m ON m.id = s.message_id
        JOIN partitions AS p ON p.id = m.partition_id
        JOIN queues AS q ON q.id = p.queue_id
    ) AS x
    ORDER BY
        x.message_id, x.reader, x.verdict <> 'pending', x.verdict <> 'dead letter', x.retry_count DESC, x.id
"""

_V2_GROUPS = f"""
    SELECT g.queue_id, g.name AS reader FROM consumer_groups AS g
    UNION
    SELECT p.queue_id, coalesce(x.consumer_group, '{QUEUE_MODE}')
    FROM (
        SELECT c.partition_id, c.consumer_group FROM partition_cursors AS c
        UNION
        SELECT l.partition_id, l.consumer_group FROM partition_leases AS l
        UNION
        SELECT m.partition_id, s.consumer_group
        FROM messages_status AS s JOIN messages AS m ON m.id = s.message_id
        UNION
        SELECT coalesce(m.partition_id, d.partition_id), d.consumer_group
        FROM dead_letter_queue AS d LEFT JOIN messages AS m ON m.id = d.message_id
    ) AS x
    JOIN partitions AS p ON p.id = x.partition_id
"""

_V2_CURSORS = f"""
    SELECT DISTINCT ON (c.partition_id, coalesce(c.consumer_group, '{QUEUE_MODE}'))
        c.partition_id, coalesce(c.consumer_group, '{QUEUE_MODE}') AS reader,
        c.last_consumed_created_at, c.last_consumed_id
    FROM partition_cursors AS c
    WHERE c.last_consumed_created_at IS NOT NULL AND c.last_consumed_id IS NOT NULL
    ORDER BY
        c.partition_id, coalesce(c.consumer_group, '{QUEUE_MODE}'),
        c.last_consumed_created_at DESC, c.last_consumed_id DESC
"""

# One row per group and partition: names are long, and would be sent and sorted once for every message.
_V2_PENDING = f"""
    WITH readers AS MATERIALIZED (
        SELECT g.queue_id, g.reader, row_number() OVER () AS number FROM ({_V2_GROUPS}) AS g
    )
    SELECT q.name, p.name, r.reader, x.transaction_ids, x.failures, x.ids
    FROM (
        SELECT
            w.partition_id, w.number, array_agg(w.transaction_id) AS transaction_ids,
            array_agg(w.failures) AS failures, array_agg(w.id::text) AS ids
        FROM (
            SELECT
                m.partition_id, g.number, m.id, m.transaction_id::text, coalesce(s.retry_count, 0) AS failures
            FROM messages AS m
            JOIN partitions AS p ON p.id = m.partition_id
            JOIN readers AS g ON g.queue_id = p.queue_id
            LEFT JOIN ({_V2_STATUSES}) AS s ON s.message_id = m.id AND s.reader = g.reader
            LEFT JOIN (
                SELECT DISTINCT d.message_id, coalesce(d.consumer_group, '{QUEUE_MODE}') AS reader
                FROM dead_letter_queue AS d
            ) AS d ON d.message_id = m.id AND d.reader = g.reader
            LEFT JOIN ({_V2_CURSORS}) AS c ON c.partition_id = p.id AND c.reader = g.reader
            LEFT JOIN consumer_groups AS f ON f.queue_id = p.queue_id AND f.name = g.reader
            WHERE CASE
                WHEN s.message_id IS NOT NULL THEN s.verdict = 'pending'
                WHEN d.message_id IS NOT NULL THEN FALSE
                WHEN (m.created_at, m.id) <= (c.last_consumed_created_at, c.last_consumed_id) THEN FALSE
                WHEN m.created_at < f.subscription_start_from THEN FALSE
                ELSE TRUE
            END
            ORDER BY m.partition_id, g.number, m.created_at, m.id
        ) AS w
        GROUP BY w.partition_id, w.number
    ) AS x
    JOIN readers AS r ON r.number = x.number
    JOIN partitions AS p ON p.id = x.partition_id
    JOIN queues AS q ON q.id = p.queue_id
"""

_V2_LEASES = f"""
    SELECT
        q.name, p.name, coalesce(l.consumer_group, '{QUEUE_MODE}'), l.message_batch::text,
        coalesce(l.batch_size, 0), l.lease_expires_at
    FROM partition_leases AS l
    JOIN partitions AS p ON p.id = l.partition_id
    JOIN queues AS q ON q.id = p.queue_id
    WHERE l.released_at IS NULL AND l.lease_expires_at > now()
    ORDER BY l.lease_expires_at, l.id
"""

# Rows of the table before what statuses say, which have no time of their own here.
_V2_DEAD_LETTERS = f"""
    SELECT DISTINCT ON (m.id, d.reader)
        q.name, p.name, d.reader, m.transaction_id, m.payload::text, d.error_message, d.retry_count,
        coalesce(d.original_created_at, m.created_at)
    FROM (
        SELECT
            message_id, coalesce(consumer_group, '{QUEUE_MODE}') AS reader, error_message,
            coalesce(retry_count, 0) AS retry_count, original_created_at, failed_at, id
        FROM dead_letter_queue
        UNION ALL
        SELECT message_id, reader, error_message, retry_count, NULL, 'infinity', NULL
        FROM ({_V2_STATUSES}) AS s
        WHERE s.verdict = 'dead letter'
    ) AS d
    JOIN messages AS m ON m.id = d.message_id
    JOIN partitions AS p ON p.id = m.partition_id
    JOIN queues AS q ON q.id = p.queue_id
    ORDER BY m.id, d.reader, d.id IS NULL, d.failed_at, d.id
"""

_V2_SUBSCRIPTIONS = f"""
    SELECT q.name, g.reader, f.subscription_start_from
    FROM ({_V2_GROUPS}) AS g
    JOIN queues AS q ON q.id = g.queue_id
    LEFT JOIN consumer_groups AS f ON f.queue_id = q.id AND f.name = g.reader
"""

_V2_RETENTION = """
    SELECT q.name, p.name, h.retention_type, coalesce(h.messages_deleted, 0), h.executed_at
    FROM retention_history AS h
    JOIN partitions AS p ON p.id = h.partition_id
    JOIN queues AS q ON q.id = p.queue_id
"""


def v2_state(connection: Sql, schema: str = "queen") -> State:
    """Of the v2 tables in a schema, by v2's rules."""
    with _reading(connection):
        # Tables just filled have no statistics, and a nested loop over all messages would never end.
        connection.execute("SET LOCAL enable_nestloop = off")
        connection.execute("SELECT set_config('search_path', quote_ident(%s), TRUE)", [schema])
        pending = _transposed(connection.execute(_V2_PENDING))
        leases = _v2_leases(connection, pending)
        subscriptions = connection.execute(_V2_SUBSCRIPTIONS).fetchall()
        depth = {(queue, group): (0, 0) for queue, group, _ in subscriptions}
        for (queue, partition, group), waiting in pending.items():
            held = leases.get((queue, partition, group), ((), None))[0]
            known = depth[queue, group]
            depth[queue, group] = known[0] + len(waiting), known[1] + len(held)
        return State(
            queues=_queues(connection.execute(_V2_QUEUES)),
            messages=_messages(connection.execute(_V2_PARTITIONS), connection.execute(_V2_MESSAGES)),
            pending={reader: tuple(row[:2] for row in rows) for reader, rows in pending.items()},
            leases=leases,
            dead_letters=_dead_letters(connection.execute(_V2_DEAD_LETTERS)),
            subscriptions={
                (queue, group): ("timestamp" if since else "all", since)
                for queue, group, since in subscriptions
            },
            depth=depth,
            retention_history=_sorted(connection.execute(_V2_RETENTION)),
        )


def _v2_leases(
    connection: Sql, pending: dict[Reader, list[Any]]
) -> dict[Reader, tuple[tuple[str, ...], datetime]]:
    leases = {}
    for *reader, batch, size, expires_at in connection.execute(_V2_LEASES):
        waiting = pending.get((reader[0], reader[1], reader[2]), [])
        ids = _batch_ids(batch)
        held = waiting[: max(size, 0)] if ids is None else [row for row in waiting if row[2] in ids]
        if held:
            leases[reader[0], reader[1], reader[2]] = tuple(row[0] for row in held), expires_at
    return leases


def _batch_ids(batch: str | None) -> set[str] | None:
    """The messages that a lease names, or None where it names them in no way we know."""
    elements = None if batch is None else json.loads(batch)
    if not isinstance(elements, list):
        return None
    ids = [element.get("id") if isinstance(element, dict) else element for element in elements]
    if not all(isinstance(each, str) for each in ids):
        return None
    return {str(UUID(each)) if _is_uuid(each) else each for each in ids}


def _is_uuid(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


# The present schema.
_PRESENT_QUEUES = f"SELECT name, dlq_after_max_retries, {', '.join(_OPTIONS)} FROM queen.queues"

_PRESENT_PARTITIONS = (
    "SELECT p.id, q.name, p.name FROM queen.partitions AS p JOIN queen.queues AS q ON q.id = p.queue_id"
)

_PRESENT_MESSAGES = """
    SELECT lane_id / 10, transaction_id, trace_id::text, payload::text, created_at, is_encrypted
    FROM queen.message_log
    ORDER BY lane_id / 10, created_at, lane_id, seq
"""

_NOT_DENSE = """
    SELECT l.queue_id, l.name, l.priority, l.floor_seq, count(m.seq), min(m.seq), max(m.seq)
    FROM queen.lanes AS l LEFT JOIN queen.message_log AS m ON m.lane_id = l.id
    GROUP BY l.id
    HAVING l.floor_seq <> 0 OR min(m.seq) <> 1 OR count(m.seq) <> max(m.seq)
"""

# What a group has not settled is taken as ranges, then as seqs: were every message to look for itself in a
# multirange of thousands, it would take minutes.
_PRESENT_PENDING = """
    WITH readers AS MATERIALIZED (
        SELECT
            q.name AS queue_name, l.name AS partition_name, l.id AS lane_id, g.consumer_group, p.id,
            dense_rank() OVER (ORDER BY l.id / 10, g.consumer_group) AS number,
            coalesce(p.ahead, '{}') AS ahead,
            coalesce(
                p.cursor, queen.start_seq(queen.subscription_of(g.consumer_group, q, l.name), l)
            ) AS cursor,
            (SELECT max(t.seq) FROM queen.message_log AS t WHERE t.lane_id = l.id) AS last_seq
        FROM queen.queues AS q
        JOIN queen.lanes AS l ON l.queue_id = q.id
        CROSS JOIN LATERAL queen.groups_of(q) AS g (consumer_group)
        LEFT JOIN queen.partition_consumers AS p ON p.lane_id = l.id AND p.consumer_group = g.consumer_group
    )
    SELECT DISTINCT ON (x.number)
        r.queue_name, r.partition_name, r.consumer_group, x.transaction_ids, x.failures
    FROM (
        SELECT w.number, array_agg(w.transaction_id) AS transaction_ids, array_agg(w.failures) AS failures
        FROM (
            SELECT r.number, m.transaction_id, coalesce(f.failures, 0) AS failures
            FROM readers AS r
            CROSS JOIN LATERAL unnest(
                int8multirange(int8range(r.cursor, r.last_seq, '(]')) - r.ahead
            ) AS u (range)
            CROSS JOIN LATERAL generate_series(lower(u.range), upper(u.range) - 1) AS n (seq)
            JOIN queen.message_log AS m ON m.lane_id = r.lane_id AND m.seq = n.seq
            LEFT JOIN queen.redeliveries AS f ON f.consumer_id = r.id AND f.seq = m.seq
            WHERE r.last_seq > r.cursor
            ORDER BY r.number, m.created_at, r.lane_id, m.seq
        ) AS w
        GROUP BY w.number
    ) AS x
    JOIN readers AS r ON r.number = x.number
"""

_PRESENT_LEASES = """
    SELECT p.queue_name, p.partition_name, p.consumer_group, m.transaction_id, p.lease_expires_at
    FROM queen.partition_consumers AS p
    CROSS JOIN LATERAL unnest(p.held) AS u (range)
    JOIN queen.message_log AS m ON m.lane_id = p.lane_id AND u.range @> m.seq
    WHERE p.lease_id IS NOT NULL AND p.lease_expires_at > clock_timestamp()
    ORDER BY p.partition_id, p.consumer_group, m.created_at, p.lane_id, m.seq
"""

_PRESENT_DEAD_LETTERS = """
    SELECT
        q.name, d.partition_name, d.consumer_group, d.transaction_id, d.payload::text, d.error_message,
        d.retry_count, d.original_created_at
    FROM queen.dead_letter_queue AS d JOIN queen.queues AS q ON q.id = d.queue_id
"""

_PRESENT_GROUPS = """
    SELECT
        q.name, g.consumer_group, coalesce(s.subscription_mode, 'none'),
        CASE WHEN s.subscription_mode <> 'all' THEN s.subscription_timestamp END, d.pending, d.in_flight
    FROM queen.queues AS q
    CROSS JOIN LATERAL queen.groups_of(q) AS g (consumer_group)
    CROSS JOIN LATERAL queen.subscription_of(g.consumer_group, q, NULL) AS s
    CROSS JOIN LATERAL queen.depth(q.name, g.consumer_group) AS d
"""

_PRESENT_RETENTION = (
    "SELECT queue_name, partition_name, retention_type, messages_deleted, executed_at"
    " FROM queen.retention_history"
)


def present_state(connection: Sql) -> State:
    """Of the present schema; every lane has to be whole, from seq 1 on."""
    with _reading(connection):
        holes = connection.execute(_NOT_DENSE).fetchall()
        assert not holes, f"seqs are not dense from 1: {holes}"
        groups = connection.execute(_PRESENT_GROUPS).fetchall()
        pending = _transposed(connection.execute(_PRESENT_PENDING))
        leases = _grouped(connection.execute(_PRESENT_LEASES), 3)
        return State(
            queues=_queues(connection.execute(_PRESENT_QUEUES)),
            messages=_messages(
                connection.execute(_PRESENT_PARTITIONS), connection.execute(_PRESENT_MESSAGES)
            ),
            pending={reader: tuple(rows) for reader, rows in pending.items()},
            # The lanes of a partition have a lease each; what v2 filled has one lane.
            leases={
                reader: (tuple(row[0] for row in rows), max(row[1] for row in rows))
                for reader, rows in leases.items()
            },
            dead_letters=_dead_letters(connection.execute(_PRESENT_DEAD_LETTERS)),
            subscriptions={(queue, group): (mode, since) for queue, group, mode, since, _, _ in groups},
            depth={(queue, group): (count, held) for queue, group, _, _, count, held in groups},
            retention_history=_sorted(connection.execute(_PRESENT_RETENTION)),
        )


@contextmanager
def _reading(connection: Sql) -> Iterator[None]:
    """Settings for one big read, which leave no trace."""
    with connection.transaction(force_rollback=True):
        connection.execute("SET LOCAL work_mem = '64MB'; SET LOCAL jit = off; SET LOCAL timezone = 'UTC'")
        yield


def _grouped(rows: Iterable[Any], width: int) -> dict[Any, list[Any]]:
    """The rest of each row by its first columns, in the order of the rows."""
    key = itemgetter(slice(0, width))
    return {name: [row[width:] for row in same] for name, same in groupby(rows, key)}


def _transposed(rows: Iterable[Any]) -> dict[Reader, list[Any]]:
    """Columns of arrays, by the three names before them, as rows."""
    return {tuple(row[:3]): list(zip(*row[3:], strict=True)) for row in rows}


def _queues(rows: Iterable[Any]) -> dict[str, dict[str, Any]]:
    return {name: {"dlq": dlq} | dict(zip(_OPTIONS, options, strict=True)) for name, dlq, *options in rows}


def _messages(partitions: Iterable[Any], rows: Iterable[Any]) -> dict[Partition, tuple[Any, ...]]:
    by_id = _grouped(rows, 1)
    return {
        (queue, partition): tuple((*row[:2], canonical(row[2]), *row[3:]) for row in by_id.get((key,), ()))
        for key, queue, partition in partitions
    }


def _dead_letters(rows: Iterable[Any]) -> tuple[Any, ...]:
    return _sorted((*row[:4], canonical(row[4]), *row[5:]) for row in rows)


def _sorted(rows: Iterable[Any]) -> tuple[Any, ...]:
    # None has no place in an order; whether there is a value comes first.
    return tuple(sorted(rows, key=lambda row: [(value is not None, value) for value in row]))


def _number(text: str) -> float | str:
    number = float(text)
    # What a float cannot hold stays as digits. No string in a jsonb can begin like this.
    return number if Decimal(repr(number)) == Decimal(text) else f"\0{text}"


_DECODER = json.JSONDecoder(parse_float=_number)
_ENCODER = json.JSONEncoder(sort_keys=True)


def canonical(payload: str) -> str:
    """What ``json.dumps(…, sort_keys=True)`` makes of a JSON text, but for numbers to the last digit."""
    return _ENCODER.encode(_DECODER.decode(payload))


def difference(a: State, b: State, limit: int = 3) -> str:
    """The first few differences of each part, one a line; empty when the two are equal."""
    lines = []
    for part in fields(State):
        found = list(_differences(getattr(a, part.name), getattr(b, part.name)))
        lines += [f"{part.name}: {each}" for each in found[:limit]]
        if len(found) > limit:
            lines.append(f"{part.name}: and {len(found) - limit} more")
    return "\n".join(lines)


def _differences(a: Any, b: Any) -> Iterator[str]:
    if isinstance(a, tuple):  # both are sorted rows: compare what only one of them has
        ours, theirs = set(a), set(b)
        yield from (f"only in the first: {_short(row)}" for row in a if row not in theirs)
        yield from (f"only in the second: {_short(row)}" for row in b if row not in ours)
        if len(a) - len(ours) != len(b) - len(theirs):
            yield f"{len(a)} rows, {len(b)} rows: some are there more than once"
        return
    for key in [*a, *(key for key in b if key not in a)]:
        if key not in b:
            yield f"{_short(key)} only in the first: {_short(a[key])}"
        elif key not in a:
            yield f"{_short(key)} only in the second: {_short(b[key])}"
        elif a[key] != b[key]:
            yield f"{_short(key)}{_first(a[key], b[key])}"


def _first(a: Any, b: Any) -> str:
    """Where two values of one key part, as far down as they are alike in kind."""
    if isinstance(a, dict):
        key = next(key for key in a if a[key] != b[key])
        return f".{key}: {_short(a[key])} != {_short(b[key])}"
    if not a or not isinstance(a[0], tuple):
        return f": {_short(a)} != {_short(b)}"
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    sides = [_short(side[place]) if place < len(side) else "nothing" for side in (a, b)]
    return f"[{place}] of {len(a)} and {len(b)}: {sides[0]} != {sides[1]}"


def _short(value: Any, width: int = 200) -> str:
    text = f"({', '.join(map(_short, value))})" if isinstance(value, tuple) else repr(value)
    text = str(value) if isinstance(value, datetime) else text
    return text if len(text) <= width else f"{text[:width]}…"
