"""Callbacks against real receivers: whatever a receiver or its name does, a send ends soon, with a word, and reaches no closed address."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import self_signed, shown_by_server
from tests.support.proxy import Proxy
from tests.upstream.raw_server import Peer, RawServer, Request, eventually
from tidegate.backends import callback_sender
from tidegate.backends.callback_sender import CallbackSender
from tidegate.core.callback_targets import CallbackReply, TargetRules

ALLOWED = TargetRules(frozenset({"127.0.0.1", "hooks.example", "localhost"}), allow_http=True)
PUBLIC_HTTP = TargetRules(allow_http=True)
HEADERS = {"webhook-id": "evt_1"}


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"], scope="module")
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


def answers(*addresses: str) -> Any:
    def resolve(host: str, port: int) -> Sequence[Any]:
        families = [socket.AF_INET6 if ":" in one else socket.AF_INET for one in addresses]
        kind = (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        return [(family, *kind, (one, port)) for family, one in zip(families, addresses, strict=True)]

    return resolve


@pytest.fixture
async def sender() -> AsyncIterator[CallbackSender]:
    made = CallbackSender(ALLOWED, "Tidegate/test")
    yield made
    await made.close()


async def test_a_receiver_gets_the_body_and_headers_once_and_nothing_else(
    sender: CallbackSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with RawServer() as receiver:
        reply = await sender.post(f"{receiver.url}/a%2Fb%61?c=%20%7e", b'{"a":1}', HEADERS, owner="tenant")
    assert reply.is_success
    [request] = receiver.requests
    assert request.line == "POST /v1/a%2Fb%61?c=%20%7e HTTP/1.1"
    assert request.body == b'{"a":1}'
    assert {name.lower(): value for name, value in request.headers.items()} == {
        "host": f"127.0.0.1:{receiver.port}",
        "content-type": "application/json",
        "content-length": "7",
        "user-agent": "Tidegate/test",
        "webhook-id": "evt_1",
        "connection": "close",
    }


async def test_each_send_has_a_connection_of_its_own_and_keeps_no_cookie(sender: CallbackSender) -> None:
    async def cookies(_: Request, peer: Peer) -> None:
        await peer.answer(204, b"", Set_Cookie="a=b; Path=/")

    async with RawServer(cookies) as receiver:
        for _ in range(2):
            assert (await sender.post(receiver.url, b"{}", HEADERS, owner="tenant")).status == 204
    assert receiver.connection_count == 2
    assert not any("cookie" in name.lower() for request in receiver.requests for name in request.headers)


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
async def test_a_redirect_is_a_failure_and_is_not_followed(sender: CallbackSender, status: int) -> None:
    async with RawServer() as elsewhere:

        async def redirect(_: Request, peer: Peer) -> None:
            await peer.answer(status, b"", Location=f"http://127.0.0.1:{elsewhere.port}/")

        async with RawServer(redirect) as receiver:
            reply = await sender.post(receiver.url, b"{}", HEADERS, owner="tenant")
    assert (reply.status, reply.is_success, reply.word) == (status, False, "http_3xx")
    assert not elsewhere.requests


@pytest.mark.parametrize(
    ("text", "retry_after_ms"),
    [
        ("7", 7_000), ("0", 0), ("-1", 0), ("1e3", 1_000_000), ("9" * 40, 0), ("²", 0),
        ("Wed, 21 Oct 2026 07:28:09 GMT", 9_000), ("Wed, 21 Oct 2026 07:27:00 GMT", 0), ("Wed, 32 Oct", 0),
    ],
)  # fmt: skip
async def test_retry_after_counts_in_seconds_or_from_the_receivers_own_date(
    sender: CallbackSender, text: str, retry_after_ms: int
) -> None:
    async def busy(_: Request, peer: Peer) -> None:
        await peer.answer(503, b"", Retry_After=text, Date="Wed, 21 Oct 2026 07:28:00 GMT")

    async with RawServer(busy) as receiver:
        reply = await sender.post(receiver.url, b"{}", HEADERS, owner="tenant")
    assert (reply.status, reply.retry_after_ms) == (503, retry_after_ms)


async def test_a_receiver_that_hangs_is_given_up(sender: CallbackSender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callback_sender, "TOTAL_S", 0.3)

    async def hang(_: Request, peer: Peer) -> None:
        await peer.until_gone()

    async with RawServer(hang) as receiver:
        reply = await sender.post(receiver.url, b"{}", HEADERS, owner="tenant")
        await eventually(lambda: receiver.open_count == 0, "the connection to be closed")
    assert reply.failure == "timed_out"


WIRE_FAULTS: dict[str, Callable[[Proxy], None]] = {
    "the request is cut": lambda wire: wire.cut(10, "up"),
    "the answer is cut": lambda wire: wire.cut(10, "down"),
    "the answer is lost": lambda wire: wire.blackhole("down"),
    "nothing comes through": lambda wire: wire.blackhole(),
    "the answer crawls": lambda wire: wire.rate(20, "down"),
    "the connection is not accepted": lambda wire: wire.pause_accept(),
    "the connection is refused": lambda wire: wire.refuse(),
}


@pytest.mark.parametrize("fault", list(WIRE_FAULTS))
async def test_what_a_bad_wire_does_is_a_try_that_failed(
    sender: CallbackSender, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with RawServer() as receiver:
        wire = Proxy("127.0.0.1", receiver.port)
        try:
            url = f"http://{wire.address}/v1"
            assert (await sender.post(url, b"{}", HEADERS, owner="tenant")).is_success
            with monkeypatch.context() as short:
                short.setattr(callback_sender, "TOTAL_S", 0.3)
                WIRE_FAULTS[fault](wire)
                reply = await sender.post(url, b"{}", HEADERS, owner="tenant")
            assert (reply.is_success, reply.is_gone) == (False, False)
            assert reply.word in ("timed_out", "connection_failed", "invalid_answer"), reply.word
            wire.heal()
            assert (await sender.post(url, b"{}", HEADERS, owner="tenant")).is_success
        finally:
            wire.close()


async def test_a_head_that_trickles_is_given_up(sender: CallbackSender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callback_sender, "TOTAL_S", 0.3)

    async def trickle(_: Request, peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\n")
        while True:
            await peer.send(b"x: y\r\n")
            await asyncio.sleep(0.05)

    async with RawServer(trickle) as receiver:
        assert (await sender.post(receiver.url, b"{}", HEADERS, owner="tenant")).failure == "timed_out"


@pytest.mark.parametrize("head", [b"Content-Length: 100000000000", b"Transfer-Encoding: chunked"])
async def test_an_endless_answer_is_not_read(
    sender: CallbackSender, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(callback_sender, "DRAIN_S", 0.5)
    sent = 0

    async def endless(_: Request, peer: Peer) -> None:
        nonlocal sent
        await peer.send(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n")
        part = b"x" * 65_536
        while True:
            await peer.send(b"10000\r\n" + part + b"\r\n" if b"chunked" in head else part)
            sent += len(part)

    async with RawServer(endless) as receiver:
        reply = await sender.post(receiver.url, b"{}", HEADERS, owner="tenant")
        await eventually(lambda: receiver.open_count == 0, "the connection to be closed")
    assert reply.is_success
    # What the sockets of both ends hold is more than what is read.
    assert sent < 16 << 20


async def test_a_receiver_may_end_a_short_answer(sender: CallbackSender) -> None:
    order: list[str] = []

    async def answer(_: Request, peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab")
        await asyncio.sleep(0.02)
        order.append("ended")
        await peer.send(b"cd")

    async with RawServer(answer) as receiver:
        assert (await sender.post(receiver.url, b"{}", HEADERS, owner="tenant")).is_success
        order.append("replied")
    assert order == ["ended", "replied"]


async def test_a_compressed_answer_is_not_unpacked(sender: CallbackSender) -> None:
    async def broken(_: Request, peer: Peer) -> None:
        await peer.answer(200, b"no gzip at all", Content_Encoding="gzip")

    async with RawServer(broken) as receiver:
        assert (await sender.post(receiver.url, b"{}", HEADERS, owner="tenant")).is_success


@pytest.mark.parametrize(
    "answer",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 99999 X\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 100_000 + b"\r\n\r\n",
        b"",
    ],
)
async def test_an_answer_that_is_no_http_is_a_failure(sender: CallbackSender, answer: bytes) -> None:
    async def send(_: Request, peer: Peer) -> None:
        await peer.send(answer)
        peer.close()

    async with RawServer(send) as receiver:
        reply = await sender.post(receiver.url, b"{}", HEADERS, owner="tenant")
    assert not reply.is_success
    assert reply.failure in ("bad_answer", "connection_failed")


async def test_a_receiver_that_is_away_is_a_failure(sender: CallbackSender) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    assert (
        await sender.post(f"http://127.0.0.1:{port}/", b"{}", HEADERS, owner="tenant")
    ).failure == "connection_failed"


async def test_a_certificate_must_be_trusted_and_carry_the_name(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path, "hooks.example")
    context = shown_by_server(cert, key)
    untrusting = CallbackSender(ALLOWED, "Tidegate/test", answers("127.0.0.1"))
    sender = CallbackSender(ALLOWED, "Tidegate/test", answers("127.0.0.1"), ssl.create_default_context(cafile=cert))
    async with RawServer(tls=context) as receiver:
        url = f"https://hooks.example:{receiver.port}/hook"
        assert (await untrusting.post(url, b"{}", HEADERS, owner="tenant")).failure == "tls_failed"
        assert (await sender.post(url, b"{}", HEADERS, owner="tenant")).is_success
        assert receiver.requests[0].headers["Host"] == f"hooks.example:{receiver.port}"
        assert (
            await sender.post(url.replace("hooks.example", "localhost"), b"{}", HEADERS, owner="tenant")
        ).failure == "tls_failed"
    await untrusting.close()
    await sender.close()


@pytest.mark.parametrize(
    "addresses",
    [
        ("127.0.0.1",),
        ("8.8.8.8", "127.0.0.1"),
        ("::ffff:127.0.0.1",),
        ("::1", "2606:4700::1111"),
        ("169.254.169.254",),
        (),
    ],
)
async def test_a_name_with_any_closed_address_is_not_called(addresses: tuple[str, ...]) -> None:
    async with RawServer() as receiver:
        sender = CallbackSender(PUBLIC_HTTP, "Tidegate/test", answers(*addresses))
        reply = await sender.post("http://hooks.example.com/", b"{}", HEADERS, owner="tenant")
        await sender.close()
    assert reply.failure == "target_refused"
    assert not receiver.connection_count


async def test_a_file_is_read_whole_and_only_from_where_it_may_be(sender: CallbackSender) -> None:
    async def serve(request: Request, peer: Peer) -> None:
        if "/moved" in request.line:
            await peer.answer(302, b"", Location="/v1/file")
        elif "/packed" in request.line:
            await peer.answer(200, b"x", Content_Encoding="gzip")
        elif "/endless" in request.line:
            await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while True:
                await peer.send(b"10000\r\n" + b"x" * 65_536 + b"\r\n")
        elif "/short" in request.line:
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
            peer.close()
        else:
            await peer.answer(200, b"RIFF" * 1_000, Content_Type="audio/wav")

    async with RawServer(serve) as host:
        whole = await sender.fetch(f"{host.url}/file", 4_000, owner="tenant")
        assert (whole.status, whole.media_type, whole.data) == (200, "audio/wav", b"RIFF" * 1_000)
        [request] = host.requests
        assert request.line.startswith("GET ")
        assert "authorization" not in {name.lower() for name in request.headers}
        assert (await sender.fetch(f"{host.url}/file", 3_999, owner="tenant")).failure == "too_large"
        assert (await sender.fetch(f"{host.url}/endless", 1 << 20, owner="tenant")).failure == "too_large"
        assert (await sender.fetch(f"{host.url}/moved", 4_000, owner="tenant")).status == 302
        assert (await sender.fetch(f"{host.url}/packed", 4_000, owner="tenant")).failure == "bad_answer"
        assert (await sender.fetch(f"{host.url}/short", 4_000, owner="tenant")).failure == "bad_answer"
        strict = CallbackSender(PUBLIC_HTTP, "Tidegate/test", answers("8.8.8.8", "127.0.0.1"))
        for url in ("http://hooks.example.com/", "http://169.254.169.254/", "file:///etc/passwd", "ftp://a.example/"):
            assert (await strict.fetch(url, 4_000, owner="tenant")).failure == "target_refused"
        await strict.close()


async def test_a_name_that_does_not_resolve_looks_like_a_closed_one() -> None:
    def fail(host: str, port: int) -> Sequence[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    sender = CallbackSender(PUBLIC_HTTP, "Tidegate/test", fail)
    assert (
        await sender.post("http://nothing.example.com/", b"{}", HEADERS, owner="tenant")
    ).failure == "target_refused"
    await sender.close()


async def test_a_name_server_that_is_away_says_nothing_about_the_name() -> None:
    def fail(host: str, port: int) -> Sequence[Any]:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    sender = CallbackSender(PUBLIC_HTTP, "Tidegate/test", fail)
    assert (
        await sender.post("http://hooks.example.com/", b"{}", HEADERS, owner="tenant")
    ).failure == "connection_failed"
    assert (await sender.fetch("http://files.example.com/", 10, owner="tenant")).failure == "connection_failed"
    await sender.close()


async def test_a_name_is_resolved_once_for_each_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is public when it is checked and private a moment later: what was checked is dialled."""
    asked: list[str] = []

    def rebinding(host: str, port: int) -> Sequence[Any]:
        asked.append(host)
        found: Sequence[Any] = answers("192.0.2.1" if len(asked) > 1 else "127.0.0.1")(host, port)
        return found

    dialled: list[str] = []
    real = callback_sender._checked_socket

    def watch(target: Any, address: Any) -> socket.socket:
        dialled.append(address[4][0])
        return real(target, address)

    monkeypatch.setattr(callback_sender, "_checked_socket", watch)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("the connection resolved the name again"))
    async with RawServer() as receiver:
        sender = CallbackSender(ALLOWED, "Tidegate/test", rebinding)
        assert (await sender.post(f"http://hooks.example:{receiver.port}/", b"{}", HEADERS, owner="tenant")).is_success
        await sender.close()
    assert (asked, dialled) == (["hooks.example"], ["127.0.0.1"])


