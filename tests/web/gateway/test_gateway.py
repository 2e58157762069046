"""Interactive calls over scripted model servers: bytes as they came, priority, failover, limits, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest

from tests.support.ports import HandClock
from tests.support.processes import wait_until
from tests.upstream.raw_server import Peer, Request
from tests.web.gateway_world import ASK, CHAT, MESSAGES, GatewayWorld
from tests.web.server import model_at
from tests.web.upstream import STREAM_END, STREAM_HEAD, answers, chat_with, chunk, chunked, event, streams
from tidegate import metrics
from tidegate.core.deployments import Secret
from tidegate.settings.capacity import LimitEntry, ResourceEntry, TenantEntry
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.web.gateway.dialects import Dialect
from tidegate.web.gateway.proxy_response import ProxyResponse

ODD = (
    b": hello\r\n\r\n",
    b'data: {"id":"chatcmpl-1","choices":[{"delta":{"content":"gr\xc3\xbc',
    b'\xc3\x9fe"}}]}\n\nevent: odd\nid: 7\nretry: 10\ndata:x\ndata: y\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n',
    b"data: [DONE]\n\n",
)


def test_a_stream_is_passed_on_byte_for_byte(world: GatewayWorld) -> None:
    world.start(streams(*ODD))
    asks = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({**asks, "odd \u00fc": [1.0, 1e3]}).encode() + b"\n "
    with world.client().stream("POST", CHAT, content=body, headers={"Content-Type": "application/json"}) as answer:
        assert b"".join(answer.iter_raw()) == b"".join(ODD)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["x-request-id"].startswith("req_")
    assert world.upstreams[0].posts[0].body == body


def test_a_whole_answer_is_passed_on_byte_for_byte(world: GatewayWorld) -> None:
    body = json.dumps(json.loads(chat_with("hi \u00fc")), indent=2).encode() + b"\n"
    world.start(
        answers(body, X_Secret="canary", Set_Cookie="a=b", Server="vllm", Content_Type="text/html"),
        options=[{"api_key": Secret("sk-ours")}],
    )
    answer = world.client("tg_live_theirs").post(CHAT, json=ASK)
    assert (answer.status_code, answer.content) == (200, body)
    assert answer.headers["content-type"] == "application/json"
    assert not {"x-secret", "set-cookie"} & set(answer.headers)
    assert answer.headers.get("server") != "vllm"
    sent = world.upstreams[0].posts[0]
    assert sent.headers["Authorization"] == "Bearer sk-ours"
    assert sent.headers["Idempotency-Key"] == answer.headers["x-request-id"]
    assert "theirs" not in str(sent.headers)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_the_first_byte_ends_the_call_upstream(world: GatewayWorld, stream: bool) -> None:
    async def wait(request: Request, peer: Peer) -> None:
        await peer.until_gone()

    def left() -> int:
        return sum(
            count for name, count in metrics.counted(metrics.interactive_calls).items() if name.endswith(",left")
        )

    world.start(wait)
    before = left()
    with socket.create_connection(("127.0.0.1", world.web.port)) as client:
        body = json.dumps({**ASK, "stream": stream}).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: world.upstreams[0].posts, timeout_s=20, what="the call upstream")
        assert world.interactive()[0] == 1
    wait_until(world.upstreams[0].posts[0].gone.is_set, timeout_s=20, what="the upstream to see it")
    wait_until(lambda: world.interactive() == (0, 0), timeout_s=20, what="the place to be given back")
    wait_until(lambda: left() == before + 1, timeout_s=20, what="it to be counted as left, and not as failed")
    assert world.states() == ["closed"]


def test_a_client_that_leaves_in_the_middle_ends_the_call_upstream(world: GatewayWorld) -> None:
    async def begin(request: Request, peer: Peer) -> None:
        await peer.send(STREAM_HEAD, chunked(chunk("a")))
        await peer.until_gone()

    world.start(begin)
    with world.client().stream("POST", CHAT, json={**ASK, "stream": True}) as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == chunk("a")
        assert world.interactive() == (1, 0)
    wait_until(world.upstreams[0].posts[0].gone.is_set, timeout_s=20, what="the upstream to see it")
    wait_until(lambda: world.interactive() == (0, 0), timeout_s=20, what="the place to be given back")
    assert world.states() == ["closed"]


def test_a_slow_client_slows_the_upstream_down(world: GatewayWorld) -> None:
    """What is under way between the two is bounded by buffers of ours and of the kernel's, whatever the length of the answer."""
    piece = chunk("x" * 65_000)
    pieces_count, ahead_bytes_max = 1_500, 32 << 20
    sent = [0]

    async def pour(request: Request, peer: Peer) -> None:
        await peer.send(STREAM_HEAD)
        for _ in range(pieces_count):
            await peer.send(chunked(piece))
            sent[0] += len(piece)
        await peer.send(STREAM_END)

    world.start(pour)
    received = 0
    with world.client().stream("POST", CHAT, json={**ASK, "stream": True}) as answer:
        for raw in answer.iter_raw():
            received += len(raw)
            assert sent[0] - received <= ahead_bytes_max
    assert received == pieces_count * len(piece) > 2 * ahead_bytes_max


