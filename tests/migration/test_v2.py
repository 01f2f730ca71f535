"""From Queen v2 to the present tables and back, with data: nothing lost, nothing delivered again."""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_provider_queen import resources
from airflow_provider_queen.client import QueenClient, schema
from airflow_provider_queen.client.schema import v2
from airflow_provider_queen.exceptions import InvalidOptionError, QueenError, SchemaVersionError
from tests.client.conftest import eventually
from tests.migration.generator import generate, generate_schema
from tests.migration.state import State, difference, present_state, v2_state

pytestmark = pytest.mark.postgres

Sql = psycopg.Connection[Any]
V2 = "0000_v2"


@pytest.fixture
def sql(postgres_dsn: str) -> Iterator[Sql]:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        generate_schema(connection)
        yield connection


@pytest.fixture
def filled(sql: Sql) -> State:
    generate(sql, messages=3000)
    return v2_state(sql)


@pytest.mark.slow
def test_up_down_and_up_again(sql: Sql, postgres_dsn: str) -> None:
    generate(sql, messages=200_000 if sql.info.server_version >= 180000 else 20_000)
    before = v2_state(sql)
    assert schema.current_version(sql) == V2
    report = schema.migrate(postgres_dsn)
    assert (report.from_version, report.to_version) == (V2, schema.head_version())
    present = present_state(sql)
    assert difference(before, present) == ""
    assert schema.migrate(postgres_dsn, V2).to_version == V2
    assert difference(before, v2_state(sql)) == ""
    schema.migrate(postgres_dsn)
    assert difference(present, present_state(sql)) == ""


def test_a_migrated_queue_works(filled: State, sql: Sql, postgres_dsn: str) -> None:
    schema.migrate(postgres_dsn)
    client = QueenClient(postgres_dsn)
    delivered: dict[tuple[str, str], list[str]] = {}
    group = next(group for (queue, _, group) in filled.pending if queue == "queue-0")
    while messages := client.pop("queue-0", consumer_group=group, batch_size=500, max_partitions=10):
        for message in messages:
            delivered.setdefault((message.queue_name, message.partition), []).append(message.transaction_id)
        client.ack(messages)
    client.close()
    leased = {key for key in filled.leases if key[::2] == ("queue-0", group)}
    expected = {
        (queue, partition): [transaction_id for transaction_id, _ in pending]
        for (queue, partition, name), pending in filled.pending.items()
        if (queue, name) == ("queue-0", group) and (queue, partition, name) not in leased
    }
    # All that was pending and not leased; of those with a delay or a window nothing was due in this test.
    assert delivered == expected


def test_the_way_back_takes_along_what_happened_meanwhile(filled: State, sql: Sql, postgres_dsn: str) -> None:
    schema.migrate(postgres_dsn)
    client = QueenClient(postgres_dsn)
    client.configure_queue("new", lease_time=60)
    client.push(
        "new", [{"payload": n, "partition": f"p{n % 2}", "transaction_id": f"new-{n}"} for n in range(9)]
    )
    client.push("new", [{"payload": "first", "partition": "p0", "transaction_id": "urgent", "priority": 9}])
    client.push("queue-0", [{"payload": n, "transaction_id": f"late-{n}"} for n in range(5)])
    popped = client.pop("queue-0", consumer_group="newcomer", batch_size=50, max_partitions=3)
    client.settle(completed=popped[10:20], failed=popped[20:25], rejected=popped[5:8], error="no")
    client.pop("new", batch_size=2)
    client.close()
    present = present_state(sql)
    assert difference(filled, present)

    schema.migrate(postgres_dsn, V2)
    assert difference(present, v2_state(sql)) == ""
    [row] = sql.execute("SELECT count(*) FROM queen.messages WHERE transaction_id LIKE 'late-%'")
    assert row == (5,)
    schema.migrate(postgres_dsn)
    assert difference(present, present_state(sql)) == ""


