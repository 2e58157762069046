"""One HTTP call over aiohttp, with our own slots, deadlines and size limits; failures are sorted.

- This module knows URLs, bytes and time, but no models, retries or health.
- The seam is `Transport`: a faster client can replace aiohttp without a change above.
- Only aiohttp's connections and its parser of answers are used. Its session, request and response
  objects cost several times as much as the call itself. Here the head of a request is bytes that
  were made once for each URL.
- No call has a timer: one sweep looks at all calls in flight.
- A call is sent under a `SendPermit`, which is checked once more right before the first byte.
- An answer is read whole, or as a `Stream` once its head is here: the body follows piece by piece,
  as fast as it is read. A slow reader slows the upstream down, because only a small buffer holds
  unread bytes. A stream that is closed before its end closes its connection, so that the upstream
  stops.
"""

import asyncio
import math
import ssl
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakValueDictionary

import aiohttp
import msgspec
from aiohttp.client_reqrep import ClientRequest
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict
from yarl import URL

from tidegate import __version__
from tidegate.core.answers.redaction import KeyRedactor, StreamRedactor
from tidegate.core.budgets.budget import Budget
from tidegate.core.deployments import AUDIO_PATH, Deployment, EngineKind, HttpLimits, Tls
from tidegate.core.errors import UpstreamError
from tidegate.core.ports import Clock
from tidegate.upstream.http import classify
from tidegate.upstream.http.connections import (
    AnswerBody,
    Connection,
    Connections,
    ConnectionSlots,
    Head,
    InFlightCall,
    TimeoutSweep,
    WholeBody,
    tls_context,
)

# A server may close a new connection before a byte is written; the next one may be closed too.
STALE_CONNECTIONS_MAX = 3

# The most early answers (1xx) before the answer. A server that sends them without end would keep
# the loop busy until the call's time is over.
HINTS_MAX = 1_024

# A deployment has a few URLs. Those that ask for a model by its name are made of what callers ask
# for, so the table must not grow without a limit.
TEMPLATES_MAX = 64

# Up to this size the head and the body are written as one piece; above it the copy would cost more
# than a second write.
ONE_WRITE_BYTES_MAX = 64 * 1024


class PermitExpired(Exception):
    """The permit ran out before the first byte was written.

    The call was not sent, and takes a new permit.
    """


class SendPermit(msgspec.Struct, eq=False):
    """The permit to send one call until a moment, and while the call is wanted.

    `begun` is true once the call was sent under it.
    """

    _clock: Clock
    budgets: tuple[Budget, ...]
    grant_id: str
    tokens: int
    dies_ms: float
    nano: int = 0
    _may_begin: Callable[[], bool] | None = None
    begun: bool = False

    def expire_by(self, moment_ms: float, may_begin: Callable[[], bool] | None) -> None:
        """Expire at this moment, if it is earlier, or when `may_begin` forbids the call."""
        self.dies_ms = min(self.dies_ms, moment_ms)
        self._may_begin = may_begin

    def begin_send(self) -> None:
        """Mark the permit as used right before the first byte.

        Raise PermitExpired if it has expired.
        """
        if self._clock.monotonic_ms() >= self.dies_ms or not (self._may_begin is None or self._may_begin()):
            raise PermitExpired
        self.begun = True


class Payload(Protocol):
    """The source of an answer's bytes."""

    async def readany(self) -> bytes:
        """Wait for the next bytes; empty at the end."""


class RedactedPayload:
    """The bytes of an answer without our key, also where the key spans two pieces."""

    __slots__ = ("_payload", "_redactor")

    def __init__(self, payload: Payload, key: KeyRedactor) -> None:
        self._payload = payload
        self._redactor = StreamRedactor(key)

    async def readany(self) -> bytes:
        while chunk := await self._payload.readany():
            if shown := self._redactor.feed(chunk):
                return shown
        return self._redactor.end_stream()


