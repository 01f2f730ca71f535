"""Would time segments serve better than one table of messages? What push, pop and retention cost in either.

Dropping a closed segment costs nothing, deleting its messages costs WAL and a VACUUM. But a unique index
cannot span segments: each push must look for its transaction ids in every live one. Three layouts, on a copy
of the engine's table reduced to what matters here:

    one table      the engine's: primary key (lane, seq), unique hash of the transaction id
    n segments     partitioned by time, the same two indexes on each; a push probes them all
    ids apart      segments for the messages, and one table for the hashes of their transaction ids, which
                   retention has to delete from, row by row

CPU is the server process's own (from /proc), WAL the server's write position: both hold still on a busy
machine. docs/spark.md says what follows from the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg

from airflow_provider_queen.embedded.postgres import PostgresServer

LANES = 20
BATCH = 100
CHUNK = 10_000
PAYLOAD = json.dumps({"order": 123456, "customer": "customer-0001", "items": [1, 2, 3], "note": "x" * 118})
TICKS = os.sysconf("SC_CLK_TCK")

COLUMNS = (
    "lane_id bigint NOT NULL, seq bigint NOT NULL, created_at timestamptz NOT NULL, transaction_id text,"
    " payload json"
)
OPTIONS = "WITH (autovacuum_enabled = off)"  # it would run at another moment in each layout
HASH = "hashtextextended(transaction_id, lane_id / 10)"
START = "timestamptz '2026-01-01 00:00+00'"

# An hour a segment; batches of one lane, as producers push them. A lane's last seq is in the newest segment,
# as it is for lanes in use: so with few messages there can be only few segments.
FILL = f"""
INSERT INTO log
SELECT
    10 * (n / {BATCH} %% {LANES}), n / {BATCH * LANES} * {BATCH} + n %% {BATCH} + 1,
    {START} + n * interval '1 hour' * %(segments)s / %(messages)s, gen_random_uuid()::text, %(payload)s::json
FROM generate_series(0, %(messages)s - 1) AS n
"""
PUSH = """
CREATE FUNCTION push(lane bigint, ids text[], payloads text[], newest timestamptz) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE tail bigint; known bigint := 0;
BEGIN
    SELECT l.seq INTO tail FROM log AS l
    WHERE l.lane_id = push.lane AND l.created_at >= push.newest ORDER BY l.seq DESC LIMIT 1;
    {probe}
    INSERT INTO log SELECT push.lane, tail + u.n, push.newest + interval '59 min', u.id, u.payload::json
    FROM unnest(push.ids, push.payloads) WITH ORDINALITY AS u (id, payload, n);
    {after}
    RETURN known;
END $$
"""
PROBE_SEGMENTS = f"""
    SELECT count(*) INTO known FROM unnest(push.ids) AS u (id)
    CROSS JOIN LATERAL (
        SELECT 1 FROM log AS l
        WHERE {HASH.replace("transaction_id", "l.transaction_id").replace("lane_id", "l.lane_id")}
            = hashtextextended(u.id, push.lane / 10) AND l.created_at < push.newest
    ) AS found;
"""
KEEP_APART = """
    INSERT INTO ids SELECT hashtextextended(u.id, push.lane / 10), push.newest
    FROM unnest(push.ids) AS u (id);
