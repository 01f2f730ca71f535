"""What Airflow is told about us is what Airflow understands, and all that is named is there."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from airflow_provider_queen.get_provider_info import get_provider_info

# Airflow's repository asks for these of its own providers: a release state, a page, a build system.
BUILD_ONLY = {"external-doc-url", "versions", "state", "lifecycle", "build-system", "source-date-epoch"}
# Where Airflow's code reads other keys than its schema names; see providers_manager.py.
READ_BY_THE_CODE = {"task-decorators": {"name", "class-name"}, "plugins": {"name", "plugin-class"}}


def airflow_schema(name: str) -> Any:
    return json.loads(files("airflow").joinpath(name).read_text())


def strict_schema() -> Any:
    """The schema of provider.yaml, which refuses unknown keys, less what only a release of Airflow needs."""
    schema = airflow_schema("provider.yaml.schema.json")
    for part in (schema, schema["properties"]["integrations"]["items"]):
        part["required"] = [name for name in part.get("required", []) if name not in BUILD_ONLY]
    # The only level that the schema leaves open, and where our form stands.
    schema["properties"]["connection-types"]["items"]["additionalProperties"] = False
    return schema


def class_paths(info: dict[str, Any]) -> Iterator[str]:
    for connection in info["connection-types"]:
        yield connection["hook-class-name"]
    for key in ("notifications", "cli", "extra-links", "queues"):
        yield from info.get(key, ())
    for decorator in info.get("task-decorators", ()):
        yield decorator["class-name"]
    for plugin in info.get("plugins", ()):
        yield plugin["plugin-class"]


def modules(info: dict[str, Any]) -> list[str]:
    kinds = ("hooks", "operators", "sensors", "triggers")
    return [module for kind in kinds for entry in info.get(kind, ()) for module in entry["python-modules"]]


def test_airflow_accepts_it() -> None:
    jsonschema.validate(get_provider_info(), airflow_schema("provider_info.schema.json"))


def test_every_key_is_one_that_airflow_knows() -> None:
    jsonschema.validate(get_provider_info(), strict_schema())
    for key, names in READ_BY_THE_CODE.items():
        for item in get_provider_info().get(key, ()):
            assert set(item) == names
    for key in ("queues", "notifications", "cli", "extra-links"):
        assert all(isinstance(item, str) for item in get_provider_info().get(key, ()))


@pytest.mark.parametrize(
    "path",
    [
        ("conection-types",),
        ("connection-types", 0, "conn_fields"),
        ("connection-types", 0, "ui-field-behaviour", "relabelling"),
        ("connection-types", 0, "conn-fields", "sslmode", "lable"),
        ("hooks", 0, "python-module"),
    ],
)
def test_a_misspelt_key_would_be_noticed(path: tuple[str | int, ...]) -> None:
    info = get_provider_info()
    part: Any = info
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(info, strict_schema())


@pytest.mark.parametrize("path", sorted(class_paths(get_provider_info())))
def test_every_class_that_is_named_is_there(path: str) -> None:
    assert callable(pkgutil.resolve_name(path))


def test_every_module_of_a_kind_is_named_and_imports() -> None:
    info = get_provider_info()
    package = Path(sys.modules["airflow_provider_queen"].__path__[0])
    for module in modules(info):
        __import__(module)
    for kind in ("hooks", "operators", "sensors", "triggers"):
        there = {
            f"airflow_provider_queen.{kind}.{path.stem}"
            for path in (package / kind).glob("*.py")
            if not path.stem.startswith("_")
        }
        assert there == {module for module in modules(info) if f".{kind}." in module}


def test_the_integration_of_each_module_is_ours() -> None:
    info = get_provider_info()
    ours = {entry["integration-name"] for entry in info["integrations"]}
    named = {
        entry["integration-name"]
        for kind in ("hooks", "operators", "sensors", "triggers")
        for entry in info.get(kind, ())
    }
    assert named == ours


def test_the_form_hides_the_keys_and_offers_the_database_fields() -> None:
    connection = get_provider_info()["connection-types"][0]
    assert connection["connection-type"] == "queen"
    assert connection["conn-fields"]["encryption_keys"]["schema"]["format"] == "password"
    assert "verify-full" in connection["conn-fields"]["sslmode"]["schema"]["enum"]
    shown = {"host", "port", "schema", "login", "password"}
    assert not shown & set(connection["ui-field-behaviour"].get("hidden-fields", ()))
    assert connection["ui-field-behaviour"]["relabeling"]["schema"] == "Database"
    for field in connection["conn-fields"].values():
        jsonschema.validate(None, field["schema"])  # each may stay empty


def test_the_form_offers_what_the_hook_takes_and_nothing_else() -> None:
    from airflow_provider_queen.hooks.queen import KEYS_EXTRA, LIBPQ_EXTRAS, OPTION_NAMES

    fields = get_provider_info()["connection-types"][0]["conn-fields"]
    assert set(fields) == LIBPQ_EXTRAS | OPTION_NAMES | {KEYS_EXTRA}


def test_the_form_offers_the_isolation_levels_of_the_client() -> None:
    from airflow_provider_queen.client.options import ISOLATION_LEVELS

    fields = get_provider_info()["connection-types"][0]["conn-fields"]
    assert fields["isolation_level"]["schema"]["enum"] == [*ISOLATION_LEVELS, None]


def test_both_entry_points_lead_to_it() -> None:
    (provider,) = entry_points(
        group="apache_airflow_provider", module="airflow_provider_queen.get_provider_info"
    )
    assert provider.load() is get_provider_info
    (plugin,) = entry_points(group="airflow.plugins", name="queen")
    assert plugin.load().name == "queen"


def test_airflows_own_plugin_manager_finds_the_plugin() -> None:
    from airflow.plugins_manager import _get_plugins

    plugins, errors = _get_plugins()
    assert "queen" in {plugin.name for plugin in plugins}
    assert not {name: error for name, error in errors.items() if "queen" in name}


def test_airflows_own_form_has_the_fields() -> None:
    from airflow.providers_manager import ProvidersManager

    manager = ProvidersManager()
    fields = {
        widget.field_name: widget
        for name, widget in manager.connection_form_widgets.items()
        if name.startswith("extra__queen__")
    }
    assert set(fields) == set(get_provider_info()["connection-types"][0]["conn-fields"])
    assert {name for name, widget in fields.items() if widget.is_sensitive} == {
        "encryption_keys",
        "sslpassword",
    }
    assert manager.field_behaviours["queen"]["relabeling"] == {"schema": "Database"}


@pytest.mark.airflow
def test_the_airflow_command_shows_it() -> None:
    def airflow(*arguments: str) -> Any:
        program = Path(sys.executable).parent / "airflow"
        command = [program, "providers", *arguments, "--output", "json"]
        answer = subprocess.run(command, capture_output=True, text=True)
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout[answer.stdout.index("[") :])

    listed = {row["package_name"]: row for row in airflow("list")}
    assert listed["airflow-provider-queen"]["description"].startswith("Partitioned FIFO queues")
    (shown,) = airflow("get", "airflow-provider-queen", "--full")
    assert shown["package-name"] == "airflow-provider-queen"
    assert "airflow_provider_queen.hooks.queen.QueenHook" in str(shown["connection-types"])
    assert "encryption_keys" in str(shown["connection-types"])
