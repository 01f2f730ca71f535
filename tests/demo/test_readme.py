"""README and the page on migrating claim nothing that is not there, and their examples run."""

from __future__ import annotations

import json
import pkgutil
import re
import uuid
from pathlib import Path
from typing import Any

import psycopg
import pytest
from airflow.dag_processing.dagbag import DagBag
from psycopg.conninfo import make_conninfo

from airflow_provider_queen.client import QueenClient
from airflow_provider_queen.client.schema import migrate
from airflow_provider_queen.embedded.postgres import PostgresServer
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.resources import dags_folder
from tests.airflow_tasks import hook, tasks_dsn  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
MIGRATING = (ROOT / "docs" / "migrating.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def table(page: str) -> str:
    return "\n".join(line for line in page.splitlines() if line.startswith("|"))


def test_what_it_is_for_takes_five_lines() -> None:
    purpose = README.split("\n## ")[0].split("\n", 1)[1].strip()
    assert len(purpose.splitlines()) == 5


@pytest.mark.airflow
@pytest.mark.postgres
@pytest.mark.usefixtures("airflow_db")
def test_the_first_dag_runs(
    tmp_path: Path,
    hook: QueenHook,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (text,) = blocks(README, "python")
    assert len([line for line in text.splitlines() if line.strip()]) <= 30
    file = tmp_path / "first_queue.py"
    file.write_text(text)
    # A run needs a Dag that stands in one of Airflow's folders.
    bundle = "airflow.dag_processing.bundles.local.LocalDagBundle"
    folders = [{"name": "readme", "classpath": bundle, "kwargs": {"path": str(tmp_path)}}]
    monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST", json.dumps(folders))
    bag = DagBag(str(file))
    assert bag.import_errors == {}
    run = bag.dags["first_queue"].test()
    assert run.state == "success"
    assert {task.task_id for task in run.get_task_instances()} == {"configure", "push", "sense", "pop"}
    assert sum(row.total_completed for row in hook.stats("orders")) == 3
    assert hook.depth("orders").pending == 0


def test_every_class_in_the_table_is_there() -> None:
    names = re.findall(r"`((?:\w+\.)+\w+)`", table(README))
    assert len(names) > 10
    for name in names:
        assert callable(pkgutil.resolve_name(f"airflow_provider_queen.{name}"))


def test_every_dag_in_the_table_is_there() -> None:
    names = re.findall(r"`(\w*queen_\w+)`", table(README).replace("queen_task", ""))
    assert "queen_migrate" in names
    there = {path.stem for path in dags_folder().glob("*.py")}
    assert set(names) <= there
    maintenance = {name for name in there if not name.startswith("example_")}
    assert maintenance <= set(names)


def test_every_operator_sensor_and_notifier_is_in_the_table() -> None:
    for kind in ("operators", "sensors", "notifications"):
        for path in (ROOT / "airflow_provider_queen" / kind).glob("[a-z]*.py"):
            for name in re.findall(r"^class (Queen\w+)", path.read_text(), re.MULTILINE):
                assert f"`{kind}.{path.stem}.{name}`" in table(README)


def test_every_command_of_make_is_a_target() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = set(re.findall(r"(?:^|`)make (\w+)", README, re.MULTILINE))
    assert {"demo", "ui", "test", "build"} <= commands <= targets


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "migrating.md"], ids=lambda p: p.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_connection_is_one_that_the_hook_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    (name, value) = re.findall(r"(AIRFLOW_CONN_\w+)='(.*)'", README)[0]
    monkeypatch.setenv(name, value)
    assert QueenHook().dsn.split() == [
        "host=db.example.com",
        "port=5432",
        "dbname=shop",
        "user=user",
        "password=password",
        "sslmode=verify-full",
    ]


def test_the_tasks_and_parameters_of_the_migration_are_those_of_the_dag() -> None:
    dag = DagBag(str(dags_folder() / "queen_migrate.py")).dags["queen_migrate"]
    by_the_dag = MIGRATING.partition("## By other means")[0]
    named = re.findall(r"^\| `(\w+)`", by_the_dag, re.MULTILINE)
    assert named == [*(task.task_id for task in dag.topological_sort()), *dag.params]


@pytest.mark.postgres
def test_the_grants_are_enough_for_a_worker(postgres_18: PostgresServer) -> None:
    (text,) = blocks(MIGRATING, "sql")
    role = f"worker_{uuid.uuid4().hex}"
    dsn = postgres_18.create_database(role)
    with psycopg.connect(dsn, autocommit=True) as owner:
        migrate(dsn)
        owner.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
        owner.execute(text.replace("worker", role))
        work(make_conninfo(dsn, user=role, password="x"))
    postgres_18.drop_database(role)
    with psycopg.connect(postgres_18.dsn(), autocommit=True) as owner:
        owner.execute(f"DROP ROLE {role}")


def work(conninfo: str) -> None:
    with QueenClient(conninfo) as queen:
        queen.configure_queue("orders")
        queen.push("orders", [{"payload": number} for number in range(3)])
        popped: list[Any] = queen.pop("orders")
        queen.settle(completed=popped[:2], rejected=popped[2:])
        depth = queen.depth("orders")
        assert (depth.pending, depth.dead_letters) == (0, 1)
        queen.retain()
        assert queen.delete_queue("orders")
