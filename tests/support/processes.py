"""Real processes for tests: started in a session of their own, signalled by the recorded pid, with their output in files.

Waiting is always polling for a condition with a deadline; nothing here sleeps to let time pass. It does not know what
the processes run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar, overload

import psutil

from tests.support.prepared import Forked, fits

T = TypeVar("T")

POLL_S = 0.01
# Looking must not keep busy what is waited for: a look that takes long is followed by a pause of so many times as much, within a bound.
PAUSES_PER_LOOK, PAUSE_S_MAX = 3.0, 0.25
LOG_TAIL_CHARS = 8_000

# Below the range the kernel hands out for outgoing connections, so a port found free stays free until it is bound.
PORT_FIRST, PORT_LAST = 20_000, 32_000


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nothing listens on right now."""
    dice = random.SystemRandom()
    for _ in range(1_000):
        port = dice.randint(PORT_FIRST, PORT_LAST)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no free TCP port between {PORT_FIRST} and {PORT_LAST}; stop whatever holds them all")


def wait_until(
    predicate: Callable[[], T | None], timeout_s: float = 30.0, what: str = "the condition", poll_s: float = POLL_S
) -> T:
    """Poll until the predicate is true and return its result; after the deadline fail with `what` was awaited."""
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}; the last answer was {answer!r}")
        time.sleep(max(poll_s, _pause_after(began)))


@overload
async def wait_until_async(predicate: Callable[[], Awaitable[T]], timeout_s: float = 30.0, what: str = ...) -> T: ...
@overload
async def wait_until_async(predicate: Callable[[], T], timeout_s: float = 30.0, what: str = ...) -> T: ...
async def wait_until_async(
    predicate: Callable[[], Awaitable[T] | T], timeout_s: float = 30.0, what: str = "the condition"
) -> T:
    """The same inside an event loop; the predicate may be a plain function or a coroutine function."""
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        answer = predicate()
        value: T = await answer if isinstance(answer, Awaitable) else answer
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}; the last answer was {value!r}")
        await asyncio.sleep(max(POLL_S, _pause_after(began)))


def _pause_after(began: float) -> float:
    return min(PAUSES_PER_LOOK * (time.monotonic() - began), PAUSE_S_MAX)


class ProcessExited(AssertionError):
    """A process ended while the test still waited for something from it."""


