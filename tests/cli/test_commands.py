"""``airflow queen``, through Airflow's own parser."""

from __future__ import annotations

import io
import json
import os
import threading
import time
import uuid
from argparse import ArgumentParser
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from airflow_provider_queen.cli import commands
from airflow_provider_queen.client.schema import head_version
from airflow_provider_queen.hooks.queen import QueenHook
from tests.airflow_tasks import connection_json

SECRET = "4111-1111"


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    from airflow.cli.cli_parser import get_parser

    return get_parser()


class Answer:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


Run = Callable[..., Answer]


@pytest.fixture
def run(parser: ArgumentParser, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: str) -> Answer:
        code = 0
        try:
            args = parser.parse_args(["queen", *words])
            args.func(args)
        except SystemExit as end:
            code = int(end.code or 0)
        return Answer(code, *capsys.readouterr())

    return run


@pytest.fixture
def orders(hook: QueenHook) -> QueenHook:
    hook.configure_queue("orders", namespace="billing", task="invoice", retention_enabled=True)
    return hook


pytestmark = pytest.mark.postgres


def test_queues(run: Run, orders: QueenHook) -> None:
    (queue,) = run("queues", "-o", "json").json
    assert (queue["name"], queue["lease_time"], queue["retention_enabled"]) == ("orders", 300, True)
    table = run("queues", "--namespace", "billing").out
    assert "orders" in table
    assert "retention_enabled=True" in table
    assert "There is no queue" in run("queues", "--namespace", "other").out


