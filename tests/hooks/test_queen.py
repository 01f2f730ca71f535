"""The hook: connections, extras, and the contract's methods over them."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_provider_queen.client import Keyring, QueenClient, schema
from airflow_provider_queen.exceptions import (
    EncryptionError,
    InvalidOptionError,
    QueueNotFoundError,
    SchemaVersionError,
)
from airflow_provider_queen.hooks.queen import QueenHook
from tests.client.conftest import SESSIONS, eventually

KEY = Keyring.generate_key()


def define(monkeypatch: pytest.MonkeyPatch, conn_id: str, dsn: str, **connection: Any) -> None:
    parts = conninfo_to_dict(dsn)
    monkeypatch.setenv(
        f"AIRFLOW_CONN_{conn_id.upper()}",
        json.dumps(
            {
                "conn_type": "queen",
                "host": parts.get("host"),
                "port": int(str(parts.get("port") or 5432)),
                "login": parts.get("user"),
                "password": parts.get("password"),
                "schema": parts.get("dbname"),
                **connection,
            }
        ),
    )


@pytest.fixture
def make_hook(monkeypatch: pytest.MonkeyPatch, queen_dsn: str) -> Any:
    hooks: list[QueenHook] = []

    def make(**connection: Any) -> QueenHook:
        conn_id = f"queen_{len(hooks)}"
        define(monkeypatch, conn_id, queen_dsn, **connection)
        hooks.append(QueenHook(queen_conn_id=conn_id))
        return hooks[-1]

    yield make
    for hook in hooks:
        hook.close()


Make = Callable[..., QueenHook]


def test_the_default_connection() -> None:
    assert QueenHook().queen_conn_id == "queen_default"
    assert QueenHook.conn_type == "queen"


def test_a_hook_looks_up_nothing_until_it_is_used() -> None:
    QueenHook(queen_conn_id="nowhere")


@pytest.mark.postgres
@pytest.mark.parametrize("conn_type", ["queen", "postgres"])
def test_the_contract_over_a_connection(make_hook: Make, conn_type: str) -> None:
    hook = make_hook(conn_type=conn_type)
    hook.configure_queue("orders", lease_time=60, retry_limit=3)
    hook.configure_queue("next")
    results = hook.push("orders", [{"payload": {"n": n}, "partition": "customer-1"} for n in range(4)])
    assert [result.seq for result in results] == [1, 2, 3, 4]
    messages = hook.pop("orders")
    with hook.transaction() as tx:
        tx.ack(messages[:2])
        tx.push("next", [{"payload": message.payload} for message in messages[:2]])
    hook.settle(rejected=messages[2:], error="no")
    assert hook.depth("orders").pending == 0
    assert hook.depth("next").pending == 2
    assert [letter.payload for letter in hook.dead_letters("orders")] == [{"n": 3}, {"n": 2}]
    assert hook.run_in_transaction(lambda tx: tx.depth("next").pending) == 2
    with pytest.raises(QueueNotFoundError, match="'orders'"):
        hook.pop("order")


def test_the_hook_has_every_method_of_the_client() -> None:
    for name, method in inspect.getmembers(QueenClient, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(getattr(QueenHook, name)).parameters.keys() == (
                inspect.signature(method).parameters.keys()
            ), name


@pytest.mark.postgres
def test_a_hook_is_used_again_after_it_was_closed(make_hook: Make) -> None:
    hook = make_hook()
    hook.configure_queue("orders")
    hook.close()
    hook.close()
    assert [queue.name for queue in hook.list_queues()] == ["orders"]


def test_the_dsn_has_what_libpq_needs_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {
        "sslmode": "verify-full",
        "sslrootcert": "/ca.pem",
        "connect_timeout": 3,
        "keepalives_idle": 30,
        "application_name": "shop",
        "encryption_keys": KEY,
        "statement_timeout": 5000,
        "options": "-c search_path=evil",
        "service": "evil",
        "cursor": "dictcursor",
        "sslcert": "",
        "sslkey": None,
    }
    define(monkeypatch, "strict", "host=db port=5433 user=me password='p w' dbname=app", extra=extra)
    assert conninfo_to_dict(QueenHook(queen_conn_id="strict").dsn) == {
        "host": "db",
        "port": "5433",
        "user": "me",
        "password": "p w",
        "dbname": "app",
        "sslmode": "verify-full",
        "sslrootcert": "/ca.pem",
        "connect_timeout": "3",
        "keepalives_idle": "30",
        "application_name": "shop",
    }


def test_every_field_of_the_connection_form_is_taken() -> None:
    from airflow_provider_queen.get_provider_info import get_provider_info
    from airflow_provider_queen.hooks.queen import _KNOWN_EXTRAS

    (connection_type,) = get_provider_info()["connection-types"]
    assert connection_type["conn-fields"].keys() <= _KNOWN_EXTRAS


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"sslmod": "require"}, "'sslmod'; the nearest is 'sslmode'"),
        ({"encryption_key": KEY}, "the nearest is 'encryption_keys'"),
        ({"statement_timeout": "soon"}, "statement_timeout is 'soon'"),
        ({"isolation_level": "none"}, "isolation_level 'none'"),
    ],
)
def test_bad_extras_are_refused(monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], said: str) -> None:
    define(monkeypatch, "bad", "host=db", extra=extra)
    with pytest.raises(InvalidOptionError, match=said) as caught:
        QueenHook(queen_conn_id="bad").list_queues()
    assert KEY not in str(caught.value)


def test_a_bad_key_is_refused_and_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    define(monkeypatch, "bad", "host=db", extra={"encryption_keys": f"{KEY},{KEY[:-9]}"})
    with pytest.raises(EncryptionError, match="key number 2") as caught:
        QueenHook(queen_conn_id="bad").list_queues()
    assert KEY[:-9] not in str(caught.value)


@pytest.mark.postgres
@pytest.mark.parametrize(
    "keys", [KEY, [KEY], f"{KEY},{Keyring.generate_key()}"], ids=["one", "a list", "two in a string"]
)
def test_encryption_keys_come_from_the_connection(make_hook: Make, keys: Any) -> None:
    hook = make_hook(extra={"encryption_keys": keys})
    hook.configure_queue("vault", encryption_enabled=True)
    hook.push("vault", [{"payload": "secret"}])
    with pytest.raises(EncryptionError):
        make_hook().pop("vault")
    assert hook.pop("vault")[0].payload == "secret"


@pytest.mark.postgres
def test_extras_reach_the_session(make_hook: Make) -> None:
    extra = {"statement_timeout": "9s", "isolation_level": "serializable", "application_name": "shop"}
    with make_hook(extra=extra).transaction() as tx:
        row = tx.connection.execute(
            "SELECT current_setting('statement_timeout'), current_setting('transaction_isolation'),"
            " current_setting('application_name')"
        ).fetchone()
    assert row == ("9s", "serializable", "shop")


@pytest.mark.postgres
def test_the_asyncio_client(make_hook: Make) -> None:
    hook = make_hook(extra={"encryption_keys": KEY})
    hook.configure_queue("vault", encryption_enabled=True)

    async def round_trip() -> Any:
        async with await hook.get_async_client() as client:
            await client.push("vault", [{"payload": "secret"}])
            messages = await client.pop("vault", wait_seconds=5)
            await client.ack(messages)
            return messages[0].payload, (await client.depth("vault")).pending

    assert asyncio.run(round_trip()) == ("secret", 0)


@pytest.mark.postgres
def test_migrating_through_the_hook(monkeypatch: pytest.MonkeyPatch, postgres_dsn: str) -> None:
    define(monkeypatch, "empty", postgres_dsn)
    hook = QueenHook(queen_conn_id="empty")
    assert hook.schema_version() is None
    assert hook.test_connection() == (
        True,
        "Connected; the schema queen is missing: run the Dag queen_migrate",
    )
    with pytest.raises(SchemaVersionError):
        hook.list_queues()
    assert hook.migrate().to_version == schema.head_version()
    assert hook.schema_version() == schema.head_version()
    assert hook.test_connection()[0]
    assert hook.list_queues() == []
    hook.migrate("base")
    with pytest.raises(SchemaVersionError):
        hook.list_queues()
    hook.close()


def test_a_connection_test_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    define(monkeypatch, "down", "host=127.0.0.1 port=1 user=me password=s3cret")
    works, message = QueenHook(queen_conn_id="down").test_connection()
    assert not works
    assert "host=127.0.0.1 port=1" in message
    assert "s3cret" not in message


@pytest.mark.postgres
def test_own_sql_over_the_hooks_connection(make_hook: Make) -> None:
    with make_hook().get_conn() as connection:
        assert connection.execute("SELECT count(*) FROM queen.queues").fetchone() == (0,)


@pytest.mark.postgres
def test_the_hook_logs_no_payload_key_or_password(
    make_hook: Make, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    hook = make_hook(extra={"encryption_keys": KEY, "options": "-c x=y"})
    password = conninfo_to_dict(hook.dsn)["password"]
    assert password
    for name in ("orders", "vault"):
        hook.configure_queue(name, encryption_enabled=name == "vault")
        hook.push(name, [{"payload": "4111-1111"}])
        hook.nack(hook.pop(name), error="no")
    said = caplog.text + "".join(capfd.readouterr())
    assert "4111-1111" not in said
    assert KEY not in said
    assert str(password) not in said
    assert "'options' is not used by Queen" in said


@pytest.mark.postgres
def test_a_forgotten_hook_leaves_no_connection(make_hook: Make, queen_dsn: str) -> None:
    QueenHook(queen_conn_id=make_hook().queen_conn_id).list_queues()
    with psycopg.connect(queen_dsn, autocommit=True) as connection:
        eventually(lambda: connection.execute(SESSIONS).fetchone() == (0,))
