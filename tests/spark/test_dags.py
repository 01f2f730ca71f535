"""The maintenance Dags' own tasks, each by a real spark-submit; the password shows nowhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psycopg
import pytest
from airflow.models import DagBag
from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from psycopg.conninfo import conninfo_to_dict

import airflow_provider_queen
from airflow_provider_queen.operators.spark import QueenSparkOperator
from airflow_provider_queen.resources import dags_folder
from airflow_provider_queen.spark.archive import Archive
from tests.spark.apps import connection_json

CONF = {
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    # A short run gains nothing from the compiler that costs most.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


class Submission:
    """Runs a task of a Dag as a worker would, and looks for the password wherever somebody may see it."""

    def __init__(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        capfd: pytest.CaptureFixture[str],
        dsn: str,
    ) -> None:
        self.events = tmp_path / "events"
        self.events.mkdir()
        self.monkeypatch, self.caplog, self.capfd = monkeypatch, caplog, capfd
        self.secret = str(conninfo_to_dict(dsn)["password"])
        self.commands: list[list[str]] = []
        monkeypatch.setenv("AIRFLOW_CONN_QUEEN_DEFAULT", connection_json(dsn))
        monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", '{"conn_type": "spark", "host": "local[2]"}')
        monkeypatch.setenv("PYTHONPATH", str(Path(airflow_provider_queen.__file__).parents[1]))
        # Otherwise spark-submit would hand the job to the session that runs these tests.
        for name in [name for name in os.environ if name.startswith(("PYSPARK_GATEWAY", "SPARK_CONF"))]:
            monkeypatch.delenv(name)
        build = SparkSubmitHook._build_spark_submit_command
        monkeypatch.setattr(
            SparkSubmitHook,
            "_build_spark_submit_command",
            lambda hook, application: self.commands.append(build(hook, application)) or self.commands[-1],
        )

    def run(self, dag_id: str, task_id: str, **params: Any) -> dict[str, Any]:
        bag = DagBag(dag_folder=str(dags_folder() / f"{dag_id}.py"))
        dag = bag.dags[dag_id]
        task = dag.get_task(task_id)
        assert isinstance(task, QueenSparkOperator)
        task.conf = {**CONF, "spark.eventLog.dir": self.events.as_uri()}
        task.render_template_fields({"params": {**dag.params.dump(), **params}})
        with self.caplog.at_level("DEBUG"):
            summary = task.execute({})
        assert summary is not None
        self._search(task, summary["application"])
        return summary

    def _search(self, task: QueenSparkOperator, application: str) -> None:
        events = "".join(path.read_text() for path in self.events.rglob("*") if path.is_file())
        captured = self.capfd.readouterr()
        rendered = json.dumps({name: getattr(task, name) for name in task.template_fields}, default=str)
        log = self.caplog.text + captured.out + captured.err
        # The password did reach the child, and the places searched are not empty ones. (What Spark's UI shows
        # is what its event log holds.)
        assert task._hook is not None
        assert self.secret in (task._hook._env or {})["QUEEN_DSN"]
        assert "SparkListenerEnvironmentUpdate" in events
        assert "SparkListenerApplicationEnd" in events
        assert f"{application}: connected to" in log
        for place in (events, " ".join(self.commands[0]), log, rendered):
            assert self.secret not in place


@pytest.fixture
def submission(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    queen_dsn: str,
) -> Submission:
    return Submission(tmp_path, monkeypatch, caplog, capfd, queen_dsn)


def test_metrics(submission: Submission, tmp_path: Path, deliver: psycopg.Connection[Any]) -> None:
    submission.monkeypatch.setenv("QUEEN_METRICS_OUTPUT", str(tmp_path / "output"))
    summary = submission.run("queen_metrics", "compute_metrics", spark_threshold=1)
    assert (summary["application"], summary["pushed"]) == ("queen-metrics", 1577)
    assert deliver.execute("SELECT count(*) FROM queen.queue_metrics").fetchone() == (summary["written"],)
    assert (tmp_path / "output" / "queue_metrics" / f"{summary['run_id']}.parquet").is_file()


def test_retention(submission: Submission, tmp_path: Path, database: psycopg.Connection[Any]) -> None:
    submission.monkeypatch.setenv("QUEEN_ARCHIVE", str(tmp_path / "archive"))
    options = '{"retention_enabled": true, "retention_seconds": 3600}'
    database.execute("SELECT queen.configure_queue('orders', %s::jsonb)", [options])
    summary = submission.run("queen_retention", "retain", queue_name="orders", spark_threshold=1)
    assert (summary["archived"], summary["deleted"]) == (1500, 1500)
    (manifest,) = Archive(str(tmp_path / "archive")).manifests()
    assert sum(file.messages for file in manifest.files) == 1500
    assert database.execute("SELECT count(*) FROM queen.message_log").fetchone() == (77,)


def test_eviction(submission: Submission, database: psycopg.Connection[Any]) -> None:
    for queue in ("orders", "mails"):
        database.execute("SELECT queen.pop(%s, batch_size => 1, auto_ack => TRUE)", [queue])
        database.execute("SELECT queen.configure_queue(%s, '{\"max_wait_time_seconds\": 60}')", [queue])
    summary = submission.run("queen_eviction", "evict", spark_threshold=1)
    assert summary["evicted"] == 1577 - 2
    dead = "SELECT count(*) FROM queen.dead_letter_queue WHERE reason = 'evicted'"
    assert database.execute(dead).fetchone() == (1577 - 2,)
