"""Encrypted queues, and payloads that reach neither a log nor an error."""

from __future__ import annotations

import json
import logging
import traceback
from contextlib import suppress
from typing import Any

import psycopg
import pytest

from airflow_provider_queen.client import Keyring
from airflow_provider_queen.exceptions import EncryptionError, QueenError
from tests.client.conftest import ClientFactory, in_transaction

pytestmark = pytest.mark.postgres

OLD, NEW = Keyring.generate_key(), Keyring.generate_key()
SECRET = "4111-1111-1111"


@pytest.fixture
def vault(client: Any) -> str:
    client.configure_queue("vault", encryption_enabled=True, retry_delay=0)
    return "vault"


@pytest.fixture
def with_key(make_client: ClientFactory) -> Any:
    return make_client(keyring=Keyring([NEW]))


def stored(sql: psycopg.Connection[Any]) -> str:
    return json.dumps(
        sql.execute("SELECT payload, is_encrypted FROM queen.messages ORDER BY created_at").fetchall()
    )


def test_an_encrypted_queue_stores_no_plain_text(
    with_key: Any, vault: str, sql: psycopg.Connection[Any]
) -> None:
    with_key.push(vault, [{"payload": {"card": SECRET}}, {"payload": SECRET, "transaction_id": "t"}])
    assert SECRET not in stored(sql)
    assert "false" not in stored(sql)
    messages = with_key.pop(vault)
    assert [message.payload for message in messages] == [{"card": SECRET}, SECRET]
    assert [message.payload for message in with_key.list_messages(vault)] == [SECRET, {"card": SECRET}]
    with_key.ack(messages)


def test_without_a_key_nothing_is_pushed(client: Any, vault: str, sql: psycopg.Connection[Any]) -> None:
    with pytest.raises(EncryptionError, match="'vault' is encrypted and there is no key"):
        client.push(vault, [{"payload": SECRET}])
    with pytest.raises(EncryptionError), client.transaction() as tx:
        tx.push(vault, [{"payload": SECRET}])
    assert stored(sql) == "[]"


@pytest.mark.parametrize("options", [{}, {"auto_ack": True}])
def test_without_its_key_a_message_is_given_back(
    client: Any, with_key: Any, make_client: ClientFactory, vault: str, options: dict[str, Any]
) -> None:
    with_key.push(vault, [{"payload": SECRET}])
    for reader in (client, make_client(keyring=Keyring([OLD]))):
        with pytest.raises(EncryptionError, match="all were released"):
            reader.pop(vault, **options)
        depth = reader.depth(vault)
        assert (depth.pending, depth.in_flight) == (1, 0)
    (message,) = with_key.pop(vault, **options)
    assert (message.payload, message.attempt) == (SECRET, 1)


def test_listing_without_the_key_hides_the_payload_only(client: Any, with_key: Any, vault: str) -> None:
    trace = "00000000-0000-4000-8000-000000000007"
    with_key.push(vault, [{"payload": SECRET, "trace_id": trace}])
    with_key.reject(with_key.pop(vault))
    for (row,) in (client.list_messages(vault), client.trace(trace), client.dead_letters(vault)):
        assert row.seq == 1
        with pytest.raises(EncryptionError):
            _ = row.payload
    assert with_key.dead_letters(vault)[0].payload == SECRET


def test_keys_rotate(make_client: ClientFactory, vault: str) -> None:
    make_client(keyring=Keyring([OLD])).push(vault, [{"payload": 1}])
    both = make_client(keyring=Keyring([NEW, OLD]))
    both.push(vault, [{"payload": 2}])
    assert [message.payload for message in both.pop(vault)] == [1, 2]


def test_an_envelope_cannot_be_moved_or_altered(
    with_key: Any, client: Any, vault: str, sql: psycopg.Connection[Any]
) -> None:
    client.configure_queue("other", encryption_enabled=True)
    with_key.push(vault, [{"payload": 1, "transaction_id": "a"}, {"payload": 2, "transaction_id": "b"}])
    with_key.push("other", [{"payload": 3, "transaction_id": "a"}])
    column = "SELECT payload FROM queen.messages WHERE queue_name = %s AND transaction_id = %s"

    def envelope(queue: str, transaction_id: str) -> Any:
        row = sql.execute(column, (queue, transaction_id)).fetchone()
        assert row is not None
        return row[0]

    original = envelope(vault, "a")
    tampered = {**original, "data": original["data"][:-8] + "AAAAAAA="}
    for forged in (envelope(vault, "b"), envelope("other", "a"), tampered, {"plain": 1}):
        sql.execute(
            "UPDATE queen.message_log AS m SET payload = %s FROM queen.messages AS v"
            " WHERE v.queue_name = %s AND v.transaction_id = 'a'"
            " AND queen.message_id(m.lane_id, m.seq) = v.id",
            (json.dumps(forged), vault),
        )
        with pytest.raises(EncryptionError, match="'a' of queue 'vault'"):
            with_key.pop(vault)


