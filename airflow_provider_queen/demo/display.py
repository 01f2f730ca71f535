"""What the user of the demo sees: a line per step, then what happened, as two small tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from airflow_provider_queen.demo.environment import USER, Login


class Failed(Exception):
    """The demo did not come to its end; the message is the sentence for the user."""


class Display:
    """Takes the worker's reports. ``finished`` once the Dags ran, ``ready`` once the UI answers."""

    def __init__(self, login: Login | None = None) -> None:
        self.finished = False
        self.ready = False
        self._login = login
        self._started = time.monotonic()
        self._dags: list[tuple[str, str, str]] = []
        self._queues: list[tuple[str, str, str, str]] = []

    def step(self, text: str) -> None:
        print(f"{time.monotonic() - self._started:6.1f} s  {text}", flush=True)

    def take(self, report: dict[str, Any]) -> None:
        kind = report.pop("kind")
        if kind == "failed":
            raise Failed(report["reason"])
        getattr(self, f"_take_{kind}")(**report)

    def _take_step(self, text: str) -> None:
        self.step(text)

    def _take_dag(self, dag_id: str, result: str, seconds: float) -> None:
        self._dags.append((dag_id, result, f"{seconds:.1f}"))

    def _take_queue(self, queue_name: str, pushed: int, popped: int, pending: int) -> None:
        self._queues.append((queue_name, str(pushed), str(popped), str(pending)))

    def _take_finished(self) -> None:
        self.finished = True
        print()
        _table(("Dag", "what it did", "seconds"), self._dags, numbers={2})
        _table(("queue", "pushed", "popped", "pending"), self._queues, numbers={1, 2, 3})

    def _take_ready(self) -> None:
        self.ready = True
        self.step("Airflow answers")
        if self._login is not None:
            print(f"\n{self._login.url}  user {USER}  password {self._login.password}")
            print("Ctrl-C stops all of it.", flush=True)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: set[int]) -> None:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, ["-" * width for width in widths], *rows):
        cells = (
            cell.rjust(width) if position in numbers else cell.ljust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells).rstrip())
    print(flush=True)
