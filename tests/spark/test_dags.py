"""The maintenance Dags' own tasks, each by a real spark-submit; the password shows nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg

from airflow_provider_queen.spark.archive import Archive
from tests.spark.submissions import Submission


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
