"""Clients that connect and say nothing, and clients that do not take their answers, hold no other client up."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.types import Send

from tests.support.processes import wait_until
from tests.upstream.raw_server import Peer, Request
from tests.web import stages
from tests.web.calls import upload
from tests.web.gateway_world import ASK, CHAT, GatewayWorld
from tests.web.server import NOWHERE, WebServer
from tests.web.upstream import STREAM_HEAD, answers, chat_with, chunk, chunked
from tidegate import metrics
from tidegate.core import ids
from tidegate.web.http import inbound
from tidegate.web.http.inbound import RATE_MIN_BYTES_PER_S, Fares, InboundConnection, InboundConnections
from tidegate.web.jobs.event_stream import EventStream
from tidegate.web.jobs.job_watch import JobWatch

# More than the kernel takes on both sides together for a client that reads nothing.
LARGE = b"x" * (16 << 20)
# Of the kernel's states of a TCP connection: closed, and closed by the other side.
_CLOSED_STATES = (7, 8)


def fares(taken_bytes: int, waiting_bytes: int = 100_000) -> Fares:
    return Fares(0.0, taken_bytes, waiting_bytes)


def looked_at(*looks: tuple[float, Fares]) -> list[bool]:
    connection = InboundConnection(("127.0.0.1", "1"), 0.0)
    return [connection.is_too_slow(now_s, unsent, 60.0) for now_s, unsent in looks]


def test_a_client_that_takes_nothing_is_too_slow() -> None:
    assert looked_at((0, fares(5)), (59, fares(5)), (60, fares(5))) == [False, False, True]
    assert looked_at((0, fares(5)), (50, fares(50)), (60, fares(50)), (110, fares(50))) == [False, False, True, True]


def test_a_client_that_takes_enough_is_never_too_slow() -> None:
    steady = [(float(now_s), fares(int(now_s * RATE_MIN_BYTES_PER_S * 1.1))) for now_s in range(0, 1_000, 10)]
    assert not any(looked_at(*steady))
    # On the loopback a client's window opens by 64 kB at once.
    in_steps = [(float(now_s), fares(now_s // 50 * 65_536)) for now_s in range(0, 1_000, 5)]
    assert not any(looked_at(*in_steps))


def test_a_client_that_takes_a_little_now_and_then_is_too_slow() -> None:
    trickle = [(float(now_s), fares(now_s * RATE_MIN_BYTES_PER_S // 2)) for now_s in range(0, 70, 5)]
    assert looked_at(*trickle)[12]


def test_an_event_stream_with_little_to_say_is_never_too_slow() -> None:
    assert not any(looked_at(*((float(now_s), fares(now_s, waiting_bytes=100)) for now_s in range(0, 1_000, 10))))


def stubborn(web: WebServer, path: str, body: dict[str, Any] | None = None) -> socket.socket:
    """A client that asks and then reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.connect(("127.0.0.1", web.port))
    content = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    )
    client.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content)
    return client


def open_blobs(web: WebServer) -> int:
    """How many blobs of this server are open; other tests' servers may leave theirs to the garbage collection."""
    count, root = 0, str(web.blobs.root)
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
            count += path.startswith(root) and "/blob_" in path.removeprefix(root)
        except OSError:
            continue
    return count


def is_closed(client: socket.socket, *, keep: bool = False) -> bool:
    """Whether the server has closed this connection; what it sent before is thrown away, unless it is to be kept there."""
    client.setblocking(False)
    if keep:
        return bool(client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _CLOSED_STATES)
    try:
        while client.recv(1 << 20):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def downloads(start_web: Any) -> Iterator[tuple[WebServer, list[socket.socket]]]:
    """Five downloads that no client reads, each as far as it gets."""
    web: WebServer = start_web(http={"client_timeout_s": 1.0}, worker={"grace_ms": 500})
    with web.client() as client, ExitStack() as stack:
        path = f"/v1/files/{upload(client, LARGE)}/content"
        clients = [stack.enter_context(stubborn(web, path)) for _ in range(5)]
        wait_until(lambda: open_blobs(web) == 5, timeout_s=20, what="the downloads to begin")
        yield web, clients


@pytest.mark.usefixtures("no_garbage_collection")
def test_a_download_that_is_not_read_is_cut_off(downloads: tuple[WebServer, list[socket.socket]]) -> None:
    web, clients = downloads
    wait_until(lambda: open_blobs(web) == 0, timeout_s=30, what="the downloads to be given up")
    wait_until(lambda: all(is_closed(client) for client in clients), timeout_s=30, what="the connections to close")


