"""A transaction-mode pooler, as unkind as one may be: between two transactions a client never keeps its server connection.

It speaks just enough of PostgreSQL's protocol to see where a transaction ends (ReadyForQuery with status idle). Every server
connection that is given back goes to the end of the row, so whatever a client leaves on one is missed by it and met by another.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from dataclasses import dataclass, field

SSL_REQUEST = 80877103
CANCEL_REQUEST = 80877102
SERVER_COUNT = 3

Messages = asyncio.Queue[bytes]


@dataclass(eq=False)
class Server:
    """One real connection, and what the server sent when it was opened."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    greeting: bytes


@dataclass
class Pooler:
    host: str
    port: int
    transactions: int = 0
    startups: list[bytes] = field(default_factory=list)
    _servers: list[Server] = field(default_factory=list)
    _idle: asyncio.Queue[Server] = field(default_factory=asyncio.Queue)
    _listener: asyncio.Server | None = None
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self) -> int:
        """Listen; says on which port."""
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._listener.sockets[0].getsockname()[1])

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for server in self._servers:
            server.writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        messages: Messages = asyncio.Queue()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            if await self._greet(reader, writer):
                pump = asyncio.create_task(_pump(reader, messages))
                while (message := await messages.get()) and message[:1] != b"X":
                    self.transactions += 1
                    server = await self._idle.get()
                    await _relay(messages, message, server, writer)
                    self._idle.put_nowait(server)
                pump.cancel()
        writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        while True:
            size = await reader.readexactly(4)
            body = await reader.readexactly(struct.unpack("!i", size)[0] - 4)
            [code] = struct.unpack("!i", body[:4])
            if code == CANCEL_REQUEST:
                return False
            if code != SSL_REQUEST:
                break
            writer.write(b"N")
        self.startups.append(body)
        async with self._opening:
            while len(self._servers) < SERVER_COUNT:
                await self._open(size + body)
        writer.write(self._servers[0].greeting)
        return True

    async def _open(self, startup: bytes) -> None:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(startup)
        greeting = [await _message(reader)]
        while greeting[-1][:1] != b"Z":
            greeting.append(await _message(reader))
        self._servers.append(Server(reader, writer, b"".join(greeting)))
        self._idle.put_nowait(self._servers[-1])


async def _relay(messages: Messages, message: bytes, server: Server, writer: asyncio.StreamWriter) -> None:
    """One server connection, from the client's first message until the server says that no transaction is open."""
    server.writer.write(message)
    forth = asyncio.create_task(_forward(messages, server))
    try:
        while True:
            answer = await _message(server.reader)
            writer.write(answer)
            if answer[:1] == b"Z" and answer[5:6] == b"I":
                return
    finally:
        forth.cancel()


async def _forward(messages: Messages, server: Server) -> None:
    while message := await messages.get():
        server.writer.write(message)
    server.writer.close()


async def _pump(reader: asyncio.StreamReader, messages: Messages) -> None:
    """Empty bytes mean that the client is gone."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            messages.put_nowait(await _message(reader))
    messages.put_nowait(b"")


async def _message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(5)
    return head + await reader.readexactly(struct.unpack("!i", head[1:])[0] - 4)
