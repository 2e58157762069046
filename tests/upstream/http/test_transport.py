"""One call over a real socket, against servers that break HTTP in every way they can."""

import asyncio
import functools
import gzip
import resource
import socket
import ssl
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from tests.support.certificates import self_signed, shown_by_server
from tests.support.ports import HandClock
from tests.upstream.raw_server import CHAT, Peer, RawServer, Request, Script, eventually
from tests.upstream.world import deployment, line_to, secret
from tidegate.core.deployments import Deployment, EngineKind, HttpLimits, Tls
from tidegate.core.errors import (
    Ambiguous,
    AnswerTooLong,
    BrokenAnswer,
    PoolExhausted,
    SettingsError,
    Unavailable,
    UpstreamError,
)
from tidegate.upstream.http.connections import make_room_for_connections
from tidegate.upstream.http.transport import AiohttpTransport, HttpReply, PermitExpired, SendPermit, UpstreamRequest

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"], scope="module")
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Both loops: their transports differ exactly where this layer looks closely."""
    return "asyncio", {"use_uvloop": request.param}


SHORT = HttpLimits(connect_timeout_s=2, read_timeout_s=0.2, write_timeout_s=0.2, pool_timeout_s=0.05)


async def fails(script: Script, limits: HttpLimits = SHORT, total_s: float = 20.0) -> UpstreamError:
    """The error of one call to a server with this script; the connection must be closed afterwards."""
    async with RawServer(script) as server, line_to(server, limits) as (transport, line, url):
        with pytest.raises(UpstreamError) as caught:
            await line.post(UpstreamRequest(url, "k", b'{"model":"m"}'), total_s)
        await eventually(lambda: server.open_count == 0, "the broken connection to be closed")
        assert transport.connections.open_count() == 0
        assert transport.free_slots() == (limits or HttpLimits()).connections_max
        return caught.value


async def test_a_call_carries_the_key_the_idempotency_key_and_the_exact_body() -> None:
    async with RawServer() as server, line_to(server, api_key=secret()) as (_, line, url):
        body = b'{"model":"m",  "odd" : [1, 2.50]}'
        reply = await line.post(UpstreamRequest(url, "batch_1:7", body), 10)
    assert reply == HttpReply(200, reply.headers, CHAT)
    request = server.requests[0]
    assert request.line == "POST /v1/chat/completions HTTP/1.1"
    assert request.body == body
    assert request.headers["Authorization"] == "Bearer sk-canary-77aa"
    assert request.headers["Idempotency-Key"] == "batch_1:7"
    assert request.headers["Content-Type"] == "application/json"
    assert request.headers["Accept-Encoding"] == "identity"
    assert "Cookie" not in request.headers


async def test_anthropic_takes_its_key_in_its_own_header() -> None:
    async with RawServer() as server, line_to(server, api_key=secret(), engine=EngineKind.ANTHROPIC) as (_, line, url):
        await line.post(UpstreamRequest(url, "k", b"{}"), 10)
    headers = server.requests[0].headers
    assert headers["x-api-key"] == "sk-canary-77aa"
    assert headers["anthropic-version"]
    assert "Authorization" not in headers


async def test_connections_are_reused_and_cookies_are_not_kept() -> None:
    async def script(request: Request, peer: Peer) -> None:
        await peer.answer(Set_Cookie="session=1")

    async with RawServer(script) as server, line_to(server) as (_, line, url):
        for number in range(5):
            await line.post(UpstreamRequest(url, f"k{number}", b"{}"), 10)
    assert server.connection_count == 1
    assert all("Cookie" not in request.headers for request in server.requests)


@pytest.mark.parametrize("interactive", [True, False])
async def test_a_stream_gives_back_the_kind_of_slot_that_it_took(interactive: bool) -> None:
    """Otherwise users' calls would widen what batch may use of the connections, or narrow it."""
    limits = HttpLimits(connections_max=4, kept_alive_max=1, interactive_connections=2)
    async with RawServer() as server, line_to(server, limits) as (transport, line, url):
        for is_whole in (True, False, True, False):
            stream = await line.open(UpstreamRequest(url, "k", b"{}"), 10, interactive=interactive)
            if is_whole:
                await stream.read_whole()
            stream.close()
        assert [transport._slots.take_slot(interactive=False) for _ in range(3)] == [True, True, False]


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with RawServer() as server, line_to(server) as (_, line, url):
        assert (await line.post(UpstreamRequest(url, "k", b"{}"), 10)).status == 200


