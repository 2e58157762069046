"""One HTTP call over aiohttp: slots, deadlines and size limits of our own on top, and every failure sorted.

It knows URLs, bytes and time, but no models, retries or health. The seam is `Transport`: a faster client can take
aiohttp's place without anything above noticing. Two things keep a call cheap. The headers of a deployment are built once,
in a session of its own over the shared connections. And no call has a timer: one sweep looks at all calls in flight.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from multidict import CIMultiDict, istr
from yarl import URL

from tidegate import __version__
from tidegate.core.deployments import Deployment, Engine, HttpLimits
from tidegate.core.errors import PoolExhausted, UpstreamError
from tidegate.upstream import classify
from tidegate.upstream.connections import Connections, has_spoken, tls_context
from tidegate.upstream.exchange import Exchange, Sweep

IDEMPOTENCY_KEY = istr("Idempotency-Key")

# A connection that was closed while it lay idle is found out before a byte is written; the next idle one may be closed too.
STALE_CONNECTIONS_MAX = 3

READ_BUFFER_BYTES = 64 * 1024


class Reply(NamedTuple):
    """What came back, whole. `body` is already decompressed."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Line(Protocol):
    """The way to one deployment."""

    async def post(self, url: URL, idempotency_key: str, body: bytes, total_s: float) -> Reply:
        """Send one request and read its whole answer, whatever its status; raises one UpstreamError."""

    async def get(self, url: URL, total_s: float) -> Reply:
        """The same for a question that costs nothing."""


class Transport(Protocol):
    def line(self, deployment: Deployment) -> Line:
        """The way to this deployment: with its key, its certificates and its time-outs."""

    def free_slots(self) -> int:
        """How many more calls fit under the process's connection ceiling."""

    async def close(self) -> None:
        """End what is in flight and close every connection."""