class Stream:
    """An answer while it comes, read and closed by the task that opened it.

    `end` is called once, and gets whether the answer came whole. `bytes_max` is the most bytes of
    an answer that are ever kept in memory at once.
    """

    __slots__ = ("_end", "_flight", "_over", "_payload", "bytes_max", "headers", "status")

    def __init__(
        self,
        status: int,
        headers: Mapping[str, str],
        payload: Payload,
        flight: InFlightCall,
        end: Callable[[bool], None],
        bytes_max: int,
    ) -> None:
        self.status = status
        self.headers = headers
        self._payload = payload
        self._flight = flight
        self._end = end
        self.bytes_max = bytes_max
        self._over = False

    async def read(self) -> bytes:
        """Return the next bytes as they came; empty at the end.

        Raise one UpstreamError if the answer breaks off.
        """
        if self._over:
            return b""
        failed: UpstreamError | None = None
        try:
            chunk = await self._payload.readany()
        except asyncio.CancelledError:
            # Either the sweep ended a late call, or the reader was cancelled: only then the
            # cancellation goes on.
            cut = self._flight.cut_reason()
            self.close()
            if cut is None:
                raise
            failed = classify.failure(classify.CallCut(cut), sent=True)
        except Exception as wrong:
            # Whatever a hostile answer makes the client raise is one failed call. It is not
            # chained, because its frames hold our key.
            self.close()
            failed = classify.failure(wrong, sent=True)
        if failed is not None:
            raise failed
        if chunk:
            self._flight.received(chunk)
        else:
            self._finish(whole=True)
        return chunk

    async def read_whole(self) -> bytes:
        """Return the rest of the answer; raise an error if it is too large."""
        chunks = []
        size = 0
        while chunk := await self.read():
            size += len(chunk)
            if size > self.bytes_max:
                self.close()
                raise classify.failure(classify.AnswerTooLarge(self.status, self.bytes_max), sent=True)
            chunks.append(chunk)
        return b"".join(chunks)

    def pause_timeout(self) -> None:
        """Stop the read time-out during a wait for the reader."""
        self._flight.pause_timeout(True)

    def resume_timeout(self) -> None:
        self._flight.pause_timeout(False)

    def was_cut(self) -> bool:
        """Return whether this stream's own time-out cancelled the task.

        Ask once, because this takes that cancellation back.
        """
        return self._flight.cut_reason() is not None

    def close(self) -> None:
        """Close the connection at once, without the rest."""
        self._finish(whole=False)

    def _finish(self, *, whole: bool) -> None:
        if not self._over:
            self._over = True
            self._end(whole)


class UpstreamRequest(msgspec.Struct, frozen=True, gc=False):
    """One request: a POST with a body, or a GET without.

    `headers` are more header lines, each with its line end. `attempt` is how many attempts with
    this key were counted before.
    """

    url: URL
    idempotency_key: str
    body: bytes | None
    headers: bytes = b""
    attempt: int = 0


class HttpReply(NamedTuple):
    """A whole reply. `body` is already decompressed."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Client(Protocol):
    """The client of one deployment."""

    async def post(self, request: UpstreamRequest, total_s: float, permit: SendPermit | None = None) -> HttpReply:
        """Send one request and read its whole answer, whatever its status.

        Raise one UpstreamError if there is none.

        With a permit, raise PermitExpired if it expired before the first byte.
        """

    async def get(self, url: URL, total_s: float) -> HttpReply:
        """Ask a question without cost; raise as `post` does."""


@runtime_checkable
class StreamingClient(Protocol):
    """A client whose answers can be read while they come."""

    async def open(
        self, request: UpstreamRequest, total_s: float, permit: SendPermit | None = None, *, interactive: bool = True
    ) -> Stream:
        """Send one request and return its answer as soon as its head is here, whatever its status.

        Raise as `post` does.
        """


@runtime_checkable
class QueuedClient(Protocol):
    """A client whose calls may still be under way after their sender is gone."""

    async def is_out(self, idempotency_key: str, attempt: int) -> bool:
        """Return whether this same call is under way there; False if that is not known."""


class Transport(Protocol):
    @property
    def pool_timeout_s(self) -> float:
        """Return how long a call waits for room before it fails with `upstream_pool_timeout`."""

    def client_for(self, deployment: Deployment) -> Client:
        """Return a client for this deployment, with its key, its certificates and its time-outs."""

    def free_slots(self) -> int:
        """Return how many more calls fit under the process's connection ceiling."""

    def recorded(self, items: Iterable[tuple[str, int]]) -> None:
        """Note that the answers of these items, by job and number, are in the store now."""

    async def close(self) -> None:
        """Abort calls in flight and close all connections."""


