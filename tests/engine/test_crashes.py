"""Guarantee 10: a crash at any point leaves a state from which everything still holds, with no repair job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_provider_queen.client import QueenClient
from airflow_provider_queen.client.schema import migrate
from airflow_provider_queen.embedded.postgres import PostgresServer
from airflow_provider_queen.exceptions import DatabaseError, LeaseLostError
from tests.engine.conftest import IMPATIENT, MakeQueue
from tests.engine.forwarder import POINTS, forward
from tests.engine.support import (
    Sql,
    check,
    drain,
    eventually,
    expire_leases,
    is_waiting,
    payloads,
    pending,
    put,
    together,
)

pytestmark = pytest.mark.postgres

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server that may be stopped."""
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="module")
def dsn(server: PostgresServer) -> str:
    dsn = server.create_database("crashes")
    migrate(dsn)
    return dsn


class Crash(Exception):
    """Ends the forwarder in the test's own process."""


def recover(queen: QueenClient, sql: Sql, source: str, target: str, point: str) -> None:
    """After the crash: nothing is lost or half done, and an ordinary consumer finishes the work."""
    for queue in (source, target):
        check(sql, queue)
    done = POINTS[point]
    assert (pending(sql, source), pending(sql, target)) == ((0, 3) if done else (3, 0))
    expire_leases(sql, source)
    while queen.depth(source).pending:
        forward(queen, source, target, lambda *_: None)
    assert payloads(drain(queen, target)) == [10, 20, 30]
    for queue in (source, target):
        assert pending(sql, queue) == 0
        check(sql, queue)


@pytest.mark.parametrize("point", POINTS)
def test_the_consumer_is_killed(
    queen: QueenClient, sql: Sql, engine_dsn: str, make_queue: MakeQueue, point: str
) -> None:
    source, target = make_queue(), make_queue()
    put(queen, source, 1, 2, 3)
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.engine.forwarder",
            f"{engine_dsn} application_name=victim",
            source,
            target,
            point,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=CHECKOUT,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"there\n"
        finally:
            process.kill()
    eventually(
        lambda: not sql.execute("SELECT 1 FROM pg_stat_activity WHERE application_name = 'victim'").fetchone()
    )
    recover(queen, sql, source, target, point)


@pytest.mark.parametrize("point", POINTS)
def test_its_session_is_terminated(
    queen: QueenClient, sql: Sql, engine_dsn: str, make_queue: MakeQueue, point: str
) -> None:
    source, target = make_queue(), make_queue()
    put(queen, source, 1, 2, 3)

    def at(reached: str, tx: Any) -> None:
        if reached != point:
            return
        if tx is None:
            raise Crash
        sql.execute("SELECT pg_terminate_backend(%s)", [tx.connection.info.backend_pid])

    with QueenClient(engine_dsn) as victim, suppress(Crash, DatabaseError):
        forward(victim, source, target, at)
    recover(queen, sql, source, target, point)


@pytest.mark.parametrize("call", ["push", "settle", "delete a group", "seek"])
def test_a_session_is_terminated_in_the_middle_of_a_call(
    queen: QueenClient, sql: Sql, engine_dsn: str, queue: str, call: str
) -> None:
    """The call waits for a lock when its end comes; what it has done by then is undone."""
    put(queen, queue, 1, 2)
    held = queen.pop(queue, consumer_group="g", lease_seconds=1000)
    consumer = "SELECT id FROM queen.consumers WHERE id = queen.lease_consumer(%s) FOR UPDATE"
    statement, parameters = {
        "push": ("SELECT * FROM queen.push(%s, ARRAY['3'])", [queue]),
        "settle": ("SELECT * FROM queen.ack(%s)", [held[0].lease_id]),
        "delete a group": ("SELECT * FROM queen.delete_consumer_group('g', %s)", [queue]),
        "seek": ("SELECT * FROM queen.seek(%s, 'g', 'beginning')", [queue]),
    }[call]
    with (
        psycopg.connect(engine_dsn, autocommit=True) as victim,
        ThreadPoolExecutor(1) as pool,
        queen.transaction() as tx,
    ):
        if call == "push":
            put(tx, queue, "in the way")
        else:
            tx.connection.execute(consumer, [held[0].lease_id])
        future = pool.submit(victim.execute, statement, parameters)
        eventually(lambda: is_waiting(sql, victim.info.backend_pid))
        sql.execute("SELECT pg_terminate_backend(%s)", [victim.info.backend_pid])
        with pytest.raises(psycopg.OperationalError):
            future.result(20)
    check(sql, queue)
    assert queen.ack(held).completed == 2
    assert payloads(drain(queen, queue, "g")) == ["in the way"] * (call == "push")


def test_a_push_whose_answer_never_came_is_repeated_safely(
    queen: QueenClient, sql: Sql, engine_dsn: str, queue: str
) -> None:
    messages = [{"payload": n, "transaction_id": f"t{n}"} for n in range(3)]
    with QueenClient(engine_dsn) as victim:
        victim.push(queue, messages)  # committed; suppose that the answer got lost
    again = queen.push(queue, messages)
    assert [(r.status, r.seq) for r in again] == [("duplicate", 1), ("duplicate", 2), ("duplicate", 3)]
    assert payloads(drain(queen, queue)) == [0, 1, 2]