def test_an_upstream_that_dies_between_events_is_reported_in_the_clients_protocol(world: GatewayWorld) -> None:
    read = threading.Event()

    async def die(request: Request, peer: Peer) -> None:
        await peer.send(STREAM_HEAD, chunked(chunk("a")))
        await asyncio.to_thread(read.wait, 30)
        peer.reset()

    def all_of(path: str, ask: dict[str, Any]) -> bytes:
        """The whole stream; the upstream dies once its first event was read."""
        read.clear()
        parts = []
        with client.stream("POST", path, json={**ask, "stream": True}) as answer:
            for part in answer.iter_raw():
                parts.append(part)
                read.set()
        return b"".join(parts)

    world.start(die, answers(), options=[{"weight": 100.0}, {"weight": 0.01}])
    client = world.client()
    received = all_of(CHAT, ASK)
    assert received.startswith(chunk("a"))
    error = json.loads(received.removeprefix(chunk("a")).removeprefix(b"data: "))["error"]
    assert (error["code"], error["type"]) == ("upstream_ambiguous", "server_error")
    messages = all_of(MESSAGES, {**ASK, "max_tokens": 5}).decode()
    assert 'event: error\ndata: {"type":"error","error":{"type":"api_error"' in messages
    assert world.upstreams[1].posts == [], "after the first byte nothing is sent again"


def test_a_model_server_is_not_given_up_because_the_client_reads_slowly() -> None:
    """Only the time in which the server may send counts as its silence."""
    pieces, is_paused, sent = [chunk("a"), chunk("b"), b""], [False], list[tuple[bytes, bool]]()

    async def read() -> bytes:
        assert not is_paused[0]
        return pieces.pop(0)

    async def send(message: Any) -> None:
        sent.append((message["body"], is_paused[0]))

    def turn(*, paused: bool) -> None:
        is_paused[0] = paused

    stream: Any = SimpleNamespace(
        read=read, pause_timeout=partial(turn, paused=True), resume_timeout=partial(turn, paused=False)
    )
    response = ProxyResponse(cast(Any, None), Dialect(CHAT, b"{}", 0, ""), HandClock(), "m", "req_1")
    assert asyncio.run(response._pass_stream(stream, send)) == "answered"
    assert sent == [(chunk("a"), True), (chunk("b"), True), (b"", False)]


