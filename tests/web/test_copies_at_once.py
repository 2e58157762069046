"""Copies of one create that come while the first is still under way, at every door that takes an Idempotency-Key, on both stores."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import msgspec
import pytest

from tests.support.processes import wait_until
from tests.support.sdks import anthropic, openai
from tests.web.calls import LINES, upload
from tests.web.server import WebServer, model_at
from tidegate import failpoints
from tidegate.core.errors import ApiProblem
from tidegate.stages import accept, running_keys

ORG = "acme"
HI = [{"role": "user", "content": "hi"}]
KEY = "one-create"


class Create(msgspec.Struct, frozen=True):
    """One create as bytes: the same path, type and body are the same create."""

    path: str
    content_type: str
    body: bytes

    def send(self, client: httpx2.Client) -> httpx2.Response:
        headers = {"Idempotency-Key": KEY, "Content-Type": self.content_type}
        return client.post(self.path, content=self.body, headers=headers)


def as_json(path: str, body: dict[str, Any]) -> Create:
    return Create(path, "application/json", json.dumps(body).encode())


def as_form(path: str, field: str, data: bytes) -> Create:
    boundary = "copies"
    lines = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'.encode()
        if field == "file"
        else b"",
        f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"; filename="in.jsonl"\r\n\r\n'.encode(),
        data,
        f"\r\n--{boundary}--\r\n".encode(),
    ]
    return Create(path, f"multipart/form-data; boundary={boundary}", b"".join(lines))


def completion_batch(client: httpx2.Client, text: str) -> Create:
    items = [{"resourceId": "m", "request": {"messages": [{"role": "user", "content": text}]}}]
    return as_json(f"/v1/completion-batch/{ORG}/prod", {"type": "ASYNC", "items": items})


def message_batch(client: httpx2.Client, text: str) -> Create:
    params = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": text}]}
    return as_json("/v1/messages/batches", {"requests": [{"custom_id": "a", "params": params}]})


def batch(client: httpx2.Client, text: str) -> Create:
    file_id = client.get("/v1/files").json()["data"][-1]["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/embeddings", "metadata": {"text": text}}
    return as_json("/v1/batches", {**body, "completion_window": "24h"})


def file(client: httpx2.Client, text: str) -> Create:
    return as_form("/v1/files", "file", LINES.replace(b'"x"', json.dumps(text).encode()))


def begun_upload(client: httpx2.Client, text: str) -> Create:
    body = {"bytes": 9, "filename": text, "mime_type": "application/jsonl", "purpose": "batch"}
    return as_json("/v1/uploads", body)


def part(client: httpx2.Client, text: str) -> Create:
    begun = as_json("/v1/uploads", {"bytes": 9, "filename": "f", "mime_type": "text/plain", "purpose": "batch"})
    headers = {"Idempotency-Key": "its-upload", "Content-Type": begun.content_type}
    upload_id = client.post(begun.path, content=begun.body, headers=headers).json()["id"]
    return as_form(f"/v1/uploads/{upload_id}/parts", "data", text.encode())


def webhook(client: httpx2.Client, text: str) -> Create:
    return as_json(
        "/v1/webhook_endpoints", {"name": text, "url": "https://example.com/h", "event_types": ["batch.completed"]}
    )


DOORS: dict[str, Callable[[httpx2.Client, str], Create]] = {
    "completion-batch": completion_batch,
    "message batches": message_batch,
    "batches": batch,
    "files": file,
    "uploads": begun_upload,
    "parts": part,
    "webhooks": webhook,
}


def response(text: str) -> Create:
    return as_json("/v1/responses", {"model": "m", "input": text, "background": True})


@pytest.fixture(scope="module")
def web_settings() -> dict[str, Any]:
    return {"models": {"m": model_at()}}


@pytest.fixture
def web(web_on_both: WebServer) -> WebServer:
    return web_on_both


class HalfSent:
    """A create of which the last byte is not sent yet."""

    def __init__(self, web: WebServer, key: str, create: Create) -> None:
        self._rest = create.body[-1:]
        self._connection = socket.create_connection(("127.0.0.1", web.port), timeout=30)
        head = (
            f"POST {create.path} HTTP/1.1\r\nHost: 127.0.0.1:{web.port}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: {create.content_type}\r\nContent-Length: {len(create.body)}\r\n"
            f"Idempotency-Key: {KEY}\r\nConnection: close\r\n\r\n"
        )
        self._connection.sendall(head.encode() + create.body[:-1])

    def finish(self) -> tuple[int, dict[str, Any]]:
        self._connection.sendall(self._rest)
        received = b""
        while piece := self._connection.recv(65_536):
            received += piece
        self._connection.close()
        head, _, body = received.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])

    def leave(self) -> None:
        self._connection.close()


def is_asked_to_come_again(answer: httpx2.Response) -> None:
    assert answer.status_code == 409, answer.text
    body = answer.json()
    assert "idempotency_in_progress" in json.dumps(body).lower(), body
    assert answer.headers["retry-after"] == str(running_keys.RETRY_AFTER_S)
    assert "x-should-retry" not in answer.headers, "the SDKs are not kept from sending it again"


def until_under_way(web: WebServer) -> None:
    """Return when the first request has its key: what comes then is a copy."""

    async def is_held() -> bool:
        return bool(web.app.running_keys.names())

    wait_until(lambda: web.run(is_held()), 30, "a request to hold its key")


@pytest.mark.parametrize("door", DOORS)
def test_a_copy_is_asked_to_come_again_while_the_first_runs(
    web: WebServer, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_keys, "WAIT_S", 0.05)
    key = web.make_key(ORG)
    client = web.client(key)
    upload(client)
    create, other = (DOORS[door](client, text) for text in ("same", "another"))
    first = HalfSent(web, key, create)
    until_under_way(web)
    is_asked_to_come_again(create.send(client))
    status, made = first.finish()
    assert status in (200, 201), made
    again = create.send(client)
    assert again.status_code == status, again.text
    name = "batchId" if door == "completion-batch" else "id"
    assert again.json()[name] == made[name]
    assert other.send(client).status_code == 422


@pytest.mark.parametrize("door", ["batches", "message batches"])
def test_the_sdks_send_a_copy_again_by_themselves(web: WebServer, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_keys, "WAIT_S", 0.05)
    conflicts: queue.SimpleQueue[ApiProblem] = queue.SimpleQueue()
    still_running = running_keys._still_running

    def noted() -> ApiProblem:
        conflicts.put(still_running())
        return still_running()

    monkeypatch.setattr(running_keys, "_still_running", noted)
    key = web.make_key(ORG)
    client = web.client(key)
    upload(client)
    create = DOORS[door](client, "same")
    # The lines of a message batch are kept as they were sent, so a copy has the same bytes.
    as_sent = json.dumps(json.loads(create.body), separators=(",", ":")).encode()
    create = msgspec.structs.replace(create, body=as_sent)
    first = HalfSent(web, key, create)
    until_under_way(web)
    with ThreadPoolExecutor(1) as threads:
        copy = threads.submit(by_sdk, web, key, create)
        conflicts.get(timeout=30)
        status, made = first.finish()
        assert status == 200, made
        assert copy.result(timeout=30) == made["id"]


def by_sdk(web: WebServer, key: str, create: Create) -> str:
    """Make a create with the SDK of its door, as it comes."""
    body, headers = json.loads(create.body), {"Idempotency-Key": KEY}
    url = f"http://127.0.0.1:{web.port}"
    if "requests" in body:
        with anthropic.Anthropic(base_url=url, api_key=key) as client:
            return str(client.messages.batches.create(**body, extra_headers=headers).id)
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        return str(client.batches.create(**body, extra_headers=headers).id)


@pytest.mark.parametrize("door", DOORS)
def test_a_first_that_left_holds_up_no_copy(web: WebServer, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_keys, "WAIT_S", 60)
    key = web.make_key(ORG)
    client = web.client(key)
    upload(client)
    create = DOORS[door](client, "same")
    first = HalfSent(web, key, create)
    until_under_way(web)
    with ThreadPoolExecutor(1) as threads:
        copy = threads.submit(create.send, client)
        first.leave()
        assert copy.result().status_code in (200, 201), copy.result().text


@pytest.mark.parametrize("door", DOORS)
def test_copies_at_once_get_one_object(web: WebServer, door: str) -> None:
    client = web.client(web.make_key(ORG))
    upload(client)
    create = DOORS[door](client, "same")
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: create.send(client), range(8)))
    name = "batchId" if door == "completion-batch" else "id"
    made = [answer.json()[name] for answer in answers if answer.status_code in (200, 201)]
    assert len(set(made)) == 1, [answer.text for answer in answers]
    for answer in answers:
        if answer.status_code not in (200, 201):
            is_asked_to_come_again(answer)


def test_a_response_in_the_background_is_held_too(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_keys, "WAIT_S", 0.05)
    client = web.client(web.make_key(ORG))
    may_go_on = asyncio.Event()

    async def wait_at(name: str, content: bytes = b"") -> None:
        if name == "upload_blob_durable":
            await may_go_on.wait()
        await failpoints.hit(name, content)

    monkeypatch.setattr(accept, "hit", wait_at)

    async def let_go() -> None:
        may_go_on.set()

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(response("same").send, client)
        until_under_way(web)
        is_asked_to_come_again(response("same").send(client))
        # Another key, another tenant and another route are other creates.
        assert (
            as_json(
                "/v1/webhook_endpoints", {"name": "w", "url": "https://example.com/h", "event_types": ["batch.failed"]}
            )
            .send(client)
            .status_code
            == 200
        )
        web.run(let_go())
        assert first.result().status_code == 200, first.result().text
    assert response("same").send(client).json()["id"] == first.result().json()["id"]
    assert response("another").send(client).status_code == 422


def test_a_key_is_held_for_its_own_tenant_alone(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_keys, "WAIT_S", 0.05)
    key, other = web.make_key(ORG), web.client(web.make_key("other"))
    upload(web.client(key))
    upload(other)
    first = HalfSent(web, key, file(web.client(key), "same"))
    until_under_way(web)
    assert file(other, "same").send(other).status_code == 200
    assert first.finish()[0] == 200


def test_nothing_is_kept_of_keys_whose_requests_are_over(web: WebServer) -> None:
    client = web.client(web.make_key(ORG))
    for text in ("same", "another", "same"):
        assert file(client, text).send(client).status_code in (200, 422)

    async def held() -> object:
        return web.app.running_keys.names()

    assert not web.run(held())