async def test_a_redirect_is_an_answer_and_is_not_followed() -> None:
    async def script(request: Request, peer: Peer) -> None:
        await peer.answer(307, b"", Location="/elsewhere")

    async with RawServer(script) as server, line_to(server) as (_, line, url):
        assert (await line.post(UpstreamRequest(url, "k", b"{}"), 10)).status == 307
    assert len(server.requests) == 1


async def test_a_redirect_does_not_quote_our_key() -> None:
    key = secret().reveal()

    async def script(request: Request, peer: Peer) -> None:
        await peer.answer(307, b"", Location=f"https://elsewhere.example/{key}/v1")

    async with RawServer(script) as server, line_to(server, api_key=secret()) as (_, line, url):
        whole = await line.post(UpstreamRequest(url, "k", b"{}"), 10)
        stream = await line.open(UpstreamRequest(url, "k", b"{}"), 10)
        stream.close()
    for headers in (whole.headers, stream.headers):
        assert headers["location"] == "https://elsewhere.example/***/v1"


async def _half_body(request: Request, peer: Peer) -> None:
    await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n" + CHAT)
    peer.close()


async def _reset_after_half(request: Request, peer: Peer) -> None:
    await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n" + CHAT)
    peer.reset()


async def _chunked_without_end(request: Request, peer: Peer) -> None:
    await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(CHAT) + CHAT + b"\r\n")
    peer.close()


async def _chunked_that_hangs(request: Request, peer: Peer) -> None:
    await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(CHAT) + CHAT + b"\r\n")
    await peer.until_gone()


async def _chunk_size_is_garbage(request: Request, peer: Peer) -> None:
    await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n" + CHAT)
    await peer.until_gone()


async def _content_length_twice(request: Request, peer: Peer) -> None:
    await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 9\r\n\r\n" + CHAT)
    await peer.until_gone()


async def _garbled_gzip(request: Request, peer: Peer) -> None:
    body = gzip.compress(CHAT)
    garbled = body[:12] + bytes(byte ^ 0xFF for byte in body[12:])
    await peer.answer(body=garbled, Content_Encoding="gzip")
    await peer.until_gone()


async def _not_http(request: Request, peer: Peer) -> None:
    await peer.send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
    await peer.until_gone()


async def _million_headers(request: Request, peer: Peer) -> None:
    await peer.send(b"HTTP/1.1 200 OK\r\n")
    for number in range(1_000_000):
        if peer.writer.is_closing():
            break
        await peer.send(b"X-%d: y\r\n" % number)


async def _huge_header(request: Request, peer: Peer) -> None:
    await peer.send(b"HTTP/1.1 200 OK\r\nX-Long: " + b"y" * 100_000 + b"\r\n\r\n")
    await peer.until_gone()


async def _closed_without_a_word(request: Request, peer: Peer) -> None:
    peer.close()


async def _reset_without_a_word(request: Request, peer: Peer) -> None:
    peer.reset()


async def _hang_before_headers(request: Request, peer: Peer) -> None:
    await peer.until_gone()


async def _hang_after_headers(request: Request, peer: Peer) -> None:
    await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n")
    await peer.until_gone()


async def _endless_100s(request: Request, peer: Peer) -> None:
    while not peer.writer.is_closing():
        await peer.send(b"HTTP/1.1 102 Processing\r\n\r\n" * 20)
        await asyncio.sleep(0.002)


@pytest.mark.parametrize(
    "script",
    [
        _half_body,
        _reset_after_half,
        _chunked_without_end,
        _chunked_that_hangs,
        _chunk_size_is_garbage,
        _content_length_twice,
        _garbled_gzip,
        _not_http,
        _million_headers,
        _huge_header,
        _closed_without_a_word,
        _reset_without_a_word,
        _hang_before_headers,
        _hang_after_headers,
        _endless_100s,
    ],
)
async def test_whatever_breaks_after_sending_is_ambiguous_and_never_an_answer(script: Script) -> None:
    assert type(await fails(script)) is Ambiguous


