"""The connections themselves: aiohttp's connector, held to a ceiling that counts idle connections too.

aiohttp limits only the connections in use and keeps any number of idle ones. Here, open means open: before a new connection
is made beyond the ceiling, the one that has been idle longest is closed, and those beyond `kept_alive_max` that stay idle too.

A connection on which the server spoke out of turn is never used: its next words would be taken for the answer to someone
else's request. This module knows nothing of what is asked. It overrides methods of aiohttp's connector and protocol that
aiohttp does not document, and takes connections from the pool without a `Connection` around each; the tests at the limits and
with broken and stray answers are what holds them to this behaviour.
"""

import asyncio
import ctypes
import functools
import resource
import select
import ssl
from collections.abc import Coroutine
from time import monotonic
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest, ConnectionKey
from aiohttp.http_parser import RawResponseMessage

from tidegate.core.deployments import HttpLimits, Tls
from tidegate.core.errors import SettingsError
from tidegate.upstream.http.plain_answer import WholeBody, WholeHead, read_plain_answer

# Beside upstream connections a process has a store, blobs, listeners, logs and the control client.
OTHER_FILES_COUNT = 256

DNS_CACHE_S = 10
TRIM_S = 1.0

READ_BUFFER_BYTES = 64 * 1024

# Linux tells a peer's goodbye apart from its words; elsewhere only a full hang-up is seen.
_GOODBYE = getattr(select, "POLLRDHUP", 0)


Head = RawResponseMessage | WholeHead
Body = aiohttp.StreamReader | WholeBody


class _PollFd(ctypes.Structure):
    """The kernel's `struct pollfd`."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


# Called with the interpreter's lock held: Python's own `poll` gives it up for a look that takes a microsecond, and then waits until the
# store's threads give it back.
_poll = ctypes.PyDLL(None).poll
_poll.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int)


class Connection(ResponseHandler):
    """One connection, with aiohttp's parser of answers behind it, which is made for the answers that are not plain."""

    # The limits of an answer of which nothing has come yet.
    _awaited: HttpLimits | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Under TLS the peer may speak for itself (session tickets), so there only its goodbye counts.
        words = select.POLLIN if transport.get_extra_info("sslcontext") is None else _GOODBYE
        self._look = _PollFd(transport.get_extra_info("socket").fileno(), words)
        self._look_at = ctypes.addressof(self._look)
        tls = transport.get_extra_info("ssl_object")
        self._tls_1_3 = tls if tls is not None and tls.version() == "TLSv1.3" else None

    def is_unconfirmed(self) -> bool:
        """Whether the server may still reject our side of the TLS handshake.

        In TLS 1.3 our side ends before the server has looked at our certificate. A server that accepts it sends a session ticket.
        """
        tls = self._tls_1_3
        return tls is not None and not (tls.session is not None and tls.session.has_ticket)

    def has_spoken(self) -> bool:
        """Return whether the peer sent anything out of turn, its goodbye included, read by the loop or still in the kernel.

        Asked before the first byte of a request is written: then the request can still go over another connection without
        any doubt that it was sent twice.
        """
        transport = self.transport
        if transport is None or transport.is_closing() or self.should_close:
            return True
        # Also when it fails, which is -1.
        return bool(_poll(self._look_at, 1, 0))

    def expect_answer(self, limits: HttpLimits) -> None:
        """What comes from here on is parsed as one answer, and no rest of an earlier one is part of it."""
        self._awaited = limits

    def data_received(self, data: bytes) -> None:
        limits = self._awaited
        if limits is not None:
            self._awaited = None
            answer = read_plain_answer(data, limits)
            if answer is not None:
                self.feed_data(answer)  # type: ignore[arg-type]
                return
            self.set_response_params(
                read_until_eof=True,
                read_bufsize=READ_BUFFER_BYTES,
                max_line_size=limits.header_bytes_max,
                max_field_size=limits.header_bytes_max,
                max_headers=limits.header_count_max,
            )
        super().data_received(data)

    def answer(self) -> Coroutine[Any, Any, tuple[Head, Body]]:
        """The head of the next answer, and where its body comes from."""
        return self.read()

    def expect_nothing(self) -> None:
        # Without a parser even half a line out of turn is kept, and so it is seen.
        self._awaited = self._parser = None

    def resume_reading(self, resume_parser: bool = True) -> None:
        # aiohttp says this after every read and has the parser look again, though nothing was paused.
        if self._reading_paused:
            super().resume_reading(resume_parser)


