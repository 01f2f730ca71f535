"""OpenLineage, where it is installed; here a stand-in is, with what is used of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from airflow_provider_queen.operators.pop import QueenPopOperator
from airflow_provider_queen.operators.push import QueenPushOperator


@dataclass
class Dataset:
    namespace: str
    name: str


@dataclass
class OperatorLineage:
    inputs: list[Dataset] = field(default_factory=list)
    outputs: list[Dataset] = field(default_factory=list)


@pytest.fixture
def openlineage(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(name: str, **content: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, made)

    for package in ("airflow.providers.openlineage", "openlineage", "openlineage.client"):
        module(package)
    module("airflow.providers.openlineage.extractors", OperatorLineage=OperatorLineage)
    module("openlineage.client.event_v2", Dataset=Dataset)
    monkeypatch.setenv("AIRFLOW_CONN_QUEEN_DEFAULT", "postgres://me:s3cret@db.example/shop")


@pytest.mark.usefixtures("openlineage")
def test_queues_are_datasets() -> None:
    push = QueenPushOperator(task_id="push", queue_name="orders", messages=[1])
    orders = Dataset("queen://db.example:5432", "shop.orders")
    assert push.get_openlineage_facets_on_start() == OperatorLineage(outputs=[orders])
    pop = QueenPopOperator(task_id="pop", queue_name="orders", process=print, forward_to="next")
    expected = OperatorLineage([orders], [Dataset("queen://db.example:5432", "shop.next")])
    assert pop.get_openlineage_facets_on_start() == expected
    assert pop.get_openlineage_facets_on_complete(None) == expected


@pytest.mark.usefixtures("openlineage")
def test_of_a_namespace_the_queues_are_known_in_the_end() -> None:
    pop = QueenPopOperator(task_id="pop", namespace="billing")
    assert pop.get_openlineage_facets_on_start() == OperatorLineage()
    pop._queues_read = {"b", "a"}
    found: Any = pop.get_openlineage_facets_on_complete(None)
    assert [dataset.name for dataset in found.inputs] == ["shop.a", "shop.b"]


def test_without_the_provider_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "airflow.providers.openlineage", None)
    push = QueenPushOperator(task_id="push", queue_name="orders", messages=[1])
    assert push.get_openlineage_facets_on_start() is None
    assert push.get_openlineage_facets_on_complete(None) is None
