"""Flat cost: what push, pop, settle and depth read depends on the batch, and on nothing else.

Measured are the pages that a call touches and the rows it fetches, statements inside the functions included; not time.
Two sessions with the same million messages: one whose plans were made while every table was empty, and one that planned
with full statistics. Where the server has auto_explain (PostgreSQL from a package has, the wheel's has not), each plan
inside the functions is looked at too: index scans with a condition on the index, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from airflow_provider_queen.embedded.postgres import PostgresServer

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

Connection = psycopg.Connection[dict[str, Any]]

# The tables that grow: with messages, with partitions, with what was delivered.
LARGE = ("message_log", "consumers", "consumer_states", "lanes", "redeliveries", "deliveries", "dead_letter_queue")
BATCH = 100


@dataclass(frozen=True)
class Cost:
    """Of one call: pages touched, and of each large table full scans and rows fetched through indexes."""

    pages: int
    scans: dict[str, int]
    rows: dict[str, int]


def measure(connection: Connection, statement: str, **values: Any) -> Cost:
    counters = "SELECT relname, seq_scan, idx_tup_fetch FROM pg_stat_xact_user_tables WHERE schemaname = 'queen'"
    with connection.transaction():
        before = {row["relname"]: row for row in connection.execute(counters)}
        [answer] = connection.execute(f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {statement}", values)
        after = {row["relname"]: row for row in connection.execute(counters)}
    plan = answer["QUERY PLAN"][0]["Plan"]

    def grown(counter: str) -> dict[str, int]:
        grown = {table: (after[table][counter] or 0) - (before[table][counter] or 0) for table in LARGE}
        return {table: count for table, count in grown.items() if count}

    return Cost(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"], grown("seq_scan"), grown("idx_tup_fetch"))


PUSH = "SELECT * FROM queen.push(%(queue)s, array_fill('{}'::text, ARRAY[%(n)s]))"
PUSH_WITH_IDS = """
    SELECT * FROM queen.push(%(queue)s, array_fill('{}'::text, ARRAY[%(n)s]), NULL,
        (SELECT array_agg(gen_random_uuid()::text) FROM generate_series(1, %(n)s)))
"""
PUSH_AGAIN = """
    SELECT * FROM queen.push(%(queue)s, array_fill('{}'::text, ARRAY[%(n)s]), NULL,
        (SELECT array_agg('id-' || i) FROM generate_series(1, %(n)s) AS i))
"""
PUSH_TO_MANY = """
    SELECT * FROM queen.push(%(queue)s, array_fill('{}'::text, ARRAY[%(n)s]),
        (SELECT array_agg('p' || i %% 10) FROM generate_series(1, %(n)s) AS i))
"""
POP = "SELECT * FROM queen.pop(%(queue)s, consumer_group => %(group)s, batch_size => %(n)s)"
POP_TEN = "SELECT * FROM queen.pop(%(queue)s, NULL, %(group)s, %(n)s, max_partitions => 10)"
POP_ONE_PARTITION = "SELECT * FROM queen.pop(%(queue)s, 'p1', %(group)s, %(n)s)"
ACK = """
    SELECT * FROM queen.settle(
        (SELECT array_agg(lease_id) FROM queen.partition_consumers WHERE queue_name = %(queue)s AND lease_id IS NOT NULL),
        (SELECT array_agg(held) FROM queen.partition_consumers WHERE queue_name = %(queue)s AND lease_id IS NOT NULL))
"""
DEPTH = "SELECT * FROM queen.depth(%(queue)s, %(group)s)"
