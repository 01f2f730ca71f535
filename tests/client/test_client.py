"""Both clients against a real server: what goes in comes out, and what must not happen does not."""

from __future__ import annotations

import datetime as dt
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from airflow_provider_queen.client import QueenClient, Requeued, SettleResult
from airflow_provider_queen.exceptions import (
    DatabaseUnreachableError,
    InvalidOptionError,
    LeaseLostError,
    QueenError,
    QueueFullError,
    QueueNotFoundError,
    SchemaVersionError,
)
from tests.client.conftest import SESSIONS, eventually

pytestmark = pytest.mark.postgres


def numbers(messages: list[Any]) -> list[Any]:
    return [message.payload for message in messages]


def test_a_message_comes_out_as_it_went_in(client: Any, orders: str) -> None:
    trace = str(uuid.uuid4())
    payload = {"n": 1, "text": 'ä "quoted" \\ \u0000', "list": [None, True, 1.5, 10**20]}
    (result,) = client.push(
        orders,
        [{"payload": payload, "partition": "c-1", "transaction_id": "o-1", "trace_id": trace, "priority": 4}],
    )
    assert (result.status, result.transaction_id, result.partition) == ("queued", "o-1", "c-1")
    assert (result.seq, result.priority) == (1, 4)
    (message,) = client.pop(orders, consumer_group="audit", lease_seconds=30)
    assert message.payload == payload
    assert message.id == result.message_id
    assert (message.transaction_id, message.trace_id) == ("o-1", trace)
    assert (message.queue_name, message.partition, message.seq, message.priority) == (orders, "c-1", 1, 4)
    assert (message.attempt, message.consumer_group) == (1, "audit")
    assert uuid.UUID(message.lease_id)
    assert message.created_at.utcoffset() == dt.timedelta(0)
    remaining = message.lease_expires_at - dt.datetime.now(dt.UTC)
    assert dt.timedelta(seconds=20) < remaining < dt.timedelta(seconds=40)
    assert client.ack([message]) == SettleResult(completed=1)
    assert client.pop(orders, consumer_group="audit") == []


def test_results_come_in_the_order_of_the_messages(client: Any, orders: str) -> None:
    messages = [
        {"payload": n, "partition": f"p{n % 3}", "priority": n % 2, "transaction_id": f"t{n}"}
        for n in range(20)
    ]
    results = client.push(orders, messages)
    assert [result.transaction_id for result in results] == [f"t{n}" for n in range(20)]
    assert [result.partition for result in results] == [f"p{n % 3}" for n in range(20)]
    assert [result.priority for result in results] == [n % 2 for n in range(20)]


def test_a_duplicate_answers_with_the_first(client: Any, orders: str) -> None:
    (first,) = client.push(orders, [{"payload": 1, "transaction_id": "same"}])
    results = client.push(orders, [{"payload": 2}, {"payload": 3, "transaction_id": "same"}, {"payload": 4}])
    assert [result.status for result in results] == ["queued", "duplicate", "queued"]
    assert (results[1].message_id, results[1].seq) == (first.message_id, first.seq)
    assert [result.seq for result in results] == [2, 1, 3]
    assert numbers(client.pop(orders)) == [1, 2, 4]


def test_queue_mode_has_no_group(client: Any, orders: str) -> None:
    client.push(orders, [{"payload": 1}])
    (message,) = client.pop(orders)
    assert message.consumer_group is None
    client.reject(message, error="no")
    assert client.dead_letters(orders)[0].consumer_group is None
    assert [row.consumer_group for row in client.stats(orders)] == [None]


def test_push_pop_and_settle_are_one_round_trip(client: Any, orders: str) -> None:
    client.push(orders, [{"payload": 0}])
    client.ack(client.pop(orders))  # the connection is open, the queue known
    inner = getattr(client, "inner", client)
    (connection,) = inner._idle
    with tempfile.TemporaryFile("a+b") as log:

        def trips(call: Callable[[], Any]) -> tuple[Any, int]:
            log.truncate(0)
            connection.pgconn.trace(log.fileno())
            answer = call()
            connection.pgconn.untrace()
            log.seek(0)
            return answer, log.read().count(b"ReadyForQuery")

        messages = [{"payload": n, "partition": f"p{n}"} for n in range(50)]
        assert trips(lambda: client.push(orders, messages))[1] == 1
        popped, count = trips(lambda: client.pop(orders, max_partitions=50))
        assert (len(popped), count) == (50, 1)
        mix = {"completed": popped[::2], "failed": popped[1::2], "error": "x"}
        assert trips(lambda: client.settle(**mix))[1] == 1
        assert trips(lambda: client.pop("orders"))[1] == 1


