"""``make bench-queue``: what push, pop and acknowledge cost, each beside a limit measured in the same run.

A rate swings with whatever else the machine does, so it is printed as a ratio to the limit: a durable
``INSERT … SELECT unnest`` of the same messages into a bare table with one btree, in turns with the queue.
CPU is the server process's own (from /proc), WAL the server's write position: both hold still.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from airflow_provider_queen.client import QueenClient, schema
from airflow_provider_queen.embedded.postgres import PostgresServer, find_system_postgres

PAYLOAD = {"order": 123456, "customer": "customer-0001", "items": [1, 2, 3], "note": "x" * 118}
TICKS = os.sysconf("SC_CLK_TCK")
GREEN, RED = "ok", "MISSED"


@dataclass
class Cost:
    """What a run of ``messages`` messages took."""

    messages: int
    seconds: float
    cpu_seconds: float
    wal_bytes: int

    @property
    def rate(self) -> float:
        return self.messages / self.seconds

    @property
    def cpu_us(self) -> float:
        return self.cpu_seconds / self.messages * 1e6

    @property
    def wal(self) -> float:
        return self.wal_bytes / self.messages


class Bench:
    """One server, one database, one session that is measured."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.client = QueenClient(dsn)
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.aside = psycopg.connect(dsn, autocommit=True)
        self.failed = 0

    def value(self, statement: str) -> Any:
        row = self.aside.execute(statement.encode()).fetchone()
        assert row is not None
        return row[0]

    @contextmanager
    def measured(self, messages: int, costs: list[Cost]) -> Iterator[None]:
        pid = self.connection.info.backend_pid
        lsn = self.value("SELECT pg_current_wal_insert_lsn()")
        cpu = backend_cpu(pid)
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        wal = self.value(f"SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '{lsn}')::bigint")
        costs.append(Cost(messages, seconds, backend_cpu(pid) - cpu, wal))

    def report(self, name: str, figure: float, limit: float, unit: str, *, at_least: bool) -> None:
        good = figure >= limit if at_least else figure <= limit
        self.failed += not good
        sign = ">=" if at_least else "<="
        print(f"  {name:<52} {figure:>10.2f} {unit:<6} {sign} {limit:<7g} {GREEN if good else RED}")

    def note(self, text: str) -> None:
        print(f"    {text}")


