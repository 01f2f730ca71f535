"""Bad input ends before the database hears of it, with an error that names it."""

from __future__ import annotations

import datetime as dt
import uuid
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_queen.client import inputs
from airflow_provider_queen.client.results import Message
from airflow_provider_queen.exceptions import InvalidOptionError

SECRET = "a payload's own words"


def message(seq: int = 1, lease_id: str | None = "00000000-0000-0000-0000-000000000001") -> Message:
    values = dict.fromkeys(Message.COLUMNS)
    values |= {
        "seq": seq,
        "lease_id": lease_id,
        "payload": "{}",
        "queue_name": "orders",
        "transaction_id": "t",
    }
    return Message(tuple(values[name] for name in Message.COLUMNS), "{}")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "''"),
        ("x" * 256, "256 characters"),
        ("a\0b", "NUL"),
        ("\ud800", "surrogate"),
        (7, "7"),
        (None, "None"),
    ],
)
def test_a_bad_name_is_refused(value: Any, said: str) -> None:
    with pytest.raises(InvalidOptionError, match="queue_name is .*" + said):
        inputs.name("queue_name", value)


def test_names_are_counted_in_characters() -> None:
    assert inputs.name("queue_name", "ä" * 255) == "ä" * 255


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3", None, 2**31])
def test_sizes_are_whole_numbers_from_one(value: Any) -> None:
    with pytest.raises(InvalidOptionError, match="batch_size is "):
        inputs.positive("batch_size", value)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True, "1", None])
def test_a_wait_is_finite_and_not_negative(value: Any) -> None:
    with pytest.raises(InvalidOptionError, match="wait_seconds is "):
        inputs.seconds("wait_seconds", value)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("text", "messages is a str"),
        ({"payload": 1}, "messages is a dict"),
        (None, "messages is a NoneType"),
        (["text"], "message 0 is a str"),
        ([{"partition": "a"}], "message 0 has no payload"),
        (
            [{"payload": 1}, {"payload": 1, "transactionid": "a"}],
            "message 1 .*'transactionid'.*'transaction_id'",
        ),
        ([{"payload": {1, 2}}], "message 0: payload is no JSON: .*set"),
        ([{"payload": {(1, 2): SECRET}}], "message 0: payload is no JSON"),
        ([{"payload": {SECRET: float("nan")}}], "NaN"),
        ([{"payload": [float("-inf")]}], "Infinity"),
        ([{"payload": b"bytes"}], "bytes"),
        ([{"payload": "\ud800" + SECRET}], "surrogate"),
        ([{"payload": 10**5000}], "too long"),
        ([{"payload": 1, "transaction_id": ""}], "transaction_id is ''"),
        ([{"payload": 1, "transaction_id": "x" * 256}], "transaction_id is 'xxx.* 256 characters"),
        ([{"payload": 1, "transaction_id": 5}], "transaction_id is 5"),
        ([{"payload": 1, "transaction_id": "a\0"}], "NUL"),
        ([{"payload": 1, "partition": ""}], "partition is ''"),
        ([{"payload": 1, "partition": "x" * 256}], "partition is 'xxx"),
        ([{"payload": 1, "partition": ["a"]}], "partition is .*'a'"),
        ([{"payload": 1, "priority": -1}], "priority is -1, allowed are 0 to 9"),
        ([{"payload": 1, "priority": 10}], "priority is 10"),
        ([{"payload": 1, "priority": True}], "priority is True"),
        ([{"payload": 1, "priority": "1"}], "priority is '1'"),
        ([{"payload": 1, "trace_id": "no uuid"}], "trace_id is 'no uuid'"),
        ([{"payload": 1, "trace_id": 7}], "trace_id is 7"),
    ],
)
def test_a_bad_message_is_refused(messages: Any, said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said) as caught:
        inputs.batch(messages)
    assert SECRET not in str(caught.value)
    assert caught.value.__context__ is None  # json's own errors quote keys and values


def test_a_payload_that_contains_itself_is_refused() -> None:
    payload: list[Any] = []
    payload.append(payload)
    with pytest.raises(InvalidOptionError, match="contains itself"):
        inputs.batch([{"payload": payload}])


def test_a_payload_that_is_nested_too_deeply_is_refused() -> None:
    payload: list[Any] = []
    for _ in range(100_000):
        payload = [payload]
    with pytest.raises(InvalidOptionError, match="nested too deeply"):
        inputs.batch([{"payload": payload}])


def test_payloads_become_compact_json() -> None:
    batch = inputs.batch([{"payload": {"a": [1, "ä", None]}}, {"payload": None}])
    assert batch.payloads == ['{"a":[1,"ä",null]}', "null"]


def test_equal_columns_are_sent_once() -> None:
    trace = uuid.uuid4()
    batch = inputs.batch(
        [{"payload": n, "partition": "p", "trace_id": trace, "priority": 3} for n in range(5)]
    )
    assert (batch.partitions, batch.trace_ids, batch.priorities) == (["p"], [str(trace)], [3])


def test_defaults_are_not_sent() -> None:
    batch = inputs.batch([{"payload": 1}, {"payload": 2, "partition": "Default", "priority": 0}])
    assert (batch.partitions, batch.trace_ids, batch.priorities) == (None, None, None)


