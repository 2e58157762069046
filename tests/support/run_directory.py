"""The one directory a test run shares: which servers are up, which processes run, and who cleans up.

With several workers the controller makes it and the workers attach to it. Servers start when the first test asks and are
then everybody's. The controller holds a lock for as long as it lives; the keeper, a small process of its own, waits for that
lock and, whatever ended the controller, stops every server, kills every process left over and removes the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from tests.support.postgres import PostgresServer
from tests.support.processes import kill_registered, wait_until
from tests.support.redis import RedisServer
from tests.support.s3 import S3Server

Server = TypeVar("Server", PostgresServer, RedisServer, S3Server)

KINDS: dict[str, type[PostgresServer] | type[RedisServer] | type[S3Server]] = {
    "postgres": PostgresServer,
    "redis": RedisServer,
    "s3": S3Server,
}
REPOSITORY = Path(__file__).resolve().parents[2]
CLEANUP_TIMEOUT_S = 60
MEMORY = Path("/dev/shm")
MEMORY_BYTES_MIN = 4 << 30


def use_memory_for_files() -> None:
    """Put temporary files into memory, where a sync costs nothing, unless TMPDIR names a place or memory has no room.

    Servers and products sync as they always do. What survives a power cut is proven from a journal of the syncs (`support/power.py`), and
    what survives a killed process lies in the kernel's hands on any file system.
    """
    if os.environ.get("TMPDIR") or not MEMORY.is_dir():
        return
    found = os.statvfs(MEMORY)
    # Containers often forbid to run programs from there, and the copied servers and the shims must run.
    if found.f_bavail * found.f_frsize >= MEMORY_BYTES_MIN and not found.f_flag & os.ST_NOEXEC:
        os.environ["TMPDIR"] = str(MEMORY)
        tempfile.tempdir = None


class ServiceFailed(Exception):
    """A server that the tests need could not be started."""


class RunDirectory:
    """Made by `create` in the controller, by `attach` everywhere else."""

    def __init__(self, path: Path, alive_fd: int | None = None) -> None:
        self.path = path
        self.processes = path / "processes"
        self._services = path / "services"
        self._alive_fd = alive_fd

    @classmethod
    def create(cls) -> RunDirectory:
        path = Path(tempfile.mkdtemp(prefix="tidegate-tests-"))
        # The PostgreSQL server may run as an unprivileged user, who must be able to pass through.
        path.chmod(0o755)
        (path / "services").mkdir()
        alive_fd = os.open(path / "alive", os.O_CREAT | os.O_RDWR)
        fcntl.flock(alive_fd, fcntl.LOCK_EX)
        return cls(path, alive_fd)

    @classmethod
    def attach(cls, path: str) -> RunDirectory:
        return cls(Path(path))

    def left_to_controller(self) -> RunDirectory:
        """The same in a worker that was forked from the controller: only the controller's life keeps it."""
        if self._alive_fd is not None:
            os.close(self._alive_fd)
        return RunDirectory.attach(str(self.path))

    def shared(self, kind: type[Server]) -> Server:
        """The run's server of this kind, started by the process that asks first; one that failed to start fails all who ask."""
        directory = self._services / f"{_name(kind)}-shared"
        ready, failed = directory.with_suffix(".ready"), directory.with_suffix(".failed")
        with self._lock():
            server = kind(directory)
            if failed.exists():
                raise ServiceFailed(failed.read_text())
            if not ready.exists():
                self._ensure_keeper()
                try:
                    server.start()
                except Exception as failure:
                    failed.write_text(_explain(kind, failure))
                    raise ServiceFailed(failed.read_text()) from failure
                ready.touch()
        return server

    @contextlib.contextmanager
    def private(self, kind: type[Server]) -> Iterator[Server]:
        """A server for one test alone, to be broken at will."""
        with self._lock():
            self._ensure_keeper()
        server = kind(self._services / f"{_name(kind)}-{secrets.token_hex(4)}")
        try:
            server.start()
        except Exception as failure:
            raise ServiceFailed(_explain(kind, failure)) from failure
        try:
            yield server
        finally:
            server.stop()
            shutil.rmtree(server.directory, ignore_errors=True)

    def process_registry(self) -> Path:
        """Where processes are noted; the process that asks may be killed before cleaning up, so the keeper must be there."""
        with self._lock():
            self._ensure_keeper()
        return self.processes

    def close(self) -> None:
        """The controller's last act: let go, and wait until the keeper, if there is one, has cleaned up."""
        if self._alive_fd is None:
            return
        # Looked at before letting go: a quick keeper has removed everything a moment later.
        has_keeper = (self.path / "keeper.pid").exists()
        os.close(self._alive_fd)
        self._alive_fd = None
        if has_keeper:
            wait_until(lambda: not self.path.exists(), CLEANUP_TIMEOUT_S, f"the test servers in {self.path} to stop")
        else:
            shutil.rmtree(self.path)

    def clean_up(self) -> None:
        """Stop and remove everything; the keeper's work. One failure does not keep the rest from being stopped."""
        kill_registered(self.processes)
        for directory in self._services.iterdir():
            kind = KINDS.get(directory.name.split("-")[0])
            if kind is not None and directory.is_dir() and directory.name != "postgres-programs":
                try:
                    kind(directory).stop()
                except Exception:
                    traceback.print_exc()
        shutil.rmtree(self.path)

    def _ensure_keeper(self) -> None:
        pid_path = self.path / "keeper.pid"
        if pid_path.exists():
            return
        with (self.path / "keeper.log").open("ab") as log:
            keeper = subprocess.Popen(
                [sys.executable, "-m", "tests.support.keeper", str(self.path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=REPOSITORY,
                start_new_session=True,
            )
        pid_path.write_text(str(keeper.pid))

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        fd = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _name(kind: type[PostgresServer] | type[RedisServer] | type[S3Server]) -> str:
    return next(name for name, known in KINDS.items() if known is kind)


def _explain(kind: type[PostgresServer] | type[RedisServer] | type[S3Server], failure: Exception) -> str:
    return (
        f"the {_name(kind)} server that this test needs did not start, so the test cannot pass: "
        f"{type(failure).__name__}: {failure}"
    )
