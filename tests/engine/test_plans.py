"""Flat cost: what push, pop, settle and depth read depends on the batch, and on nothing else.

Measured are the pages that a call touches and the rows it fetches, statements inside the functions included;
not time. Two sessions with the same million messages: one whose plans were made while every table was empty
(or held a handful of rows, and statistics said so), and one that planned with full statistics. Where the
server has auto_explain (PostgreSQL from a package has, the wheel's has not), each plan inside the functions
is looked at too: index scans with a condition, no other.
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
LARGE = (
    "message_log",
    "consumers",
    "consumer_states",
    "lanes",
    "redeliveries",
    "deliveries",
    "dead_letter_queue",
)
BATCH = 100


# Statements that a caller sends, each with a queue, the group "reader" and a batch.
PUSH = "SELECT * FROM queen.push(%(queue)s, array_fill('{}'::text, ARRAY[100]))"
PUSH_WITH_IDS = """
    SELECT * FROM queen.push(
        %(queue)s, array_fill('{}'::text, ARRAY[100]),
        transaction_ids => (SELECT array_agg(gen_random_uuid()::text) FROM generate_series(1, 100))
    )
"""
PUSH_DUPLICATES = """
    SELECT * FROM queen.push(
        %(queue)s, array_fill('{}'::text, ARRAY[100]),
        transaction_ids => (SELECT array_agg('id-' || i) FROM generate_series(1, 100) AS i)
    )
"""
PUSH_TO_TEN = """
    SELECT * FROM queen.push(
        %(queue)s, array_fill('{}'::text, ARRAY[100]),
        (SELECT array_agg('p' || i %% 10) FROM generate_series(1, 100) AS i)
    )