@pytest.mark.usefixtures("no_garbage_collection")
def test_a_client_that_leaves_a_download_leaves_no_descriptor(start_web: Any) -> None:
    web: WebServer = start_web()
    with web.client() as client:
        path = f"/v1/files/{upload(client, LARGE)}/content"
    sockets = [stubborn(web, path) for _ in range(3)]
    wait_until(lambda: open_blobs(web) == 3, timeout_s=20, what="the downloads to begin")
    for each in sockets:
        each.close()
    wait_until(lambda: open_blobs(web) == 0, timeout_s=20, what="the blobs to be closed")


def test_a_stop_does_not_wait_for_clients_that_read_nothing(start_web: Any) -> None:
    web: WebServer = start_web(worker={"grace_ms": 200})
    with web.client() as client:
        path = f"/v1/files/{upload(client, LARGE)}/content"
    with stubborn(web, path) as client:
        wait_until(lambda: open_blobs(web) == 1, timeout_s=20, what="the download to begin")
        web.run(web._listening.__aexit__(None, None, None))
        wait_until(lambda: is_closed(client), timeout_s=20, what="the connection to close")
        web.run(web.listen())


def test_a_slow_reader_gets_all_of_it(start_web: Any) -> None:
    web: WebServer = start_web(http={"client_timeout_s": 1.0})
    with web.client() as client:
        path = f"/v1/files/{upload(client, LARGE[: 4 << 20])}/content"
    with stubborn(web, path) as reader:
        reader.settimeout(20)
        received = 0
        pause = threading.Event()
        while received < 4 << 20:
            received += len(reader.recv(131_072))
            pause.wait(0.003)


def test_a_stream_that_is_not_read_is_cut_off(world: GatewayWorld) -> None:
    async def pour(request: Request, peer: Peer) -> None:
        await peer.send(STREAM_HEAD)
        while True:
            await peer.send(chunked(chunk("x" * 65_000)))

    world.start(pour, http={"client_timeout_s": 1.0})
    with stubborn(world.web, CHAT, {**ASK, "stream": True}) as client:
        wait_until(lambda: world.interactive() == (1, 0), timeout_s=20, what="the stream to begin")
        wait_until(lambda: world.interactive() == (0, 0), timeout_s=30, what="the stream to be given up")
        wait_until(lambda: is_closed(client), timeout_s=30, what="the connection to close")
    wait_until(world.upstreams[0].posts[0].gone.is_set, timeout_s=20, what="the upstream to see it")