def test_a_requeued_message_decrypts(with_key: Any, vault: str) -> None:
    with_key.push(vault, [{"payload": SECRET}])
    for _ in range(3):  # again and again: the binding is to the first transaction id
        with_key.reject(with_key.pop(vault))
        with_key.requeue_dead_letters(vault)
    (message,) = with_key.pop(vault)
    assert message.payload == SECRET


def test_a_switched_encryption_is_noticed(
    client: Any, with_key: Any, orders: str, sql: psycopg.Connection[Any]
) -> None:
    with_key.push(orders, [{"payload": 1}])
    client.configure_queue(orders, encryption_enabled=True)
    with_key.push(orders, [{"payload": SECRET}])
    assert SECRET not in stored(sql)
    client.configure_queue(orders, encryption_enabled=False)
    with_key.push(orders, [{"payload": 3}])
    assert [message.payload for message in with_key.pop(orders)] == [1, SECRET, 3]


def test_a_switched_encryption_is_noticed_in_a_transaction(client: Any, with_key: Any, orders: str) -> None:
    with_key.push(orders, [{"payload": 1}])
    client.configure_queue(orders, encryption_enabled=True)
    with pytest.raises(EncryptionError), with_key.transaction() as tx:
        tx.push(orders, [{"payload": 2}])
    client.configure_queue(orders, encryption_enabled=False)
    with_key.run_in_transaction(lambda tx: tx.push(orders, [{"payload": 3}]))
    assert [message.payload for message in with_key.pop(orders)] == [1, 3]


def test_keys_are_found_in_the_environment(
    make_client: ClientFactory, vault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEEN_ENCRYPTION_KEYS", NEW)
    make_client().push(vault, [{"payload": SECRET}])
    assert make_client().pop(vault)[0].payload == SECRET


def everything_said(error: BaseException) -> str:
    """What any handler could print of an error: its text, its chain, its driver's error."""
    said = [*traceback.format_exception(error), repr(error), repr(error.__dict__)]
    chain = {id(each): each for each in (error.__cause__, error.__context__) if each is not None}
    said += [everything_said(each) for each in chain.values()]
    return "\n".join(said)


TROUBLE = {
    "a failing row": "ALTER TABLE queen.message_log ADD CHECK (payload::text NOT LIKE '%4111%')",
    "a value that does not convert": "ALTER TABLE queen.message_log ADD CHECK ((payload::text)::integer > 0)",
    "a missing column": "ALTER TABLE queen.message_log DROP COLUMN trace_id CASCADE",
}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_payloads_reach_no_error(
    with_key: Any, orders: str, sql: psycopg.Connection[Any], trouble: str
) -> None:
    sql.execute(TROUBLE[trouble])
    with pytest.raises(QueenError) as caught:
        with_key.push(orders, [{"payload": {"card": SECRET}}])
    said = everything_said(caught.value)
    assert "Error" in said
    assert SECRET not in said


def test_payloads_and_keys_reach_no_log(
    with_key: Any, orders: str, vault: str, sql: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    for name in (None, "psycopg", "psycopg.pq", "airflow_provider_queen"):
        caplog.set_level(logging.DEBUG, logger=name)
    for queue in (orders, vault):
        with_key.push(queue, [{"payload": {"card": SECRET}, "partition": f"p{n}"} for n in range(3)])
        popped = with_key.pop(queue, wait_seconds=1)
        assert SECRET not in repr(popped)
        with_key.nack(popped, error="it failed")
        in_transaction(with_key, lambda tx, queue=queue: tx.push(queue, [{"payload": SECRET}]))
    sql.execute(TROUBLE["a failing row"] + " NOT VALID")
    with suppress(QueenError):
        with_key.push(orders, [{"payload": SECRET}])
    assert SECRET not in caplog.text
    assert NEW not in caplog.text
