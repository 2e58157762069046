"""The watch over the connections of clients to one port of this process.

It closes those that hold the process up.

The HTTP server bounds how many there are and how long a request's head may take. It has no option
for the rest and does not say which connections it holds. So this module finds them among the
descriptors of the process and asks the kernel about each of them:

- An answer that its client does not take, or takes too slowly, is cut off.
- When there are almost as many as allowed, idle connections are closed, the longest idle first.
- When the process stops, what is still open after the grace is closed.

It reads no request and knows no tenant. It needs Linux; elsewhere only the server's own limits
hold.
"""

import asyncio
import os
import socket
import struct
import sys
from collections.abc import Collection
from contextlib import closing, suppress
from typing import NamedTuple, Protocol

import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from tidegate import metrics

log = structlog.get_logger()

# A look costs some 10 microseconds a connection, so looks are frequent only when there are many
# connections.
LOOK_S = 2.0
BUSY_LOOK_S = 1.0
BUSY_SHARE = 0.5
RATE_MIN_BYTES_PER_S = 1_024
# A client that has just connected gets this long to send its request, even when connections are
# scarce.
IDLE_S_MIN = 1.0
CROWDED_SHARE = 0.9
ROOMY_SHARE = 0.25
# A few bytes may wait in the kernel on any connection. More of them mean that the client does not
# keep up.
WAITING_BYTES_MIN = 4_096
CAN_WATCH = sys.platform == "linux"

_DESCRIPTORS = "/proc/self/fd"
# Fields of `struct tcp_info`: the state, the milliseconds since data came in, the bytes
# acknowledged and the bytes not sent yet.
_TCP_INFO = struct.Struct("=B51xI64xQ16xI")
_OPEN_STATES = (1, 8)
_ABORT_ON_CLOSE = struct.pack("ii", 1, 0)

# A client's address and port, as the server writes them.
ClientAddress = tuple[str, str]


