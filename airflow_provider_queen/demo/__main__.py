"""Everything once, from nothing: PostgreSQL, Airflow, a queue, a Spark job; nothing is left afterwards.

Exit code 0: done, 1: failed (one sentence says what, and where the log is), 130: interrupted.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from airflow_provider_queen.demo.display import Display, Failed
from airflow_provider_queen.demo.environment import Login, prepare
from airflow_provider_queen.demo.session import Session
from airflow_provider_queen.embedded import EmbeddedError
from airflow_provider_queen.embedded.guard import GuardedFolder
from airflow_provider_queen.embedded.postgres import PostgresServer

INTERRUPTED = 130
STEPS = ["tables", "dags"]
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m airflow_provider_queen.demo", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--ui", action="store_true", help="leave Airflow's UI running until Ctrl-C")
    login = Login.create() if parser.parse_args(arguments).ui else None
    display = Display(login)
    for number in _INTERRUPTS:
        # Also where a shell started us with Ctrl-C ignored; a hang-up that is ignored, by nohup, stays so.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        demo(display, login)
    except KeyboardInterrupt:
        print("\nstopped, nothing is left running", flush=True)
        return 0 if display.ready else INTERRUPTED
    except (Failed, EmbeddedError) as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    return 0


def demo(display: Display, login: Login | None) -> None:
    display.step("starting PostgreSQL")
    with GuardedFolder("queen-demo-") as folder, PostgresServer() as server:
        log = folder.path / "log"
        environment = prepare(folder.path, server, login)
        steps = [*STEPS, *(["serve"] if login else [])]
        try:
            with Session(folder, steps, environment, log) as session:
                for report in session.reports():
                    display.take(report)
            if not display.finished:
                raise Failed("its worker was killed")
        except Failed as error:
            raise Failed(f"{error}; the log is {_keep(log, server)}") from None


def _keep(log: Path, server: PostgresServer) -> str:
    """The log outside of the folder, which goes."""
    with tempfile.NamedTemporaryFile("w", prefix="queen-demo-", suffix=".log", delete=False) as kept:
        kept.write(log.read_text(errors="replace"))
        kept.write(f"\n\nPostgreSQL's log:\n{server.log()}")
    return kept.name


def _interrupt(number: int, frame: object) -> None:
    # Once: a second Ctrl-C must not stop the cleaning up.
    for interrupt in _INTERRUPTS:
        signal.signal(interrupt, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
