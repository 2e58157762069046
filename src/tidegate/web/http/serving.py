"""The HTTP server.

Granian runs inside this process's event loop, so that the API and the worker share one loop and
stop together.
"""

import asyncio
import errno
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import structlog
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server

from tidegate.core.errors import SettingsError
from tidegate.settings import Settings
from tidegate.upstream.http.connections import OTHER_FILES_COUNT
from tidegate.web.http.inbound import InboundConnections, ListenedApp

log = structlog.get_logger()

HEADER_WAIT_MS = 10_000
REQUEST_LINE_AND_HEADERS_BYTES_MAX = 64 * 1024
BACKLOG_COUNT = 1024
_READY_WAIT_S = 10.0
# The server gets this long to notice that its connections are closed, even after the grace.
_CLOSE_WAIT_S = 0.5
# Share of the grace for answers; the rest is for closing everything else.
ANSWERS_SHARE = 0.8
CONNECTIONS_MIN = 32
# Room for the second descriptor of a connection that sends or receives a file. Event streams need
# none.
FILES_BESIDE_MAX = 1_000


class ListenLimits(msgspec.Struct, frozen=True):
    """The limits for the clients of one listener.

    The grace is the time that open answers get when the process stops.
    """

    connections_max: int = 64
    client_timeout_s: float = 60.0
    grace_s: float = 5.0


DEFAULT_LIMITS = ListenLimits()


def listen_limits(settings: Settings) -> ListenLimits:
    """Return the limits of the API's listener, with as many connections as this process has
    descriptors for.
    """
    wanted = settings.server.connections_max
    upstream = min(settings.http.connections_max, settings.worker.in_flight_max + settings.http.kept_alive_max)
    others = OTHER_FILES_COUNT + upstream
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = others + wanted + min(wanted, FILES_BESIDE_MAX)
    count = wanted
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        left = soft - others
        count = min(wanted, max(CONNECTIONS_MIN, left // 2, left - FILES_BESIDE_MAX))
    if count < wanted:
        log.warning(
            "client_connections_limited",
            count=count,
            wanted=wanted,
            advice=f"raise the limit of open files to {needed} (ulimit -n, LimitNOFILE), or lower server.connections_max",
        )
    return ListenLimits(count, settings.http.client_timeout_s, settings.worker.grace_ms / 1000)


@asynccontextmanager
async def listening(
    app: ListenedApp, host: str, port: int, limits: ListenLimits = DEFAULT_LIMITS, stop: asyncio.Event | None = None
) -> AsyncIterator[str]:
    """Serve an app while the block runs; yields the URL that answers.

    Leaving the block stops the server after the open answers, at the latest after the grace, which
    begins with `stop`.
    """
    host = _address_of(host)
    port = _claim(host, port)
    inbound = InboundConnections(port, limits.connections_max, limits.client_timeout_s, app.busy)
    server = Server(
        app,
        address=host,
        port=port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        backlog=BACKLOG_COUNT,
        # The connections that are accepted; the others wait in the backlog.
        backpressure=limits.connections_max,
        websockets=False,
        log_enabled=False,
        # Without `pipeline_flush`: it would lose a refusal before routing, such as that of a broken
        # head, when the connection closes.
        http1_settings=HTTP1Settings(
            header_read_timeout=HEADER_WAIT_MS, max_buffer_size=REQUEST_LINE_AND_HEADERS_BYTES_MAX
        ),
    )
    task = asyncio.create_task(server.serve())
    watch = asyncio.create_task(inbound.watch())
    asked_at = asyncio.create_task(_moment_of(stop or asyncio.Event()))
    try:
        await _until_it_accepts(task, host, port)
        yield f"http://{_bracketed(host)}:{port}"
    finally:
        loop = asyncio.get_running_loop()
        began_s = asked_at.result() if asked_at.done() else loop.time()
        server.stop()  # type: ignore[no-untyped-call]
        await asyncio.wait((task,), timeout=max(began_s + limits.grace_s * ANSWERS_SHARE - loop.time(), 0.0))
        if not task.done():
            await asyncio.to_thread(inbound.close_all)
            await asyncio.wait((task,), timeout=max(began_s + limits.grace_s - loop.time(), _CLOSE_WAIT_S))
        if not task.done():
            log.error(
                "server_stop_failed", advice="connections are left to the system, which closes them with the process"
            )
        for one in (watch, asked_at):
            one.cancel()


async def _moment_of(stop: asyncio.Event) -> float:
    await stop.wait()
    return asyncio.get_running_loop().time()


def _address_of(host: str) -> str:
    """Return the address of a name such as localhost; the server takes only addresses."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsError(
            f"cannot listen on {host}: no address is known for it. Check --host or server.host."
        ) from error
    # IPv4 first: programs that call localhost look there.
    return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _claim(host: str, port: int) -> int:
    """Return a port without a listener.

    The server shares its port between threads, so it would not notice another process there.
    """
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
                f"cannot listen on {host}:{port}: {error.strerror}. Check --host and --port, or server.host and server.port."
            ) from error
        return int(probe.getsockname()[1])


async def _until_it_accepts(task: "asyncio.Task[None]", host: str, port: int) -> None:
    """Wait until the server accepts a connection, so that `ready` means ready."""
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
