"""A server on a real socket that answers exactly the bytes a test tells it to, valid HTTP or not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

CHAT = b'{"id":"c1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"hi"}}]}'


@dataclass
class Request:
    line: str
    headers: dict[str, str]
    body: bytes
    connection: int
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def path(self) -> str:
        return self.line.split(" ")[1]


Script = Callable[[Request, "Peer"], Awaitable[None]]


class Peer:
    """The server's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def answer(self, status: int = 200, body: bytes = CHAT, **headers: str) -> None:
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def until_gone(self) -> None:
        """Wait until the client has closed or reset its end."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65_536):
                pass

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        raw: socket.socket = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class RawServer:
    def __init__(self, script: Script | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.script: Script = script or _answer
        self.requests: list[Request] = []
        self.connection_count = 0
        self.open_count = 0
        self.open_count_highest = 0
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> RawServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        scheme = "https" if self._tls else "http"
        self.url = f"{scheme}://127.0.0.1:{self.port}/v1"
        return self

    async def __aexit__(self, *wrong: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def posts(self) -> list[Request]:
        return [request for request in self.requests if request.line.startswith("POST")]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connection_count += 1
        self.open_count += 1
        self.open_count_highest = max(self.open_count_highest, self.open_count)
        number = self.connection_count
        request: Request | None = None
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while not writer.is_closing():
                    request = await _read_request(reader, number)
                    self.requests.append(request)
                    await self.script(request, Peer(reader, writer))
        finally:
            self.open_count -= 1
            if request is not None:
                request.gone.set()
            writer.close()


async def _read_request(reader: asyncio.StreamReader, connection: int) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    line, *rest = head.split("\r\n")
    headers = dict(item.split(": ", 1) for item in rest if item)
    body = await reader.readexactly(int(headers.get("Content-Length", "0")))
    return Request(line, headers, body, connection)


async def _answer(request: Request, peer: Peer) -> None:
    if request.line.startswith("GET"):
        await peer.answer(body=json.dumps({"data": [{"id": "m"}]}).encode())
    else:
        await peer.answer()


def answers_with(status: int, body: bytes = b"{}", **headers: str) -> Script:
    """Answer every request alike, probes too."""

    async def script(request: Request, peer: Peer) -> None:
        await peer.answer(status, body, **headers)

    return script


async def eventually(condition: Callable[[], Any], what: str, within_s: float = 10.0) -> None:
    """Poll until the condition holds; fail with what was waited for."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the condition is a socket's or a server's, nothing announces it
            await asyncio.sleep(0.005)