def test_back_to_v2_without_its_tables(filled: State, sql: Sql, postgres_dsn: str) -> None:
    schema.migrate(postgres_dsn)
    assert schema.migrate(postgres_dsn, "0002").applied == ["0002_drop_v2"]
    schema.check(sql)  # it works as before
    assert sql.execute("SELECT to_regnamespace('queen_v2')").fetchone() == (None,)
    assert not schema.migrate(postgres_dsn).changed  # head does not lead back
    assert difference(filled, present_state(sql)) == ""
    schema.migrate(postgres_dsn, V2)
    assert difference(filled, v2_state(sql)) == ""


def test_a_transaction_id_that_repeats_in_another_partition_survives_the_way_back(
    sql: Sql, postgres_dsn: str
) -> None:
    schema.migrate(postgres_dsn)
    client = QueenClient(postgres_dsn)
    client.configure_queue("orders")
    client.push("orders", [{"payload": 1, "partition": p, "transaction_id": "same"} for p in "abc"])
    client.close()
    schema.migrate(postgres_dsn, V2)
    ids = [row[0] for row in sql.execute("SELECT transaction_id FROM queen.messages ORDER BY transaction_id")]
    assert ids[0] == "same"
    assert [each.partition("#")[0] for each in ids] == ["same"] * 3


def test_v2s_tables_are_dropped_by_a_step_of_their_own(filled: State, sql: Sql, postgres_dsn: str) -> None:
    with pytest.raises(InvalidOptionError, match="two steps"):
        schema.migrate(postgres_dsn, "0002")
    assert difference(filled, v2_state(sql)) == ""


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            "UPDATE queen.messages SET created_at = NULL WHERE transaction_id = 'tx-7'",
            "1 messages have no created_at",
        ),
        (
            "UPDATE queen.messages SET partition_id = NULL WHERE transaction_id = 'tx-7'",
            "1 messages belong to no",
        ),
        ("UPDATE queen.partitions SET name = '' WHERE name = 'partition-4'", "have an empty name"),
    ],
)
def test_what_could_not_be_taken_over_is_named(
    filled: State, sql: Sql, postgres_dsn: str, change: str, problem: str
) -> None:
    assert schema.preflight(postgres_dsn).running_leases > 0
    sql.execute(change)  # type: ignore[arg-type]
    for look in (schema.preflight, schema.migrate):
        with pytest.raises(QueenError, match=problem):
            look(postgres_dsn)
    assert sql.execute("SELECT to_regnamespace('queen_next')").fetchone() == (None,)


def test_the_hook_names_the_way_out_of_v2(sql: Sql) -> None:
    with pytest.raises(SchemaVersionError, match="queen_migrate"):
        schema.check(sql)


def test_a_dry_run_for_psql_does_the_same(filled: State, sql: Sql, postgres_dsn: str) -> None:
    script = schema.dry_run(postgres_dsn)
    assert difference(filled, v2_state(sql)) == ""
    for statement in _outside_transactions(script):
        sql.execute(statement.encode())
    assert schema.current_version(sql) == schema.head_version()
    assert difference(filled, present_state(sql)) == ""


def _outside_transactions(script: str) -> list[str]:
    """The script as psql sends it: what runs outside transactions wants a message of its own."""
    alone = re.compile(r"^(CALL [^;]+;|CREATE INDEX CONCURRENTLY [^;]+;)$", re.MULTILINE)
    return [part for part in alone.split(script) if part.strip()]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v2, "COPY_CHUNK", 400)


class _AtProgress(logging.Handler):
    """Does something when the copy reports for the n-th time."""

    def __init__(self, number: int, action: Callable[[], object]) -> None:
        super().__init__()
        self._left = number
        self._action = action

    def emit(self, record: logging.LogRecord) -> None:
        if "messages of about" in record.getMessage():
            self._left -= 1
            if self._left == 0:
                self._action()


@pytest.fixture
def at_progress() -> Iterator[Callable[[int, Callable[[], object]], None]]:
    log = logging.getLogger(v2.__name__)
    level, handlers = log.level, []

    def add(number: int, action: Callable[[], object]) -> None:
        handlers.append(_AtProgress(number, action))
        log.addHandler(handlers[-1])

    log.setLevel(logging.INFO)
    yield add
    log.setLevel(level)
    for handler in handlers:
        log.removeHandler(handler)


