"""Batch items for engines of the other shape, and for servers that know a model by another name: requests, answers, usage and errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.upstream.grouping.test_groups import vectors
from tests.upstream.raw_server import CHAT, Peer, RawServer, Request, Script
from tests.upstream.world import CHAT_ENDPOINT, RouterWorld, deployment
from tidegate.core.deployments import Deployment, EngineKind, Resource
from tidegate.core.errors import (
    Ambiguous,
    AnswerUnusable,
    Refused,
    SettingsError,
    Throttled,
    Untranslatable,
    UpstreamError,
)
from tidegate.core.nouns import Usage
from tidegate.upstream.calls.router import Router

pytestmark = pytest.mark.anyio

MESSAGES = "/v1/messages"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 7}
MESSAGE: dict[str, Any] = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "stop_reason": "end_turn", "stop_sequence": None,
    "content": [{"type": "text", "text": "hi"}],
    "usage": {"input_tokens": 3, "cache_read_input_tokens": 2, "output_tokens": 4},
}  # fmt: skip
COMPLETION: dict[str, Any] = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "llama",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9},
}  # fmt: skip


def says(body: Any, status: int = 200, **headers: str) -> Script:
    async def script(request: Request, peer: Peer) -> None:
        await peer.answer(status, body if isinstance(body, bytes) else json.dumps(body).encode(), **headers)

    return script


async def failed(router: Router, world: RouterWorld, **more: Any) -> UpstreamError:
    with pytest.raises(UpstreamError) as caught:
        await router.send(world.call(**more))
    return caught.value


def body_of(**more: Any) -> bytes:
    return json.dumps({**ASK, **more}).encode()


@pytest.mark.parametrize("weighed", [0, 10_000])
async def test_a_chat_item_is_translated_for_an_anthropic_engine(world: RouterWorld, weighed: int) -> None:
    place: dict[str, Any] = {"engine": EngineKind.ANTHROPIC, "tokens_in_flight_max": weighed}
    async with RawServer(says(MESSAGE)) as server, world.router(deployment(server.url, **place)) as router:
        answer = await router.send(world.call(body=body_of(stop=["x"])))
    [sent] = server.posts
    assert (sent.path, sent.headers["anthropic-version"]) == (MESSAGES, "2023-06-01")
    assert json.loads(sent.body) == {
        "model": "m", "max_tokens": 7, "messages": [{"role": "user", "content": "Say hi."}], "stop_sequences": ["x"],
    }  # fmt: skip
    body = json.loads(answer.body)
    assert b"\n" not in answer.body
    assert (body["object"], body["choices"][0]["message"]["content"]) == ("chat.completion", "hi")
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (5, 4)
    assert answer.usage == Usage(5, 2, 4)


@pytest.mark.parametrize("engine", [EngineKind.OPENAI, EngineKind.VLLM, EngineKind.GENERIC])
async def test_a_messages_item_is_translated_for_an_openai_engine(world: RouterWorld, engine: EngineKind) -> None:
    async with RawServer(says(COMPLETION)) as server, world.router(deployment(server.url, engine=engine)) as router:
        answer = await router.send(world.call(body=body_of(), endpoint=MESSAGES))
    assert server.posts[0].path == CHAT_ENDPOINT
    body = json.loads(answer.body)
    assert (body["type"], body["content"]) == ("message", [{"type": "text", "text": "hi"}])
    assert (body["usage"]["input_tokens"], answer.usage) == (5, Usage(5, 0, 4))


async def test_an_item_in_the_engines_own_shape_is_sent_as_it_is(world: RouterWorld) -> None:
    body = b'{ "model":"m", "max_tokens": 7,  "messages":[]}'
    async with (
        RawServer(says(MESSAGE)) as server,
        world.router(deployment(server.url, engine=EngineKind.ANTHROPIC)) as router,
    ):
        answer = await router.send(world.call(body=body, endpoint=MESSAGES))
    assert (server.posts[0].path, server.posts[0].body) == (MESSAGES, body)
    assert json.loads(answer.body) == MESSAGE


@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [
        (400, "invalid_request_error", Refused),
        (429, "rate_limit_error", Throttled),
        (529, "overloaded_error", Ambiguous),
    ],
)
async def test_an_error_comes_in_the_shape_of_the_items_endpoint(
    world: RouterWorld, status: int, kind: str, expected: type[UpstreamError]
) -> None:
    theirs = {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": "req_theirs"}
    async with (
        RawServer(says(theirs, status)) as server,
        world.router(deployment(server.url, engine=EngineKind.ANTHROPIC)) as router,
    ):
        error = await failed(router, world, body=body_of())
    assert (type(error), error.status) == (expected, status)
    openai_kind = {400: "invalid_request_error", 429: "rate_limit_error"}.get(status, "server_error")
    assert json.loads(error.body) == {"error": {"message": "no", "type": openai_kind, "param": None, "code": kind}}
    ours = {"error": {"message": "no", "type": "x", "param": "n", "code": "c"}}
    async with RawServer(says(ours, status)) as server, world.router(deployment(server.url)) as router:
        error = await failed(router, world, body=body_of(), endpoint=MESSAGES)
    body = json.loads(error.body)
    assert (body["type"], body["error"]["type"], body["error"]["message"]) == ("error", kind, "no")


@pytest.mark.parametrize(
    ("endpoint", "more", "code", "param"),
    [
        (CHAT_ENDPOINT, {"logit_bias": {"5": 1}}, "unsupported_parameter", "logit_bias"),
        (CHAT_ENDPOINT, {"messages": []}, "invalid_request", "messages"),
        ("/v1/embeddings", {"input": "x"}, "unsupported_endpoint", None),
        ("/v1/responses", {"input": "x"}, "unsupported_endpoint", None),
    ],
)
async def test_a_request_that_cannot_be_translated_fails_its_item_and_is_not_sent(
    world: RouterWorld, endpoint: str, more: dict[str, Any], code: str, param: str | None
) -> None:
    async with (
        RawServer(says(MESSAGE)) as server,
        world.router(deployment(server.url, engine=EngineKind.ANTHROPIC)) as router,
    ):
        error = await failed(router, world, body=body_of(**more), endpoint=endpoint)
        assert (type(error), error.status) == (Untranslatable, 400)
        shown = json.loads(error.body)["error"]
        assert (shown["code"], shown["param"]) == (code, param)
        assert router.status()[0].failures == {}
        assert server.posts == []


async def test_a_request_that_one_engine_cannot_express_goes_to_another(world: RouterWorld) -> None:
    async with RawServer(says(MESSAGE)) as theirs, RawServer() as ours:
        first = deployment(theirs.url, "first", engine=EngineKind.ANTHROPIC, weight=100.0)
        async with world.router(first, deployment(ours.url, "second", weight=0.01)) as router:
            answer = await router.send(world.call(body=body_of(logit_bias={"5": 1})))
            assert (answer.deployment, answer.body) == ("second", CHAT)
    assert theirs.posts == []


async def test_an_answer_that_cannot_be_translated_is_broken(world: RouterWorld) -> None:
    odd = {**MESSAGE, "content": [{"type": "server_tool_use", "id": "x"}]}
    async with (
        RawServer(says(odd)) as server,
        world.router(deployment(server.url, engine=EngineKind.ANTHROPIC)) as router,
    ):
        for _ in range(9):
            error = await failed(router, world, body=body_of())
        assert type(error) is AnswerUnusable
        assert "server_tool_use" in error.body.decode()
        assert router.status()[0].open_for_ms is None, "the model chose it, and its server is healthy"


@pytest.mark.parametrize("name", ["m", "support"])
async def test_a_server_is_asked_for_its_own_name_of_the_model(world: RouterWorld, name: str) -> None:
    body = b'{"messages": [1.50],  "model":"m", "odd":{"a":1}}'
    async with RawServer() as server, RawServer(says(vectors(["a"]))) as other:
        places = (
            deployment(server.url, models=("m",), upstream_model="org/inner-8b"),
            deployment(other.url, "two", models=("e",), upstream_model="inner-e"),
        )
        async with world.router(*places, resources=(Resource("support", "m"),)) as router:
            assert (await router.send(world.call(name, body=body))).body == CHAT
            await router.send(world.call("e", body=b'{"model":"e","input":"a"}', endpoint="/v1/embeddings"))
    assert server.posts[0].body == b'{"messages":[1.50],"model":"org/inner-8b","odd":{"a":1}}'
    assert json.loads(other.posts[0].body) == {"model": "inner-e", "input": "a"}


async def test_a_group_and_a_translated_item_have_the_servers_name_too(world: RouterWorld) -> None:
    async def embed(request: Request, peer: Peer) -> None:
        given = json.loads(request.body)["input"]
        await peer.answer(200, vectors(given if isinstance(given, list) else [given]))

    async with RawServer(embed) as server, RawServer(says(MESSAGE)) as other:
        places = (
            deployment(
                server.url, models=("e",), upstream_model="inner-e", upstream_max_batch_inputs=4, max_in_flight=1
            ),
            deployment(other.url, "two", models=("m",), engine=EngineKind.ANTHROPIC, upstream_model="claude-x"),
        )
        async with world.router(*places) as router:
            asks = [
                router.send(
                    world.call("e", body=json.dumps({"model": "e", "input": text}).encode(), endpoint="/v1/embeddings")
                )
                for text in ("a", "bb", "ccc")
            ]
            await asyncio.gather(*asks)
            await router.send(world.call("m", body=body_of()))
    assert {json.loads(sent.body)["model"] for sent in server.posts} == {"inner-e"}
    assert len(server.posts) < 3
    assert json.loads(other.posts[0].body)["model"] == "claude-x"


def test_an_anthropic_engine_shares_no_calls() -> None:
    with pytest.raises(SettingsError, match="one item in a call"):
        Deployment("one", "http://h", engine=EngineKind.ANTHROPIC, upstream_max_batch_inputs=4)
