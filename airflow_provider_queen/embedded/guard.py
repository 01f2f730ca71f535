"""A temporary folder, and the processes that work in it, that do not outlive the process that made them.

``atexit`` and ``finally`` cover a normal end and Ctrl-C, but not SIGTERM's default action, ``kill -9`` or a
crash of the interpreter. So each :class:`GuardedFolder` has a small child process, in a session of its own,
that waits on a pipe. However the owner ends, the kernel closes its end of the pipe; the child then stops the
processes that were reported to it and removes the folder.

The alternative, ``PR_SET_PDEATHSIG``, exists on Linux only, fires when the *thread* that started the process
ends, is forgotten when the process changes its user, and removes no folder.

This file is also that child's program. It imports only the standard library, so that it starts at once.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# PostgreSQL's immediate shutdown; most other programs end upon it too. Nothing needs saving: the folder goes.
_STOP_SIGNAL = signal.SIGQUIT
_STOP_SECONDS = 15.0
_REMOVE_SECONDS = 30.0
_POLL_SECONDS = 0.05


class GuardedFolder:
    """Owned by the process that creates it; a fork of that process may use the folder, but not end it.

    :param prefix: how the folder's name begins
    :param parent: where to create it; the system's temporary folder unless told
    """

    def __init__(self, prefix: str = "queen-", parent: Path | None = None) -> None:
        self._owner = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).resolve()
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # a Ctrl-C in the terminal goes to the whole group: not to the guard
            cwd="/",
        )
        # A fork holds a copy of the pipe's end: without this the guard would wait for the fork's end too.
        os.register_at_fork(after_in_child=_disowner(weakref.ref(self)))
        atexit.register(self.close)

    def watch(self, pid: int) -> None:
        """The guard is to stop this process if the owner ends."""
        self._tell(f"watch {pid}\n")

    def forget(self, pid: int) -> None:
        """The process has ended: its number may belong to another one from now on."""
        self._tell(f"forget {pid}\n")

    def close(self) -> None:
        """Stop what is still being watched and remove the folder. May be called twice."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        if self._guard.stdin and not self._guard.stdin.closed:
            self._guard.stdin.close()
        # The guard does the work here too: one way to clean up, exercised by every run.
        self._guard.wait()

    def _tell(self, line: str) -> None:
        if os.getpid() == self._owner and self._guard.stdin and not self._guard.stdin.closed:
            self._guard.stdin.write(line.encode())

    def _disown(self) -> None:
        if self._guard.stdin:
            self._guard.stdin.close()
        # Popen's destructor would otherwise warn, in the fork, of a child that is not the fork's.
        self._guard.returncode = 0

    def __enter__(self) -> GuardedFolder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def process_started_at(pid: int) -> str | None:
    """When the process started, in the kernel's ticks; ``None`` when it has ended.

    A number alone does not name a process: it is given to another one later. An ended process that nobody
    has waited for (a zombie; in a container often for ever) counts as ended.
    """
    try:
        # The second field is the program's name in parentheses and may hold spaces and parentheses itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _started_at_without_proc(pid)
    return None if fields[0] == "Z" else fields[19]


def _started_at_without_proc(pid: int) -> str | None:
    answer = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True)
    state, _, started = answer.stdout.strip().partition(" ")
    return started.strip() if started and not state.startswith("Z") else None


def _disowner(reference: weakref.ref[GuardedFolder]) -> Callable[[], None]:
    # A weak reference: what is registered for forks can never be taken back.
    def disown() -> None:
        folder = reference()
        if folder is not None:
            folder._disown()

    return disown


def _guard(folder: Path) -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # only the owner's end ends the guard
    watched: dict[int, str] = {}
    for line in sys.stdin:
        _note(watched, *line.split())
    for pid, started in watched.items():
        _stop(pid, started)
    _remove(folder)


def _note(watched: dict[int, str], verb: str, number: str) -> None:
    pid = int(number)
    started = process_started_at(pid)
    if verb == "watch" and started is not None:
        watched[pid] = started
    else:
        watched.pop(pid, None)


def _stop(pid: int, started: str) -> None:
    for number in (_STOP_SIGNAL, signal.SIGKILL):
        deadline = time.monotonic() + _STOP_SECONDS
        with suppress(ProcessLookupError):
            if process_started_at(pid) == started:
                os.kill(pid, number)
        while process_started_at(pid) == started:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        else:
            return


def _remove(folder: Path) -> None:
    # Again and again: a process that was being started when the owner ended may still write for a moment.
    # (Such a PostgreSQL ends by itself: it checks that its lock file is still there.)
    deadline = time.monotonic() + _REMOVE_SECONDS
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    _guard(Path(sys.argv[1]))
