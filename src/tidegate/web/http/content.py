"""The bytes of a file as a response, one range or all.

Extents are read page by page, so that no whole file is in memory.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidegate.core.errors import ApiProblem
from tidegate.core.ports import Blobs
from tidegate.core.wording import in_words
from tidegate.store.file_bytes import file_bytes
from tidegate.store.store import Store
from tidegate.web.http import problems, ranges
from tidegate.web.http.parts import body_part, send_parts

_SANDBOX = "sandbox; default-src 'none'"


class FileContents:
    """The answers to requests for the bytes of files."""

    def __init__(self, store: Store, blobs: Blobs) -> None:
        self._store = store
        self._blobs = blobs

    async def answer(
        self, request: Request, file_id: str | None, size_bytes: int, headers: dict[str, str], *, from_at: int = 0
    ) -> Response:
        """Return the response to a GET or HEAD of a file's bytes; without a `file_id` it is empty.

        With `from_at` it starts at that byte, and a `Range` header is ignored."""
        headers = {**headers, "Content-Security-Policy": _SANDBOX, "Accept-Ranges": "bytes"}
        try:
            asked = None if from_at else _asked(request, headers, size_bytes)
        except ranges.Unsatisfiable:
            refusal = problems.answer(
                ApiProblem(
                    416,
                    "range_not_satisfiable",
                    f"It has {in_words(size_bytes, 'byte')}; the range begins behind them.",
                )
            )
            refusal.headers.update({**headers, "Content-Range": f"bytes */{size_bytes}"})
            return refusal
        start, end = asked or (from_at, size_bytes)
        headers["Content-Length"] = str(end - start)
        status = 200
        if asked is not None:
            status = 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size_bytes}"
        media_type = "application/octet-stream"
        if request.method == "HEAD" or file_id is None or start == end:
            return Response(None, status, headers, media_type)
        stream = file_bytes(self._store, self._blobs, file_id, start, end)
        # Fetch the first piece before the head goes out, so that unreachable storage is still a
        # 503.
        first = await anext(stream)
        return Download(first, stream, status, headers, media_type)


def _asked(request: Request, headers: dict[str, str], size_bytes: int) -> tuple[int, int] | None:
    condition = request.headers.get("if-range")
    if condition is not None and condition != headers.get("ETag"):
        return None
    return ranges.choose(request.headers.get("range"), size_bytes)


class Download(Response):
    """A response that sends a stream of bytes no faster than the client takes them.

    It closes the stream as soon as it ends.
    """

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes, None], status: int, headers: dict[str, str], media_type: str
    ) -> None:
        super().__init__(None, status, headers, media_type)
        if "Content-Length" not in headers:
            # Starlette set it to 0, because no body was passed.
            del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            # Sending the head drains the request's body, so that only the disconnect is left to
            # receive.
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with while_the_client_stays(receive):
                await send_parts(send, self._first)
                async for chunk in self._rest:
                    await send_parts(send, chunk)
                await send(body_part(b"", more=False))


@asynccontextmanager
async def while_the_client_stays(receive: Receive) -> AsyncIterator[None]:
    """Leave the block when the client disconnects.

    That is no error, because no answer can reach the client.
    """
    task = asyncio.current_task()
    assert task is not None
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            continue
        has_left = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not has_left:
            raise
        task.uncancel()
    finally:
        watching.cancel()
