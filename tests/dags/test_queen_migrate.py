"""The Dag queen_migrate, run for real."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import DAG
from airflow.sdk.exceptions import ParamValidationError

from airflow_provider_queen.client.schema import head_version, migrate
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.resources import dags_folder
from tests.operators.test_migrate import empty  # noqa: F401

pytestmark = [pytest.mark.airflow, pytest.mark.postgres]

ALL = {"preflight", "dry_run", "unless_dry_run", "migrate", "verify"}


@pytest.fixture(scope="module")
def dag() -> DAG:
    bag = DagBag(dag_folder=str(dags_folder() / "queen_migrate.py"))
    assert bag.import_errors == {}
    return bag.dags["queen_migrate"]


def run(dag: DAG, *, dry_run: bool = False) -> tuple[str, dict[str, str], dict[str, Any]]:
    """The state of the run, of each task, and what each task returned."""
    finished = dag.test(run_conf={"dry_run": dry_run})
    tasks = finished.get_task_instances()
    return (
        str(finished.state),
        {task.task_id: str(task.state) for task in tasks},
        {task.task_id: task.xcom_pull(task_ids=task.task_id) for task in tasks},
    )


@pytest.mark.slow
@pytest.mark.usefixtures("airflow_db", "empty")
def test_from_nothing_to_head_and_again(dag: DAG) -> None:
    state, tasks, _ = run(dag, dry_run=True)
    assert state == "success"
    assert tasks == dict.fromkeys(ALL, "success") | {"migrate": "skipped", "verify": "skipped"}
    assert QueenHook().schema_version() is None

    state, tasks, returned = run(dag)
    assert (state, tasks) == ("success", dict.fromkeys(ALL, "success"))
    assert returned["migrate"]["applied"][-1] == head_version()
    assert returned["dry_run"] == returned["migrate"]
    assert returned["verify"] == 0
    QueenHook().configure_queue("orders")

    state, tasks, returned = run(dag)
    assert (state, tasks) == ("success", dict.fromkeys(ALL, "success"))
    assert returned["preflight"]["version"] == head_version()
    assert returned["migrate"] == {
        "from": head_version(),
        "to": head_version(),
        "applied": [],
        "changed": False,
    }
    assert returned["verify"] == 1


@pytest.mark.usefixtures("airflow_db", "empty")
def test_a_failed_preflight_changes_nothing(dag: DAG, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate(QueenHook().dsn)
    monkeypatch.setattr("airflow_provider_queen.client.schema.readiness.OLDEST_POSTGRES", 99)
    state, tasks, _ = run(dag)
    assert state == "failed"
    assert tasks.pop("preflight") == "failed"
    assert set(tasks.values()) == {"upstream_failed"}


@pytest.mark.parametrize("target", ["base", "-1", "", "0001; DROP"])
def test_a_run_cannot_be_sent_to_base(dag: DAG, target: str) -> None:
    with pytest.raises(ParamValidationError):
        dag.params.get_param("target").resolve(target)
