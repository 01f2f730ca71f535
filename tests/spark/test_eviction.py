"""Eviction: once per group that had the message pending, exact depth, live leases respected."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import psycopg
import pytest
from airflow.models import DagBag
from pyspark.sql import SparkSession

from airflow_provider_queen.resources import dags_folder, spark_app
from airflow_provider_queen.spark import jobs
from tests.spark.apps import BOTH_SERVERS, load_app, summary_of

DEAD = (
    "SELECT q.name, d.consumer_group, count(*)::int, count(DISTINCT (d.lane_id, d.seq))::int"
    " FROM queen.dead_letter_queue AS d INNER JOIN queen.queues AS q ON q.id = d.queue_id"
    " WHERE d.reason = 'evicted' GROUP BY 1, 2 ORDER BY 1, 2"
)
PENDING = (
    "SELECT consumer_group, partition_name, pending::int FROM queen.partition_consumers"
    " WHERE queue_name = 'orders' ORDER BY 1, 2"
)


@pytest.fixture(scope="module")
def app() -> ModuleType:
    return load_app("eviction")


@pytest.fixture
def waiting(
    database: psycopg.Connection[Any], queen_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> psycopg.Connection[Any]:
    """Two groups read ``orders``: ``audit`` has settled 200 messages of partition a, ``billing`` none."""
    monkeypatch.setenv("QUEEN_DSN", queen_dsn)
    for group in ("audit", "billing"):
        leases = dict(
            database.execute(
                "SELECT DISTINCT partition, lease_id FROM queen.pop('orders', NULL, %s, 2000, 10)", [group]
            ).fetchall()
        )
        if group == "audit":
            database.execute("SELECT queen.ack(%s, %s)", [leases["a"], list(range(1, 201))])
        for lease in leases.values():
            database.execute("SELECT queen.release(%s)", [lease])
    database.execute("SELECT queen.configure_queue('orders', '{\"max_wait_time_seconds\": 60}')")
    return database


@BOTH_SERVERS
def test_each_group_loses_what_it_had_pending(
    app: ModuleType,
    waiting: psycopg.Connection[Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "SAY_EVERY", 100)
    waiting.execute("SELECT queen.push('orders', ARRAY['1', '2'], ARRAY['a'])")
    assert app.main(["--chunk", "100"]) == 0
    *progress, last = capsys.readouterr().out.splitlines()
    assert "queen-eviction: 2800 messages evicted" in progress
    assert json.loads(last)["queues"] == {"orders": 1500 - 200 + 1500}
    assert waiting.execute(DEAD).fetchall() == [
        ("orders", "audit", 1300, 1300),
        ("orders", "billing", 1500, 1500),
    ]
    pending = waiting.execute(PENDING).fetchall()
    assert [row for row in pending if row[1] in "ab"] == [
        ("audit", "a", 2),
        ("audit", "b", 0),
        ("billing", "a", 2),
        ("billing", "b", 0),
    ]
    assert app.main([]) == 0
    assert summary_of(capsys)["evicted"] == 0


def test_a_live_lease_keeps_its_lane(
    app: ModuleType, waiting: psycopg.Connection[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    waiting.execute("SELECT queen.configure_queue('orders', '{\"max_wait_time_seconds\": 0}')")
    lease = waiting.execute("SELECT lease_id FROM queen.pop('orders', 'a', 'audit', 5) LIMIT 1").fetchone()
    waiting.execute("SELECT queen.configure_queue('orders', '{\"max_wait_time_seconds\": 60}')")
    assert app.main([]) == 0
    assert summary_of(capsys)["evicted"] == 300 + 1500
    waiting.execute("SELECT queen.ack(%s)", lease)
    assert app.main([]) == 0
    assert summary_of(capsys)["evicted"] == 1000 - 5


def test_a_dry_run_counts_and_changes_nothing(
    app: ModuleType, waiting: psycopg.Connection[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["--dry-run"]) == 0
    counted = summary_of(capsys)["evictable"]
    assert waiting.execute(DEAD).fetchall() == []
    assert app.main([]) == 0
    assert summary_of(capsys)["evicted"] == counted == 2800


def test_above_the_threshold_queues_go_to_spark(
    app: ModuleType,
    spark: SparkSession,
    waiting: psycopg.Connection[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    waiting.execute("SELECT queen.pop('mails', batch_size => 1, auto_ack => TRUE)")
    waiting.execute("SELECT queen.configure_queue('mails', '{\"max_wait_time_seconds\": 60}')")
    assert app.main(["--spark-threshold", "1"]) == 0
    assert summary_of(capsys)["queues"] == {"orders": 2800, "mails": 76}


def test_a_mistyped_queue_ends_with_a_sentence_and_2(
    app: ModuleType, waiting: psycopg.Connection[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["--queue-name", "ordres"]) == 2
    assert capsys.readouterr().err == "queen-eviction: there is no queue 'ordres'\n"


def test_the_dag_parses() -> None:
    bag = DagBag(dag_folder=str(dags_folder() / "queen_eviction.py"))
    assert bag.import_errors == {}
    dag = bag.dags["queen_eviction"]
    assert (dag.max_active_runs, dag.catchup) == (1, False)
    (task,) = dag.tasks
    assert task.application == str(spark_app("eviction.py"))
