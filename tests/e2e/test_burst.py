"""All of Airflow under a burst, while parts of it are killed: nothing lost, nothing twice, all in order."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
import pytest

from airflow_provider_queen.client import QueenClient
from airflow_provider_queen.client.schema import migrate
from airflow_provider_queen.demo.environment import Login, prepare
from airflow_provider_queen.demo.session import Session
from airflow_provider_queen.demo.worker import PROCESSES, is_healthy
from airflow_provider_queen.embedded.guard import GuardedFolder
from airflow_provider_queen.embedded.postgres import PostgresServer
from airflow_provider_queen.exceptions import QueenError
from tests.e2e import burst_dag
from tests.e2e.burst_dag import GROUP, MESSAGES_PER_TASK, SOURCE, TARGET, TASKS
from tests.e2e.processes import Processes

PARTITIONS = [f"{number:02}" for number in range(20)]
PER_PARTITION = 50
BURST = len(PARTITIONS) * PER_PARTITION
LONGEST_SECONDS = 270.0  # all of it, and less than pytest's own limit: whoever waits too long says for what
SETTINGS = {
    "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
    "AIRFLOW__DAG_PROCESSOR__PARSING_PROCESSES": "1",
    # A triggerer that was killed is taken for dead this soon; only then another gets its triggers.
    "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "1",
    "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "8",
}
TAIL_CHARACTERS = 4000

T = TypeVar("T")


class Airflow:
    """Airflow with its own databases; everything listens on this machine alone.

    :param folder: takes all that is written
    :param server: gets both databases, Airflow's and the queue's
    """

    def __init__(self, folder: GuardedFolder, server: PostgresServer) -> None:
        self.login = Login(free_port(), secrets.token_urlsafe(9))
        self.environment = prepare(folder.path, server, self.login)
        dags = folder.path / "dags"
        dags.mkdir()
        shutil.copy(burst_dag.__file__, dags)
        self.environment |= SETTINGS | {
            "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
            burst_dag.FOLDER: str(folder.path),
        }
        self._deadline = time.monotonic() + LONGEST_SECONDS
        self._server = server
        self._folder = folder
        self.processes = Processes(folder, self.environment)

    @property
    def queue_dsn(self) -> str:
        return self.environment["AIRFLOW_CONN_QUEEN_DEFAULT"].replace("queen:", "postgresql:", 1)

    def create_tables(self) -> None:
        log = self._folder.path / "tables.log"
        with Session(self._folder, ["tables"], self.environment, log) as session:
            assert [report["kind"] for report in session.reports()] == ["step"]

    def start(self, name: str) -> None:
        self.processes.start(name, ["airflow", name, *PROCESSES[name]])

    def query(self, statement: str) -> list[Any]:
        """What the metadata database says."""
        dsn = self.environment["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"]
        with psycopg.connect(dsn, autocommit=True) as connection:
            return connection.execute(statement).fetchall()

    def wait_for(self, what: str, condition: Callable[[], T]) -> T:
        """Wait until it holds, and Airflow runs; what it says then."""
        while not (result := condition()):
            assert not (ended := self.processes.ended()), f"{', '.join(ended)} ended by itself"
            assert time.monotonic() < self._deadline, f"waited too long for {what}"
            time.sleep(0.2)
        return result

    def is_ready(self) -> bool:
        """Whether all processes are there, and the triggerer has the doorbell."""
        return is_healthy(self.login.url) and self.has_doorbell()

    def has_doorbell(self) -> bool:
        """Whether a triggerer that lives has it."""
        return bool(
            self.query(
                "SELECT 1 FROM trigger JOIN job ON job.id = trigger.triggerer_id"
                " WHERE latest_heartbeat > now() - interval '3 s'"
            )
        )

    def rings(self) -> int:
        return int(self.query("SELECT count(*) FROM asset_event")[0][0])

    def is_still(self) -> bool:
        """Whether nothing runs, and nothing that happened so far will start anything."""
        return not self.query(
            "SELECT 1 FROM dag_run WHERE state IN ('queued', 'running')"
            " UNION ALL SELECT 1 FROM asset_dag_run_queue"
        )

    def held_worker(self) -> int | None:
        with suppress(FileNotFoundError):
            return int((self._folder.path / burst_dag.HELD).read_text() or 0)
        return None

    def journal(self) -> list[tuple[int, str, int]]:
        """Process, partition and number of each message, in the order in which they were processed."""
        with suppress(FileNotFoundError):
            lines = (self._folder.path / burst_dag.JOURNAL).read_text().splitlines()
            return [tuple(json.loads(line)) for line in lines]
        return []

    def logs(self) -> dict[str, str]:
        """Where each process, the last tasks and PostgreSQL ended."""
        logs = self.processes.logs()
        tasks = sorted((self._folder.path / "airflow" / "logs").rglob("task_id=*/*.log"))
        for path in tasks[-4:]:
            logs["/".join(path.parts[-3:])] = path.read_text(errors="replace")
        logs["PostgreSQL"] = self._server.log()
        return {name: text[-TAIL_CHARACTERS:] for name, text in logs.items()}

    def states(self) -> dict[str, str]:
        """What both databases say."""
        states: dict[str, list[Any]] = {
            "rings": [self.rings()],
            "runs": self.query("SELECT run_id, state, start_date, end_date FROM dag_run ORDER BY id"),
            "tasks": self.query("SELECT run_id, task_id, state, try_number FROM task_instance ORDER BY 1, 2"),
            "journal": [f"{len(self.journal())} lines; held worker: {self.held_worker()}"],
        }
        with QueenClient(self.queue_dsn) as queue:
            states["queues"] = [
                f"{row.queue_name} {row.partition} for {row.consumer_group}: {row.pending} pending,"
                f" {row.in_flight} in flight, {row.total_completed} completed, {row.dead_letters} dead"
                for row in queue.stats()
            ]
        return {name: "\n".join(map(str, rows)) for name, rows in states.items()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running_airflow(test: pytest.Item) -> Iterator[Airflow]:
    with GuardedFolder("queen-e2e-") as folder, PostgresServer() as server:
        airflow = Airflow(folder, server)
        with airflow.processes:
            try:
                airflow.create_tables()
                migrate(airflow.queue_dsn)
                yield airflow
            except (Exception, pytest.fail.Exception):  # the latter is pytest's time limit
                for name, text in airflow.logs().items():
                    test.add_report_section("call", f"end of {name}", text)
                with suppress(psycopg.Error, QueenError):  # perhaps there are no tables yet
                    for name, text in airflow.states().items():
                        test.add_report_section("call", name, text)
                raise


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.airflow
@pytest.mark.postgres
def test_a_burst_while_triggerer_and_worker_are_killed(request: pytest.FixtureRequest) -> None:
    with running_airflow(request.node) as airflow, QueenClient(airflow.queue_dsn) as queue:
        queue.configure_queue(SOURCE, lease_time=10, retry_delay=0)
        queue.configure_queue(TARGET)
        for name in PROCESSES:
            airflow.start(name)
        airflow.wait_for("Airflow", airflow.is_ready)
        assert airflow.rings() == 0

        queue.push(
            SOURCE,
            [
                {"payload": {"number": number}, "partition": partition}
                for number in range(PER_PARTITION)
                for partition in PARTITIONS
            ],
        )
        worker = airflow.wait_for("a worker in the middle of a batch", airflow.held_worker)
        airflow.processes.kill("triggerer")
        seen = len(airflow.journal())
        airflow.wait_for(
            "another worker beside it",
            lambda: any(process != worker for process, *_ in airflow.journal()[seen:]),
        )
        os.kill(worker, signal.SIGKILL)

        # What was started goes on to its end, the killed task with another try; then nothing rings any more.
        airflow.wait_for("the end of what was started", airflow.is_still)
        tries = airflow.query("SELECT try_number, state FROM task_instance ORDER BY 1")
        assert tries[-1] == (2, "success")
        assert {state for _, state in tries} == {"success"}
        left = queue.depth(SOURCE, GROUP)
        assert left.pending >= BURST - 2 * TASKS * MESSAGES_PER_TASK - MESSAGES_PER_TASK
        assert left.in_flight == 0
        rings = airflow.rings()

        airflow.start("triggerer")
        airflow.wait_for("the rest", lambda: queue.depth(SOURCE, GROUP).pending == 0)
        airflow.wait_for("the end of the last run", airflow.is_still)
        assert airflow.rings() > rings
        assert airflow.query("SELECT DISTINCT state FROM dag_run") == [("success",)]

        assert_all_was_processed_in_order(airflow.journal(), worker)
        assert_all_was_forwarded_once_in_order(queue)
        done = queue.depth(SOURCE, GROUP)
        assert (done.pending, done.in_flight, done.dead_letters) == (0, 0, 0)
        assert queue.dead_letters(SOURCE) == []


def assert_all_was_processed_in_order(journal: list[tuple[int, str, int]], killed: int) -> None:
    """Each at least once, and none before its predecessor; again only after its worker was killed."""
    numbers: dict[str, list[int]] = defaultdict(list)
    workers: dict[tuple[str, int], list[int]] = defaultdict(list)
    for process, partition, number in journal:
        assert number <= len(set(numbers[partition])), f"{number} of {partition} came before its predecessor"
        numbers[partition].append(number)
        workers[partition, number].append(process)
    assert len(workers) == BURST
    assert len({process for process, *_ in journal}) > TASKS
    again = [processes for processes in workers.values() if len(processes) > 1]
    assert again, "the killed worker held nothing"
    assert {processes[0] for processes in again} == {killed}


def assert_all_was_forwarded_once_in_order(queue: QueenClient) -> None:
    forwarded = queue.list_messages(TARGET, limit=2 * BURST)
    forwarded.sort(key=lambda message: (message.partition, message.seq))
    assert [(message.partition, message.payload["number"]) for message in forwarded] == [
        (partition, number) for partition in PARTITIONS for number in range(PER_PARTITION)
    ]
    assert len({message.transaction_id for message in forwarded}) == BURST
    assert queue.depth(TARGET).pending == BURST
