"""The sensor in its three modes."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from airflow.sdk import DAG, task
from airflow.sdk.exceptions import (
    AirflowRescheduleException,
    AirflowSensorTimeout,
    AirflowSkipException,
    TaskDeferred,
)

from airflow_provider_queen.client import QueenClient
from airflow_provider_queen.exceptions import InvalidOptionError, QueenError, QueueNotFoundError
from airflow_provider_queen.sensors.backlog import QueenBacklogSensor
from airflow_provider_queen.triggers.backlog import QueenBacklogTrigger
from tests.triggers.conftest import postgres_server, queen  # noqa: F401

LONG = 3600


def sensor(**kwargs: Any) -> QueenBacklogSensor:
    defaults = {"task_id": "gate", "queue_name": "orders", "poke_interval": LONG, "deferrable": False}
    return QueenBacklogSensor(**(defaults | kwargs))


class FirstPoke:
    """A task instance that was never rescheduled."""

    def get_first_reschedule_date(self, context: Any) -> None:
        return None


CONTEXT: Any = {"ti": FirstPoke()}


@pytest.mark.parametrize(
    ("kwargs", "complaint"),
    [
        ({}, "no condition is given"),
        ({"queue_name": None, "min_pending": 1}, "name a queue"),
        ({"namespace": "shop", "min_pending": 1}, "name a queue or a namespace"),
        ({"min_pending": -1}, "min_pending is -1"),
        ({"max_pending": 1.5}, "max_pending is 1.5"),
        ({"min_pending": 2, "max_pending": 1}, "no backlog is both"),
    ],
)
def test_mistakes_are_found_when_the_dag_is_parsed(kwargs: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidOptionError, match=complaint):
        sensor(**kwargs)


def test_what_is_not_known_yet_is_checked_later() -> None:
    with DAG("later"):

        @task
        def choose() -> str:
            return "orders"

        QueenBacklogSensor(task_id="gate", queue_name=choose(), min_pending=1)
    gate = sensor(min_pending="{{ params.least }}")
    gate.render_template_fields({"params": {"least": "many"}})
    with pytest.raises(InvalidOptionError, match="min_pending is 'many'"):
        gate.execute(CONTEXT)


def test_every_field_that_names_something_is_templated() -> None:
    templated = sensor(
        queue_name=None,
        namespace="{{ x }}",
        task="{{ x }}-t",
        consumer_group="{{ x }}-g",
        min_pending="{{ n }}",
        max_pending="{{ n }}",
        min_oldest_age_seconds="{{ n }}",
        min_dead_letters="{{ n }}",
        queen_conn_id="{{ x }}_conn",
    )
    templated.render_template_fields({"x": "shop", "n": 7})
    assert (templated.namespace, templated.task, templated.consumer_group) == ("shop", "shop-t", "shop-g")
    assert templated.queen_conn_id == "shop_conn"
    condition = templated._condition()
    assert (condition.min_pending, condition.max_pending, condition.min_dead_letters) == (7, 7, 7)
    assert condition.min_oldest_age_seconds == 7.0


def test_it_survives_the_serialization_of_its_dag() -> None:
    from airflow.serialization.serialized_objects import DagSerialization

    with DAG("gated", start_date=datetime(2025, 1, 1, tzinfo=UTC)) as dag:
        QueenBacklogSensor(task_id="gate", namespace="shop", task="bill", min_pending=1)
        QueenBacklogSensor.partial(task_id="mapped", max_pending=0).expand(queue_name=["a", "b"])
    restored = DagSerialization.from_dict(DagSerialization.to_dict(dag))
    assert set(restored.task_dict) == {"gate", "mapped"}


def test_deferrable_is_the_installation_s_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    import inspect

    default = inspect.signature(QueenBacklogSensor).parameters["deferrable"].default
    assert default is False  # as in Airflow's own configuration, which is read at import


@pytest.mark.postgres
@pytest.mark.usefixtures("queen")
@pytest.mark.parametrize("deferrable", [False, True])
def test_it_returns_the_depth(queen: QueenClient, deferrable: bool) -> None:  # noqa: F811
    queen.push("orders", [{"payload": 1}])
    depth = sensor(min_pending=1, deferrable=deferrable).execute(CONTEXT)
    assert depth.pop("oldest_age_seconds") >= 0
    assert depth == {"pending": 1, "in_flight": 0, "dead_letters": 0}


@pytest.mark.postgres
@pytest.mark.parametrize("where", [{}, {"queue_name": None, "namespace": "shop"}, {"consumer_group": "g"}])
def test_in_mode_poke_a_push_ends_its_sleep(queen: QueenClient, where: dict[str, Any]) -> None:  # noqa: F811
    pushing = threading.Timer(0.5, queen.push, ("orders", [{"payload": 1}]))
    pushing.start()
    begun = time.monotonic()
    assert sensor(min_pending=1, **where).execute(CONTEXT)["pending"] == 1
    assert time.monotonic() - begun < 20
    pushing.join()


@pytest.mark.postgres
@pytest.mark.usefixtures("queen")
def test_in_mode_poke_it_times_out() -> None:
    with pytest.raises(AirflowSensorTimeout):
        sensor(min_pending=1, poke_interval=0.2, timeout=0.5).execute(CONTEXT)
    with pytest.raises(AirflowSkipException):
        sensor(min_pending=1, poke_interval=0.2, timeout=0.5, soft_fail=True).execute(CONTEXT)


@pytest.mark.postgres
@pytest.mark.usefixtures("queen")
def test_in_mode_reschedule_it_gives_up_its_slot() -> None:
    with pytest.raises(AirflowRescheduleException) as raised:
        sensor(min_pending=1, mode="reschedule").execute(CONTEXT)
    assert raised.value.reschedule_date > datetime.now(UTC) + timedelta(seconds=LONG - 60)


@pytest.mark.postgres
@pytest.mark.usefixtures("queen")
def test_deferrable_it_goes_to_the_triggerer() -> None:
    gate = sensor(
        consumer_group="audit", min_pending=1, min_oldest_age_seconds="5", deferrable=True, timeout=600
    )
    with pytest.raises(TaskDeferred) as raised:
        gate.execute(CONTEXT)
    assert raised.value.method_name == "execute_complete"
    assert raised.value.timeout == timedelta(seconds=600)
    assert raised.value.kwargs is None
    same = QueenBacklogTrigger(
        queue_name="orders",
        consumer_group="audit",
        min_pending=1,
        min_oldest_age_seconds=5.0,
        poll_interval=LONG,
    )
    assert raised.value.trigger.serialize() == same.serialize()


@pytest.mark.postgres
@pytest.mark.usefixtures("queen")
@pytest.mark.parametrize("deferrable", [False, True])
def test_a_queue_that_does_not_exist(deferrable: bool) -> None:
    gate = {"queue_name": "order", "min_pending": 1, "deferrable": deferrable}
    with pytest.raises(QueueNotFoundError):
        sensor(**gate).execute(CONTEXT)
    with pytest.raises(AirflowSkipException):
        sensor(**gate, never_fail=True).execute(CONTEXT)


@pytest.mark.postgres
@pytest.mark.usefixtures("queen")
def test_a_silent_failure_is_waited_out_in_the_triggerer_too() -> None:
    with pytest.raises(TaskDeferred):
        sensor(queue_name="order", min_pending=1, deferrable=True, silent_fail=True).execute(CONTEXT)


def test_it_needs_only_the_event() -> None:
    event = {"status": "success", "pending": 3, "in_flight": 0, "dead_letters": 0, "oldest_age_seconds": 1.0}
    assert sensor(min_pending=1).execute_complete({}, event) == {
        "pending": 3,
        "in_flight": 0,
        "dead_letters": 0,
        "oldest_age_seconds": 1.0,
    }
    error = {"status": "error", "message": "there is no queue 'orders'"}
    with pytest.raises(QueenError, match="no queue 'orders'"):
        sensor(min_pending=1).execute_complete({}, error)
    with pytest.raises(AirflowSkipException):
        sensor(min_pending=1, never_fail=True).execute_complete({}, error)