def test_any_mix_is_settled_in_one_call(client: Any, orders: str) -> None:
    client.configure_queue(orders, retry_limit=5)
    client.push(orders, [{"payload": n} for n in range(10)])
    messages = client.pop(orders)
    result = client.settle(
        completed=messages[0:3],
        failed=messages[3:5],
        rejected=messages[5:6],
        released=messages[6:9],
        error="why",
    )
    assert result == SettleResult(completed=3, retried=2, dead_lettered=1, dropped=0, released=3, remaining=1)
    client.release(messages[9])
    again = client.pop(orders)
    assert numbers(again) == [3, 4, 6, 7, 8, 9]
    assert [message.attempt for message in again] == [2, 2, 1, 1, 1, 1]
    (dead,) = client.dead_letters(orders)
    assert (dead.payload, dead.error_message) == (5, "why")


def test_settling_twice_or_after_a_takeover_is_refused(client: Any, orders: str) -> None:
    client.push(orders, [{"payload": 1}, {"payload": 2}])
    messages = client.pop(orders, lease_seconds=1)
    client.ack(messages[:1])
    with pytest.raises(LeaseLostError):
        client.ack(messages)
    assert client.depth(orders).pending == 1
    second = eventually(lambda: client.pop(orders, lease_seconds=60))
    assert (numbers(second), second[0].attempt) == ([2], 2)
    for settle in (client.ack, client.nack, client.reject, client.release, client.renew):
        with pytest.raises(LeaseLostError):
            settle(messages[1:])
    client.ack(second)


def test_renewing_extends_the_lease(client: Any, orders: str) -> None:
    client.push(orders, [{"payload": n, "partition": f"p{n}"} for n in range(3)])
    messages = client.pop(orders, max_partitions=3, lease_seconds=5)
    leases = client.renew(messages, seconds=600)
    assert {lease.lease_id for lease in leases} == {message.lease_id for message in messages}
    for lease in leases:
        assert lease.lease_expires_at > messages[0].lease_expires_at + dt.timedelta(seconds=300)


def test_auto_ack_needs_no_settlement(client: Any, orders: str) -> None:
    client.push(orders, [{"payload": 1}])
    (message,) = client.pop(orders, auto_ack=True)
    assert (message.lease_id, message.lease_expires_at, message.payload) == (None, None, 1)
    assert client.depth(orders).pending == 0
    with pytest.raises(InvalidOptionError, match="has no lease"):
        client.ack([message])


def test_a_wildcard_pops_over_queues(client: Any) -> None:
    client.configure_queue("a", namespace="billing", priority=1)
    client.configure_queue("b", namespace="billing", task="mail", priority=5)
    client.configure_queue("c", namespace="other")
    for name in "abc":
        client.push(name, [{"payload": name}])
    assert numbers(client.pop(namespace="billing", max_partitions=5, consumer_group="g")) == ["b", "a"]
    assert numbers(client.pop(task="mail", consumer_group="h")) == ["b"]
    assert numbers(client.pop(namespace="other", auto_ack=True)) == ["c"]
    assert client.depth(namespace="billing", consumer_group="g").in_flight == 2


def test_the_rows_of_a_dashboard(client: Any, orders: str) -> None:
    client.push(orders, [{"payload": n} for n in range(3)])
    (row,) = client.stats(orders)
    assert (row.subscribed, row.consumer_group, row.retained) == (False, None, 3)
    client.ack(client.pop(orders, batch_size=1))
    client.pop(orders, batch_size=1)
    (row,) = client.stats(orders)
    assert (row.subscribed, row.pending, row.in_flight, row.cursor, row.last_seq) == (True, 2, 1, 1, 3)
    depth = client.depth(orders)
    assert (depth.pending, depth.in_flight, depth.dead_letters) == (2, 1, 0)
    assert depth.oldest_age_seconds >= 0


