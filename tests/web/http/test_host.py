"""The Host header is checked on every listener and decides nothing: neither a path upstream nor who may read metrics."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from tests.support.processes import free_port
from tests.web.gateway_world import ASK, CHAT, MESSAGES, GatewayWorld
from tests.web.server import settings_with
from tidegate.web.gateway.gateway import ENDPOINTS
from tidegate.web.scrape import scraped

HOSTILE = [
    b"localhost/v1/embeddings?", b"localhost/v1/embeddings#", b"localhost?", b"localhost#", b"localhost/", b"me@localhost",
    b"me:secret@localhost", b"localhost\\x", b"local host", b"localhost\x01", b"localhost\x7f", b"localhost\xe9", b"localhost:x",
    b"localhost:99999", b"localhost:80:80", b"[::1", b"::1", b"[::1]x", b"[localhost]", b"localhost,elsewhere", b"a" * 300,
    b"http://localhost", b"localhost%2fv1", b"localhost;x", b"<script>",
]  # fmt: skip
PLAIN = [
    b"localhost",
    b"LOCALHOST:8080",
    b"127.0.0.1",
    b"127.0.0.1:1",
    b"[::1]",
    b"[::1]:65535",
    b"localhost.",
    b"localhost:",
]


def asked(port: int, method: str, path: str, host: bytes | None, body: bytes = b"", version: bytes = b"1.1") -> bytes:
    """Return the whole answer to a request with exactly this Host."""
    head = b"%b %b HTTP/%b\r\n" % (method.encode(), path.encode(), version)
    if host is not None:
        head += b"Host: %b\r\n" % host
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(head + body)
        while piece := connection.recv(65_536):
            answer += piece
    return answer


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_no_host_chooses_the_path_upstream(world: GatewayWorld, endpoint: str) -> None:
    world.start()
    other = "/v1/embeddings" if endpoint != "/v1/embeddings" else "/v1/completions"
    more = {} if endpoint in (CHAT, MESSAGES) else {"input": "hi", "prompt": "hi"}
    body = json.dumps({**ASK, "max_tokens": 5, **more}).encode()
    for host in (f"localhost{other}?".encode(), f"localhost{other}#".encode(), f"x@localhost{other}?".encode()):
        answer = asked(world.web.port, "POST", endpoint, host, body)
        assert status(answer) == 400
        assert b"invalid_host" in answer
    assert world.upstreams[0].posts == []
    asked(world.web.port, "POST", endpoint, b"localhost", body)
    sent_as = CHAT if endpoint == MESSAGES else endpoint
    assert [post.path for post in world.upstreams[0].posts] == [sent_as]


def test_a_hostile_host_is_refused_at_every_door_and_a_plain_one_is_not(world: GatewayWorld) -> None:
    port = world.start().web.port
    for host in HOSTILE:
        for path in ("/healthz", "/readyz", "/metrics", "/v1/models", "/v1/nothing"):
            assert status(asked(port, "GET", path, host)) == 400, (path, host)
    for host in PLAIN:
        assert status(asked(port, "GET", "/v1/models", host)) == 200, host
        assert status(asked(port, "GET", "/metrics", host)) == 200, host
    assert status(asked(port, "GET", "/healthz", None, version=b"1.0")) == 200
    for missing in (None, b""):
        answer = asked(port, "GET", "/healthz", missing)
        assert status(answer) == 400, "HTTP/1.1 needs a Host"
        assert b"invalid_host" in answer
    assert status(asked(port, "GET", "/healthz", b"elsewhere.example")) == 200


def test_metrics_are_not_shown_to_a_name_that_was_made_to_point_here(world: GatewayWorld) -> None:
    port = world.start().web.port
    assert status(asked(port, "GET", "/metrics", b"attacker.example")) == 404
    assert status(asked(port, "GET", "/metrics", b"localhost")) == 200


@pytest.mark.anyio
async def test_the_metrics_listener_checks_host_too() -> None:
    port = free_port()

    async def ask(host: bytes | None) -> int:
        return status(await asyncio.to_thread(asked, port, "GET", "/metrics", host))

    async with scraped(settings_with(metrics={"port": port})):
        for host in HOSTILE:
            assert await ask(host) == 400, host
        for host in PLAIN:
            assert await ask(host) == 200, host
        assert await ask(b"attacker.example") == 403
        assert await ask(None) == 400
