"""The preload shims bend the disk and the clock of a small process, while it runs and only where they should."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import Proc, Processes
from tests.support.shims import Shims, preload_env

DISK = """
import errno, os, sys
home, turn = sys.argv[1], 0
kept = os.open(os.path.join(home, "kept"), os.O_CREAT | os.O_RDWR)

def attempt(name, action):
    try:
        return f"{name}={action()}"
    except OSError as failure:
        return f"{name}={errno.errorcode[failure.errno]}"

def create():
    os.close(os.open(os.path.join(home, f"new-{turn}"), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    return "ok"

def rename():
    open(os.path.join(home, "kept"), "rb").close()
    os.link(os.path.join(home, "kept"), os.path.join(home, f"linked-{turn}"))
    return "ok"

while True:
    go = os.path.join(sys.argv[2], f"go-{turn}")
    if not os.path.exists(go):
        continue
    results = [
        attempt("write", lambda: os.write(kept, b"12345678")),
        attempt("pwrite", lambda: os.pwrite(kept, b"12345678", 0)),
        attempt("writev", lambda: os.writev(kept, [b"1234", b"5678"])),
        attempt("pwritev", lambda: os.pwritev(kept, [b"1234", b"5678"], 0)),
        attempt("fsync", lambda: os.fsync(kept)),
        attempt("fdatasync", lambda: os.fdatasync(kept)),
        attempt("truncate", lambda: os.ftruncate(kept, 4)),
        attempt("create", create),
        attempt("rename", rename),
        attempt("outside", lambda: open(os.path.join(sys.argv[2], "outside"), "wb").write(b"x")),
    ]
    print(f"turn {turn}:", *results, flush=True)
    turn += 1
"""

HEALTHY = {
    "write": "8",
    "pwrite": "8",
    "writev": "8",
    "pwritev": "8",
    "fsync": "None",
    "fdatasync": "None",
    "truncate": "None",
    "create": "ok",
    "rename": "ok",
    "outside": "1",
}

CLOCK = """
import os, sys, time
previous = None
while True:
    offset = open(os.environ["SHIM_CLOCK_OFFSET"]).read()
    if offset != previous:
        previous = offset
        print("at", offset, time.time(), int(time.clock_gettime(time.CLOCK_REALTIME)), time.monotonic(), flush=True)
"""


def turn(proc: Proc, tmp_path: Path, number: int) -> dict[str, str]:
    (tmp_path / "elsewhere" / f"go-{number}").touch()
    output = proc.wait_for_line(rf"^turn {number}: (.*)$").group(1)
    return dict(word.split("=") for word in output.split())


def test_a_full_disk_fails_every_change_and_nothing_outside(processes: Processes, shims: Shims, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "elsewhere").mkdir()
    disk = shims.disk(tmp_path / "home")
    command = [sys.executable, "-c", DISK, str(tmp_path / "home"), str(tmp_path / "elsewhere")]
    proc = processes.start(command, env=preload_env(disk))
    assert turn(proc, tmp_path, 0) == HEALTHY
    disk.fail("enospc")
    assert turn(proc, tmp_path, 1) == dict.fromkeys(HEALTHY, "ENOSPC") | {"outside": "1"}
    disk.heal()
    assert turn(proc, tmp_path, 2) == HEALTHY
    disk.fail("eio-fsync", "edquot-create")
    assert turn(proc, tmp_path, 3) == HEALTHY | {"fsync": "EIO", "fdatasync": "EIO", "create": "EDQUOT"}
    disk.fail("erofs-rename")
    assert turn(proc, tmp_path, 4) == HEALTHY | {"rename": "EROFS"}
    disk.fail("enospc-write:2")
    assert turn(proc, tmp_path, 5) == HEALTHY | {"writev": "ENOSPC", "pwritev": "ENOSPC"}
    disk.fail("short-write")
    assert turn(proc, tmp_path, 6) == HEALTHY | {"write": "4", "pwrite": "4", "writev": "4", "pwritev": "4"}


def test_the_wall_clock_jumps_and_the_monotonic_one_does_not(processes: Processes, shims: Shims) -> None:
    clock = shims.clock()
    proc = processes.start([sys.executable, "-c", CLOCK], env=preload_env(clock))

    def reading(offset: float) -> tuple[float, int, float]:
        clock.jump_to(offset)
        line = proc.wait_for_line(rf"^at {offset!r} (\S+) (\S+) (\S+)$")
        return float(line.group(1)), int(line.group(2)), float(line.group(3))

    for offset in (3_600.0, -3_600.0, 2_592_000.0):
        before, before_monotonic = time.time(), time.monotonic()
        wall, whole, monotonic = reading(offset)
        after, after_monotonic = time.time(), time.monotonic()
        assert before + offset - 1 <= wall <= after + offset + 1
        assert before + offset - 2 <= whole <= after + offset + 1
        assert before_monotonic <= monotonic <= after_monotonic


def test_shims_stand_together_and_keep_what_was_preloaded(shims: Shims, tmp_path: Path) -> None:
    disk, clock = shims.disk(tmp_path), shims.clock()
    env = preload_env(disk, clock, base={"LD_PRELOAD": "/lib/other.so", "HOME": "/"})
    assert env["LD_PRELOAD"] == f"{disk.library}:{clock.library}:/lib/other.so"
    assert env["HOME"] == "/"
    assert env["SHIM_DISK_PREFIX"] == str(tmp_path.resolve())


def test_sqlite_sees_the_full_disk(processes: Processes, shims: Shims, tmp_path: Path) -> None:
    """The embedded store's library must be under the shim too, or the disk-full tests would prove nothing."""
    program = """
import apsw, sys
connection = apsw.Connection(sys.argv[1])
connection.execute("pragma journal_mode=wal")
connection.execute("create table things (body blob)")
print("ready", flush=True)
while True:
    try:
        connection.execute("insert into things values (zeroblob(100000))")
    except apsw.Error as failure:
        print("failed", type(failure).__name__, flush=True)
        break
"""
    home = tmp_path / "home"
    home.mkdir()
    disk = shims.disk(home)
    proc = processes.start([sys.executable, "-c", program, str(home / "db")], env=preload_env(disk))
    proc.wait_for_line("ready")
    disk.fail("enospc-write")
    assert proc.wait_for_line(r"failed (\w+)").group(1) in ("FullError", "IOError")
    assert proc.wait() == 0


def test_a_source_that_does_not_compile_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clock.c").write_text("this is not C")
    monkeypatch.setattr("tests.support.shims.SOURCES", tmp_path)
    broken = Shims(tmp_path)
    with pytest.raises(RuntimeError, match="did not compile"):
        broken.clock()


SENDS = """
import os, socket, sys
ours, theirs = socket.socketpair()
head = b"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nIdempotency-Key: "
os.write(ours.fileno(), head + b"one-1\\r\\nContent-Length: 0\\r\\n\\r\\n")
os.writev(ours.fileno(), [head + b"two-2\\r\\n\\r\\n", b"body"])
ours.send(head + b"three-3\\r\\n\\r\\n")
ours.sendmsg([head + b"four-4\\r\\n\\r\\n", b"body"])
ours.send(b"POST / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
ours.send(b"GET / HTTP/1.1\\r\\nIdempotency-Key: five-5\\r\\n\\r\\n")
ours.send(b"Idempotency-Key: six-6\\r\\n\\r\\n")
"""


def test_what_is_sent_is_written_down_with_its_moment(processes: Processes, shims: Shims) -> None:
    sends = shims.sends()
    before = time.time()
    proc = processes.start([sys.executable, "-c", SENDS], env=preload_env(sends))
    assert proc.wait() == 0, proc.logs()
    assert sorted(key for _, key in sends.sent()) == ["four-4", "one-1", "three-3", "two-2"]
    assert all(before <= at <= time.time() for at, _ in sends.sent())
