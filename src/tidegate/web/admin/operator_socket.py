"""The API at the socket in the data directory, for commands on this machine.

It works whatever address the server listens on.

Requests here are few and small, so each is read and answered whole. The socket's mode and the user
at the other end decide who may connect; the app decides what a caller may do, as everywhere.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
from aiohttp.web_request import BaseRequest
from aiohttp.web_response import Response
from aiohttp.web_server import Server
from starlette.types import ASGIApp, Message

from tidegate.control import control_socket, is_peer_owner
from tidegate.web.http.loopback import BY_SOCKET

log = structlog.get_logger()

_CLOSE_S = 1.0


@asynccontextmanager
async def operator_socket(app: ASGIApp, data_dir: Path) -> AsyncIterator[None]:
    """Serve the app at the socket while the block runs; serve nothing if the file system has no
    sockets.
    """
    server = Server(_Bridge(app).answer)
    async with AsyncExitStack() as stack:
        try:
            listener = stack.enter_context(control_socket(data_dir))
        except OSError as error:
            advice = "keep the data directory on a file system that has Unix sockets: commands cannot ask this server"
            log.warning("operator_socket_failed", problem=error.strerror or str(error), advice=advice)
        else:
            listening = await asyncio.get_running_loop().create_unix_server(server, sock=listener)
            stack.push_async_callback(server.shutdown, _CLOSE_S)
            stack.callback(listening.close)
        yield


class _Bridge:
    """The bridge that passes requests of aiohttp's server to the app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def answer(self, request: BaseRequest) -> Response:
        peer = request.transport.get_extra_info("socket") if request.transport is not None else None
        if peer is None or not is_peer_owner(peer):
            return Response(status=403, text="Only the user who runs this server may use its socket.")
        to_read = [await request.read()]
        answer = Response(status=500)
        parts: list[bytes] = []

        async def receive() -> Message:
            if not to_read:
                # Never report a disconnect: whether the client stays is not watched here.
                await asyncio.Event().wait()
            return {"type": "http.request", "body": to_read.pop(), "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.set_status(message["status"])
                for name, value in message.get("headers", []):
                    if name != b"content-length":
                        answer.headers[name.decode("latin-1")] = value.decode("latin-1")
            else:
                parts.append(message.get("body", b""))

        await self._app(_scope(request), receive, send)
        answer.body = b"".join(parts)
        return answer


def _scope(request: BaseRequest) -> dict[str, Any]:
    url = request.rel_url
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": url.path,
        "raw_path": url.raw_path.encode("latin-1"),
        "query_string": url.raw_query_string.encode("latin-1"),
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.raw_headers],
        "client": None,
        "server": None,
        BY_SOCKET: True,
    }