def test_seek_and_groups(client: Any, orders: str) -> None:
    client.push(orders, [{"payload": 1}, {"payload": 2}])
    client.ack(client.pop(orders, consumer_group="audit"))
    assert client.seek(orders, consumer_group="audit", to="beginning") == 1
    assert numbers(client.pop(orders, consumer_group="audit")) == [1, 2]
    client.seek(orders, consumer_group="audit", to=dt.datetime.now(dt.UTC) + dt.timedelta(hours=1))
    assert client.pop(orders, consumer_group="audit") == []
    client.seek(orders, consumer_group="audit", to="end")
    (group,) = client.list_consumer_groups(orders)
    assert (group.consumer_group, group.queue_name, group.pending) == ("audit", orders, 0)
    client.delete_consumer_group("audit", queue_name=orders)
    assert client.list_consumer_groups(orders) == []


def test_subscription_modes(client: Any, orders: str) -> None:
    client.push(orders, [{"payload": 1}])
    middle = dt.datetime.now(dt.UTC)
    assert client.pop(orders, consumer_group="new", subscription_mode="new") == []
    client.push(orders, [{"payload": 2}])
    assert numbers(client.pop(orders, consumer_group="new", subscription_mode="new")) == [2]
    since = {"subscription_mode": "timestamp", "subscription_from": middle}
    assert numbers(client.pop(orders, consumer_group="since", **since)) == [2]


def test_messages_are_listed_by_pages_newest_first(client: Any, orders: str) -> None:
    client.push(orders, [{"payload": n} for n in range(5)])
    page = client.list_messages(orders, limit=2)
    assert numbers(page) == [4, 3]
    assert numbers(client.list_messages(orders, after=page[-1], limit=2)) == [2, 1]
    assert numbers(client.list_messages(orders, partition="Default", after=page[-1].id)) == [2, 1, 0]
    assert page[0].partition == "Default"


def test_a_trace_crosses_queues_in_the_order_of_time(client: Any, orders: str) -> None:
    trace = uuid.uuid4()
    client.configure_queue("mails")
    client.push(orders, [{"payload": 1, "trace_id": trace}, {"payload": 0}])
    client.push("mails", [{"payload": 2, "trace_id": str(trace)}])
    assert [(each.queue_name, each.payload) for each in client.trace(trace)] == [(orders, 1), ("mails", 2)]


def test_dead_letters_come_back_once(client: Any, orders: str) -> None:
    trace = str(uuid.uuid4())
    client.push(orders, [{"payload": n, "trace_id": trace, "transaction_id": f"t{n}"} for n in range(3)])
    client.reject(client.pop(orders), error="bad")
    letters = client.dead_letters(orders, limit=2)
    assert numbers(letters) == [2, 1]
    assert numbers(client.dead_letters(orders, after=letters[-1])) == [0]
    (requeued,) = client.requeue_dead_letters(orders, ids=[letters[0]])
    assert isinstance(requeued, Requeued)
    assert client.requeue_dead_letters(orders, ids=[letters[0].id]) == [requeued]
    (message,) = client.pop(orders)
    assert (message.id, message.payload, message.trace_id) == (requeued.message_id, 2, trace)
    assert client.list_messages(orders, limit=1)[0].requeued_from == letters[0].message_id
    assert numbers(client.dead_letters(orders)) == [1, 0]
    assert client.dead_letters(orders, include_requeued=True)[0].requeued_message_id == requeued.message_id
    assert client.purge_dead_letters(orders, ids=[]) == 0
    assert client.purge_dead_letters(orders, ids=[letters[1]]) == 1
    assert client.depth(orders).dead_letters == 1


def test_maintenance_answers(client: Any, orders: str) -> None:
    client.configure_queue("old", max_wait_time_seconds=1)
    client.push("old", [{"payload": 1}])
    client.pop("old", consumer_group="g", batch_size=1, lease_seconds=1)
    eventually(lambda: client.reclaim())
    (evicted,) = eventually(lambda: client.evict())
    assert (evicted.queue_name, evicted.consumer_group, evicted.evicted) == ("old", "g", 1)
    assert client.retain() == []
    client.configure_queue(orders, retention_enabled=True, retention_seconds=1)
    client.push(orders, [{"payload": 1}, {"payload": 2}])
    (retained,) = eventually(lambda: client.retain(orders))
    assert (retained.queue_name, retained.partition, retained.deleted) == (orders, "Default", 2)


