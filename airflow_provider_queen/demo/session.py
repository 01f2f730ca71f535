"""A program in a session of its own, and how to end all of that session.

A session, because Airflow puts each task into a process group of its own, and Spark starts processes that
outlive the one that started them: only the session stays the same for all of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from airflow_provider_queen.embedded.guard import GuardedFolder

_END_SECONDS = 15.0
_POLL_SECONDS = 0.05


class Session:
    """The worker and whatever it starts; ends with the ``with`` block, or with the folder's owner.

    :param folder: where it works; its guard ends the worker if this process cannot
    :param steps: what the worker is to do
    :param environment: of the worker and all its children
    :param log: takes what they all print
    """

    def __init__(
        self, folder: GuardedFolder, steps: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self._folder = folder
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "airflow_provider_queen.demo.worker", *steps],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=folder.path,
                env=dict(environment),
                start_new_session=True,
                text=True,
            )
        folder.watch(self._process.pid)

    def reports(self) -> Iterator[dict[str, Any]]:
        """What the worker reports, until it ends."""
        assert self._process.stdout is not None  # noqa: S101
        for line in self._process.stdout:
            yield json.loads(line)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        end_session(self._process.pid)
        self._process.wait()
        self._folder.forget(self._process.pid)
        if self._process.stdout is not None:
            self._process.stdout.close()


def end_session(leader: int) -> None:
    """Kill every process of the session: what they work on is thrown away, no end needs to be orderly."""
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        # Again until there is none: one of them may have been starting another.
        members = _members(leader)
        others = [pid for pid in members if pid != os.getpid()]
        if not others:
            break
        for pid in others:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    if leader == os.getpid():
        os.kill(leader, signal.SIGKILL)


def _members(leader: int) -> list[int]:
    if not Path("/proc/self/stat").exists():
        return _group_members(leader)
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if _session_of(path) == leader]


def _session_of(process: Path) -> int | None:
    """The session's leader; nothing for a process that has ended."""
    try:
        # The second field is the program's name in parentheses and may hold spaces and parentheses itself.
        state, _, _, session, *_ = (process / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state == "Z" else int(session)


def _group_members(leader: int) -> list[int]:
    """Where there is no /proc, nobody tells the session: the process group at least."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,pgid=,stat="], capture_output=True, text=True).stdout
    rows = (line.split() for line in listing.splitlines())
    return [int(pid) for pid, group, state, *_ in rows if int(group) == leader and not state.startswith("Z")]
