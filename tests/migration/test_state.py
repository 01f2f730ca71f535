"""The readers of both schemas, against databases small enough to be judged by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from tests.migration.generator import generate, generate_schema
from tests.migration.state import QUEUE_MODE, State, canonical, difference, present_state, v2_state

pytestmark = pytest.mark.postgres

Sql = psycopg.Connection[Any]

OPTIONS = {
    "dlq": False,
    "namespace": None,
    "task": None,
    "priority": 0,
    "lease_time": 300,
    "retry_limit": 3,
    "retry_delay": 1000,
    "delayed_processing": 0,
    "window_buffer": 0,
    "max_wait_time_seconds": 0,
    "max_queue_size": 0,
    "retention_enabled": False,
    "retention_seconds": 0,
    "completed_retention_seconds": 0,
    "encryption_enabled": False,
}
EXPIRES = datetime(2099, 1, 1, tzinfo=UTC)

# Ids are numbers here: queues 1 and 2, partitions 11, 12 and 21, messages 101 to 109 and 201 to 202.
SMALL = """
    CREATE FUNCTION pg_temp.id(n int) RETURNS uuid LANGUAGE sql
        AS $$ SELECT lpad(n::text, 32, '0')::uuid $$;
    CREATE FUNCTION pg_temp.second(n int) RETURNS timestamptz LANGUAGE sql
        AS $$ SELECT '2025-01-01 00:00+00'::timestamptz + n * interval '1 second' $$;

    INSERT INTO queen.queues (id, name, namespace, retry_limit, dlq_after_max_retries, priority) VALUES
        (pg_temp.id(1), 'orders', 'shop', 2, TRUE, NULL), (pg_temp.id(2), 'plain', NULL, 0, FALSE, 5);
    INSERT INTO queen.partitions (id, queue_id, name) VALUES
        (pg_temp.id(11), pg_temp.id(1), 'Default'), (pg_temp.id(12), pg_temp.id(1), 'empty'),
        (pg_temp.id(21), pg_temp.id(2), 'it''s');

    -- The second and the third have one time; the last comes first.
    INSERT INTO queen.messages (id, transaction_id, trace_id, partition_id, payload, created_at, is_encrypted)
    SELECT
        pg_temp.id(100 + n), 'm' || n, CASE WHEN n = 1 THEN pg_temp.id(7) END, pg_temp.id(11),
        jsonb_build_object('n', n, 'a', NULL), pg_temp.second(CASE n WHEN 3 THEN 2 ELSE n END), n = 4
    FROM generate_series(9, 1, -1) AS n;
    INSERT INTO queen.messages (id, transaction_id, trace_id, partition_id, payload, created_at) VALUES
        (pg_temp.id(201), 'n1', NULL, pg_temp.id(21), '"☃"', pg_temp.second(1)),
        (pg_temp.id(202), 'n2', NULL, pg_temp.id(21), '[1.50]', pg_temp.second(2));

    -- Queue mode is beyond the fourth; g reads what came from the fifth's time on.
    INSERT INTO queen.partition_cursors
        (partition_id, consumer_group, last_consumed_created_at, last_consumed_id)
    VALUES
        (pg_temp.id(11), '__QUEUE_MODE__', pg_temp.second(4), pg_temp.id(104)),
        (pg_temp.id(12), 'cursor', pg_temp.second(9), pg_temp.id(999)),
        (pg_temp.id(21), 'p', NULL, NULL);
    INSERT INTO queen.consumer_groups (queue_id, name, subscription_start_from) VALUES
        (pg_temp.id(1), 'g', pg_temp.second(5));
    INSERT INTO queen.messages_status (message_id, consumer_group, status, retry_count, error_message) VALUES
        (pg_temp.id(101), NULL, 'pending', 1, NULL),
        (pg_temp.id(105), NULL, 'completed', 0, NULL),
        (pg_temp.id(106), NULL, 'failed', 2, 'final'),
        (pg_temp.id(107), '__QUEUE_MODE__', 'failed', 1, 'again'),
        (pg_temp.id(102), 'g', 'processing', 0, NULL),
        (pg_temp.id(106), 'g', 'pending', 0, NULL),
        (pg_temp.id(201), 'p', 'failed', 0, 'dropped'),
        (pg_temp.id(202), 'p', 'dead_letter', 3, 'kept');
    INSERT INTO queen.dead_letter_queue (
        id, message_id, partition_id, consumer_group, error_message, retry_count, original_created_at,
        failed_at
    ) VALUES
        (pg_temp.id(3), pg_temp.id(109), pg_temp.id(11), NULL, 'later', 5, NULL, pg_temp.second(31)),
        (pg_temp.id(2), pg_temp.id(109), pg_temp.id(11), NULL, 'second', 5, NULL, pg_temp.second(30)),
        (pg_temp.id(1), pg_temp.id(109), pg_temp.id(11), NULL, NULL, 4, pg_temp.second(8),
            pg_temp.second(30)),
        (pg_temp.id(4), pg_temp.id(106), pg_temp.id(11), 'g', 'and retried', 2, NULL, pg_temp.second(30)),
        (pg_temp.id(5), NULL, pg_temp.id(11), 'gone', 'its message too', 1, NULL, pg_temp.second(30));
    INSERT INTO queen.partition_leases
        (partition_id, consumer_group, lease_expires_at, released_at, message_batch, batch_size)
    VALUES
        (pg_temp.id(11), '__QUEUE_MODE__', '2099-01-01 00:00+00', NULL, jsonb_build_array(
            pg_temp.id(108), pg_temp.id(105), pg_temp.id(101), pg_temp.id(999), pg_temp.id(201)
        ), 2),
        (pg_temp.id(11), 'g', '2099-01-01 00:00+00', NULL, jsonb_build_array(
            jsonb_build_object('id', pg_temp.id(107))
        ), 9),
        (pg_temp.id(11), 'lease', '2099-01-01 00:00+00', NULL, NULL, 2),
        (pg_temp.id(11), 'gone', '2020-01-01 00:00+00', NULL, NULL, 2),
        (pg_temp.id(11), 'cursor', '2099-01-01 00:00+00', '2020-01-01 00:00+00', NULL, 2),
        (pg_temp.id(21), 'p', '2099-01-01 00:00+00', NULL, '[]', 2);
    INSERT INTO queen.retention_history (partition_id, messages_deleted, retention_type, executed_at) VALUES
        (pg_temp.id(12), 4, 'retention', pg_temp.second(40)), (NULL, 1, 'evicted', pg_temp.second(40));