"""
PUSH_TO_ONE = "SELECT * FROM queen.push(%(queue)s, array_fill('{}'::text, ARRAY[100]), '{p7}')"
POP = "SELECT * FROM queen.pop(%(queue)s, NULL, 'reader', 100)"
POP_TEN = "SELECT * FROM queen.pop(%(queue)s, NULL, 'reader', 100, max_partitions => 10)"
POP_PARTITION = "SELECT * FROM queen.pop(%(queue)s, 'p7', 'reader', 100)"
SETTLE = "SELECT * FROM queen.settle(%(lease_ids)s::uuid[], %(held)s::int8multirange[])"
NACK = "SELECT * FROM queen.settle(%(lease_ids)s::uuid[], NULL, %(held)s::int8multirange[])"
DEPTH = "SELECT * FROM queen.depth(%(queue)s, 'reader')"

# In this order; what one leaves the next one finds. The queues: "flow" has one partition with half a million
# messages behind its reader and half a million ahead; "idle" has 100,000 partitions, all drained at first.
CALLS = {
    "push": (PUSH, "flow"),
    "push with transaction ids": (PUSH_WITH_IDS, "flow"),
    "push of duplicates": (PUSH_DUPLICATES, "flow"),
    "pop": (POP, "flow"),
    "settle": (SETTLE, "flow"),
    "pop to fail": (POP, "flow"),
    "settle, all failed": (NACK, "flow"),
    "pop of what failed": (POP, "flow"),
    "settle what had failed": (SETTLE, "flow"),
    "depth": (DEPTH, "flow"),
    "pop of an idle queue": (POP, "idle"),
    "pop of an idle partition": (POP_PARTITION, "idle"),
    "depth of an idle queue": (DEPTH, "idle"),
    "push to ten of many partitions": (PUSH_TO_TEN, "idle"),
    "depth of ten of many partitions": (DEPTH, "idle"),
    "pop of ten of many partitions": (POP_TEN, "idle"),
    "settle of ten of many partitions": (SETTLE, "idle"),
    "pop that finds them drained": (POP_TEN, "idle"),
    "push to one of many partitions": (PUSH_TO_ONE, "idle"),
    "pop of one of many partitions": (POP, "idle"),
    "settle of one of many partitions": (SETTLE, "idle"),
    "pop that finds it drained": (POP, "idle"),
}
# Pages a call may touch for each message of its batch, over all the indexes it goes through. A page counts
# again each time it is visited: an insert into an index comes down from the root.
PAGES_A_MESSAGE = {"push": 20, "push of duplicates": 50, "pop": 5, "settle": 8, "depth": 2}


@dataclass(frozen=True)
class Cost:
    """Of one call: pages touched, and of each large table full scans and rows fetched through indexes."""

    pages: int
    scans: dict[str, int]
    rows: dict[str, int]
    plans: list[dict[str, Any]]
    answers: int


@dataclass(frozen=True)
class Costs:
    """The same calls three times: with next to nothing stored, with plans from then, with plans from now."""

    when_empty: dict[str, Cost]
    planned_when_empty: dict[str, Cost]
    planned_when_full: dict[str, Cost]
    first_contacts: dict[int, Cost]
    """With a new queue, while there are hardly any consumers yet; by its number of partitions."""
    has_plans: bool


class Session:
    """A connection that counts what its calls cost, and sees the plans inside where the server shows them."""

    def __init__(self, dsn: str) -> None:
        self.connection: Connection = psycopg.connect(dsn, autocommit=True, row_factory=dict_row)
        self._notices: list[str] = []
        self.connection.add_notice_handler(lambda notice: self._notices.append(notice.message_primary or ""))
        try:
            self.connection.execute("LOAD 'auto_explain'")
            self.has_plans = True
        except psycopg.errors.UndefinedFile:
            self.has_plans = False
        if self.has_plans:
            for name, value in {
                "log_min_duration": "0", "log_nested_statements": "on", "log_analyze": "on",
                "log_timing": "off", "log_format": "json", "log_level": "notice",
            }.items():  # fmt: skip
                self.connection.execute(f"SET auto_explain.{name} = {value}")  # type: ignore[arg-type]

    def measure(self, statement: str, **values: Any) -> Cost:
        counters = (
            "SELECT relname, coalesce(seq_scan, 0) AS scans, coalesce(idx_tup_fetch, 0) AS rows"
            " FROM pg_stat_xact_user_tables WHERE schemaname = 'queen'"
        )
        with self.connection.transaction():
            before = {row["relname"]: row for row in self.connection.execute(counters)}
            self._notices.clear()
            [answer] = self.connection.execute(
                f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {statement}",  # type: ignore[arg-type]
                values,
            )
            notices = list(self._notices)
            after = {row["relname"]: row for row in self.connection.execute(counters)}
        plan = answer["QUERY PLAN"][0]["Plan"]

        def grown(counter: str) -> dict[str, int]:
            found = {table: after[table][counter] - before[table][counter] for table in LARGE}
            return {table: count for table, count in found.items() if count}

        return Cost(
            plan["Shared Hit Blocks"] + plan["Shared Read Blocks"],
            grown("scans"),
            grown("rows"),
            [json.loads(text[text.index("{") :])["Plan"] for text in notices if "plan:" in text],
            plan["Actual Rows"],
        )

    def first_contact(self, queue: str, partitions: int) -> Cost:
        names = [f"p{number}" for number in range(partitions)]
        self.connection.execute("SELECT queen.configure_queue(%s)", [queue])
        self.connection.execute("SELECT queen.push(%s, %s, %s)", [queue, ["1"] * partitions, names])
        cost = self.measure(POP, queue=queue)
        self.connection.execute("SELECT queen.delete_queue(%s)", [queue])
        return cost

    def run(self) -> dict[str, Cost]:
        costs = {}
        for name, (statement, queue) in CALLS.items():
            [leases] = self.connection.execute(
                "SELECT array_agg(lease_id) AS lease_ids, array_agg(held) AS held"
                " FROM queen.consumer_states WHERE lease_id IS NOT NULL"
            )
            costs[name] = self.measure(statement, queue=queue, **leases)
        return costs


@pytest.fixture(scope="module", params=["18", "15", "18 with statistics", "15 with statistics"])
def costs(request: pytest.FixtureRequest, queen_template: Callable[[PostgresServer], str]) -> Iterator[Costs]:
    version, _, statistics = request.param.partition(" ")
    server: PostgresServer = request.getfixturevalue(f"postgres_{version}")
    messages, partitions = (1_000_000, 100_000) if request.param == "18" else (200_000, 20_000)
    name = f"plans_{version}_{bool(statistics)}"
    dsn = server.create_database(name, queen_template(server))
    early = Session(dsn)
    with early.connection as connection:
        prepare(connection)
        if statistics:
            connection.execute("VACUUM ANALYZE queen.consumers, queen.consumer_states, queen.queues")
        for _ in range(6):  # PostgreSQL settles for a plan after five executions
            when_empty = early.run()
        first_contacts = {
            partitions: early.first_contact(f"new-{partitions}", partitions) for partitions in (10, 5000)
        }
        fill(connection, messages, partitions)
        planned_when_empty = early.run()
        connection.execute("ANALYZE")
    late = Session(dsn)
    with late.connection:
        late.run()
        planned_when_full = late.run()
    yield Costs(when_empty, planned_when_empty, planned_when_full, first_contacts, early.has_plans)
    server.drop_database(name)


def prepare(connection: Connection) -> None:
    connection.execute("SET synchronous_commit = OFF")
    for table in LARGE:  # statistics are collected when the test says so
        connection.execute(f"ALTER TABLE queen.{table} SET (autovacuum_enabled = FALSE)")  # type: ignore[arg-type]
    connection.execute(
        "SELECT queen.configure_queue(name, '{\"retry_delay\": 0}')"
        " FROM unnest('{flow,idle}'::text[]) AS name"
    )
    for name in ("flow", "idle"):
        connection.execute(PUSH_TO_TEN if name == "idle" else PUSH_DUPLICATES, {"queue": name})
        connection.execute("SELECT * FROM queen.pop(%s, NULL, 'reader', 1000, 10, auto_ack => TRUE)", [name])
    connection.execute("SELECT * FROM queen.push('flow', array_fill('{}'::text, ARRAY[200]))")


def fill(connection: Connection, messages: int, partitions: int) -> None:
    """What a long life leaves, written straight into the tables."""
    connection.execute(
        """
        INSERT INTO queen.message_log (lane_id, seq, created_at, transaction_id, payload)
        SELECT t.lane_id, t.seq + i, now(), 'filled-' || i, '{}'
        FROM (
            SELECT m.lane_id, max(m.seq) AS seq
            FROM queen.messages AS m WHERE m.queue_name = 'flow' GROUP BY m.lane_id
        ) AS t
        CROSS JOIN generate_series(1, %s) AS i
        """,
        [messages],
    )
    connection.execute(
        """
        UPDATE queen.consumer_states AS s SET cursor = s.cursor + %s
        FROM queen.partition_consumers AS p WHERE p.id = s.consumer_id AND p.queue_name = 'flow'
        """,
        [messages // 2],
    )
    connection.execute(
        """
        WITH partitions AS (
            INSERT INTO queen.partitions (queue_id, name)
            SELECT q.id, 'filled-' || i FROM queen.queues AS q CROSS JOIN generate_series(1, %s) AS i
            WHERE q.name = 'idle'
            RETURNING *
        ), lanes AS (
            INSERT INTO queen.lanes (id, queue_id, priority, name, created_xid)
            SELECT p.id * 10, p.queue_id, 0, p.name, l.created_xid
            FROM partitions AS p
            CROSS JOIN (SELECT min(created_xid) AS created_xid FROM queen.lanes) AS l
            RETURNING *
        ), messages AS (
            INSERT INTO queen.message_log (lane_id, seq, created_at, transaction_id, payload)
            SELECT l.id, 1, now(), 'filled', '{}' FROM lanes AS l
        ), consumers AS (
            INSERT INTO queen.consumers (lane_id, ready_at, start_seq, queue_id, priority, consumer_group)
            SELECT l.id, NULL, 0, l.queue_id, 0, 'reader' FROM lanes AS l
            RETURNING *
        )
        INSERT INTO queen.consumer_states (consumer_id, gen, cursor) SELECT c.id, 1, 1 FROM consumers AS c
        """,
        [partitions],
    )


FULL_SESSIONS = pytest.mark.parametrize("session", ["planned_when_empty", "planned_when_full"])


@pytest.mark.parametrize("session", ["when_empty", "planned_when_empty", "planned_when_full"])
def test_no_table_is_scanned(costs: Costs, session: str) -> None:
    assert {call: cost.scans for call, cost in getattr(costs, session).items() if cost.scans} == {}


@FULL_SESSIONS
@pytest.mark.parametrize("call", CALLS)
def test_cost_is_bounded_by_the_batch(costs: Costs, session: str, call: str) -> None:
    before, now = costs.when_empty[call], getattr(costs, session)[call]
    assert now.answers == before.answers  # the same work
    assert sum(now.rows.values()) <= sum(before.rows.values()) + 5
    # An index has a level or two more by now, and that is all.
    assert now.pages <= 1.8 * before.pages + 10
    bound = PAGES_A_MESSAGE.get(call) or PAGES_A_MESSAGE[call.split()[0].strip(",")]
    assert now.pages <= bound * BATCH


@FULL_SESSIONS
@pytest.mark.parametrize("call", ["pop of an idle queue", "pop of an idle partition"])
def test_an_idle_pop_is_a_handful_of_probes(costs: Costs, session: str, call: str) -> None:
    cost = getattr(costs, session)[call]
    assert cost.pages <= 30
    assert sum(cost.rows.values()) <= 4


@FULL_SESSIONS
def test_drained_partitions_do_not_count_in_a_depth(costs: Costs, session: str) -> None:
    cost = getattr(costs, session)["depth of an idle queue"]
    assert cost.pages <= 30
    assert cost.rows == {}


def test_a_first_contact_costs_the_same_for_each_partition(costs: Costs) -> None:
    few, many = costs.first_contacts
    assert costs.first_contacts[many].answers == 1  # of the one partition that a pop takes
    a_partition = costs.first_contacts[few].pages / few
    assert costs.first_contacts[many].pages / many <= 1.5 * a_partition


def test_every_plan_inside_goes_through_an_index(costs: Costs) -> None:
    if not costs.has_plans:
        pytest.skip("this server has no auto_explain; the counters of the other tests hold here too")
    seen = set()
    for session in (costs.when_empty, costs.planned_when_empty, costs.planned_when_full):
        for call, cost in session.items():
            for node in (node for plan in cost.plans for node in nodes(plan)):
                if node.get("Relation Name") not in LARGE or node["Node Type"] == "ModifyTable":
                    continue
                seen.add(node["Relation Name"])
                if node["Node Type"] == "Tid Scan":  # rows that an index scan has just found
                    continue
                through = node["Plans"][0] if node["Node Type"] == "Bitmap Heap Scan" else node
                assert through["Node Type"] in ("Index Scan", "Index Only Scan", "Bitmap Index Scan"), (
                    call,
                    node,
                )
                # Without a condition on it, an index is walked from end to end.
                assert "Index Cond" in through, f"{call}: {node}"
                assert node["Actual Rows"] * node["Actual Loops"] <= 10 * BATCH, (call, node)
                assert node.get("Rows Removed by Filter", 0) * node["Actual Loops"] <= BATCH, (call, node)
    assert seen.issuperset({"message_log", "consumers", "consumer_states", "lanes"})  # they were looked at


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)
