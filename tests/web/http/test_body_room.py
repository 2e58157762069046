"""The bodies that one process holds in memory are bounded, over all callers and for one tenant."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.support.processes import wait_until
from tests.upstream.raw_server import CHAT as ANSWER
from tests.upstream.raw_server import Peer, Request
from tests.web.calls import is_error, upload
from tests.web.gateway_world import ASK, CHAT, MESSAGES, GatewayWorld
from tidegate.core.errors import ApiProblem
from tidegate.web.http.intake import BodyRoom

MIB = 1 << 20
LARGE = {**ASK, "messages": [{"role": "user", "content": "x" * (900 << 10)}]}


class Held:
    """A gateway whose model server answers only when the test lets it, with room for four large bodies, two of them for one tenant."""

    def __init__(self, world: GatewayWorld) -> None:
        self.world = world
        self._go = threading.Event()

        async def wait(request: Request, peer: Peer) -> None:
            await asyncio.to_thread(self._go.wait)
            await peer.answer(200, ANSWER)

        world.start(wait, server={"bodies_bytes_max": 4 * MIB}, gateway={"body_bytes_max": MIB})
        self.keys = [world.web.make_key(f"tenant-{number}") for number in range(3)]
        self._threads = ThreadPoolExecutor(8)

    def send(self, tenant: int, body: dict[str, Any] = LARGE, path: str = CHAT) -> httpx2.Response:
        with self.world.web.client(self.keys[tenant]) as client:
            return client.post(path, json=body)

    def hold(self, tenant: int) -> Future[httpx2.Response]:
        """A call that is under way until `go_on`."""
        count = len(self.world.upstreams[0].posts)
        sent = self._threads.submit(self.send, tenant)
        wait_until(lambda: len(self.world.upstreams[0].posts) > count, timeout_s=20, what="the call upstream")
        return sent

    def resume_timeout(self) -> None:
        self._go.set()

    def close(self) -> None:
        self._go.set()
        self._threads.shutdown()


@pytest.fixture
def held(world: GatewayWorld) -> Iterator[Held]:
    made = Held(world)
    yield made
    made.close()


def test_one_tenant_may_have_half_of_the_room(held: Held) -> None:
    calls = [held.hold(0), held.hold(0)]
    refused = held.send(0)
    is_error(refused, {"status": 429, "code": "request_bytes_exceeded"})
    assert refused.headers["retry-after"] == "1"
    is_small = {**LARGE, "messages": [{"role": "user", "content": "x"}]}
    with held.world.web.client(held.keys[0]) as client:
        assert upload(client, b"{}\n" * MIB), "uploads are not held in memory"
        assert client.get("/v1/files").status_code == 200
    calls += [held.hold(1), held.hold(1)]
    held.resume_timeout()
    assert [call.result().status_code for call in calls] == [200] * 4
    assert held.send(0).status_code == held.send(0, is_small).status_code == 200


def test_all_tenants_share_the_room(held: Held) -> None:
    calls = [held.hold(tenant) for tenant in (0, 0, 1, 1)]
    refused = held.send(2)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_busy")
    assert refused.headers["retry-after"] == "1"
    in_other_words = held.send(2, {**LARGE, "max_tokens": 5}, MESSAGES)
    assert (in_other_words.status_code, in_other_words.json()["type"]) == (503, "error")
    held.resume_timeout()
    assert [call.result().status_code for call in calls] == [200] * 4
    assert held.send(2).status_code == 200


def test_refused_requests_and_clients_that_left_take_no_room(held: Held) -> None:
    for _ in range(8):
        assert held.send(0, {"model": "unknown", "messages": LARGE["messages"]}).status_code == 404
    body = json.dumps(LARGE).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {held.keys[0]}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    for cut in (len(body), len(body) - 1):
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", held.world.web.port)) as client:
                client.sendall(head.encode() + body[:cut])
                if cut == len(body):
                    wait_until(lambda: held.world.interactive()[0], timeout_s=20, what="the call upstream")
            wait_until(lambda: held.world.interactive() == (0, 0), timeout_s=20, what="the call to end")
    held.resume_timeout()

    def answered() -> bool:
        return held.send(0).status_code == 200

    wait_until(answered, timeout_s=20, what="room again")


def in_chunks(body: bytes) -> Iterator[bytes]:
    for at in range(0, len(body), 65_536):
        yield body[at : at + 65_536]


def test_a_body_without_a_length_takes_room_as_it_comes(held: Held) -> None:
    calls = [held.hold(0), held.hold(0)]
    with held.world.web.client(held.keys[0]) as client:
        headers = {"Content-Type": "application/json"}
        body = json.dumps(LARGE).encode()
        refused = client.post(CHAT, content=in_chunks(body), headers=headers)
        is_error(refused, {"status": 429, "code": "request_bytes_exceeded"})
        held.resume_timeout()
        assert [call.result().status_code for call in calls] == [200] * 2
        assert client.post(CHAT, content=in_chunks(body), headers=headers).status_code == 200


def test_a_body_that_is_held_must_be_there_in_time(held: Held) -> None:
    web = held.world.web
    body = json.dumps(LARGE).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {held.keys[0]}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", web.port), timeout=20) as client:
        client.sendall(head.encode() + body[:-1])
        wait_until(lambda: _has_begun(held), timeout_s=20, what="the body to be read")
        web.clock.ahead_ms += 301_000
        # The server may have given up before this byte comes, or because it came: the answer is the same.
        with contextlib.suppress(ConnectionError):
            client.sendall(body[-1:])
        assert client.recv(65_536).startswith(b"HTTP/1.1 408 ")


def _has_begun(held: Held) -> bool:
    """Whether the server has begun to read a body that it will hold."""
    return bool(held.world.web.app.room.taken_bytes)


@pytest.mark.parametrize("other", ["", "b"])
def test_the_largest_body_fits_into_a_room_that_is_too_small(other: str) -> None:
    room = BodyRoom(10, 100)
    room.reserve_room("a", 100)
    with pytest.raises(ApiProblem):
        room.reserve_room(other or "a", 1)
    room.release_room("a", 100)
    room.reserve_room("b", 100)
