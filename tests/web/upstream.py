"""A model server that says exactly what a test tells it to, in a thread with its own loop, and streams as events."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from typing import Any, Self

from tests.upstream.raw_server import CHAT, Peer, RawServer, Request, Script, answers_with

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM_END = b"0\r\n\r\n"


def chunked(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def event(value: Any, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value)}\n\n".encode()


def chunk(content: str = "", finish: str | None = None, **more: Any) -> bytes:
    """One chunk of a streamed chat completion."""
    choices = [{"index": 0, "delta": {"content": content} if content else {}, "finish_reason": finish}]
    named = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return event({**named, "choices": choices, **more})


def chat_with(content: str, prompt_tokens: int = 3, completion_tokens: int = 2, **message: Any) -> bytes:
    """A whole chat completion."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content, **message},
        "finish_reason": "tool_calls" if "tool_calls" in message else "stop",
    }
    total = prompt_tokens + completion_tokens
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
    named = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    return json.dumps({**named, "choices": [choice], "usage": usage}).encode()


def streams(*pieces: bytes) -> Script:
    """Answers every call with these bytes as a stream of events."""

    async def script(request: Request, peer: Peer) -> None:
        await peer.send(STREAM_HEAD, *(chunked(piece) for piece in pieces), STREAM_END)

    return script


def answers(body: bytes = CHAT, status: int = 200, **headers: str) -> Script:
    return answers_with(status, body, **headers)


class Upstream:
    """`script` may be changed between calls; `posts` is what came so far."""

    def __init__(self, script: Script, tls: ssl.SSLContext | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="upstream", daemon=True)
        self._thread.start()
        self._server = RawServer(script, tls)
        self._run(self._server.__aenter__())
        self.url = self._server.url

    @property
    def posts(self) -> list[Request]:
        return self._server.posts

    def becomes(self, script: Script) -> None:
        self._server.script = script

    def close(self) -> None:
        self._run(self._server.__aexit__())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *wrong: object) -> None:
        self.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)
