"""What our own writing of requests and handling of connections could break: reuse, back-pressure, early answers, injection.

aiohttp's own client is the oracle for what a well-formed answer is and whether its connection may be used again.
"""

import asyncio
import contextlib
import gzip
import hashlib
import ssl
import time

import aiohttp
import pytest
from yarl import URL

from tests.support.certificates import self_signed, shown_by_server
from tests.upstream.raw_server import CHAT, Peer, RawServer, Request, Script, eventually
from tests.upstream.world import deployment, line_to, secret
from tidegate.core.deployments import HttpLimits, Secret, Tls
from tidegate.core.errors import Ambiguous, Unavailable
from tidegate.upstream.http import connections
from tidegate.upstream.http.transport import AiohttpTransport, UpstreamRequest

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"], scope="module")
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Both loops: their transports differ exactly where this layer looks closely."""
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture(scope="module")
def server_tls(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    return shown_by_server(*self_signed(tmp_path_factory.mktemp("tls")))


def _sized(body: bytes, *headers: bytes, version: bytes = b"1.1", status: bytes = b"200 OK") -> bytes:
    lines = [b"HTTP/%b %b" % (version, status), b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

# What the server sends, and whether it closes after it.
ANSWERS: dict[str, tuple[bytes, bool]] = {
    "plain": (_sized(CHAT), False),
    "empty": (_sized(b""), False),
    "connection close": (_sized(CHAT, b"Connection: close"), True),
    "connection close, but the server stays": (_sized(CHAT, b"Connection: close"), False),
    "1.0": (_sized(CHAT, version=b"1.0"), True),
    "1.0, but the server stays": (_sized(CHAT, version=b"1.0"), False),
    "1.0 kept alive": (_sized(CHAT, b"Connection: keep-alive", version=b"1.0"), False),
    "1.0 until the end": (b"HTTP/1.0 200 OK\r\n\r\n" + CHAT, True),
    "1.1 until the end": (b"HTTP/1.1 200 OK\r\n\r\n" + CHAT, True),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", False),
    "204 with a length": (b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n", False),
    "304 with a length": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 500\r\n\r\n", False),
    "chunked": (CHUNKED + b"3\r\n{}\n\r\n0\r\n\r\n", False),
    "chunked, an extension and trailers": (CHUNKED + b"2;a=b\r\n{}\r\n0\r\nX-Sum: 1\r\nX-More: 2\r\n\r\n", False),
    "chunked and closed": (b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + CHUNKED[17:] + b"2\r\n{}\r\n0\r\n\r\n", True),
    "chunked, no bytes": (CHUNKED + b"0\r\n\r\n", False),
    "gzip": (_sized(gzip.compress(CHAT), b"Content-Encoding: gzip"), False),
    "an interim answer first": (b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + _sized(CHAT), False),
    "only line feeds": (b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}", False),
    "an error": (_sized(b"no", status=b"500 Oh"), False),
    "a large one": (_sized(b"x" * 500_000), False),
}


def _answering(answer: bytes, then_close: bool, piece_bytes: int) -> Script:
    async def script(request: Request, peer: Peer) -> None:
        for start in range(0, len(answer), piece_bytes):
            await peer.send(answer[start : start + piece_bytes])
            if piece_bytes < len(answer):
                await asyncio.sleep(0)
        if then_close:
            peer.close()

    return script


async def _ask_aiohttp(server: RawServer) -> list[tuple[int, bytes]]:
    async with aiohttp.ClientSession() as session:
        found = []
        for _ in range(3):
            async with session.post(f"{server.url}/x", data=b"{}") as answer:
                found.append((answer.status, await answer.read()))
        return found


async def _ask_us(server: RawServer) -> list[tuple[int, bytes]]:
    async with line_to(server) as (transport, line, url):
        found = [
            (reply.status, reply.body)
            for reply in [await line.post(UpstreamRequest(url, "k", b"{}"), 10) for _ in range(3)]
        ]
        assert transport.free_slots() == HttpLimits().connections_max
        assert transport.connections.open_count() == transport.connections.idle_count()
        return found


@pytest.mark.parametrize("piece_bytes", [1 << 20, 7], ids=["at once", "in pieces"])
@pytest.mark.parametrize("name", ANSWERS)
async def test_answers_are_read_and_connections_kept_as_aiohttp_does(name: str, piece_bytes: int) -> None:
    answer, then_close = ANSWERS[name]
    if len(answer) > 10_000:
        piece_bytes *= 5_000
    script = _answering(answer, then_close, piece_bytes)
    async with RawServer(script) as theirs, RawServer(script) as ours:
        assert await _ask_us(ours) == await _ask_aiohttp(theirs)
        assert ours.connection_count == theirs.connection_count
        assert len(ours.requests) == 3


async def test_one_connection_serves_every_endpoint_method_and_deployment_at_a_host() -> None:
    async with RawServer() as server, line_to(server, api_key=secret()) as (transport, line, url):
        other = transport.client_for(deployment(server.url, name="two", api_key=Secret("sk-other")))
        await line.post(UpstreamRequest(url, "a", b'{"x":1}'), 10)
        await line.get(URL(f"{server.url}/models"), 10)
        await other.post(UpstreamRequest(URL(f"{server.url}/embeddings"), "b", b""), 10)
        await line.post(UpstreamRequest(url, "c", b'{"y":22}'), 10)
    assert server.connection_count == 1
    assert [request.line for request in server.requests] == [
        "POST /v1/chat/completions HTTP/1.1",
        "GET /v1/models HTTP/1.1",
        "POST /v1/embeddings HTTP/1.1",
        "POST /v1/chat/completions HTTP/1.1",
    ]
    assert [request.body for request in server.requests] == [b'{"x":1}', b"", b"", b'{"y":22}']
    keys = [request.headers["Authorization"].removeprefix("Bearer ") for request in server.requests]
    assert keys == ["sk-canary-77aa", "sk-canary-77aa", "sk-other", "sk-canary-77aa"]
    assert [request.headers.get("Idempotency-Key") for request in server.requests] == ["a", None, "b", "c"]
    assert "Content-Length" not in server.requests[1].headers
    assert server.requests[2].headers["Content-Length"] == "0"


@pytest.mark.parametrize("key", ["a\r\nX-Admin: 1", "a\nb", "a\r", "a\0b", "\x7f", "\ud800"])
async def test_a_key_that_would_be_more_than_a_value_is_never_sent(key: str) -> None:
    async with RawServer() as server, line_to(server) as (transport, line, url):
        with pytest.raises(Unavailable):
            await line.post(UpstreamRequest(url, key, b"{}"), 10)
        assert transport.free_slots() == HttpLimits().connections_max
        assert (await line.post(UpstreamRequest(url, "fine", b"{}"), 10)).status == 200
    assert [request.headers["Idempotency-Key"] for request in server.requests] == ["fine"]


async def test_a_path_cannot_end_its_line() -> None:
    async with RawServer() as server, line_to(server) as (_, line, _url):
        await line.post(UpstreamRequest(URL(f"{server.url}/x y\r\nX-Admin: 1"), "k", b"{}"), 10)
    assert server.requests[0].path.startswith("/v1/x%20y")
    assert "X-Admin" not in server.requests[0].headers


async def test_ipv6() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        await reader.readexactly(2)
        await Peer(reader, writer).answer()
        writer.close()

    heads: list[bytes] = []
    server = await asyncio.start_server(serve, "::1", 0)
    port = server.sockets[0].getsockname()[1]
    transport = AiohttpTransport(HttpLimits())
    place = deployment(f"http://[::1]:{port}/v1")
    assert (
        await transport.client_for(place).post(UpstreamRequest(URL(place.url_of("/v1/x")), "k", b"{}"), 10)
    ).body == CHAT
    assert b"\r\nHost: [::1]:%d\r\n" % port in heads[0]
    await transport.close()
    server.close()


async def test_an_upgrade_is_no_answer_and_its_connection_is_not_kept() -> None:
    async def script(request: Request, peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")
        await peer.until_gone()

    async with RawServer(script) as server, line_to(server) as (transport, line, url):
        assert (await line.post(UpstreamRequest(url, "k", b"{}"), 10)).status == 101
        await eventually(lambda: server.open_count == 0, "the connection to be closed")
        assert transport.connections.open_count() == 0


@pytest.mark.parametrize("behind", [b"garbage\r\n\r\n", b"\0" * 200, b"HTTP/1.1 200 OK\r\nContent-Le", CHAT])
@pytest.mark.parametrize("late", [False, True])
async def test_garbage_behind_an_answer_harms_at_most_that_answer(behind: bytes, late: bool) -> None:
    garbage_sent = asyncio.Event()

    async def script(request: Request, peer: Peer) -> None:
        mine = _sized(request.headers["Idempotency-Key"].encode())
        if request.headers["Idempotency-Key"] != "a":
            await peer.send(mine)
        elif late:
            await peer.send(mine)
            await asyncio.sleep(0.01)
            await peer.send(behind)
        else:
            await peer.send(mine + behind)
        garbage_sent.set()

    async with RawServer(script) as server, line_to(server) as (transport, line, url):
        try:
            assert (await line.post(UpstreamRequest(url, "a", b"{}"), 10)).body == b"a"
        except Ambiguous:
            assert not late
        await garbage_sent.wait()
        assert (await line.post(UpstreamRequest(url, "b", b"{}"), 10)).body == b"b"
        assert (await line.post(UpstreamRequest(url, "c", b"{}"), 10)).body == b"c"
        if late:
            # Even half a line out of turn is reason enough to take another connection.
            assert [request.connection for request in server.requests] == [1, 2, 2]
        assert transport.free_slots() == HttpLimits().connections_max


async def test_a_connection_on_which_the_server_speaks_first_is_not_used() -> None:
    async def greets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_sized(b"greeting"))
        await Peer(reader, writer).until_gone()
        writer.close()

    server = await asyncio.start_server(greets, "127.0.0.1", 0)
    transport = AiohttpTransport(HttpLimits())
    place = deployment(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    template = transport.client_for(place).template(URL(place.url_of("/v1/x")))
    # A greeting that is on its way still cannot be distinguished from an answer. One that has arrived can.
    try:
        connection = await transport.connections.open(template.request)
    except aiohttp.ClientConnectionResetError:
        pass
    else:
        await eventually(connection.has_spoken, "the greeting to arrive")
        transport.connections.keep_or_close(template.key, connection, whole=True)
    assert transport.connections.take_idle(template.key) is None
    assert transport.connections.open_count() == 0
    await transport.close()
    server.close()


class Sluggish:
    """A server that reads the head of one request, and its body only when the test asks."""

    def __init__(self, tls: ssl.SSLContext | None, first_says: bytes = b"") -> None:
        self.head_read = asyncio.Event()
        self.read_on = asyncio.Event()
        self.ended = ""
        self._first_says = first_says
        self._tls = tls

    async def __aenter__(self) -> "Sluggish":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        port = self._server.sockets[0].getsockname()[1]
        self.url = URL(f"{'https' if self._tls else 'http'}://127.0.0.1:{port}/x")
        self.place = deployment(str(self.url), tls=Tls(verify=False))
        return self

    async def __aexit__(self, *wrong: object) -> None:
        self.read_on.set()
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        left = int(head.split("Content-Length: ")[1].split("\r\n")[0])
        self.head_read.set()
        if self._first_says:
            await peer.send(self._first_says)
        await self.read_on.wait()
        digest = hashlib.sha256()
        with contextlib.suppress(ConnectionError):
            while left and (piece := await reader.read(65_536)):
                digest.update(piece)
                left -= len(piece)
        if left == 0:
            await peer.answer(body=digest.hexdigest().encode())
            await peer.until_gone()
        self.ended = "cut" if left else "whole"
        writer.close()

    async def is_cut(self) -> None:
        self.read_on.set()
        await eventually(lambda: self.ended, "the server to see the end")
        assert self.ended == "cut"


# More than the buffers of both kernels hold together.
LARGE = bytes(range(256)) * (128 * 1024)


class TestLargeRequests:
    @pytest.fixture(params=[False, True], ids=["plain", "TLS"])
    def tls(self, request: pytest.FixtureRequest, server_tls: ssl.SSLContext) -> ssl.SSLContext | None:
        return server_tls if request.param else None

    async def test_one_that_is_taken_slowly_arrives_whole(self, tls: ssl.SSLContext | None) -> None:
        transport = AiohttpTransport(HttpLimits())
        async with Sluggish(tls) as server:
            call = asyncio.create_task(
                transport.client_for(server.place).post(UpstreamRequest(server.url, "k", LARGE), 60)
            )
            await server.head_read.wait()
            server.read_on.set()
            assert (await call).body == hashlib.sha256(LARGE).hexdigest().encode()
            assert transport.connections.idle_count() == 1
            await transport.close()

    async def test_one_that_is_not_taken_is_cut_and_its_connection_dropped(self, tls: ssl.SSLContext | None) -> None:
        # The TLS layer takes whatever is written, so there it is the silence that is noticed.
        reason = "did not take the request" if tls is None else "silent"
        limits = HttpLimits(write_timeout_s=0.2, read_timeout_s=60 if tls is None else 0.2)
        transport = AiohttpTransport(limits)
        async with Sluggish(tls) as server:
            with pytest.raises(Ambiguous, match=reason):
                await transport.client_for(server.place).post(UpstreamRequest(server.url, "k", LARGE), 60)
            assert transport.connections.open_count() == 0
            assert transport.free_slots() == limits.connections_max
            await server.is_cut()
        await transport.close()

    async def test_one_that_is_answered_early_gives_the_answer_and_drops_the_connection(self) -> None:
        transport = AiohttpTransport(HttpLimits())
        async with Sluggish(None, _sized(b"too much", status=b"413 Too Large")) as server:
            reply = await transport.client_for(server.place).post(UpstreamRequest(server.url, "k", LARGE), 60)
            assert (reply.status, reply.body) == (413, b"too much")
            # The server reads nothing more, so only an abort ends it.
            assert transport.connections.open_count() == 0
            await server.is_cut()
        await transport.close()

    async def test_one_that_is_not_taken_does_not_hold_up_close(self, tls: ssl.SSLContext | None) -> None:
        transport = AiohttpTransport(HttpLimits())
        async with Sluggish(tls) as server:
            call = asyncio.create_task(
                transport.client_for(server.place).post(UpstreamRequest(server.url, "k", LARGE), 60)
            )
            await server.head_read.wait()
            await asyncio.wait_for(transport.close(), 10)
            with pytest.raises(Ambiguous):
                await call
            await server.is_cut()

    async def test_one_that_is_cancelled_is_dropped(self, tls: ssl.SSLContext | None) -> None:
        transport = AiohttpTransport(HttpLimits())
        async with Sluggish(tls) as server:
            call = asyncio.create_task(
                transport.client_for(server.place).post(UpstreamRequest(server.url, "k", LARGE), 60)
            )
            await server.head_read.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert transport.connections.open_count() == 0
            await server.is_cut()
        await transport.close()


async def test_tls_connections_are_reused_and_a_closed_one_is_replaced(server_tls: ssl.SSLContext) -> None:
    async def script(request: Request, peer: Peer) -> None:
        await peer.answer()
        if len(server.requests) == 3:
            peer.close()

    async with RawServer(script, tls=server_tls) as server, line_to(server, tls=Tls(verify=False)) as (_, line, url):
        for number in range(3):
            assert (await line.post(UpstreamRequest(url, f"k{number}", b"{}"), 10)).status == 200
        await eventually(lambda: server.open_count == 0, "the server to have closed")
        assert (await line.post(UpstreamRequest(url, "k3", b"{}"), 10)).status == 200
    assert [request.connection for request in server.requests] == [1, 1, 1, 2]
    assert [request.headers["Idempotency-Key"] for request in server.requests] == ["k0", "k1", "k2", "k3"]


async def test_an_idle_connection_is_used_no_longer_than_it_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    async with RawServer() as server, line_to(server, HttpLimits(kept_alive_s=60)) as (_, line, url):
        await line.post(UpstreamRequest(url, "a", b"{}"), 10)
        now = time.monotonic()
        monkeypatch.setattr(connections, "monotonic", lambda: now + 59)
        await line.post(UpstreamRequest(url, "b", b"{}"), 10)
        # It became idle again 59 seconds later.
        monkeypatch.setattr(connections, "monotonic", lambda: now + 59 + 61)
        await line.post(UpstreamRequest(url, "c", b"{}"), 10)
    assert [request.connection for request in server.requests] == [1, 1, 2]


async def test_many_idle_connections_that_the_server_closed_cost_one_call_nothing() -> None:
    release = asyncio.Event()

    async def script(request: Request, peer: Peer) -> None:
        await release.wait()
        await peer.answer()
        if request.headers["Idempotency-Key"] != "last":
            peer.close()

    async with RawServer(script) as server, line_to(server) as (_, line, url):
        calls = [asyncio.create_task(line.post(UpstreamRequest(url, f"k{n}", b"{}"), 10)) for n in range(10)]
        await eventually(lambda: len(server.requests) == 10, "ten calls to arrive")
        release.set()
        await asyncio.gather(*calls)
        await eventually(lambda: server.open_count == 0, "the server to have closed them all")
        assert (await line.post(UpstreamRequest(url, "last", b"{}"), 10)).status == 200
    assert len(server.requests) == 11


async def test_a_question_that_costs_nothing_is_asked_again_when_its_connection_breaks() -> None:
    async def script(request: Request, peer: Peer) -> None:
        if len(server.requests) == 1:
            peer.close()
        else:
            await peer.answer()

    async with RawServer(script) as server, line_to(server) as (_, line, url):
        assert (await line.get(url, 10)).status == 200
    assert [request.line.split()[0] for request in server.requests] == ["GET", "GET"]


async def test_close_ends_calls_in_flight_and_nothing_is_opened_after_it() -> None:
    async def script(request: Request, peer: Peer) -> None:
        await peer.until_gone()

    async with RawServer(script) as server, line_to(server) as (transport, line, url):
        call = asyncio.create_task(line.post(UpstreamRequest(url, "k", b"{}"), 60))
        await eventually(lambda: server.requests, "the call to arrive")
        await transport.close()
        with pytest.raises(Ambiguous):
            await call
        await asyncio.wait_for(server.requests[0].gone.wait(), 5)
        with pytest.raises(Unavailable):
            await line.post(UpstreamRequest(url, "k2", b"{}"), 60)
    assert server.connection_count == 1


async def test_nothing_that_is_printed_shows_the_key() -> None:
    async with RawServer() as server, line_to(server, api_key=secret()) as (transport, line, url):
        await line.post(UpstreamRequest(url, "k", b"{}"), 10)
        template = line.template(url)
        shown = repr(
            [transport, line, template, template.request, template.key, template.request.headers, transport.connections]
        )
        assert "canary" not in shown