def test_an_upstream_that_dies_within_an_event_breaks_the_connection(world: GatewayWorld) -> None:
    async def die(request: Request, peer: Peer) -> None:
        await peer.send(STREAM_HEAD, chunked(b'data: {"half'))
        await asyncio.sleep(0.05)
        peer.reset()

    world.start(die)
    with pytest.raises(httpx2.RemoteProtocolError):
        world.client().post(CHAT, json={**ASK, "stream": True})


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["throttled", "key", "refused connection"])
def test_a_call_that_was_not_done_goes_to_another_deployment(world: GatewayWorld, how: str, stream: bool) -> None:
    good = streams(chunk("hi"), b"data: [DONE]\n\n") if stream else answers()
    bad = answers(b'{"error":{"message":"x"}}', {"throttled": 429, "key": 401}.get(how, 429))
    world.start(bad, good, options=[{"weight": 100.0}, {"weight": 0.01}])
    if how == "refused connection":
        world.upstreams[0].close()
    client = world.client()
    for _ in range(3):
        assert client.post(CHAT, json={**ASK, "stream": stream}).status_code == 200
    assert len(world.upstreams[1].posts) == 3
    if how == "refused connection":
        del world.upstreams[0]


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_may_have_been_billed_is_not_sent_again(world: GatewayWorld, stream: bool) -> None:
    async def hang_up(request: Request, peer: Peer) -> None:
        peer.close()

    world.start(answers(b"<h1>10.0.0.5 is ill</h1>", 500), answers(), options=[{"weight": 100.0}, {"weight": 0.01}])
    client = world.client()
    for script in (answers(b"<h1>10.0.0.5 is ill</h1>", 500), hang_up, answers(b"<html>", 200)):
        world.upstreams[0].becomes(script)
        answer = client.post(CHAT, json={**ASK, "stream": stream})
        assert answer.status_code == 502
        assert "10.0.0.5" not in answer.text
        assert "127.0.0.1" not in answer.text
        assert answer.json()["error"]["code"] in ("upstream_ambiguous", "invalid_upstream_response")
    assert len(world.upstreams[0].posts) == 3
    assert world.upstreams[1].posts == []


def test_a_refusal_is_passed_on_in_the_doors_shape(world: GatewayWorld) -> None:
    refusal = b'{"error":{"message":"too long","type":"invalid_request_error","param":"messages","code":"context"}}'
    world.start(answers(refusal, 400))
    client = world.client()

    def refused() -> int:
        return sum(n for name, n in metrics.counted(metrics.interactive_calls).items() if name.endswith(",refused"))

    before = refused()
    for stream in (True, False):
        answer = client.post(CHAT, json={**ASK, "stream": stream})
        assert (answer.status_code, answer.content) == (400, refusal)
    assert refused() == before + 2
    messages = client.post(MESSAGES, json={**ASK, "max_tokens": 5})
    assert messages.status_code == 400
    assert messages.json()["type"] == "error"
    assert messages.json()["error"] == {
        "type": "invalid_request_error", "message": "too long", "code": "context", "param": "messages",
    }  # fmt: skip
    assert messages.json()["request_id"] == messages.headers["x-request-id"]


def test_a_full_pool_opens_no_circuit(world: GatewayWorld) -> None:
    async def wait(request: Request, peer: Peer) -> None:
        await peer.until_gone()

    world.start(wait, http={"connections_max": 2, "kept_alive_max": 1, "pool_timeout_s": 0.2})
    with held(world, 2):
        wait_until(lambda: len(world.upstreams[0].posts) == 2, timeout_s=20, what="both connections to be taken")
        answer = world.client().post(CHAT, json=ASK)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_pool_timeout")
        assert answer.headers["retry-after"] == "1"
        assert world.states() == ["closed"]


def test_a_full_deployment_is_waited_for_and_then_refused(world: GatewayWorld) -> None:
    async def wait(request: Request, peer: Peer) -> None:
        await peer.until_gone()

    # The call that takes the place must get it in this time too, on a busy machine.
    world.start(wait, http={"pool_timeout_s": 1.0}, options=[{"max_in_flight": 1}])
    with held(world, 1):
        wait_until(lambda: world.interactive() == (1, 1), timeout_s=20, what="the place to be taken")
        answer = world.client().post(CHAT, json=ASK)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_pool_timeout")
    wait_until(lambda: world.interactive() == (0, 0), timeout_s=20, what="the place to be given back")
    world.upstreams[0].becomes(answers())
    assert world.client().post(CHAT, json=ASK).status_code == 200


class held:  # noqa: N801 - reads as a word in `with held(world, 2)`
    """So many calls that are under way until this is left."""

    def __init__(self, world: GatewayWorld, count: int, **more: Any) -> None:
        body = json.dumps({**ASK, **more}).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        self._request = head.encode() + b"\r\n\r\n" + body
        self._connections = [socket.create_connection(("127.0.0.1", world.web.port)) for _ in range(count)]

    def __enter__(self) -> None:
        for connection in self._connections:
            connection.sendall(self._request)

    def __exit__(self, *wrong: object) -> None:
        for connection in self._connections:
            connection.close()


