"""One migrated database per server for all of these tests, and queues of each test's own in it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from airflow_provider_queen.client import ClientOptions, QueenClient
from airflow_provider_queen.embedded.postgres import PostgresServer
from tests.engine.support import check

MakeQueue = Callable[..., str]

# Nothing in the engine waits this long for anybody: a test that hangs fails here instead.
IMPATIENT = ClientOptions(lock_timeout="5s", statement_timeout="30s")


@pytest.fixture(scope="session", params=["18", "15"])
def engine_server(request: pytest.FixtureRequest) -> PostgresServer:
    server: PostgresServer = request.getfixturevalue(f"postgres_{request.param}")
    return server


@pytest.fixture(scope="session")
def engine_dsn(
    engine_server: PostgresServer, queen_template: Callable[[PostgresServer], str]
) -> Iterator[str]:
    name = f"engine_{uuid.uuid4().hex}"
    yield engine_server.create_database(name, queen_template(engine_server))
    engine_server.drop_database(name)


@pytest.fixture(scope="session")
def scale(engine_server: PostgresServer) -> float:
    """Long tests run in full on one server, and shorter on the other."""
    return 1.0 if engine_server.version.startswith("18") else 0.2


@pytest.fixture(scope="session")
def queen(engine_dsn: str) -> Iterator[QueenClient]:
    """One for all: its connections have their plans, which take longer to make than most tests to run."""
    with QueenClient(engine_dsn, options=IMPATIENT) as client:
        yield client


@pytest.fixture(scope="session")
def sql(engine_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A look at the tables."""
    with psycopg.connect(engine_dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def name() -> Callable[[str], str]:
    """Names that no other test uses."""
    suffix = uuid.uuid4().hex[:10]
    return lambda word: f"{word}-{suffix}"


@pytest.fixture
def make_queue(queen: QueenClient, sql: psycopg.Connection[Any]) -> Iterator[MakeQueue]:
    """Makes queues, and looks at the end of the test whether all is well with them."""
    made: list[str] = []

    def make(**options: Any) -> str:
        queue = f"queue-{uuid.uuid4().hex[:10]}"
        queen.configure_queue(queue, **{"retry_delay": 0, **options})
        made.append(queue)
        return queue

    yield make
    for queue in made:
        if sql.execute("SELECT 1 FROM queen.queues WHERE name = %s", [queue]).fetchone():
            check(sql, queue)


@pytest.fixture
def queue(make_queue: MakeQueue) -> str:
    return make_queue()
