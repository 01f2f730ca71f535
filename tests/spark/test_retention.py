"""Retention with an archive: killed anywhere and run again, nothing is lost and nothing is archived twice."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest
from airflow.models import DagBag
from pyspark.sql import SparkSession

from airflow_provider_queen.resources import dags_folder, spark_app
from airflow_provider_queen.spark import ConnectionInfo, archive, folders, jobs, retention
from airflow_provider_queen.spark.archive import Archive, ArchivedFile, ArchiveError
from airflow_provider_queen.spark.ranges import Range
from tests.spark.apps import BOTH_SERVERS, load_app, summary_of

Row = tuple[str, int, int, str]
MESSAGES = (
    "SELECT queue_name, lane_id, seq, transaction_id, payload::text FROM queen.messages ORDER BY 1, 2, 3"
)


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.fixture(scope="module")
def app() -> ModuleType:
    return load_app("retention")


@pytest.fixture
def aged(
    database: psycopg.Connection[Any], queen_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> psycopg.Connection[Any]:
    """The test's messages are months old: the queue ``orders`` keeps an hour, ``mails`` keeps all."""
    monkeypatch.setenv("QUEEN_DSN", queen_dsn)
    database.execute("TRUNCATE queen.retention_history")
    options = '{"retention_enabled": true, "retention_seconds": 3600}'
    database.execute("SELECT queen.configure_queue('orders', %s::jsonb)", [options])
    return database


def messages(database: psycopg.Connection[Any]) -> set[Any]:
    return set(database.execute(MESSAGES).fetchall())


def archived(location: Path) -> list[Any]:
    """What the manifests name, one entry per message; a message named twice would be there twice."""
    files = [file for manifest in Archive(str(location)).manifests() for file in manifest.files]
    assert len(files) == len({file.path for file in files})
    columns = ["queue_name", "lane_id", "seq", "transaction_id", "payload"]
    rows: list[Any] = []
    for file in files:
        table = pq.ParquetFile(location / file.path).read(columns=columns)
        assert table.num_rows == file.messages
        rows += zip(*(table[name].to_pylist() for name in columns), strict=True)
    return rows


def files_in(location: Path) -> set[str]:
    return {str(path.relative_to(location)) for path in location.rglob("*.parquet")}


def named_files(location: Path) -> set[str]:
    return {file.path for manifest in Archive(str(location)).manifests() for file in manifest.files}


