"""Chat items in provider micro-batches, over real sockets: the adapter that wants a result for each, and every way back to single calls."""

import json
from typing import Any

import pytest

from tests.upstream.raw_server import Peer, RawServer, Request
from tests.upstream.world import CHAT_ENDPOINT, RouterWorld, deployment, together
from tidegate.core.errors import Ambiguous, Refused, SettingsError, Throttled, UpstreamError
from tidegate.core.grouping.chat import BATCH_ENDPOINT, USAGE_MISSING, ChatAdapter, ChatBatching, ChatMode
from tidegate.core.nouns import Answer, Call, Usage

pytestmark = pytest.mark.anyio


def completion(text: str, **more: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": len(text), "completion_tokens": 2, "total_tokens": len(text) + 2}
    message = {"role": "assistant", "content": f"re: {text}"}
    return {"id": text, "choices": [{"index": 0, "message": message}], "usage": usage, **more}


def texts(request: Request) -> list[str]:
    messages = json.loads(request.body)["messages"]
    conversations = messages if request.path.endswith("/batch") else [messages]
    return [conversation[-1]["content"] for conversation in conversations]


async def chat(request: Request, peer: Peer) -> None:
    """A result for each conversation, the last first. A text may ask for something else."""
    if request.line.startswith("GET"):
        await peer.answer(200, b'{"data":[]}')
        return
    if not request.path.endswith("/batch"):
        await peer.answer(200, json.dumps(completion(texts(request)[0])).encode())
        return
    results: list[dict[str, Any]] = []
    for index, text in enumerate(texts(request)):
        if text.startswith("status "):
            error = {"status_code": int(text.split()[1]), "message": "no", "retry_after": 3}
            results.append({"index": index, "error": error})
        elif text == "unstructured":
            results.append({"index": index, "error": "it went wrong"})
        elif text == "no usage":
            results.append({"index": index, "body": completion(text, usage=None)})
        elif text != "left out":
            results.append({"index": index, "body": completion(text)})
    await peer.answer(200, json.dumps({"results": results[::-1]}).encode())


def batching(size: int = 4, **more: Any) -> ChatBatching:
    return ChatBatching(ChatMode.SYNC_MICROBATCH, upstream_max_batch_size=size, adapter=ChatAdapter.RESULTS, **more)


def item(world: RouterWorld, text: str, **fields: Any) -> Call:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    return world.call(body=json.dumps(body).encode())


def shapes(server: RawServer) -> list[tuple[str, int]]:
    return [(request.path.removeprefix("/v1/chat/completions"), len(texts(request))) for request in server.posts]


async def test_each_item_gets_its_own_completion_and_its_own_usage(world: RouterWorld) -> None:
    async with RawServer(chat) as server, world.router(deployment(server.url, chat_batching=batching())) as router:
        assert router.items_per_call("m") == 4
        found = await together(router, [item(world, "x" * (at + 1), temperature=0) for at in range(6)])
    # The calls go out together, so either may arrive first.
    assert sorted(shapes(server)) == [("/batch", 2), ("/batch", 4)]
    assert json.loads(server.posts[0].body)["temperature"] == 0
    for at, answer in enumerate(found):
        assert isinstance(answer, Answer)
        assert json.loads(answer.body)["choices"][0]["message"]["content"] == "re: " + "x" * (at + 1)
        assert answer.usage == Usage(at + 1, 0, 2, 0)


@pytest.mark.parametrize(
    "settings",
    [
        ChatBatching(),
        ChatBatching(ChatMode.DISABLED),
        ChatBatching(ChatMode.CONCURRENT, max_in_flight=7),
        ChatBatching(ChatMode.SYNC_MICROBATCH, upstream_max_batch_size=4),
        batching(1),
    ],
)
async def test_other_modes_no_adapter_and_a_size_of_one_send_each_item_by_itself(
    world: RouterWorld, settings: ChatBatching
) -> None:
    async with RawServer(chat) as server, world.router(deployment(server.url, chat_batching=settings)) as router:
        assert router.items_per_call("m") == 1
        assert router.free_slots("m") == (settings.max_in_flight or 64)
        found = await together(router, [item(world, "x") for _ in range(3)])
    assert all(isinstance(one, Answer) for one in found)
    assert shapes(server) == [("", 1)] * 3


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tools": [{"type": "mcp", "server_label": "s"}]},
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"n": 2},
    ],
)
async def test_whatever_a_group_could_spoil_goes_by_itself(world: RouterWorld, fields: dict[str, Any]) -> None:
    async with RawServer(chat) as server, world.router(deployment(server.url, chat_batching=batching())) as router:
        await together(router, [item(world, "x", **fields) for _ in range(3)])
    assert shapes(server) == [("", 1)] * 3