def test_a_producer_that_dies_before_its_commit_leaves_nothing(
    queen: QueenClient, sql: Sql, engine_dsn: str, queue: str
) -> None:
    with QueenClient(engine_dsn) as victim, suppress(DatabaseError), victim.transaction() as tx:
        put(tx, queue, 1, 2, partition="new")
        sql.execute("SELECT pg_terminate_backend(%s)", [tx.connection.info.backend_pid])
        put(tx, queue, 3)
    assert pending(sql, queue) == 0
    assert [r.seq for r in put(queen, queue, 1, partition="new")] == [1]
    assert payloads(drain(queen, queue)) == [1]


class TestServer:
    """On a server of their own, which they stop."""

    @staticmethod
    def connect(dsn: str) -> Sql:
        def attempt() -> Sql | None:
            try:
                return psycopg.connect(dsn, autocommit=True)
            except psycopg.OperationalError:
                return None

        connection = eventually(attempt)
        assert connection is not None
        return connection

    @pytest.mark.parametrize("point", POINTS)
    def test_is_stopped_at_once(self, server: PostgresServer, dsn: str, point: str) -> None:
        source, target = f"source {point}", f"target {point}"

        def at(reached: str, _: Any) -> None:
            if reached == point:
                server.kill()
                raise Crash

        with QueenClient(dsn, options=IMPATIENT) as client:
            for queue in (source, target):
                client.configure_queue(queue, retry_delay=0)
            put(client, source, 1, 2, 3)
            with suppress(Crash, DatabaseError):
                forward(client, source, target, at)
            server.start()
            with self.connect(dsn) as sql:
                recover(client, sql, source, target, point)

    @pytest.mark.slow
    @pytest.mark.parametrize("how", ["a backend is killed", "the server is stopped at once"])
    def test_under_load(self, server: PostgresServer, dsn: str, how: str) -> None:
        """Producers repeat what they are not sure of, consumers forward in one transaction."""
        source, target = f"source, {how}", f"target, {how}"
        count, producers, consumers = 120, 3, 3
        over = threading.Event()
        progress = [0]
        with QueenClient(dsn) as client:
            client.configure_queue(source, retry_delay=0, retry_limit=1000)
            client.configure_queue(target)

        def insist(action: Callable[[], Any]) -> Any:
            deadline = time.monotonic() + 60
            while True:
                try:
                    return action()
                except LeaseLostError:
                    return None
                except DatabaseError:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)

        def produce(number: int) -> None:
            with QueenClient(dsn) as client:
                for n in range(count):
                    message = {
                        "payload": [number, n],
                        "partition": f"p{number}",
                        "transaction_id": f"{number}-{n}",
                    }
                    insist(lambda message=message: client.push(source, [message]))
                    progress[0] += 1

        def consume() -> None:
            with QueenClient(dsn) as client:

                def step() -> None:
                    with client.transaction() as tx:
                        messages = tx.pop(source, batch_size=5, lease_seconds=1)
                    if not messages:
                        time.sleep(0.005)
                        return
                    with client.transaction() as tx:
                        tx.ack(messages)
                        tx.push(target, [{"payload": m.payload, "partition": m.partition} for m in messages])

                while not over.is_set():
                    insist(step)

        def crash() -> None:
            try:
                for part in (0.25, 0.5, 0.75):
                    eventually(lambda part=part: progress[0] >= part * count * producers, seconds=60)
                    if how == "a backend is killed":
                        self.kill_a_backend(dsn)
                    else:
                        server.kill()
                        server.start()
                eventually(lambda: self.is_drained(dsn, source, count * producers, progress), seconds=60)
            finally:
                over.set()

        together(*[lambda n=n: produce(n) for n in range(producers)], *[consume] * consumers, crash)
        with QueenClient(dsn) as client, self.connect(dsn) as sql:
            for queue in (source, target):
                check(sql, queue)
            delivered = drain(client, target)
        for number in range(producers):
            arrived = [m.payload for m in delivered if m.partition == f"p{number}"]
            assert arrived == [[number, n] for n in range(count)], "each once, in order"

    def kill_a_backend(self, dsn: str) -> None:
        with self.connect(dsn) as sql:
            row = sql.execute(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> pg_backend_pid() AND backend_type = 'client backend' LIMIT 1"
            ).fetchone()
            assert row is not None
            os.kill(row[0], signal.SIGKILL)  # the postmaster then restarts the whole server

            def is_gone() -> bool:
                try:
                    sql.execute("SELECT 1")
                except psycopg.OperationalError:
                    return True
                return False

            eventually(is_gone)

    def is_drained(self, dsn: str, queue: str, total: int, progress: list[int]) -> bool:
        if progress[0] < total:
            return False
        with self.connect(dsn) as sql:
            return pending(sql, queue) == 0
