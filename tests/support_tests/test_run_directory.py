"""A test run's servers: one of each however many workers, none when no test asks, none left however the run ends."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.support.processes import Proc, wait_until
from tests.support.run_directory import MEMORY, MEMORY_BYTES_MIN, use_memory_for_files

SHARING = """
import os, pathlib, pytest
@pytest.mark.parametrize("turn", range(4))
def test_shares(turn, postgres_server, s3_server, run_directory):
    note = f"{run_directory.path} {postgres_server.port} {s3_server.port}"
    pathlib.Path(__file__).with_name(f"note-{turn}-{os.getpid()}").write_text(note)
"""
# Servers that stop in order write down what they hold, on a disk that others use too.
STOP_S = 150.0
WAITING = """
import sys, time
def test_waits(postgres_server, private_s3_server, processes):
    child = processes.start([sys.executable, "-c", "import time; time.sleep(600)"])
    postmaster = (postgres_server.data / "postmaster.pid").read_text().split()[0]
    weed = private_s3_server._read()["pid"]
    with open(__file__ + ".pids", "w") as note:
        note.write(f"{child.pid} {postmaster} {weed} .")
    time.sleep(600)
"""
PURE = "def test_pure(run_directory):\n    assert not (run_directory.path / 'keeper.pid').exists()\n"
BROKEN = """
import pathlib, pytest
from tests.support.postgres import PostgresServer
def broken(self):
    with pathlib.Path(__file__).with_name("starts").open("a") as note:
        note.write("x")
    raise OSError("no room for a database")
PostgresServer.start = broken
@pytest.mark.parametrize("turn", range(2))
def test_needs_it(turn, postgres_url):
    pass
"""


@pytest.mark.parametrize(
    ("named", "free_bytes", "flags", "used"),
    [
        (None, MEMORY_BYTES_MIN, 0, str(MEMORY)),
        ("/elsewhere", MEMORY_BYTES_MIN, 0, "/elsewhere"),
        (None, MEMORY_BYTES_MIN - 1, 0, None),
        (None, MEMORY_BYTES_MIN, os.ST_NOEXEC, None),
    ],
)
def test_files_go_to_memory_that_has_room(
    monkeypatch: pytest.MonkeyPatch, named: str | None, free_bytes: int, flags: int, used: str | None
) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda _: True)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free_bytes, f_frsize=1, f_flag=flags))
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)
    monkeypatch.setattr(os, "environ", {} if named is None else {"TMPDIR": named})
    use_memory_for_files()
    assert os.environ.get("TMPDIR") == used


def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def started(proc: Proc, tmp_path: Path) -> list[int]:
    """The process, the PostgreSQL and the S3 server that the waiting test started."""
    note = tmp_path / "test_nested.py.pids"

    def complete() -> bool:
        assert proc.running, proc.logs()
        return note.exists() and note.read_text().endswith(".")

    wait_until(complete, 60, "the nested test to have started everything")
    pids = [int(pid) for pid in note.read_text().split()[:-1]]
    assert not any(gone(pid) for pid in pids)
    return pids


def test_a_run_of_pure_tests_starts_nothing(nested: Callable[..., Proc], outside: Path) -> None:
    assert nested(PURE).wait(60) == 0
    assert list(outside.iterdir()) == []


@pytest.mark.soak
def test_workers_share_one_server_of_each_kind(nested: Callable[..., Proc], outside: Path, tmp_path: Path) -> None:
    proc = nested(SHARING, "-n", "2")
    assert proc.wait(90) == 0, proc.logs()
    notes = list(tmp_path.glob("note-*"))
    assert len(notes) == 4
    assert len({note.name.split("-")[2] for note in notes}) == 2
    assert len({note.read_text() for note in notes}) == 1
    assert list(outside.iterdir()) == []


@pytest.mark.timeout(240)
def test_nothing_is_left_after_ctrl_c(nested: Callable[..., Proc], outside: Path, tmp_path: Path) -> None:
    proc = nested(WAITING)
    pids = started(proc, tmp_path)
    proc.interrupt()
    assert proc.wait(STOP_S) == 2
    assert all(gone(pid) for pid in pids)
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("workers", [[], pytest.param(["-n", "2"], marks=pytest.mark.soak)])
def test_nothing_is_left_after_kill_9(
    nested: Callable[..., Proc], outside: Path, tmp_path: Path, workers: list[str]
) -> None:
    proc = nested(WAITING, *workers)
    pids = started(proc, tmp_path)
    os.kill(proc.pid, 9)
    proc.wait()
    wait_until(lambda: all(gone(pid) for pid in pids), what="everything the test started to be gone")
    wait_until(lambda: list(outside.iterdir()) == [], what="the run directory to be removed")


def test_a_server_that_cannot_start_fails_every_test_that_needs_it(nested: Callable[..., Proc], tmp_path: Path) -> None:
    proc = nested(BROKEN)
    assert proc.wait(60) == 1
    assert proc.stdout().count("postgres server that this test needs did not start") >= 2
    assert "no room for a database" in proc.stdout()
    assert "skipped" not in proc.stdout()
    assert (tmp_path / "starts").read_text() == "x"
