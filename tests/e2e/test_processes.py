"""What the end-to-end test starts can be killed one by one, and does not outlive the test."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from airflow_provider_queen.embedded.guard import GuardedFolder, process_started_at
from tests.e2e.processes import Processes

ROOT = Path(__file__).resolve().parents[2]
# Says its child's number, in a process group of its own as Airflow's tasks are.
FAMILY = [
    sys.executable,
    "-c",
    "import subprocess; print(subprocess.Popen(['sleep', '300'], process_group=0).pid, flush=True); input()",
]
OWNER = """if True:
    import json, time
    from airflow_provider_queen.embedded.guard import GuardedFolder
    from tests.e2e.processes import Processes
    folder = GuardedFolder("queen-e2e-")
    pid = Processes(folder, {"PATH": "/usr/bin:/bin"}).start("lasting", ["sleep", "300"])
    print(json.dumps([str(folder.path), pid]), flush=True)
    time.sleep(300)
"""