class ListenedApp(Protocol):
    """The ASGI app that a port serves."""

    @property
    def busy(self) -> Collection[ClientAddress]:
        """Return the clients that have a request under way. A connection has one at a time."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send, /) -> None:
        """Answer one request."""


class Fares(NamedTuple):
    """The state of a connection, as the kernel reports it."""

    silent_s: float
    taken_bytes: int
    waiting_bytes: int


class InboundConnection(msgspec.Struct):
    """What is kept of a connection between two looks.

    `slow_since_s` is when its client began not to keep up.
    """

    peer: ClientAddress
    busy_at_s: float
    slow_since_s: float | None = None
    slow_from_bytes: int = 0
    taken_at_s: float = 0.0
    taken_bytes: int = 0

    def is_too_slow(self, now_s: float, fares: Fares, timeout_s: float) -> bool:
        """Return whether the client took nothing, or less than the least rate, for `timeout_s`.

        Call it at every look.
        """
        taken_bytes = fares.taken_bytes
        if fares.waiting_bytes < WAITING_BYTES_MIN:
            self.slow_since_s = None
            return False
        if self.slow_since_s is None:
            self.slow_since_s, self.slow_from_bytes = now_s, taken_bytes
            self.taken_at_s, self.taken_bytes = now_s, taken_bytes
            return False
        if taken_bytes > self.taken_bytes:
            self.taken_at_s, self.taken_bytes = now_s, taken_bytes
        if now_s - self.taken_at_s >= timeout_s:
            return True
        slow_s = now_s - self.slow_since_s
        if slow_s < timeout_s:
            return False
        if taken_bytes - self.slow_from_bytes < slow_s * RATE_MIN_BYTES_PER_S:
            return True
        self.slow_since_s, self.slow_from_bytes = now_s, taken_bytes
        return False


class InboundConnections:
    def __init__(self, port: int, count_max: int, timeout_s: float, busy: Collection[ClientAddress]) -> None:
        """Create the watch.

        `timeout_s` is how long a client may take nothing of an answer. `busy` has the clients with
        a request under way.
        """
        self._port = port
        self._count_max = count_max
        self._timeout_s = timeout_s
        self._busy = busy
        # By inode, so that no descriptor has to be kept open. None is a socket that is not a
        # client's connection.
        self._known: dict[int, InboundConnection | None] = {}
        self._count = 0

    async def watch(self) -> None:
        """Look at all connections again and again."""
        loop = asyncio.get_running_loop()
        while CAN_WATCH:
            is_busy = self._count >= self._count_max * BUSY_SHARE
            await asyncio.sleep(min(BUSY_LOOK_S if is_busy else LOOK_S, self._timeout_s / 2))
            try:
                await asyncio.to_thread(self.look, loop.time())
            except OSError as error:
                log.warning("client_connections_watch_failed", problem=error.strerror)

    def look(self, now_s: float) -> None:
        """Close slow connections, and idle ones if there are too many."""
        descriptors = _socket_descriptors()
        known: dict[int, InboundConnection | None] = {}
        idle: list[tuple[float, int]] = []
        slow_count = 0
        for inode, fd in descriptors.items():
            connection = known[inode] = self._known[inode] if inode in self._known else self._met(inode, fd, now_s)
            found = None if connection is None else _opened(inode, fd)
            if connection is None or found is None:
                continue
            with closing(found):
                fares = _fares(found)
                if fares is None:
                    continue
                if connection.is_too_slow(now_s, fares, self._timeout_s):
                    _close(found, abort=True)
                    slow_count += 1
                elif fares.waiting_bytes or connection.peer in self._busy:
                    connection.busy_at_s = now_s
                else:
                    idle.append((min(now_s - connection.busy_at_s, fares.silent_s), inode))
        count = sum(one is not None for one in known.values())
        metrics.client_connections.inc(count - self._count)
        self._known, self._count = known, count
        self._tell("slow", slow_count)
        if count >= self._count_max * CROWDED_SHARE:
            surplus = max(count - slow_count - int(self._count_max * ROOMY_SHARE), 0)
            longest = sorted((one for one in idle if one[0] >= IDLE_S_MIN), reverse=True)[:surplus]
            self._tell("crowded", self._close_idle([(inode, descriptors[inode]) for _, inode in longest]))

    def close_all(self) -> None:
        """Close every connection at once, also those with a request under way."""
        count = 0
        for inode, fd in _socket_descriptors().items() if CAN_WATCH else ():
            found = None if self._met(inode, fd, 0.0) is None else _opened(inode, fd)
            if found is not None:
                with closing(found):
                    _close(found, abort=True)
                    count += 1
        self._tell("stopping", count)

    def _close_idle(self, chosen: list[tuple[int, int]]) -> int:
        count = 0
        for inode, fd in chosen:
            connection, found = self._known[inode], _opened(inode, fd)
            if found is None:
                continue
            with closing(found):
                # A request may have arrived since the look.
                if connection is not None and connection.peer not in self._busy:
                    _close(found, abort=False)
                    count += 1
        return count

    def _met(self, inode: int, fd: int, now_s: float) -> InboundConnection | None:
        """Return the connection of a socket that is new here; None if it is not a client's
        connection to our port.
        """
        found = _opened(inode, fd)
        if found is None:
            return None
        with closing(found), suppress(OSError):
            if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
                return None
            is_listener = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not is_listener and found.getsockname()[1] == self._port:
                return InboundConnection(_peer(*found.getpeername()[:2]), now_s)
        return None

    @staticmethod
    def _tell(why: str, count: int) -> None:
        if count:
            metrics.client_connections_closed.of(why).inc(count)
            log.warning("client_connections_closed", why=why, count=count)


def _socket_descriptors() -> dict[int, int]:
    """Return this process's descriptors of sockets by inode, which identifies a socket."""
    found = {}
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):
            link = os.readlink(f"{_DESCRIPTORS}/{name}")
            if link.startswith("socket:["):
                found[int(link[8:-1])] = int(name)
    return found


def _opened(inode: int, fd: int) -> socket.socket | None:
    """Open this socket by a descriptor of our own; None when it is closed, or when its descriptor
    belongs to another by now.
    """
    with suppress(OSError):
        own = os.dup(fd)
        if os.fstat(own).st_ino == inode:
            return socket.socket(fileno=own)
        os.close(own)
    return None


def _fares(found: socket.socket) -> Fares | None:
    """Return the state of this connection; None when it is closing anyway."""
    with suppress(OSError, struct.error):
        packed = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        state, silent_ms, taken_bytes, waiting_bytes = _TCP_INFO.unpack(packed)
        if state in _OPEN_STATES:
            return Fares(silent_ms / 1000, taken_bytes, waiting_bytes)
    return None


def _close(found: socket.socket, *, abort: bool) -> None:
    """Close the connection, so that the server closes its descriptor too.

    `abort` throws away what the client did not take.
    """
    with suppress(OSError):
        if abort:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT_ON_CLOSE)
        found.shutdown(socket.SHUT_RDWR)


def _peer(host: str, port: int) -> ClientAddress:
    """Return a client's address as the server writes it: the port as text, where the kernel writes
    a number.
    """
    return host, str(port)
