"""Finds the folders that are not Python packages: ``sql``, ``dags`` and ``spark_apps``.

A wheel carries them as package data under ``_resources``; in a checkout they stand beside the package.
Nothing else in the project computes such a path.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _folder(name: str) -> Path:
    for candidate in (_PACKAGE / "_resources" / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"airflow-provider-queen is installed without its {name!r} folder")


def sql_folder() -> Path:
    """Migrations, functions and views of the schema ``queen``."""
    return _folder("sql")


def dags_folder() -> Path:
    """The maintenance Dags and the example Dags."""
    return _folder("dags")


def spark_app(name: str) -> Path:
    """The Spark application ``name``, for example ``metrics.py``."""
    path = _folder("spark_apps") / name
    if not path.is_file():
        known = ", ".join(sorted(p.name for p in path.parent.glob("*.py")))
        raise FileNotFoundError(f"no Spark application {name!r}; there are: {known}")
    return path