def test_queues_are_configured_listed_and_deleted(client: Any) -> None:
    made = client.configure_queue("orders", lease_time=60, namespace="shop")
    assert (made.name, made.lease_time, made.retry_limit, made.namespace) == ("orders", 60, 3, "shop")
    assert client.configure_queue("orders", retry_limit=7).lease_time == 60
    client.configure_queue("mails")
    assert [queue.queue_name for queue in client.list_queues()] == ["mails", "orders"]
    assert [queue.retry_limit for queue in client.list_queues(namespace="shop")] == [7]
    assert client.delete_queue("orders") is True
    assert client.delete_queue("orders") is False
    with pytest.raises(QueueNotFoundError, match=r"'orders'.*'mails'"):
        client.push("orders", [{"payload": 1}])


def test_a_full_queue_takes_all_or_nothing(client: Any) -> None:
    client.configure_queue("small", max_queue_size=2)
    client.push("small", [{"payload": 1}])
    with pytest.raises(QueueFullError, match="'small'"):
        client.push("small", [{"payload": 2}, {"payload": 3}])
    assert client.depth("small").pending == 1


STATE = """
SELECT
    (SELECT count(*) FROM queen.queues), (SELECT count(*) FROM queen.messages),
    (SELECT count(*) FROM queen.partitions), (SELECT count(*) FROM queen.partition_consumers),
    (SELECT count(*) FROM queen.consumer_groups_metadata), (SELECT count(*) FROM queen.dead_letter_queue),
    (SELECT count(*) FROM queen.deliveries),
    (SELECT md5(string_agg(q::text, ',' ORDER BY q.id)) FROM queen.queues AS q)
"""


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c, m: c.push("ordesr", [{"payload": 1}]), QueueNotFoundError),
        (lambda c, m: c.push("orders", [{"payload": "x" * 2**20}]), InvalidOptionError),
        (lambda c, m: c.push("orders", [{"payload": 1}, {"payload": float("nan")}]), InvalidOptionError),
        (
            lambda c, m: c.push(
                "orders", [{"payload": 1, "partition": "new"}, {"payload": 1, "priority": 10}]
            ),
            InvalidOptionError,
        ),
        (lambda c, m: c.push("orders", [{"payload": 1, "transaction_id": "x" * 256}]), InvalidOptionError),
        (lambda c, m: c.pop("ordesr"), QueueNotFoundError),
        (lambda c, m: c.pop("orders", consumer_group="x" * 256), InvalidOptionError),
        (lambda c, m: c.pop("orders", consumer_group="g", batch_size=0), InvalidOptionError),
        (lambda c, m: c.pop("orders", consumer_group="g", batch_size=-1), InvalidOptionError),
        (lambda c, m: c.pop("orders", consumer_group="g", lease_seconds=0), InvalidOptionError),
        (lambda c, m: c.pop("orders", consumer_group="g", max_partitions=0), InvalidOptionError),
        (lambda c, m: c.pop("orders", consumer_group="g", subscription_mode="latest"), InvalidOptionError),
        (lambda c, m: c.pop("orders", consumer_group="g", subscription_mode="timestamp"), InvalidOptionError),
        (
            lambda c, m: c.pop(
                "orders",
                consumer_group="g",
                subscription_mode="timestamp",
                subscription_from=dt.datetime(2026, 1, 1),
            ),
            InvalidOptionError,
        ),
        (lambda c, m: c.pop("orders", namespace="n"), InvalidOptionError),
        (lambda c, m: c.pop(), InvalidOptionError),
        (lambda c, m: c.configure_queue("fresh", leese_time=1), InvalidOptionError),
        (lambda c, m: c.configure_queue("fresh", lease_time=0), InvalidOptionError),
        (lambda c, m: c.configure_queue("fresh", lease_time=-5), InvalidOptionError),
        (lambda c, m: c.configure_queue("orders", lease_time="long"), InvalidOptionError),
        (lambda c, m: c.configure_queue("orders", lease_time=None), InvalidOptionError),
        (lambda c, m: c.configure_queue("orders", lease_time=2**40), InvalidOptionError),
        (lambda c, m: c.configure_queue("orders", max_queue_size=-1), InvalidOptionError),
        (lambda c, m: c.configure_queue(""), InvalidOptionError),
        (lambda c, m: c.configure_queue("a\0b"), InvalidOptionError),
        (lambda c, m: c.configure_queue("x" * 256), InvalidOptionError),
        (lambda c, m: c.settle(completed=m, failed=m), InvalidOptionError),
        (lambda c, m: c.renew(m, seconds=0), InvalidOptionError),
        (lambda c, m: c.depth("ordesr"), QueueNotFoundError),
        (lambda c, m: c.seek("ordesr", "g", to="end"), QueueNotFoundError),
        (lambda c, m: c.seek("orders", "g", to="middle"), InvalidOptionError),
        (lambda c, m: c.dead_letters("ordesr"), QueueNotFoundError),
        (lambda c, m: c.list_messages("ordesr"), QueueNotFoundError),
        (lambda c, m: c.requeue_dead_letters("ordesr"), QueueNotFoundError),
        (lambda c, m: c.purge_dead_letters("ordesr"), QueueNotFoundError),
    ],
)
def test_bad_input_changes_nothing(
    client: Any,
    orders: str,
    sql: psycopg.Connection[Any],
    call: Callable[[Any, Any], Any],
    error: type[Exception],
) -> None:
    client.push(orders, [{"payload": 1}, {"payload": 2}])
    client.reject(client.pop(orders, batch_size=1))
    messages = client.pop(orders)
    before = sql.execute(STATE).fetchone()
    with pytest.raises(error) as caught:
        call(client, messages)
    assert sql.execute(STATE).fetchone() == before
    if error is QueueNotFoundError:
        assert "'ordesr'" in str(caught.value)
        assert "'orders'" in str(caught.value)
    client.ack(messages)