def test_archived_verified_deleted(
    app: ModuleType, aged: psycopg.Connection[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = messages(aged)
    assert app.main(["--archive", str(tmp_path), "--chunk", "400"]) == 0
    summary = summary_of(capsys)
    assert (summary["archived"], summary["deleted"]) == (1500, 1500)
    rows = archived(tmp_path)
    assert len(rows) == len(set(rows)) == 1500
    assert set(rows) | messages(aged) == before
    assert {row[0] for row in messages(aged)} == {"mails"}
    assert all(path.startswith("queue=orders/day=2026-03-01/") for path in files_in(tmp_path))
    history = aged.execute(
        "SELECT partition_name, sum(messages_deleted)::int, max(messages_deleted)::int"
        " FROM queen.retention_history GROUP BY 1 ORDER BY 1"
    ).fetchall()
    assert history == [("a", 1200, 400), ("b", 300, 300)]
    assert app.main(["--archive", str(tmp_path)]) == 0
    assert summary_of(capsys)["archived"] == 0


def test_without_an_archive_only_the_database_works(
    app: ModuleType, aged: psycopg.Connection[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["--dry-run", "--archive", str(tmp_path / "archive")]) == 0
    assert summary_of(capsys)["deletable"] == 1500
    assert len(messages(aged)) == 1577
    assert not (tmp_path / "archive").exists()
    assert app.main([]) == 0
    assert summary_of(capsys)["deleted"] == 1500
    assert len(messages(aged)) == 77


def test_above_the_threshold_spark_archives(
    app: ModuleType,
    spark: SparkSession,
    aged: psycopg.Connection[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = messages(aged)
    assert app.main(["--archive", str(tmp_path), "--spark-threshold", "1"]) == 0
    assert summary_of(capsys)["deleted"] == 1500
    assert set(archived(tmp_path)) | messages(aged) == before
    assert len(files_in(tmp_path)) == 2


def kill_before(function: Callable[..., Any]) -> Callable[..., Any]:
    def killed(*arguments: Any, **named: Any) -> Any:
        raise Killed

    return killed


def kill_after(function: Callable[..., Any]) -> Callable[..., Any]:
    def killed(*arguments: Any, **named: Any) -> Any:
        function(*arguments, **named)
        raise Killed

    return killed


STAGES = [
    ("nothing is written yet", archive.Archive, "prepare", kill_after),
    ("leftovers are removed", archive.Archive, "remove_leftovers", kill_after),
    ("the first file is open", archive._Files, "append", kill_after),
    ("files are written", archive._Files, "close", kill_after),
    ("the first piece is written", archive.Archive, "write", kill_after),
    ("all pieces are written", retention, "verify_portion", kill_before),
    ("all is verified", archive.Archive, "commit", kill_before),
    ("half of the manifest is written", archive.Manifest, "to_json", kill_after),
    ("a file is on disk", archive, "to_disk", kill_after),
    ("the manifest has no name yet", folders, "to_disk", kill_after),
    ("the manifest is committed", archive.Archive, "commit", kill_after),
    ("the first chunk is deleted", jobs, "call", None),
]


@pytest.mark.parametrize(("stage", "place", "name", "kill"), STAGES, ids=[stage[0] for stage in STAGES])
def test_killed_and_run_again(
    app: ModuleType,
    aged: psycopg.Connection[Any],
    tmp_path: Path,
    stage: str,
    place: Any,
    name: str,
    kill: Callable[..., Any] | None,
) -> None:
    before = messages(aged)
    arguments = ["--archive", str(tmp_path), "--chunk", "400"]
    for attempt in ("the run", "the one that finds what it left"):
        died = False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, name, kill(getattr(place, name)) if kill else kill_at_delete(2))
            try:
                app.main(arguments)
            except Killed:
                died = True
        # The second does not come to the stage any more where the first had all in the archive.
        assert died or attempt != "the run"
        # Whatever the database has lost is in the archive already.
        assert before - messages(aged) <= set(archived(tmp_path))
    assert app.main(arguments) == 0
    rows = archived(tmp_path)
    assert len(rows) == len(set(rows)) == 1500
    assert set(rows) == before - messages(aged)
    assert files_in(tmp_path) == named_files(tmp_path)


def kill_at_delete(times: int) -> Callable[..., Any]:
    calls = 0

    def call(connection: Any, function: str, *arguments: Any) -> Any:
        nonlocal calls
        calls += function == "delete_archived"
        if calls == times:
            raise Killed
        return archive.call(connection, function, *arguments)

    return call


def test_sigkill_at_any_time(aged: psycopg.Connection[Any], tmp_path: Path) -> None:
    before = messages(aged)
    command = [sys.executable, str(spark_app("retention.py")), "--archive", str(tmp_path), "--chunk", "20"]
    for line_to_die_at in ("connected", "archiving", "files written", "archived as"):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if line_to_die_at in line:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert before - messages(aged) <= set(archived(tmp_path))
    wait_for_lock(aged)
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    rows = archived(tmp_path)
    assert len(rows) == len(set(rows)) == 1500
    assert set(rows) == before - messages(aged)


def wait_for_lock(database: psycopg.Connection[Any]) -> None:
    """The server notices the death of its client a moment later."""
    database.execute(
        "SELECT pg_advisory_lock(k), pg_advisory_unlock(k)"
        " FROM hashtextextended('queen-retention', 5817410277391022105) AS k"
    )


def test_a_second_run_at_the_same_time_is_refused(
    app: ModuleType, aged: psycopg.Connection[Any], queen_dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with jobs.exclusive(ConnectionInfo(queen_dsn), retention.JOB):
        assert app.main([]) == 1
    assert capsys.readouterr().err == "queen-retention: another run of queen-retention has not ended\n"


def test_what_is_archived_but_held_stays(
    app: ModuleType, aged: psycopg.Connection[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lease taken after the copy was made protects its messages; the next run deletes them uncopied."""
    commit = Archive.commit
    lease: list[Any] = []

    def pop_then_commit(self: Archive, manifest: archive.Manifest) -> None:
        lease.append(aged.execute("SELECT lease_id FROM queen.pop('orders', 'a', 'g', 10)").fetchone())
        commit(self, manifest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Archive, "commit", pop_then_commit)
        assert app.main(["--archive", str(tmp_path)]) == 0
    assert summary_of(capsys)["deleted"] == 300
    aged.execute("SELECT queen.ack(%s)", lease[0])
    assert app.main(["--archive", str(tmp_path)]) == 0
    summary = summary_of(capsys)
    assert (summary["archived"], summary["deleted"]) == (0, 1200)


def test_a_lane_of_the_same_id_in_another_database_is_not_taken_for_archived(
    app: ModuleType, aged: psycopg.Connection[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aged.execute("UPDATE queen.lanes SET created_at = created_at - interval '1 day'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention, "call_until_nothing", lambda *_: 0)
        assert app.main(["--archive", str(tmp_path)]) == 0
    aged.execute("UPDATE queen.lanes SET created_at = created_at + interval '1 day'")
    capsys.readouterr()
    assert app.main(["--archive", str(tmp_path)]) == 0
    assert summary_of(capsys)["archived"] == 1500


def test_a_damaged_copy_stops_the_run(
    app: ModuleType, aged: psycopg.Connection[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = archive._Files.append

    def altered(self: Any, batch: Any) -> None:
        original(self, batch.slice(0, batch.num_rows - 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive._Files, "append", altered)
        assert app.main(["--archive", str(tmp_path)]) == 1
    assert "the archive differs from the database" in capsys.readouterr().err
    assert len(messages(aged)) == 1577
    assert archived(tmp_path) == []


def test_messages_removed_by_somebody_else_stop_the_run(
    aged: psycopg.Connection[Any], queen_dsn: str, tmp_path: Path
) -> None:
    (lane_id,) = aged.execute("SELECT id FROM queen.lanes WHERE name = 'b'").fetchone() or (0,)
    portion = archive.Portion([Range(lane_id, 40, 50)], [])
    with pytest.raises(ArchiveError, match="removed by somebody else"):
        archive.verify_portion(ConnectionInfo(queen_dsn), Archive(str(tmp_path)), portion)


@BOTH_SERVERS
def test_database_and_files_agree_on_checksums(
    aged: psycopg.Connection[Any], queen_dsn: str, tmp_path: Path
) -> None:
    aged.execute("SELECT queen.push('mails', ARRAY['\"\\u0041 ü\"'], ARRAY['odd'], ARRAY[E'a\\x1f\n'])")
    lanes = aged.execute(
        "SELECT lane_id, min(seq), max(seq) FROM queen.message_log GROUP BY lane_id"
    ).fetchall()
    ranges = [Range(*lane) for lane in lanes]
    info, copies = ConnectionInfo(queen_dsn), Archive(str(tmp_path))
    copies.prepare()
    archive.verify_portion(
        info, copies, archive.write_portion(info, copies, "20260101T000000Z-00000000", ranges)
    )


def test_foreign_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "queue=orders" / "day=2026-01-01").mkdir(parents=True)
    foreign = tmp_path / "queue=orders" / "day=2026-01-01" / "somebodys.parquet"
    own = foreign.with_name(f"20260101T000000Z-00000000-{'0' * 32}.parquet")
    foreign.touch()
    own.touch()
    assert Archive(str(tmp_path)).remove_leftovers([]) == 1
    assert (foreign.exists(), own.exists()) == (True, False)


def test_odd_names_are_folders_too() -> None:
    assert archive.folder_name("a/b=c ü") == "a%2Fb%3Dc%20%C3%BC"
    long_names = {archive.folder_name("ü" * 254 + end) for end in "ab"}
    assert len(long_names) == 2
    assert all(len(name) < 200 for name in long_names)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--chunk", "0"], "a number of messages from 1"),
        (["--archive", "nowhere://x/y"], "no files can be kept at 'nowhere://x/y'"),
        (["--archive", "/dev/null/x"], "no files can be kept at '/dev/null/x'"),
        (["--queue-name", "ordres"], "there is no queue 'ordres'"),
    ],
)
def test_mistakes_end_with_a_sentence_and_2(
    app: ModuleType,
    aged: psycopg.Connection[Any],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    try:
        code = app.main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    errors = capsys.readouterr().err.strip()
    assert sentence in errors
    assert "\n" not in errors


def test_a_manifest_comes_back_as_written() -> None:
    lane = archive.ArchivedLane(10, "2026-01-01T00:00:00+00:00", "orders", "a", 0, 1, 5)
    manifest = archive.Manifest("r", "2026-01-01T00:00:00+00:00", [lane], [ArchivedFile("queue=x/f", 5)])
    assert archive.Manifest.from_json(manifest.to_json()) == manifest


def test_the_dag_parses() -> None:
    bag = DagBag(dag_folder=str(dags_folder() / "queen_retention.py"))
    assert bag.import_errors == {}
    dag = bag.dags["queen_retention"]
    assert (dag.max_active_runs, dag.catchup) == (1, False)
    (task,) = dag.tasks
    assert task.application == str(spark_app("retention.py"))
