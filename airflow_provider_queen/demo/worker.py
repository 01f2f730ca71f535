"""The demo's worker: does the steps that its arguments name, one after the other.

Its standard output is for reports, one JSON object a line; whatever Airflow and Spark print goes to standard
error, which is the log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from typing import Any, TextIO

from airflow_provider_queen.demo.session import end_session
from airflow_provider_queen.resources import dags_folder

# Without their log servers: those listen on every address of the machine.
PROCESSES = {
    "api-server": [],
    "scheduler": ["--skip-serve-logs"],
    "dag-processor": [],
    "triggerer": ["--skip-serve-logs"],
}
# In this order; and what to say of the values that its tasks returned.
DAGS: dict[str, Callable[[dict[str, Any]], str]] = {
    "queen_migrate": lambda tasks: "schema queen now at {to}".format_map(tasks["migrate"]),
    "example_queen_push_pop": lambda tasks: (
        f"pushed {len(tasks['push'])}, acknowledged {tasks['pop']['completed']}"
    ),
    "example_queen_gate": lambda tasks: (
        f"pushed {len(tasks['push'])}, sensed {tasks['enough']['pending']},"
        f" acknowledged {tasks['load']['completed']}"
    ),
    "queen_metrics": lambda tasks: f"Spark wrote {tasks['compute_metrics']['written']} rows of metrics",
}
READY_SECONDS = 180.0
_POLL_SECONDS = 0.5


class DemoError(Exception):
    """A step of the demo failed; the log says more."""


class Reports:
    """The way to the process that started us."""

    def __init__(self) -> None:
        self._output: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(self, kind: str, **values: Any) -> None:
        try:
            self._output.write(json.dumps({"kind": kind, **values}) + "\n")
        except BrokenPipeError:
            end_session(os.getpid())  # nobody reads: we were left behind


def main() -> int:
    # The guard's signal, when the process that started us is gone: all of the session is to end.
    signal.signal(signal.SIGQUIT, lambda *_: end_session(os.getpid()))
    reports = Reports()
    try:
        for step in sys.argv[1:]:
            STEPS[step](reports)
    except DemoError as error:
        reports.send("failed", reason=str(error))
        return 1
    except Exception as error:
        traceback.print_exc()
        sentence = str(error).strip().partition("\n")[0]
        reports.send("failed", reason=f"{type(error).__name__}: {sentence}")
        return 1
    return 0


def create_tables(reports: Reports) -> None:
    """Airflow's own, in its metadata database."""
    reports.send("step", text="creating Airflow's own tables")
    from airflow.utils.db import initdb

    initdb()


def run_dags(reports: Reports) -> None:
    """Each Dag once, then what the queues look like."""
    for dag_id, summary in DAGS.items():
        reports.send("step", text=f"running the Dag {dag_id}")
        started = time.monotonic()
        returned = run_dag(dag_id)
        reports.send("dag", dag_id=dag_id, result=summary(returned), seconds=time.monotonic() - started)
    for row in queues():
        reports.send("queue", **row)
    reports.send("finished")


def run_dag(dag_id: str) -> dict[str, Any]:
    """Run a Dag of the package, each task in this process; what each task returned."""
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(str(dags_folder() / f"{dag_id}.py"))
    if bag.import_errors:
        raise DemoError(f"the Dag {dag_id} cannot be imported")
    dag = bag.dags[dag_id]
    for task in dag.tasks:
        task.retries = 0  # who watches does not want to wait five minutes for the second failure
    run = dag.test()
    tasks = run.get_task_instances()
    if run.state != "success":
        failed = sorted(task.task_id for task in tasks if task.state == "failed")
        raise DemoError(f"the Dag {dag_id} failed in its task {', '.join(failed) or '?'}")
    return {task.task_id: task.xcom_pull(task_ids=task.task_id) for task in tasks}


def queues() -> list[dict[str, Any]]:
    """What the database itself says of each queue."""
    from airflow_provider_queen.hooks.queen import QueenHook

    hook = QueenHook()
    try:
        rows = []
        for queue in hook.list_queues():
            stats = hook.stats(queue.name)
            pushed = {(row.partition, row.priority): row.last_seq for row in stats}
            rows.append(
                {
                    "queue_name": queue.name,
                    "pushed": sum(pushed.values()),
                    "popped": sum(row.total_completed for row in stats),
                    "pending": sum(row.pending for row in stats),
                }
            )
        return rows
    finally:
        hook.close()


def serve(reports: Reports) -> None:
    """Run Airflow's processes until one of them ends or we are ended."""
    reports.send("step", text="starting Airflow's processes")
    running = {
        name: subprocess.Popen(["airflow", name, *options], stdout=sys.stderr)
        for name, options in PROCESSES.items()
    }
    deadline = time.monotonic() + READY_SECONDS
    ready = False
    while True:
        for name, process in running.items():
            if process.poll() is not None:
                raise DemoError(f"airflow {name} ended with exit code {process.returncode}")
        if not ready and is_healthy(os.environ["AIRFLOW__API__BASE_URL"]):
            ready = True
            reports.send("ready")
        if not ready and time.monotonic() > deadline:
            raise DemoError(f"Airflow was not ready in {READY_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)


def is_healthy(url: str) -> bool:
    """Whether the API answers, and says of every other process that it runs."""
    try:
        with urllib.request.urlopen(f"{url}/api/v2/monitor/health", timeout=5) as answer:  # noqa: S310
            states = json.load(answer)
    except OSError:
        return False
    parts = ("scheduler", "dag_processor", "triggerer")
    return all(states.get(part, {}).get("status") == "healthy" for part in parts)


STEPS: dict[str, Callable[[Reports], None]] = {"tables": create_tables, "dags": run_dags, "serve": serve}

if __name__ == "__main__":
    sys.exit(main())