class RequestTemplate:
    """The parts that all calls to one URL share: the address, and each request's first bytes."""

    __slots__ = ("confirms_handshakes", "get_head", "key", "post_head", "request")

    def __init__(self, url: URL, headers: Mapping[str, str], tls: ssl.SSLContext | bool) -> None:
        # Whether the server shows that it accepted a TLS handshake; None until it has answered
        # once.
        self.confirms_handshakes: bool | None = None
        # The connector needs this request for its address. Our key is not in it, so no error can
        # show it.
        self.request = ClientRequest("GET", url, ssl=tls, loop=asyncio.get_running_loop())
        self.key = self.request.connection_key
        lines = [f" {url.raw_path_qs} HTTP/1.1", f"Host: {url.host_port_subcomponent}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if not all(line.isprintable() for line in lines):
            raise ValueError("a header or URL with control characters")
        head = "\r\n".join(lines).encode() + b"\r\n"
        self.get_head = b"GET" + head + b"\r\n"
        self.post_head = b"POST" + head + b"Idempotency-Key: "

    def chunks(self, request: UpstreamRequest) -> tuple[bytes, ...]:
        """Return the whole request, ready to be written."""
        body, headers = request.body, request.headers
        if body is None:
            return (self.get_head,)
        key = request.idempotency_key.encode()
        size = len(body)
        if size <= ONE_WRITE_BYTES_MAX:
            return (b"%b%b\r\n%bContent-Length: %d\r\n\r\n%b" % (self.post_head, key, headers, size, body),)
        return (b"%b%b\r\n%bContent-Length: %d\r\n\r\n" % (self.post_head, key, headers, size), body)


class AiohttpClient:
    __slots__ = ("_headers", "_may_be_quiet", "_read_timeout_s", "_tls", "_transport", "_ways", "key")

    def __init__(self, transport: "AiohttpTransport", deployment: Deployment, read_timeout_s: float) -> None:
        self._read_timeout_s = read_timeout_s
        self._may_be_quiet = deployment.read_timeout_s is None
        self._transport = transport
        self._headers = _headers(deployment)
        key = KeyRedactor("" if deployment.api_key is None else deployment.api_key.reveal())
        # None where there is no key that an answer could quote.
        self.key = key if key else None
        self._tls = transport.tls(deployment.tls)
        self._ways: dict[URL, RequestTemplate] = {}

    def post(
        self, request: UpstreamRequest, total_s: float, permit: SendPermit | None = None
    ) -> Coroutine[Any, Any, HttpReply]:
        return self._transport.call(self, request, total_s, permit)

    def get(self, url: URL, total_s: float) -> Coroutine[Any, Any, HttpReply]:
        return self._transport.call(self, UpstreamRequest(url, "", None), total_s, None)

    def open(
        self, request: UpstreamRequest, total_s: float, permit: SendPermit | None = None, *, interactive: bool = True
    ) -> Coroutine[Any, Any, Stream]:
        return self._transport.open(self, request, total_s, permit, interactive=interactive)

    def read_timeout_s(self, url: URL) -> float:
        """Return how long the server may be silent.

        A call about audio may be silent for all its time, unless the deployment sets a limit.
        """
        return math.inf if self._may_be_quiet and AUDIO_PATH in url.raw_path else self._read_timeout_s

    def template(self, url: URL) -> RequestTemplate:
        template = self._ways.get(url)
        if template is None:
            headers = self._headers
            if AUDIO_PATH in url.raw_path:
                # A form brings its own Content-Type, with the boundary of its parts.
                headers = {name: value for name, value in headers.items() if name != "Content-Type"}
            if len(self._ways) >= TEMPLATES_MAX:
                self._ways.clear()
            template = self._ways[url] = RequestTemplate(url, headers, self._tls)
        return template


class AiohttpTransport:
    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.pool_timeout_s = limits.pool_timeout_s
        self.connections = Connections(limits)
        self._loop = asyncio.get_running_loop()
        self._sweep = TimeoutSweep(self._loop, limits)
        self._slots = ConnectionSlots(limits)
        self.free_slots = self._slots.free
        # Connections are shared only if the host and the TLS object are the same, so equal settings
        # must give the same object.
        self._contexts: WeakValueDictionary[Tls, ssl.SSLContext] = WeakValueDictionary()

    def tls(self, tls: Tls) -> ssl.SSLContext | bool:
        context = self._contexts.get(tls)
        if context is not None:
            return context
        made = tls_context(tls)
        if isinstance(made, ssl.SSLContext):
            self._contexts[tls] = made
        return made

    def client_for(self, deployment: Deployment) -> AiohttpClient:
        return AiohttpClient(self, deployment, deployment.read_timeout_s or self.limits.read_timeout_s)

    def connections_in_use(self) -> int:
        return self._slots.in_use

    def recorded(self, items: Iterable[tuple[str, int]]) -> None:
        """Do nothing: an HTTP server keeps no answers."""

    async def close(self) -> None:
        self.connections.abort_in_use()
        await self.connections.close()
        self._sweep.stop()

    async def call(
        self,
        client: AiohttpClient,
        request: UpstreamRequest,
        total_s: float,
        permit: SendPermit | None,
    ) -> HttpReply:
        """Send one request and read its whole answer.

        A cancelled call closes its connection, so that the upstream sees it.
        """
        url = request.url
        if not self._slots.take_slot(interactive=False):
            await self._slots.wait(min(self.pool_timeout_s, total_s), interactive=False)
        flight = self._sweep.watch_call(total_s, client.read_timeout_s(url))
        failed: UpstreamError | None = None
        try:
            for _ in range(STALE_CONNECTIONS_MAX):
                connection, whole = None, False
                try:
                    template = client.template(url)
                    connection = self._idle(template, request.idempotency_key)
                    if connection is None:
                        connection = await self.connections.open(template.request)
                    message, payload = await self._ask(template, connection, request, flight, permit)
                    if isinstance(payload, WholeBody) or payload.is_eof():
                        answer = payload.read_nowait()
                        if len(answer) > self.limits.response_bytes_max:
                            raise classify.AnswerTooLarge(message.code, self.limits.response_bytes_max)
                    else:
                        answer = await self._read_body(payload, flight)
                    whole = True
                    key = client.key
                    if key is None:
                        return HttpReply(message.code, message.headers, answer)
                    return HttpReply(message.code, _shown(message, key), key.whole(answer))
                except (Exception, asyncio.CancelledError) as wrong:
                    # A connection that took longer than its permit is kept for the next permit.
                    whole = isinstance(wrong, PermitExpired)
                    # Whatever a hostile answer makes the client raise is one failed call. The
                    # exception is neither chained nor kept, because its frames hold the request's
                    # head, and with it our key.
                    failed = self._sort(wrong, flight, repeatable=request.body is None)
                finally:
                    if connection is not None:
                        self.connections.keep_or_close(template.key, connection, whole=whole)
                if failed is not None:
                    break
        finally:
            self._sweep.forget_call(flight)
            self._slots.release_slot(interactive=False)
        raise failed or classify.failure(aiohttp.ServerDisconnectedError(), sent=False)

    async def open(
        self,
        client: AiohttpClient,
        request: UpstreamRequest,
        total_s: float,
        permit: SendPermit | None,
        *,
        interactive: bool,
    ) -> Stream:
        """Send one request, and return its answer as soon as its head is here."""
        if not self._slots.take_slot(interactive=interactive):
            await self._slots.wait(min(self.pool_timeout_s, total_s), interactive=interactive)
        flight = self._sweep.watch_call(total_s, client.read_timeout_s(request.url), is_streamed=True)

        def end() -> None:
            self._sweep.forget_call(flight)
            self._slots.release_slot(interactive=interactive)

        failed: UpstreamError | None = None
        try:
            for _ in range(STALE_CONNECTIONS_MAX):
                try:
                    return await self._open(client, request, flight, permit, end)
                except (Exception, asyncio.CancelledError) as wrong:
                    failed = self._sort(wrong, flight, repeatable=False)
                if failed is not None:
                    break
        except BaseException:
            end()
            raise
        end()
        raise failed or classify.failure(aiohttp.ServerDisconnectedError(), sent=False)

    async def _open(
        self,
        client: AiohttpClient,
        request: UpstreamRequest,
        flight: InFlightCall,
        permit: SendPermit | None,
        end: Callable[[], None],
    ) -> Stream:
        template = client.template(request.url)
        connection = self._idle(template, request.idempotency_key)
        if connection is None:
            connection = await self.connections.open(template.request)
        try:
            message, payload = await self._ask(template, connection, request, flight, permit)
        except BaseException as wrong:
            self.connections.keep_or_close(template.key, connection, whole=isinstance(wrong, PermitExpired))
            raise

        def finish(whole: bool) -> None:
            self.connections.keep_or_close(template.key, connection, whole=whole)
            end()

        key, bytes_max = client.key, self.limits.response_bytes_max
        if key is None:
            return Stream(message.code, message.headers, payload, flight, finish, bytes_max)
        return Stream(message.code, _shown(message, key), RedactedPayload(payload, key), flight, finish, bytes_max)

    def _idle(self, template: RequestTemplate, idempotency_key: str) -> Connection | None:
        """Return an idle connection for a request with this key."""
        if not idempotency_key.isprintable():
            raise ValueError("an idempotency key with control characters")
        return self.connections.take_idle(template.key)

    async def _ask(
        self,
        template: RequestTemplate,
        connection: Connection,
        request: UpstreamRequest,
        flight: InFlightCall,
        permit: SendPermit | None,
    ) -> tuple[Head, AnswerBody]:
        """Write the request, and wait for the head of its answer."""
        connection.expect_answer(self.limits)
        assert connection.transport is not None
        write, chunks = connection.transport.write, template.chunks(request)
        if permit is not None:
            # The last look at the clock: only the write comes between it and the kernel.
            permit.begin_send()
        flight.writing(connection)
        for chunk in chunks:
            write(chunk)
        try:
            message, payload = await connection.answer()
        except (aiohttp.ClientError, OSError):
            if template.confirms_handshakes is not False and connection.is_unconfirmed():
                raise classify.HandshakeRejected from None
            raise
        if template.confirms_handshakes is None:
            template.confirms_handshakes = not connection.is_unconfirmed()
        hints = 0
        while 100 <= message.code <= 199 and message.code != 101:
            hints += 1
            if hints > HINTS_MAX:
                raise HttpProcessingError(message="more early hints than any server needs")
            message, payload = await connection.answer()
        flight.answered(message.code)
        return message, payload

    async def _read_body(self, payload: aiohttp.StreamReader, flight: InFlightCall) -> bytes:
        bytes_max = self.limits.response_bytes_max
        chunks = []
        size = 0
        while not payload.at_eof():
            chunk = await payload.readany()
            size += len(chunk)
            if size > bytes_max:
                raise classify.AnswerTooLarge(flight.status, bytes_max)
            chunks.append(chunk)
            flight.received(chunk)
        return b"".join(chunks)

    def _sort(self, wrong: BaseException, flight: InFlightCall, *, repeatable: bool) -> UpstreamError | None:
        """Return the error to raise.

        Return None if the call may be made again: no byte was written, or the call costs nothing.
        """
        if isinstance(wrong, asyncio.CancelledError):
            cut = flight.cut_reason()
            if cut is None:
                raise wrong
            return classify.failure(classify.CallCut(cut), sent=flight.sent)
        if isinstance(wrong, PermitExpired):
            raise wrong
        was_connected = isinstance(wrong, aiohttp.ClientConnectionError) and not isinstance(
            wrong, classify.NEVER_CONNECTED
        )
        if was_connected and (repeatable or not flight.sent):
            return None
        return classify.failure(wrong, sent=flight.sent)


def _shown(message: Head, key: KeyRedactor) -> Mapping[str, str]:
    """Return an answer's headers without our key: a redirect, which is shown, may quote it."""
    where = message.headers.get("Location") if 300 <= message.code <= 399 else None
    if where is None:
        return message.headers
    headers = CIMultiDict(message.headers)
    headers["Location"] = key.whole(where.encode("utf-8", "replace")).decode("utf-8", "replace")
    return headers


def _headers(deployment: Deployment) -> dict[str, str]:
    headers = {
        "Accept": "application/json",
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
        "User-Agent": f"tidegate/{__version__}",
    }
    if deployment.engine is EngineKind.ANTHROPIC:
        headers["anthropic-version"] = "2023-06-01"
    if deployment.api_key is not None:
        if deployment.engine is EngineKind.ANTHROPIC:
            headers["x-api-key"] = deployment.api_key.reveal()
        else:
            headers["Authorization"] = f"Bearer {deployment.api_key.reveal()}"
    return headers
