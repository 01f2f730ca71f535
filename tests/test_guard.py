"""Guarded folders: nothing outlives the process that made it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_provider_queen.embedded.guard import GuardedFolder, process_started_at

DEAF = """
import pathlib, signal, sys, time
signal.signal(signal.SIGQUIT, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


def test_close_removes_the_folder_and_stops_what_was_watched() -> None:
    folder = GuardedFolder()
    (folder.path / "file").write_text("x")
    process = subprocess.Popen(["sleep", "600"])
    folder.watch(process.pid)

    folder.close()
    folder.close()

    assert not folder.path.exists()
    assert process.wait(10) == -signal.SIGQUIT


def test_a_forgotten_process_is_left_alone() -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        with GuardedFolder() as folder:
            folder.watch(process.pid)
            folder.forget(process.pid)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_process_that_ignores_the_signal_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The guard itself runs with its own constants: the function is what is tested here.
    from airflow_provider_queen.embedded import guard

    monkeypatch.setattr(guard, "_STOP_SECONDS", 0.3)
    ready = tmp_path / "ready"
    process = subprocess.Popen([sys.executable, "-c", DEAF, str(ready)])
    while not ready.exists():
        assert process.poll() is None
    started = process_started_at(process.pid)
    assert started is not None

    guard._stop(process.pid, started)

    assert process.wait(10) == -signal.SIGKILL


def test_a_number_that_now_names_another_process_is_not_signalled() -> None:
    from airflow_provider_queen.embedded import guard

    process = subprocess.Popen(["sleep", "600"])
    try:
        guard._stop(process.pid, "another start")
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_zombie_counts_as_ended() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and not yet collected
    assert process_started_at(process.pid) is None
    process.wait()


def test_a_fork_neither_ends_nor_holds_the_folder() -> None:
    folder = GuardedFolder()
    release, hold = os.pipe()
    fork = os.fork()
    if fork == 0:  # pragma: no cover
        os.close(hold)
        folder.close()
        os.read(release, 1)  # lives on after the owner has closed the folder
        os._exit(0)
    try:
        os.close(release)
        assert folder.path.exists()
        folder.close()  # returns only when the guard has seen the end of the pipe
        assert not folder.path.exists()
    finally:
        os.close(hold)
        os.waitpid(fork, 0)
