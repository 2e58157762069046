"""The connections to model servers, their number, and the calls on them that take too long.

- `read_plain_answer` reads plain answers, which most are: one piece with a status, headers and a
  body of the stated length. aiohttp's parser reads all others: pieces, bodies without a length,
  encodings, connections that end, and odd answers. The parser costs several times as much, most of
  it for streams that a whole answer does not need.
- `Connections` is aiohttp's connector under a ceiling that counts idle connections too; aiohttp's
  own limit does not. Before a new connection would break the ceiling, the longest idle one is
  closed. Idle ones beyond `kept_alive_max` are closed later. A connection on which the server sent
  bytes out of turn is never used, because its next bytes would be taken for another request's
  answer. The class overrides methods of aiohttp's connector and protocol that aiohttp does not
  document, and takes connections from the pool without aiohttp's `Connection` around each. Tests at
  the limits, and with broken and stray answers, check that aiohttp still behaves like this.
- `ConnectionSlots` hands out the connections below the process's ceiling. A part of them is kept
  for interactive calls, which go first and may have all that are free.
- `TimeoutSweep` ends calls in flight that take too long. A timer for each call and each received
  packet would cost more than all else in this layer. So a call only counts its steps (request
  begun, headers received, bytes received). A sweep a few times a second notes how long each call
  has made no step, and whether its request has been written. Time-outs are exact to one sweep; the
  total deadline is exact.

This module does not know the contents of calls.
"""

import asyncio
import ctypes
import functools
import re
import resource
import select
import ssl
from collections.abc import Coroutine
from time import monotonic
from typing import Any

import aiohttp
import msgspec
from aiohttp.base_protocol import BaseProtocol
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest, ConnectionKey
from aiohttp.http_parser import RawResponseMessage
from multidict import CIMultiDict, istr

from tidegate import metrics
from tidegate.core.deployments import HttpLimits, Tls
from tidegate.core.errors import PoolExhausted, SettingsError
from tidegate.wait_line import WaitLine

# Beside upstream connections a process has a store, blobs, listeners, logs and the control client.
OTHER_FILES_COUNT = 256

DNS_CACHE_S = 10
TRIM_S = 1.0
READ_BUFFER_BYTES = 64 * 1024
SWEEP_S = 0.25

# Linux reports a peer's close of its side separately; other systems show only a full hang-up.
_GOODBYE = getattr(select, "POLLRDHUP", 0)


_HEAD = re.compile(
    rb"HTTP/1\.1 ([2-5][0-9][0-9]) [ -~]*+\r\n"
    rb"((?:[0-9A-Za-z!#$%&'*+.^_`|~-]++:[ -~]*+(?<! )\r\n)++)\r\n"
)
_HEADER = re.compile(r"([^:]++): *+([^\r]*+)\r\n")
_LENGTH = istr("Content-Length")
_CONNECTION = istr("Connection")
_KEPT = "keep-alive"
# Headers that change how a body or a connection is read.
_OTHER_WAYS = tuple(
    map(istr, ("Transfer-Encoding", "Content-Encoding", "Upgrade", "Proxy-Connection", "Sec-WebSocket-Key1"))
)
_WITHOUT_BODY = (204, 304)


class WholeHead(msgspec.Struct, frozen=True):
    code: int
    headers: CIMultiDict[str]


class WholeBody:
    """The body of an answer that has come whole."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_nowait(self) -> bytes:
        data, self._data = self._data, b""
        return data

    async def readany(self) -> bytes:
        return self.read_nowait()


def read_plain_answer(data: bytes, limits: HttpLimits) -> tuple[WholeHead, WholeBody] | None:
    """Return the answer in these bytes if it fills them exactly; None if the parser must look."""
    head = _HEAD.match(data)
    if head is None:
        return None
    begin = head.end()
    status, lines = head.groups()
    headers = CIMultiDict(_HEADER.findall(lines.decode("ascii")))
    if headers.getall(_LENGTH, None) != [str(len(data) - begin)]:
        return None
    if begin > limits.header_bytes_max or len(headers) > limits.header_count_max:
        return None
    for name in _OTHER_WAYS:
        if name in headers:
            return None
    if headers.get(_CONNECTION, _KEPT) != _KEPT:
        return None
    code = int(status)
    return None if code in _WITHOUT_BODY else (WholeHead(code, headers), WholeBody(data[begin:]))


Head = RawResponseMessage | WholeHead
AnswerBody = aiohttp.StreamReader | WholeBody


class _PollFd(ctypes.Structure):
    """The kernel's `struct pollfd`."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