"""


@pytest.fixture
def empty(postgres_dsn: str) -> Iterator[Sql]:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        generate_schema(connection)
        yield connection


@pytest.fixture
def sql(queen_dsn: str) -> Iterator[Sql]:
    with psycopg.connect(queen_dsn, autocommit=True) as connection:
        yield connection


def second(number: int) -> datetime:
    return datetime(2025, 1, 1, 0, 0, number, tzinfo=UTC)


def pop(sql: Sql, count: int) -> Any:
    row = sql.execute("SELECT lease_id FROM queen.pop('q', batch_size => %s)", [count]).fetchone()
    assert row is not None
    return row[0]


def small_state() -> State:
    trace = "00000000-0000-0000-0000-000000000007"
    times = [1, 2, 2, 4, 5, 6, 7, 8, 9]
    everything = tuple((f"m{n}", 0) for n in range(1, 10))
    return State(
        queues={
            "orders": OPTIONS | {"dlq": True, "namespace": "shop", "retry_limit": 2},
            "plain": OPTIONS | {"retry_limit": 0, "priority": 5},
        },
        messages={
            ("orders", "Default"): tuple(
                (f"m{n}", trace if n == 1 else None, f'{{"a": null, "n": {n}}}', second(time), n == 4)
                for n, time in enumerate(times, 1)
            ),
            ("orders", "empty"): (),
            ("plain", "it's"): (
                ("n1", None, '"\\u2603"', second(1), False),
                ("n2", None, "[1.5]", second(2), False),
            ),
        },
        pending={
            ("orders", "Default", QUEUE_MODE): (("m1", 1), ("m7", 1), ("m8", 0)),
            ("orders", "Default", "g"): (("m2", 0), ("m5", 0), ("m6", 0), ("m7", 0), ("m8", 0), ("m9", 0)),
            ("orders", "Default", "lease"): everything,
            ("orders", "Default", "gone"): everything,
            ("orders", "Default", "cursor"): everything,
        },
        leases={
            ("orders", "Default", QUEUE_MODE): (("m1", "m8"), EXPIRES),
            ("orders", "Default", "g"): (("m7",), EXPIRES),
            ("orders", "Default", "lease"): (("m1", "m2"), EXPIRES),
        },
        dead_letters=(
            ("orders", "Default", QUEUE_MODE, "m6", '{"a": null, "n": 6}', "final", 2, second(6)),
            ("orders", "Default", QUEUE_MODE, "m9", '{"a": null, "n": 9}', None, 4, second(8)),
            ("orders", "Default", "g", "m6", '{"a": null, "n": 6}', "and retried", 2, second(6)),
            ("plain", "it's", "p", "n2", "[1.5]", "kept", 3, second(2)),
        ),
        subscriptions={
            ("orders", QUEUE_MODE): ("all", None),
            ("orders", "g"): ("timestamp", second(5)),
            ("orders", "lease"): ("all", None),
            ("orders", "gone"): ("all", None),
            ("orders", "cursor"): ("all", None),
            ("plain", "p"): ("all", None),
        },
        depth={
            ("orders", QUEUE_MODE): (3, 2),
            ("orders", "g"): (6, 1),
            ("orders", "lease"): (9, 2),
            ("orders", "gone"): (9, 0),
            ("orders", "cursor"): (9, 0),
            ("plain", "p"): (0, 0),
        },
        retention_history=(("orders", "empty", "retention", 4, second(40)),),
    )


class TestV2:
    def test_every_rule(self, empty: Sql) -> None:
        empty.execute(SMALL)
        found = v2_state(empty)
        assert difference(found, small_state()) == ""
        assert found == small_state()

    def test_in_another_schema(self, empty: Sql) -> None:
        empty.execute(SMALL)
        empty.execute('ALTER SCHEMA queen RENAME TO "the ""old"" one"')
        assert v2_state(empty, 'the "old" one') == small_state()

    def test_leaves_no_trace(self, empty: Sql) -> None:
        settings = "SELECT name, setting FROM pg_settings WHERE source = 'session' ORDER BY 1"
        before = empty.execute(settings).fetchall()
        with empty.transaction():
            v2_state(empty)
            assert empty.execute(settings).fetchall() == before

    def test_one_seed_one_database(self, empty: Sql) -> None:
        states = []
        for seed in (1, 1, 2):
            generate(empty, messages=500, seed=seed)
            states.append(v2_state(empty))
            empty.execute("DROP SCHEMA queen CASCADE")
            generate_schema(empty)
        assert states[0] == states[1]
        assert states[0] != states[2]

    @pytest.mark.parametrize("messages", [0, 1, 30])
    def test_small_ones(self, empty: Sql, messages: int) -> None:
        generate(empty, messages=messages, queues=2, partitions=2, groups=1)
        assert sum(map(len, v2_state(empty).messages.values())) == messages


class TestPresent:
    def test_what_calls_have_made(self, sql: Sql) -> None:
        """Two messages of priority 9 and five others, settled in each way or leased; groups of each mode."""
        options = '{"retry_limit": 1, "retry_delay": 0, "task": "t"}'
        sql.execute("SELECT queen.configure_queue('q', %s)", [options])
        ids = [f"t{n}" for n in range(1, 8)]
        sql.execute(
            "SELECT queen.push('q', %s, transaction_ids => %s, priorities => %s)",
            [["1", "[2.0]", "3", "null", "5", "6", "7"], ids, [0, 0, 9, 9, 0, 0, 0]],
        )
        held = pop(sql, 1)  # of the higher lane, which it closes to the next pop
        lease = pop(sql, 4)
        sql.execute("SELECT queen.ack(%s, '{2}')", [lease])
        sql.execute("SELECT queen.nack(%s, '{1}')", [lease])
        sql.execute("SELECT queen.reject(%s, '{3}', 'no')", [lease])
        sql.execute("SELECT queen.release(%s)", [lease])
        sql.execute("SELECT queen.pop('q', consumer_group => 'new', subscription_mode => 'new')")
        sql.execute(
            "SELECT queen.pop('q', consumer_group => 'since', subscription_mode => 'timestamp',"
            " subscription_from => '2025-01-01 00:00:05+00', auto_ack => TRUE, batch_size => 1)"
        )
        sql.execute("SELECT queen.push('q', '{8}', '{later}', '{t8}')")

        state = present_state(sql)
        assert state.queues == {"q": OPTIONS | {"dlq": True, "retry_limit": 1, "retry_delay": 0, "task": "t"}}
        # All of one push have one time, so the lanes come one after the other.
        assert [(row[0], row[2]) for row in state.messages["q", "Default"]] == [
            ("t1", "1"), ("t2", "[2.0]"), ("t5", "5"), ("t6", "6"), ("t7", "7"), ("t3", "3"), ("t4", "null"),
        ]  # fmt: skip
        assert state.pending == {
            ("q", "Default", QUEUE_MODE): (("t1", 1), ("t6", 0), ("t7", 0), ("t3", 0), ("t4", 0)),
            ("q", "later", QUEUE_MODE): (("t8", 0),),
            ("q", "Default", "since"): tuple((f"t{n}", 0) for n in (1, 2, 5, 6, 7, 4)),
            ("q", "later", "since"): (("t8", 0),),
            ("q", "later", "new"): (("t8", 0),),
        }
        expires = sql.execute(
            "SELECT lease_expires_at FROM queen.partition_consumers WHERE lease_id = %s", [held]
        ).fetchone()
        assert expires is not None
        assert state.leases == {("q", "Default", QUEUE_MODE): (("t3",), expires[0])}
        assert [row[:7] for row in state.dead_letters] == [
            ("q", "Default", QUEUE_MODE, "t5", "5", "no", 0),
        ]
        assert state.subscriptions["q", QUEUE_MODE] == ("all", None)
        assert state.subscriptions["q", "new"][0] == "new"
        assert state.subscriptions["q", "since"] == ("timestamp", second(5))
        assert state.depth == {("q", QUEUE_MODE): (6, 1), ("q", "new"): (1, 0), ("q", "since"): (7, 0)}
        assert state.retention_history == ()

    def test_seqs_have_to_be_whole(self, sql: Sql) -> None:
        sql.execute("SELECT queen.configure_queue('q'); SELECT queen.push('q', '{1,2,3}')")
        assert len(present_state(sql).messages["q", "Default"]) == 3
        sql.execute("DELETE FROM queen.message_log WHERE seq = 2")
        with pytest.raises(AssertionError, match="dense"):
            present_state(sql)


class TestDifference:
    def test_names_what_differs(self) -> None:
        state = small_state()
        pending = state.pending | {("orders", "Default", "g"): (("m2", 0), ("m5", 1))}
        other = replace(state, pending=pending, depth={}, dead_letters=state.dead_letters[1:])
        lines = difference(state, other).splitlines()
        assert lines[0] == "pending: ('orders', 'Default', 'g')[1] of 6 and 2: ('m5', 0) != ('m5', 1)"
        assert lines[1].startswith("dead_letters: only in the first: ('orders', 'Default', '__QUEUE_MODE__'")
        assert lines[2:] == [
            "depth: ('orders', '__QUEUE_MODE__') only in the first: (3, 2)",
            "depth: ('orders', 'g') only in the first: (6, 1)",
            "depth: ('orders', 'lease') only in the first: (9, 2)",
            "depth: and 3 more",
        ]

    def test_numbers_to_the_last_digit(self) -> None:
        assert canonical('{"b": 1.50, "a": 1}') == '{"a": 1, "b": 1.5}'
        assert canonical("0.12345678901234567890") != canonical("0.12345678901234567891")
