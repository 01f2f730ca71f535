"""Our own PostgreSQL: starts anywhere, keeps what was committed, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from airflow_provider_queen.embedded import EmbeddedError
from airflow_provider_queen.embedded.guard import process_started_at
from airflow_provider_queen.embedded.postgres import (
    PostgresServer,
    bundled_postgres,
    find_system_postgres,
)

OWNER = """
import json, sys, time
from pathlib import Path
from airflow_provider_queen.embedded.postgres import PostgresServer

bin_dir = Path(sys.argv[1])
with PostgresServer(bin_dir) as server:
    print(json.dumps({"pid": server.pid, "folder": str(server.folder)}), flush=True)
    time.sleep(600)
"""


@pytest.fixture(params=["18", "15"])
def bin_dir(request: pytest.FixtureRequest) -> Path:
    if request.param == "18":
        return bundled_postgres()
    found = find_system_postgres()
    if not found:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no system PostgreSQL found")
    return found[0]


@pytest.fixture
def server(bin_dir: Path) -> Iterator[PostgresServer]:
    with PostgresServer(bin_dir) as server:
        yield server


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def setting(server: PostgresServer, name: str) -> str:
    with psycopg.connect(server.dsn()) as connection:
        row = connection.execute("SELECT current_setting(%s)", [name]).fetchone()
    assert row is not None
    return str(row[0])


@pytest.mark.postgres
def test_it_answers_and_is_as_durable_as_a_real_one(server: PostgresServer) -> None:
    assert setting(server, "server_version").split()[0] == server.version
    assert setting(server, "fsync") == "on"
    assert setting(server, "synchronous_commit") == "on"
    assert setting(server, "max_connections") == "200"
    assert setting(server, "listen_addresses") == "127.0.0.1"


@pytest.mark.postgres
def test_settings_override_the_defaults() -> None:
    with PostgresServer(settings={"max_connections": "17"}) as server:
        assert setting(server, "max_connections") == "17"


@pytest.mark.postgres
def test_nobody_enters_without_the_password(server: PostgresServer) -> None:
    for host in ("127.0.0.1", str(server.folder)):
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(host=host, port=server.port, user="postgres", dbname="postgres", password="wrong")


@pytest.mark.postgres
def test_the_uri_and_the_socket_lead_to_it_too(server: PostgresServer) -> None:
    with psycopg.connect(server.uri()) as connection:
        assert connection.info.port == server.port
    with psycopg.connect(server.dsn(), host=str(server.folder)) as connection:
        assert connection.info.host == str(server.folder)


@pytest.mark.postgres
@pytest.mark.parametrize("end", ["restart", "kill"])
def test_committed_rows_survive_and_the_dsn_stays_good(server: PostgresServer, end: str) -> None:
    dsn = server.create_database("kept")
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE t AS SELECT 7 AS n")
    if end == "kill":
        server.kill()
        server.start()
        assert "was interrupted" in server.log()
    else:
        server.restart()
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT n FROM t").fetchone() == (7,)


@pytest.mark.postgres
def test_close_leaves_nothing_and_may_be_repeated(bin_dir: Path) -> None:
    server = PostgresServer(bin_dir).start()
    pid, folder = server.pid, server.folder
    server.close()
    server.close()
    assert process_started_at(pid) is None
    assert not folder.exists()
    with pytest.raises(EmbeddedError, match="has not been started"):
        server.dsn()


@pytest.mark.postgres
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_an_owner_that_is_ended(bin_dir: Path, number: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(bin_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert owner.stdout is not None
    with owner.stdout:
        started = json.loads(owner.stdout.readline())
    assert process_started_at(started["pid"]) is not None

    owner.send_signal(number)
    owner.wait(60)

    wait_until(lambda: process_started_at(started["pid"]) is None)
    wait_until(lambda: not Path(started["folder"]).exists())


@pytest.mark.postgres
def test_a_server_that_cannot_start_says_why_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = PostgresServer(settings={"shared_buffers": "nonsense"})
    with pytest.raises(EmbeddedError, match="nonsense"):
        server.start()
    with pytest.raises(EmbeddedError, match="has not been started"):
        _ = server.folder


@pytest.mark.postgres
def test_a_long_temporary_folder_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with PostgresServer() as server:
        assert len(str(server.folder)) < 92
        assert setting(server, "port") == str(server.port)


@pytest.mark.postgres
@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts the server as someone else")
def test_root_may_use_an_installation_that_others_cannot_enter(tmp_path: Path) -> None:
    package = bundled_postgres().parent.parent
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / package.name).mkdir()
    shutil.copytree(bundled_postgres().parent, closed / package.name / bundled_postgres().parent.name)
    shutil.copytree(package.parent / f"{package.name}.libs", closed / f"{package.name}.libs")
    with PostgresServer(closed / package.name / bundled_postgres().parent.name / "bin") as server:
        assert setting(server, "port") == str(server.port)
    assert closed.stat().st_mode & 0o777 == 0o700


def test_the_environment_names_the_system_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = bundled_postgres()
    monkeypatch.setenv("QUEEN_TEST_PG_BIN", os.pathsep.join([str(other), str(other)]))
    assert find_system_postgres() == [other, other]
    monkeypatch.setenv("QUEEN_TEST_PG_BIN", str(tmp_path))
    with pytest.raises(EmbeddedError, match="no initdb and postgres"):
        find_system_postgres()


@pytest.mark.postgres
def test_the_two_servers_of_the_suite_are_different(
    postgres_18: PostgresServer, postgres_15: PostgresServer
) -> None:
    assert int(postgres_18.version.split(".")[0]) >= 18
    assert postgres_15.port != postgres_18.port


@pytest.mark.postgres
def test_each_test_has_an_empty_database(postgres_dsn: str) -> None:
    with psycopg.connect(postgres_dsn) as connection:
        connection.execute("CREATE SCHEMA queen")  # would fail if another test's database were reused
