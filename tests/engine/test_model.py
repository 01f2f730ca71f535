"""The engine against the model: any sequence of calls, and after each step both say the same.

Hypothesis makes up the calls; :mod:`tests.engine.model` says what must come of them. Compared after every
step: what was delivered, in which order and at which attempt; depth, and depth as a COUNT over the tables;
dead letters; leases that ended.

Time passes by moving every timestamp in the tables back. All durations are multiples of 100 seconds and time
passes in steps of 100 seconds and one, so nothing is ever due by a hair and a slow machine changes nothing.

For a longer search: QUEEN_MODEL_EXAMPLES=5000 pytest tests/engine/test_model.py
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from hypothesis.stateful import run_state_machine_as_test as run_machine
from psycopg.rows import dict_row
from psycopg.types.multirange import Multirange
from psycopg.types.range import Range

from tests.engine.model import (
    QUEUE_MODE,
    DeadLetter,
    Delivery,
    LaneKey,
    Lease,
    Model,
    Outcome,
    Popped,
    Pushed,
    Refused,
    Scope,
    Settling,
)

pytestmark = pytest.mark.postgres

QUEUES = {"orders": {"namespace": "shop", "task": "pack"}, "refunds": {"namespace": "shop"}}
GROUPS = [QUEUE_MODE, "audit", "mail"]
PARTITIONS = ["Default", "north", "south"]
OPTIONS: dict[str, list[Any]] = {
    "priority": [0, 5],
    "lease_time": [100, 300],
    "retry_limit": [0, 1, 3],
    "retry_delay": [0, 100_000],
    "dlq_after_max_retries": [True, False],
    "delayed_processing": [0, 0, 100, 200],
    "window_buffer": [0, 0, 100],
    "max_wait_time_seconds": [0, 200, 300],
    "max_queue_size": [0, 0, 4, 8],
    "retention_enabled": [True, True, False],
    "retention_seconds": [0, 200, 400],
    "completed_retention_seconds": [0, 100],
}

# What an example is about: its queues have some of these from the start.
THEMES: dict[str, dict[str, Any]] = {
    "retention": {"retention_enabled": True, "retention_seconds": 200},
    "retention of what is settled": {"retention_enabled": True, "completed_retention_seconds": 100},
    "eviction": {"max_wait_time_seconds": 200},
    "delay": {"delayed_processing": 100},
    "window": {"window_buffer": 100},
    "limit": {"max_queue_size": 8},
    "drop": {"dlq_after_max_retries": False},
    "nothing special": {},
    "nothing special either": {},
}

# What a pop names.
REACH = st.sampled_from([*["queue"] * 5, "partition", "partition", "namespace", "task", "namespace and task"])

PRIORITY = st.sampled_from([0, 0, 0, 5, 9])
ENDINGS = ("completed", "failed", "rejected", "released")
ENDING = st.sampled_from(["completed", "completed", "failed", "failed", "rejected", "released", None])

# Every timestamp there is, but for those of rows that only people read.
TIMES = {
    "message_log": ["created_at"],
    "lanes": ["created_at", "floor_created_at"],
    "consumers": ["ready_at"],
    "consumer_states": ["settled_at", "retry_at", "lease_expires_at", "popped_at"],
    "consumer_groups_metadata": ["subscription_timestamp", "created_at"],
    "dead_letter_queue": ["original_created_at", "failed_at"],
}

# Depth of every queue and group, and pending as a COUNT: what of a lane that the group has met lies beyond
# the cursor and was not settled ahead of it. Of lanes not met the model alone knows where the group begins.
DEPTH = """
    SELECT
        q.name AS queue,
        g.name AS consumer_group,
        d.*,
        (
            SELECT count(*)
            FROM queen.message_log AS m
            JOIN queen.lanes AS l ON l.id = m.lane_id AND l.queue_id = q.id
            JOIN queen.consumers AS c ON c.lane_id = l.id AND c.consumer_group = g.name
            LEFT JOIN queen.consumer_states AS s ON s.consumer_id = c.id
            WHERE m.seq > coalesce(s.cursor, c.start_seq) AND NOT coalesce(s.ahead @> m.seq, FALSE)
        ) AS counted
    FROM queen.queues AS q
    CROSS JOIN unnest(%s::text[]) AS g (name)
    CROSS JOIN LATERAL queen.depth(q.name, g.name) AS d