def test_push_and_depth(run: Run, orders: QueenHook, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = str(uuid.uuid4())
    once = ("--partition", "a", "--transaction-id", "t", "--trace-id", trace, "--priority", "3")
    (result,) = run("push", "orders", '{"n": 1}', *once, "-o", "json").json
    assert (result["status"], result["transaction_id"], result["partition"]) == ("queued", "t", "a")
    (again,) = run("push", "orders", '{"n": 1}', *once, "-o", "json").json
    assert (again["status"], again["message_id"]) == ("duplicate", result["message_id"])
    monkeypatch.setattr("sys.stdin", io.StringIO('{"n": 2}\n\n"text"\n'))
    assert run("push", "orders").out.count("queued") == 2
    assert run("depth", "orders", "-o", "json").json["pending"] == 3
    assert run("depth", "--namespace", "billing", "-g", "audit", "-o", "json").json["pending"] == 3
    assert "oldest_age_seconds" in run("depth", "orders").out
    (stored,) = orders.list_messages("orders", partition="a")
    assert (stored.trace_id, stored.priority) == (trace, 3)


def test_pop_shows_and_then_acknowledges(run: Run, orders: QueenHook) -> None:
    orders.push("orders", [{"payload": {"n": n}, "partition": str(n % 2)} for n in range(4)])
    (first,) = run("pop", "orders", "--release", "-o", "json").json
    assert first["attempt"] == 1
    assert orders.depth("orders").in_flight == 0
    assert len(run("pop", "orders", "--limit", "3", "-o", "json").json) == 3
    assert '{"n": ' in run("pop", "orders").out
    assert "No message is ready" in run("pop", "orders").out
    assert run("pop", "orders", "-o", "json").json == []
    assert len(run("pop", "orders", "-g", "audit", "-p", "1", "-n", "9", "-o", "json").json) == 2


def test_what_was_not_printed_is_given_back(
    run: Run, orders: QueenHook, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.push("orders", [{"payload": 1}])

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(commands, "_print_rows", fail)
    with pytest.raises(OSError, match="disk full"):
        run("pop", "orders")
    assert (orders.depth("orders").pending, orders.depth("orders").in_flight) == (1, 0)


def test_what_nobody_reads_is_given_back(
    run: Run, orders: QueenHook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unbuffered, as Python runs in many containers, where a short write to a pipe raises nothing."""
    orders.push("orders", [{"payload": "x" * 1000} for _ in range(1000)])
    reader, writer = os.pipe()
    raw = io.FileIO(writer, "w")
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(cast(Any, raw), write_through=True))

    def read_a_little() -> None:
        os.read(reader, 1)
        time.sleep(0.3)  # the pipe is full by then, and the writer waits
        os.close(reader)

    threading.Thread(target=read_a_little).start()
    assert run("pop", "orders", "-n", "1000", "-o", "json").code == 1
    assert (orders.depth("orders").pending, orders.depth("orders").in_flight) == (1000, 0)


def test_tail_consumes_nothing(run: Run, orders: QueenHook) -> None:
    orders.push("orders", [{"payload": {"n": n}} for n in range(5)])
    assert [row["payload"]["n"] for row in run("tail", "orders", "-n", "2", "-o", "json").json] == [3, 4]
    assert "There is no message" in run("tail", "orders", "-p", "none").out
    assert orders.depth("orders").in_flight == 0


def test_tail_follows(run: Run, orders: QueenHook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new message once, of whatever partition, though more come than a page has."""
    monkeypatch.setattr(commands, "_PAGE", 3)
    orders.push("orders", [{"payload": n, "partition": f"old-{n}"} for n in range(9)])
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt
        fresh = range(10 * len(naps), 10 * len(naps) + 7)
        orders.push("orders", [{"payload": n, "partition": f"old-{n % 4}"} for n in fresh])

    monkeypatch.setattr(commands, "time", SimpleNamespace(sleep=sleep))  # not that of other threads
    answer = run("tail", "orders", "-n", "1", "--follow", "--interval", "2", "-o", "json")
    assert answer.code == 0
    shown = [json.loads(line)["payload"] for line in answer.out.splitlines()]
    assert shown[0] == 8
    assert sorted(shown[1:]) == [*range(10, 17), *range(20, 27)]
    assert naps == [2, 2, 2]


def test_dead_letters(run: Run, orders: QueenHook) -> None:
    orders.push("orders", [{"payload": SECRET} for _ in range(4)])
    orders.reject(orders.pop("orders", consumer_group="audit"), error="not a card")
    listed = run("dead-letters", "list", "orders", "-o", "json")
    assert SECRET not in listed.out
    assert "not a card" in run("dead-letters", "list", "orders").out
    newest, *_, oldest = (row["id"] for row in listed.json)
    assert run("dead-letters", "requeue", "orders").code == 2
    assert run("dead-letters", "purge", "orders", "--all", "--ids", "1").code == 2
    (requeued,) = run("dead-letters", "requeue", "orders", "--ids", str(newest), "-o", "json").json
    assert requeued["id"] == newest
    assert len(run("dead-letters", "list", "orders", "-g", "audit", "-o", "json").json) == 3
    assert len(run("dead-letters", "list", "orders", "--include-requeued", "-o", "json").json) == 4
    purge = ("dead-letters", "purge", "orders", "-o", "json")
    assert run(*purge, "--ids", str(oldest)).json == {"purged": 1}
    assert run(*purge, "--all", "--older-than-seconds", "3600").json == {"purged": 0}
    assert len(run("dead-letters", "requeue", "orders", "--all", "-n", "1", "-o", "json").json) == 1
    run(*purge, "--all")
    assert "There are no dead letters" in run("dead-letters", "list", "orders").out


def test_seek(run: Run, orders: QueenHook) -> None:
    orders.push("orders", [{"payload": 1}])
    orders.ack(orders.pop("orders", consumer_group="audit"))
    assert run("seek", "orders", "-g", "audit", "--to", "beginning", "-o", "json").json == {"moved": 1}
    assert orders.depth("orders", "audit").pending == 1
    assert run("seek", "orders", "-g", "audit", "--to", "2999-01-01T00:00+00:00").code == 0
    assert orders.depth("orders", "audit").pending == 0
    refused = run("seek", "orders", "--to", "start")
    assert refused.code == 2
    assert "unknown position 'start'" in refused.err


def test_migrate(run: Run, postgres_18: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"empty_{uuid.uuid4().hex}"
    monkeypatch.setenv("AIRFLOW_CONN_EMPTY", connection_json(postgres_18.create_database(name, "template0")))
    there = ("--conn-id", "empty")
    failed = run("queues", *there)
    assert failed.code == 1
    assert "queen_migrate" in failed.err
    assert "CREATE" in run("migrate", "--dry-run", *there).out
    assert QueenHook(queen_conn_id="empty").schema_version() is None
    assert run("migrate", *there, "-o", "json").json["to_version"] == head_version()
    assert "0 files" in run("migrate", *there).out
    for below in ("0000_v2", None):
        assert run("migrate", "--target=-1", *there, "-o", "json").json["to_version"] == below
    postgres_18.drop_database(name)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["depth", "order"], 1, "'orders'"),
        (["depth"], 2, "name a queue"),
        (["depth", "orders", "--output", "xml"], 2, "invalid choice"),
        (["queues", "--conn-id", "nowhere"], 1, "nowhere"),
        (["push", "orders", SECRET], 2, "payload 0 is no JSON"),
        (["push", "orders", "1", "2", "--transaction-id", "t"], 2, "single message"),
        (["push", "orders", "1", "--priority", "12"], 2, "priority is 12"),
        (["pop", "orders", "--limit", "0"], 2, "invalid positive int"),
        (["frobnicate"], 2, "invalid choice"),
        ([], 2, "required"),
    ],
)
def test_what_goes_wrong_is_one_sentence_and_a_code(
    run: Run, orders: QueenHook, words: list[str], code: int, said: str
) -> None:
    answer = run(*words)
    assert answer.code == code
    assert said in answer.err
    assert "Traceback" not in answer.err
    assert SECRET not in answer.err
    if code == 1:
        assert answer.err.startswith("airflow queen: ")
        assert answer.err.count("\n") == 1


def test_no_password_is_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_DOWN", "postgres://me:s3cret@127.0.0.1:1/shop")
    answer = run("queues", "--conn-id", "down")
    assert answer.code == 1
    assert "127.0.0.1" in answer.err
    assert "s3cret" not in answer.out + answer.err


@pytest.mark.airflow
@pytest.mark.usefixtures("airflow_db")
def test_a_connection_of_airflows_database_is_found(run: Run, tasks_dsn: str) -> None:
    """Which a task's way to connections does not find outside of a task."""
    from airflow.models import Connection
    from airflow.settings import Session

    stored = json.loads(connection_json(tasks_dsn))
    with Session() as session:
        session.add(Connection(conn_id="stored", **stored))
        session.commit()
    assert run("queues", "--conn-id", "stored", "-o", "json").json == []


def test_a_thread_may_wait_for_a_message(run: Run, orders: QueenHook) -> None:
    threading.Timer(0.3, lambda: QueenHook().push("orders", [{"payload": 7}])).start()
    (message,) = run("pop", "orders", "--wait-seconds", "20", "-o", "json").json
    assert message["payload"] == 7
