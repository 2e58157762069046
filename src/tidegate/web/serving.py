"""Listening: granian inside this process's own event loop, so that the API and the worker share one loop and one stop."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server

from tidegate.core.errors import SettingsError

HEADER_WAIT_MS = 10_000
REQUEST_LINE_AND_HEADERS_BYTES_MAX = 64 * 1024
BACKLOG_COUNT = 1024
_READY_WAIT_S = 10.0


@asynccontextmanager
async def listening(app: Any, host: str, port: int) -> AsyncIterator[str]:
    """Serve an ASGI app; gives the address that answers. Leaving ends it, after the answers under way."""
    port = _claim(host, port)
    server = Server(
        app,
        address=host,
        port=port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        backlog=BACKLOG_COUNT,
        websockets=False,
        log_enabled=False,
        # Not `pipeline_flush`: with it a refusal before a route, such as that of a broken head, is lost when the connection closes.
        http1_settings=HTTP1Settings(
            header_read_timeout=HEADER_WAIT_MS, max_buffer_size=REQUEST_LINE_AND_HEADERS_BYTES_MAX
        ),
    )
    task = asyncio.create_task(server.serve())
    try:
        await _until_it_accepts(task, host, port)
        yield f"http://{_bracketed(host)}:{port}"
    finally:
        server.stop()  # type: ignore[no-untyped-call]
        await asyncio.wait((task,))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _claim(host: str, port: int) -> int:
    """A port that nobody listens on. The server shares ports between its own threads, so it would not notice a stranger."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise SettingsError(
                    f"port {port} on {host} is taken. Stop what listens there, or choose another port with --port."
                ) from error
            raise SettingsError(
                f"cannot listen on {host}:{port}: {error.strerror}. Check server.host and server.port."
            ) from error
        return int(probe.getsockname()[1])


async def _until_it_accepts(task: "asyncio.Task[None]", host: str, port: int) -> None:
    """Return when a connection is accepted, so that `ready` means ready."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    loop = asyncio.get_running_loop()
    end_s = loop.time() + _READY_WAIT_S
    while loop.time() < end_s and not task.done():
        try:
            _, writer = await asyncio.open_connection(target, port)
        except OSError:
            await asyncio.sleep(0.01)
            continue
        writer.close()
        return
    raise SettingsError(f"the server did not begin to listen on {host}:{port}. See the log above.")
