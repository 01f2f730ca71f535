"""The Dag queen_migrate, run for real."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.models.hitl import HITLDetail
from airflow.models.taskinstance import TaskInstance
from airflow.models.trigger import handle_event_submit
from airflow.sdk import DAG, timezone
from airflow.sdk.exceptions import ParamValidationError
from airflow.triggers.base import TriggerEvent
from airflow.utils.session import create_session
from airflow.utils.state import TaskInstanceState
from sqlalchemy import select

from airflow_provider_queen.client.schema import head_version, migrate
from airflow_provider_queen.embedded.postgres import PostgresServer, bundled_postgres, find_system_postgres
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.resources import dags_folder
from tests.migration.generator import generate, generate_schema
from tests.migration.state import difference, present_state, v2_state
from tests.operators.test_migrate import empty  # noqa: F401

pytestmark = [pytest.mark.airflow, pytest.mark.postgres]

ALWAYS = {"preflight", "dry_run", "unless_dry_run", "backup", "migrate", "verify", "while_v2_is_kept"}
FOR_V2 = {"approve", "contract"}
WITHOUT_V2 = dict.fromkeys(ALWAYS, "success") | dict.fromkeys(FOR_V2, "skipped")


@pytest.fixture(scope="module")
def dag() -> DAG:
    bag = DagBag(dag_folder=str(dags_folder() / "queen_migrate.py"))
    assert bag.import_errors == {}
    return bag.dags["queen_migrate"]


def run(dag: DAG, **params: Any) -> tuple[str, dict[str, str], dict[str, Any]]:
    """The state of the run, of each task, and what each task returned."""
    finished = dag.test(run_conf={"dry_run": False, "rollback": False} | params)
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
    done = {"preflight", "dry_run", "unless_dry_run"}
    assert tasks == dict.fromkeys(ALWAYS | FOR_V2, "skipped") | dict.fromkeys(done, "success")
    assert QueenHook().schema_version() is None

    state, tasks, returned = run(dag)
    assert (state, tasks) == ("success", WITHOUT_V2)
    assert returned["migrate"]["applied"][-1] == head_version()
    assert returned["dry_run"] == returned["migrate"]
    assert returned["verify"] == {"queues": 0, "keeps_v2": False}
    QueenHook().configure_queue("orders")

    state, tasks, returned = run(dag)
    assert (state, tasks) == ("success", WITHOUT_V2)
    assert returned["preflight"]["version"] == head_version()
    assert returned["migrate"] == {
        "from": head_version(),
        "to": head_version(),
        "applied": [],
        "changed": False,
    }
    assert returned["verify"] == {"queues": 1, "keeps_v2": False}


@pytest.mark.usefixtures("airflow_db", "empty")
def test_a_failed_preflight_changes_nothing(dag: DAG, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate(QueenHook().dsn)
    monkeypatch.setattr("airflow_provider_queen.client.schema.readiness.OLDEST_POSTGRES", 99)
    state, tasks, _ = run(dag)
    assert state == "failed"
    assert tasks.pop("preflight") == "failed"
    assert set(tasks.values()) == {"upstream_failed"}


class Person(threading.Thread):
    """Answers what a run asks, as the page of required actions does."""

    def __init__(self, answer: str) -> None:
        super().__init__(daemon=True)
        self._answer = answer
        self._over = threading.Event()

    def __enter__(self) -> Person:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(0.2):
            with create_session() as session:
                for asked in session.scalars(select(HITLDetail).where(HITLDetail.responded_at.is_(None))):
                    waiting = session.get(TaskInstance, asked.ti_id)
                    if waiting is None or waiting.state != TaskInstanceState.AWAITING_INPUT:
                        continue
                    asked.responded_at = timezone.utcnow()
                    asked.responded_by = {"id": "test", "name": "test"}
                    asked.chosen_options = [self._answer]
                    event = TriggerEvent(asked.as_resume_event_payload())
                    handle_event_submit(event, task_instance=waiting, session=session)


@pytest.mark.slow
@pytest.mark.usefixtures("airflow_db", "empty")
def test_from_v2_with_its_data_and_back(dag: DAG, postgres_dsn: str) -> None:
    with psycopg.connect(postgres_dsn, autocommit=True) as sql:
        generate_schema(sql)
        generate(sql, messages=2000)
        before = v2_state(sql)

        state, tasks, returned = run(dag, dry_run=True)
        assert (state, tasks["migrate"]) == ("success", "skipped")
        assert returned["dry_run"]["applied"] == [head_version()]
        assert difference(before, v2_state(sql)) == ""

        with Person("Reject"):
            state, tasks, returned = run(dag)
        assert (state, tasks["approve"], tasks["contract"]) == ("success", "success", "skipped")
        assert returned["verify"] == {"queues": len(before.queues), "keeps_v2": True}
        assert difference(before, present_state(sql)) == ""

        state, tasks, returned = run(dag, rollback=True)
        assert (state, returned["migrate"]["to"]) == ("success", "0000_v2")
        assert {tasks[name] for name in FOR_V2} == {"skipped"}
        assert difference(before, v2_state(sql)) == ""

        with Person("Approve"):
            state, tasks, _ = run(dag)
        assert (state, tasks) == ("success", dict.fromkeys(ALWAYS | FOR_V2, "success"))
        assert difference(before, present_state(sql)) == ""
        assert sql.execute("SELECT to_regnamespace('queen_v2')").fetchone() == (None,)

        state, tasks, returned = run(dag)
        assert (state, tasks, returned["migrate"]["changed"]) == ("success", WITHOUT_V2, False)


@pytest.mark.usefixtures("airflow_db", "empty")
def test_a_backup_before_anything_is_changed(
    dag: DAG, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = bundled_postgres() if postgres_server.version.startswith("18") else find_system_postgres()[0]
    if not (programs / "pg_dump").exists():
        pytest.skip("the wheel's server comes without pg_dump")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("QUEEN_BACKUP_FOLDER", str(tmp_path))
    migrate(QueenHook().dsn)
    QueenHook().configure_queue("orders")
    state, _, returned = run(dag)
    assert (state, returned["backup"]) == ("success", None)  # nothing would be changed

    state, _, returned = run(dag, rollback=True)
    assert state == "success"
    [dump] = tmp_path.iterdir()
    assert returned["backup"] == str(dump)
    listed = subprocess.run(
        [programs / "pg_restore", "--list", dump], capture_output=True, text=True, check=True
    )
    assert "TABLE DATA queen message_log" in listed.stdout


@pytest.mark.parametrize("target", ["base", "-1", "", "0001; DROP"])
def test_a_run_cannot_be_sent_to_base(dag: DAG, target: str) -> None:
    with pytest.raises(ParamValidationError):
        dag.params.get_param("target").resolve(target)
