"""What the engine's tests share: counting by COUNT, moving time, waiting, and many hands at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg

from airflow_provider_queen.client import QueenClient
from airflow_provider_queen.client.results import Message

T = TypeVar("T")
Sql = psycopg.Connection[Any]

QUEUE_MODE = "__QUEUE_MODE__"
# Long enough for a busy machine; a test that waits so long has failed.
PATIENCE = 30.0

# What a group has not settled, counted message by message from the tables alone. Of a lane that it has not
# met yet it has settled nothing.
_COUNT = """
    SELECT count(*)
    FROM queen.message_log AS m
    JOIN queen.lanes AS l ON l.id = m.lane_id
    JOIN queen.queues AS q ON q.id = l.queue_id
    LEFT JOIN queen.consumers AS c ON c.lane_id = l.id AND c.consumer_group = %(group)s
    LEFT JOIN LATERAL (
        SELECT s.cursor, s.ahead FROM queen.consumer_states AS s
        WHERE s.consumer_id = c.id ORDER BY s.gen DESC LIMIT 1
    ) AS s ON TRUE
    WHERE
        q.name = %(queue)s
        AND NOT coalesce(m.seq <= coalesce(s.cursor, c.start_seq) OR s.ahead @> m.seq, FALSE)
"""


def depths(sql: Sql, queue: str, group: str | None = None) -> tuple[int, int]:
    """Pending as the engine says and as COUNT says, in one snapshot."""
    row = sql.execute(
        f"SELECT (SELECT pending FROM queen.depth(%(queue)s, %(group)s)), ({_COUNT})",
        {"queue": queue, "group": group or QUEUE_MODE},
    ).fetchone()
    assert row is not None
    return row[0], row[1]


def pending(sql: Sql, queue: str, group: str | None = None) -> int:
    """How many messages a group has not settled; the engine and COUNT have to agree on it."""
    said, counted = depths(sql, queue, group)
    assert said == counted, f"depth says {said}, COUNT says {counted}"
    return said


# Each query finds what must not be there.
_IMPOSSIBLE = {
    "seqs have gaps, or do not begin after what retention removed": """
        SELECT l.name, l.priority, l.floor_seq, count(*), min(m.seq), max(m.seq)
        FROM queen.message_log AS m
        JOIN queen.lanes AS l ON l.id = m.lane_id JOIN queen.queues AS q ON q.id = l.queue_id
        WHERE q.name = %(queue)s
        GROUP BY l.id
        HAVING min(m.seq) <> l.floor_seq + 1 OR count(*) <> max(m.seq) - l.floor_seq
    """,
    "time runs backwards in a partition": """
        SELECT * FROM (
            SELECT
                l.name,
                m.seq,
                m.created_at < lag(m.created_at) OVER (PARTITION BY l.id ORDER BY m.seq) AS back
            FROM queen.message_log AS m
            JOIN queen.lanes AS l ON l.id = m.lane_id JOIN queen.queues AS q ON q.id = l.queue_id
            WHERE q.name = %(queue)s
        ) AS x WHERE back
    """,
    "a transaction id is stored twice in a partition": """
        SELECT m.lane_id / 10, m.transaction_id, count(*)
        FROM queen.message_log AS m
        JOIN queen.lanes AS l ON l.id = m.lane_id JOIN queen.queues AS q ON q.id = l.queue_id
        WHERE q.name = %(queue)s GROUP BY 1, 2 HAVING count(*) > 1
    """,
    "a consumer has two states": """
        SELECT c.id, c.consumer_group, count(*)
        FROM queen.consumer_states AS s
        JOIN queen.consumers AS c ON c.id = s.consumer_id JOIN queen.queues AS q ON q.id = c.queue_id
        WHERE q.name = %(queue)s GROUP BY c.id HAVING count(*) > 1
    """,
    "messages are pending and no pop will ever look": """
        SELECT p.partition_name, p.consumer_group, p.pending FROM queen.partition_consumers AS p
        WHERE p.queue_name = %(queue)s AND p.ready_at IS NULL AND p.pending <> 0
    """,
    "a lease holds what is settled or does not exist": """
        SELECT p.partition_name, p.consumer_group, p.held, p.ahead, p.cursor, p.last_seq
        FROM queen.partition_consumers AS p
        WHERE
            p.queue_name = %(queue)s
            AND (
                p.held && p.ahead
                OR upper(p.held) - 1 > p.last_seq
                OR (p.lease_id IS NULL) <> isempty(p.held)
            )
    """,
    "failures are remembered of messages that are settled, or miscounted": """
        SELECT c.id, c.consumer_group, s.redelivering, r.seqs, s.cursor, s.ahead
        FROM queen.consumers AS c
        JOIN queen.queues AS q ON q.id = c.queue_id
        JOIN queen.consumer_states AS s ON s.consumer_id = c.id
        CROSS JOIN LATERAL (
            SELECT coalesce(array_agg(x.seq), '{}') AS seqs
            FROM queen.redeliveries AS x WHERE x.consumer_id = c.id
        ) AS r
        WHERE
            q.name = %(queue)s
            AND (
                cardinality(r.seqs) <> s.redelivering
                OR EXISTS (SELECT 1 FROM unnest(r.seqs) AS x WHERE x <= s.cursor OR s.ahead @> x)
            )
    """,
}


def check(sql: Sql, queue: str) -> None:
    """What holds for a queue between any two transactions."""
    for problem, query in _IMPOSSIBLE.items():
        found = sql.execute(query, {"queue": queue}).fetchall()
        assert not found, f"{problem}: {found}"
    groups = sql.execute(
        "SELECT g.consumer_group FROM queen.queue_groups AS g JOIN queen.queues AS q ON q.id = g.queue_id"
        " WHERE q.name = %s",
        [queue],
    ).fetchall()
    for (group,) in groups:
        pending(sql, queue, group)


def expire_leases(sql: Sql, queue: str) -> int:
    """Let every lease of a queue run out now."""
    sql.execute(
        "UPDATE queen.consumers AS c SET ready_at = least(c.ready_at, clock_timestamp())"
        " FROM queen.queues AS q, queen.consumer_states AS s"
        " WHERE q.name = %s AND c.queue_id = q.id AND s.consumer_id = c.id AND s.lease_id IS NOT NULL",
        [queue],
    )
    return sql.execute(
        "UPDATE queen.consumer_states AS s SET lease_expires_at = clock_timestamp() - interval '1 ms'"
        " FROM queen.consumers AS c, queen.queues AS q"
        " WHERE s.consumer_id = c.id AND q.id = c.queue_id AND q.name = %s AND s.lease_id IS NOT NULL",
        [queue],
    ).rowcount


def pass_time(sql: Sql, queue: str, seconds: float) -> None:
    """Let time pass for a queue: everything that it remembers moves into the past."""
    step = {"queue": queue, "seconds": seconds}
    of_queue = "FROM queen.queues AS q WHERE q.name = %(queue)s"
    past = "- make_interval(secs => %(seconds)s)"
    sql.execute(
        f"UPDATE queen.message_log AS m SET created_at = m.created_at {past}"
        " FROM queen.lanes AS l, queen.queues AS q"
        " WHERE q.name = %(queue)s AND l.queue_id = q.id AND m.lane_id = l.id",
        step,
    )
    sql.execute(
        f"UPDATE queen.lanes AS l SET floor_created_at = l.floor_created_at {past} {of_queue}"
        " AND l.queue_id = q.id",
        step,
    )
    sql.execute(
        f"UPDATE queen.consumer_states AS s SET retry_at = s.retry_at {past},"
        f" lease_expires_at = s.lease_expires_at {past} FROM queen.consumers AS c, queen.queues AS q"
        " WHERE q.name = %(queue)s AND c.queue_id = q.id AND s.consumer_id = c.id",
        step,
    )
    sql.execute(
        f"UPDATE queen.consumers AS c SET ready_at = c.ready_at {past} {of_queue} AND c.queue_id = q.id", step
    )


def payloads(messages: Iterable[Any]) -> list[Any]:
    return [message.payload for message in messages]


def put(client: Any, queue: str, *values: Any, partition: str = "Default", priority: int = 0) -> list[Any]:
    """Push some payloads to one partition."""
    return client.push(
        queue, [{"payload": value, "partition": partition, "priority": priority} for value in values]
    )


def drain(client: QueenClient, queue: str | None, group: str | None = None, **pop: Any) -> list[Message]:
    """Pop and acknowledge until nothing is ready; what was delivered, in order."""
    delivered: list[Message] = []
    while messages := client.pop(queue, consumer_group=group, **pop):
        delivered += messages
        client.ack(messages)
    return delivered


@contextmanager
def undone(client: QueenClient) -> Iterator[Any]:
    """A transaction that is rolled back at its end."""
    with client.transaction() as tx:
        yield tx
        raise psycopg.Rollback


def eventually(condition: Callable[[], T], seconds: float = PATIENCE) -> T:
    """What the condition answers, as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.01)
    return answer


def is_waiting(sql: Sql, pid: int) -> bool:
    """Whether a backend waits for a lock that another holds."""
    row = sql.execute("SELECT cardinality(pg_blocking_pids(%s)) > 0", [pid]).fetchone()
    return bool(row and row[0])


def together(*actions: Callable[[], T], seconds: float = 120.0) -> list[T]:
    """Run actions at once, each in a thread of its own; their results, or the first error."""
    barrier = threading.Barrier(len(actions))

    def start(action: Callable[[], T]) -> T:
        barrier.wait(PATIENCE)
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        futures = [pool.submit(start, action) for action in actions]
        return [future.result(seconds) for future in futures]


def first_deliveries(seqs: Sequence[int]) -> list[int]:
    """Seqs in the order in which each was delivered for the first time."""
    return list(dict.fromkeys(seqs))