def test_a_reader_of_events_that_does_not_keep_up_is_cut_off_and_goes_on_later(
    start_web: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 MB of events: what was read for a client that takes nothing stays small, and no event is lost to it."""
    web: WebServer = start_web(http={"client_timeout_s": 1.0}, upstream={"url": NOWHERE})
    count, place = 24, "/v1/completion-batch/default/prod"
    items = [{"resourceId": "m", "request": {"messages": []}}] * count
    with web.client() as client:
        batch_id = client.post(place, json={"type": "ASYNC", "items": items}).json()["batchId"]
        stages.start(web, batch_id, count)
        body = {"status_code": 200, "request_id": "r", "body": {"text": "x" * (1 << 20)}}
        lines = [
            {"id": ids.item_id(batch_id, n), "custom_id": str(n), "response": body, "error": None} for n in range(count)
        ]
        stages.finish(web, batch_id, {n: json.dumps(line).encode() + b"\n" for n, line in enumerate(lines)})
        stages.publish(web, batch_id)
        read = counted_reads(web, monkeypatch)
        path = f"{place}/{batch_id}/events"
        with stubborn(web, path) as reader:
            wait_until(lambda: read[0] > 0, timeout_s=20, what="the events to begin")
            wait_until(lambda: is_closed(reader, keep=True), timeout_s=30, what="the connection to close")
        # Results are read once for the events that say what ran; the events with the results themselves stop where the reader does.
        assert read[0] < 1.75 * (count << 20)
        with client.stream("GET", path, headers={"Last-Event-ID": str(count)}) as answer:
            found = [line for line in answer.iter_lines() if line.startswith("id: ")]
        assert found == [f"id: {number}" for number in range(count + 1, 2 * count + 3)]


@pytest.mark.parametrize(("door", "last_word"), [("openai", b"event: reset"), ("completion-batch", b"data: [ERROR]")])
def test_a_reader_of_events_that_was_late_is_asked_to_go_on_from_its_last_event(
    start_web: Any, monkeypatch: pytest.MonkeyPatch, door: str, last_word: bytes
) -> None:
    """What it gets ends in that word, and the rest follows behind its last id, so every event comes once."""
    web: WebServer = start_web(upstream={"url": NOWHERE})
    patience_s, begun_s = 0.5, list[float]()
    say = EventStream._say

    async def watched(stream: EventStream, send: Send, piece: bytes) -> None:
        begun_s.append(time.monotonic())
        await say(stream, send, piece)
        begun_s.clear()

    def has_waited() -> bool:
        return any(time.monotonic() - one > 2 * patience_s for one in begun_s)

    count, place, long = 12, "/v1/completion-batch/default/prod", "x" * (1 << 20)
    with web.client() as client:
        items = [{"resourceId": "m", "request": {"messages": []}}] * count
        batch_id = client.post(place, json={"type": "ASYNC", "items": items}).json()["batchId"]
        stages.start(web, batch_id, count)
        # Events of one door repeat the name of an item, those of the other its answer.
        body = {"status_code": 200, "request_id": "r", "body": {"text": long}}
        names = [(n, ids.item_id(batch_id, n)) for n in range(count)]
        lines = {n: {"id": name, "custom_id": f"{n} {long}", "response": body, "error": None} for n, name in names}
        stages.finish(web, batch_id, {n: json.dumps(line).encode() + b"\n" for n, line in lines.items()})
        stages.publish(web, batch_id)
        path = f"/v1/batches/{batch_id}/events" if door == "openai" else f"{place}/{batch_id}/events"
        everything = client.get(path).content
        with monkeypatch.context() as impatient:
            impatient.setattr(JobWatch, "reader_patience_s", patience_s)
            impatient.setattr(EventStream, "_say", watched)
            with stubborn(web, path) as reader:
                wait_until(has_waited, 30, "the server to wait for its reader")
                reader.settimeout(20)
                taken = bytearray()
                # The connection itself is kept for another request.
                while not taken.endswith(b"\r\n0\r\n\r\n"):
                    taken += reader.recv(1 << 20)
                received = bytes(taken)
        assert last_word in received[-500:]
        seen = event_ids(received)
        if door == "openai":
            assert seen.pop() == seen[-1], "the reset has the id of the event before it"
        rest = client.get(path, headers={"Last-Event-ID": seen[-1].decode()}).content
        assert seen + event_ids(rest) == event_ids(everything)
        assert event_ids(rest)


def event_ids(received: bytes) -> list[bytes]:
    return re.findall(rb"^id: ([0-9]+)$", received, re.MULTILINE)


def counted_reads(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes of blobs were read from now on."""
    read, stream = [0], web.blobs.stream

    async def counted(*place: Any) -> AsyncIterator[bytes]:
        async for chunk_read in stream(*place):
            read[0] += len(chunk_read)
            yield chunk_read

    monkeypatch.setattr(web.blobs, "stream", counted)
    return read


def half_an_upload(web: WebServer) -> tuple[socket.socket, bytes]:
    body = b'--XX\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    body += b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\n\r\n--XX--\r\n'
    head = b"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=XX\r\n"
    client = socket.create_connection(("127.0.0.1", web.port), timeout=30)
    client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body[:40])
    return client, body[40:]