"""

# What must be true of the tables whatever happened: each of these finds nothing.
BROKEN = {
    "a lane whose seqs have gaps": """
        SELECT l.id FROM queen.lanes AS l JOIN queen.message_log AS m ON m.lane_id = l.id
        GROUP BY l.id HAVING count(*) <> max(m.seq) - l.floor_seq OR min(m.seq) <> l.floor_seq + 1
    """,
    "a reader with two states": """
        SELECT consumer_id FROM queen.consumer_states GROUP BY 1 HAVING count(*) > 1
    """,
    "failures that are not counted": """
        SELECT s.consumer_id FROM queen.consumer_states AS s
        WHERE s.redelivering <> (
            SELECT count(*) FROM queen.redeliveries AS r WHERE r.consumer_id = s.consumer_id
        )
    """,
    "failures of a message that is settled or gone": """
        SELECT r.consumer_id
        FROM queen.redeliveries AS r
        JOIN queen.consumer_states AS s ON s.consumer_id = r.consumer_id
        JOIN queen.consumers AS c ON c.id = r.consumer_id
        JOIN queen.lanes AS l ON l.id = c.lane_id
        WHERE r.seq <= greatest(s.cursor, l.floor_seq) OR s.ahead @> r.seq
    """,
    "a lease that holds what is settled": """
        SELECT s.consumer_id FROM queen.consumer_states AS s
        WHERE s.held && (s.ahead + int8multirange(int8range(NULL, s.cursor, '[]')))
    """,
    "a reader that is called drained and is not": """
        SELECT p.id FROM queen.partition_consumers AS p
        WHERE p.ready_at IS NULL AND (p.pending <> 0 OR p.lease_id IS NOT NULL)
    """,
}
FIND_BROKEN = " UNION ALL ".join(
    f"(SELECT '{what}' AS what, b::text FROM ({statement}) AS b)" for what, statement in BROKEN.items()
)


class EngineFollowsModel(RuleBasedStateMachine):
    """One example is one of these: queues and groups of its own, on a connection that all share."""

    connection: psycopg.Connection[dict[str, Any]]

    # Most examples use few of each, so that calls meet each other.
    queues = Bundle("queues")
    groups = Bundle("groups")
    partitions = Bundle("partitions")

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.payloads = 0
        self.lease_ids: list[object] = []  # all that were ever given out
        self.last_delivery, self.last_dead_letter = self._last_ids()
        self.first_delivery = self.last_delivery

    # How to call

    def sql(self, statement: str, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        return self.connection.execute(statement, args or kwargs).fetchall()

    def same(self, expected: Callable[[], Any], actual: Callable[[], Any]) -> None:
        """Both answer the same, or the model refuses and the engine raises that SQLSTATE."""
        try:
            wanted = expected()
        except Refused as refused:
            wanted = refused.sqlstate
        try:
            answer = actual()
        except psycopg.Error as error:
            if error.sqlstate is None or not error.sqlstate.startswith("QN"):
                raise
            answer = error.sqlstate
        assert answer == wanted

    def _last_ids(self) -> tuple[int, int]:
        [row] = self.sql(
            "SELECT (SELECT coalesce(max(id), 0) FROM queen.deliveries) AS d,"
            " (SELECT coalesce(max(id), 0) FROM queen.dead_letter_queue) AS l"
        )
        return row["d"], row["l"]

    def _new_expiries(self) -> list[tuple[LaneKey, str]]:
        rows = self.sql(
            "SELECT * FROM queen.deliveries WHERE id > %s AND expired > 0 ORDER BY id", self.last_delivery
        )
        return [(_lane(row), row["consumer_group"]) for row in rows]

    def _new_evictions(self) -> list[tuple[LaneKey, str, int]]:
        rows = self.sql(
            "SELECT d.*, q.name AS queue_name"
            " FROM queen.dead_letter_queue AS d JOIN queen.queues AS q ON q.id = d.queue_id"
            " WHERE d.id > %s AND d.reason = 'evicted' ORDER BY d.id",
            self.last_dead_letter,
        )
        return [(_lane(row), row["consumer_group"], row["seq"]) for row in rows]

    # What may happen

    @initialize(
        target=queues,
        count=st.sampled_from([1, 1, 2]),
        retry_limit=st.integers(0, 2),
        retry_delay=st.sampled_from([0, 0, 100_000]),
        themes=st.sets(st.sampled_from(sorted(THEMES)), min_size=1, max_size=3),
    )
    def use_queues(self, count: int, retry_limit: int, retry_delay: int, themes: set[str]) -> Any:
        for name, options in QUEUES.items():
            self.configure_queue(name, options | {"retry_limit": retry_limit, "retry_delay": retry_delay})
            for theme in sorted(themes):
                self.configure_queue(name, THEMES[theme])
        return multiple(*list(QUEUES)[:count])

    @initialize(target=groups, count=st.sampled_from([1, 1, 2, 3]))
    def use_groups(self, count: int) -> Any:
        return multiple(*GROUPS[:count])

    @initialize(target=partitions, count=st.sampled_from([1, 1, 2, 3]))
    def use_partitions(self, count: int) -> Any:
        return multiple(*PARTITIONS[:count])

    @rule(queue=queues, option=st.sampled_from(sorted(OPTIONS)), data=st.data())
    def configure(self, queue: str, option: str, data: st.DataObject) -> None:
        self.configure_queue(queue, {option: data.draw(st.sampled_from(OPTIONS[option]))})

    def configure_queue(self, queue: str, options: dict[str, Any]) -> None:
        self.model.configure(queue, **options)
        [row] = self.sql(
            "SELECT * FROM queen.configure_queue(%s, %s)", queue, psycopg.types.json.Jsonb(options)
        )
        expected = vars(self.model.queues[queue])
        assert {name: row[name] for name in expected} == expected

    @rule(
        queue=queues,
        messages=st.lists(
            st.tuples(
                partitions,
                PRIORITY,
                st.none() | st.sampled_from("abcdefgh"),
            ),
            min_size=1,
            max_size=6,
        ),
    )
    def push(self, queue: str, messages: list[tuple[str, int, str | None]]) -> None:
        self._push(queue, messages)

    def _push(self, queue: str, messages: list[tuple[str, int, str | None]]) -> None:
        partitions, priorities, ids = (list(column) for column in zip(*messages, strict=True))
        payloads = [self.payloads + i for i in range(len(messages))]
        self.payloads += len(messages)
        one_id = ids if any(ids) else None
        if len(set(partitions)) == 1 and len(set(priorities)) == 1:
            partitions, priorities = partitions[:1], priorities[:1]  # one value stands for all
        self.same(
            lambda: self.model.push(
                queue, [(*message, payload) for message, payload in zip(messages, payloads, strict=True)]
            ),
            lambda: [
                Pushed(
                    row["status"],
                    ids[i] and row["transaction_id"],
                    row["partition"],
                    row["seq"],
                    row["priority"],
                )
                for i, row in enumerate(
                    self.sql(
                        "SELECT * FROM queen.push(%s, %s, %s, %s, NULL, %s::smallint[])",
                        queue,
                        [str(payload) for payload in payloads],
                        partitions,
                        one_id,
                        priorities,
                    )
                )
            ],
        )

    @rule(
        queue=queues,
        partition=partitions,
        reach=REACH,
        group=groups,
        batch_size=st.sampled_from([1, 2, 3, 5, 100]),
        max_partitions=st.sampled_from([1, 1, 2, 10]),
        lease_seconds=st.sampled_from([None, None, 100, 200]),
        mode=st.sampled_from(["all", "all", "all", "new", "timestamp"]),
        auto_ack=st.booleans() | st.just(False),
        data=st.data(),
    )
    def pop(
        self,
        queue: str,
        partition: str,
        reach: str,
        group: str,
        batch_size: int,
        max_partitions: int,
        lease_seconds: int | None,
        mode: str,
        auto_ack: bool,
        data: st.DataObject,
    ) -> None:
        begins_at, subscription_from = self._a_time(data) if mode == "timestamp" else (0.0, None)
        self._pop(
            _scope(reach, queue, partition),
            group,
            subscription_from,
            batch_size=batch_size,
            max_partitions=max_partitions,
            lease_seconds=lease_seconds,
            mode=mode,
            begins_at=begins_at,
            auto_ack=auto_ack,
        )

    @rule(
        queue=queues,
        group=groups,
        partition=partitions,
        priority=PRIORITY,
        new=st.integers(0, 5),
        batch_size=st.integers(1, 5),
        max_partitions=st.integers(1, 2),
        pattern=st.lists(ENDING, min_size=1, max_size=4) | ENDING.map(lambda ending: [ending]),
        dies=st.booleans(),
    )
    def work(
        self,
        queue: str,
        group: str,
        partition: str,
        priority: int,
        new: int,
        batch_size: int,
        max_partitions: int,
        pattern: list[str | None],
        dies: bool,
    ) -> None:
        """A producer's and a consumer's turn: endings by the pattern, in turn; None leaves a message."""
        if new:
            self._push(queue, [(partition, priority, None)] * new)
        popped = self._pop(Scope(queue), group, batch_size=batch_size, max_partitions=max_partitions)
        endings = dict(zip(((p.lease_id, p.seq) for p in popped), itertools.cycle(pattern), strict=False))
        for lease_id in dict.fromkeys(p.lease_id for p in popped):
            parts = {
                kind: frozenset(
                    seq for (lease, seq), ending in endings.items() if (lease, ending) == (lease_id, kind)
                )
                for kind in ENDINGS
            }
            self._settle([Settling(lease_id, **parts)], "it broke")
            if dies:
                self._die(lease_id)

    @rule(
        queue=queues,
        group=groups,
        partition=partitions,
        count=st.integers(1, 4),
        dies=st.booleans(),
        times=st.integers(1, 4),
    )
    def poison(self, queue: str, group: str, partition: str, count: int, dies: bool, times: int) -> None:
        """Messages that nobody gets done with."""
        self._push(queue, [(partition, 0, None)] * count)
        for _ in range(times):
            for lease_id in {p.lease_id for p in self._pop(Scope(queue, partition), group, batch_size=count)}:
                reader = self.model.reader_of(lease_id)
                if dies or reader is None or reader.lease is None:
                    self._die(lease_id)
                else:
                    self._settle([Settling(lease_id, failed=frozenset(reader.lease.held))])

    @rule(queue=queues, group=groups, batch_size=st.integers(1, 5))
    def pop_everything(self, queue: str, group: str, batch_size: int) -> None:
        """Until nothing comes: whatever is deliverable has then been seen."""
        while self._pop(Scope(queue), group, batch_size=batch_size, max_partitions=2):
            pass

    def _pop(self, scope: Scope, group: str, subscription_from: Any = None, **options: Any) -> list[Popped]:
        defaults: dict[str, Any] = {
            "max_partitions": 1,
            "lease_seconds": None,
            "mode": "all",
            "auto_ack": False,
        }
        asked = defaults | options
        rows = self.sql(
            "SELECT * FROM queen.pop(%(queue)s, %(partition)s, %(group)s, %(batch_size)s, %(max_partitions)s,"
            " %(lease_seconds)s, %(mode)s, %(subscription_from)s, %(auto_ack)s, %(namespace)s, %(task)s)",
            **vars(scope),
            **{name: value for name, value in asked.items() if name != "begins_at"},
            group=None if group == QUEUE_MODE else group,
            subscription_from=subscription_from,
        )
        popped = [
            Popped(_lane(row), row["seq"], row["payload"], row["attempt"], row["lease_id"]) for row in rows
        ]
        assert all(row["consumer_group"] == group for row in rows)
        self.model.pop(
            scope,
            group,
            popped,
            expired=[lane for lane, other in self._new_expiries() if other == group],
            evicted=[(lane, seq) for lane, other, seq in self._new_evictions() if other == group],
            **asked,
        )
        self.lease_ids += [p.lease_id for p in popped if p.lease_id and p.lease_id not in self.lease_ids]
        self._compare_logs()
        return popped

    @precondition(lambda self: self.lease_ids)
    @rule(data=st.data(), error=st.sampled_from([None, "it broke"]))
    def settle(self, data: st.DataObject, error: str | None) -> None:
        """Of one or more leases any part, each message in any way; sometimes what is not theirs any more."""
        lease_ids = self._draw_leases(data)
        self._settle([self._draw_settling(lease_id, data) for lease_id in lease_ids], error)

    def live(self) -> list[Lease]:
        """The leases that nobody has taken over, run out or not."""
        return [reader.lease for reader in self.model.readers.values() if reader.lease is not None]

    def _draw_leases(self, data: st.DataObject) -> list[object]:
        """Mostly such as can be settled, sometimes others."""
        live = [lease.id for lease in self.live()]
        among = live if live and data.draw(st.integers(0, 9)) else self.lease_ids
        return data.draw(st.lists(st.sampled_from(among), min_size=1, max_size=2, unique=True))

    def _draw_settling(self, lease_id: object, data: st.DataObject) -> Settling:
        reader = self.model.reader_of(lease_id)
        seqs = sorted(reader.lease.held) if reader and reader.lease else [1]
        if data.draw(st.integers(0, 19)) == 0:
            seqs.append(max(seqs) + 1)
        outcomes = data.draw(st.lists(ENDING, min_size=len(seqs), max_size=len(seqs)))
        return Settling(
            lease_id,
            **{
                kind: frozenset(seq for seq, outcome in zip(seqs, outcomes, strict=True) if outcome == kind)
                for kind in ENDINGS
            },
        )

    def _settle(self, settlings: list[Settling], error: str | None = None) -> None:
        def call() -> list[Outcome]:
            rows = self.sql(
                "SELECT * FROM queen.settle(%s::uuid[], %s::int8multirange[], %s::int8multirange[],"
                " %s::int8multirange[], %s::int8multirange[], %s)",
                [s.lease_id for s in settlings],
                *[[_multirange(getattr(s, kind)) for s in settlings] for kind in ENDINGS],
                error,
            )
            named = [s.lease_id for s in settlings if s.named]
            assert [row.pop("lease_id") for row in rows] == named
            return [Outcome(**row) for row in rows]

        self.same(lambda: self.model.settle(settlings, error), call)

    @precondition(lambda self: self.live())
    @rule(
        what=st.sampled_from(["ack", "death", "death", "renewal"]),
        seconds=st.sampled_from([100, 300, 500]),
        data=st.data(),
    )
    def leases(self, what: str, seconds: int, data: st.DataObject) -> None:
        if what == "ack":
            self._settle([Settling(lease.id, completed=frozenset(lease.held)) for lease in self.live()])
        elif what == "death":
            self._die(data.draw(st.sampled_from(self.live())).id)
        else:
            lease_ids = self._draw_leases(data)
            self.same(
                lambda: self.model.renew(lease_ids, seconds) or lease_ids,
                lambda: [
                    row["lease_id"]
                    for row in self.sql("SELECT * FROM queen.renew(%s::uuid[], %s)", lease_ids, seconds)
                ],
            )

    def _die(self, lease_id: object) -> None:
        """The lease runs out now, and whoever has waited for that may look."""
        reader = self.model.reader_of(lease_id)
        if reader is None or reader.lease is None:
            return
        self.model.advance(0.001)
        reader.lease.expires_at = self.model.now
        self.connection.execute(
            """
            WITH ended AS (
                UPDATE queen.consumer_states SET lease_expires_at = clock_timestamp()
                WHERE lease_id = %s RETURNING consumer_id
            )
            UPDATE queen.consumers SET ready_at = least(ready_at, clock_timestamp())
            WHERE id IN (SELECT consumer_id FROM ended)
            """,
            [lease_id],
        )

    @rule(
        hundreds=st.sampled_from([0, 1, 1, 2, 3]),
        queue=queues,
        jobs=st.sampled_from(
            [(), ("reclaim",), ("evict",), ("retain",), ("evict", "retain"), ("retain", "evict")]
        ),
        max_rows=st.sampled_from([1, 2, 10000, 10000]),
    )
    def time_passes(self, hundreds: int, queue: str, jobs: tuple[str, ...], max_rows: int) -> None:
        if hundreds:
            self._advance(hundreds * 100 + 1)
        for job in jobs:
            self._run_job(job, queue, max_rows)
            self._compare_logs()

    def _advance(self, seconds: int) -> None:
        self.model.advance(seconds)
        for table, columns in TIMES.items():
            moves = ", ".join(f"{column} = {column} - make_interval(secs => {seconds})" for column in columns)
            self.connection.execute(f"UPDATE queen.{table} SET {moves}")  # type: ignore[arg-type]

    def _run_job(self, job: str, queue: str, max_rows: int) -> None:
        if job == "reclaim":
            self.same(
                lambda: self.model.reclaim(queue),
                lambda: self.sql("SELECT queen.reclaim(%s) AS n", queue)[0]["n"],
            )
        elif job == "evict":
            rows = self.sql("SELECT * FROM queen.evict(%s, %s)", queue, max_rows)
            assert all(row["queue_name"] == queue for row in rows)
            evicted = {row["consumer_group"]: row["evicted"] for row in rows}
            assert evicted == self.model.evict(queue, self._new_expiries(), self._new_evictions(), max_rows)
        else:
            rows = self.sql("SELECT * FROM queen.retain(%s)", queue)
            deleted = [(row["partition"], row["retention_type"], row["deleted"]) for row in rows]
            assert sorted(deleted) == sorted(self.model.retain(queue))

    def _a_time(self, data: st.DataObject) -> tuple[float, Any]:
        """A moment, for the model and for the engine: a message's, which is not before it, or one to come."""
        messages = [(lane, message) for lane in self.model.lanes.values() for message in lane.messages]
        if not messages or data.draw(st.integers(0, 3)) == 0:
            [row] = self.sql("SELECT clock_timestamp() + make_interval(secs => 150) AS at")
            return self.model.now + 150, row["at"]
        lane, message = data.draw(st.sampled_from(messages))
        [row] = self.sql(
            "SELECT created_at AS at FROM queen.messages"
            " WHERE queue_name = %s AND partition_name = %s AND priority = %s AND seq = %s",
            lane.key.queue, lane.key.partition, lane.key.priority, message.seq,
        )  # fmt: skip
        return message.created_at, row["at"]

    @rule(
        queue=queues,
        group=groups,
        partition=st.none() | partitions,
        to=st.sampled_from(["beginning", "beginning", "end", "time"]),
        data=st.data(),
    )
    def seek(self, queue: str, group: str, partition: str | None, to: str, data: st.DataObject) -> None:
        moment, to_time = self._a_time(data) if to == "time" else (0.0, None)
        self.same(
            lambda: self.model.seek(queue, group, moment if to == "time" else to, partition),
            lambda: self.sql(
                "SELECT queen.seek(%s, %s, %s, %s, %s) AS moved",
                queue, group, None if to == "time" else to, to_time, partition,
            )[0]["moved"],
        )  # fmt: skip

    @rule(
        what=st.sampled_from(["forget a group", "purge dead letters", "roll back", "roll back"]),
        queue=queues,
        partition=partitions,
        reach=REACH,
        group=groups,
        narrow=st.booleans(),
    )
    def seldom(self, what: str, queue: str, partition: str, reach: str, group: str, narrow: bool) -> None:
        """Rules come up equally often; what would end most other things shares one."""
        if what == "forget a group":
            where = queue if narrow else None
            self.same(
                lambda: self.model.delete_group(group, where),
                lambda: self.sql("SELECT queen.delete_consumer_group(%s, %s) AS n", group, where)[0]["n"],
            )
        elif what == "purge dead letters":
            ids = [d.id for d in self.model.dead_letters if d.id is not None][:2] if narrow else None
            purge = "SELECT queen.purge_dead_letters(%s, %s::bigint[], %s) AS n"
            self.same(
                lambda: self.model.purge(queue, ids, group),
                lambda: self.sql(purge, queue, ids, group)[0]["n"],
            )
        else:
            self._roll_back(_scope(reach, queue, partition), group, in_transaction=narrow)

    @precondition(lambda self: self.model.dead_letters)
    @rule(
        queue=queues,
        by_id=st.booleans(),
        group=st.none() | groups,
        max_rows=st.sampled_from([1, 1000]),
        data=st.data(),
    )
    def requeue(self, queue: str, by_id: bool, group: str | None, max_rows: int, data: st.DataObject) -> None:
        ids = self._draw_dead_letters(data) if by_id else None
        self.same(
            lambda: self.model.requeue(queue, ids, group, max_rows),
            lambda: [
                (row["id"], row["partition"], row["seq"])
                for row in self.sql(
                    "SELECT * FROM queen.requeue_dead_letters(%s, %s::bigint[], %s, %s)",
                    queue,
                    ids,
                    group,
                    max_rows,
                )
            ],
        )

    def _draw_dead_letters(self, data: st.DataObject) -> list[int]:
        ids = sorted(d.id for d in self.model.dead_letters if d.id is not None)
        return data.draw(st.lists(st.sampled_from(ids), min_size=1, max_size=3, unique=True))

    def _roll_back(self, scope: Scope, group: str, in_transaction: bool) -> None:
        """A consumer takes messages, finishes them, pushes onward, and crashes before it commits."""
        with self.connection.transaction(force_rollback=True):
            rows = self.sql(
                "SELECT * FROM queen.pop(%(queue)s, %(partition)s, %(group)s, 3, 2,"
                " namespace => %(namespace)s, task => %(task)s, in_transaction => %(in_transaction)s)",
                **vars(scope),
                group=group,
                in_transaction=in_transaction,
            )
            for lease_id in {row["lease_id"] for row in rows}:
                self.sql("SELECT * FROM queen.ack(%s)", lease_id)
            if not self.model.queues["refunds"].max_queue_size:
                self.sql("SELECT * FROM queen.push('refunds', '{0}', '{onward}')")

    # What must hold after each

    @invariant()
    def compare(self) -> None:
        if self.model.queues:
            self._compare_logs()
            self._compare_depth()
            self._compare_stats()
            assert self.sql(FIND_BROKEN) == []

    def _compare_logs(self) -> None:
        self._compare_dead_letters()
        self._compare_deliveries()

    def _compare_dead_letters(self) -> None:
        rows = self.sql(
            "SELECT d.*, q.name AS queue_name"
            " FROM queen.dead_letter_queue AS d JOIN queen.queues AS q ON q.id = d.queue_id ORDER BY d.id"
        )
        nameless = [d for d in self.model.dead_letters if d.id is None]
        for row in rows:
            if row["id"] > self.last_dead_letter:
                same = [
                    d
                    for d in nameless
                    if (d.lane, d.seq, d.group) == (_lane(row), row["seq"], row["consumer_group"])
                ]
                assert same, f"a dead letter too many: {row}"
                same[0].id = row["id"]
                nameless.remove(same[0])
                self.last_dead_letter = row["id"]
        assert not nameless, "a dead letter is missing"
        actual = [
            DeadLetter(
                lane=_lane(row),
                seq=row["seq"],
                group=row["consumer_group"],
                reason=row["reason"],
                error=row["error_message"],
                retry_count=row["retry_count"],
                payload=row["payload"],
                id=row["id"],
                requeued_as=_seq(row["requeued_message_id"]),
            )
            for row in rows
        ]
        assert actual == sorted(self.model.dead_letters, key=lambda d: d.id or 0)

    def _compare_deliveries(self) -> None:
        rows = self.sql("SELECT * FROM queen.deliveries WHERE id > %s ORDER BY id", self.first_delivery)
        names = ("first_seq", "last_seq", "attempt", "completed", "failed", "rejected", "released", "expired")
        actual = [
            Delivery(_lane(row), row["consumer_group"], **{name: row[name] for name in names}) for row in rows
        ]
        assert sorted(actual, key=str) == sorted(self.model.deliveries, key=str)
        self.last_delivery = max((row["id"] for row in rows), default=self.last_delivery)

    def _compare_depth(self) -> None:
        model = self.model
        rows = self.sql(DEPTH, GROUPS)
        assert len(rows) == len(QUEUES) * len(GROUPS)
        for row in rows:
            where = row["queue"], row["consumer_group"]
            assert row["pending"] == model.pending(*where), where
            assert row["in_flight"] == model.in_flight(*where), where
            assert row["dead_letters"] == len(model.waiting_dead_letters(*where)), where
            assert row["oldest_age_seconds"] == pytest.approx(model.oldest_age(*where), abs=45), where
            met = [r for (lane, group), r in model.readers.items() if (lane.queue, group) == where]
            assert row["counted"] == sum(len(reader.pending) for reader in met), where
        [row] = self.sql("SELECT * FROM queen.depth(namespace => 'shop', consumer_group => 'audit')")
        assert row["pending"] == sum(model.pending(queue, "audit") for queue in QUEUES)

    def _compare_stats(self) -> None:
        model = self.model
        expected = {}
        for lane in model.lanes.values():
            for group in model.groups_of(lane.key.queue) or [None]:
                reader = model.readers.get((lane.key, group)) if group else None
                expected[lane.key, group] = (
                    lane.floor + 1,
                    lane.last_seq,
                    len(lane.messages),
                    len(model.backlog(group, lane)) if group else len(lane.messages),
                    reader.completed if reader else 0,
                    reader.dropped if reader else 0,
                )
        actual = {
            (_lane(row), row["consumer_group"]): tuple(
                row[name]
                for name in (
                    "first_seq",
                    "last_seq",
                    "retained",
                    "pending",
                    "total_completed",
                    "total_dropped",
                )
            )
            for row in self.sql("SELECT * FROM queen.stats()")
        }
        assert actual == expected
        groups = {
            (row["queue_name"], row["consumer_group"]): row["pending"]
            for row in self.sql("SELECT * FROM queen.list_consumer_groups()")
        }
        assert groups == {(queue, group): model.pending(queue, group) for queue, group in model.groups}

    def teardown(self) -> None:
        """Queues leave nothing behind; what outlives them by intention goes too, for the next example."""
        for queue in QUEUES:
            self.sql("SELECT queen.delete_queue(%s)", queue)
        for group in GROUPS:
            self.sql("SELECT queen.delete_consumer_group(%s)", group)
        left = self.sql(
            "SELECT * FROM ("
            + " UNION ALL ".join(
                f"SELECT '{table}' AS name, count(*) AS rows FROM queen.{table}"
                for table in (*TIMES, "queues", "partitions", "queue_groups", "redeliveries")
            )
            + ") AS counts WHERE rows > 0"
        )
        for table in (
            *TIMES,
            "redeliveries",
            "deliveries",
            "retention_history",
            "queue_groups",
            "partitions",
            "queues",
        ):
            self.connection.execute(f"DELETE FROM queen.{table}")  # type: ignore[arg-type]
        assert left == []


