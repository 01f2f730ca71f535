"""Popping in a task: processing, partial failure, forwarding, leases, deferral, and being killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowSkipException, AirflowTaskTimeout, TaskDeferred
from airflow.serialization.serialized_objects import DagSerialization

from airflow_provider_queen.client import Message
from airflow_provider_queen.exceptions import (
    InvalidOptionError,
    ProcessingError,
    QueenError,
    QueueFullError,
    QueueNotFoundError,
)
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.operators import _consumer
from airflow_provider_queen.operators._leases import LeaseKeeper, LeaseMemory
from airflow_provider_queen.operators.pop import QueenPopOperator
from airflow_provider_queen.triggers.backlog import QueenBacklogTrigger
from tests.airflow_tasks import Figures, make_context

TRACE = str(uuid.uuid4())


def pop(**parameters: Any) -> QueenPopOperator:
    return QueenPopOperator(**{"task_id": "pop", "queue_name": "orders", **parameters})


@pytest.fixture
def orders(hook: QueenHook) -> QueenHook:
    hook.configure_queue("orders", retry_delay=60_000)
    hook.configure_queue("next")
    return hook


def fill(hook: QueenHook, count: int, partition: str = "Default", **message: Any) -> None:
    hook.push("orders", [{"payload": {"n": n}, "partition": partition, **message} for n in range(count)])


def in_flight(hook: QueenHook) -> tuple[int, int]:
    depth = hook.depth("orders")
    return depth.pending, depth.in_flight


def nothing(message: Any) -> None:
    """A consumer that likes everything."""


# What is checked at parse time


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"queue_name": None}, "name a queue"),
        ({"namespace": "billing"}, "name a queue or a namespace"),
        ({"queue_name": "x" * 300}, "300 characters"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_messages": -1}, "max_messages is -1"),
        ({"max_messages": None}, "needs process"),
        ({"max_partitions": True}, "max_partitions is True"),
        ({"lease_seconds": 0}, "lease_seconds is 0"),
        ({"wait_seconds": -1}, "wait_seconds is -1"),
        ({"subscription_mode": "latest"}, "unknown subscription_mode 'latest'"),
        ({"subscription_mode": "timestamp"}, "subscription_from is None"),
        ({"forward_to": "next"}, "forward_to needs process"),
        ({"process": "print"}, "process is a str"),
        ({"process": nothing, "process_batch": nothing}, "choose one"),
        ({"deferrable": True, "partition": "a"}, "leave out"),
    ],
)
def test_literals_are_checked_when_the_dag_is_parsed(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        pop(**parameters)


def test_templates_wait_until_the_task_runs() -> None:
    operator = pop(
        queue_name="{{ a }}",
        consumer_group="{{ a }}",
        partition="{{ a }}",
        subscription_mode="timestamp",
        subscription_from="{{ since }}",
        forward_to="{{ a }}",
        process=nothing,
        queen_conn_id="{{ a }}",
    )
    operator.render_template_fields({"a": "x", "since": "2025-01-01T00:00+00:00"})
    assert {operator.queue_name, operator.consumer_group, operator.partition, operator.forward_to} == {"x"}
    assert operator.subscription_from == "2025-01-01T00:00+00:00"
    assert operator.process is nothing


def test_a_dag_with_it_is_serialised_the_same_each_time() -> None:
    def serialised() -> Any:
        with DAG("shop", schedule=None, start_date=datetime(2025, 1, 1, tzinfo=UTC)) as dag:
            pop(process=nothing, forward_to="next", deferrable=True)
        return DagSerialization.to_dict(dag)

    first = serialised()
    assert first == serialised()
    operator = DagSerialization.from_dict(first).get_task("pop")
    assert (operator.queue_name, operator.forward_to) == ("orders", "next")


# Processing


@pytest.mark.postgres
def test_each_message_is_processed_in_order_and_acknowledged(orders: QueenHook, figures: Figures) -> None:
    fill(orders, 5)
    fill(orders, 3, partition="b")
    seen: list[tuple[str, int]] = []

    def process(message: Message, run_id: str) -> None:
        assert run_id == "manual__1"
        seen.append((message.partition, message.payload["n"]))

    counts = pop(process=process, batch_size=2).execute(make_context())
    assert [n for name, n in seen if name == "Default"] == list(range(5))
    assert [n for name, n in seen if name == "b"] == list(range(3))
    assert counts["popped"] == counts["completed"] == 8
    assert in_flight(orders) == (0, 0)
    assert figures.sent == {"queen.popped": 8, "queen.completed": 8, "queen.pending": 0}
    assert figures.tags["queen.popped"] == {"queue_name": "orders"}


@pytest.mark.postgres
def test_no_more_than_max_messages(orders: QueenHook) -> None:
    fill(orders, 5)
    assert pop(process=nothing, batch_size=2, max_messages=3).execute(make_context())["popped"] == 3
    assert in_flight(orders) == (2, 0)
    assert pop(process=nothing, max_messages=None).execute(make_context())["popped"] == 2


@pytest.mark.postgres
def test_groups_namespaces_and_an_empty_queue(orders: QueenHook, figures: Figures) -> None:
    fill(orders, 1)
    orders.configure_queue("orders", namespace="billing")
    everywhere = {"queue_name": None, "namespace": "billing"}
    operator = pop(**everywhere, consumer_group="audit", process=nothing)
    assert operator.execute(make_context())["popped"] == 1
    assert figures.tags["queen.popped"] == {"namespace": "billing", "consumer_group": "audit"}
    assert operator.queues_read() == {"orders"}
    assert pop(**everywhere, consumer_group="audit", process=nothing).execute(make_context())["popped"] == 0
    with pytest.raises(AirflowSkipException):
        pop(consumer_group="audit", process=nothing, skip_on_empty=True).execute(make_context())
    with pytest.raises(QueueNotFoundError, match="'orders'"):
        pop(queue_name="order", process=nothing).execute(make_context())


@pytest.mark.postgres
def test_partial_failure(orders: QueenHook, figures: Figures, caplog: pytest.LogCaptureFixture) -> None:
    fill(orders, 4)

    def process(message: Message) -> None:
        if message.payload["n"] == 1:
            raise ValueError(f"cannot use {message.payload} " + "x" * 2000)
        if message.payload["n"] == 2:
            raise KeyError("amount")

    context = make_context()
    with pytest.raises(
        ProcessingError, match="of 4 messages 2 failed, the first with ValueError: cannot use"
    ):
        pop(process=process).execute(context)
    assert in_flight(orders) == (2, 0)
    assert figures.sent["queen.failed"] == 2
    assert context["task_state_store"] == {}
    orders.configure_queue("orders", retry_delay=0, retry_limit=0)
    orders.seek("orders", to="beginning")
    counts = pop(process=process, fail_on_error=False).execute(make_context())
    assert (counts["completed"], counts["failed"]) == (2, 2)
    errors = {letter.payload["n"]: letter.error_message or "" for letter in orders.dead_letters("orders")}
    assert errors[2] == "KeyError: 'amount'"
    assert errors[1].startswith("ValueError: cannot use <payload> xxx")
    assert len(errors[1]) == _consumer.MAX_ERROR_LENGTH
    assert [failure["error"] for failure in counts["failures"]] == [errors[1], errors[2]]
    assert "{'n': 1}" not in caplog.text + json.dumps(counts)


@pytest.mark.postgres
def test_a_batch_fails_as_one_and_then_one_by_one(orders: QueenHook) -> None:
    """A message that always fails must not take the others of its batch to the dead letters."""
    orders.configure_queue("orders", retry_delay=0, retry_limit=2)
    fill(orders, 5)
    calls: list[list[int]] = []

    def process_batch(messages: list[Message]) -> None:
        calls.append([message.payload["n"] for message in messages])
        if any(message.payload["n"] == 3 for message in messages):
            raise RuntimeError("three")

    counts = pop(process_batch=process_batch, fail_on_error=False).execute(make_context())
    assert calls[:6] == [[0, 1, 2, 3, 4], [0], [1], [2], [3], [4]]
    assert counts["completed"] == 4
    assert [letter.payload["n"] for letter in orders.dead_letters("orders")] == [3]
    assert in_flight(orders) == (0, 0)


# Forwarding


@pytest.mark.postgres
def test_results_are_forwarded_with_trace_partition_and_derived_ids(orders: QueenHook) -> None:
    fill(orders, 4, partition="b", trace_id=TRACE, priority=3)
    results: dict[int, Any] = {
        0: {"doubled": 0},
        1: None,
        2: [{"payload": {"a": 1}, "partition": "own"}, "two"],
        3: {"payload": 9, "transaction_id": "named"},
    }
    operator = pop(process=lambda message: results[message.payload["n"]], forward_to="next")
    assert operator.execute(make_context())["forwarded"] == 4
    forwarded = [m for m in orders.list_messages("next")[::-1] if m.partition == "b"]
    assert [message.payload for message in forwarded] == [{"doubled": 0}, "two", 9]
    (own,) = orders.list_messages("next", partition="own")
    assert own.payload == {"a": 1}
    assert {(message.trace_id, message.priority) for message in [*forwarded, own]} == {(TRACE, 3)}
    assert forwarded[-1].transaction_id == "named"
    source = orders.trace(TRACE)[0]
    assert forwarded[0].transaction_id == f"/{source.id}/0"
    assert operator.queues_written() == ["next"]
    # Delivered again, it forwards nothing twice; for another group it is another matter.
    orders.seek("orders", to="beginning")
    again = pop(process=lambda message: results[message.payload["n"]], forward_to="next")
    assert again.execute(make_context())["forwarded"] == 0
    pop(process=lambda _: 1, forward_to="next", consumer_group="g").execute(make_context())
    assert orders.depth("next").pending == 8


@pytest.mark.postgres
def test_a_batch_forwards_per_message_or_as_one(orders: QueenHook) -> None:
    orders.push(
        "orders", [{"payload": n, "trace_id": str(uuid.UUID(int=n)), "partition": str(n)} for n in (1, 2)]
    )
    together = {"max_partitions": 10, "forward_to": "next"}
    pop(process_batch=lambda ms: [m.payload * 10 for m in ms], **together).execute(make_context())
    assert {(m.payload, m.trace_id, m.partition) for m in orders.list_messages("next")} == {
        (10, str(uuid.UUID(int=1)), "1"),
        (20, str(uuid.UUID(int=2)), "2"),
    }
    orders.seek("orders", to="beginning")
    pop(process_batch=lambda ms: {"sum": 3}, **together).execute(make_context())
    (summed,) = (m for m in orders.list_messages("next") if m.payload == {"sum": 3})
    assert (summed.trace_id, summed.partition) == (None, "Default")


@pytest.mark.postgres
def test_acknowledging_and_forwarding_are_one(orders: QueenHook) -> None:
    """Where the next queue is full, nothing is acknowledged, and no message is to blame."""
    orders.configure_queue("next", max_queue_size=1)
    fill(orders, 3)
    context = make_context()
    with pytest.raises(QueueFullError):
        pop(process=lambda message: message.payload, forward_to="next").execute(context)
    assert in_flight(orders) == (3, 0)
    assert orders.depth("next").pending == 0
    assert [message.attempt for message in orders.pop("orders")] == [1, 1, 1]


@pytest.mark.postgres
def test_a_result_that_cannot_be_pushed_fails_its_own_message(orders: QueenHook) -> None:
    fill(orders, 2)

    def process(message: Message) -> Any:
        return {"payload": 1, "wrong": 2} if message.payload["n"] else 1

    counts = pop(process=process, forward_to="next", fail_on_error=False).execute(make_context())
    assert (counts["completed"], counts["failed"], counts["forwarded"]) == (1, 1, 1)
    assert "unknown key 'wrong'" in counts["failures"][0]["error"]


# Without a callable


@pytest.mark.postgres
def test_without_a_callable_it_returns_the_messages(orders: QueenHook) -> None:
    fill(orders, 5, trace_id=TRACE)
    returned = pop(batch_size=2, max_messages=3).execute(make_context())
    assert [message["payload"]["n"] for message in returned] == [0, 1, 2]
    assert returned[0]["trace_id"] == TRACE
    assert "lease_id" not in returned[0]
    json.dumps(returned)
    assert in_flight(orders) == (2, 0)
    assert pop(consumer_group="empty", subscription_mode="new").execute(make_context()) == []


@pytest.mark.postgres
def test_what_does_not_fit_into_xcom_stays_in_the_queue(orders: QueenHook) -> None:
    orders.push("orders", [{"payload": "x" * 1000} for _ in range(4)])
    assert len(pop(max_xcom_bytes=3000).execute(make_context())) == 2
    assert in_flight(orders) == (2, 0)
    with pytest.raises(QueenError, match="max_xcom_bytes is 500"):
        pop(max_xcom_bytes=500).execute(make_context())
    assert [message.attempt for message in orders.pop("orders")] == [1, 1]


# Leases


@pytest.mark.postgres
@pytest.mark.parametrize("lease_seconds", [None, 1])
def test_leases_are_renewed_while_the_callable_works(orders: QueenHook, lease_seconds: int | None) -> None:
    orders.configure_queue("orders", lease_time=1)
    fill(orders, 2)
    stolen: list[Message] = []

    def process(message: Message) -> None:
        time.sleep(1.3)
        stolen.extend(orders.pop("orders"))

    counts = pop(process=process, lease_seconds=lease_seconds).execute(make_context())
    assert counts["completed"] == 2
    assert stolen == []
    assert in_flight(orders) == (0, 0)


@pytest.mark.postgres
def test_a_lease_that_was_lost_settles_nothing(orders: QueenHook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow_provider_queen.operators._leases.LeaseKeeper.hold", lambda *_: None)
    fill(orders, 1, partition="a")
    fill(orders, 1, partition="b")
    taken: list[Message] = []

    def process(message: Message) -> Any:
        if message.partition == "a":
            time.sleep(1.1)
            taken.extend(orders.pop("orders", partition="a"))
        return message.payload

    with pytest.raises(ProcessingError, match="1 were lost to another consumer"):
        pop(process=process, forward_to="next", lease_seconds=1, max_partitions=2).execute(make_context())
    # The other one's lease was still there, though it had run out: settled and forwarded.
    assert [message.partition for message in orders.list_messages("next")] == ["b"]
    assert [message.partition for message in taken] == ["a"]
    orders.ack(taken)
    assert in_flight(orders) == (0, 0)


@pytest.mark.postgres
def test_results_of_a_long_batch_are_settled_on_the_way(
    orders: QueenHook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_consumer, "SETTLE_INTERVAL_SECONDS", 0)
    fill(orders, 3)
    pending: list[int] = []
    pop(process=lambda _: pending.append(orders.depth("orders").pending)).execute(make_context())
    assert pending == [3, 2, 1]


@pytest.mark.postgres
def test_a_lease_that_is_over_does_not_stop_the_renewal_of_others(orders: QueenHook) -> None:
    for partition in ("a", "b"):
        fill(orders, 1, partition=partition)
    messages = orders.pop("orders", max_partitions=2, lease_seconds=1)
    keeper = LeaseKeeper(QueenHook(), seconds=1)
    keeper.hold(messages)
    orders.ack(messages[0])
    time.sleep(1.5)
    assert orders.pop("orders") == []
    keeper.close()
    assert orders.ack(messages[1]).completed == 1


@pytest.mark.postgres
def test_what_a_lease_still_holds_is_given_back(orders: QueenHook) -> None:
    """A settlement that was interrupted may have been committed all the same."""
    fill(orders, 3)
    keeper = LeaseKeeper(QueenHook(), seconds=None)
    consumer = _consumer.Consumer(
        orders,
        keeper,
        LeaseMemory({}),
        pop={"queue_name": "orders"},
        handler=print,
        together=True,
        forward_to=None,
    )
    orders.ack(consumer._pop(3, 0)[0])
    consumer.give_back()
    keeper.close()
    assert consumer.tally.released == 2
    assert in_flight(orders) == (2, 0)


class StoreInAFile:
    """A task state store that survives the process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, key: str) -> Any:
        return json.loads(self.path.read_text()).get(key) if self.path.exists() else None

    def set(self, key: str, value: Any) -> None:
        self.path.write_text(json.dumps({key: value}))

    def delete(self, key: str) -> None:
        self.path.unlink(missing_ok=True)


