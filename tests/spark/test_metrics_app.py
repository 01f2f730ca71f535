"""The application ``metrics.py`` and the Dag that submits it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest
from airflow.models import DagBag
from pyspark.sql import SparkSession

from airflow_provider_queen.exceptions import InvalidOptionError
from airflow_provider_queen.operators import spark as operators
from airflow_provider_queen.operators.spark import QueenSparkOperator
from airflow_provider_queen.resources import dags_folder, spark_app
from tests.spark.apps import connection_json, load_app, summary_of

SECRET = "n0t-to-be-seen-4711"


@pytest.fixture(scope="module")
def app() -> ModuleType:
    return load_app("metrics")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--since", "2026-03-01T12:00:00"], "has no time zone"),
        (["--until", "yesterday"], "'yesterday' is no ISO time"),
        (["--bucket-seconds", "0"], "seconds from 1 to 86400"),
        (["--since", "2026-03-02T00:00Z", "--until", "2026-03-01T00:00Z"], "--since must lie before --until"),
        (["--queue", "orders"], "unrecognized arguments: --queue"),
        (["--incremental", "--until", "2026-03-02T00:00Z"], "--incremental takes neither"),
    ],
)
def test_bad_arguments_end_with_a_sentence_and_2(
    app: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        app.main(arguments)
    assert caught.value.code == 2
    errors = capsys.readouterr().err.strip()
    assert sentence in errors
    assert "\n" not in errors


def test_an_unknown_queue_ends_with_a_sentence_and_2(
    app: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    queen_dsn: str,
    database: psycopg.Connection[Any],
) -> None:
    monkeypatch.setenv("QUEEN_DSN", queen_dsn)
    assert app.main(["--queue-name", "ordres"]) == 2
    assert capsys.readouterr().err.strip() == "queen-metrics: there is no queue 'ordres'"


def test_a_dry_run_stores_nothing(
    app: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    spark: SparkSession,
    tmp_path: Path,
    queen_dsn: str,
    deliver: psycopg.Connection[Any],
) -> None:
    monkeypatch.setenv("QUEEN_DSN", queen_dsn)
    arguments = ["--queue-name", "mails", "--output", str(tmp_path), "--spark-threshold", "1"]
    assert app.main(["--dry-run", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    summary = json.loads(lines[-1])
    assert (summary["pushed"], summary["written"], summary["dry_run"]) == (77, 0, True)
    assert any("would record" in line for line in lines[:-1])
    assert deliver.execute("SELECT count(*) FROM queen.queue_metrics").fetchone() == (0,)
    assert deliver.execute("SELECT count(*) FROM queen.anomalies").fetchone() == (0,)
    assert list(tmp_path.iterdir()) == []
    # The session was not the application's own.
    assert spark.range(1).count() == 1


def no_spark(*_: Any) -> None:
    raise AssertionError("Spark was started")


def test_small_work_goes_without_spark_and_to_parquet_too(
    app: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    queen_dsn: str,
    deliver: psycopg.Connection[Any],
) -> None:
    monkeypatch.setenv("QUEEN_DSN", queen_dsn)
    monkeypatch.setattr(app, "session", no_spark)
    with pytest.raises(AssertionError, match="Spark was started"):
        app.main(["--spark-threshold", "4200"])
    deliver.execute("SELECT queen.pop('mails', NULL, 'g', 5, auto_ack => TRUE)")
    deliver.execute("UPDATE queen.consumer_states SET settled_at = settled_at - interval '1 hour'")
    deliver.execute("UPDATE queen.consumer_states SET popped_at = popped_at - interval '1 hour'")
    assert app.main(["--output", str(tmp_path)]) == 0
    summary = summary_of(capsys)
    assert (summary["pushed"], summary["critical"]) == (1577, 1)

    for table, left_out in (("queue_metrics", {"computed_at"}), ("anomalies", {"id", "detected_at"})):
        (path,) = (tmp_path / table).iterdir()
        assert path.name == f"{summary['run_id']}.parquet"
        in_file = pq.read_table(path).to_pylist()
        cursor = deliver.execute(f"SELECT * FROM queen.{table}")
        names = [column.name for column in cursor.description or ()]
        assert {*in_file[0], "id"} == {*names, "id"}
        kept = [name for name in names if name not in left_out]
        stored = [tuple(dict(zip(names, row, strict=True))[name] for name in kept) for row in cursor]
        assert {tuple(row[name] for name in kept) for row in in_file} == set(stored)


def test_a_place_that_cannot_be_written_ends_with_a_sentence_and_2(
    app: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    queen_dsn: str,
) -> None:
    monkeypatch.setenv("QUEEN_DSN", queen_dsn)
    assert app.main(["--output", "/dev/null/x"]) == 2
    assert "no files can be kept at '/dev/null/x'" in capsys.readouterr().err


def test_a_missing_spark_connection_is_an_error_not_yarn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIRFLOW_CONN_NO_SPARK", raising=False)
    operator = QueenSparkOperator(task_id="metrics", application="x.py", conn_id="no_spark")
    with pytest.raises(InvalidOptionError, match="there is no Spark connection 'no_spark'"):
        operator.execute({})


def test_deploy_mode_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "AIRFLOW_CONN_SPARK_FAR",
        '{"conn_type": "spark", "host": "spark://far:7077", "extra": {"deploy-mode": "cluster"}}',
    )
    operator = QueenSparkOperator(task_id="metrics", application="x.py", conn_id="spark_far")
    with pytest.raises(InvalidOptionError, match="deploy mode cluster"):
        operator.execute({})


def test_on_yarn_the_password_stays_off_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_YARN", '{"conn_type": "spark", "host": "yarn"}')
    monkeypatch.setenv(
        "AIRFLOW_CONN_QUEEN_DEFAULT",
        connection_json(f"host=db port=5432 dbname=q user=u password={SECRET}"),
    )
    operator = QueenSparkOperator(
        task_id="metrics", application="x.py", conn_id="spark_yarn", env_vars={"MINE": "1"}
    )
    hook = operator._get_hook()
    command = hook._build_spark_submit_command("x.py")
    assert SECRET not in " ".join(command)
    assert hook._env is not None
    assert SECRET in hook._env["QUEEN_DSN"]
    assert hook._env["MINE"] == "1"


def test_the_childs_path_starts_with_this_environment(tmp_path: Path) -> None:
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\n")
    java.chmod(0o755)
    environment = operators.child_environment({"PATH": str(tmp_path)})
    assert environment == {"PATH": f"{sys.prefix}/bin{os.pathsep}{tmp_path}"}


def test_the_dag_parses() -> None:
    bag = DagBag(dag_folder=str(dags_folder() / "queen_metrics.py"))
    assert bag.import_errors == {}
    dag = bag.dags["queen_metrics"]
    assert (dag.max_active_runs, dag.catchup) == (1, False)
    task = dag.get_task("compute_metrics")
    assert task.downstream_task_ids == {"alert"}
    assert task.application == str(spark_app("metrics.py"))
    assert task.env_vars is None


def test_critical_anomalies_fail_the_alert() -> None:
    dag = DagBag(dag_folder=str(dags_folder() / "queen_metrics.py")).dags["queen_metrics"]
    alert = dag.get_task("alert").python_callable
    alert({"critical": 0})
    alert(None)
    with pytest.raises(RuntimeError, match="2 critical anomalies"):
        alert({"critical": 2})
