"""Messages are cheap, read-only, and keep their payload to themselves."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from airflow_provider_queen.client.results import DeadLetter, Message, StoredMessage
from airflow_provider_queen.exceptions import EncryptionError, QueenError

SECRET = '{"card": "4111"}'


def make(kind: type[Any], body: str | EncryptionError = SECRET, **values: object) -> Any:
    row = dict.fromkeys(kind.COLUMNS) | {"payload": SECRET, "queue_name": "orders", "seq": 7} | values
    return kind(tuple(row[name] for name in kind.COLUMNS), body)


@pytest.mark.parametrize("kind", [Message, StoredMessage, DeadLetter])
def test_a_payload_is_parsed_once_and_not_shown(kind: type[Any]) -> None:
    message = make(kind)
    assert message.payload == {"card": "4111"}
    assert message.payload is message.payload
    assert message.payload_text == SECRET
    assert "4111" not in repr(message)
    assert "orders" in repr(message)


@pytest.mark.parametrize("kind", [Message, StoredMessage, DeadLetter])
def test_results_cannot_be_changed(kind: type[Any]) -> None:
    message = make(kind)
    for name in ("seq", "payload", "queue_name", "anything"):
        with pytest.raises(AttributeError):
            setattr(message, name, 1)


def test_an_unreadable_payload_raises_when_it_is_asked_for() -> None:
    message = make(StoredMessage, EncryptionError("no key"))
    assert message.seq == 7
    with pytest.raises(EncryptionError, match="no key"):
        _ = message.payload


@pytest.mark.parametrize("body", ['{"secret": ', "1" * 5000, "[" * 100_000])
def test_a_payload_beyond_the_parser_is_not_quoted(body: str) -> None:
    message = make(Message, body)
    with pytest.raises(QueenError, match="beyond Python's JSON parser") as caught:
        _ = message.payload
    assert caught.value.__context__ is None
    assert "secret" not in str(caught.value)


def test_queue_mode_is_no_group() -> None:
    assert make(Message, consumer_group="__QUEUE_MODE__").consumer_group is None
    assert make(Message, consumer_group="audit").consumer_group == "audit"
    assert make(DeadLetter, consumer_group="__QUEUE_MODE__").consumer_group is None


def test_messages_compare_hash_and_pickle() -> None:
    message = make(Message, message_id="m", lease_id="l")
    again = pickle.loads(pickle.dumps(message))
    assert again == message
    assert hash(again) == hash(message)
    assert again.payload == message.payload
    assert message != make(Message, message_id="n", lease_id="l")
    assert message != make(StoredMessage)


def test_a_settled_message_has_no_lease() -> None:
    message = make(Message, lease_id="l", lease_expires_at="later", attempt=2).without_lease()
    assert (message.lease_id, message.lease_expires_at, message.attempt) == (None, None, 2)
