"""Calls that are open under a key end when the key stops working: streams, calls without an answer yet, uploads and downloads."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.support.processes import wait_until
from tests.upstream.raw_server import Peer, Request
from tests.web.gateway_world import ASK, CHAT, MESSAGES, GatewayWorld
from tests.web.upstream import STREAM_HEAD, chunk, chunked
from tidegate.core import keys
from tidegate.core.errors import StoreUnavailable
from tidegate.store.store import Store
from tidegate.web.http import auth, intake

ENDS = ("revoke", "delete", "expire", "rotate")


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[intake.OpenCalls]:
    """Looks are quick, and what watches the calls can be seen."""
    found: list[intake.OpenCalls] = []

    class Seen(intake.OpenCalls):
        def __init__(self, store: Store) -> None:
            super().__init__(store)
            found.append(self)

    monkeypatch.setattr(intake, "LOOK_S", 0.05)
    monkeypatch.setattr(auth, "OpenCalls", Seen)
    return found


class Endless:
    """A stream that says one event, or a part of one, and then nothing more."""

    def __init__(self, first: bytes) -> None:
        self.first = first

    async def __call__(self, request: Request, peer: Peer) -> None:
        await peer.send(STREAM_HEAD, chunked(self.first))
        await peer.until_gone()


async def silent(request: Request, peer: Peer) -> None:
    await peer.until_gone()


def end_key(world: GatewayWorld, key: str, how: str) -> None:
    store, key_id = world.web.store, str(keys.public_id_of(key))
    if how == "expire":
        world.web.clock.ahead_ms += 3_600_000
    elif how == "rotate":
        assert world.web.run(store.rotate_key(key_id, b"another secret's hash", 0))
    else:
        assert world.web.run(store.revoke_key(key_id) if how == "revoke" else store.delete_key(key_id))


def key_of(world: GatewayWorld, how: str) -> str:
    expires_at = world.web.clock.now_ms() + 1_800_000 if how == "expire" else None
    return world.web.make_key("acme", expires_at=expires_at)


def streamed(client: httpx2.Client, path: str = CHAT, **more: Any) -> Iterator[str]:
    with client.stream("POST", path, json={**ASK, **more, "stream": True}) as answer:
        assert answer.status_code == 200
        yield from answer.iter_lines()


@pytest.mark.parametrize("how", ENDS)
def test_a_stream_ends_with_its_key(world: GatewayWorld, how: str) -> None:
    world.start(Endless(chunk("hi")))
    key, other = key_of(world, how), world.web.make_key("acme")
    lines, others = streamed(world.client(key)), streamed(world.client(other))
    assert "hi" in next(lines)
    assert "hi" in next(others)
    end_key(world, key, how)
    error = json.loads([line for line in lines if line][-1].removeprefix("data: "))["error"]
    assert error["code"] == "invalid_api_key"
    # The server sees it gone, and a caller with another key is not disturbed.
    wait_until(lambda: world.interactive()[0] == 1, 20, "the call to end upstream")
    wait_until(lambda: any(post.gone.is_set() for post in world.upstreams[0].posts), 20, "the server to see it gone")
    assert not all(post.gone.is_set() for post in world.upstreams[0].posts)


def test_an_anthropic_stream_ends_with_an_event_of_its_own(world: GatewayWorld) -> None:
    world.start(Endless(b'event: ping\ndata: {"type": "ping"}\n\n'), options=[{"engine": "anthropic"}])
    key = world.web.make_key("acme")
    lines = streamed(world.client(key), MESSAGES, max_tokens=8)
    assert next(lines) == "event: ping"
    end_key(world, key, "revoke")
    rest = [line for line in lines if line]
    assert rest[-2] == "event: error"
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "invalid_api_key"


def test_a_stream_within_an_event_breaks_off(world: GatewayWorld) -> None:
    world.start(Endless(b"data: {}\n"))
    key = world.web.make_key("acme")
    # Where the caller asks for the usage itself, lines go on before their event is whole.
    ask = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
    with world.client(key).stream("POST", CHAT, json=ask) as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == b"data: {}\n"
        end_key(world, key, "revoke")
        with pytest.raises(httpx2.RemoteProtocolError):
            list(pieces)


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_without_an_answer_is_refused(world: GatewayWorld, stream: bool) -> None:
    world.start(silent)
    key = world.web.make_key("acme")
    answers: list[httpx2.Response] = []
    client = world.client(key)
    asking = threading.Thread(target=lambda: answers.append(client.post(CHAT, json={**ASK, "stream": stream})))
    asking.start()
    wait_until(lambda: world.upstreams[0].posts, 20, "the call upstream")
    end_key(world, key, "revoke")
    asking.join(20)
    assert [(one.status_code, one.json()["error"]["code"]) for one in answers] == [(401, "invalid_api_key")]
    wait_until(world.upstreams[0].posts[0].gone.is_set, 20, "the server to see it gone")


def test_an_upload_is_refused_and_a_download_breaks_off(world: GatewayWorld, made: list[intake.OpenCalls]) -> None:
    world.start()
    key = world.web.make_key("acme")
    client = world.client(key)
    form = {"purpose": "batch"}
    # More than the kernel and the server hold for a client that does not read.
    file_id = client.post("/v1/files", data=form, files={"file": ("a.jsonl", b"x" * (32 << 20))}).json()["id"]
    has_begun, is_cut = threading.Event(), threading.Event()

    def parts() -> Iterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="b.jsonl"\r\n\r\n{"a"'
        has_begun.set()
        is_cut.wait(20)
        yield b": 1}\n\r\n--b--\r\n"

    answers: list[httpx2.Response] = []
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    sender = world.client(key)
    sending = threading.Thread(
        target=lambda: answers.append(sender.post("/v1/files", content=parts(), headers=headers))
    )
    sending.start()
    has_begun.wait(20)
    with client.stream("GET", f"/v1/files/{file_id}/content") as answer:
        pieces = answer.iter_raw(1024)
        next(pieces)
        end_key(world, key, "revoke")
        wait_until(lambda: not _uncut(made), 20, "the calls to be cut")
        is_cut.set()
        with pytest.raises(httpx2.RemoteProtocolError):
            list(pieces)
    sending.join(20)
    assert [(one.status_code, one.json()["error"]["code"]) for one in answers] == [(401, "invalid_api_key")]


def test_without_the_store_open_calls_go_on(world: GatewayWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.start(Endless(chunk("hi")))
    key = world.web.make_key("acme")
    asked = threading.Event()

    async def away(key_ids: list[str]) -> dict[str, Any]:
        asked.set()
        raise StoreUnavailable("the database is away")

    explain_inputs = world.web.store.key_facts
    monkeypatch.setattr(world.web.store, "key_facts", away)
    lines = streamed(world.client(key))
    assert "hi" in next(lines)
    assert asked.wait(20)
    assert world.interactive()[0] == 1
    monkeypatch.setattr(world.web.store, "key_facts", explain_inputs)
    end_key(world, key, "revoke")
    assert "invalid_api_key" in "".join(lines)


def test_calls_that_ended_are_forgotten(world: GatewayWorld, made: list[intake.OpenCalls]) -> None:
    world.start()
    client = world.client(world.web.make_key("acme", scopes=["inference"]))
    assert client.post(CHAT, json=ASK).status_code == 200
    assert client.get("/v1/files").status_code == 403
    assert client.post(CHAT, json={}).status_code == 400
    wait_until(lambda: not made[0]._by_key, 20, "the calls to be over")
    wait_until(lambda: made[0]._watching is None, 20, "nothing to be watched any more")


def _uncut(made: list[intake.OpenCalls]) -> list[intake.OpenCall]:
    return [call for calls in list(made[0]._by_key.values()) for call in list(calls) if not call.is_cut]