# Called with the interpreter's lock held: Python's own `poll` releases it for a look that takes a
# microsecond, and then has to wait until the store's threads give it back.
_poll = ctypes.PyDLL(None).poll
_poll.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int)


class Connection(ResponseHandler):
    """One connection to a model server.

    aiohttp's parser is made only for answers that are not plain.
    """

    # The limits of the next answer, until its first byte has come.
    _awaited: HttpLimits | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Under TLS the peer may send session tickets at any time, so only its closing counts.
        words = select.POLLIN if transport.get_extra_info("sslcontext") is None else _GOODBYE
        self._look = _PollFd(transport.get_extra_info("socket").fileno(), words)
        self._look_at = ctypes.addressof(self._look)
        tls = transport.get_extra_info("ssl_object")
        self._tls_1_3 = tls if tls is not None and tls.version() == "TLSv1.3" else None

    def is_unconfirmed(self) -> bool:
        """Return whether the server may still reject our side of the TLS handshake.

        In TLS 1.3 our side ends before the server has looked at our certificate. A server that
        accepts it sends a session ticket.
        """
        tls = self._tls_1_3
        return tls is not None and not (tls.session is not None and tls.session.has_ticket)

    def has_spoken(self) -> bool:
        """Return whether the peer closed the connection, or sent bytes out of turn, read or unread.

        Ask before the first byte of a request is written. Then the request can still go over
        another connection, and has certainly not been sent twice.
        """
        transport = self.transport
        if transport is None or transport.is_closing() or self.should_close:
            return True
        # A failed poll returns -1, which counts as spoken.
        return bool(_poll(self._look_at, 1, 0))

    def expect_answer(self, limits: HttpLimits) -> None:
        """Parse the bytes from now on as one new answer."""
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

    def answer(self) -> Coroutine[Any, Any, tuple[Head, AnswerBody]]:
        """Wait for the head of the next answer; return it with the source of its body."""
        return self.read()

    def expect_nothing(self) -> None:
        # Without a parser, aiohttp keeps even half a line that comes out of turn, so `has_spoken`
        # sees it.
        self._awaited = self._parser = None

    def resume_reading(self, resume_parser: bool = True) -> None:
        # aiohttp calls this after every read and makes the parser look again, even if nothing was
        # paused.
        if self._reading_paused:
            super().resume_reading(resume_parser)


