"""Conflicts are repeated, broken connections replaced, and what may have happened is never done twice."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_provider_queen.client import AsyncQueenClient, ClientOptions, QueenClient, RetryPolicy
from airflow_provider_queen.exceptions import (
    ConnectionLostError,
    DatabaseError,
    InvalidOptionError,
    LeaseLostError,
    QueenError,
    TransactionConflictError,
)
from tests.client.conftest import (
    ASLEEP,
    SESSIONS,
    AwaitedClient,
    ClientFactory,
    eventually,
    in_transaction,
)

pytestmark = pytest.mark.postgres

QUICK = ClientOptions(retry=RetryPolicy(attempts=4, first_delay=0.01))

# A sequence is not rolled back: it counts the attempts.
FAIL = """
CREATE SEQUENCE public.attempts;
CREATE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF nextval('public.attempts') <= {times} THEN
        {how};
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER fail AFTER INSERT ON queen.message_log FOR EACH STATEMENT EXECUTE FUNCTION public.fail();
"""


def fail_pushes(sql: psycopg.Connection[Any], times: int, how: str) -> None:
    sql.execute(FAIL.format(times=times, how=how))


def attempts(sql: psycopg.Connection[Any]) -> int:
    row = sql.execute("SELECT last_value FROM public.attempts").fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("sqlstate", ["40001", "40P01"])
def test_a_conflict_is_repeated(
    make_client: ClientFactory, orders: str, sql: psycopg.Connection[Any], sqlstate: str
) -> None:
    client = make_client(options=QUICK)
    fail_pushes(sql, 2, f"RAISE EXCEPTION USING ERRCODE = '{sqlstate}', MESSAGE = 'again'")
    (result,) = client.push(orders, [{"payload": 1}])
    assert (result.status, result.seq) == ("queued", 1)
    assert attempts(sql) == 3


def test_a_conflict_is_not_repeated_for_ever(
    make_client: ClientFactory, orders: str, sql: psycopg.Connection[Any]
) -> None:
    client = make_client(options=QUICK)
    fail_pushes(sql, 100, "RAISE EXCEPTION USING ERRCODE = '40001', MESSAGE = 'again'")
    with pytest.raises(TransactionConflictError, match="again"):
        client.push(orders, [{"payload": 1}])
    assert attempts(sql) == 4
    assert client.depth(orders).pending == 0


def test_a_conflict_ends_an_explicit_transaction(
    make_client: ClientFactory, orders: str, sql: psycopg.Connection[Any]
) -> None:
    client = make_client(options=QUICK)
    client.push(orders, [{"payload": 0}])
    messages = client.pop(orders)
    fail_pushes(sql, 1, "RAISE EXCEPTION USING ERRCODE = '40001', MESSAGE = 'again'")
    with pytest.raises(TransactionConflictError):
        in_transaction(client, lambda tx: tx.ack(messages), lambda tx: tx.push(orders, [{"payload": 1}]))
    assert client.depth(orders).in_flight == 1
    assert attempts(sql) == 1


def test_a_function_is_run_again_after_a_conflict(
    make_client: ClientFactory, orders: str, sql: psycopg.Connection[Any]
) -> None:
    client = make_client(options=QUICK)
    client.push(orders, [{"payload": 0}])
    messages = client.pop(orders)
    fail_pushes(sql, 2, "RAISE EXCEPTION USING ERRCODE = '40001', MESSAGE = 'again'")

    def forward(tx: Any) -> str:
        tx.ack(messages)
        tx.push(orders, [{"payload": 1}])
        return "done"

    assert client.run_in_transaction(forward) == "done"
    assert attempts(sql) == 3
    assert client.depth(orders).pending == 1


def test_a_function_is_run_again_after_a_conflict_in_its_own_sql(queen_dsn: str) -> None:
    runs = []

    def own(tx: Any) -> None:
        runs.append(1)
        if len(runs) < 3:
            tx.connection.execute("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40P01'; END $$")

    with QueenClient(queen_dsn, options=QUICK) as client:
        client.run_in_transaction(own)
    assert len(runs) == 3


def terminate(sql: psycopg.Connection[Any]) -> None:
    sql.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'queen'"
    )


def test_a_connection_that_broke_while_idle_is_replaced(
    client: Any, orders: str, sql: psycopg.Connection[Any]
) -> None:
    client.push(orders, [{"payload": 1}])
    terminate(sql)
    (message,) = client.pop(orders)  # a pop is never repeated: it must not even be tried on the dead one
    terminate(sql)
    client.ack(message)
    terminate(sql)
    with client.transaction() as tx:
        tx.push(orders, [{"payload": 2}])
    assert client.depth(orders).pending == 1


def test_a_push_that_broke_is_repeated(
    make_client: ClientFactory, orders: str, sql: psycopg.Connection[Any]
) -> None:
    client = make_client(options=QUICK)
    fail_pushes(sql, 1, "PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(1)")
    assert client.push(orders, [{"payload": 1}])[0].status == "queued"
    assert client.depth(orders).pending == 1


class CuttingProxy:
    """Hands everything on, until it is told to swallow the server's next answer and hang up."""

    def __init__(self, dsn: str) -> None:
        self._parts = conninfo_to_dict(dsn)
        self._cut = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def dsn(self) -> str:
        parts = {
            **self._parts,
            "host": "127.0.0.1",
            "port": self._listener.getsockname()[1],
            "sslmode": "disable",
        }
        return make_conninfo("", **{**parts, "gssencmode": "disable"})

    def cut(self) -> None:
        self._cut.set()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = self._connect()
                for source, target, answers in ((client, server, False), (server, client, True)):
                    thread = threading.Thread(target=self._copy, args=(source, target, answers), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _connect(self) -> socket.socket:
        host, port = str(self._parts["host"]), self._parts["port"]
        if host.startswith("/"):
            server = socket.socket(socket.AF_UNIX)
            server.connect(f"{host}/.s.PGSQL.{port}")
            return server
        return socket.create_connection((host, int(str(port))))

    def _copy(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if answers and self._cut.is_set():
                    self._cut.clear()
                    break
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(queen_dsn: str) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(queen_dsn)
    yield proxy
    proxy.close()


@pytest.fixture
def distant(proxy: CuttingProxy, client_class: type[Any]) -> Iterator[Any]:
    """A client whose answers may get lost."""
    with client_class(proxy.dsn, options=QUICK) as client:
        yield client


def test_a_push_whose_answer_was_lost_is_stored_once(
    distant: Any, proxy: CuttingProxy, client: Any, orders: str
) -> None:
    distant.push(orders, [{"payload": 0}])
    proxy.cut()
    results = distant.push(orders, [{"payload": 1}, {"payload": 2, "transaction_id": "mine"}])
    # Whoever made up an id knows that nobody else did; of a caller's own id one cannot tell.
    assert [(result.status, result.seq) for result in results] == [("queued", 2), ("duplicate", 3)]
    assert client.depth(orders).pending == 3


def test_a_settlement_whose_answer_was_lost_is_not_repeated(
    distant: Any, proxy: CuttingProxy, client: Any, orders: str
) -> None:
    distant.push(orders, [{"payload": 1}])
    messages = distant.pop(orders)
    proxy.cut()
    with pytest.raises(ConnectionLostError, match="unknown"):
        distant.ack(messages)
    assert client.depth(orders).pending == 0
    with pytest.raises(LeaseLostError):
        distant.ack(messages)


def test_a_pop_whose_answer_was_lost_is_not_repeated(
    distant: Any, proxy: CuttingProxy, client: Any, orders: str
) -> None:
    distant.push(orders, [{"payload": 1, "partition": "a"}, {"payload": 1, "partition": "b"}])
    proxy.cut()
    with pytest.raises(ConnectionLostError):
        distant.pop(orders)
    assert client.depth(orders).in_flight == 1


def test_a_transaction_that_broke_is_not_committed(
    distant: Any, proxy: CuttingProxy, client: Any, orders: str
) -> None:
    distant.push(orders, [{"payload": 0}])
    messages = distant.pop(orders)
    actions = (
        lambda tx: tx.push(orders, [{"payload": 1}]),
        lambda _: proxy.cut(),
        lambda tx: tx.ack(messages),
    )
    with pytest.raises(ConnectionLostError):
        in_transaction(distant, *actions)
    depth = client.depth(orders)
    assert (depth.pending, depth.in_flight) == (1, 1)
    assert distant.depth(orders).pending == 1


def test_reads_survive_a_lost_answer(distant: Any, proxy: CuttingProxy, orders: str) -> None:
    distant.push(orders, [{"payload": 0}])
    proxy.cut()
    assert distant.depth(orders).pending == 1


def test_time_limits_and_isolation_are_set(make_client: ClientFactory, orders: str) -> None:
    wanted = {"statement_timeout": 1500, "lock_timeout": "2s", "isolation_level": "serializable"}
    names = ("statement_timeout", "lock_timeout", "transaction_isolation")
    for pooled in (False, True):
        client = make_client(options=ClientOptions(**wanted, transaction_pooler=pooled))
        with client.transaction() as tx:
            sql = "SELECT " + ", ".join(f"current_setting('{name}')" for name in names)
            if isinstance(client, AwaitedClient):
                row = client._loop.run_until_complete(tx.execute(sql).fetchone())
            else:
                row = tx.connection.execute(sql).fetchone()
        assert row == ("1500ms", "2s", "serializable")


@pytest.mark.parametrize("pooled", [False, True])
def test_a_call_gives_up_after_its_time_limit(
    make_client: ClientFactory, client: Any, orders: str, pooled: bool
) -> None:
    client.push(orders, [{"payload": 0}])
    impatient = make_client(options=ClientOptions(lock_timeout=200, transaction_pooler=pooled))
    with client.transaction() as tx:
        tx.push(orders, [{"payload": 1}])
        with pytest.raises(DatabaseError, match="lock timeout") as caught:
            impatient.push(orders, [{"payload": 2}])
        assert caught.value.sqlstate == "55P03"
    impatient.push(orders, [{"payload": 2}])


def test_a_pooled_client_prepares_nothing(make_client: ClientFactory, orders: str) -> None:
    client = make_client(options=ClientOptions(transaction_pooler=True))
    for n in range(10):
        client.push(orders, [{"payload": n}])
    (connection,) = getattr(client, "inner", client)._idle
    assert connection.prepare_threshold is None


def test_a_call_beside_an_own_transaction_does_not_wait_for_ever(queen_dsn: str) -> None:
    with QueenClient(queen_dsn) as client:
        client.configure_queue("orders")
        client.push("orders", [{"payload": 0}])
        with client.transaction() as tx:
            tx.push("orders", [{"payload": 1}])
            assert client.depth("orders").pending == 1
            client.push("orders", [{"payload": 2, "partition": "another"}])
            with pytest.raises(DatabaseError, match="inside its own transaction"):
                client.push("orders", [{"payload": 3}])
        assert client.depth("orders").pending == 3


async def _push_beside_an_own_transaction(dsn: str) -> None:
    async with AsyncQueenClient(dsn) as client:
        await client.configure_queue("orders")
        await client.push("orders", [{"payload": 0}])
        async with client.transaction() as tx:
            await tx.push("orders", [{"payload": 1}])
            with pytest.raises(DatabaseError, match="inside its own transaction"):
                await client.push("orders", [{"payload": 3}])


def test_an_asyncio_call_beside_an_own_transaction_does_not_wait_for_ever(queen_dsn: str) -> None:
    asyncio.run(_push_beside_an_own_transaction(queen_dsn))


def test_threads_share_a_client(queen_dsn: str) -> None:
    with QueenClient(queen_dsn) as client:
        client.configure_queue("orders")
        with_errors: list[BaseException] = []

        def work(name: str) -> None:
            try:
                for n in range(20):
                    client.push("orders", [{"payload": n, "partition": name}])
                    client.ack(client.pop("orders", partition=name))
            except BaseException as error:
                with_errors.append(error)

        threads = [threading.Thread(target=work, args=[f"p{n}"]) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert with_errors == []
        assert client.depth("orders").pending == 0
        assert len(client._idle) <= 4


@pytest.mark.parametrize("isolation_level", ["repeatable read", "serializable"])
def test_conflicts_of_concurrent_pushes_are_repeated(queen_dsn: str, isolation_level: str) -> None:
    with QueenClient(queen_dsn, options=ClientOptions(isolation_level=isolation_level)) as client:
        client.configure_queue("orders")

        def push(producer: int) -> None:
            for n in range(25):
                client.push("orders", [{"payload": [producer, n]}])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(push, range(4)))
        delivered: list[Any] = []
        while messages := client.pop("orders", batch_size=30):
            client.ack(messages)
            delivered += [tuple(message.payload) for message in messages]
    assert sorted(delivered) == [(producer, n) for producer in range(4) for n in range(25)]


def test_a_cancelled_wait_leaves_no_session_and_no_lease(
    queen_dsn: str, sql: psycopg.Connection[Any]
) -> None:
    async def cancel() -> None:
        async with AsyncQueenClient(queen_dsn) as client:
            await client.configure_queue("orders")
            waiting = asyncio.create_task(client.pop("orders", wait_seconds=60))
            await asyncio.to_thread(eventually, lambda: sql.execute(ASLEEP).fetchone() == (1,))
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await client.push("orders", [{"payload": 1}])
            assert (await client.depth("orders")).in_flight == 0
            assert len(await client.pop("orders")) == 1

    asyncio.run(cancel())
    eventually(lambda: sql.execute(SESSIONS).fetchone() == (0,))


def test_nothing_is_called_on_a_transaction_that_is_over(client: Any, orders: str) -> None:
    with client.transaction() as tx:
        tx.push(orders, [{"payload": 1}])
    with pytest.raises(QueenError, match="is over"):
        tx.push(orders, [{"payload": 2}])
    with pytest.raises(QueenError, match="is over"):
        _ = tx.connection
    assert client.depth(orders).pending == 1


def test_a_transaction_is_all_or_nothing(client: Any, orders: str) -> None:
    client.configure_queue("next")
    client.push(orders, [{"payload": n} for n in range(3)])
    messages = client.pop(orders)

    def fail(tx: Any) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        in_transaction(
            client, lambda tx: tx.ack(messages), lambda tx: tx.push("next", [{"payload": 1}]), fail
        )
    assert (client.depth(orders).in_flight, client.depth("next").pending) == (3, 0)
    with client.transaction() as tx:
        tx.ack(messages)
        tx.push("next", [{"payload": 1}])
        assert tx.depth("next").pending == 1
        assert client.depth("next").pending == 0
    assert (client.depth(orders).pending, client.depth("next").pending) == (0, 1)


def test_the_callers_own_sql_commits_with_the_rest(queen_dsn: str, sql: psycopg.Connection[Any]) -> None:
    sql.execute("CREATE TABLE public.done (n integer)")
    with QueenClient(queen_dsn) as client:
        client.configure_queue("orders")
        with pytest.raises(psycopg.errors.DivisionByZero):
            in_transaction(
                client,
                lambda tx: tx.push("orders", [{"payload": 1}]),
                lambda tx: tx.connection.execute("INSERT INTO public.done VALUES (1 / 0)"),
            )
        with client.transaction() as tx:
            tx.push("orders", [{"payload": 1}])
            tx.connection.execute("INSERT INTO public.done VALUES (1)")
        assert client.depth("orders").pending == 1
    assert sql.execute("SELECT count(*) FROM public.done").fetchone() == (1,)


def test_an_error_that_was_swallowed_does_not_look_like_a_commit(client: Any, orders: str) -> None:
    def swallow(tx: Any) -> None:
        with suppress(QueenError):
            tx.push("nowhere", [{"payload": 1}])

    with pytest.raises(DatabaseError, match="roll all of it back"):
        in_transaction(client, lambda tx: tx.push(orders, [{"payload": 1}]), swallow)
    assert client.depth(orders).pending == 0


def test_bad_input_does_not_abort_a_transaction(client: Any, orders: str) -> None:
    with client.transaction() as tx:
        tx.push(orders, [{"payload": 1}])
        with pytest.raises(InvalidOptionError):
            tx.push(orders, [{"payload": {1}}])
        with pytest.raises(InvalidOptionError, match="inside a transaction"):
            tx.pop(orders, wait_seconds=1)
    assert client.depth(orders).pending == 1


def test_a_duplicate_does_not_abort_a_transaction(client: Any, orders: str) -> None:
    client.push(orders, [{"payload": 1, "transaction_id": "same"}])
    with client.transaction() as tx:
        tx.push(orders, [{"payload": 2}])
        assert tx.push(orders, [{"payload": 1, "transaction_id": "same"}])[0].status == "duplicate"
    assert client.depth(orders).pending == 2


def test_an_own_rollback_is_quiet(client: Any, orders: str) -> None:
    with client.transaction() as tx:
        tx.push(orders, [{"payload": 1}])
        raise psycopg.Rollback
    assert client.depth(orders).pending == 0
