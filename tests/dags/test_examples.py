"""Every example Dag: parsed where there is nothing, and run for real, twice."""

from __future__ import annotations

import os
import re
import textwrap
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import DAG, PokeReturnValue

from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.resources import dags_folder
from airflow_provider_queen.sensors.backlog import QueenBacklogSensor
from airflow_provider_queen.triggers.messages import QueenMessageTrigger
from tests.triggers.conftest import postgres_server, queen  # noqa: F401

FILES = sorted(dags_folder().glob("example_queen_*.py"))
CONCEPTS = {
    "push_pop",
    "gate",
    "event_driven",
    "exactly_once",
    "fan_out",
    "mapped",
    "dead_letters",
    "delayed_windowed",
    "taskflow",
}


@pytest.fixture(scope="module")
def examples() -> dict[str, DAG]:
    """All of them, parsed without a connection to anything."""
    dags: dict[str, DAG] = {}
    with pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith("AIRFLOW_CONN_")]:
            environment.delenv(name)
        for file in FILES:
            bag = DagBag(dag_folder=str(file))
            assert bag.import_errors == {}
            dags |= bag.dags
    return dags


def test_there_is_one_for_each_concept(examples: dict[str, DAG]) -> None:
    assert {f"example_queen_{concept}" for concept in CONCEPTS} <= set(examples)
    assert {file.stem for file in FILES} == {f"example_queen_{concept}" for concept in CONCEPTS}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_the_docs_quote_has_a_beginning_and_an_end(file: Path) -> None:
    markers = re.findall(r"# \[(START|END) (\w+)\]", file.read_text())
    assert markers
    opened = [name for kind, name in markers if kind == "START"]
    assert len(opened) == len(set(opened))
    assert markers == [(kind, name) for name in opened for kind in ("START", "END")]


@pytest.mark.parametrize(
    "page", sorted((dags_folder().parent / "docs").glob("*.md")), ids=lambda page: page.stem
)
def test_the_docs_quote_what_is_there(page: Path) -> None:
    quotes = re.findall(r"<!-- dags/(\S+) (\w+) -->\n```python\n(.*?)```", page.read_text(), re.DOTALL)
    for file, name, quoted in quotes:
        marked = rf"^ *# \[START {name}\]\n(.*?)^ *# \[END {name}\]$"
        there = re.search(marked, (dags_folder() / file).read_text(), re.DOTALL | re.MULTILINE)
        assert there is not None
        assert quoted.strip() == textwrap.dedent(there[1]).strip()


def test_each_says_what_it_shows(examples: dict[str, DAG]) -> None:
    for dag in examples.values():
        assert dag.doc_md
        assert {"queen", "example"} <= set(dag.tags)
        assert dag.catchup is False


def test_the_event_driven_one_watches_by_our_trigger(examples: dict[str, DAG]) -> None:
    (asset,) = examples["example_queen_event_driven"].schedule
    (watcher,) = asset.watchers
    same = QueenMessageTrigger(queue_name="example_event_driven", consumer_group="billing")
    assert watcher.trigger.serialize() == same.serialize()


class Runner:
    """Runs a Dag in this process: each task for real, without a scheduler."""

    def __init__(self, dags: dict[str, DAG]) -> None:
        self.dags = dags

    def __call__(self, dag_id: str) -> dict[str, Any]:
        """What each task returned; for a mapped one, a list."""
        run = self.dags[dag_id].test()
        instances = run.get_task_instances()
        assert {task.task_id: str(task.state) for task in instances if task.state != "success"} == {}
        assert str(run.state) == "success"
        returned: dict[str, Any] = {}
        for task in instances:
            value = task.xcom_pull(task_ids=task.task_id, map_indexes=task.map_index)
            if task.map_index < 0:
                returned[task.task_id] = value
            else:
                returned.setdefault(task.task_id, []).append(value)
        return returned


@pytest.fixture
def run(airflow_db: None, examples: dict[str, DAG], queen: Any) -> Runner:  # noqa: F811
    return Runner(examples)


pytestmark = [pytest.mark.airflow, pytest.mark.postgres]


def counted(result: Any) -> tuple[int, int, int]:
    return result["completed"], result["failed"], result["forwarded"]


@pytest.mark.slow
def test_all_of_them_run(run: Runner) -> None:
    for _ in range(2):  # what one run leaves behind does not hinder the next
        returned = run("example_queen_push_pop")
        assert len(set(returned["push"])) == 3
        assert counted(returned["pop"]) == (3, 0, 0)

        returned = run("example_queen_gate")
        assert returned["enough"]["pending"] == 10
        assert returned["load"]["completed"] == 10
        assert returned["drained"]["pending"] == 0

        run("example_queen_event_driven_producer")
        assert run("example_queen_event_driven")["pop"]["completed"] == 20

        returned = run("example_queen_exactly_once")
        assert counted(returned["price"]) == (2, 0, 2)
        assert counted(returned["ship"]) == (2, 0, 0)
        received, priced = "example_exactly_once_received", "example_exactly_once_priced"
        assert [step.split()[0] for step in returned["trace"]] == [received, received, priced, priced]

        returned = run("example_queen_fan_out")
        assert returned["bill"]["completed"] == returned["ship"]["completed"] == 6

        returned = run("example_queen_mapped")
        assert returned["partitions_with_messages"] == ["customer-1", "customer-2", "customer-3"]
        assert [counted(one) for one in returned["pop"]] == [(2, 0, 0)] * 3

        returned = run("example_queen_dead_letters")
        assert counted(returned["fail"])[1] == 1
        assert len(returned["show"]) == 1
        assert "ValueError" in returned["show"][0]
        assert len(returned["requeue"]) == 1
        assert counted(returned["succeed"]) == (1, 0, 0)

        returned = run("example_queen_delayed_windowed")
        assert returned["pop_delayed"]["completed"] == 1
        assert returned["pop_windowed"]["completed"] == 5

        returned = run("example_queen_taskflow")
        assert returned["average"]["forwarded"] == 1
        assert returned["report"] == [21.5]

    with closing(QueenHook()) as hook:
        left = {queue.name: hook.depth(queue.name).pending for queue in hook.list_queues()}
    # Nobody reads these two in queue mode.
    assert left == dict.fromkeys(left, 0) | {"example_event_driven": 40, "example_fan_out": 12}


@pytest.mark.slow
def test_a_deferred_sensor_goes_on(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    deferred = []

    def too_early(self: QueenBacklogSensor, context: Any) -> PokeReturnValue:
        deferred.append(self.task_id)
        return PokeReturnValue(is_done=False)

    monkeypatch.setattr(QueenBacklogSensor, "_poke_before_deferring", too_early)
    assert run("example_queen_gate")["enough"]["pending"] == 10
    assert deferred == ["enough"]
