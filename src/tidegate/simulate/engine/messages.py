"""Requests and replies as values, and replies as bytes; `http1.py` has the connections."""

from http import HTTPStatus

import msgspec

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream"

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_JSON_200 = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"


class BadRequest(ValueError):
    """The bytes are no valid request, and get an answer with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpRequest:
    """One complete request."""

    __slots__ = ("body", "headers", "keep_alive", "method", "path")

    def __init__(self, method: bytes, path: bytes, headers: dict[bytes, bytes], body: bytes, keep_alive: bool) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.body = body
        self.keep_alive = keep_alive


class SimulatedReply(msgspec.Struct):
    """A reply: status, body, the body's type, and more header lines, each ended by CRLF."""

    status: int
    body: bytes
    content_type: bytes = JSON
    headers: bytes = b""


def encode_head(reply: SimulatedReply, length: int, *, keep_alive: bool) -> bytes:
    """Return the head of a reply whose body has, or claims to have, `length` bytes."""
    return b"HTTP/1.1 %d %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n%s%s\r\n" % (
        reply.status,
        _REASONS.get(reply.status, b"Unknown"),
        reply.content_type,
        length,
        reply.headers,
        b"" if keep_alive else b"connection: close\r\n",
    )


def encode(reply: SimulatedReply, *, keep_alive: bool) -> bytes:
    """Return a whole reply as bytes."""
    return encode_head(reply, len(reply.body), keep_alive=keep_alive) + reply.body


def encode_json(body: bytes) -> bytes:
    """Return a 200 with JSON on a kept connection.

    The most frequent reply takes the fastest way.
    """
    return _JSON_200 % (len(body), body)
