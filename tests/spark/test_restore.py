"""Archived messages come back: in order, with their ids, and not twice."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession

from tests.spark.apps import load_app, summary_of

CONTENT = (
    "SELECT partition_name, priority, transaction_id, trace_id, payload::text FROM queen.messages"
    " WHERE queue_name = '{}' ORDER BY lane_id, seq"
)


@pytest.fixture(scope="module")
def app() -> ModuleType:
    return load_app("restore")


@pytest.fixture
def before(
    database: psycopg.Connection[Any], queen_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """What ``orders`` held before all of it went to the archive: the older half of it in a run of its own."""
    monkeypatch.setenv("QUEEN_DSN", queen_dsn)
    rows = database.execute(CONTENT.format("orders")).fetchall()
    database.execute(
        "UPDATE queen.message_log SET created_at = created_at - interval '90 days' WHERE seq <= 600"
    )
    retention = load_app("retention")
    for kept in ("2026-02-01 00:00+00", "2026-04-01 00:00+00"):
        database.execute(
            "SELECT queen.configure_queue('orders', jsonb_build_object('retention_enabled', TRUE,"
            " 'retention_seconds', extract(epoch FROM now() - %s::timestamptz)::int))",
            [kept],
        )
        assert retention.main(["--archive", str(tmp_path)]) == 0
    assert database.execute(CONTENT.format("orders")).fetchall() == []
    return rows


def test_everything_comes_back_once(
    app: ModuleType,
    database: psycopg.Connection[Any],
    before: list[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--archive", str(tmp_path), "--queue-name", "orders"]
    assert app.main([*arguments, "--dry-run"]) == 0
    assert database.execute(CONTENT.format("orders")).fetchall() == []
    capsys.readouterr()
    assert app.main(arguments) == 0
    assert summary_of(capsys)["queued"] == 1500
    assert database.execute(CONTENT.format("orders")).fetchall() == before
    origins = "SELECT count(DISTINCT requeued_from), min(seq) FROM queen.messages WHERE queue_name = 'orders'"
    assert database.execute(origins).fetchone() == (1500, 341)
    assert app.main(arguments) == 0
    assert summary_of(capsys)["queued"] == 0


def test_a_time_range_into_another_queue_by_spark(
    app: ModuleType,
    spark: SparkSession,
    database: psycopg.Connection[Any],
    before: list[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    database.execute("SELECT queen.configure_queue('again')")
    arguments = ["--archive", str(tmp_path), "--queue-name", "orders", "--to-queue", "again"]
    capsys.readouterr()
    assert app.main([*arguments, "--since", "2026-02-01T00:00Z", "--spark-threshold", "1"]) == 0
    assert summary_of(capsys)["messages"] == 600
    assert database.execute(CONTENT.format("again")).fetchall() == [
        row for row in before if row[0] == "a" and int(row[2][2:]) > 600
    ]


def test_mistakes_end_with_a_sentence_and_2(
    app: ModuleType,
    database: psycopg.Connection[Any],
    queen_dsn: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("QUEEN_DSN", queen_dsn)
    with pytest.raises(SystemExit) as ended:
        app.main(["--queue-name", "orders"])
    assert ended.value.code == 2
    assert app.main(["--archive", str(tmp_path), "--queue-name", "orders", "--to-queue", "ordres"]) == 2
    assert "there is no queue 'ordres'" in capsys.readouterr().err
    assert app.main(["--archive", str(tmp_path), "--queue-name", "orders"]) == 0
    assert summary_of(capsys)["messages"] == 0
