"""A waiting pop wakes when there is something, not before and not much later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from airflow_provider_queen.client import ClientOptions, Keyring, QueenClient
from airflow_provider_queen.exceptions import EncryptionError
from tests.client.conftest import ASLEEP, ClientFactory, eventually

pytestmark = pytest.mark.postgres


@pytest.fixture
def in_background() -> Any:
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


Submit = Callable[..., Future[Any]]


def never_polling(make_client: ClientFactory) -> Any:
    """A client that would sleep through the whole test, were it not woken."""
    return make_client(options=ClientOptions(poll_seconds=3600))


@pytest.mark.parametrize("where", [{"queue_name": "orders"}, {"namespace": "shop"}])
def test_a_push_wakes_a_waiting_pop(
    make_client: ClientFactory,
    client: Any,
    sql: psycopg.Connection[Any],
    in_background: Submit,
    where: dict[str, str],
) -> None:
    client.configure_queue("orders", namespace="shop")
    client.configure_queue("other")
    waiting = in_background(never_polling(make_client).pop, **where, wait_seconds=60)
    eventually(lambda: sql.execute(ASLEEP).fetchone() == (1,))
    client.push("other", [{"payload": 0}])  # not for this one
    client.push("orders", [{"payload": 1}])
    assert [message.payload for message in waiting.result(20)] == [1]


def test_a_drained_group_is_woken_again_and_again(
    make_client: ClientFactory, client: Any, orders: str, sql: psycopg.Connection[Any], in_background: Submit
) -> None:
    consumer = never_polling(make_client)
    for n in range(5):
        waiting = in_background(consumer.pop, orders, consumer_group="g", wait_seconds=60)
        eventually(lambda: sql.execute(ASLEEP).fetchone() == (1,))
        client.push(orders, [{"payload": n}])
        (message,) = waiting.result(20)
        assert message.payload == n
        consumer.ack(message)


def test_a_released_message_wakes_another_consumer(
    make_client: ClientFactory, client: Any, orders: str, sql: psycopg.Connection[Any], in_background: Submit
) -> None:
    client.push(orders, [{"payload": 1}])
    held = client.pop(orders, lease_seconds=600)
    waiting = in_background(never_polling(make_client).pop, orders, wait_seconds=60)
    eventually(lambda: sql.execute(ASLEEP).fetchone() == (1,))
    client.release(held)
    assert len(waiting.result(20)) == 1


@pytest.mark.parametrize("pooled", [False, True])
def test_a_message_is_taken_when_it_is_due(make_client: ClientFactory, client: Any, pooled: bool) -> None:
    client.configure_queue("orders", retry_delay=700)
    consumer = make_client(options=ClientOptions(poll_seconds=3600, transaction_pooler=pooled))
    consumer.push("orders", [{"payload": 1}])
    consumer.nack(consumer.pop("orders"))
    started = time.monotonic()
    (message,) = consumer.pop("orders", wait_seconds=60)
    assert message.attempt == 2
    assert 0.3 < time.monotonic() - started < 20


def test_an_expired_lease_is_taken_over(client: Any, make_client: ClientFactory, orders: str) -> None:
    client.push(orders, [{"payload": 1}])
    client.pop(orders, lease_seconds=1)
    (message,) = never_polling(make_client).pop(orders, wait_seconds=60)
    assert message.attempt == 2


def test_the_wait_ends(client: Any, orders: str) -> None:
    started = time.monotonic()
    assert client.pop(orders, wait_seconds=0.5) == []
    assert 0.4 < time.monotonic() - started < 20


def test_a_consumer_that_waited_does_not_go_on_listening(client: Any, orders: str) -> None:
    client.pop(orders, wait_seconds=0.2)
    with client.transaction() as tx:
        if hasattr(tx, "execute"):
            cursor = tx.execute("SELECT * FROM pg_listening_channels()")
            assert tx._loop.run_until_complete(cursor.fetchall()) == []
        else:
            assert tx.connection.execute("SELECT * FROM pg_listening_channels()").fetchall() == []


def test_a_wait_that_fails_does_not_go_on_listening(
    make_client: ClientFactory, client: Any, orders: str
) -> None:
    client.configure_queue(orders, encryption_enabled=True, delayed_processing=1)
    make_client(keyring=Keyring([Keyring.generate_key()])).push(orders, [{"payload": 1}])
    with pytest.raises(EncryptionError):
        client.pop(orders, wait_seconds=30)
    assert getattr(client, "inner", client)._idle == []


def test_others_are_served_while_one_waits(queen_dsn: str) -> None:
    """A heartbeat renews leases over the client whose pop is waiting."""
    with QueenClient(queen_dsn) as client:
        client.configure_queue("orders")
        client.configure_queue("empty")
        client.push("orders", [{"payload": 1}])
        messages = client.pop("orders")
        waiting = threading.Thread(target=client.pop, args=["empty"], kwargs={"wait_seconds": 3})
        waiting.start()
        for _ in range(5):
            client.renew(messages)
        assert waiting.is_alive()
        client.ack(messages)
        waiting.join()
