"""Runs tasks of the maintenance Dags by a real spark-submit, and looks for the password meanwhile."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from airflow.models import DagBag
from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from psycopg.conninfo import conninfo_to_dict

import airflow_provider_queen
from airflow_provider_queen.operators.spark import QueenSparkOperator
from airflow_provider_queen.resources import dags_folder
from tests.spark.apps import connection_json

#: A short run gains nothing from the compiler that costs most.
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
CONF = {
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": QUICK_JAVA,
    "spark.executor.extraJavaOptions": QUICK_JAVA,
    "spark.executor.memory": "512m",
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
        self.log = ""
        monkeypatch.setenv("AIRFLOW_CONN_QUEEN_DEFAULT", connection_json(dsn))
        self.use_master("local[2]")
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

    def use_master(self, master: str) -> None:
        connection = json.dumps({"conn_type": "spark", "host": master})
        self.monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", connection)

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
        log = self.log = self.caplog.text + captured.out + captured.err
        # The password did reach the child, and the places searched are not empty ones. (What Spark's UI shows
        # is what its event log holds.)
        assert task._hook is not None
        assert self.secret in (task._hook._env or {})["QUEEN_DSN"]
        assert "SparkListenerEnvironmentUpdate" in events
        assert "SparkListenerApplicationEnd" in events
        assert f"{application}: connected to" in log
        for place in (events, " ".join(self.commands[0]), log, rendered):
            assert self.secret not in place