def _kill_migration(sql: Sql) -> None:
    sql.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE application_name = 'queen schema' AND datname = current_database()"
    )


@pytest.mark.usefixtures("small_chunks")
def test_a_crash_at_each_chunk(
    filled: State, sql: Sql, postgres_dsn: str, at_progress: Callable[[int, Callable[[], object]], None]
) -> None:
    crashes = 0
    while True:
        at_progress(1, lambda: _kill_migration(sql))
        try:
            schema.migrate(postgres_dsn)
            break
        except (QueenError, psycopg.Error):
            crashes += 1
            assert difference(filled, v2_state(sql)) == ""  # nobody has lost anything yet
    assert crashes >= 5
    assert difference(filled, present_state(sql)) == ""


@pytest.mark.parametrize("script", ["cutover", "verify"])
def test_a_failed_cutover_leaves_v2_as_it_was(
    filled: State, sql: Sql, postgres_dsn: str, tmp_path: Path, script: str
) -> None:
    folder = tmp_path / "sql"
    shutil.copytree(resources.sql_folder(), folder)
    with (folder / "v2" / f"{script}.sql").open("a") as file:
        file.write("\nSELECT 1 / 0;\n")
    with pytest.raises(QueenError, match="division by zero"):
        schema.migrate(postgres_dsn, sql_folder=folder)
    assert difference(filled, v2_state(sql)) == ""
    sql.execute(
        "INSERT INTO queen.messages (transaction_id, partition_id, payload)"
        " SELECT 'on', id, '1' FROM queen.partitions LIMIT 1"
    )
    # Given up: not a trace of it is left.
    assert schema.migrate(postgres_dsn, V2).abandoned
    assert sql.execute("SELECT to_regnamespace('queen_v2'), to_regnamespace('queen_next')").fetchone() == (
        None,
        None,
    )
    assert sql.execute("SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'queen_v2%'").fetchone() == (0,)
    assert schema.migrate(postgres_dsn).changed
    assert sql.execute("SELECT count(*) FROM queen.messages WHERE transaction_id = 'on'").fetchone() == (1,)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE queen_next.message_log SET payload = '666' WHERE seq = 3",
        "DELETE FROM queen_next.message_log WHERE seq = 3",
        "UPDATE queen_next.consumer_states SET cursor = cursor + 1 WHERE consumer_id % 5 = 0",
        "DELETE FROM queen_next.queue_groups WHERE consumer_group = '__QUEUE_MODE__'",
    ],
)
def test_verification_finds_what_differs(
    filled: State, sql: Sql, postgres_dsn: str, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "sql"
    shutil.copytree(resources.sql_folder(), folder)
    cutover = folder / "v2" / "cutover.sql"
    text = cutover.read_text()
    place = "LOCK TABLE queen.messages,"
    assert place in text
    damaged = f"{damage};\nUPDATE queen_v2.partition_map SET verified = 0, checksum = 0;\n{place}"
    cutover.write_text(text.replace(place, damaged))
    with pytest.raises(QueenError, match=r"v2 is as it was|differ from the originals"):
        schema.migrate(postgres_dsn, sql_folder=folder)
    assert difference(filled, v2_state(sql)) == ""


def test_two_migrations_at_once(filled: State, sql: Sql, postgres_dsn: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        reports = [each.result() for each in [pool.submit(schema.migrate, postgres_dsn) for _ in range(3)]]
    assert sorted(report.changed for report in reports) == [False, False, True]
    assert difference(filled, present_state(sql)) == ""


class _Producer(threading.Thread):
    """Writes to v2 until v2 is gone; knows what was committed, and how long a push took at most."""

    def __init__(self, dsn: str, number: int) -> None:
        super().__init__()
        self._dsn = dsn
        self._number = number
        self.stored: list[str] = []
        self.deleted: set[str] = set()
        self.longest = 0.0
        self.end: psycopg.Error | None = None

    def run(self) -> None:
        with psycopg.connect(self._dsn) as connection:
            partitions = [
                row[0] for row in connection.execute("SELECT id FROM queen.partitions ORDER BY name")
            ]
            connection.rollback()
            try:
                for turn in range(100_000):
                    started = time.perf_counter()
                    try:
                        self._push(connection, partitions, turn)
                    finally:  # the last one waits for the cutover, and is told then
                        self.longest = max(self.longest, time.perf_counter() - started)
            except psycopg.Error as error:
                self.end = error

    def _push(self, connection: psycopg.Connection[Any], partitions: list[uuid.UUID], turn: int) -> None:
        ids = [f"live-{self._number}-{turn}-{n}" for n in range(5)]
        with connection.transaction(), connection.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO queen.messages (transaction_id, partition_id, payload) VALUES (%s, %s, '{}')",
                [(each, partitions[(turn + self._number) % len(partitions)]) for each in ids],
            )
            if turn % 7 == 6:  # others commit meanwhile, and this one's time is older than theirs
                cursor.execute("SELECT pg_sleep(0.05)")
            if turn % 11 == 10:
                gone = self.stored[-1]
                cursor.execute("DELETE FROM queen.messages WHERE transaction_id = %s", [gone])
        self.stored += ids
        if turn % 11 == 10:
            self.deleted.add(gone)


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_producers_that_go_on_lose_nothing(filled: State, sql: Sql, postgres_dsn: str) -> None:
    producers = [_Producer(postgres_dsn, number) for number in range(4)]
    for producer in producers:
        producer.start()
    eventually(lambda: all(len(producer.stored) > 50 for producer in producers), 60)
    schema.migrate(postgres_dsn)
    for producer in producers:
        producer.join(60)
        assert producer.end is not None  # it was told: v2 is no more

    stored = {each for producer in producers for each in producer.stored}
    deleted = {each for producer in producers for each in producer.deleted}
    found = {row[0] for row in sql.execute("SELECT transaction_id FROM queen.messages")}
    old = {transaction_id for messages in filled.messages.values() for transaction_id, *_ in messages}
    assert found == old | stored - deleted
    # Dense, and in v2's order: present_state looks at both.
    present = present_state(sql)
    kept = {row[0]: row[1] for row in sql.execute("SELECT transaction_id, id FROM queen_v2.messages")}
    for messages in present.messages.values():
        places = [(message[3], kept[message[0]]) for message in messages]
        assert places == sorted(places)
    longest = max(producer.longest for producer in producers)
    logging.getLogger(__name__).warning("the longest push during the migration took %.2f s", longest)
    # Three seconds is the longest that a lock is waited for, which holds up whoever comes after.
    assert longest < 15


def test_a_straggler_cannot_write_where_nobody_reads(filled: State, sql: Sql, postgres_dsn: str) -> None:
    schema.migrate(postgres_dsn)
    for table in ("messages", "messages_status", "partition_cursors", "queues"):
        with pytest.raises(psycopg.errors.RaiseException, match="was migrated"):
            sql.execute(f"DELETE FROM queen_v2.{table}")  # type: ignore[arg-type]
    with pytest.raises(psycopg.Error):
        sql.execute(
            "INSERT INTO queen.messages (transaction_id, partition_id, payload) VALUES ('x', NULL, '1')"
        )


def test_a_reader_that_holds_on_delays_the_cutover_and_nothing_else(
    filled: State, sql: Sql, postgres_dsn: str
) -> None:
    with psycopg.connect(postgres_dsn) as reader, ThreadPoolExecutor(1) as pool:
        reader.execute("SELECT count(*) FROM queen.messages_status")
        migration = pool.submit(schema.migrate, postgres_dsn)
        eventually(lambda: _waits_for_lock(sql), 60)
        reader.rollback()
        assert migration.result(60).changed
    assert difference(filled, present_state(sql)) == ""


def _waits_for_lock(sql: Sql) -> bool:
    query = (
        "SELECT 1 FROM pg_stat_activity WHERE application_name = 'queen schema' AND wait_event_type = 'Lock'"
    )
    return sql.execute(query).fetchone() is not None
