"""The link to the Queen page."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import BaseOperator

from airflow_provider_queen.links.queen import QueenLink
from airflow_provider_queen.operators.pop import QueenPopOperator
from airflow_provider_queen.operators.push import QueenPushOperator

KEY: Any = None


def test_it_leads_to_the_queue_of_the_task() -> None:
    link = QueenLink()
    assert (link.name, link.xcom_key) == ("Queen", "_link_QueenLink")
    push = QueenPushOperator(task_id="push", queue_name="a b&c", messages=[1])
    assert link.get_link(push, ti_key=KEY) == "/plugin/queen?queue_name=a+b%26c&queen_conn_id=queen_default"
    pop = QueenPopOperator(task_id="pop", namespace="billing", consumer_group="audit")
    assert link.get_link(pop, ti_key=KEY) == (
        "/plugin/queen?namespace=billing&consumer_group=audit&queen_conn_id=queen_default"
    )


def test_it_stands_on_airflows_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://example.org/airflow")
    assert QueenLink().get_link(BaseOperator(task_id="other"), ti_key=KEY) == (
        "https://example.org/airflow/plugin/queen"
    )
