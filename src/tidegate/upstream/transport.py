"""One HTTP call over aiohttp: slots, deadlines and size limits of our own on top, and every failure sorted.

It knows URLs, bytes and time, but no models, retries or health. The seam is `Transport`: a faster client can take
aiohttp's place without anything above noticing. Of aiohttp it takes the connections and the parser of answers, and leaves out
the session, request and response objects, which cost several times what the call itself does: the head of a request is bytes
that were made once per URL. No call has a timer: one sweep looks at all calls in flight.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Coroutine, Mapping
from typing import Any, NamedTuple, Protocol

import aiohttp
from aiohttp.client_reqrep import ClientRequest
from yarl import URL

from tidegate import __version__
from tidegate.core.deployments import Deployment, Engine, HttpLimits
from tidegate.core.errors import PoolExhausted, UpstreamError
from tidegate.upstream import classify
from tidegate.upstream.connections import Connections, tls_context
from tidegate.upstream.exchange import Exchange, Sweep
from tidegate.upstream.purse import Leave, LeaveDied

# A server may close a connection that is new before a byte is written; the next one may be closed too.
STALE_CONNECTIONS_MAX = 3

# Up to here the head and the body leave as one piece; above it the copy would cost more than a second write.
ONE_WRITE_BYTES_MAX = 64 * 1024


class Reply(NamedTuple):
    """What came back, whole. `body` is already decompressed."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Line(Protocol):
    """The way to one deployment."""

    async def post(
        self,
        url: URL,
        idempotency_key: str,
        body: bytes,
        total_s: float,
        headers: bytes = b"",
        leave: Leave | None = None,
    ) -> Reply:
        """Send one request and read its whole answer, whatever its status; raises one UpstreamError.

        `headers` are more header lines, each with its line end. With a `leave`, LeaveDied when it ran out before the first byte.
        """

    async def get(self, url: URL, total_s: float) -> Reply:
        """The same for a question that costs nothing."""


class Transport(Protocol):
    def line(self, deployment: Deployment) -> Line:
        """The way to this deployment: with its key, its certificates and its time-outs."""

    def free_slots(self) -> int:
        """How many more calls fit under the process's connection ceiling."""

    async def close(self) -> None:
        """End what is in flight and close every connection."""