"""
POP = "SELECT * FROM log WHERE lane_id = %s AND seq > %s ORDER BY seq LIMIT 100"
DELETE_CHUNK = "DELETE FROM log WHERE lane_id = %s AND seq > %s AND seq <= %s"
DELETE_IDS = (
    f"DELETE FROM ids WHERE ctid = ANY (ARRAY(SELECT ctid FROM ids WHERE segment <= %s LIMIT {CHUNK}))"
)


class Layout:
    """One layout in a database of its own, and what it costs."""

    def __init__(self, dsn: str, segments: int, messages: int, *, ids_apart: bool = False) -> None:
        self.segments, self.messages, self.ids_apart = segments, messages, ids_apart
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.aside = psycopg.connect(dsn, autocommit=True)

    @property
    def partitioned(self) -> bool:
        return self.segments > 1

    def execute(self, statement: str, *arguments: Any) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(statement.encode(), *arguments)
        return cursor.fetchall() if cursor.description else []

    def create(self) -> None:
        kind = "PARTITION BY RANGE (created_at)" if self.partitioned else OPTIONS
        self.execute(f"CREATE TABLE log ({COLUMNS}) {kind}")
        tables = [f"log_{number}" for number in range(self.segments)] if self.partitioned else ["log"]
        if self.partitioned:
            for number, table in enumerate(tables):
                bounds = [f"{START} + interval '{hour} hours'" for hour in (number, number + 1)]
                (low,), (high,) = (self.execute(f"SELECT ({bound})::text")[0] for bound in bounds)
                self.execute(
                    f"CREATE TABLE {table} PARTITION OF log FOR VALUES FROM ('{low}') TO ('{high}') {OPTIONS}"
                )
        self.execute(FILL, {"segments": self.segments, "messages": self.messages, "payload": PAYLOAD})
        for table in tables:
            self.execute(f"ALTER TABLE {table} ADD PRIMARY KEY (lane_id, seq)")
            if not self.ids_apart:
                self.execute(f"CREATE UNIQUE INDEX {table}_ids ON {table} (({HASH}))")
        if self.ids_apart:
            self.execute(f"CREATE TABLE ids (hash bigint NOT NULL, segment timestamptz NOT NULL) {OPTIONS}")
            self.execute(
                f"INSERT INTO ids SELECT {HASH}, date_trunc('hour', created_at) FROM log ORDER BY created_at"
            )
            self.execute("ALTER TABLE ids ADD PRIMARY KEY (hash)")
        probe = PROBE_SEGMENTS if self.partitioned and not self.ids_apart else ""
        self.execute(PUSH.format(probe=probe, after=KEEP_APART if self.ids_apart else ""))
        self.execute("VACUUM ANALYZE")
        self.execute("CHECKPOINT")

    def cost(self, work: Callable[[], Any]) -> dict[str, float]:
        """Seconds, CPU and WAL of what this session does."""
        pid = self.connection.info.backend_pid
        before, cpu, started = self._wal(), backend_cpu(pid), time.perf_counter()
        work()
        return {
            "seconds": time.perf_counter() - started,
            "cpu": backend_cpu(pid) - cpu,
            "wal": self._wal() - before,
        }

    def _wal(self) -> int:
        row = self.aside.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchone()
        return int(row[0]) if row else 0

    def push(self, batches: int) -> dict[str, float]:
        newest = self.execute(f"SELECT {START} + interval '{self.segments - 1} hours'")[0][0]
        work = [
            (10 * (n % LANES), [str(uuid.uuid4()) for _ in range(BATCH)], [PAYLOAD] * BATCH, newest)
            for n in range(batches)
        ]

        def push_all() -> None:
            for arguments in work:
                self.execute("SELECT push(%s, %s, %s, %s)", arguments)

        return per_message(self.cost(push_all), batches * BATCH)

    def pop(self, batches: int) -> dict[str, float]:
        """Batches from all over the log: consumers are anywhere."""
        depth = self.messages // LANES - BATCH

        def pop_all() -> None:
            for n in range(batches):
                self.execute(POP, (10 * (n % LANES), n * 7919 % depth))

        return per_message(self.cost(pop_all), batches * BATCH)

    def retain(self) -> dict[str, float]:
        """Everything goes: by DROP where there are segments, else in bounded chunks; then VACUUM."""
        removed = self.cost(self._drop if self.partitioned else self._delete)
        dead, size = self._left()
        vacuum = self.cost(lambda: self.execute("VACUUM (INDEX_CLEANUP ON, TRUNCATE OFF)")) if dead else {}
        return {
            "seconds": round(removed["seconds"], 2),
            "cpu_seconds": round(removed["cpu"], 2),
            "wal_mb": round(removed["wal"] / 1e6, 1),
            "dead_rows": dead,
            "size_mb": round(size / 1e6),
            "vacuum_seconds": round(vacuum.get("seconds", 0), 2),
            "vacuum_cpu_seconds": round(vacuum.get("cpu", 0), 2),
            "vacuum_wal_mb": round(vacuum.get("wal", 0) / 1e6, 1),
        }

    def _delete(self) -> None:
        for lane in range(0, 10 * LANES, 10):
            floor = 0
            while self.connection.execute(DELETE_CHUNK.encode(), (lane, floor, floor + CHUNK)).rowcount:
                floor += CHUNK

    def _drop(self) -> None:
        for number in range(self.segments):
            self.execute(f"DROP TABLE log_{number}")
            if self.ids_apart:
                (moment,) = self.execute(f"SELECT {START} + interval '{number} hours'")[0]
                while self.connection.execute(DELETE_IDS.encode(), [moment]).rowcount:
                    pass

    def _left(self) -> tuple[int, int]:
        self.execute("SELECT pg_stat_force_next_flush()")
        self.execute("SELECT 1")
        row = self.aside.execute(
            "SELECT coalesce(sum(n_dead_tup), 0)::bigint,"
            " coalesce(sum(pg_total_relation_size(relid)), 0)::bigint"
            " FROM pg_stat_user_tables WHERE relname ~ '^(log|ids)'"
        ).fetchone()
        assert row is not None
        return row[0], row[1]

    def close(self) -> None:
        self.connection.close()
        self.aside.close()


def backend_cpu(pid: int) -> float:
    """Seconds of CPU of one server process; nanosecond-precise where the kernel tells, else in ticks."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


def per_message(cost: dict[str, float], messages: int) -> dict[str, float]:
    return {
        "cpu_us": round(cost["cpu"] / messages * 1e6, 2),
        "wal_bytes": round(cost["wal"] / messages),
    }


def measure(
    server: PostgresServer, name: str, segments: int, messages: int, *, ids_apart: bool = False
) -> None:
    with ExitStack() as stack:
        layout = Layout(server.create_database(name), segments, messages, ids_apart=ids_apart)
        stack.callback(server.drop_database, name)
        stack.callback(layout.close)
        layout.create()
        layout.push(50)  # the caches are cold
        layout.pop(50)
        results = {"push": layout.push(400), "pop": layout.pop(400), "retention": layout.retain()}
    print(f"{name:>14}  {json.dumps(results)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=2_000_000)
    messages = parser.parse_args().messages
    with PostgresServer(settings={"max_wal_size": "4GB", "shared_buffers": "512MB"}) as server:
        measure(server, "one_table", 1, messages)
        for segments in (4, 12, 48):
            measure(server, f"segments_{segments}", segments, messages)
        measure(server, "ids_apart_12", 12, messages, ids_apart=True)


if __name__ == "__main__":
    main()