def test_a_flex_call_takes_batchs_places_and_an_interactive_one_does_not_wait_for_it(world: GatewayWorld) -> None:
    async def wait_if_flex(request: Request, peer: Peer) -> None:
        if b"hold" in request.body:
            await peer.until_gone()
        else:
            await peer.answer()

    world.start(wait_if_flex, gateway={"flex_wait_s": 0.2}, options=[{"max_in_flight": 4, "batch_fraction": 0.25}])
    client = world.client()
    with held(world, 1, service_tier="flex", user="hold"):
        wait_until(lambda: world.upstreams[0].posts, timeout_s=20, what="the flex call upstream")
        assert b"service_tier" not in world.upstreams[0].posts[0].body
        assert world.interactive() == (0, 0)
        answer = client.post(CHAT, json={**ASK, "service_tier": "flex"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "flex_unavailable")
        assert int(answer.headers["retry-after"]) >= 1
        assert client.post(CHAT, json={**ASK, "service_tier": "auto"}).status_code == 200
    assert b'"service_tier":"auto"' in world.upstreams[0].posts[-1].body.replace(b": ", b":")
    wait_until(
        lambda: client.post(CHAT, json={**ASK, "service_tier": "flex"}).status_code == 200,
        timeout_s=20,
        what="a gap",
    )


def test_a_deployment_serves_whom_it_is_for(world: GatewayWorld) -> None:
    world.start(answers(), answers(), options=[{"serves": "batch"}, {"serves": "interactive"}])
    client = world.client()
    assert client.post(CHAT, json=ASK).status_code == 200
    assert client.post(CHAT, json={**ASK, "service_tier": "flex"}).status_code == 200
    assert [len(upstream.posts) for upstream in world.upstreams] == [1, 1]
    assert b"service_tier" not in world.upstreams[0].posts[0].body


def test_users_and_their_first_tokens_are_reported_to_the_tide_at_once(world: GatewayWorld) -> None:
    resume_timeout = threading.Event()

    async def step(request: Request, peer: Peer) -> None:
        await peer.send(STREAM_HEAD)
        await asyncio.to_thread(resume_timeout.wait, 20)
        await peer.send(chunked(chunk("a")))
        await peer.until_gone()

    world.start(step)
    seen: list[tuple[int, int]] = []

    class SeenTide:
        """Sees what is reported to a deployment's tide about interactive calls."""

        yields = True

        def __init__(self, state: DeploymentState) -> None:
            self._state = state

        def users_changed(self) -> None:
            seen.append(self._state.users)

    async def watch() -> None:
        state = next(iter(world.web.router._states.values()))
        state.tide = SeenTide(state)  # type: ignore[assignment]

    world.web.run(watch())
    with held(world, 1, stream=True):
        wait_until(lambda: seen == [(1, 1)], timeout_s=20, what="the call to be counted")
        resume_timeout.set()
        wait_until(lambda: seen == [(1, 1), (1, 0)], timeout_s=20, what="its first token to be counted")
    wait_until(lambda: seen == [(1, 1), (1, 0), (0, 0)], timeout_s=20, what="its end to be counted")


def test_limits_bind_interactive_calls_and_only_their_own_tenant(world: GatewayWorld) -> None:
    world.start(answers(), tenants={"ours": TenantEntry(limits=(LimitEntry(period="hour", requests=2),))})
    ours, theirs = world.client(world.web.make_key("ours")), world.client(world.web.make_key("theirs"))
    assert [ours.post(CHAT, json=ASK).status_code for _ in range(2)] == [200, 200]
    for path, more in ((CHAT, {}), (MESSAGES, {"max_tokens": 5})):
        spent = ours.post(path, json={**ASK, **more})
        assert spent.status_code == 429
        assert int(spent.headers["retry-after"]) > 60
        assert spent.json()["error"]["code"] == "budget_spent"
        assert "tenant_" not in spent.text
    assert [theirs.post(CHAT, json=ASK).status_code for _ in range(3)] == [200] * 3
    assert len(world.upstreams[0].posts) == 5


@pytest.mark.parametrize("kind", ["stream", "whole", "messages"])
def test_limits_settle_with_real_usage(world: GatewayWorld, kind: str) -> None:
    """Each call reserves 300 tokens or so and takes 40: nine fit a budget of 650 one after the other, and no more than two at once."""
    usage = {"usage": {"prompt_tokens": 30, "completion_tokens": 10, "total_tokens": 40}}
    stream = streams(chunk("a"), chunk("", "stop"), event({"choices": [], **usage}), b"data: [DONE]\n\n")
    limits = (LimitEntry(period="hour", tokens=650),)
    world.start(
        answers(chat_with("a", 30, 10)) if kind == "whole" else stream, tenants={"ours": TenantEntry(limits=limits)}
    )
    client = world.client(world.web.make_key("ours"))
    path, more = (MESSAGES, {"max_tokens": 300}) if kind == "messages" else (CHAT, {"max_tokens": 300})
    for _ in range(9):

        def passed() -> bool:
            return client.post(path, json={**ASK, "stream": kind != "whole", **more}).status_code == 200

        # What was taken too much comes back within a moment.
        wait_until(passed, timeout_s=20, what="the settled tokens to be there")


def test_models_and_scopes_are_the_keys_own(world: GatewayWorld) -> None:
    world.start(answers())
    narrow = world.client(world.web.make_key("ours", models=["other"]))
    for path, more in ((CHAT, {}), (MESSAGES, {"max_tokens": 5})):
        refused = narrow.post(path, json={**ASK, **more})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert narrow.get("/v1/models").json()["data"] == []
    assert narrow.get("/v1/models/m").status_code == 404
    without = world.client(world.web.make_key("ours", scopes=["files:read"]))
    assert without.post(CHAT, json=ASK).json()["error"]["code"] == "insufficient_scope"
    assert without.get("/v1/models").status_code == 403
    only = world.client(world.web.make_key("ours", scopes=["inference"]))
    assert only.post(CHAT, json=ASK).status_code == 200
    assert [one["id"] for one in only.get("/v1/models").json()["data"]] == ["m"]
    assert only.get("/v1/files").status_code == 403


def test_anthropics_header_opens_anthropics_door_only(world: GatewayWorld) -> None:
    world.start(answers(chat_with("hi")))
    key = world.web.make_key("ours")
    ask = {**ASK, "max_tokens": 5}
    client = world.client()
    assert client.post(MESSAGES, json=ask, headers={"x-api-key": key}).status_code == 200
    assert client.post(MESSAGES, json=ask, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    wrong = client.post(MESSAGES, json=ask, headers={"x-api-key": key[:-1] + ("0" if key[-1] != "0" else "1")})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
    assert client.post(CHAT, json=ASK, headers={"x-api-key": key}).status_code == 401


def test_an_unknown_model_is_refused_in_the_doors_shape(world: GatewayWorld) -> None:
    world.start(answers())
    client = world.client()
    chat = client.post(CHAT, json={**ASK, "model": "unknown"})
    assert (chat.status_code, chat.json()["error"]["code"]) == (404, "model_not_found")
    messages = client.post(MESSAGES, json={**ASK, "model": "unknown", "max_tokens": 5})
    assert messages.status_code == 404
    assert (messages.json()["type"], messages.json()["error"]["type"]) == ("error", "not_found_error")
    assert world.upstreams[0].posts == []


def test_models_are_asked_of_deployments_without_names(world: GatewayWorld) -> None:
    world.start(answers())
    other = GatewayWorld(world._directory.parent / "any")
    try:
        other.start(models={}, upstream={"url": world.upstreams[0].url})
        world.upstreams[0].becomes(answers(b'{"data":[{"id":"b"},{"id":"a"},{"id":"\\u0000"}]}'))
        client = other.client()
        # It is not waited for long: its word counts when it comes.
        wait_until(lambda: client.get("/v1/models").json()["data"], timeout_s=60, what="its word")
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["a", "b"]
        assert other.client().get("/v1/models/a").json()["id"] == "a"
    finally:
        other.close()


def test_a_resource_is_a_name_for_interactive_calls_too(world: GatewayWorld) -> None:
    world.start(
        answers(), resources={"support": ResourceEntry(model="m", limits=(LimitEntry(period="hour", requests=1),))}
    )
    client = world.client()
    assert client.post(CHAT, json={**ASK, "model": "support"}).status_code == 200
    assert json.loads(world.upstreams[0].posts[0].body)["model"] == "m"
    assert client.post(CHAT, json={**ASK, "model": "support"}).status_code == 429
    assert client.post(CHAT, json=ASK).status_code == 200
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["m", "support"]


def test_a_key_gets_no_answer_of_a_fallbacks_model_that_it_does_not_allow(world: GatewayWorld) -> None:
    async def throttles(request: Request, peer: Peer) -> None:
        await peer.answer(429, b"{}", Retry_After="600")

    first, second = world.upstream(throttles), world.upstream(answers())
    world.start(
        models={name: model_at(one.url, name=name) for name, one in (("a", first), ("b", second))},
        resources={"chat": ResourceEntry(model="a", fallbacks=("b",))},
    )
    wide, narrow = (world.client(world.web.make_key("ours", models=names)) for names in (["a", "b"], ["a"]))
    ask = {**ASK, "model": "chat"}
    for more in ({}, {"stream": True}, {"service_tier": "flex"}):
        refused = narrow.post(CHAT, json={**ask, **more})
        assert (refused.status_code, len(second.posts)) == (429, 0), refused.text
        assert int(refused.headers["retry-after"]) > 500
    assert wide.post(CHAT, json=ask).status_code == 200
    assert len(second.posts) == 1


@pytest.fixture
def anthropic_world(world: GatewayWorld) -> GatewayWorld:
    message = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn", "stop_sequence": None,
        "content": [{"type": "text", "text": "hi"}], "usage": {"input_tokens": 3, "output_tokens": 2},
    }  # fmt: skip
    world.start(answers(json.dumps(message).encode()), options=[{"engine": "anthropic", "api_key": Secret("sk-ant")}])
    return world


def test_an_anthropic_engine_is_spoken_to_in_its_shapes(anthropic_world: GatewayWorld) -> None:
    world = anthropic_world
    client = world.client()
    native = client.post(MESSAGES, json={**ASK, "max_tokens": 5}, headers={"anthropic-beta": "a-1,b-2"})
    assert native.json()["content"] == [{"type": "text", "text": "hi"}]
    chat = client.post(CHAT, json={**ASK, "metadata": {"a": "b"}})
    assert chat.json()["choices"][0]["message"]["content"] == "hi"
    for sent in world.upstreams[0].posts:
        assert (sent.path, sent.headers["x-api-key"]) == ("/v1/messages", "sk-ant")
    assert world.upstreams[0].posts[0].headers["anthropic-beta"] == "a-1,b-2"
    refused = client.post("/v1/embeddings", json={"model": "m", "input": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_endpoint")
    assert len(world.upstreams[0].posts) == 2
    assert world.interactive() == (0, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_names_the_hints_that_the_engine_did_not_get(world: GatewayWorld, stream: bool) -> None:
    whole = chunk("hi"), chunk(finish="stop"), b"data: [DONE]\n\n"
    world.start(streams(*whole) if stream else answers(chat_with("hi")))
    client = world.client()
    asked = {**ASK, "max_tokens": 5, "stream": stream, "cache_control": {"type": "ephemeral"}}
    assert client.post(MESSAGES, json=asked).headers["x-tidegate-left-out"] == "cache_control"
    assert "x-tidegate-left-out" not in client.post(CHAT, json={**ASK, "stream": stream}).headers


def test_two_models_do_not_share_a_fate(world: GatewayWorld) -> None:
    ill, well = world.upstream(answers(b"{}", 500)), world.upstream(answers())
    world.start(models={"ill": model_at(ill.url), "well": model_at(well.url)})
    client = world.client()
    for _ in range(8):
        assert client.post(CHAT, json={**ASK, "model": "ill"}).status_code in (502, 503)
        assert client.post(CHAT, json={**ASK, "model": "well"}).status_code == 200
    assert len(ill.posts) == 5, "a deployment with an open circuit is left alone"


@pytest.mark.parametrize("stream", [True, False])
def test_a_server_is_asked_for_its_own_name_of_the_model(world: GatewayWorld, stream: bool) -> None:
    good = streams(chunk("hi"), b"data: [DONE]\n\n") if stream else answers(chat_with("hi"))
    world.start(good, options=[{"upstream_model": "org/inner"}], resources={"support": ResourceEntry(model="m")})
    client = world.client()
    for name in ("m", "support"):
        assert client.post(CHAT, json={**ASK, "model": name, "stream": stream}).status_code == 200
        asked = {**ASK, "model": name, "stream": stream, "max_tokens": 5}
        assert client.post(MESSAGES, json=asked).status_code == 200
    assert [json.loads(sent.body)["model"] for sent in world.upstreams[0].posts] == ["org/inner"] * 4


def test_a_model_under_another_name_is_listed_with_what_its_server_says(world: GatewayWorld) -> None:
    async def listing(request: Request, peer: Peer) -> None:
        data = [{"id": "inner", "owned_by": "them", "max_model_len": 4096}, {"id": "m", "owned_by": "another"}]
        await peer.answer(200, json.dumps({"object": "list", "data": data}).encode())

    world.start(listing, options=[{"upstream_model": "inner"}])
    [model] = world.client().get("/v1/models").json()["data"]
    assert (model["id"], model["owned_by"]) == ("m", "them")


def test_a_request_that_one_engine_cannot_express_goes_to_another(world: GatewayWorld) -> None:
    world.start(answers(), answers(), options=[{"engine": "anthropic", "weight": 100.0}, {"weight": 0.01}])
    client = world.client()
    assert client.post(CHAT, json={**ASK, "logit_bias": {"5": 1}}).status_code == 200
    assert client.post("/v1/embeddings", json={"model": "m", "input": "x"}).status_code == 502, "it gave a chat answer"
    assert [len(upstream.posts) for upstream in world.upstreams] == [0, 2]
    assert world.interactive("u0") == (0, 0)


def test_every_answer_says_what_the_limits_have_left(world: GatewayWorld) -> None:
    """The tightest limit of each kind, in the IETF's headers and in OpenAI's, on answers, refusals and 429s alike."""
    limits = (
        LimitEntry(period="minute", requests=3, tokens=100_000),
        LimitEntry(period="day", requests=100),
        LimitEntry(period="lifetime", tokens=1_000_000),
    )
    world.start(answers(), tenants={"ours": TenantEntry(limits=limits)})
    ours, theirs = world.client(world.web.make_key("ours")), world.client(world.web.make_key("theirs"))
    for left in (2, 1, 0):
        headers = ours.post(CHAT, json=ASK).headers
        assert headers["ratelimit-policy"] == '"requests";q=3;w=60, "tokens";q=100000;w=60;qu="tokens"'
        assert re.fullmatch(rf'"requests";r={left};t=(5\d|6[01]), "tokens";r=\d+;t=\d+', headers["ratelimit"])
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("3", str(left))
        assert re.fullmatch(r"(1m)?[\d.]+s", headers["x-ratelimit-reset-requests"])
        assert 0 < int(headers["x-ratelimit-remaining-tokens"]) < int(headers["x-ratelimit-limit-tokens"])
    spent = ours.post(CHAT, json=ASK)
    assert (spent.status_code, spent.headers["x-ratelimit-remaining-requests"]) == (429, "0")
    assert '"requests";r=0;t=' in spent.headers["ratelimit"]
    assert "ratelimit" not in theirs.post(CHAT, json=ASK).headers


def test_a_lifetime_has_no_window_and_no_reset(world: GatewayWorld) -> None:
    world.start(answers(), tenants={"ours": TenantEntry(limits=(LimitEntry(period="lifetime", requests=9),))})
    headers = world.client(world.web.make_key("ours")).post(CHAT, json=ASK).headers
    assert (headers["ratelimit-policy"], headers["ratelimit"]) == ('"requests";q=9', '"requests";r=8')
    assert "x-ratelimit-reset-requests" not in headers
