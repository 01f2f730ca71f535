"""A copy of the schema before it is changed, by PostgreSQL's own program."""

from __future__ import annotations

import os
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from airflow_provider_queen.exceptions import QueenError

# What pg_dump takes from its environment: nothing of a connection stands on its command line.
_VARIABLES = {
    "host": "PGHOST",
    "hostaddr": "PGHOSTADDR",
    "port": "PGPORT",
    "dbname": "PGDATABASE",
    "user": "PGUSER",
    "password": "PGPASSWORD",
    "sslmode": "PGSSLMODE",
    "sslrootcert": "PGSSLROOTCERT",
    "sslcert": "PGSSLCERT",
    "sslkey": "PGSSLKEY",
}


def backup(conninfo: str, folder: Path, program: str = "pg_dump") -> Path:
    """Dump the schema ``queen`` into a new file of ``folder``, in the format of ``pg_restore``."""
    if shutil.which(program) is None:
        raise QueenError(f"{program} was not found: install PostgreSQL's client programs, or back up by hand")
    if not folder.is_dir():
        raise QueenError(f"the backup folder {folder} is not there")
    path = folder / f"queen-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.dump"
    parts = conninfo_to_dict(conninfo)
    environment = os.environ | {
        name: str(parts[key]) for key, name in _VARIABLES.items() if parts.get(key) is not None
    }
    done = subprocess.run(
        [program, "--schema=queen", "--format=custom", f"--file={path}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        path.unlink(missing_ok=True)
        raise QueenError(f"{program} failed, nothing was changed: {done.stderr.strip()[-500:]}")
    return path
