"""Operations as what they are: steps and answers, without a database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from airflow_provider_queen.client.encryption import Keyring
from airflow_provider_queen.client.errors import EncryptionChangedError
from airflow_provider_queen.client.operations import Call, Listen, Operation, Operations, Pause, Progress
from airflow_provider_queen.client.options import ClientOptions
from airflow_provider_queen.client.results import Message, PushedBatch, PushResult, SettleResult
from airflow_provider_queen.exceptions import EncryptionError, InvalidOptionError, QueenError

LEASE = "00000000-0000-0000-0000-000000000001"
POP: dict[str, Any] = {
    "partition": None,
    "consumer_group": None,
    "batch_size": 100,
    "max_partitions": 1,
    "lease_seconds": None,
    "subscription_mode": "all",
    "subscription_from": None,
    "wait_seconds": 0,
    "auto_ack": False,
    "namespace": None,
    "task": None,
}


def row(**values: object) -> tuple[object, ...]:
    known: dict[str, object] = dict.fromkeys(Message.COLUMNS) | {
        "message_id": "m",
        "transaction_id": "t",
        "queue_name": "orders",
        "partition": "Default",
        "seq": 1,
        "payload": "{}",
        "is_encrypted": False,
        "lease_id": LEASE,
    }
    return tuple((known | values)[name] for name in Message.COLUMNS)


def run(operation: Operation[Any], *answers: Any) -> tuple[Any, list[str]]:
    """Answer each step in turn; errors are thrown. Returns the result and the functions that were called."""
    progress = Progress(operation)
    called: list[str] = []
    remaining = iter(answers)
    while progress.step is not None:
        called.append(name_of(progress.step))
        answer = next(remaining)
        if isinstance(answer, QueenError):
            progress.fail(answer)
        else:
            progress.answer(answer)
    return progress.result, called


def name_of(step: object) -> str:
    if isinstance(step, Call):
        return step.statement.sql.decode().partition("queen.")[2].partition("(")[0]
    return type(step).__name__


def test_a_push_is_one_call_once_the_queue_is_known() -> None:
    operations = Operations()
    message = {"payload": 1, "transaction_id": "t"}
    stored = PushedBatch([20], 7, None, None)
    result, called = run(operations.push("orders", [message]), [(False,)], [stored])
    assert called == ["list_queues", "push_batch"]
    assert result == [
        PushResult("queued", "00000000-0014-8000-8000-000000000007", "t", "Default", 7, priority=0)
    ]
    _, called = run(operations.push("orders", [message]), [stored])
    assert called == ["push_batch"]


def test_a_push_to_many_partitions_answers_message_by_message() -> None:
    operations = Operations()
    messages = [
        {"payload": 1, "transaction_id": "a", "partition": "north"},
        {"payload": 1, "transaction_id": "b", "partition": "south", "priority": 3},
    ]
    stored = PushedBatch([20, 33], None, [4, 9], [False, True])
    result, _ = run(operations.push("orders", messages), [(False,)], [stored])
    assert [(r.status, r.transaction_id, r.partition, r.seq, r.priority) for r in result] == [
        ("duplicate", "a", "north", 4, 0),
        ("queued", "b", "south", 9, 3),
    ]


def test_nothing_to_do_is_no_call() -> None:
    operations = Operations()
    for operation, nothing in (
        (operations.push("orders", []), []),
        (operations.push("orders", iter(())), []),
        (operations.settle(error=None, completed=[], failed=(), released=None), SettleResult()),
        (operations.renew([], 60), []),
        (operations.requeue_dead_letters("orders", [], None, 10), []),
        (operations.purge_dead_letters("orders", [], None, None), 0),
    ):
        assert run(operation) == (nothing, [])


def test_no_step_is_taken_with_bad_input() -> None:
    operations = Operations()
    for operation in (
        operations.push("", [{"payload": 1}]),
        operations.push("orders", [{"payload": 1}, {}]),
        operations.pop("orders", **{**POP, "batch_size": 0}),
        operations.pop("orders", **{**POP, "max_partitions": 0}),
        operations.pop("orders", **{**POP, "lease_seconds": 0}),
        operations.pop("orders", **{**POP, "auto_ack": 1}),
        operations.pop("orders", **{**POP, "wait_seconds": -1}),
        operations.pop("orders", **{**POP, "namespace": "n"}),
        operations.pop(None, **POP),
        operations.depth(None, None, None, None),
        operations.configure_queue("orders", {"lease_tim": 1}),
        operations.seek("orders", "g", "middle", None),
        operations.list_messages("orders", None, "no uuid", 10),
        operations.list_messages("orders", None, None, 0),
        operations.trace("no uuid"),
        operations.renew([], 0),
        operations.requeue_dead_letters("", [], None, 10),
        operations.purge_dead_letters("orders", None, None, -1),
        operations.delete_queue(""),
        operations.reclaim("orders", 0),
    ):
        with pytest.raises(InvalidOptionError):
            run(operation)


def test_a_repeated_push_of_our_own_ids_was_no_duplicate() -> None:
    operations = Operations()
    answer = [PushedBatch([20], None, [1, 2], [False, False])]
    messages = [{"payload": 1}, {"payload": 2, "transaction_id": "mine"}]
    result, _ = run(operations.push("orders", messages), [(False,)], answer)
    assert [each.status for each in result] == ["queued", "duplicate"]


def test_a_changed_encryption_is_looked_up_again_once() -> None:
    keyring = Keyring([Keyring.generate_key()])
    operations = Operations(keyring)
    stored = [PushedBatch([20], 1, None, None)]
    changed = EncryptionChangedError("changed")
    progress = Progress(operations.push("orders", [{"payload": "plain", "transaction_id": "t"}]))
    progress.answer([(False,)])
    assert isinstance(progress.step, Call)
    assert progress.step.parameters[1] == ['"plain"']
    progress.fail(changed)
    progress.answer([(True,)])
    assert isinstance(progress.step, Call)
    (envelope,) = progress.step.parameters[1]  # type: ignore[misc]
    assert keyring.decrypt(envelope, "orders", "t") == '"plain"'
    assert progress.step.parameters[-1] is True
    progress.answer(stored)
    assert progress.result[0].status == "queued"

    with pytest.raises(EncryptionChangedError):
        run(operations.push("orders", [{"payload": 1}]), changed, [(True,)], changed)


def test_a_changed_encryption_is_not_repeated_inside_a_transaction() -> None:
    operations = Operations()
    run(operations.push("orders", [{"payload": 1}]), [(False,)], [PushedBatch([20], 1, None, None)])
    with pytest.raises(EncryptionChangedError):
        run(operations.in_transaction().push("orders", [{"payload": 1}]), EncryptionChangedError("changed"))
    # The client knows: its next push looks.
    with pytest.raises(EncryptionError, match="no key"):
        run(operations.push("orders", [{"payload": 1}]), [(True,)])


def test_plain_text_is_never_sent_to_an_encrypted_queue_without_a_key() -> None:
    with pytest.raises(EncryptionError, match="'orders' is encrypted and there is no key"):
        run(Operations().push("orders", [{"payload": 1}]), [(True,)])


def test_a_pop_is_one_call() -> None:
    messages, called = run(Operations().pop("orders", **POP), [row(payload='{"a":1}')])
    assert called == ["pop"]
    assert messages[0].payload == {"a": 1}


def test_messages_that_do_not_decrypt_are_given_back() -> None:
    envelope = Keyring([Keyring.generate_key()]).encrypt("1", "orders", "t")
    operation = Operations(Keyring([Keyring.generate_key()])).pop("orders", **POP)
    progress = Progress(operation)
    progress.answer([row(seq=4), row(seq=5, payload=envelope, is_encrypted=True)])
    assert name_of(progress.step) == "settle"
    assert isinstance(progress.step, Call)
    assert progress.step.parameters[:5] == ([LEASE], [None], [None], [None], ["{[4,5]}"])
    with pytest.raises(EncryptionError, match=r"not among the 1 keys.*1 of 2 .*all were released"):
        progress.answer([(0, 0, 0, 0, 2, 0)])


def test_a_requeued_message_decrypts_under_its_first_transaction_id() -> None:
    keyring = Keyring([Keyring.generate_key()])
    envelope = keyring.encrypt('"x"', "orders", "first")
    answer = [
        row(transaction_id="second", origin_transaction_id="first", payload=envelope, is_encrypted=True)
    ]
    messages, _ = run(Operations(keyring).pop("orders", **POP), answer)
    assert messages[0].payload == "x"


def test_auto_ack_of_a_plain_queue_is_the_servers() -> None:
    operations = Operations()
    run(operations.pop("orders", **{**POP, "auto_ack": True}), [(False,)], [])
    progress = Progress(operations.pop("orders", **{**POP, "auto_ack": True}))
    assert isinstance(progress.step, Call)
    assert progress.step.parameters[8] is True
    progress.answer([row(lease_id=None)])
    assert progress.result[0].lease_id is None


@pytest.mark.parametrize("where", [{"queue_name": "orders"}, {"queue_name": None, "namespace": "n"}])
def test_auto_ack_waits_for_decryption(where: dict[str, Any]) -> None:
    keyring = Keyring([Keyring.generate_key()])
    envelope = keyring.encrypt('"x"', "orders", "t")
    lookup = [[(True,)]] if where["queue_name"] else []
    operation = Operations(keyring).pop(**{**POP, "auto_ack": True, **where})
    messages, called = run(
        operation, *lookup, [row(payload=envelope, is_encrypted=True)], [(1, 0, 0, 0, 0, 0)]
    )
    assert called[-2:] == ["pop", "settle"]
    assert (messages[0].payload, messages[0].lease_id) == ("x", None)


class Clock:
    """Time that passes only in pauses."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def wait(
    operations: Operations, clock: Clock, script: Iterator[Any], **options: Any
) -> tuple[Any, list[object]]:
    progress = Progress(operations.pop("orders", **{**POP, **options}))
    steps: list[object] = []
    while progress.step is not None:
        steps.append(progress.step)
        if isinstance(progress.step, Pause):
            clock.now += progress.step.seconds
            progress.answer(None)
        elif isinstance(progress.step, Listen):
            progress.answer(None)
        else:
            progress.answer(next(script))
    return progress.result, steps


