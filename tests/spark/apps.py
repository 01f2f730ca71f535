"""Loads Spark applications as modules, and runs them as the operator would see them."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_provider_queen.resources import spark_app

#: For tests of SQL functions, which must do on both servers.
BOTH_SERVERS = pytest.mark.parametrize("postgres_server", ["18", "15"], indirect=True)


def load_app(name: str) -> ModuleType:
    """Return ``spark_apps/<name>.py`` as a module."""
    spec = importlib.util.spec_from_file_location(f"queen_app_{name}", spark_app(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def summary_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The last line that an application printed."""
    summary: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return summary


def connection_json(dsn: str) -> str:
    """A database as an Airflow connection."""
    parts = conninfo_to_dict(dsn)
    fields = {
        "conn_type": "postgres",
        "host": parts.get("host"),
        "schema": parts.get("dbname"),
        "login": parts.get("user"),
        "password": parts.get("password"),
    }
    return json.dumps({**fields, **({"port": int(parts["port"])} if parts.get("port") else {})})