def in_a_child(function: Callable[[], Any]) -> int:
    """Call it in a forked process; returns how that ended."""
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.postgres
def test_the_next_try_ends_the_leases_of_one_that_died(orders: QueenHook, tmp_path: Path) -> None:
    fill(orders, 3)
    orders.close()  # nothing to share with the child
    context = make_context(task_state_store=StoreInAFile(tmp_path / "state"))

    def die(message: Message) -> None:
        if message.payload["n"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(lambda: pop(process=die).execute(context)) == -signal.SIGKILL
    assert in_flight(orders) == (3, 3)
    assert (tmp_path / "state").exists()

    attempts: list[int] = []
    begun = time.monotonic()
    counts = pop(process=lambda message: attempts.append(message.attempt)).execute(context)
    assert time.monotonic() - begun < 10  # and not the lease's 300 seconds
    assert counts["completed"] == 3
    # That a consumer died with it counts: what kills its consumer each time is a dead letter in the end.
    assert attempts[0] == 2
    assert in_flight(orders) == (0, 0)
    assert not (tmp_path / "state").exists()


@pytest.mark.postgres
def test_a_state_store_that_fails_only_costs_time(
    orders: QueenHook, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def get(self, key: str) -> Any:
            raise RuntimeError("no supervisor")

    fill(orders, 1)
    assert pop(process=nothing).execute(make_context(task_state_store=Broken()))["completed"] == 1
    assert "task state store does not work" in caplog.text
    context = make_context()
    del context["task_state_store"]
    assert pop(process=nothing).execute(context)["popped"] == 0


# Being killed


@pytest.mark.postgres
def test_a_task_that_is_killed_gives_back_what_it_holds(orders: QueenHook) -> None:
    """As Airflow does it: SIGTERM, whose handler calls on_kill."""
    fill(orders, 3)
    processed: list[int] = []
    context = make_context()

    def process(message: Message) -> None:
        if message.payload["n"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        processed.append(message.payload["n"])

    operator = pop(process=process, forward_to="next")
    before = signal.signal(signal.SIGTERM, lambda *_: operator.on_kill())
    try:
        begun = time.monotonic()
        with pytest.raises(SystemExit, match="given back"):
            operator.execute(context)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert time.monotonic() - begun < 10
    assert processed == [0]
    assert in_flight(orders) == (2, 0)  # the first was processed, and settled on the way out
    assert [message.attempt for message in orders.pop("orders")] == [1, 1]
    assert context["task_state_store"] == {}
    operator.on_kill()  # when all is over, there is nothing to do


@pytest.mark.postgres
def test_on_kill_from_another_thread(orders: QueenHook) -> None:
    fill(orders, 2)
    started, killed = threading.Event(), threading.Event()

    def process(message: Message) -> None:
        started.set()
        killed.wait(20)

    operator = pop(process=process)

    def kill() -> None:
        started.wait(20)
        operator.on_kill()
        assert in_flight(orders) == (2, 0)
        killed.set()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(SystemExit):
        operator.execute(make_context())
    killer.join()
    assert in_flight(orders) == (2, 0)


@pytest.mark.postgres
def test_a_timeout_counts_for_the_message_that_took_so_long(orders: QueenHook) -> None:
    orders.configure_queue("orders", retry_delay=0)
    fill(orders, 3)

    def process(message: Message) -> None:
        if message.payload["n"] == 1:
            raise AirflowTaskTimeout("Timeout")

    operator = pop(process=process)
    with pytest.raises(AirflowTaskTimeout):
        operator.execute(make_context())
    operator.on_kill()  # as Airflow calls it then
    messages = orders.pop("orders")
    assert [(message.payload["n"], message.attempt) for message in messages] == [(1, 2), (2, 1)]


# Waiting


@pytest.mark.postgres
def test_it_waits_on_the_worker(orders: QueenHook) -> None:
    pop(process=nothing).execute(make_context())
    threading.Timer(0.5, lambda: fill(orders, 1)).start()
    assert pop(process=nothing, wait_seconds=20).execute(make_context())["completed"] == 1


@pytest.mark.postgres
def test_it_defers_where_nothing_is_ready(orders: QueenHook) -> None:
    operator = pop(process=nothing, deferrable=True, consumer_group="g", wait_seconds=60, poll_interval=5)
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute(make_context())
    assert deferred.value.method_name == "execute_complete"
    assert deferred.value.timeout.total_seconds() == 60
    trigger = deferred.value.trigger
    assert isinstance(trigger, QueenBacklogTrigger)
    _, kwargs = trigger.serialize()
    assert kwargs["queue_name"] == "orders"
    assert (kwargs["consumer_group"], kwargs["min_pending"], kwargs["ready"]) == ("g", 1, True)
    # Others were faster: it waits again.
    with pytest.raises(TaskDeferred):
        operator.execute_complete(make_context(), {"status": "success", "pending": 1})
    fill(orders, 2)
    assert operator.execute_complete(make_context(), {"status": "success", "pending": 2})["completed"] == 2
    with pytest.raises(QueenError, match="no queue"):
        operator.execute_complete(make_context(), {"status": "error", "message": "no queue"})


@pytest.mark.postgres
def test_it_does_not_defer_where_something_is(orders: QueenHook) -> None:
    fill(orders, 1)
    assert pop(process=nothing, deferrable=True).execute(make_context())["completed"] == 1