async def test_a_socket_is_made_only_for_an_address_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with the first check out of the way, nothing is dialled."""
    sender = CallbackSender(PUBLIC_HTTP, "Tidegate/test", answers("127.0.0.1"))
    async with RawServer() as receiver:
        where = {"host": "127.0.0.1", "port": receiver.port, "family": socket.AF_INET, "proto": 6, "flags": 0}

        async def unchecked(target: Any) -> list[Any]:
            return [{"hostname": target.host, **where}]

        monkeypatch.setattr(sender, "_addresses", unchecked)
        assert not (await sender.post("http://hooks.example.com/", b"{}", HEADERS, owner="tenant")).is_success
    assert receiver.requests == []
    monkeypatch.undo()
    # An address as the URL's host needs no name server, and passes the same wall.
    assert (await sender.post("http://127.0.0.1/", b"{}", HEADERS, owner="tenant")).failure == "target_refused"
    await sender.close()


async def test_one_host_gets_a_few_calls_at_a_time_and_others_go_on(sender: CallbackSender) -> None:
    release = asyncio.Event()

    async def slow(_: Request, peer: Peer) -> None:
        await release.wait()
        await peer.answer()

    async with RawServer(slow) as receiver, RawServer() as other:
        waiting = [asyncio.create_task(sender.post(receiver.url, b"{}", HEADERS, owner="tenant")) for _ in range(12)]
        await eventually(lambda: receiver.open_count == callback_sender.PER_OWNER_MAX, "the owner's calls")
        reply = await sender.post(f"http://localhost:{other.port}/", b"{}", HEADERS, owner="tenant")
        assert reply.is_success
        release.set()
        assert all(reply.is_success for reply in await asyncio.gather(*waiting))
        assert receiver.open_count_highest == callback_sender.PER_OWNER_MAX
    assert not sender._slots


async def test_one_owners_receiver_that_hangs_holds_up_no_other_owner_at_the_same_host(sender: CallbackSender) -> None:
    release = asyncio.Event()

    async def hangs_at_one_path(request: Request, peer: Peer) -> None:
        if request.path.endswith("/hangs"):
            await release.wait()
        await peer.answer()

    async with RawServer(hangs_at_one_path) as receiver:
        owners = [f"tenant-{number}" for number in range(6) for _ in range(2 * callback_sender.PER_OWNER_MAX)]
        first = owners[: 2 * callback_sender.PER_OWNER_MAX]

        def hanging(owners: list[str]) -> list[asyncio.Task[CallbackReply]]:
            url = f"{receiver.url}/hangs"
            return [asyncio.create_task(sender.post(url, b"{}", HEADERS, owner=one)) for one in owners]

        waiting = hanging(first)
        await eventually(lambda: receiver.open_count == callback_sender.PER_OWNER_MAX, "the owner's calls")
        assert (await sender.post(f"{receiver.url}/well", b"{}", HEADERS, owner="other")).is_success
        waiting += hanging(owners[len(first) :])
        await eventually(lambda: receiver.open_count == callback_sender.PER_HOST_MAX, "the host's calls")
        release.set()
        assert all(reply.is_success for reply in await asyncio.gather(*waiting))
        assert receiver.open_count_highest == callback_sender.PER_HOST_MAX
    assert not sender._slots


async def test_a_slow_name_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callback_sender, "TOTAL_S", 0.2)
    given_up = threading.Event()
    answered: list[bool] = []

    def slow(host: str, port: int) -> Sequence[Any]:
        answered.append(given_up.wait(30))
        return ()

    sender = CallbackSender(PUBLIC_HTTP, "Tidegate/test", slow)
    assert (await sender.post("http://slow.example.com/", b"{}", HEADERS, owner="tenant")).failure == "timed_out"
    assert not answered, "it is given up while the name server is silent"
    given_up.set()
    await sender.close()


async def test_closing_waits_for_no_name_server_and_asks_none_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callback_sender, "RESOLVE_THREADS", 1)
    go = threading.Event()
    asked: list[str] = []

    def slow(host: str, port: int) -> Sequence[Any]:
        asked.append(host)
        go.wait(30)
        return ()

    sender = CallbackSender(PUBLIC_HTTP, "Tidegate/test", slow)
    hosts = ("a.example.com", "b.example.com")
    posts = [asyncio.create_task(sender.post(f"http://{host}/", b"{}", HEADERS, owner="tenant")) for host in hosts]
    await eventually(lambda: asked, "the first name to be asked for")
    await sender.close()
    assert not go.is_set()
    go.set()
    await asyncio.gather(*posts, return_exceptions=True)
    assert asked == ["a.example.com"]