def _scope(reach: str, queue: str, partition: str) -> Scope:
    return {
        "queue": Scope(queue),
        "partition": Scope(queue, partition),
        "namespace": Scope(namespace="shop"),
        "task": Scope(task="pack"),
        "namespace and task": Scope(namespace="shop", task="pack"),
    }[reach]


def _lane(row: dict[str, Any]) -> LaneKey:
    return LaneKey(row["queue_name"], row.get("partition_name") or row["partition"], row["priority"])


def _seq(message_id: UUID | None) -> int | None:
    return int(message_id.hex[-15:], 16) if message_id else None


def _multirange(seqs: frozenset[int]) -> Multirange[int] | None:
    return Multirange([Range(seq, seq, "[]") for seq in sorted(seqs)]) if seqs else None


def search(
    connection: psycopg.Connection[dict[str, Any]], examples: int, *, derandomize: bool = True
) -> None:
    """Run examples until one fails; raise with the shortest one that does."""
    connection.execute("SET synchronous_commit = OFF")  # nobody pulls the plug here
    connection.execute("SET jit = OFF")  # our own check is a large query over tiny tables
    run_machine(
        type("Machine", (EngineFollowsModel,), {"connection": connection}),
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            database=None,
            derandomize=derandomize,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
            print_blob=False,
            report_multiple_bugs=False,
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a failure is made small before it is shown
def test_the_engine_does_what_the_model_says(queen_dsn: str) -> None:
    with psycopg.connect(queen_dsn, autocommit=True, row_factory=dict_row) as connection:
        wanted = os.environ.get("QUEEN_MODEL_EXAMPLES")
        usual = 200 if connection.info.server_version >= 180000 else 40
        search(connection, int(wanted or usual), derandomize=not wanted)


# What it once found, each as short as it gets: here a failure has a name, and needs no luck.


@pytest.fixture
def machine(queen_dsn: str) -> Iterator[EngineFollowsModel]:
    """Played by hand; steps check the engine against the model as they do in an example."""
    with psycopg.connect(queen_dsn, autocommit=True, row_factory=dict_row) as connection:
        machine = type("Machine", (EngineFollowsModel,), {"connection": connection})()
        machine.use_queues(count=1, retry_limit=3, retry_delay=0, themes=set())
        yield machine


ORDERS = Scope("orders")
DEFAULT = ("Default", 0, None)


def test_a_higher_priority_comes_first_also_after_its_lease_ran_out(machine: EngineFollowsModel) -> None:
    machine._push("orders", [("Default", 9, None), ("Default", 0, None)])
    [first] = machine._pop(ORDERS, QUEUE_MODE, batch_size=1)
    machine._die(first.lease_id)
    [again] = machine._pop(ORDERS, QUEUE_MODE, batch_size=1, max_partitions=2)
    assert again.lane.priority == 9
    machine.compare()


def test_backoff_is_that_of_the_messages_that_come_again(machine: EngineFollowsModel) -> None:
    machine.configure_queue("orders", {"retry_limit": 1, "retry_delay": 100_000})
    machine._push("orders", [DEFAULT])
    for seqs in ([1], [1, 2]):
        popped = machine._pop(ORDERS, QUEUE_MODE, batch_size=2)
        assert [p.seq for p in popped] == seqs
        machine._settle([Settling(popped[0].lease_id, failed=frozenset(seqs))])
        machine._push("orders", [DEFAULT])
        machine._advance(101)
    assert [p.seq for p in machine._pop(ORDERS, QUEUE_MODE, batch_size=2)] == [2, 3]
    machine.compare()


def test_a_lease_that_was_cut_short_ends_for_who_ran_into_it(machine: EngineFollowsModel) -> None:
    machine._push("orders", [DEFAULT])
    [first] = machine._pop(ORDERS, QUEUE_MODE, batch_size=1, lease_seconds=300)
    assert machine._pop(ORDERS, QUEUE_MODE, batch_size=1) == []
    machine.model.renew([first.lease_id], 100)
    machine.sql("SELECT * FROM queen.renew(%s::uuid[], 100)", [first.lease_id])
    machine._advance(101)
    assert machine._pop(ORDERS, QUEUE_MODE, batch_size=1)
    machine.compare()


def test_a_message_without_an_id_is_never_a_duplicate(machine: EngineFollowsModel) -> None:
    machine._push("orders", [("Default", 0, "a")])
    machine._push("orders", [DEFAULT, ("Default", 0, "a"), DEFAULT])
    machine._push("orders", [DEFAULT])
    assert len(machine._pop(ORDERS, QUEUE_MODE, batch_size=10)) == 4
    machine.compare()


def test_attempts_count_with_auto_ack_too(machine: EngineFollowsModel) -> None:
    machine._push("orders", [DEFAULT])
    [first] = machine._pop(ORDERS, QUEUE_MODE, batch_size=1)
    machine._die(first.lease_id)
    [again] = machine._pop(ORDERS, QUEUE_MODE, batch_size=1, auto_ack=True)
    assert again.attempt == 2
    machine.compare()


def test_a_requeued_message_is_for_one_group_also_where_others_have_not_met_it(
    machine: EngineFollowsModel,
) -> None:
    machine._pop(ORDERS, "audit", batch_size=1)
    machine._push("orders", [DEFAULT])
    [first] = machine._pop(ORDERS, QUEUE_MODE, batch_size=1)
    machine._settle([Settling(first.lease_id, rejected=frozenset({1}))])
    machine.compare()
    machine.requeue(queue="orders", by_id=False, group=None, max_rows=10, data=None)
    assert [p.seq for p in machine._pop(ORDERS, QUEUE_MODE, batch_size=5)] == [2]
    assert [p.seq for p in machine._pop(ORDERS, "audit", batch_size=5)] == [1]
    machine.compare()


@pytest.mark.parametrize("step", ["nack", "renew"])
def test_a_lease_whose_messages_retention_removed(machine: EngineFollowsModel, step: str) -> None:
    machine.configure_queue("orders", {"retention_enabled": True, "retention_seconds": 200})
    machine._push("orders", [DEFAULT])
    [first] = machine._pop(ORDERS, QUEUE_MODE, batch_size=1, lease_seconds=100)
    machine._advance(201)
    machine._run_job("retain", "orders", 10)
    machine._push("orders", [DEFAULT])
    if step == "nack":
        machine._settle([Settling(first.lease_id, failed=frozenset({1}))])
    else:
        machine.model.renew([first.lease_id], 100)
        machine.sql("SELECT * FROM queen.renew(%s::uuid[], 100)", [first.lease_id])
    machine.compare()


def test_a_first_contact_by_another_scope_skips_nothing(machine: EngineFollowsModel) -> None:
    """The older subscription governs, so what came since then is the group's, and depth says so before."""
    machine._push("orders", [DEFAULT])
    machine._pop(Scope(namespace="shop", task="pack"), "audit", batch_size=1, mode="new")
    machine.seldom("forget a group", "orders", "Default", "queue", "audit", narrow=True)
    machine._push("orders", [DEFAULT])
    assert [p.seq for p in machine._pop(Scope(namespace="shop"), "audit", batch_size=5)] == [2]
    machine.compare()
