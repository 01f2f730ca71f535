"""The migrate operator, on real servers."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import Mock

import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_provider_queen.client.schema import head_version
from airflow_provider_queen.exceptions import InvalidOptionError
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.operators.migrate import QueenMigrateOperator

pytestmark = pytest.mark.postgres


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch, postgres_dsn: str) -> None:
    """``queen_default`` is an empty database."""
    parts = conninfo_to_dict(postgres_dsn)
    connection = {
        "conn_type": "queen",
        "host": parts["host"],
        "port": int(str(parts["port"])),
        "login": parts["user"],
        "password": parts["password"],
        "schema": parts["dbname"],
    }
    monkeypatch.setenv("AIRFLOW_CONN_QUEEN_DEFAULT", json.dumps(connection))


class Log:
    """Airflow's own goes to structlog, past what pytest captures."""

    def __init__(self) -> None:
        self.text = ""

    def info(self, message: str, *values: object) -> None:
        self.text += message % values

    warning = info


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(QueenMigrateOperator, "log", log)
    return log


def execute(**arguments: Any) -> tuple[dict[str, Any], Mock]:
    task_instance = Mock()
    operator = QueenMigrateOperator(task_id="migrate", **arguments)
    return operator.execute({"ti": task_instance}), task_instance


@pytest.mark.usefixtures("empty")
def test_up_and_down_and_nothing_to_do(log: Log) -> None:
    head = head_version()
    up, _ = execute()
    assert (up["from"], up["to"], up["applied"][-1], up["changed"]) == (None, head, head, True)
    assert QueenHook().schema_version() == head
    assert "Nothing to do" not in log.text

    again, _ = execute()
    assert again == {"from": head, "to": head, "applied": [], "changed": False}
    assert f"Nothing to do: the schema queen is up to date at {head}" in log.text

    down, _ = execute(target="base")
    assert (down["from"], down["to"], down["changed"]) == (head, None, True)
    assert QueenHook().schema_version() is None


@pytest.mark.usefixtures("empty")
def test_a_dry_run_says_the_same_and_changes_nothing(log: Log) -> None:
    planned, task_instance = execute(dry_run=True)
    assert QueenHook().schema_version() is None
    (sql,) = (call.kwargs["value"] for call in task_instance.xcom_push.mock_calls)
    assert "CREATE TABLE queen.queues" in sql
    assert sql in log.text
    done, _ = execute()
    assert planned == done


@pytest.mark.usefixtures("empty")
def test_an_unknown_revision_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="unknown schema revision '0999'"):
        execute(target="0999")


def test_what_is_templated() -> None:
    operator = QueenMigrateOperator(
        task_id="migrate", target="{{ params.to }}", queen_conn_id="{{ params.where }}"
    )
    operator.render_template_fields({"params": {"to": "0001", "where": "other"}})
    assert (operator.target, operator.queen_conn_id) == ("0001", "other")
    assert operator.hook.queen_conn_id == "other"
