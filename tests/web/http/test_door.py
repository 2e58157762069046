"""The outer wall: ids on every answer, unknown routes, methods, health, and faults of ours that say nothing."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace
from starlette.requests import Request

from tests.support.ports import HandClock, PushedClock
from tests.support.processes import wait_until
from tests.support.proxy import WiredDatabase
from tests.web.calls import LINES, create, is_error, upload
from tests.web.server import WebServer
from tidegate.core import window
from tidegate.stages import accept
from tidegate.web.health import Health, HealthCheck


def test_every_answer_has_an_id_of_ours(client: httpx2.Client) -> None:
    seen = set()
    for path in ("/healthz", "/readyz", "/v1/files", "/v1/nothing", "/v1/files/x", "/v1/models"):
        answer = client.get(path, headers={"X-Request-Id": "theirs"})
        assert answer.headers.get_list("x-request-id") == [answer.headers["x-request-id"]]
        assert answer.headers["x-request-id"].startswith("req_")
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        seen.add(answer.headers["x-request-id"])
    assert len(seen) == 6


def test_unknown_urls_and_methods(client: httpx2.Client) -> None:
    answer = client.get("/v1/nothing")
    is_error(answer, {"status": 404, "says": "Unknown request URL: GET /v1/nothing."})
    is_error(client.get("/batches"), {"status": 404, "says": "end the client's base URL with it."})
    is_error(client.get("/v1/v1/messages"), {"status": 404, "says": "It has /v1 twice"})
    answer = client.put("/v1/files")
    is_error(answer, {"status": 405, "code": "method_not_allowed"})
    assert sorted(answer.headers["allow"].split(", ")) == ["GET", "HEAD", "POST"]


@pytest.mark.parametrize(
    ("encodings", "refused"),
    [
        (("chunked",), 0),
        (("Chunked",), 0),
        (("gzip, chunked",), 501),
        (("identity, chunked",), 501),
        (("chunked, chunked",), 501),
        (("chunked", "chunked"), 400),
    ],
)
def test_only_plain_chunks_are_read(web: WebServer, encodings: tuple[str, ...], refused: int) -> None:
    body = b'{"purpose":"batch"}'
    head = "POST /v1/batches HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += "".join(f"Transfer-Encoding: {value}\r\n" for value in encodings)
    with socket.create_connection(("127.0.0.1", web.port), timeout=30) as connection:
        connection.sendall(head.encode() + b"\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    code = {400: b"duplicate_header", 501: b"unsupported_transfer_encoding"}.get(refused, b"input_file_id")
    assert int(answer.split(b" ", 2)[1]) == (refused or 400)
    assert code in answer


@pytest.mark.parametrize(
    "name", ["Authorization", "Content-Type", "Idempotency-Key", "X-Api-Key", "X-Tidegate-Control"]
)
def test_a_header_of_which_one_counts_is_sent_once(web: WebServer, name: str) -> None:
    head = f"GET /v1/files HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{name}: a\r\n{name}: b\r\n\r\n"
    with socket.create_connection(("127.0.0.1", web.port), timeout=30) as connection:
        connection.sendall(head.encode())
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"duplicate_header" in answer


@pytest.mark.parametrize(("count", "bytes_more", "status"), [(96, 0, 200), (97, 0, 431), (9, 48_000, 431)])
def test_so_many_headers_are_taken(web: WebServer, count: int, bytes_more: int, status: int) -> None:
    head = "GET /v1/files HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += "".join(f"X-{number}: {'x' * (bytes_more // count)}\r\n" for number in range(count - 2))
    with socket.create_connection(("127.0.0.1", web.port), timeout=30) as connection:
        connection.sendall(head.encode() + b"\r\n")
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert int(answer.split(b" ", 2)[1]) == status


def test_ready_says_what_is_wrong(start_web: Any) -> None:
    web: WebServer = start_web()
    with web.client() as client:
        assert client.get("/healthz").json() == {"status": "ok"}
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")
        assert ready.json()["checks"] == {"store": "ok", "blobs": "ok", "keys": "ok", "worker": "ok"}
        web.problems["worker"] = "no upstream answers"
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["checks"]["worker"]) == (503, "no upstream answers")
        web.problems["worker"] = None
        shutil.rmtree(web.blobs.root)
        web.clock.ahead_ms += 1_001
        ready = client.get("/readyz")
        assert ready.status_code == 503
        assert "directory" in ready.json()["checks"]["blobs"]
        assert ready.json()["checks"]["store"] == "ok"
        assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize(("client", "shown"), [("127.0.0.1", "no upstream answers"), ("203.0.113.9", "not ready")])
def test_only_this_machine_reads_why_a_process_is_not_ready(web: WebServer, client: str, shown: str) -> None:
    context = replace(web.context, readiness=lambda: {"worker": "no upstream answers"})
    health = Health(context, serves_api=True)
    answer = web.run(health.ready(Request({"type": "http", "client": (client, 9), "headers": []})))
    assert (answer.status_code, json.loads(bytes(answer.body))["checks"]["worker"]) == (503, shown)


def test_a_part_of_the_process_is_asked_at_most_once_a_second() -> None:
    clock, asked = HandClock(), list[float]()

    async def ask() -> None:
        asked.append(clock.monotonic)

    async def look() -> None:
        check = HealthCheck("it", ask, clock)
        for wait_ms in (0, 0, 999, 1, 0):
            clock.monotonic += wait_ms
            assert await check.reason() is None

    asyncio.run(look())
    assert [at - asked[0] for at in asked] == [0, 1_000]


def test_a_fault_of_ours_is_shown_by_its_id_alone(start_web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    web: WebServer = start_web()

    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret detail")

    with web.client() as client:
        client.get("/v1/files")
        monkeypatch.setattr(web.store, "list_files", broken)
        answer = client.get("/v1/files")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert answer.headers["x-request-id"] in answer.json()["error"]["message"]
    assert "secret" not in answer.text


def test_blobs_that_are_gone_are_a_503(start_web: Any) -> None:
    web: WebServer = start_web()
    with web.client() as client:
        file_id = upload(client)
        shutil.rmtree(web.blobs.root)
        answers = [
            client.post("/v1/files", files={"file": ("a", LINES * 10_000)}, data={"purpose": "batch"}),
            client.get(f"/v1/files/{file_id}/content"),
        ]
        for answer in answers:
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "5"
            assert answer.json()["error"]["type"] == "server_error"
            assert str(web.blobs.root) not in answer.text
        assert client.get(f"/v1/files/{file_id}").status_code == 200
        assert web.statement("select count(*) from blobs where state = 'writing'") == [(0,)]


def test_a_store_that_is_gone_is_a_503_and_comes_back(
    start_web: Any, wired_database: WiredDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "REPLAY_MS", 300)
    url, proxy = wired_database
    web: WebServer = start_web(url)
    with web.client() as client:
        file_id = upload(client)
        proxy.refuse()
        proxy.close_links()
        body = {"input_file_id": file_id, "endpoint": "/v1/embeddings"}
        answers = [
            client.get("/v1/files"),
            client.post("/v1/batches", json=body),
            client.post("/v1/files", files={"file": ("a", LINES)}, data={"purpose": "batch"}),
        ]
        for answer in answers:
            assert answer.status_code == 503, answer.text
            assert answer.headers["retry-after"] == "5"
            assert "postgres" not in answer.text.lower()
        proxy.heal()
        wait_until(lambda: client.get("/v1/files").status_code == 200, what="the store to be back")
        assert create(client, file_id)["status"] == "validating"
        assert len(client.get("/v1/batches").json()["data"]) == 1
        assert len(client.get("/v1/files").json()["data"]) == 1


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [
        ("24h", 86_400_000),
        ("90m", 5_400_000),
        ("7d", 604_800_000),
        ("1h30m", 5_400_000),
        ("1d1h1m1s", 90_061_000),
        ("999999d", 999_999 * 86_400_000),
    ],
)
def test_durations(text: str, duration_ms: int) -> None:
    assert window.parse(text) == duration_ms
    assert window.parse(window.spoken(duration_ms)) == duration_ms


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "24",
        "-1h",
        "+1h",
        "9e9h",
        "1.5h",
        "0h",
        "0d0s",
        "1m1h",
        "1h1h",
        " 1h",
        "1h ",
        "1H",
        "1000000d",
        "h",
        "1h\n",
    ],
)
def test_no_durations(text: str) -> None:
    assert window.parse(text) is None


@pytest.mark.anyio
async def test_a_part_that_is_frozen_is_not_waited_for() -> None:
    thawed = asyncio.Event()
    asked = []

    async def ask() -> None:
        asked.append(1)
        await thawed.wait()

    clock = PushedClock()
    check = HealthCheck("the store", ask, clock)
    reasons = await asyncio.gather(check.reason(), check.reason())
    assert list(reasons) == ["the store did not answer within 0.8 s"] * 2
    assert asked == [1], "the first question is still open"
    thawed.set()
    assert await check.reason() is None
    assert asked == [1]
    clock.ahead_ms += 1_001
    assert await check.reason() is None
    assert asked == [1, 1]


def test_ready_answers_while_the_database_is_frozen(start_web: Any, wired_database: WiredDatabase) -> None:
    url, proxy = wired_database
    web: WebServer = start_web(url)
    with web.client() as client:
        assert client.get("/readyz").status_code == 200
        proxy.blackhole()
        web.clock.ahead_ms += 1_001
        for _ in range(2):
            ready = client.get("/readyz")
            assert (ready.status_code, ready.json()["checks"]["blobs"]) == (503, "ok")
            assert "did not answer within" in ready.json()["checks"]["store"]
        assert client.get("/healthz").status_code == 200
        proxy.heal()
