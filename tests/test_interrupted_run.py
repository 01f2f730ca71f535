"""A run of this suite that is ended in the middle leaves neither servers nor folders behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from airflow_provider_queen.embedded.guard import process_started_at

ROOT = Path(__file__).resolve().parent.parent
TEST = """
import json, pathlib, sys, time

def test_until_it_is_ended(postgres_18, postgres_dsn, session_folder, tmp_path):
    found = {
        "process": postgres_18.pid,
        "folders": [str(postgres_18.folder), str(session_folder), str(tmp_path)],
    }
    report = pathlib.Path(__file__).with_name("report")
    report.with_suffix(".new").write_text(json.dumps(found))
    report.with_suffix(".new").rename(report)
    time.sleep(600)
"""


@pytest.mark.postgres
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_it(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "test_endless.py").write_text(TEST)
    report = tmp_path / "report"
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    run = subprocess.Popen(
        [*command, "-k", "18", "--rootdir", tmp_path, "-c", ROOT / "pyproject.toml", tmp_path],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while not report.exists():
            assert run.poll() is None, f"the run ended by itself with exit code {run.returncode}"
            assert time.monotonic() < deadline, "the run did not reach its test"
            time.sleep(0.02)
        found = json.loads(report.read_text())
        assert process_started_at(found["process"]) is not None
        assert all(Path(folder).exists() for folder in found["folders"])

        run.send_signal(number)
        run.wait(60)

        deadline = time.monotonic() + 30
        while process_started_at(found["process"]) or any(Path(f).exists() for f in found["folders"]):
            assert time.monotonic() < deadline, f"something of {found} is left"
            time.sleep(0.02)
    finally:
        run.kill()
        run.wait()
