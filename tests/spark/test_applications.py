"""What all Spark applications have in common: how they end when they cannot begin."""

from __future__ import annotations

import pytest

from tests.spark.apps import load_app

SECRET = "n0t-to-be-seen-4711"
APPLICATIONS = {
    "eviction": [],
    "metrics": [],
    "restore": ["--archive", "/nowhere", "--queue-name", "orders"],
    "retention": [],
}


def end_of(name: str, *arguments: str) -> int | str | None:
    try:
        code: int = load_app(name).main([*APPLICATIONS[name], *arguments])
    except SystemExit as ended:
        return ended.code
    return code


@pytest.mark.parametrize("name", APPLICATIONS)
@pytest.mark.parametrize(
    ("dsn", "sentence"),
    [
        (
            f"host=127.0.0.1 port=1 dbname=q password={SECRET}",
            "cannot connect to PostgreSQL at host=127.0.0.1",
        ),
        (f"host=127.0.0.1 {SECRET}", "is no libpq connection string"),
        ("", "no database to read: set QUEEN_DSN"),
    ],
)
def test_without_a_database_they_end_with_a_sentence_and_2(
    name: str,
    dsn: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("QUEEN_DSN", dsn)
    assert end_of(name) == 2
    errors = capsys.readouterr().err.strip()
    assert errors.startswith(f"queen-{name}: ")
    assert sentence in errors
    assert "\n" not in errors
    assert SECRET not in errors


@pytest.mark.parametrize("name", APPLICATIONS)
def test_without_the_schema_they_name_the_dag_that_makes_it(
    name: str, postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUEEN_DSN", postgres_dsn)
    assert end_of(name) == 2
    errors = capsys.readouterr().err.strip()
    assert "run the Dag queen_migrate" in errors
    assert "\n" not in errors


@pytest.mark.parametrize("name", APPLICATIONS)
@pytest.mark.parametrize("argument", ["--spark-threshold=0", "--spark-threshold=many", "--no-such", "--dry"])
def test_bad_arguments_end_with_a_sentence_and_2(
    name: str, argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end_of(name, argument) == 2
    errors = capsys.readouterr().err.strip()
    assert errors.startswith(f"queen-{name}: ")
    assert "\n" not in errors