class Connections(aiohttp.TCPConnector):
    def __init__(self, limits: HttpLimits) -> None:
        # The transport hands out the slots, so aiohttp's own queue (which cannot tell our time-out
        # from others) is off.
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
        """Return an idle connection that may be written to; close those before it that may not."""
        idle = self._conns.get(key)
        if idle is None:
            return None
        found: Connection | None = None
        # aiohttp stamps idle connections with this clock.
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
        """Open a new connection to the address of this request."""
        if self.closed:
            raise aiohttp.ClientConnectionError("the connections were closed")
        try:
            wrapper = await self.connect(request, [], self._connecting)
        except TimeoutError:
            raise aiohttp.ConnectionTimeoutError from None
        connection = wrapper.protocol
        assert isinstance(connection, Connection)
        # `keep_or_close` ends the connection. Its wrapper would close it when it is garbage
        # collected.
        wrapper._protocol = None
        if connection.has_spoken():
            self.keep_or_close(request.connection_key, connection, whole=False)
            raise aiohttp.ClientConnectionResetError("the server spoke or closed before it was asked")
        return connection

    def keep_or_close(self, key: ConnectionKey, connection: Connection, *, whole: bool) -> None:
        """Keep a connection for the next call if HTTP allows it; drop it after half an answer."""
        transport = connection.transport
        if whole and transport is not None and not transport.get_write_buffer_size():
            connection.expect_nothing()
            if self._cleanup_handle is None or self._closed or connection.should_close:
                self._release(key, connection)
                return
            # This does what `_release` would do while aiohttp's clean-up of idle connections runs.
            self._acquired.discard(connection)
            idle = self._conns[key]
            idle.append((connection, monotonic()))
            # Under load hundreds of connections are idle for a moment, between an answer and the
            # next call: those are kept.
            if self._trim_timer is None and (len(idle) > self._idle_max or len(self._conns) > 1):
                self._begin_trimming()
        else:
            # A connection that still has something to send would stay open until the server takes
            # it.
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
        """Close the connections beyond the limit that were already idle at the last look."""
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
    """Return the value for aiohttp's `ssl=`: True for the ordinary check, else a context."""
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


class ConnectionSlots:
    def __init__(self, limits: HttpLimits) -> None:
        self._max = limits.connections_max
        self._background_max = limits.connections_max - limits.interactive_connections
        self.in_use = 0
        self._background_in_use = 0
        self._background = WaitLine()
        self._interactive = WaitLine()
        # The calls in both lines. Mostly there are none, and neither line is looked at.
        self._waiting = 0

    def free(self) -> int:
        """Return how many more background calls fit."""
        all_free, background_free = self._max - self.in_use, self._background_max - self._background_in_use
        return background_free if background_free < all_free else all_free

    def take_slot(self, *, interactive: bool) -> bool:
        """Take a slot if one is free and no call of a higher class waits for it."""
        if self.in_use >= self._max or (self._waiting and self._interactive):
            return False
        if not interactive:
            if self._background_in_use >= self._background_max:
                return False
            self._background_in_use += 1
        self.in_use += 1
        return True

    async def wait(self, timeout_s: float, *, interactive: bool) -> None:
        """Wait in line for a slot that another call hands over.

        The slot is taken when this returns.
        """
        line = self._interactive if interactive else self._background
        turn = line.join()
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await turn
            metrics.upstream_connection_waits.of("connected").inc()
            return
        except BaseException as stopped:
            if line.give_up(turn):
                # The slot was handed over in the moment we stopped waiting for it.
                self.release_slot(interactive=interactive)
            if not isinstance(stopped, TimeoutError):
                raise
        finally:
            self._waiting -= 1
        metrics.upstream_connection_waits.of("timed_out").inc()
        raise PoolExhausted(
            f"no free connection within {timeout_s:g} s: all {self._max} are in use; "
            "raise http.connections_max or lower the calls in flight",
            retry_after_ms=1000,
        )

    def release_slot(self, *, interactive: bool) -> None:
        self.in_use -= 1
        if not interactive:
            self._background_in_use -= 1
        if self._waiting:
            self._pass_on()

    def _pass_on(self) -> None:
        while self.in_use < self._max and self._interactive.call_first():
            self.in_use += 1
        while self.free() > 0 and self._background.call_first():
            self.in_use += 1
            self._background_in_use += 1


