"""Operators on a fresh database: a hook, a context, and a task state store as Airflow's behaves."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_provider_queen.embedded.postgres import PostgresServer
from airflow_provider_queen.hooks.queen import QueenHook


def connection_json(dsn: str) -> str:
    parts = conninfo_to_dict(dsn)
    return json.dumps(
        {
            "conn_type": "queen",
            "host": parts.get("host"),
            "port": int(str(parts.get("port") or 5432)),
            "login": parts.get("user"),
            "password": parts.get("password"),
            "schema": parts.get("dbname"),
        }
    )


@pytest.fixture(scope="session")
def tasks_dsn(postgres_18: PostgresServer, queen_template: Callable[[PostgresServer], str]) -> str:
    """One database, on one server: what is tested here lies above it."""
    return postgres_18.create_database(f"tasks_{uuid.uuid4().hex}", queen_template(postgres_18))


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch, tasks_dsn: str) -> Iterator[QueenHook]:
    """The default connection, to a database without a queue."""
    monkeypatch.setenv("AIRFLOW_CONN_QUEEN_DEFAULT", connection_json(tasks_dsn))
    hook = QueenHook()
    yield hook
    for group in hook.list_consumer_groups():
        hook.delete_consumer_group(group.consumer_group)
    for queue in hook.list_queues():
        hook.delete_queue(queue.name)
    hook.close()


class StateStore(dict[str, Any]):
    """``context["task_state_store"]`` without a supervisor."""

    def set(self, key: str, value: Any) -> None:
        self[key] = json.loads(json.dumps(value))

    def delete(self, key: str) -> None:
        self.pop(key, None)


def make_context(task_id: str = "work", map_index: int = -1, **more: Any) -> Any:
    ti = SimpleNamespace(
        dag_id="shop", run_id="manual__1", task_id=task_id, map_index=map_index, try_number=1
    )
    return {"ti": ti, "task_instance": ti, "run_id": ti.run_id, "task_state_store": StateStore(), **more}


class Figures:
    """What was sent to Airflow's metrics."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: dict[str, float] = {}
        self.tags: dict[str, dict[str, Any]] = {}
        monkeypatch.setattr("airflow.sdk.observability.stats.incr", self._note)
        monkeypatch.setattr("airflow.sdk.observability.stats.gauge", self._note)

    def _note(self, name: str, value: float, *, tags: dict[str, Any]) -> None:
        self.sent[name] = self.sent.get(name, 0) + value
        self.tags[name] = tags


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Figures:
    return Figures(monkeypatch)


def run_dag(dag: Any) -> Any:
    """Run a Dag that stands in a test, as ``dag.test()`` runs one of the Dags folder."""
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.dag_processing.dagbag import BundleDagBag, sync_bag_to_db

    DagBundlesManager().sync_bundles_to_db()
    bundle = next(iter(DagBundlesManager().get_all_dag_bundles()))
    bag = BundleDagBag(dag_folder="/nowhere", bundle_path=bundle.path, bundle_name=bundle.name)
    dag.fileloc = __file__
    bag.bag_dag(dag)
    sync_bag_to_db(bag, bundle.name, bundle.version)
    return dag.test()
