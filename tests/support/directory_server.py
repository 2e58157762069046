"""A server of the tests in a directory of its own, by which alone it is named: any process of the run can take hold of it.

Its state and its log lie there. It is killed, never asked to leave: what it knows dies with the test run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil

from tests.support.processes import wait_until

START_TRIES = 3


class DirectoryServer(ABC):
    """`start` and `stop` it as often as a test likes: it comes back on the ports of before."""

    name: ClassVar[str]
    failed: ClassVar[type[Exception]]
    start_timeout_s: ClassVar[float]

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "server.log"
        self._state = directory / "server.json"

    def pid(self) -> int:
        return int(self._read()["pid"])

    def start(self) -> None:
        """Start on the ports of before, or on free ones the first time, and return when it serves."""
        first = not self._state.exists()
        for tries_left in reversed(range(START_TRIES)):
            if first:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._write({**self._configured(), "pid": 0, "created": 0.0})
            try:
                self._launch()
                return
            except self.failed:
                self.stop()
                if tries_left == 0 or not first:
                    raise

    def stop(self) -> None:
        """Kill it, as a crash would. Stopping a stopped one is no error."""
        if not self._state.exists():
            return
        state = self._read()
        if state["pid"] and _same_process(state["pid"], state["created"]):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(state["pid"], signal.SIGKILL)
            wait_until(lambda: not _same_process(state["pid"], state["created"]), 30, f"{self.name} to be gone")
        self._write({**state, "pid": 0})

    @abstractmethod
    def _configured(self) -> dict[str, Any]:
        """Choose ports and whatever else it has from its first start on."""

    @abstractmethod
    def _launch(self) -> None:
        """Start its process, and return when it serves."""

    def _launch_process(self, command: Sequence[str], serves: Callable[[], bool]) -> None:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                start_new_session=True,
            )
        created = psutil.Process(process.pid).create_time()
        self._write({**self._read(), "pid": process.pid, "created": created})

        def answers() -> bool:
            if process.poll() is not None:
                raise self.failed(f"{self.name} ended with {process.returncode}\n{self._log_tail()}")
            try:
                return serves()
            except OSError:
                return False

        self._wait_until(answers, "to serve")

    def _wait_until(self, holds: Callable[[], bool], what: str) -> None:
        try:
            wait_until(holds, self.start_timeout_s, f"{self.name} {what}")
        except TimeoutError as failure:
            raise self.failed(f"{failure}\n--- server log\n{self._log_tail()}") from failure

    def _log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-4_000:] if self.log.exists() else "(no log yet)"

    def _read(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self._state.read_text())
        return state

    def _write(self, state: dict[str, Any]) -> None:
        partial = self._state.with_suffix(".partial")
        partial.write_text(json.dumps(state))
        partial.replace(self._state)


def _same_process(pid: int, created: float) -> bool:
    try:
        process = psutil.Process(pid)
        # Its first thread may be gone while others still hold its port.
        is_over = process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
        return bool(process.create_time() == created and not is_over)
    except psutil.NoSuchProcess:
        return False