async def test_more_tokens_than_the_cap_are_not_put_together(world: RouterWorld) -> None:
    batches = batching(max_total_input_tokens=200)
    async with RawServer(chat) as server, world.router(deployment(server.url, chat_batching=batches)) as router:
        await together(router, [item(world, "x" * 300) for _ in range(4)])
        await together(router, [item(world, "x" * 3_000) for _ in range(2)])
    assert shapes(server) == [("/batch", 2), ("/batch", 2), ("", 1), ("", 1)]


async def test_items_that_differ_in_a_parameter_do_not_meet(world: RouterWorld) -> None:
    async with RawServer(chat) as server, world.router(deployment(server.url, chat_batching=batching())) as router:
        await together(router, [item(world, "x", temperature=at % 2) for at in range(4)])
    assert shapes(server) == [("/batch", 2)] * 2


async def test_successes_are_kept_and_each_failure_is_its_own(world: RouterWorld) -> None:
    wanted = ["fine", "status 429", "status 503", "status 400", "unstructured", "no usage", "left out", "fine too"]
    async with RawServer(chat) as server, world.router(deployment(server.url, chat_batching=batching(8))) as router:
        found = await together(router, [item(world, text) for text in wanted])
        assert router.status()[0].state == "closed", "the server is not to blame for an item"
    assert shapes(server) == [("/batch", 8)]
    by_text = dict(zip(wanted, found, strict=True))
    assert isinstance(by_text["fine"], Answer)
    assert isinstance(by_text["fine too"], Answer)
    throttled = by_text["status 429"]
    assert isinstance(throttled, Throttled)
    assert throttled.retry_after_ms == 3_000
    assert isinstance(by_text["status 503"], Ambiguous)
    for text in ("status 400", "unstructured", "no usage"):
        assert isinstance(by_text[text], Refused), text
    no_usage, left_out = by_text["no usage"], by_text["left out"]
    assert isinstance(no_usage, UpstreamError)
    assert no_usage.code == USAGE_MISSING
    assert isinstance(left_out, UpstreamError)
    assert left_out.billed


async def test_a_server_without_the_path_or_that_sums_up_gets_single_calls_soon(world: RouterWorld) -> None:
    """As vLLM does: its path has this name, and its answer one usage for all."""

    async def script(request: Request, peer: Peer) -> None:
        if request.path.endswith("/batch"):
            await peer.answer(200, json.dumps({"choices": [{}] * len(texts(request)), "usage": {}}).encode())
        else:
            await chat(request, peer)

    async with RawServer(script) as server, world.router(deployment(server.url, chat_batching=batching())) as router:
        for _ in range(4):
            found = await together(router, [item(world, "x") for _ in range(4)])
            assert all(isinstance(one, Answer) for one in found)
    assert shapes(server)[-4:] == [("", 1)] * 4


async def test_a_group_goes_on_to_a_deployment_that_takes_it_or_waits_with_the_first_ones_failure(
    world: RouterWorld,
) -> None:
    async def busy(request: Request, peer: Peer) -> None:
        await peer.answer(429, b"{}", Retry_After="60")

    async with RawServer(busy) as first, RawServer(chat) as second:
        heavy = deployment(first.url, "first", weight=1000.0, chat_batching=batching())
        for settings, taken in ((batching(), True), (batching(2), False), (ChatBatching(), False)):
            second.requests.clear()
            async with world.router(heavy, deployment(second.url, "second", chat_batching=settings)) as router:
                found = await together(router, [item(world, "x") for _ in range(4)])
                if taken:
                    assert {one.deployment for one in found if isinstance(one, Answer)} == {"second"}
                    assert shapes(second) == [("/batch", 4)]
                else:
                    assert all(isinstance(one, Throttled) for one in found)
                    assert shapes(second) == []


async def test_a_deployment_that_takes_no_groups_serves_their_items_one_by_one_and_is_not_to_blame(
    world: RouterWorld,
) -> None:
    async with RawServer(chat) as groups, RawServer(chat) as plain:
        places = (
            deployment(groups.url, "groups", chat_batching=batching()),
            deployment(plain.url, "plain", weight=1000.0),
        )
        async with world.router(*places) as router:
            found = await together(router, [item(world, "x") for _ in range(4)])
            assert all(isinstance(one, Answer) for one in found)
            assert {status.state for status in router.status()} == {"closed"}
    assert shapes(plain)
    assert all(shape == ("", 1) for shape in shapes(plain))


def test_the_paths_are_the_items_own_and_the_batchs() -> None:
    assert BATCH_ENDPOINT == CHAT_ENDPOINT + "/batch"


@pytest.mark.parametrize(
    ("mode", "limits", "text"),
    [
        ("native_async_batch", {}, "reserved"),
        ("together", {}, "disabled, concurrent, sync_microbatch"),
        ("disabled", {"max_in_flight": 4}, "max_in_flight"),
        ("sync_microbatch", {"require_homogeneous_params": False}, "can only be true"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(mode: str, limits: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        ChatBatching.named(mode, **limits)
