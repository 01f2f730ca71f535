"""What every test may ask for: PostgreSQL servers, migrated databases, one Spark session, Airflow's database.

Servers are started when the first test asks for them and shared by all; databases are each test's own.
Everything lies in guarded folders, which vanish with this process, however it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from airflow_provider_queen import resources
from airflow_provider_queen.embedded.guard import GuardedFolder
from airflow_provider_queen.embedded.java import find_java_home
from airflow_provider_queen.embedded.postgres import PostgresServer, find_system_postgres

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUEEN_TEMPLATE = "queen_template"
SESSION_FOLDER = GuardedFolder("queen-tests-")


def _prepare_environment(folder: Path) -> None:
    """Airflow and Spark read these once, when they are imported: so before any test module is."""
    for name in list(os.environ):
        # A developer's own Airflow, Spark or libpq settings have no say in the tests.
        if name.startswith(("AIRFLOW_", "SPARK_", "PYSPARK_", "PG")):
            del os.environ[name]
    airflow_home = folder / "airflow"
    scratch = folder / "spark"
    airflow_home.mkdir()
    scratch.mkdir()
    os.environ |= {
        "AIRFLOW_HOME": str(airflow_home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(resources.dags_folder()),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__DATABASE__LOAD_DEFAULT_CONNECTIONS": "False",
        "JAVA_HOME": str(find_java_home()),
        # The first spark-submit on the PATH is the one that operators start.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_DIRS": str(scratch),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def _heed_signals() -> None:
    """A shell starts background jobs with these ignored, and so would be what the tests start and end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


_prepare_environment(SESSION_FOLDER.path)
_heed_signals()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Each test's ``tmp_path`` goes with the run too, unless ``--basetemp`` says where to keep it."""
    if config.option.basetemp is None:
        config.option.basetemp = str(SESSION_FOLDER.path / "tmp")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests stay together when several processes share the run (``make test`` starts three).

    Those of one file, since they share its fixtures; all that need Spark, since a session takes 20 s to
    start; and all that run Dags, since the first ``dag.test()`` of a process takes as long.
    """
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        group = next((name for name in ("spark", "airflow_db") if name in fixtures), None)
        item.add_marker(pytest.mark.xdist_group(group or item.nodeid.partition("::")[0]))
    # The longest first, so that no process is left alone with one of them at the end.
    long = (
        "tests/e2e/",
        "tests/demo/test_demo.py",
        "tests/spark/",
        "tests/migration/test_v2.py",
        "tests/dags/",
        "tests/engine/test_model.py",
    )
    items.sort(
        key=lambda item: next((i for i, path in enumerate(long) if item.nodeid.startswith(path)), len(long))
    )


@pytest.fixture(scope="session")
def session_folder() -> Path:
    """A folder that lives as long as the run: for what several tests share."""
    return SESSION_FOLDER.path


@pytest.fixture(scope="session")
def postgres_18() -> Iterator[PostgresServer]:
    """The PostgreSQL that the wheel carries."""
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_15() -> Iterator[PostgresServer]:
    """The system's PostgreSQL: Debian's 15, or whatever ``QUEEN_TEST_PG_BIN`` names."""
    found = find_system_postgres()
    if not found:
        reason = "no system PostgreSQL found; name its bin folder in QUEEN_TEST_PG_BIN"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with PostgresServer(found[0]) as server:
        yield server


@pytest.fixture(params=["18", "15"])
def postgres_server(request: pytest.FixtureRequest) -> PostgresServer:
    """Each of the two in turn; shared, so a test that stops its server starts one of its own."""
    server: PostgresServer = request.getfixturevalue(f"postgres_{request.param}")
    return server


@pytest.fixture
def postgres_dsn(postgres_server: PostgresServer) -> Iterator[str]:
    """A fresh, empty database."""
    yield from _database(postgres_server, template="template0")


@pytest.fixture
def queen_dsn(
    postgres_server: PostgresServer, queen_template: Callable[[PostgresServer], str]
) -> Iterator[str]:
    """A fresh database with the schema ``queen`` at its head."""
    yield from _database(postgres_server, template=queen_template(postgres_server))


@pytest.fixture(scope="session")
def queen_template() -> Callable[[PostgresServer], str]:
    """The name of a migrated database to copy, made once per server: a copy is faster than a migration."""
    migrated: set[PostgresServer] = set()

    def template(server: PostgresServer) -> str:
        if server not in migrated:
            from airflow_provider_queen.client.schema import migrate

            server.drop_database(QUEEN_TEMPLATE)  # what a failed migration left behind
            migrate(server.create_database(QUEEN_TEMPLATE))
            migrated.add(server)
        return QUEEN_TEMPLATE

    return template


def _database(server: PostgresServer, template: str) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex}"
    yield server.create_database(name, template)
    server.drop_database(name)


@pytest.fixture(scope="session")
def spark(session_folder: Path) -> Iterator[SparkSession]:
    """The one Spark session of the run: starting it costs more than most tests."""
    from pyspark.sql import SparkSession

    folder = session_folder / "spark"
    # -XX:-UsePerfData and the folders: otherwise Java and Derby leave files in /tmp and in the checkout.
    java = f"-XX:-UsePerfData -Duser.timezone=UTC -Djava.io.tmpdir={folder} -Dderby.system.home={folder}"
    session = (
        SparkSession.builder.master("local[2]")
        .appName("queen-tests")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", java)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def airflow_db() -> None:
    """Airflow's metadata database: SQLite in the run's own AIRFLOW_HOME."""
    from airflow.utils.db import initdb

    initdb()
