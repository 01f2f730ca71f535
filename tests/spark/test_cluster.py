"""A standalone cluster of one master and two workers, one of which dies while the job is under way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pyspark
import pytest

from airflow_provider_queen.embedded.guard import GuardedFolder
from airflow_provider_queen.spark.archive import Archive
from tests.spark.submissions import QUICK_JAVA, Submission

WAIT_SECONDS = 120.0
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
WAITING_FOR_MESSAGES = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE wait_event_type = 'Lock' AND query LIKE '%scan_messages%' AND datname = current_database()"
)


def wait_until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {WAIT_SECONDS:.0f} s"
        time.sleep(0.05)


class Cluster:
    """Master and workers as processes of their own, each with its executors in a group of its own."""

    def __init__(self, folder: GuardedFolder) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.master_url = ""

    def start(self) -> None:
        master = self._start("Master", "--port", "0")
        self.master_url = self._said(master, r"Starting Spark master at (spark://\S+)")
        for worker in [
            self._start("Worker", "--port", "0", "--cores", "1", "--memory", "512m", self.master_url)
            for _ in range(2)
        ]:
            self._said(worker, r"(Successfully registered) with master")

    def kill_a_worker(self) -> None:
        worker = self._processes.pop()
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()

    def close(self) -> None:
        for process in reversed(self._processes):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _log(self, number: int) -> Path:
        return self._folder.path / f"{number}.log"

    def _start(self, role: str, *arguments: str) -> int:
        number = len(self._processes)
        work = ["--work-dir", str(self._folder.path / str(number))] if role == "Worker" else []
        with self._log(number).open("wb") as log:
            process = subprocess.Popen(
                [
                    str(SPARK_CLASS),
                    f"org.apache.spark.deploy.{role.lower()}.{role}",
                    *("--host", "127.0.0.1", "--webui-port", "0"),
                    *work,
                    *arguments,
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"SPARK_DAEMON_JAVA_OPTS": QUICK_JAVA, "SPARK_DAEMON_MEMORY": "256m"},
                start_new_session=True,
            )
        self._folder.watch(process.pid)
        self._processes.append(process)
        return number

    def _said(self, number: int, pattern: str) -> str:
        found: list[str] = []

        def said() -> bool:
            text = self._log(number).read_text()
            assert self._processes[number].poll() is None, text
            found.extend(re.findall(pattern, text))
            return bool(found)

        wait_until(said, pattern)
        return found[0]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    folder = GuardedFolder("queen-cluster-")
    started = Cluster(folder)
    try:
        started.start()
        yield started
    finally:
        started.close()
        folder.close()


@pytest.mark.slow
def test_a_worker_dies_while_retention_archives(
    submission: Submission,
    cluster: Cluster,
    tmp_path: Path,
    queen_dsn: str,
    database: psycopg.Connection[Any],
) -> None:
    options = '{"retention_enabled": true, "retention_seconds": 3600}'
    database.execute("SELECT queen.configure_queue('orders', %s::jsonb)", [options])
    archive = Archive(str(tmp_path / "archive"))
    submission.monkeypatch.setenv("QUEEN_ARCHIVE", archive.location)
    submission.use_master(cluster.master_url)

    def kill_while_both_work() -> None:
        """A lock on the messages holds both tasks, so that one of them is surely under way when it dies."""
        wait_until((tmp_path / "archive" / "_manifests").exists, "the plan")
        with psycopg.connect(queen_dsn) as connection:
            connection.execute("LOCK TABLE queen.message_log")
            wait_until(lambda: database.execute(WAITING_FOR_MESSAGES).fetchone() == (2,), "two tasks")
            cluster.kill_a_worker()

    with ThreadPoolExecutor(1) as pool:
        sabotage = pool.submit(kill_while_both_work)
        summary = submission.run("queen_retention", "retain", spark_threshold=1)
        sabotage.result()

    assert "Lost executor" in submission.log
    assert (summary["archived"], summary["deleted"]) == (1500, 1500)
    (manifest,) = archive.manifests()
    named = [file.path for file in manifest.files]
    assert len(named) == len(set(named))
    checks = archive.check(manifest.files)
    assert sorted(check.messages for check in checks.values()) == [300, 1200]
    assert database.execute("SELECT count(*) FROM queen.message_log").fetchone() == (77,)