class Connections(aiohttp.TCPConnector):
    def __init__(self, limits: HttpLimits) -> None:
        # The transport hands out the slots, so aiohttp's own queue (which cannot tell our time-out from others) is off.
        super().__init__(limit=0, keepalive_timeout=limits.kept_alive_s, ttl_dns_cache=DNS_CACHE_S)
        self._factory = functools.partial(Connection, loop=self._loop)  # type: ignore[assignment]
        self._kept_alive_s = limits.kept_alive_s
        self._connecting = aiohttp.ClientTimeout(total=None, connect=limits.connect_timeout_s)
        self._open_max = limits.connections_max
        self._idle_max = limits.kept_alive_max
        self._trim_timer: asyncio.TimerHandle | None = None
        self._idle_before: set[tuple[ResponseHandler, float]] = set()

    def open_count(self) -> int:
        return len(self._acquired) + self.idle_count()

    def idle_count(self) -> int:
        return sum(map(len, self._conns.values()))

    def take_idle(self, key: ConnectionKey) -> Connection | None:
        """An idle connection that may be written to; those that may not are closed on the way to it."""
        idle = self._conns.get(key)
        if idle is None:
            return None
        found: Connection | None = None
        # The clock is the one that aiohttp stamps an idle connection with.
        oldest = monotonic() - self._kept_alive_s
        while idle and found is None:
            connection, stamp = idle.popleft()
            assert isinstance(connection, Connection)
            if stamp < oldest or connection.has_spoken():
                connection.close()
            else:
                self._acquired.add(connection)
                found = connection
        if not idle:
            del self._conns[key]
        return found

    async def open(self, request: ClientRequest) -> Connection:
        """A new connection to where this request would go; of the request nothing else counts."""
        if self.closed:
            raise aiohttp.ClientConnectionError("the connections were closed")
        try:
            wrapper = await self.connect(request, [], self._connecting)
        except TimeoutError:
            raise aiohttp.ConnectionTimeoutError from None
        connection = wrapper.protocol
        assert isinstance(connection, Connection)
        # It ends with `keep_or_close`: its wrapper would close it when it is collected.
        wrapper._protocol = None
        if connection.has_spoken():
            self.keep_or_close(request.connection_key, connection, whole=False)
            raise aiohttp.ClientConnectionResetError("the server spoke or closed before it was asked")
        return connection

    def keep_or_close(self, key: ConnectionKey, connection: Connection, *, whole: bool) -> None:
        """Keep a connection for the next call if HTTP allows it. If its answer is not whole, drop it at once."""
        transport = connection.transport
        if whole and transport is not None and not transport.get_write_buffer_size():
            connection.expect_nothing()
            if self._cleanup_handle is None or self._closed or connection.should_close:
                self._release(key, connection)
                return
            # What `_release` comes to while idle connections are being looked at now and then.
            self._acquired.discard(connection)
            idle = self._conns[key]
            idle.append((connection, monotonic()))
            # Under load hundreds of connections are idle for a moment, between an answer and the next call: those are kept.
            if self._trim_timer is None and (len(idle) > self._idle_max or len(self._conns) > 1):
                self._begin_trimming()
        else:
            # A connection that still has something to send would stay open until the server takes it.
            connection.abort()
            self._release(key, connection, should_close=True)

    def abort_in_use(self) -> None:
        for protocol in self._acquired:
            protocol.abort()

    def _release(self, key: ConnectionKey, protocol: ResponseHandler, *, should_close: bool = False) -> None:
        super()._release(key, protocol, should_close=should_close)
        if self._trim_timer is None:
            self._begin_trimming()

    def _begin_trimming(self) -> None:
        if self.idle_count() > self._idle_max:
            self._trim_timer = self._loop.call_later(TRIM_S, self._trim)

    def _trim(self) -> None:
        """Close what is idle beyond the limit and was so already at the last look."""
        idle = [(stamp, key, protocol) for key, found in self._conns.items() for protocol, stamp in found]
        surplus = len(idle) - self._idle_max
        if self.closed or surplus <= 0:
            self._trim_timer = None
            self._idle_before = set()
            return
        idle.sort(key=lambda found: found[0])
        for stamp, key, protocol in idle[:surplus]:
            if (protocol, stamp) in self._idle_before:
                self._close_idle(key, protocol, stamp)
        self._idle_before = {(protocol, stamp) for stamp, _, protocol in idle}
        self._trim_timer = self._loop.call_later(TRIM_S, self._trim)

    async def _create_connection(self, *args: Any, **named: Any) -> ResponseHandler:
        while self.open_count() > self._open_max and self._conns:
            key = min(self._conns, key=lambda key: self._conns[key][0][1])
            self._close_idle(key, *self._conns[key][0])
        return await super()._create_connection(*args, **named)

    def _close_idle(self, key: ConnectionKey, protocol: ResponseHandler, stamp: float) -> None:
        self._conns[key].remove((protocol, stamp))
        if not self._conns[key]:
            del self._conns[key]
        protocol.close()


def tls_context(tls: Tls) -> ssl.SSLContext | bool:
    """What aiohttp's `ssl=` takes: True for the ordinary check, a context for anything else."""
    if tls == Tls():
        return True
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
        if tls.cert_file:
            context.load_cert_chain(tls.cert_file, tls.key_file)
    except (OSError, ssl.SSLError) as wrong:
        raise SettingsError(
            f"tls: the ca_file, cert_file or key_file cannot be used ({wrong.strerror or type(wrong).__name__}): "
            "check that each exists, is readable and is PEM"
        ) from None
    if not tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def make_room_for_connections(limits: HttpLimits) -> None:
    """Raise this process's limit of open files to what the ceiling needs, or say what to do."""
    needed = limits.connections_max + OTHER_FILES_COUNT
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        left = hard - OTHER_FILES_COUNT
        lower = f", or set http.connections_max, http.kept_alive_max and worker.in_flight_max to at most {left}"
        raise SettingsError(
            f"http.connections_max is {limits.connections_max}, which needs {needed} open files, but this process may open "
            f"{hard}: raise the limit (ulimit -n {needed}, or LimitNOFILE={needed} in the service's unit)"
            f"{lower if left > 0 else ''}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
