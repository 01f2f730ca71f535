"""The environment that Airflow and Spark run in: everything in one folder, nothing of the user's own."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from base64 import urlsafe_b64encode
from dataclasses import dataclass
from pathlib import Path

from airflow_provider_queen import resources
from airflow_provider_queen.embedded.java import find_java_home
from airflow_provider_queen.embedded.postgres import PostgresServer

HOST = "127.0.0.1"
USER = "admin"
_USUAL_PORT = 8080
_METADATA, _QUEUE = "airflow", "queue"
_OTHERS = ("AIRFLOW_", "SPARK_", "PYSPARK_", "PG", "QUEEN_")


@dataclass(frozen=True)
class Login:
    """Where the UI will be, and who may use it."""

    port: int
    password: str

    @classmethod
    def create(cls) -> Login:
        return cls(_free_port(), secrets.token_urlsafe(9))

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


def prepare(folder: Path, server: PostgresServer, login: Login | None) -> dict[str, str]:
    """Create both databases and the folders; what to set for the worker.

    :param login: where Airflow's UI is to be, if it is
    """
    server.create_database(_METADATA)
    server.create_database(_QUEUE)
    scratch = folder / "tmp"
    scratch.mkdir()
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}
    return own | _airflow(folder, server) | _spark(scratch) | (_api_server(folder, login) if login else {})


def _airflow(folder: Path, server: PostgresServer) -> dict[str, str]:
    return {
        "AIRFLOW_HOME": str(folder / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(resources.dags_folder()),
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__PARALLELISM": "4",
        "AIRFLOW__DATABASE__LOAD_DEFAULT_CONNECTIONS": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": server.uri(_METADATA),
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "AIRFLOW_CONN_QUEEN_DEFAULT": server.uri(_QUEUE).replace("postgresql:", "queen:", 1),
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[2]"}),
        # Its own programs first: the `airflow` and `spark-submit` of this environment.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }


def _api_server(folder: Path, login: Login) -> dict[str, str]:
    passwords = folder / "passwords.json"
    passwords.touch(mode=0o600)
    passwords.write_text(json.dumps({USER: login.password}))
    return {
        "AIRFLOW__API__BASE_URL": login.url,
        "AIRFLOW__API__HOST": HOST,
        "AIRFLOW__API__PORT": str(login.port),
        "AIRFLOW__API__WORKERS": "1",
        # Without these each process makes up its own, and does not trust the others.
        "AIRFLOW__API__SECRET_KEY": secrets.token_urlsafe(48),
        "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_urlsafe(64),
        "AIRFLOW__CORE__FERNET_KEY": urlsafe_b64encode(secrets.token_bytes(32)).decode(),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(passwords),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"{USER}:admin",
    }


def _spark(scratch: Path) -> dict[str, str]:
    # One compiler stage: the job is over before the second one would pay. The rest keeps Java out of /tmp.
    java = f"-XX:TieredStopAtLevel=1 -XX:-UsePerfData -Djava.io.tmpdir={scratch}"
    return {
        "JAVA_HOME": str(find_java_home()),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LAUNCHER_OPTS": "-XX:-UsePerfData",
        "SPARK_LOCAL_DIRS": str(scratch),
        "SPARK_LOCAL_IP": HOST,
        "SPARK_SUBMIT_OPTS": java,
        "TMPDIR": str(scratch),
    }


def _free_port() -> int:
    """Airflow's usual port where nobody has it, else any."""
    for port in (_USUAL_PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
            return found
    raise OSError(f"no free port on {HOST}")
