"""Faults on the wire: bodies that are wrong, and connections that break.

`dealer.py` decides which call gets one.
"""

import asyncio
import zlib
from email.utils import formatdate
from functools import lru_cache
from time import time

import msgspec

from tidegate.simulate.engine.faults import Behaviour, FaultStep
from tidegate.simulate.engine.http1 import SimulatedConnection
from tidegate.simulate.engine.messages import EVENT_STREAM, SimulatedReply, encode, encode_head

HUGE_BYTES = 64 << 20
BOMB_BYTES = 256 << 20
SLOWLORIS_MS = 20
# A reset overtakes bytes that are still on their way, so this pause lets the first half arrive.
RESET_AFTER_S = 0.05

_PIECE_BYTES = 1 << 20
_CODES = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("invalid_request_error", "model_not_found"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("requests", "rate_limit_exceeded"),
    503: ("server_error", "service_unavailable"),
}
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    """Return an error's body in OpenAI's shape."""
    kind, usual_code = _CODES.get(status, ("server_error" if status >= 500 else "invalid_request_error", None))
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": param, "code": code or usual_code}}
    )


def error_reply(status: int, message: str, param: str | None = None, code: str | None = None) -> SimulatedReply:
    """Return an error reply in OpenAI's shape."""
    return SimulatedReply(status, error_body(status, message, param, code))


def anthropic_error(reply: SimulatedReply) -> SimulatedReply:
    """Return an error reply in Anthropic's shape."""
    message = msgspec.json.decode(reply.body)["error"]["message"]
    kind = _ANTHROPIC_KINDS.get(reply.status, "api_error" if reply.status >= 500 else "invalid_request_error")
    body = msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
    return SimulatedReply(reply.status, body, reply.content_type, reply.headers)


def _retry_after(text: str) -> bytes:
    """Return a Retry-After header.

    `date` (two seconds ahead) and `date+5` become an HTTP date; other text stays as it is.
    """
    if text.startswith("date"):
        try:
            ahead_s = int(text[4:] or 2)
        except ValueError:
            ahead_s = 2
        text = formatdate(time() + ahead_s, usegmt=True)
    return b"retry-after: %s\r\n" % text.encode("latin-1", "replace")


def spoiled(step: FaultStep, reply: SimulatedReply) -> SimulatedReply:
    """Return the reply with this step's fault, for faults that a whole reply can have."""
    if step.status is not None:
        headers = _retry_after(step.retry_after) if step.retry_after is not None else b""
        body = error_body(step.status, f"simulated fault {step.status}")
        return SimulatedReply(step.status, body, headers=headers)
    match step.kind:
        case "malformed":
            return SimulatedReply(200, reply.body[:-2] + b',"', reply.content_type)
        case "html":
            return SimulatedReply(200, b"<!doctype html><title>Bad gateway</title><h1>Bad gateway</h1>\n", b"text/html")
        case "empty":
            return SimulatedReply(200, b"", reply.content_type)
        case "null":
            return SimulatedReply(200, b"null")
        case "nochoices":
            return SimulatedReply(200, _without_choices(reply))
        case "error200":
            return SimulatedReply(200, error_body(500, "simulated fault inside a 200"))
        case "huge":
            return SimulatedReply(200, _huge(step.value or HUGE_BYTES))
        case "pretty" if reply.content_type != EVENT_STREAM:
            return SimulatedReply(200, msgspec.json.format(reply.body, indent=2))
        case "badgzip":
            return SimulatedReply(200, b"\x1f\x8b\x08\x00 this is not gzip", headers=b"content-encoding: gzip\r\n")
        case "bomb":
            return SimulatedReply(200, _bomb(step.value or BOMB_BYTES), headers=b"content-encoding: gzip\r\n")
        case "unfit":
            # The text's first brace stands behind the quote that opens its string.
            return SimulatedReply(200, reply.body.replace(b'"{\\"', b'"\\"', 1), reply.content_type)
        case "redirect":
            return SimulatedReply(307, b"{}", headers=b"location: /v1/redirected\r\n")
    return reply


def _without_choices(reply: SimulatedReply) -> bytes:
    if reply.content_type == EVENT_STREAM:
        return b"data: [DONE]\n\n"
    seen = msgspec.json.decode(reply.body)
    return msgspec.json.encode(seen | {name: [] for name in ("choices", "data", "output", "results") if name in seen})


def _huge(size: int) -> bytes:
    head = b'{"id":"huge","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"'
    tail = b'"},"finish_reason":"stop"}]}'
    return head + b"x" * max(0, size - len(head) - len(tail)) + tail


@lru_cache(maxsize=1)
def _bomb(size: int) -> bytes:
    """Return a gzip body of about a thousandth of `size` that unpacks to at least `size` spaces.

    One compressed piece ends on a byte border and does not refer to earlier bytes, so it can be
    repeated.
    """
    chunk = b" " * _PIECE_BYTES
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(chunk) + packer.flush(zlib.Z_FULL_FLUSH)
    count = -(-size // _PIECE_BYTES)
    check = 0
    for _ in range(count):
        check = zlib.crc32(chunk, check)
    trailer = check.to_bytes(4, "little") + (count * _PIECE_BYTES & 0xFFFFFFFF).to_bytes(4, "little")
    return b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff" + packed * count + packer.flush() + trailer


async def send(
    connection: SimulatedConnection, behaviour: Behaviour, reply: SimulatedReply, *, keep_alive: bool
) -> bool:
    """Send a reply with the behaviour's fault and delays; return whether to keep the connection.

    The caller has waited for `latency` already.
    """
    kind = behaviour.fault.kind if behaviour.fault is not None else ""
    head = encode_head(reply, len(reply.body), keep_alive=keep_alive)
    half = reply.body[: max(1, len(reply.body) // 2)]
    match kind:
        case "hang":
            await asyncio.Event().wait()
        case "reset_before":
            connection.reset()
            return False
        case "hang_body":
            connection.write(head)
            await asyncio.Event().wait()
        case "half":
            connection.write(head + half)
            return False
        case "reset":
            connection.write(head + half)
            await asyncio.sleep(RESET_AFTER_S)
            connection.reset()
            return False
        case "longlength":
            connection.write(encode_head(reply, len(reply.body) + 100, keep_alive=keep_alive) + reply.body)
            return False
    for step in behaviour.delays:
        if step.kind == "slow":
            await _trickle(connection, head, reply.body, chunks=10, over_ms=step.value or 1000)
            return keep_alive
        if step.kind == "slowloris":
            over_ms = (step.value or SLOWLORIS_MS) * len(reply.body)
            await _trickle(connection, head, reply.body, chunks=len(reply.body), over_ms=over_ms)
            return keep_alive
    if len(reply.body) > _PIECE_BYTES:
        connection.write(head)
        for start in range(0, len(reply.body), _PIECE_BYTES):
            connection.write(reply.body[start : start + _PIECE_BYTES])
            await connection.drain()
    else:
        connection.write(encode(reply, keep_alive=keep_alive))
    return keep_alive


async def _trickle(connection: SimulatedConnection, head: bytes, body: bytes, *, chunks: int, over_ms: float) -> None:
    connection.write(head)
    size = max(1, -(-len(body) // max(1, chunks)))
    for start in range(0, len(body), size):
        await asyncio.sleep(over_ms / 1000 / max(1, chunks))
        connection.write(body[start : start + size])