class RequestBody(Payload):
    """A request's bytes, which notes when the first and the last of them were handed to a living connection."""

    _default_content_type = "application/json"
    _autoclose = True
    _shared_headers = CIMultiDict({"Content-Type": "application/json"})

    def __init__(self, value: bytes, exchange: Exchange) -> None:
        # The base class would build headers anew for each call.
        self._value = value
        self._size = len(value)
        self._encoding = None
        self._filename = None
        self._headers = self._shared_headers
        self._exchange = exchange

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return str(self._value, encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        exchange = self._exchange
        transport: asyncio.WriteTransport | None = getattr(writer, "transport", None)
        if transport is None or transport.is_closing() or has_spoken(transport):
            # aiohttp holds the headers back until the body comes, so nothing at all has been written yet.
            raise aiohttp.ClientConnectionResetError("the idle connection was already closed")
        exchange.writing(transport)
        await writer.write(self._value)
        exchange.wrote()

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        await self.write(writer)


@dataclass(slots=True)
class AiohttpLine:
    transport: "AiohttpTransport"
    session: aiohttp.ClientSession
    tls: Any
    read_timeout_s: float

    async def post(self, url: URL, idempotency_key: str, body: bytes, total_s: float) -> Reply:
        headers = CIMultiDict({IDEMPOTENCY_KEY: idempotency_key})
        return await self.transport.call(self, "POST", url, headers, body, total_s)

    async def get(self, url: URL, total_s: float) -> Reply:
        return await self.transport.call(self, "GET", url, None, None, total_s)


class AiohttpTransport:
    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.connections = Connections(limits)
        self._loop = asyncio.get_running_loop()
        self._sweep = Sweep(self._loop, limits)
        self._in_use = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._sessions: list[aiohttp.ClientSession] = []

    def line(self, deployment: Deployment) -> AiohttpLine:
        limits = self.limits
        session = aiohttp.ClientSession(
            connector=self.connections,
            connector_owner=False,
            headers=_headers(deployment),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            timeout=aiohttp.ClientTimeout(total=None, connect=limits.connect_timeout_s),
            read_bufsize=READ_BUFFER_BYTES,
            max_line_size=limits.header_bytes_max,
            max_field_size=limits.header_bytes_max,
            max_headers=limits.header_count_max,
        )
        self._sessions.append(session)
        read_timeout_s = deployment.read_timeout_s or limits.read_timeout_s
        return AiohttpLine(self, session, tls_context(deployment.tls), read_timeout_s)

    def free_slots(self) -> int:
        return self.limits.connections_max - self._in_use

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()
        await self.connections.close()
        self._sweep.stop()

    async def call(
        self, line: AiohttpLine, method: str, url: URL, headers: Any, body: bytes | None, total_s: float
    ) -> Reply:
        """One request and its whole answer. A cancelled call closes its connection, so that the upstream sees it."""
        if self._in_use < self.limits.connections_max:
            self._in_use += 1
        else:
            await self._wait_for_slot(min(self.limits.pool_timeout_s, total_s))
        exchange = self._sweep.begin(total_s, line.read_timeout_s)
        try:
            for _ in range(STALE_CONNECTIONS_MAX):
                try:
                    return await self._exchange(line, method, url, headers, body, exchange)
                except (Exception, asyncio.CancelledError) as wrong:
                    # Whatever a hostile answer makes the client raise, it is one failed call. What was caught is not
                    # chained or kept: it knows the headers, and with them our key.
                    exchange.abort()
                    failed = self._sort(wrong, exchange)
                if failed is not None:
                    break
        finally:
            self._sweep.end(exchange)
            self._give_back_slot()
        raise failed or classify.failure(aiohttp.ServerDisconnectedError(), sent=False)

    async def _exchange(
        self, line: AiohttpLine, method: str, url: URL, headers: Any, body: bytes | None, exchange: Exchange
    ) -> Reply:
        response = await line.session.request(
            method,
            url,
            data=None if body is None else RequestBody(body, exchange),
            headers=headers,
            allow_redirects=False,
            ssl=line.tls,
        )
        if not exchange.sent and body is not None:
            # An answer to a request that was never written belongs to an earlier one on this connection.
            response.close()
            raise aiohttp.ClientConnectionResetError("the connection held an answer to something else")
        exchange.heard(response)
        content = response.content
        chunk = await content.readany()
        if not content.at_eof():
            chunk = await self._read_rest(chunk, content, exchange)
        elif len(chunk) > self.limits.response_bytes_max:
            raise classify.AnswerTooLarge(response.status, self.limits.response_bytes_max)
        return Reply(response.status, response.headers, chunk)

    async def _read_rest(self, chunk: bytes, content: aiohttp.StreamReader, exchange: Exchange) -> bytes:
        bytes_max = self.limits.response_bytes_max
        chunks = []
        size = 0
        while True:
            size += len(chunk)
            if size > bytes_max:
                raise classify.AnswerTooLarge(exchange.status, bytes_max)
            chunks.append(chunk)
            exchange.received(chunk)
            if content.at_eof():
                return b"".join(chunks)
            chunk = await content.readany()

    def _sort(self, wrong: BaseException, exchange: Exchange) -> UpstreamError | None:
        """The error to raise, or None when nothing was written and the call may simply be made again."""
        if isinstance(wrong, asyncio.CancelledError):
            cut = exchange.cut_reason()
            if cut is None:
                raise wrong
            return classify.failure(classify.CallCut(cut), sent=exchange.sent)
        was_connected = isinstance(wrong, aiohttp.ClientConnectionError) and not isinstance(
            wrong, classify.NEVER_CONNECTED
        )
        if was_connected and not exchange.sent:
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


def _headers(deployment: Deployment) -> CIMultiDict[str]:
    headers = CIMultiDict(
        {
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
            "User-Agent": f"tidegate/{__version__}",
        }
    )
    if deployment.engine is Engine.ANTHROPIC:
        headers["anthropic-version"] = "2023-06-01"
    if deployment.api_key is not None:
        if deployment.engine is Engine.ANTHROPIC:
            headers["x-api-key"] = deployment.api_key.reveal()
        else:
            headers["Authorization"] = f"Bearer {deployment.api_key.reveal()}"
    return headers
