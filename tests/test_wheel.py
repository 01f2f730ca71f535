"""The wheel has everything that a checkout has: it is built, unpacked and used from somewhere else."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from airflow_provider_queen import resources

ROOT = Path(__file__).resolve().parent.parent
INSIDE = "airflow_provider_queen/_resources"

FIND = """
import airflow_provider_queen
from airflow_provider_queen import resources
print(airflow_provider_queen.__file__)
print(resources.sql_folder())
print(resources.dags_folder())
print(resources.spark_app("metrics.py"))
"""
PARSE = """
import sys
from pathlib import Path
from airflow.dag_processing.dagbag import DagBag
from airflow_provider_queen.resources import dags_folder

bag = DagBag(dags_folder())
for file, error in bag.import_errors.items():
    print(file, error, file=sys.stderr)
print(*sorted({Path(dag.fileloc).name for dag in bag.dags.values()}))
sys.exit(bool(bag.import_errors))
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, ROOT]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def elsewhere(program: str, unpacked: Path) -> str:
    """What the program prints when the wheel's package comes first, far from the checkout."""
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(unpacked)},
        cwd=unpacked.parent,
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def shipped(folder: Path) -> set[str]:
    """The files of a folder as they stand in the checkout, without what Python left there."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("name", ["sql", "dags", "spark_apps"])
def test_the_folders_are_inside_whole(unpacked: Path, name: str) -> None:
    assert shipped(unpacked / INSIDE / name) == shipped(ROOT / name) != set()


def test_the_package_is_inside_and_nothing_else(wheel: Path, unpacked: Path) -> None:
    package = shipped(ROOT / "airflow_provider_queen")
    assert {name for name in package if not name.endswith(".pyc")} <= shipped(
        unpacked / "airflow_provider_queen"
    )
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert not [name for name in names if name.endswith(".pyc")]
    top = {name.split("/")[0] for name in names}
    version = wheel.name.split("-")[1]
    assert top == {"airflow_provider_queen", f"airflow_provider_queen-{version}.dist-info"}


def test_the_wheels_own_files_are_found(unpacked: Path) -> None:
    inside = unpacked / INSIDE
    assert elsewhere(FIND, unpacked).split() == [
        str(unpacked / "airflow_provider_queen" / "__init__.py"),
        str(inside / "sql"),
        str(inside / "dags"),
        str(inside / "spark_apps" / "metrics.py"),
    ]


@pytest.mark.airflow
def test_every_dag_in_the_wheel_parses(unpacked: Path) -> None:
    files = sorted(path.name for path in (unpacked / INSIDE / "dags").rglob("*.py"))
    assert elsewhere(PARSE, unpacked).splitlines()[-1].split() == files


def test_the_checkouts_own_files_are_found() -> None:
    assert resources.sql_folder() == ROOT / "sql"
    assert resources.dags_folder() == ROOT / "dags"
    assert resources.spark_app("metrics.py") == ROOT / "spark_apps" / "metrics.py"


def test_an_unknown_application_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no Spark application 'nothing\.py'; there are: .*metrics\.py"
    ):
        resources.spark_app("nothing.py")
