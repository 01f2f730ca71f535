"""What the end-to-end test starts can be killed one by one, and does not outlive the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from airflow_provider_queen.embedded.guard import GuardedFolder, process_started_at
from tests.e2e.processes import Processes

ROOT = Path(__file__).resolve().parents[2]
# Prints the number of its child, which is in a process group of its own, as Airflow's tasks are.
PARENT = """if True:
    import subprocess, time
    print(subprocess.Popen(["sleep", "300"], process_group=0).pid, flush=True)
    time.sleep(300)
"""
OWNER = f"""if True:
    import json, os, sys, time
    from airflow_provider_queen.embedded.guard import GuardedFolder
    from tests.e2e.processes import Processes
    folder = GuardedFolder("queen-e2e-")
    parent = Processes(folder, os.environ).start("parent", [sys.executable, "-c", {PARENT!r}])
    print(json.dumps([str(folder.path), parent]), flush=True)
    time.sleep(300)
"""


def child_of(folder: Path, name: str) -> int:
    log = folder / f"{name}.log"
    deadline = time.monotonic() + 30
    while not log.exists() or not log.read_text().endswith("\n"):
        assert time.monotonic() < deadline, f"{name} says nothing"
        time.sleep(0.02)
    return int(log.read_text())


def test_one_is_killed_with_its_children_and_the_others_end_with_the_block() -> None:
    with GuardedFolder("queen-e2e-") as folder:
        with Processes(folder, os.environ) as processes:
            pids = {name: processes.start(name, [sys.executable, "-c", PARENT]) for name in ("one", "two")}
            children = {name: child_of(folder.path, name) for name in pids}

            processes.kill("one")
            assert not process_started_at(pids["one"])
            assert not process_started_at(children["one"])
            assert process_started_at(children["two"])
            assert processes.ended() == []

            os.kill(pids["two"], signal.SIGKILL)
            deadline = time.monotonic() + 30
            while processes.ended() != ["two"]:
                assert time.monotonic() < deadline, "nobody notices"
                time.sleep(0.02)
        assert not process_started_at(children["two"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_all_end_with_their_owner(number: signal.Signals) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with owner:
        try:
            assert owner.stdout is not None
            path, parent = json.loads(owner.stdout.readline())
            folder = Path(path)
            child = child_of(folder, "parent")
            assert process_started_at(child)
            owner.send_signal(number)
            owner.wait(30)
        finally:
            owner.kill()
    deadline = time.monotonic() + 30
    while process_started_at(parent) or process_started_at(child) or folder.exists():
        assert time.monotonic() < deadline, "something is left"
        time.sleep(0.02)
