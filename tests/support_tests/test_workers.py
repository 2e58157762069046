"""Several workers run every test once, and one that ends takes only its own test along."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import Proc

IMPORTED = """
import os, pathlib, pytest, warnings
with pathlib.Path(__file__).with_name("imports").open("a") as note:
    note.write("x")
@pytest.fixture(scope="session", autouse=True)
def whole_session():
    yield
    pathlib.Path(__file__).with_name(f"end-{os.getpid()}").touch()
@pytest.mark.parametrize("turn", range(24))
def test_in_turn(turn, tmp_path):
    (tmp_path / "own").touch(exist_ok=False)
    print("this is turn", turn)
    with pathlib.Path(__file__).with_name(f"ran-{turn}").open("a") as note:
        note.write(f"{os.getpid()}\\n")
"""
LONG = """
import os, pathlib, pytest
def note(name):
    with pathlib.Path(__file__).with_name(f"order-{os.getpid()}").open("a") as order:
        order.write(f"{name}\\n")
@pytest.mark.parametrize("turn", range(12))
def test_in_turn(turn):
    note(turn)
@pytest.mark.timeout(600)
def test_takes_long():
    note("long")
"""
WAITING = """
import os, pathlib, pytest
def note(name):
    with pathlib.Path(__file__).with_name(f"order-{os.getpid()}").open("a") as order:
        order.write(f"{name}\\n")
@pytest.fixture
def processes():
    return None
@pytest.mark.parametrize("turn", range(30))
def test_of_cores(turn):
    note("busy")
@pytest.mark.parametrize("turn", range(6))
def test_of_processes(turn, processes):
    note("waiting")
"""
NESTED_S = 90


def run_by(tmp_path: Path) -> dict[int, list[str]]:
    """The processes that ran each test."""
    return {int(path.name.removeprefix("ran-")): path.read_text().split() for path in tmp_path.glob("ran-*")}


def test_workers_run_every_test_once_and_tell_what_they_find(nested: Callable[..., Proc], tmp_path: Path) -> None:
    source = f"{IMPORTED}    if turn == 5: os._exit(0)\n    if turn == 9: assert turn == 10\n"
    proc = nested(f"{source}    if turn == 12: warnings.warn('mind the step')\n", "-n", "3")
    assert proc.wait(NESTED_S) == 1, proc.logs()
    output = proc.stdout()
    assert "2 failed, 22 passed, 1 warning" in output
    assert "the worker's process ended while it ran ::test_in_turn[5]" in output
    assert re.search(r"assert 9 == 10\n(.*\n)*.*Captured stdout call.*\nthis is turn 9\n", output), output
    assert "UserWarning: mind the step" in output
    assert (tmp_path / "imports").read_text() == "x"
    ran = run_by(tmp_path)
    assert sorted(ran) == list(range(24))
    assert all(len(pids) == 1 for pids in ran.values())
    # The worker that ended had another in its place, and each but that one came to its end.
    workers = {pid for pids in ran.values() for pid in pids}
    assert len(workers) == 4
    assert workers - {path.name.removeprefix("end-") for path in tmp_path.glob("end-*")} == set(ran[5])


def test_what_may_take_long_begins_first(nested: Callable[..., Proc], tmp_path: Path) -> None:
    proc = nested(LONG, "-n", "2")
    assert proc.wait(NESTED_S) == 0, proc.logs()
    orders = [path.read_text().split() for path in tmp_path.glob("order-*")]
    assert [order.index("long") for order in orders if "long" in order] == [0]
    assert sum(map(len, orders)) == 13


def test_two_workers_of_three_begin_with_tests_that_wait(nested: Callable[..., Proc], tmp_path: Path) -> None:
    proc = nested(WAITING, "-n", "3")
    assert proc.wait(NESTED_S) == 0, proc.logs()
    orders = [path.read_text().split() for path in tmp_path.glob("order-*")]
    assert sorted(order[0] for order in orders) == ["busy", "waiting", "waiting"]
    assert sum(map(len, orders)) == 36


@pytest.mark.soak
def test_workers_stop_at_the_first_failure_where_asked(nested: Callable[..., Proc], tmp_path: Path) -> None:
    waits = "    import time\n    time.sleep(turn and 600)\n    assert turn\n"
    proc = nested(IMPORTED + waits, "-n", "2", "-x")
    assert proc.wait(NESTED_S) == 1, proc.logs()
    assert "stopping after 1 failures" in proc.stdout()
    left = {int(pid) for pids in run_by(tmp_path).values() for pid in pids}
    assert left
    for pid in left:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.soak
def test_a_file_that_cannot_be_imported_stops_the_run(nested: Callable[..., Proc], tmp_path: Path) -> None:
    proc = nested(IMPORTED + "raise OSError('no such thing')\n", "-n", "2")
    assert proc.wait(NESTED_S) == 2, proc.logs()
    assert "OSError: no such thing" in proc.stdout()
    assert run_by(tmp_path) == {}
