"""HTTP/1.1 on a bare asyncio protocol: a connection that turns bytes into requests.

- The handler gets a request when it is complete.
- While its answer is under way (`begin_answer` to `finish`), later requests of the same connection
  wait in the buffer, so that pipelined answers leave in order.
- Bytes that are no HTTP get one answer, and then the connection closes.

This module does not know what requests mean.
"""

import asyncio
import re
import socket
import struct
from typing import Protocol

from tidegate.simulate.engine.messages import BadRequest, HttpRequest

HEAD_BYTES_MAX = 32 << 10
BUFFER_BYTES_MAX = 1 << 20
CHUNK_LINE_BYTES_MAX = 256

# Any client may send a head, so these patterns never backtrack.
_HEAD = re.compile(
    rb"([A-Z]++) (/[^ \r\n?]*+)(?:\?[^ \r\n]*+)? (HTTP/1\.[01])(?:\r\n[!#$%&'*+.^_`|~0-9A-Za-z-]++:[^\r\n]*+)*+"
).fullmatch
_HEADERS = re.compile(
    rb"(?i)\r\n(content-length|transfer-encoding|connection|idempotency-key|authorization|x-api-key|expect):[ \t]*+([^\r\n]*+)"
).findall
_SINGLE = frozenset({b"content-length", b"transfer-encoding"})
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?")


class Handler(Protocol):
    """A handler of requests."""

    body_bytes_max: int

    def opened(self, connection: "SimulatedConnection") -> None:
        """Note a new client."""

    def closed(self, connection: "SimulatedConnection") -> None:
        """Forget a client that is gone; its call may be stopped."""

    def handle(self, connection: "SimulatedConnection", request: HttpRequest) -> None:
        """Answer one request, at once or between `begin_answer` and `finish`."""

    def refuse(self, connection: "SimulatedConnection", error: BadRequest) -> None:
        """Answer bytes that are no request; the connection reads no more."""


