"""The demo for real, and what is left when it ends: nothing, however it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_queen.demo.display import Display, Failed
from airflow_provider_queen.demo.environment import USER, Login, prepare
from airflow_provider_queen.demo.session import Session, end_session
from airflow_provider_queen.embedded.guard import GuardedFolder
from airflow_provider_queen.embedded.postgres import PostgresServer

DEMO = [sys.executable, "-m", "airflow_provider_queen.demo"]
MARK = "DEMO_TEST_MARK"


class Place:
    """A temporary folder for one demo, and a mark in the environment of every process that it starts."""

    def __init__(self) -> None:
        # Short, and open to the account that PostgreSQL runs as: else the server's folder goes elsewhere.
        self.path = Path(tempfile.mkdtemp(prefix="qd-", dir="/tmp"))
        self.path.chmod(0o755)
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        self.environment = os.environ | {"TMPDIR": str(self.path), MARK: self.mark.partition("=")[2]}

    def processes(self) -> list[str]:
        """The command lines of the marked processes that run."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found

    def left(self) -> list[str]:
        return [*self.processes(), *(str(path) for path in self.path.iterdir())]


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    shutil.rmtree(place.path, ignore_errors=True)


def wait_for(condition: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def start(place: Place, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*DEMO, *arguments],
        env=place.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"the demo ended without {text!r}")


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.postgres
def test_the_demo_does_what_it_says_and_leaves_nothing(place: Place) -> None:
    started = time.monotonic()
    answer = subprocess.run(DEMO, env=place.environment, capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (0, ""), answer.stdout + answer.stderr
    assert time.monotonic() - started < 240
    table = {line.split()[0]: line.split() for line in answer.stdout.splitlines() if line.strip()}
    assert table["queue"] == ["queue", "pushed", "popped", "pending"]
    assert table["example_gate"] == ["example_gate", "10", "10", "0"]
    assert table["example_push_pop"] == ["example_push_pop", "3", "3", "0"]
    assert re.search(r"^queen_migrate +schema queen now at \d{4}_\w+ +[\d.]+$", answer.stdout, re.MULTILINE)
    assert re.search(
        r"^example_queen_gate +pushed 10, sensed 10, acknowledged 10 ", answer.stdout, re.MULTILINE
    )
    assert re.search(r"^queen_metrics +Spark wrote [1-9]\d* rows of metrics ", answer.stdout, re.MULTILINE)
    assert place.left() == []


@pytest.mark.postgres
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(place: Place, number: signal.Signals) -> None:
    with start(place) as demo:
        read_until(demo, "creating Airflow's own tables")
        assert place.left()
        demo.send_signal(number)
        output, _ = demo.communicate(timeout=30)
    assert demo.returncode == 130
    assert output.endswith("stopped, nothing is left running\n")
    assert place.left() == []


@pytest.mark.postgres
def test_kill_leaves_nothing(place: Place) -> None:
    with start(place) as demo:
        read_until(demo, "creating Airflow's own tables")
        demo.kill()
    wait_for(lambda: not place.left(), 30)


@pytest.mark.postgres
def test_a_failure_is_one_sentence_and_a_log(place: Place) -> None:
    program = """if True:
        import sys
        from airflow_provider_queen.demo import __main__ as demo
        demo.STEPS = ["nonsense"]
        sys.exit(demo.main([]))
    """
    answer = subprocess.run(
        [sys.executable, "-c", program], env=place.environment, capture_output=True, text=True
    )
    assert answer.returncode == 1
    found = re.fullmatch(r"the demo failed: KeyError: 'nonsense'; the log is (\S+)\n", answer.stderr)
    assert found is not None, answer.stderr
    log = Path(found[1])
    assert place.left() == [str(log)]
    assert "Traceback" in log.read_text()
    assert "database system is ready" in log.read_text()
    assert log.stat().st_mode & 0o077 == 0


@pytest.mark.slow
@pytest.mark.airflow
def test_the_ui_answers_and_a_task_runs_there(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the Dags of the demo, which have their own test: a scheduler's run of queen_migrate instead."""
    for name in ("TMPDIR", MARK):
        monkeypatch.setenv(name, place.environment[name])
    monkeypatch.setattr(tempfile, "tempdir", None)
    login = Login.create()
    with GuardedFolder("queen-demo-") as folder, PostgresServer() as server:
        environment = prepare(folder.path, server, login)
        environment["AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION"] = "False"
        log = folder.path / "log"
        with Session(folder, ["tables", "serve"], environment, log) as session:
            for report in session.reports():
                assert report["kind"] != "failed", log.read_text()[-5000:]
                if report["kind"] == "ready":
                    break
            token = call(login, "/auth/token", {"username": USER, "password": login.password})["access_token"]
            runs = "/api/v2/dags/queen_migrate/dagRuns"
            wait_for(lambda: call(login, "/api/v2/dags/queen_migrate", token=token), 60)
            run = call(login, runs, {"logical_date": None}, token=token)
            ended = ("success", "failed")
            where = f"{runs}/{run['dag_run_id']}"
            wait_for(lambda: call(login, where, token=token)["state"] in ended, 90)
            assert call(login, where, token=token)["state"] == "success", log.read_text()[-5000:]
    monkeypatch.delenv(MARK)
    assert place.left() == []


def call(login: Login, path: str, body: Any = None, *, token: str = "") -> Any:
    """What the API says; nothing where there is nothing."""
    request = urllib.request.Request(  # noqa: S310
        login.url + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {token}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def test_a_session_ends_with_all_its_groups() -> None:
    program = """if True:
        import os, subprocess, sys
        subprocess.Popen(["sleep", "300"], preexec_fn=lambda: os.setpgid(0, 0))
        print("started", flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as leader:
        assert leader.stdout is not None
        assert leader.stdout.readline() == "started\n"
        end_session(leader.pid)
        # Both held it open: it ends when both have.
        assert leader.stdout.read() == ""


def test_what_the_worker_reports_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(Login(8080, "secret"))
    display.take({"kind": "step", "text": "working"})
    display.take({"kind": "dag", "dag_id": "a_dag", "result": "did it", "seconds": 1.25})
    display.take({"kind": "queue", "queue_name": "q", "pushed": 10, "popped": 9, "pending": 1})
    assert not display.finished
    display.take({"kind": "finished"})
    display.take({"kind": "ready"})
    assert display.finished
    assert display.ready
    shown = capsys.readouterr().out
    assert "a_dag  did it           1.2" in shown
    assert "q          10       9        1" in shown
    assert "http://127.0.0.1:8080  user admin  password secret" in shown
    with pytest.raises(Failed, match="no luck"):
        display.take({"kind": "failed", "reason": "no luck"})
