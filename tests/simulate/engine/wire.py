"""A small HTTP client for tests that must see exactly what is on the wire, whole or broken."""

from __future__ import annotations

import json
import socket
from typing import Any, NamedTuple

TIMEOUT_S = 20.0


class Seen(NamedTuple):
    """What came back: `whole` says whether the body was as long as the head claimed."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Address:
    """Where an engine listens."""

    def __init__(self, url: str) -> None:
        self.url = url
        host, _, port = url.removeprefix("http://").removesuffix("/v1").rpartition(":")
        self.host, self.port = host, int(port)

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=TIMEOUT_S)

    def call(self, path: str, body: Any = None, **headers: str) -> Seen:
        with self.connect() as connection:
            connection.sendall(request_bytes(path, body, **headers))
            return read_reply(connection)

    def chat(self, text: str, **fields: Any) -> Seen:
        return self.call("/v1/chat/completions", chat_body(text, **fields))

    def behave(self, behaviour: str, text: str = "") -> Seen:
        """A chat call that asks for a behaviour; `text` makes its prompt its own."""
        return self.chat(text + json.dumps({"behave": behaviour}))


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], **fields}


def request_bytes(path: str, body: Any = None, **headers: str) -> bytes:
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "Host: engine", f"Content-Length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def read_reply(connection: socket.socket) -> Seen:
    """One reply; `ConnectionError` when none comes, or when the connection is reset."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            raise ConnectionError("closed before a head came")
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    status_line, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    status = int(status_line.split(" ")[1])
    if headers.get("transfer-encoding") == "chunked":
        while not body.endswith(b"0\r\n\r\n"):
            piece = connection.recv(65536)
            if not piece:
                return Seen(status, headers, body, False)
            body += piece
        return Seen(status, headers, _joined(body), True)
    length = int(headers["content-length"])
    while len(body) < length:
        piece = connection.recv(1 << 20)
        if not piece:
            return Seen(status, headers, body, False)
        body += piece
    return Seen(status, headers, body, True)


def _joined(body: bytes) -> bytes:
    pieces = b""
    while True:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return pieces
        pieces += rest[:length]
        body = rest[length + 2 :]