def test_empty_lists_open_no_connection(client_class: type[Any]) -> None:
    with client_class("host=nowhere.invalid") as client:
        assert client.push("orders", []) == []
        assert client.ack([]) == SettleResult()
        assert client.renew([]) == []
        with pytest.raises(InvalidOptionError):
            client.pop("orders", batch_size=0)


def test_an_unreachable_server_is_named_without_the_password(client_class: type[Any]) -> None:
    with client_class("host=127.0.0.1 port=1 user=me password=s3cret dbname=db") as client:
        with pytest.raises(
            DatabaseUnreachableError, match=r"host=127.0.0.1 port=1 dbname=db user=me"
        ) as caught:
            client.depth("orders")
        assert "s3cret" not in str(caught.value)
        assert caught.value.__context__ is None


def test_a_database_without_the_schema_is_refused(client_class: type[Any], postgres_dsn: str) -> None:
    with client_class(postgres_dsn) as client, pytest.raises(SchemaVersionError, match="queen_migrate"):
        client.depth("orders")
    unchecked = client_class(postgres_dsn, check_schema=False)
    with unchecked as client, pytest.raises(SchemaVersionError, match="queen_migrate"):
        client.depth("orders")


def test_another_version_of_the_schema_is_refused(
    client_class: type[Any], queen_dsn: str, sql: psycopg.Connection[Any]
) -> None:
    sql.execute("UPDATE queen.alembic_version SET version_num = '9999_later'")
    with client_class(queen_dsn) as client, pytest.raises(SchemaVersionError, match="9999_later"):
        client.depth("orders")


def test_close_closes_every_connection(client: Any, orders: str, sql: psycopg.Connection[Any]) -> None:
    client.push(orders, [{"payload": 1}])
    assert sql.execute(SESSIONS).fetchone() == (1,)
    client.close()
    eventually(lambda: sql.execute(SESSIONS).fetchone() == (0,))


def test_a_closed_client_says_so(queen_dsn: str) -> None:
    with QueenClient(queen_dsn) as client:
        pass
    with pytest.raises(QueenError, match="is closed"):
        client.depth("orders")


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_a_forgotten_client_leaves_no_connection(queen_dsn: str, sql: psycopg.Connection[Any]) -> None:
    QueenClient(queen_dsn).list_queues()
    eventually(lambda: sql.execute(SESSIONS).fetchone() == (0,))


def test_what_is_read_as_text_here_is_not_in_the_callers_sql(queen_dsn: str) -> None:
    with QueenClient(queen_dsn) as client, client.transaction() as tx:
        tx.configure_queue("orders")
        tx.push("orders", [{"payload": 1}])
        assert isinstance(tx.pop("orders")[0].id, str)
        row = tx.connection.execute("SELECT gen_random_uuid(), '{}'::json").fetchone()
        assert row is not None
        assert isinstance(row[0], uuid.UUID)
        assert row[1] == {}