class SimulatedConnection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.transport: asyncio.Transport
        self.open = False
        self._buffer = bytearray()
        self._wanted = 0
        # Progress in a chunked body: where its next chunk begins, and the chunks before it.
        self._chunk_at = 0
        self._parts: list[bytes] = []
        self._pieces_bytes = 0
        self._busy = False
        self._refused = False
        self._reading_paused = False
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport of a new connection."""
        self.transport = transport  # type: ignore[assignment]
        self.open = True
        self._handler.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection is closed."""
        self.open = False
        self._writable.set()
        self._handler.closed(self)

    def pause_writing(self) -> None:
        """Make `drain` wait: the client reads more slowly than we write."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let `drain` go on."""
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        """Take bytes, and handle the requests that they complete."""
        if self._refused:
            return
        self._buffer += data
        if self._busy:
            if len(self._buffer) > BUFFER_BYTES_MAX and not self._reading_paused:
                self._reading_paused = True
                self.transport.pause_reading()
        elif len(self._buffer) >= self._wanted:
            self._advance()

    def begin_answer(self) -> None:
        """Make later requests wait while the answer to the current one is under way."""
        self._busy = True

    def finish(self, *, keep_alive: bool = True) -> None:
        """End the current answer: close the connection, or go on with the next request."""
        self._busy = False
        if not self.open:
            return
        if not keep_alive:
            self._refused = True
            self.transport.close()
            return
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()
        if self._buffer:
            self._advance()

    def stop_reading(self) -> None:
        """Ignore all further bytes of the client."""
        self._refused = True
        self._buffer.clear()

    def write(self, data: bytes) -> None:
        """Send bytes if the connection is still open."""
        if self.open and not self.transport.is_closing():
            self.transport.write(data)

    async def drain(self) -> None:
        """Wait until the client has taken most of what was written."""
        await self._writable.wait()

    def reset(self) -> None:
        """Close with a TCP reset; bytes that were not sent are lost."""
        if self.open:
            peer: socket.socket | None = self.transport.get_extra_info("socket")
            if peer is not None:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

    def _advance(self) -> None:
        try:
            while self._buffer and not self._busy and not self._refused:
                request = self._next()
                if request is None:
                    return
                self._handler.handle(self, request)
                if not request.keep_alive and not self._busy:
                    self._refused = True
        except BadRequest as error:
            self.stop_reading()
            self._handler.refuse(self, error)

    def _next(self) -> HttpRequest | None:
        """Take the next complete request off the buffer.

        Return None while bytes are missing; `_wanted` is then the length that the buffer needs.
        """
        buffer = self._buffer
        while buffer.startswith(b"\r\n"):
            # Some old clients send an extra line break after a body.
            del buffer[:2]
        end = buffer.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
        if end < 0:
            if len(buffer) >= HEAD_BYTES_MAX:
                raise BadRequest(431, f"the request's head is longer than {HEAD_BYTES_MAX} bytes: send fewer headers")
            self._wanted = 0
            return None
        method, path, version, headers = _head(bytes(buffer[:end]))
        start = end + 4
        coding = headers.get(b"transfer-encoding")
        length = headers.get(b"content-length", b"0")
        if coding is not None:
            if b"content-length" in headers or coding.lower() != b"chunked":
                raise BadRequest(400, "send either Content-Length or Transfer-Encoding: chunked")
            found = self._chunks(start)
            if found is None:
                self._continue(headers)
                return None
            body, stop = found
        else:
            if not length.isdigit() or len(length) > 15:
                raise BadRequest(400, "Content-Length must be a number")
            stop = start + int(length)
            if stop - start > self._handler.body_bytes_max:
                raise BadRequest(413, f"the body is larger than {self._handler.body_bytes_max} bytes")
            if len(buffer) < stop:
                self._wanted = stop
                self._continue(headers)
                return None
            body = bytes(buffer[start:stop])
        if len(buffer) == stop:
            buffer.clear()
        else:
            del buffer[:stop]
        self._wanted = 0
        wanted = headers.get(b"connection", b"").lower()
        return HttpRequest(
            method, path, headers, body, wanted != b"close" and (version == b"HTTP/1.1" or wanted == b"keep-alive")
        )

    def _continue(self, headers: dict[bytes, bytes]) -> None:
        # The head is read again with each piece of the body. At the first time no byte follows it.
        if headers.get(b"expect", b"").lower() == b"100-continue" and self._buffer.endswith(b"\r\n\r\n"):
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _chunks(self, start: int) -> tuple[bytes, int] | None:
        """Read a chunked body that begins at `start`; return it and the place of its end.

        Return None while it is not complete. The next call goes on where this one stopped.
        """
        buffer = self._buffer
        at = self._chunk_at or start
        while True:
            line_end = buffer.find(b"\r\n", at, at + CHUNK_LINE_BYTES_MAX)
            self._chunk_at = at
            if line_end < 0:
                if len(buffer) - at >= CHUNK_LINE_BYTES_MAX:
                    raise BadRequest(400, "a chunk's size line is too long")
                self._wanted = len(buffer) + 1
                return None
            size_text = _CHUNK_SIZE.fullmatch(bytes(buffer[at:line_end]))
            if size_text is None:
                raise BadRequest(400, "a chunk's size must be a hexadecimal number")
            size = int(size_text[1], 16)
            if self._pieces_bytes + size > self._handler.body_bytes_max:
                raise BadRequest(413, f"the body is larger than {self._handler.body_bytes_max} bytes")
            at = line_end + 2
            if len(buffer) < at + size + 2:
                self._wanted = at + size + 2
                return None
            if buffer[at + size : at + size + 2] != b"\r\n":
                raise BadRequest(400, "a chunk must end with CRLF (trailers are not taken)")
            if not size:
                body = b"".join(self._parts)
                self._parts = []
                self._pieces_bytes = self._chunk_at = 0
                return body, at + 2
            self._parts.append(bytes(buffer[at : at + size]))
            self._pieces_bytes += size
            at += size + 2


def _head(head: bytes) -> tuple[bytes, bytes, bytes, dict[bytes, bytes]]:
    """Return method, path, version and the headers in use, by their names in lower case.

    The other headers are only checked for form.
    """
    found = _HEAD(head)
    if found is None:
        raise BadRequest(400, "the bytes are not an HTTP/1.1 request: a request line, then lines of 'name: value'")
    headers: dict[bytes, bytes] = {}
    for name, value in _HEADERS(head):
        name = name.lower()
        if name in headers and name in _SINGLE:
            raise BadRequest(400, f"the header {name.decode('ascii')} is given twice")
        headers[name] = value.rstrip()
    method, path, version = found.groups()
    return method, path, version, headers