def test_waiting_listens_first_and_looks_again_after_it() -> None:
    clock = Clock()
    messages, steps = wait(Operations(clock=clock), clock, iter([[], [row()]]), wait_seconds=10)
    assert [name_of(step) for step in steps] == ["pop", "Listen", "pop", "Listen"]
    assert len(messages) == 1
    assert clock.now == 100


def test_waiting_ends_in_time_with_a_last_look() -> None:
    clock = Clock()
    answers = iter([[], [], [(None,)], [], [(None,)], []])
    messages, steps = wait(Operations(clock=clock), clock, answers, wait_seconds=7)
    assert messages == []
    assert [step.seconds for step in steps if isinstance(step, Pause)] == [5.0, 2.0]
    assert [name_of(step) for step in steps][-2:] == ["pop", "Listen"]
    assert clock.now == 107


def test_waiting_wakes_when_a_message_is_due() -> None:
    clock = Clock()
    _, steps = wait(Operations(clock=clock), clock, iter([[], [], [(1.25,)], [row()]]), wait_seconds=10)
    assert [step.seconds for step in steps if isinstance(step, Pause)] == [1.25]


def test_waiting_does_not_spin_on_what_another_has_locked() -> None:
    clock = Clock()
    answers = iter([[], *([[], [(-3.0,)]] * 6), [row()]])
    _, steps = wait(Operations(clock=clock), clock, answers, wait_seconds=60)
    pauses = [step.seconds for step in steps if isinstance(step, Pause)]
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64]