def test_different_columns_are_sent_whole() -> None:
    trace = "6F1C0A9E-0000-4000-8000-000000000001"
    batch = inputs.batch([{"payload": 1}, {"payload": 2, "partition": "p", "priority": 1, "trace_id": trace}])
    assert batch.partitions == ["Default", "p"]
    assert batch.trace_ids == [None, trace.lower()]
    assert batch.priorities == [0, 1]


def test_every_message_gets_a_transaction_id() -> None:
    first = inputs.batch([{"payload": 1}, {"payload": 1, "transaction_id": "mine"}])
    second = inputs.batch([{"payload": 1}])
    assert first.transaction_ids[1] == "mine"
    assert first.generated == [True, False]
    assert first.transaction_ids[0] != second.transaction_ids[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("q", None, None, "n", None), "queue_name is 'q' and"),
        (("q", None, None, None, "t"), "queue_name is 'q' and"),
        ((None, None, None, None, None), "name a queue"),
        ((None, "p", None, "n", None), "partition is 'p', which needs a queue_name"),
        (("q", "", None, None, None), "partition is ''"),
        (("q", None, "", None, None), "consumer_group is ''"),
        ((None, None, None, "", None), "namespace is ''"),
        ((None, None, None, None, "x" * 256), "task is 'xxx"),
    ],
)
def test_a_selection_is_a_queue_or_a_wildcard(arguments: Any, said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        inputs.selection(*arguments)


@pytest.mark.parametrize(
    ("mode", "since", "said"),
    [
        ("al", None, "'al'; the nearest is 'all'"),
        ("newest", None, "the nearest is 'new'"),
        (None, None, "unknown subscription_mode None"),
        ("timestamp", None, "needs it"),
        ("timestamp", dt.datetime(2026, 1, 1), "no time zone"),
        ("timestamp", "2026-01-01T00:00:00", "no time zone"),
        ("timestamp", "yesterday", "'yesterday', which is no datetime"),
        ("timestamp", 7, "7, which is no datetime"),
        ("all", dt.datetime(2026, 1, 1, tzinfo=dt.UTC), "with subscription_mode 'all'"),
    ],
)
def test_a_bad_subscription_is_refused(mode: Any, since: Any, said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        inputs.subscription(mode, since)


def test_a_subscription_time_may_be_text_with_a_zone() -> None:
    moment = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    assert inputs.subscription("timestamp", "2026-01-01T00:00:00Z") == ("timestamp", moment)


def test_an_unknown_queue_option_names_the_nearest() -> None:
    with pytest.raises(InvalidOptionError, match="'leese_time'; the nearest is 'lease_time'"):
        inputs.queue_options({"leese_time": 5})


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("begin", "'begin' to seek; the nearest is 'beginning'"),
        (dt.datetime(2026, 1, 1), "no time zone"),
        ("2026-01-01", "no time zone"),
        (5, "5, which is no datetime"),
        (None, "None, which is no datetime"),
    ],
)
def test_a_bad_seek_is_refused(to: Any, said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        inputs.seek_target(to)


def test_settling_groups_by_lease_and_outcome() -> None:
    a, b = "00000000-0000-0000-0000-00000000000a", "00000000-0000-0000-0000-00000000000b"
    settlement = inputs.settlement(
        completed=[message(3, a), message(1, a), message(2, a), message(9, b)], failed=[message(4, a)]
    )
    assert settlement.lease_ids == [a, b]
    assert settlement.completed == ["{[1,3]}", "{[9,9]}"]
    assert settlement.failed == ["{[4,4]}", None]
    assert settlement.rejected == settlement.released == [None, None]


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ({"completed": [message(1)], "failed": [message(1)]}, "is to be completed and failed"),
        ({"rejected": [message(1)], "released": [message(1)]}, "is to be rejected and released"),
        ({"completed": [message(1, None)]}, "has no lease"),
        ({"completed": ["id"]}, "completed has a str"),
        ({"failed": "id"}, "failed is a str"),
        ({"failed": 5}, "failed is a int"),
    ],
)
def test_what_cannot_be_settled_is_refused(outcomes: Any, said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        inputs.settlement(**outcomes)


def test_one_message_is_taken_as_a_list() -> None:
    assert inputs.settlement(completed=message(5)).completed == ["{[5,5]}"]


def test_an_error_text_is_made_storable() -> None:
    assert inputs.error_text("a\0b\ud800") == "a\N{REPLACEMENT CHARACTER}b?"


@given(st.sets(st.integers(1, 60), min_size=1))
def test_a_multirange_holds_exactly_its_numbers(seqs: set[int]) -> None:
    text = inputs.multirange(sorted(seqs))
    assert text is not None
    ranges = [part.strip("[]").split(",") for part in text.strip("{}").replace("],[", "];[").split(";")]
    assert {seq for first, last in ranges for seq in range(int(first), int(last) + 1)} == seqs
    assert all(int(before[1]) + 1 < int(after[0]) for before, after in pairwise(ranges))


@pytest.mark.parametrize("ids", ["1", {1: 2}, [0], ["a"], [True], [2**63], 1.5])
def test_bad_numbers_of_dead_letters_are_refused(ids: Any) -> None:
    with pytest.raises(InvalidOptionError, match="ids "):
        inputs.dead_letter_ids(ids)