class Way:
    """What is the same for every call to one URL: where it is, and the bytes that each request begins with."""

    __slots__ = ("get_head", "key", "post_head", "request")

    def __init__(self, url: URL, headers: Mapping[str, str], tls: ssl.SSLContext | bool) -> None:
        # For the connector, which asks only where to connect; our key is not in it, so no error can show it.
        self.request = ClientRequest("GET", url, ssl=tls, loop=asyncio.get_running_loop())
        self.key = self.request.connection_key
        lines = [f" {url.raw_path_qs} HTTP/1.1", f"Host: {url.host_port_subcomponent}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if not all(line.isprintable() for line in lines):
            raise ValueError("a header or URL with control characters")
        head = "\r\n".join(lines).encode() + b"\r\n"
        self.get_head = b"GET" + head + b"\r\n"
        self.post_head = b"POST" + head + b"Idempotency-Key: "

    def write(self, transport: asyncio.WriteTransport, idempotency_key: str, headers: bytes, body: bytes) -> None:
        key = idempotency_key.encode()
        size = len(body)
        if size <= ONE_WRITE_BYTES_MAX:
            transport.write(b"%b%b\r\n%bContent-Length: %d\r\n\r\n%b" % (self.post_head, key, headers, size, body))
        else:
            transport.write(b"%b%b\r\n%bContent-Length: %d\r\n\r\n" % (self.post_head, key, headers, size))
            transport.write(body)


class AiohttpLine:
    __slots__ = ("_headers", "_tls", "_transport", "_ways", "read_timeout_s")

    def __init__(self, transport: "AiohttpTransport", deployment: Deployment, read_timeout_s: float) -> None:
        self.read_timeout_s = read_timeout_s
        self._transport = transport
        self._headers = _headers(deployment)
        self._tls = tls_context(deployment.tls)
        self._ways: dict[URL, Way] = {}

    def post(
        self,
        url: URL,
        idempotency_key: str,
        body: bytes,
        total_s: float,
        headers: bytes = b"",
        leave: Leave | None = None,
    ) -> Coroutine[Any, Any, Reply]:
        return self._transport.call(self, url, idempotency_key, body, total_s, headers, leave)

    def get(self, url: URL, total_s: float) -> Coroutine[Any, Any, Reply]:
        return self._transport.call(self, url, "", None, total_s, b"", None)

    def way(self, url: URL) -> Way:
        way = self._ways.get(url)
        if way is None:
            way = self._ways[url] = Way(url, self._headers, self._tls)
        return way


class AiohttpTransport:
    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.connections = Connections(limits)
        self._loop = asyncio.get_running_loop()
        self._sweep = Sweep(self._loop, limits)
        self._in_use = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def line(self, deployment: Deployment) -> AiohttpLine:
        return AiohttpLine(self, deployment, deployment.read_timeout_s or self.limits.read_timeout_s)

    def free_slots(self) -> int:
        return self.limits.connections_max - self._in_use

    async def close(self) -> None:
        self.connections.abort_in_use()
        await self.connections.close()
        self._sweep.stop()

    async def call(
        self,
        line: AiohttpLine,
        url: URL,
        idempotency_key: str,
        body: bytes | None,
        total_s: float,
        headers: bytes,
        leave: Leave | None,
    ) -> Reply:
        """One request and its whole answer; a POST with a body, a GET without. A cancelled call closes its connection, so
        that the upstream sees it.
        """
        if self._in_use < self.limits.connections_max:
            self._in_use += 1
        else:
            await self._wait_for_slot(min(self.limits.pool_timeout_s, total_s))
        exchange = self._sweep.begin(total_s, line.read_timeout_s)
        try:
            for _ in range(STALE_CONNECTIONS_MAX):
                try:
                    return await self._exchange(line, url, idempotency_key, body, exchange, headers, leave)
                except (Exception, asyncio.CancelledError) as wrong:
                    # Whatever a hostile answer makes the client raise, it is one failed call. What was caught is not
                    # chained or kept: its frames know the request's head, and with it our key.
                    failed = self._sort(wrong, exchange, repeatable=body is None)
                if failed is not None:
                    break
        finally:
            self._sweep.end(exchange)
            self._give_back_slot()
        raise failed or classify.failure(aiohttp.ServerDisconnectedError(), sent=False)

    async def _exchange(
        self,
        line: AiohttpLine,
        url: URL,
        idempotency_key: str,
        body: bytes | None,
        exchange: Exchange,
        headers: bytes,
        leave: Leave | None,
    ) -> Reply:
        way = line.way(url)
        if not idempotency_key.isprintable():
            raise ValueError("an idempotency key with control characters")
        wire = self.connections.take(way.key)
        if wire is None:
            wire = await self.connections.open(way.request)
        whole = False
        try:
            if leave is not None:
                # A connection that took too long is kept: with the next leave it is there at once.
                whole = True
                leave.begin()
                whole = False
            wire.expect_answer(self.limits)
            exchange.writing(wire)
            assert wire.transport is not None
            if body is None:
                wire.transport.write(way.get_head)
            else:
                way.write(wire.transport, idempotency_key, headers, body)
            message, payload = await wire.read()
            while 100 <= message.code <= 199 and message.code != 101:
                message, payload = await wire.read()
            exchange.heard(message.code)
            if payload.is_eof():
                answer = payload.read_nowait()
                if len(answer) > self.limits.response_bytes_max:
                    raise classify.AnswerTooLarge(message.code, self.limits.response_bytes_max)
            else:
                answer = await self._read_body(payload, exchange)
            whole = True
        finally:
            self.connections.give_back(way.key, wire, whole=whole)
        return Reply(message.code, message.headers, answer)

    async def _read_body(self, payload: aiohttp.StreamReader, exchange: Exchange) -> bytes:
        bytes_max = self.limits.response_bytes_max
        chunks = []
        size = 0
        while not payload.at_eof():
            chunk = await payload.readany()
            size += len(chunk)
            if size > bytes_max:
                raise classify.AnswerTooLarge(exchange.status, bytes_max)
            chunks.append(chunk)
            exchange.received(chunk)
        return b"".join(chunks)

    def _sort(self, wrong: BaseException, exchange: Exchange, *, repeatable: bool) -> UpstreamError | None:
        """The error to raise, or None when nothing was written or asked for work and the call may simply be made again."""
        if isinstance(wrong, asyncio.CancelledError):
            cut = exchange.cut_reason()
            if cut is None:
                raise wrong
            return classify.failure(classify.CallCut(cut), sent=exchange.sent)
        if isinstance(wrong, LeaveDied):
            raise wrong
        was_connected = isinstance(wrong, aiohttp.ClientConnectionError) and not isinstance(
            wrong, classify.NEVER_CONNECTED
        )
        if was_connected and (repeatable or not exchange.sent):
            return None
        return classify.failure(wrong, sent=exchange.sent)

    async def _wait_for_slot(self, timeout_s: float) -> None:
        """Wait in line for a slot that another call hands over; it is ours when this returns."""
        place: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(place)
        try:
            async with asyncio.timeout(timeout_s):
                await place
            return
        except TimeoutError:
            self._leave_line(place)
        except asyncio.CancelledError:
            self._leave_line(place)
            raise
        raise PoolExhausted(
            f"no free connection within {timeout_s:g} s: all {self.limits.connections_max} are in use; "
            "raise http.connections_max or lower the calls in flight",
            retry_after_ms=1000,
        )

    def _leave_line(self, place: "asyncio.Future[None]") -> None:
        if place.done() and not place.cancelled():
            # The slot was handed over in the moment we stopped waiting for it.
            self._give_back_slot()
        elif place in self._waiting:
            self._waiting.remove(place)

    def _give_back_slot(self) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._in_use -= 1


def _headers(deployment: Deployment) -> dict[str, str]:
    headers = {
        "Accept": "application/json",
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
        "User-Agent": f"tidegate/{__version__}",
    }
    if deployment.engine is Engine.ANTHROPIC:
        headers["anthropic-version"] = "2023-06-01"
    if deployment.api_key is not None:
        if deployment.engine is Engine.ANTHROPIC:
            headers["x-api-key"] = deployment.api_key.reveal()
        else:
            headers["Authorization"] = f"Bearer {deployment.api_key.reveal()}"
    return headers
