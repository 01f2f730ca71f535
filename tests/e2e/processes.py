"""Airflow's processes, started and killed one by one, and none of them left when the test is.

They share a session, as those of the demo do. Its leader is this file, run as a program: it starts what it is
told to, and ends the whole session when the process that tells it is gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from airflow_provider_queen.demo.session import end_session
from airflow_provider_queen.embedded.guard import GuardedFolder, process_started_at

_KILL_SECONDS = 15.0
_POLL_SECONDS = 0.02


class Processes:
    """Programs by name; all end with the ``with`` block, or with the folder's owner.

    :param folder: where they work and log; its guard ends them if this process cannot
    :param environment: of all of them
    """

    def __init__(self, folder: GuardedFolder, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._started: dict[str, tuple[int, str | None]] = {}
        self._leader = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder.path,
            env=dict(environment),
            start_new_session=True,
            text=True,
        )
        folder.watch(self._leader.pid)

    def start(self, name: str, command: Sequence[str]) -> int:
        """Start a program under a name of ours; its process id."""
        assert self._leader.stdin is not None
        assert self._leader.stdout is not None
        request = {"command": list(command), "log": str(self._log(name))}
        self._leader.stdin.write(json.dumps(request) + "\n")
        self._leader.stdin.flush()
        answer = self._leader.stdout.readline()
        assert answer, "the leader of the session has ended"
        pid = int(answer)
        self._started[name] = pid, process_started_at(pid)
        return pid

    def kill(self, name: str) -> None:
        """SIGKILL to it and to all its children; returns when none is left."""
        pid, _ = self._started.pop(name)
        leader = psutil.Process(pid)
        # First the parent, so that it starts no others.
        leader.suspend()
        family = [leader, *leader.children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        deadline = time.monotonic() + _KILL_SECONDS
        while any(process_started_at(process.pid) for process in family):
            assert time.monotonic() < deadline, f"{name} does not die"
            time.sleep(_POLL_SECONDS)

    def ended(self) -> list[str]:
        """Those that have ended by themselves."""
        return [
            name
            for name, (pid, started) in self._started.items()
            if started is None or process_started_at(pid) != started
        ]

    def logs(self) -> dict[str, str]:
        """What each has printed."""
        return {
            path.stem: path.read_text(errors="replace") for path in sorted(self._folder.path.glob("*.log"))
        }

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc_info: object) -> None:
        end_session(self._leader.pid)
        with self._leader:  # closes the pipes and waits
            self._folder.forget(self._leader.pid)

    def _log(self, name: str) -> Path:
        return self._folder.path / f"{name}.log"


def _lead() -> None:
    # The guard's signal, when the process that started us is gone.
    signal.signal(signal.SIGQUIT, lambda *_: end_session(os.getpid()))
    children = []  # kept: an abandoned Popen complains
    for line in sys.stdin:
        request = json.loads(line)
        with open(request["log"], "ab") as log:
            children.append(
                subprocess.Popen(
                    request["command"], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
                )
            )
        sys.stdout.write(f"{children[-1].pid}\n")
        sys.stdout.flush()
    end_session(os.getpid())


if __name__ == "__main__":
    _lead()