@pytest.mark.parametrize(
    "first_bytes", [b"", b"GET /healthz HTTP/1.1\r\nHo", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"]
)
def test_silent_connections_keep_no_client_out(start_web: Any, first_bytes: bytes) -> None:
    """Many more than there may be, silent from the start, in the middle of a head, or after an answer."""
    web: WebServer = start_web(server={"connections_max": 32})
    with ExitStack() as stack:
        uploading, rest = half_an_upload(web)
        stack.enter_context(uploading)
        for _ in range(100):
            silent = stack.enter_context(socket.socket())
            silent.setblocking(False)
            silent.connect_ex(("127.0.0.1", web.port))
            if first_bytes:
                wait_until(lambda: _sent(silent, first_bytes), timeout_s=20, what="the first bytes to go out")  # noqa: B023
        with web.client() as client:
            assert upload(client)
        uploading.sendall(rest)
        assert uploading.recv(65_536).startswith(b"HTTP/1.1 200 ")


def test_an_answer_that_is_still_being_taken_is_not_cut_off_to_make_room(world: GatewayWorld) -> None:
    body = chat_with("x" * (12 << 20))
    world.start(answers(body), server={"connections_max": 32})
    with ExitStack() as stack:
        reader = stack.enter_context(stubborn(world.web, CHAT, ASK))
        wait_until(lambda: world.upstreams[0].posts, timeout_s=20, what="the call upstream")
        wait_until(lambda: world.interactive() == (0, 0), timeout_s=20, what="the call to be answered")
        # It is the one that is known the longest.
        seen = metrics.REGISTRY.get_sample_value
        wait_until(lambda: seen("tidegate_client_connections"), timeout_s=20, what="the connection to be seen")
        before = closed_to_make_room()
        for _ in range(40):
            silent = stack.enter_context(socket.socket())
            silent.setblocking(False)
            silent.connect_ex(("127.0.0.1", world.web.port))
        wait_until(lambda: closed_to_make_room() > before, timeout_s=20, what="idle connections to be closed")
        reader.settimeout(20)
        received = bytearray()
        while not received.endswith(body[-20:]):
            piece = reader.recv(1 << 20)
            assert piece, "the answer was cut off"
            received += piece
        assert len(received) > len(body)


def test_of_idle_connections_those_are_closed_that_were_idle_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound, "IDLE_S_MIN", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:

        def connected() -> tuple[socket.socket, socket.socket]:
            client = stack.enter_context(socket.create_connection(listener.getsockname()))
            client.settimeout(20)
            return client, stack.enter_context(listener.accept()[0])

        def silent_s(accepted: socket.socket) -> float:
            state = inbound._fares(accepted)
            return 0.0 if state is None else state.silent_s

        watch = InboundConnections(listener.getsockname()[1], 8, 5_000.0, set())
        # Of this one's answer some is still in the kernel: it is not idle.
        _, taking = connected()
        taking.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                taking.send(bytes(65_536))
        old = [connected() for _ in range(6)]
        watch.look(0.0)
        wait_until(lambda: all(silent_s(accepted) > 0 for _, accepted in old), 20, "the kernel's clock to move")
        young, _ = connected()
        watch.look(1_000.0)
        assert [client.recv(1) for client, _ in old] == [b""] * 6
        assert inbound._fares(taking) is not None, "it is open"
        young.setblocking(False)
        with pytest.raises(BlockingIOError):
            young.recv(1)
        stack.close()
        watch.look(2_000.0)


def test_an_idle_connection_on_which_a_request_arrives_meanwhile_is_not_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        busy: set[tuple[str, str]] = set()
        watch = InboundConnections(listener.getsockname()[1], 32, 60.0, busy)
        with socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as accepted:
            client.settimeout(20)
            watch.look(0.0)
            chosen = [(os.fstat(accepted.fileno()).st_ino, accepted.fileno())]
            busy.add(("127.0.0.1", str(client.getsockname()[1])))
            assert watch._close_idle(chosen) == 0
            busy.clear()
            assert watch._close_idle(chosen) == 1
            assert client.recv(1) == b""
        watch.look(1.0)


def closed_to_make_room() -> int:
    return metrics.counted(metrics.client_connections_closed).get("crowded", 0)


def test_a_download_is_asked_for_with_a_body(start_web: Any) -> None:
    """No client of ours sends one, but it is answered all the same, and at once."""
    web: WebServer = start_web()
    with web.client() as client:
        path = f"/v1/files/{upload(client, LARGE[: 1 << 20])}/content"
        answer = client.request("GET", path, content=b"x" * 500_000)
        assert answer.content == LARGE[: 1 << 20]


def _sent(client: socket.socket, data: bytes) -> bool:
    try:
        return client.send(data) == len(data)
    except OSError:
        return False


def test_a_connection_that_says_nothing_is_closed(start_web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.web.http.serving.HEADER_WAIT_MS", 200)
    web: WebServer = start_web()
    with ExitStack() as stack:
        for first_bytes in (b"", b"GET /healthz HTTP/1.1\r\nHo", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", web.port)))
            client.sendall(first_bytes)
            wait_until(lambda: is_closed(client), timeout_s=20, what="the connection to close")  # noqa: B023


def test_a_download_takes_little_memory_of_the_blobs(start_web: Any, tmp_path: Path) -> None:
    web: WebServer = start_web()
    with web.client() as client:
        file_id = upload(client, LARGE[: 1 << 20])
        blob_id = web.statement("select blob_id from extents where file_id = ?", file_id)[0][0]

        async def largest() -> int:
            return max([len(piece) async for piece in web.blobs.stream(blob_id, 0, 1 << 20)])

        assert web.run(largest()) <= 131_072
        assert httpx2.get(f"{web.url}/v1/files/{file_id}/content").content == LARGE[: 1 << 20]