def backend_cpu(pid: int) -> float:
    """Seconds of CPU of one server process; nanosecond-precise where the kernel tells, else in ticks."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


def arrays(count: int) -> dict[str, list[Any]]:
    return {
        "payloads": [json.dumps(PAYLOAD)] * count,
        "ids": [str(uuid.uuid4()) for _ in range(count)],
        "traces": [uuid.uuid4() for _ in range(count)],
    }


def best(costs: list[Cost]) -> Cost:
    """The median run by CPU."""
    return sorted(costs, key=lambda cost: cost.cpu_us)[len(costs) // 2]


def insert_limit(bench: Bench, batch: int, batches: int, costs: list[Cost]) -> None:
    data = [arrays(batch) for _ in range(batches)]
    with bench.measured(batch * batches, costs):
        for part in data:
            bench.connection.execute(
                b"INSERT INTO bare (created_at, trace_id, transaction_id, payload)"
                b" SELECT now(), t, i, p::json"
                b" FROM unnest(%b::text[], %b::text[], %b::uuid[]) AS u (p, i, t)",
                [part["payloads"], part["ids"], part["traces"]],
            )


def push(bench: Bench, queue: str, batch: int, batches: int, costs: list[Cost]) -> None:
    data = [arrays(batch) for _ in range(batches)]
    with bench.measured(batch * batches, costs):
        for part in data:
            bench.connection.execute(
                b"SELECT * FROM queen.push_batch(%b, %b::text[], NULL, %b::text[], %b::uuid[])",
                [queue, part["payloads"], part["ids"], part["traces"]],
                binary=True,
            ).fetchall()  # as the client calls it


def pop_and_ack(bench: Bench, queue: str, batch: int, batches: int, costs: list[Cost]) -> None:
    with bench.measured(batch * batches, costs):
        for _ in range(batches):
            rows = bench.connection.execute(
                b"SELECT lease_id, seq, payload::text, transaction_id, trace_id, created_at, attempt"
                b" FROM queen.pop(%b, batch_size => %b)",
                [queue, batch],
                binary=True,
            ).fetchall()
            assert len(rows) == batch, f"{len(rows)} instead of {batch}"
            span = f"{{[{rows[0][1]},{rows[-1][1]}]}}"
            bench.connection.execute(
                b"SELECT * FROM queen.settle(ARRAY[%b]::uuid[], ARRAY[%t::int8multirange])",
                [rows[0][0], span],
            )


def throughput(bench: Bench, rounds: int) -> None:
    print("push, pop and acknowledge, one client, dedupe and trace stored")
    targets = {1: (0.4, None), 100: (0.45, 0.5), 1000: (0.55, 1.0)}
    bench.client.configure_queue("bench")
    for batch, (push_ratio, pop_ratio) in targets.items():
        batches = max(1, {1: 600, 100: 120, 1000: 20}[batch])
        limits: list[Cost] = []
        pushes: list[Cost] = []
        pops: list[Cost] = []
        for _ in range(rounds):
            insert_limit(bench, batch, batches, limits)
            push(bench, "bench", batch, batches, pushes)
            pop_and_ack(bench, "bench", batch, batches, pops)
        push_rate = statistics.median(p.rate / limit.rate for p, limit in zip(pushes, limits, strict=True))
        pop_rate = statistics.median(p.rate / limit.rate for p, limit in zip(pops, limits, strict=True))
        bench.report(f"push at {batch}: rate / INSERT", push_rate, push_ratio, "", at_least=True)
        if pop_ratio:
            bench.report(f"pop+ack at {batch}: rate / INSERT", pop_rate, pop_ratio, "", at_least=True)
        if batch == 100:
            bench.report("push at 100: backend CPU", best(pushes).cpu_us, 25, "µs", at_least=False)
            bench.report("push at 100: WAL", best(pushes).wal, 600, "B", at_least=False)
            bench.report("pop+ack at 100: backend CPU", best(pops).cpu_us, 20, "µs", at_least=False)
            bench.report("pop+ack at 100: WAL", best(pops).wal, 15, "B", at_least=False)
        for name, costs in (("INSERT", limits), ("push", pushes), ("pop+ack", pops)):
            cost = best(costs)
            bench.note(f"{name:<8} {cost.rate:>9,.0f}/s {cost.cpu_us:>8.1f} µs CPU {cost.wal:>7.1f} B WAL")


def fill(bench: Bench, queue: str, count: int) -> None:
    bench.connection.execute(
        b"SELECT count(*) FROM generate_series(1, %b::int / 1000) AS g CROSS JOIN LATERAL queen.push(%b,"
        b" array_fill(%b::text, ARRAY[1000 + 0 * g])) AS p",
        [count, queue, json.dumps(PAYLOAD)],
    )


def depth_independence(bench: Bench, large: int) -> None:
    print(f"pop at a backlog of {large:,} beside 10,000")
    medians = {}
    cpu = {}
    for count in (10_000, large):
        queue = f"backlog-{count}"
        bench.client.configure_queue(queue)
        fill(bench, queue, count)
        bench.aside.execute("VACUUM ANALYZE queen.message_log")
        pops: list[Cost] = []
        for _ in range(30):
            pop_and_ack(bench, queue, 100, 1, pops)
        medians[count] = statistics.median(p.seconds for p in pops)
        cpu[count] = statistics.median(p.cpu_us for p in pops)
    bench.report("latency ratio", medians[large] / medians[10_000], 1.5, "x", at_least=False)
    bench.report("CPU ratio", cpu[large] / cpu[10_000], 1.5, "x", at_least=False)


def partition_independence(bench: Bench, many: int) -> None:
    print(f"pop with {many:,} partitions, most of them idle, beside 10")
    cpu = {}
    for count in (10, many):
        queue = f"partitions-{count}"
        bench.client.configure_queue(queue)
        for start in range(0, count, 1000):
            names = [f"p{number}" for number in range(start, min(count, start + 1000))]
            bench.connection.execute(
                b"SELECT count(*) FROM queen.push(%b, %b::text[], %b::text[])",
                [queue, ["1"] * len(names), names],
            )
        started = time.perf_counter()
        drain = b"SELECT 1 FROM queen.pop(%b, NULL, NULL, 10000, 1000, auto_ack => true) LIMIT 1"
        while bench.connection.execute(drain, [queue]).fetchone():
            pass
        bench.note(f"{count:,} partitions drained in {time.perf_counter() - started:.1f} s")
        bench.aside.execute("VACUUM ANALYZE queen.consumers")
        bench.aside.execute("VACUUM ANALYZE queen.consumer_states")
        pops: list[Cost] = []
        for _ in range(30):
            bench.connection.execute(
                b"SELECT 1 FROM queen.push(%b, array_fill('1'::text, ARRAY[100]), ARRAY['p7'])", [queue]
            )
            pop_and_ack(bench, queue, 100, 1, pops)
        cpu[count] = statistics.median(p.cpu_us for p in pops)
    bench.report("CPU ratio", cpu[many] / cpu[10], 2.0, "x", at_least=False)
    idle(bench, f"partitions-{many}")


def idle(bench: Bench, queue: str) -> None:
    while bench.connection.execute(b"SELECT 1 FROM queen.pop(%b) LIMIT 1", [queue]).fetchone():
        pass
    selects, pops = [], []
    for _ in range(300):
        selects.append(timed(lambda: bench.connection.execute(b"SELECT 1").fetchall()))
        pops.append(
            timed(lambda: bench.connection.execute(b"SELECT * FROM queen.pop(%b)", [queue]).fetchall())
        )
    ratio = statistics.median(pops) / statistics.median(selects)
    bench.report("idle pop / SELECT 1", ratio, 3.0, "x", at_least=False)
    bench.note(
        f"SELECT 1 {statistics.median(selects) * 1e6:.0f} µs, idle pop {statistics.median(pops) * 1e6:.0f} µs"
    )


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def held_snapshot(bench: Bench, seconds: float) -> None:
    print(f"steady push, pop and acknowledge for {seconds:.0f} s, without and with a snapshot held")
    cpu = {}
    for held in (False, True):
        queue = f"held-{held}"
        bench.client.configure_queue(queue)
        holder = psycopg.connect(bench.dsn)
        if held:
            holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            holder.execute("SELECT 1 FROM queen.queues")
        costs: list[Cost] = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            push(bench, queue, 100, 1, costs)
            pop_and_ack(bench, queue, 100, 1, costs)
        holder.close()
        cpu[held] = sum(c.cpu_seconds for c in costs) / sum(c.messages for c in costs)
        name = "held" if held else "free"
        bench.note(f"{name}: {len(costs) // 2:,} rounds, {cpu[held] * 2e6:.1f} µs CPU a message")
    bench.report("CPU ratio", cpu[True] / cpu[False], 1.5, "x", at_least=False)


def client_cost(bench: Bench) -> None:
    print("the Python client (no limit stated; CPU of this process)")
    bench.client.configure_queue("client")
    messages = [{"payload": PAYLOAD, "transaction_id": str(uuid.uuid4())} for _ in range(1000)]
    started = time.process_time()
    bench.client.push("client", messages)
    pushed = time.process_time()
    popped = bench.client.pop("client", batch_size=1000)
    got = time.process_time()
    bench.client.ack(popped)
    acked = time.process_time()
    bench.note(
        f"µs a message at 1000: push {(pushed - started) * 1e3:.1f}, pop {(got - pushed) * 1e3:.1f},"
        f" ack {(acked - got) * 1e3:.1f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--system", action="store_true", help="the system's PostgreSQL instead of the embedded one"
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes: a look, not a measurement")
    parser.add_argument("--only", choices=["throughput", "depth", "partitions", "held", "client"])
    arguments = parser.parse_args()
    settings = {"shared_buffers": "1GB", "max_wal_size": "8GB", "checkpoint_timeout": "30min"}
    server = PostgresServer(find_system_postgres()[0] if arguments.system else None, settings)
    scale = 10 if arguments.quick else 1
    with server:
        dsn = server.create_database("bench")
        schema.migrate(dsn)
        bench = Bench(dsn)
        bench.aside.execute(
            "CREATE TABLE bare (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, created_at timestamptz,"
            " trace_id uuid, transaction_id text, payload json)"
        )
        print(f"PostgreSQL {server.version}, fsync on, payload {len(json.dumps(PAYLOAD))} bytes")
        parts: dict[str, Callable[[], None]] = {
            "throughput": lambda: throughput(bench, 5),
            "depth": lambda: depth_independence(bench, 1_000_000 // scale),
            "partitions": lambda: partition_independence(bench, 100_000 // scale),
            "held": lambda: held_snapshot(bench, 30 / scale),
            "client": lambda: client_cost(bench),
        }
        for name, part in parts.items():
            if arguments.only in (None, name):
                part()
        bench.client.close()
        bench.connection.close()
        bench.aside.close()
    print(f"{bench.failed} figures missed" if bench.failed else "every figure met")
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