class InFlightCall(msgspec.Struct, eq=False):
    """The progress of one request and its answer.

    `_began_cancels` is how often its task had been cancelled when it began.
    """

    _task: "asyncio.Task[object]"
    _began_cancels: int
    deadline: float
    read_timeout_s: float
    is_streamed: bool = False
    sent: bool = False
    status: int = 0
    _writer: BaseProtocol | None = None
    _written: bool = False
    _cut: str | None = None
    _step: int = 0
    _seen_step: int = -1
    _seen_since: float = 0.0
    _speaking: bool = False
    _body_since: float | None = None
    _received_bytes: int = 0
    _is_paused: bool = False

    def writing(self, writer: BaseProtocol) -> None:
        """Note that bytes may have reached the upstream from now on."""
        self._writer = writer
        self.sent = True
        self._step += 1

    def answered(self, status: int) -> None:
        """Note that the status and headers are here."""
        self.status = status
        self._written = True
        self._step += 1

    def received(self, chunk: bytes) -> None:
        # Some upstreams send blank lines while a request waits for its turn. They are signs of
        # life, not a slow body.
        if self._speaking or chunk.strip():
            self._speaking = True
            self._received_bytes += len(chunk)
        self._step += 1

    def pause_timeout(self, is_paused: bool) -> None:
        """Stop the upstream's clock during a wait for the reader."""
        self._is_paused = is_paused
        self._step += 1

    def overdue(self, now: float, limits: HttpLimits) -> str | None:
        """Return why this call must end now; None if it may go on."""
        if now >= self.deadline:
            return "its deadline passed"
        if self._writer is not None and not self._written and not self._writer.writing_paused:
            self._written = True
            self._step += 1
        if self._step != self._seen_step:
            self._seen_step = self._step
            self._seen_since = now
        still_s = now - self._seen_since
        if self._is_paused:
            slow = still_s >= limits.client_timeout_s
            return f"nothing of it was taken for {limits.client_timeout_s:g} s" if slow else None
        if self.sent and not self._written:
            if still_s >= limits.write_timeout_s:
                return f"the upstream did not take the request within {limits.write_timeout_s:g} s"
        elif self.sent and still_s >= self.read_timeout_s:
            return f"the upstream was silent for {self.read_timeout_s:g} s"
        if self._speaking and not self.is_streamed:
            if self._body_since is None:
                self._body_since = now
            speaking_s = now - self._body_since
            rate = limits.body_rate_min_bytes_per_s
            if speaking_s > limits.body_rate_grace_s and self._received_bytes < rate * speaking_s:
                return f"the answer came at less than {rate:g} bytes per second"
        return None

    def cut(self, why: str) -> None:
        self._cut = why
        self._task.cancel()

    def cut_reason(self) -> str | None:
        """Return why we ended this call.

        Return None if its task was also cancelled from elsewhere, which goes first.
        """
        if self._cut is None or self._task.uncancel() > self._began_cancels:
            return None
        return self._cut


class TimeoutSweep:
    """The sweep over all calls in flight. It sleeps while there are none."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: HttpLimits) -> None:
        self._loop = loop
        self._limits = limits
        shortest_s = min(limits.write_timeout_s, limits.read_timeout_s)
        self._period_s = min(SWEEP_S, max(shortest_s / 4, 0.01))
        self._exchanges: set[InFlightCall] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._next = 0.0

    def watch_call(self, total_s: float, read_timeout_s: float, *, is_streamed: bool = False) -> InFlightCall:
        task = asyncio.current_task(self._loop)
        assert task is not None, "a call is made inside a task"
        deadline = self._loop.time() + total_s
        flight = InFlightCall(task, task.cancelling(), deadline, read_timeout_s, is_streamed)
        self._exchanges.add(flight)
        if self._timer is None:
            self._schedule(min(deadline, deadline - total_s + self._period_s))
        elif deadline < self._next:
            self._timer.cancel()
            self._schedule(deadline)
        return flight

    def forget_call(self, flight: InFlightCall) -> None:
        self._exchanges.discard(flight)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self, at: float) -> None:
        self._next = at
        self._timer = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._exchanges:
            return
        now = self._loop.time()
        next_at = now + self._period_s
        # A call is cancelled only once, so it leaves the set now: a second cancellation could hit
        # its clean-up.
        for flight in list(self._exchanges):
            why = flight.overdue(now, self._limits)
            if why is not None:
                self._exchanges.discard(flight)
                flight.cut(why)
            elif flight.deadline < next_at:
                next_at = flight.deadline
        self._schedule(next_at)