def test_waiting_behind_a_pooler_polls() -> None:
    clock = Clock()
    operations = Operations(options=ClientOptions(transaction_pooler=True), clock=clock)
    _, steps = wait(operations, clock, iter([[], [], [(None,)], [row()]]), wait_seconds=10)
    assert [name_of(step) for step in steps] == ["pop", "pop", "next_ready_at", "Pause", "pop"]
    assert steps[3] == Pause(1.0, "orders", False)


def test_waiting_inside_a_transaction_is_refused_before_anything_is_popped() -> None:
    with pytest.raises(InvalidOptionError, match="wait_seconds is 5 inside a transaction"):
        run(Operations().in_transaction().pop("orders", **{**POP, "wait_seconds": 5}))


def test_settlements_are_added_up() -> None:
    message = Message(row(), "{}")  # type: ignore[arg-type]
    result, called = run(
        Operations().settle(error="x", failed=[message]), [(1, 2, 3, 4, 5, 6), (10, 20, 30, 40, 50, 60)]
    )
    assert called == ["settle"]
    assert result == SettleResult(11, 22, 33, 44, 55, 66)


def test_a_call_shows_no_parameters() -> None:
    progress = Progress(Operations().configure_queue("orders", {"namespace": "secret"}))
    assert "secret" not in repr(progress.step)
