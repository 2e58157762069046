"""Processes under test are signalled by their recorded pid, show their output and never outlive their test."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.prepared import Forked
from tests.support.processes import (
    Processes,
    ProcessExited,
    free_port,
    kill_registered,
    register_process,
    wait_until,
    wait_until_async,
)

COUNTER = "import itertools, time\nfor n in itertools.count():\n    print(n, flush=True); time.sleep(0.005)"
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_kill_ends_the_process_and_all_it_started(processes: Processes) -> None:
    parent = processes.start([sys.executable, "-c", PARENT])
    child = int(parent.wait_for_line(r"child (\d+)").group(1))
    parent.kill()
    assert parent.returncode == -signal.SIGKILL
    wait_until(lambda: gone(child), what="the child to be gone")


def test_a_stopped_process_says_nothing_until_it_goes_on(processes: Processes) -> None:
    counter = processes.start([sys.executable, "-c", COUNTER])
    counter.wait_for_line(r"^3$")
    counter.stop()
    before = counter.stdout()
    assert psutil.Process(counter.pid).status() == psutil.STATUS_STOPPED
    assert counter.stdout() == before
    counter.cont()
    wait_until(lambda: len(counter.stdout()) > len(before), what="the counter to go on")


def test_terminate_and_wait_give_the_exit_code(processes: Processes) -> None:
    program = (
        "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(7))\nprint('up', flush=True)\ntime.sleep(600)"
    )
    proc = processes.start([sys.executable, "-c", program])
    proc.wait_for_line("up")
    proc.terminate()
    assert proc.wait() == 7


def test_forked_code_finds_what_an_interpreter_gives_it(processes: Processes, tmp_path: Path) -> None:
    code = "import os, sys, tidegate; print(__name__, sys.argv, os.getcwd(), os.path.abspath(sys.path[0])); sys.exit(3)"
    command = [sys.executable, "-c", code, "one", "two"]
    started = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    forked = processes.start(command, cwd=tmp_path)
    assert isinstance(forked.popen, Forked) == (sys.platform == "linux")
    assert (forked.wait(), forked.stdout()) == (started.returncode, started.stdout)
    if isinstance(forked.popen, Forked):
        # Another process that is given this number has not ended yet.
        assert forked.popen._parent.ask({"pid": forked.pid}) is None


ENDING = """
import atexit, gc, sys, threading, time  # as tidegate's
gc.disable()  # which a traceback of a later Python would begin
class Lost:
    def __init__(self): self.itself = self
    def __del__(self): print("lost", flush=True)
Lost()
atexit.register(print, "registered")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
print("main", end=" ")
"""


@pytest.mark.parametrize("last", ["", "sys.exit(True)", "sys.exit('in words')", "1 / 0", "raise KeyboardInterrupt"])
def test_forked_code_ends_as_an_interpreter_does(processes: Processes, last: str) -> None:
    """Threads end, what was registered is done, lost objects complain, what was printed is there, and so is the code."""
    command = [sys.executable, "-c", ENDING + last]
    started = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    forked = processes.start(command)
    assert isinstance(forked.popen, Forked) == (sys.platform == "linux")
    assert (forked.wait(), forked.stdout()) == (started.returncode, started.stdout)
    assert forked.stderr().splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_a_worker_that_was_forked_gets_only_answers_to_its_own_asks(processes: Processes) -> None:
    """The workers of a whole run have one process that forks for all of them, begun before they were forked themselves."""
    code = "import sys, tidegate; sys.exit(int(sys.argv[1]))"
    assert processes.start([sys.executable, "-c", code, "0"]).wait() == 0
    workers = []
    for status in range(1, 4):
        pid = os.fork()
        if not pid:
            codes = {
                processes.start([sys.executable, "-c", code, str(status)], name=f"of-{status}").wait() for _ in range(3)
            }
            os._exit(status if codes == {status} else 100)
        workers.append(pid)
    assert processes.start([sys.executable, "-c", code, "9"]).wait() == 9
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers] == [1, 2, 3]


def test_a_process_that_ends_early_fails_with_its_logs(processes: Processes) -> None:
    proc = processes.start([sys.executable, "-c", "import sys; sys.exit('no such model')"], name="early")
    with pytest.raises(ProcessExited, match="no such model"):
        proc.wait_for_line("ready")


def test_waiting_is_bounded_and_names_what_it_waited_for(processes: Processes) -> None:
    proc = processes.start([sys.executable, "-c", "import time; time.sleep(600)"])
    with pytest.raises(TimeoutError, match="did not say 'ready'"):
        proc.wait_for_line("ready", timeout_s=0.05)
    with pytest.raises(TimeoutError, match="did not end"):
        proc.wait(timeout_s=0.05)
    with pytest.raises(TimeoutError, match="the moon"):
        wait_until(lambda: False, 0.05, "the moon")


async def test_the_async_wait_takes_functions_and_coroutines() -> None:
    answers = iter([0, 0, 5])

    async def ask() -> int:
        await asyncio.sleep(0)
        return next(answers)

    assert await wait_until_async(ask) == 5
    assert await wait_until_async(lambda: 6) == 6
    with pytest.raises(TimeoutError, match="the sun"):
        await wait_until_async(lambda: 0, 0.05, "the sun")


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


def test_the_registry_kills_what_a_dead_test_left_and_nothing_else(processes: Processes, tmp_path: Path) -> None:
    left = processes.start([sys.executable, "-c", "import time; time.sleep(600)"])
    other = processes.start([sys.executable, "-c", "import time; time.sleep(600)"])
    registry = tmp_path / "registry"
    register_process(registry, left.pid)
    # As if the pid had been given to another process since.
    register_process(registry, other.pid).write_text("1.0")
    kill_registered(registry)
    assert left.wait() == -signal.SIGKILL
    assert other.running
    os.kill(other.pid, 0)