class Proc:
    """One process and everything it started: the session it leads is what gets the signals."""

    def __init__(
        self,
        args: Sequence[str | os.PathLike[str]],
        *,
        log_dir: Path,
        name: str = "process",
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        registry: Path | None = None,
    ) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.args = [os.fspath(arg) for arg in args]
        stem = f"{name}-{len(list(log_dir.glob('*.stdout')))}"
        self.stdout_path = log_dir / f"{stem}.stdout"
        self.stderr_path = log_dir / f"{stem}.stderr"
        with self.stdout_path.open("xb") as stdout, self.stderr_path.open("xb") as stderr:
            self.popen: subprocess.Popen[bytes] | Forked
            if fits(self.args, env):
                self.popen = Forked(self.args, [stdout.fileno(), stderr.fileno()], env, cwd)
            else:
                self.popen = subprocess.Popen(
                    self.args,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env=env,
                    cwd=cwd,
                    start_new_session=True,
                )
        self.pid = self.popen.pid
        self._entry = register_process(registry, self.pid) if registry is not None else None

    @property
    def returncode(self) -> int | None:
        return self.popen.poll()

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    def stdout(self) -> str:
        return self.stdout_path.read_text(errors="replace")

    def stderr(self) -> str:
        return self.stderr_path.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal to the whole session; one that is gone already is no error."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def stop(self) -> None:
        """Freeze it as a machine that hangs would: nothing is closed, nothing runs."""
        self.signal(signal.SIGSTOP)
        wait_until(lambda: not self.running or self._is_stopped(), 10, f"{self.name} to be stopped")

    def cont(self) -> None:
        self.signal(signal.SIGCONT)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def interrupt(self) -> None:
        self.signal(signal.SIGINT)

    def kill(self) -> None:
        """End it and all it started at once, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.popen.wait(30)
        if self._entry is not None:
            self._entry.unlink(missing_ok=True)

    def wait(self, timeout_s: float = 30.0) -> int:
        """The exit code; a process that does not end in time fails the test with its logs."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name} did not end within {timeout_s:g} s\n{self.logs()}") from None

    def wait_for_line(self, pattern: str, timeout_s: float = 30.0) -> re.Match[str]:
        """The first match of the pattern in the finished lines of stdout, else of stderr."""
        expression = re.compile(pattern, re.MULTILINE)
        deadline = time.monotonic() + timeout_s
        while True:
            # Asked before reading, so that the last words of a process that just ended are still seen.
            ended = not self.running
            match = expression.search(_lines(self.stdout(), ended)) or expression.search(_lines(self.stderr(), ended))
            if match is not None:
                return match
            if ended:
                raise ProcessExited(f"{self.name} ended ({self.returncode}) without saying {pattern!r}\n{self.logs()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} did not say {pattern!r} within {timeout_s:g} s\n{self.logs()}")
            time.sleep(POLL_S)

    def memory_peak_bytes(self) -> int:
        """The most memory that it had so far."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))

    def logs(self) -> str:
        """What a reader of a failed test needs: the command, how it stands and the end of its output."""
        state = "running" if self.running else f"ended with {self.returncode}"
        parts = [f"$ {' '.join(self.args)}", f"pid {self.pid}, {state}"]
        for title, text in (("stdout", self.stdout()), ("stderr", self.stderr())):
            parts.append(f"--- {title}\n{text[-LOG_TAIL_CHARS:].rstrip()}")
        return "\n".join(parts)

    def _is_stopped(self) -> bool:
        try:
            return str(psutil.Process(self.pid).status()) == str(psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return True


class Processes:
    """All processes of one test or module; its end, or `close`, leaves none of them behind."""

    def __init__(self, log_dir: Path, registry: Path | None = None) -> None:
        self.log_dir = log_dir
        self.registry = registry
        self.started: list[Proc] = []

    def start(
        self,
        args: Sequence[str | os.PathLike[str]],
        *,
        name: str = "process",
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Proc:
        proc = Proc(args, log_dir=self.log_dir, name=name, env=env, cwd=cwd, registry=self.registry)
        self.started.append(proc)
        return proc

    def completed(
        self, args: Sequence[str | os.PathLike[str]], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a process to its end and return what `subprocess.run` would."""
        proc = self.start(args, env=env, cwd=cwd)
        return subprocess.CompletedProcess(proc.args, proc.wait(60), proc.stdout(), proc.stderr())

    def close(self) -> None:
        for proc in reversed(self.started):
            proc.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *wrong: object) -> None:
        self.close()


def _lines(text: str, ended: bool) -> str:
    """Without the last line while it may still be growing: half a number would match too."""
    return text if ended else text[: text.rfind("\n") + 1]


def register_process(registry: Path, pid: int) -> Path:
    """Note a session leader where the run's keeper finds it, should the test's own process die before it cleans up."""
    registry.mkdir(parents=True, exist_ok=True)
    entry = registry / str(pid)
    try:
        entry.write_text(repr(psutil.Process(pid).create_time()))
    except psutil.NoSuchProcess:
        entry.write_text("0.0")
    return entry


def kill_registered(registry: Path) -> None:
    """Kill every noted session; a pid that by now belongs to another process is left alone."""
    for entry in registry.glob("*"):
        pid = int(entry.name)
        with contextlib.suppress(psutil.NoSuchProcess):
            if repr(psutil.Process(pid).create_time()) != entry.read_text():
                continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        entry.unlink(missing_ok=True)