@pytest.mark.parametrize("late", [False, True])
async def test_a_second_answer_to_one_request_is_never_taken_for_the_answer_of_the_next(late: bool) -> None:
    stray_sent = asyncio.Event()

    async def script(request: Request, peer: Peer) -> None:
        key = request.headers["Idempotency-Key"].encode()
        mine = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(key), key)
        stray = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nstray"
        if late:
            await peer.send(mine)
            await asyncio.sleep(0.01)
            await peer.send(stray)
        else:
            await peer.send(mine + stray)
        stray_sent.set()

    async with RawServer(script) as server, line_to(server) as (_, line, url):
        for key in ("a", "b", "c"):
            assert (await line.post(UpstreamRequest(url, key, b"{}"), 10)).body == key.encode()
            await stray_sent.wait()
            stray_sent.clear()
    assert server.connection_count == 3


async def test_bytes_behind_a_body_are_not_part_of_it() -> None:
    async def script(request: Request, peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\n")

    async with RawServer(script) as server, line_to(server) as (_, line, url):
        assert (await line.post(UpstreamRequest(url, "a", b"{}"), 10)).body == b"{}"


async def test_some_100s_before_the_answer_do_no_harm() -> None:
    async def script(request: Request, peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 100 Continue\r\n\r\n" * 5)
        await peer.answer()

    async with RawServer(script) as server, line_to(server) as (_, line, url):
        assert (await line.post(UpstreamRequest(url, "k", b"{}"), 10)).body == CHAT


async def test_a_slow_loris_body_is_cut_by_the_rate_rule_though_it_is_never_silent() -> None:
    async def drip(request: Request, peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n")
        while not peer.writer.is_closing():
            await peer.send(b"{")
            await asyncio.sleep(0.02)

    limits = HttpLimits(read_timeout_s=5, body_rate_min_bytes_per_s=1000, body_rate_grace_s=0.1)
    error = await fails(drip, limits)
    assert type(error) is Ambiguous
    assert "bytes per second" in error.message


async def test_blank_lines_while_waiting_are_not_a_slow_body() -> None:
    async def script(request: Request, peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (40 + len(CHAT)))
        for _ in range(40):
            await peer.send(b"\n")
            await asyncio.sleep(0.01)
        await peer.send(CHAT)

    limits = HttpLimits(read_timeout_s=5, body_rate_min_bytes_per_s=1_000_000, body_rate_grace_s=0.05)
    async with RawServer(script) as server, line_to(server, limits) as (_, line, url):
        assert (await line.post(UpstreamRequest(url, "k", b"{}"), 10)).body.strip() == CHAT


async def test_a_call_that_was_left_holds_nothing_and_is_watched_no_longer() -> None:
    """A call that stays watched would have its task cancelled at its deadline, whatever that does by then."""
    async with RawServer(_hang_before_headers) as server, line_to(server) as (transport, line, url):

        def arrived(count: int) -> bool:
            return len(server.requests) == count

        ways: list[Any] = [line.post, line.open]
        for count, way in enumerate(ways, 1):
            call = asyncio.create_task(way(UpstreamRequest(url, "k", b"{}"), 20))
            await eventually(functools.partial(arrived, count), "the call to arrive")
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            held = (transport._slots.in_use, transport.connections.open_count(), len(transport._sweep._exchanges))
            assert held == (0, 0, 0)


async def test_100s_without_end_are_given_up_long_before_the_deadline() -> None:
    error = await fails(_endless_100s, HttpLimits(), total_s=600)
    assert type(error) is Ambiguous
    assert "not valid HTTP" in error.message


async def test_an_answer_behind_as_many_100s_as_are_taken_is_the_answer() -> None:
    async def script(request: Request, peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 102 Processing\r\n\r\n" * hints)
        await peer.answer()

    hints = 1_024
    async with RawServer(script) as server, line_to(server) as (_, line, url):
        assert (await line.post(UpstreamRequest(url, "k", b"{}"), 20)).body == CHAT
    hints += 1
    assert "not valid HTTP" in (await fails(script)).message


@pytest.mark.parametrize("script", [_hang_before_headers, _hang_after_headers])
async def test_the_total_deadline_ends_any_call(script: Script) -> None:
    # Long enough to connect and send on a busy machine.
    error = await fails(script, HttpLimits(), total_s=0.5)
    assert type(error) is Ambiguous
    assert "deadline" in error.message


async def test_a_request_that_the_upstream_does_not_take_ends_at_the_write_timeout() -> None:
    async with asyncio.timeout(20):
        stuck = asyncio.Event()

        async def never_reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await stuck.wait()
            writer.close()

        server = await asyncio.start_server(never_reads, "127.0.0.1", 0, limit=1024)
        transport = AiohttpTransport(HttpLimits(write_timeout_s=0.2))
        place = deployment(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(Ambiguous, match="did not take the request"):
            await transport.client_for(place).post(
                UpstreamRequest(URL(place.url_of("/v1/x")), "k", b"x" * 64_000_000), 20
            )
        stuck.set()
        server.close()
        await transport.close()


async def test_connection_refused_is_unavailable_and_says_where() -> None:
    async with RawServer() as server:
        pass
    async with line_to(server) as (_, line, url):
        with pytest.raises(Unavailable, match=str(server.port)):
            await line.post(UpstreamRequest(url, "k", b"{}"), 10)


async def test_a_name_that_does_not_exist_is_unavailable() -> None:
    transport = AiohttpTransport(HttpLimits())
    place = deployment("http://no-such-host.invalid/v1")
    with pytest.raises(Unavailable, match=r"no-such-host\.invalid"):
        await transport.client_for(place).post(UpstreamRequest(URL(place.url_of("/v1/x")), "k", b"{}"), 10)
    await transport.close()


async def test_an_address_that_swallows_packets_is_unavailable_at_the_connect_timeout() -> None:
    # A listening socket whose backlog is full drops further handshakes.
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        handshakes = []
        for _ in range(4):
            handshake = socket.socket()
            handshake.setblocking(False)
            handshake.connect_ex(full.getsockname())
            handshakes.append(handshake)
        transport = AiohttpTransport(HttpLimits(connect_timeout_s=0.2))
        place = deployment(f"http://127.0.0.1:{full.getsockname()[1]}")
        with pytest.raises(Unavailable, match="connecting took too long"):
            await transport.client_for(place).post(UpstreamRequest(URL(place.url_of("/v1/x")), "k", b"{}"), 20)
        await transport.close()
        for handshake in handshakes:
            handshake.close()


@pytest.mark.parametrize("bytes_max", [300_000, 3_000], ids=["in pieces", "whole"])
async def test_the_body_is_cut_one_byte_above_the_limit(bytes_max: int) -> None:
    async def script(request: Request, peer: Peer) -> None:
        size = int(request.headers["Idempotency-Key"])
        await peer.answer(body=b"x" * size)

    limits = HttpLimits(response_bytes_max=bytes_max)
    async with RawServer(script) as server, line_to(server, limits) as (_, line, url):
        assert len((await line.post(UpstreamRequest(url, f"{bytes_max}", b"{}"), 10)).body) == bytes_max
        with pytest.raises(BrokenAnswer, match=f"{bytes_max}"):
            await line.post(UpstreamRequest(url, f"{bytes_max + 1}", b"{}"), 10)


async def test_a_gzip_bomb_is_cut_after_decompression_without_filling_memory() -> None:
    squeezer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(squeezer.compress(bytes(1 << 20)) for _ in range(128)) + squeezer.flush()

    async def script(request: Request, peer: Peer) -> None:
        await peer.answer(body=bomb, Content_Encoding="gzip")
        await peer.until_gone()

    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = await fails(script, HttpLimits(response_bytes_max=4 << 20))
    assert type(error) is AnswerTooLong
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 64 * 1024


async def test_honest_gzip_is_decompressed() -> None:
    async def script(request: Request, peer: Peer) -> None:
        await peer.answer(body=gzip.compress(CHAT), Content_Encoding="gzip")

    async with RawServer(script) as server, line_to(server) as (_, line, url):
        assert (await line.post(UpstreamRequest(url, "k", b"{}"), 10)).body == CHAT


async def test_a_huge_answer_is_cut_while_it_comes() -> None:
    sent = 0

    async def endless(request: Request, peer: Peer) -> None:
        nonlocal sent
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while not peer.writer.is_closing():
            await peer.send(b"x" * 65_536)
            sent += 65_536

    assert type(await fails(endless, HttpLimits(response_bytes_max=1 << 20))) is AnswerTooLong
    assert sent < 64 << 20


async def test_a_cancelled_call_is_seen_by_the_upstream_before_and_after_headers() -> None:
    for script in (_hang_before_headers, _hang_after_headers):
        async with RawServer(script) as server, line_to(server) as (transport, line, url):
            call = asyncio.create_task(line.post(UpstreamRequest(url, "k", b"{}"), 60))
            await eventually(functools.partial(getattr, server, "requests"), "the call to arrive")
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.wait_for(server.requests[0].gone.wait(), 5)
            assert transport.free_slots() == HttpLimits().connections_max


async def test_cancelling_one_call_leaves_the_others_alone() -> None:
    release = asyncio.Event()

    async def script(request: Request, peer: Peer) -> None:
        await release.wait()
        await peer.answer()

    async with RawServer(script) as server, line_to(server) as (_, line, url):
        calls = [asyncio.create_task(line.post(UpstreamRequest(url, f"k{n}", b"{}"), 60)) for n in range(10)]
        await eventually(lambda: len(server.requests) == 10, "ten calls to arrive")
        for call in calls[::2]:
            call.cancel()
        release.set()
        done = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(one, HttpReply) for one in done] == [False, True] * 5


async def test_at_the_ceiling_all_calls_fly_and_one_above_it_waits_and_fails_as_pool_exhausted() -> None:
    release = asyncio.Event()

    async def script(request: Request, peer: Peer) -> None:
        await release.wait()
        await peer.answer()

    limits = HttpLimits(connections_max=5, kept_alive_max=5, pool_timeout_s=0.05)
    async with RawServer(script) as server, line_to(server, limits) as (transport, line, url):
        calls = [asyncio.create_task(line.post(UpstreamRequest(url, f"k{n}", b"{}"), 60)) for n in range(5)]
        await eventually(lambda: len(server.requests) == 5, "five calls to arrive")
        assert transport.free_slots() == 0
        with pytest.raises(PoolExhausted) as caught:
            await line.post(UpstreamRequest(url, "k6", b"{}"), 60)
        assert caught.value.code == "upstream_pool_timeout"
        assert not caught.value.billed
        release.set()
        assert all(reply.status == 200 for reply in await asyncio.gather(*calls))
    assert server.open_count_highest == 5


async def test_a_call_waits_for_a_slot_no_longer_than_its_own_time() -> None:
    async def script(request: Request, peer: Peer) -> None:
        await peer.until_gone()

    limits = HttpLimits(connections_max=1, kept_alive_max=1, pool_timeout_s=60)
    async with RawServer(script) as server, line_to(server, limits) as (_, line, url):
        first = asyncio.create_task(line.post(UpstreamRequest(url, "k1", b"{}"), 60))
        await eventually(lambda: server.requests, "the first call to arrive")
        with pytest.raises(PoolExhausted):
            async with asyncio.timeout(20):
                await line.post(UpstreamRequest(url, "k2", b"{}"), 0.01)
        first.cancel()


async def test_a_connection_that_took_longer_than_its_permit_carries_the_next_call() -> None:
    clock = HandClock()

    def permit(ms: float) -> SendPermit:
        return SendPermit(clock, (), "", 0, clock.monotonic_ms() + ms)

    async with RawServer() as server, line_to(server) as (_, line, url):
        for send in (line.post, line.open):
            with pytest.raises(PermitExpired):
                await send(UpstreamRequest(url, "k1", b"{}"), 10, permit(0))
            await line.post(UpstreamRequest(url, "k2", b"{}"), 10, permit(60_000))
    assert server.connection_count == 1
    assert [request.headers["Idempotency-Key"] for request in server.requests] == ["k2", "k2"]


async def test_a_call_that_waits_for_a_slot_gets_the_next_one_in_its_turn() -> None:
    order: list[str] = []

    async def script(request: Request, peer: Peer) -> None:
        order.append(request.headers["Idempotency-Key"])
        await peer.answer()

    limits = HttpLimits(connections_max=1, kept_alive_max=1)
    async with RawServer(script) as server, line_to(server, limits) as (_, line, url):
        await asyncio.gather(*(line.post(UpstreamRequest(url, f"k{n}", b"{}"), 60) for n in range(20)))
    assert order == [f"k{n}" for n in range(20)]
    assert server.open_count_highest == 1


async def test_cancelled_waiters_lose_no_slot() -> None:
    release = asyncio.Event()

    async def script(request: Request, peer: Peer) -> None:
        await release.wait()
        await peer.answer()

    limits = HttpLimits(connections_max=2, kept_alive_max=2)
    async with RawServer(script) as server, line_to(server, limits) as (transport, line, url):
        flying = [asyncio.create_task(line.post(UpstreamRequest(url, f"f{n}", b"{}"), 60)) for n in range(2)]
        await eventually(lambda: len(server.requests) == 2, "two calls to arrive")
        waiting = [asyncio.create_task(line.post(UpstreamRequest(url, f"w{n}", b"{}"), 60)) for n in range(6)]
        await asyncio.sleep(0)
        release.set()
        await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
        for call in waiting[:4]:
            call.cancel()
        await asyncio.gather(*flying, *waiting, return_exceptions=True)
        assert transport.free_slots() == 2


async def test_idle_connections_beyond_the_limit_are_not_kept_for_long() -> None:
    limits = HttpLimits(connections_max=10, kept_alive_max=3)
    async with RawServer() as server, line_to(server, limits) as (transport, line, url):
        await asyncio.gather(*(line.post(UpstreamRequest(url, f"k{n}", b"{}"), 60) for n in range(10)))
        await eventually(lambda: server.open_count <= 3, "surplus connections to be closed")
        assert transport.connections.idle_count() == server.open_count == 3


async def test_connections_idle_only_for_a_moment_are_kept_beyond_the_limit() -> None:
    limits = HttpLimits(connections_max=50, kept_alive_max=1)
    async with RawServer() as server, line_to(server, limits) as (_, line, url):
        for wave in range(20):
            await asyncio.gather(*(line.post(UpstreamRequest(url, f"k{wave}.{n}", b"{}"), 60) for n in range(50)))
    assert server.connection_count <= 100


async def test_idle_connections_make_room_for_other_deployments_under_the_one_ceiling() -> None:
    limits = HttpLimits(connections_max=4, kept_alive_max=4)
    release = asyncio.Event()

    async def held(request: Request, peer: Peer) -> None:
        await release.wait()
        await peer.answer()

    async with RawServer() as first, RawServer(held) as second, line_to(first, limits) as (transport, line, url):
        await asyncio.gather(*(line.post(UpstreamRequest(url, f"k{n}", b"{}"), 60) for n in range(4)))
        idle_before = transport.connections.idle_count()
        assert idle_before > 0
        place = deployment(second.url, name="two")
        other = transport.client_for(place)
        other_url = URL(place.url_of("/v1/x"))
        calls = [asyncio.create_task(other.post(UpstreamRequest(other_url, f"k{n}", b"{}"), 60)) for n in range(4)]
        await eventually(lambda: len(second.requests) == 4, "four calls to arrive")
        assert transport.connections.open_count() == 4
        await eventually(lambda: first.open_count == 0, "the idle ones to be closed")
        release.set()
        await asyncio.gather(*calls)


async def test_an_idle_connection_that_the_server_closed_is_replaced_without_a_repeated_call() -> None:
    async def script(request: Request, peer: Peer) -> None:
        await peer.answer()
        peer.close()

    async with RawServer(script) as server, line_to(server) as (_, line, url):
        for number in range(20):
            assert (await line.post(UpstreamRequest(url, f"k{number}", b"{}"), 10)).status == 200
    keys = [request.headers["Idempotency-Key"] for request in server.requests]
    assert keys == [f"k{number}" for number in range(20)]


async def test_a_connection_closed_after_the_request_was_sent_is_never_retried_in_secret() -> None:
    async def script(request: Request, peer: Peer) -> None:
        if len(server.requests) == 1:
            await peer.answer()
        else:
            peer.close()

    async with RawServer(script) as server, line_to(server) as (_, line, url):
        await line.post(UpstreamRequest(url, "a", b"{}"), 10)
        with pytest.raises(Ambiguous):
            await line.post(UpstreamRequest(url, "b", b"{}"), 10)
    assert len(server.requests) == 2


async def test_no_error_shows_the_key(caplog: pytest.LogCaptureFixture) -> None:
    for script in (_not_http, _half_body, _closed_without_a_word, _hang_before_headers):
        async with RawServer(script) as server, line_to(server, SHORT, api_key=secret()) as (_, line, url):
            with pytest.raises(UpstreamError) as caught:
                await line.post(UpstreamRequest(url, "k", b"{}"), 10)
        shown: list[str] = []
        wrong: BaseException | None = caught.value
        while wrong is not None:
            shown += [str(wrong), repr(wrong), repr(vars(wrong))]
            wrong = wrong.__cause__ or wrong.__context__
        assert "canary" not in "".join(shown)
    assert "canary" not in caplog.text


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"))


async def test_tls_is_checked_unless_it_is_switched_off(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    shown, of_another_host = shown_by_server(cert, key), self_signed(tmp_path, "elsewhere.test")
    ways: list[tuple[ssl.SSLContext, Tls, bool]] = [
        (shown, Tls(), False),
        (shown, Tls(ca_file=str(cert)), True),
        (shown, Tls(ca_file=str(of_another_host[0])), False),
        (shown_by_server(*of_another_host), Tls(ca_file=str(of_another_host[0])), False),
        (shown, Tls(verify=False), True),
    ]
    for context, tls, works in ways:
        async with RawServer(tls=context) as server, line_to(server, tls=tls) as (_, line, url):
            if works:
                assert (await line.post(UpstreamRequest(url, "k", b"{}"), 10)).status == 200
            else:
                with pytest.raises(Unavailable, match="TLS"):
                    await line.post(UpstreamRequest(url, "k", b"{}"), 10)
                assert server.requests == []


async def test_a_client_certificate_is_shown(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    context = shown_by_server(cert, key, clients=cert)
    shown = Tls(ca_file=str(cert), cert_file=str(cert), key_file=str(key))
    async with RawServer(tls=context) as server, line_to(server, tls=shown) as (_, line, url):
        assert (await line.post(UpstreamRequest(url, "k", b"{}"), 10)).status == 200


async def test_tls_files_that_do_not_exist_stop_the_start_and_say_so() -> None:
    transport = AiohttpTransport(HttpLimits())
    with pytest.raises(SettingsError, match="ca_file"):
        transport.client_for(Deployment("one", "https://h/v1", tls=Tls(ca_file="/no/such/file.pem")))
    await transport.close()


async def test_https_to_a_plain_http_server_is_unavailable() -> None:
    limits = HttpLimits(connect_timeout_s=0.2)
    async with RawServer() as server, line_to(server, limits) as (_, line, url):
        with pytest.raises(Unavailable):
            await line.post(UpstreamRequest(url.with_scheme("https"), "k", b"{}"), 10)


class TestOpenFiles:
    async def test_the_soft_limit_is_raised(self, tmp_path: Path) -> None:
        code = (
            "import resource\n"
            "from tidegate.core.deployments import HttpLimits\n"
            "from tidegate.upstream.http.connections import make_room_for_connections\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (300, 900))\n"
            "make_room_for_connections(HttpLimits())\n"
            "print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        )
        assert await _python(code) == "(756, 900)"

    @pytest.mark.parametrize(("allowed", "instead"), [(400, "worker.in_flight_max to at most 144"), (200, "")])
    async def test_a_hard_limit_below_it_says_what_to_do(self, allowed: int, instead: str) -> None:
        code = (
            "import resource\n"
            "from tidegate.core.deployments import HttpLimits\n"
            "from tidegate.core.errors import SettingsError\n"
            "from tidegate.upstream.http.connections import make_room_for_connections\n"
            f"resource.setrlimit(resource.RLIMIT_NOFILE, (100, {allowed}))\n"
            "try: make_room_for_connections(HttpLimits())\n"
            "except SettingsError as wrong: print(wrong)\n"
        )
        output = await _python(code)
        assert "ulimit -n 756" in output
        # Nothing is advised that would not help either.
        assert (instead in output) if instead else output.endswith("in the service's unit)")

    async def test_enough_is_left_alone(self) -> None:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        make_room_for_connections(HttpLimits(connections_max=1, kept_alive_max=1))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


async def _python(code: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return output.decode().strip()


@pytest.mark.parametrize("body_bytes", [10, 500_000])
@pytest.mark.parametrize("shows", ["none", "an unknown one"])
async def test_a_server_that_rejects_our_certificate_was_sent_nothing(
    certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, shows: str, body_bytes: int
) -> None:
    """In TLS 1.3 our side of the handshake ends before the server looks at our certificate, so the request is written already."""
    cert, key = certificate
    context = shown_by_server(cert, key, clients=cert)
    tls = Tls(ca_file=str(cert))
    if shows != "none":
        other, other_key = self_signed(tmp_path_factory.mktemp("unknown"))
        tls = Tls(ca_file=str(cert), cert_file=str(other), key_file=str(other_key))
    async with RawServer(tls=context) as server, line_to(server, tls=tls) as (_, line, url):
        with pytest.raises(Unavailable) as refused:
            await line.post(UpstreamRequest(url, "k", b"{}".ljust(body_bytes)), 10)
        # Some servers end the connection so early that nothing was written at all.
        assert refused.value.code in ("upstream_tls_rejected", "upstream_unavailable")
        with pytest.raises(Unavailable):
            await line.open(UpstreamRequest(url, "k", b"{}".ljust(body_bytes)), 10)
        assert server.posts == []


@pytest.mark.parametrize("tickets", [2, 0])
async def test_a_server_that_ends_an_accepted_tls_connection_may_have_done_the_work(
    certificate: tuple[Path, Path], tickets: int
) -> None:
    cert, key = certificate
    context = shown_by_server(cert, key)
    context.num_tickets = tickets

    async def answer_once(request: Request, peer: Peer) -> None:
        if len(server.posts) == 1:
            await peer.answer(200, CHAT, Connection="close")
        peer.close()

    async with (
        RawServer(answer_once, tls=context) as server,
        line_to(server, tls=Tls(ca_file=str(cert))) as (_, line, url),
    ):
        # A server without tickets shows by its first answer that it sends none.
        assert (await line.post(UpstreamRequest(url, "k", b"{}"), 10)).status == 200
        with pytest.raises(Ambiguous):
            await line.post(UpstreamRequest(url, "k", b"{}"), 10)
        assert len(server.posts) == 2


async def test_silence_ends_no_audio_call_unless_the_deployment_says_so() -> None:
    async def answer_late(request: Request, peer: Peer) -> None:
        await asyncio.sleep(0.3)
        await peer.answer()

    async with (
        RawServer(answer_late) as server,
        line_to(server, HttpLimits(read_timeout_s=0.05)) as (transport, line, chat),
    ):
        url = URL(deployment(server.url).url_of("/v1/audio/transcriptions"))
        assert (await line.post(UpstreamRequest(url, "k", b"{}"), 10)).status == 200
        with pytest.raises(Ambiguous):
            await line.post(UpstreamRequest(chat, "k", b"{}"), 10)
        with pytest.raises(Ambiguous):
            await transport.client_for(deployment(server.url, read_timeout_s=0.05)).post(
                UpstreamRequest(url, "k", b"{}"), 10
            )
