"""Books and hard budgets say the same of every stream, to the nano: at every door, for every way a server says its usage, and wherever the
client closes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.processes import wait_until
from tests.upstream.raw_server import Peer, Request, Script
from tests.web.gateway_world import ASK, CHAT, MESSAGES, GatewayWorld
from tests.web.upstream import STREAM_END, STREAM_HEAD, answers, chat_with, chunk, chunked, event, streams
from tidegate.core.budgets.budget import Limit, Period
from tidegate.core.budgets.money import MoneyLedger
from tidegate.core.deployments import EngineKind
from tidegate.core.usage.prices import NANO
from tidegate.settings.capacity import DeploymentPrice

PRICED = {"price": DeploymentPrice(input=3, cached=1, output=7)}
LIFETIME = Limit(Period.LIFETIME, nano=NANO)
COMPLETIONS, RESPONSES, EMBEDDINGS = "/v1/completions", "/v1/responses", "/v1/embeddings"
DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 6}}
TEXT = "four"

Pieces = tuple[bytes, ...]


def text_chunk(text: str, **more: Any) -> bytes:
    return event({"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": text}], **more})


def with_usage(output: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 10, "completion_tokens": output}}


def response_events(*, says: bool) -> Pieces:
    usage = {"input_tokens": 10, "output_tokens": 5} if says else None
    return (
        event({"type": "response.created", "response": {"usage": None}}, "response.created"),
        event({"type": "response.output_text.delta", "delta": TEXT}, "response.output_text.delta"),
        event({"type": "response.function_call_arguments.delta", "delta": TEXT}),
        event({"type": "response.completed", "response": {"usage": usage}}, "response.completed"),
    )


def message_events(*, says: bool) -> Pieces:
    first = {"input_tokens": 4, "cache_read_input_tokens": 6, "output_tokens": 1} if says else None
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    last: dict[str, Any] = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}
    if says:
        last["usage"] = {"output_tokens": 5}
    start: dict[str, Any] = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "usage": first,
    }
    return (
        event({"type": "message_start", "message": start}, "message_start"),
        event(block, "content_block_start"),
        *(
            event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": TEXT}}, kind)
            for kind in ("content_block_delta",) * 2
        ),
        event({"type": "content_block_stop", "index": 0}, "content_block_stop"),
        event(last, "message_delta"),
        event({"type": "message_stop"}, "message_stop"),
    )


SHAPES: dict[str, tuple[str, Pieces]] = {
    "chat, usage at the end": (
        CHAT,
        (chunk(TEXT), chunk(TEXT), chunk(finish="stop"), event({"choices": [], "usage": USAGE}), DONE),
    ),
    "chat, no usage": (CHAT, (chunk(TEXT), chunk(TEXT), chunk(finish="stop"), DONE)),
    "chat, usage null": (CHAT, (chunk(TEXT, usage=None), chunk(finish="stop", usage=None), DONE)),
    "chat, usage beside the last text": (CHAT, (chunk(TEXT), chunk(TEXT, "stop", usage=USAGE), DONE)),
    "chat, usage in every chunk": (
        CHAT,
        (chunk(TEXT, **with_usage(1)), chunk(TEXT, **with_usage(2)), chunk(finish="stop", **with_usage(2)), DONE),
    ),
    "completions, usage at the end": (
        COMPLETIONS,
        (text_chunk(TEXT), text_chunk(TEXT), event({"choices": [], "usage": USAGE}), DONE),
    ),
    "completions, no usage": (COMPLETIONS, (text_chunk(TEXT), text_chunk(TEXT), DONE)),
    "responses": (RESPONSES, response_events(says=True)),
    "responses, no usage": (RESPONSES, response_events(says=False)),
    "messages": (MESSAGES, message_events(says=True)),
    "messages, no usage": (MESSAGES, message_events(says=False)),
}


# The same streams at a door that speaks the other dialect.
CROSSED = {
    "messages from chat": (MESSAGES, EngineKind.VLLM, SHAPES["chat, usage at the end"][1]),
    "messages from chat, no usage": (MESSAGES, EngineKind.VLLM, SHAPES["chat, no usage"][1]),
    "chat from messages": (CHAT, EngineKind.ANTHROPIC, SHAPES["messages"][1]),
    "chat from messages, no usage": (CHAT, EngineKind.ANTHROPIC, SHAPES["messages, no usage"][1]),
}


def body_for(door: str) -> dict[str, Any]:
    limit = {"max_output_tokens" if door == RESPONSES else "max_tokens": 1_000}
    if door == COMPLETIONS:
        return {"model": "m", "prompt": "Say hi.", "stream": True, **limit}
    if door == RESPONSES:
        return {"model": "m", "input": "Say hi.", "stream": True, **limit}
    return {**ASK, "stream": True, **limit}


def cut_after(pieces: Pieces, count: int) -> Script:
    """Sends so many events, and then nothing more until the client is gone; all of them: ends the stream."""

    async def script(request: Request, peer: Peer) -> None:
        await peer.send(STREAM_HEAD, *(chunked(piece) for piece in pieces[:count]))
        if count == len(pieces):
            await peer.send(STREAM_END)
        await peer.until_gone()

    return script


class Books:
    """A key with a hard budget, and what both sides say of it."""

    def __init__(self, world: GatewayWorld, name: str) -> None:
        self._world = world
        self.key = world.web.make_key(name, limits=(LIFETIME,))
        self._name = name

    def booked(self) -> int:
        rows = self._world.web.statement(
            "select coalesce(sum(u.input_nano + u.cached_nano + u.output_nano), 0), coalesce(sum(u.calls), 0)"
            " from usage_interactive u join tenants t on t.id = u.tenant_id where t.name = ?",
            self._name,
        )
        return int(rows[0][0]) if rows[0][1] else -1

    def paid(self) -> int:
        key_id = self._world.web.statement(
            "select k.id from keys k join tenants t on t.id = k.tenant_id where t.name = ?", self._name
        )[0][0]
        rows = self._world.web.statement("select ledger from budgets where id = ?", f"money:key:{key_id}")
        ledger = MoneyLedger.unpack(bytes(rows[0][0]))
        assert isinstance(ledger, MoneyLedger)
        now = self._world.web.clock.now_ms()
        assert LIFETIME.nano is not None
        in_flight = LIFETIME.nano - ledger._rolled(LIFETIME, now)[1].room(now, LIFETIME.nano)
        return in_flight if ledger._rolled(LIFETIME, now)[0].taken() == 0 else -2

    def agree(self) -> int:
        """Wait until nothing is in flight and both sides say the same; gives what it is."""
        wait_until(
            lambda: self.booked() == self.paid(),
            timeout_s=15,
            what=f"books ({self.booked()}) and budget ({self.paid()}) to agree",
        )
        return self.paid()


def read_so_far(world: GatewayWorld, key: str, door: str, visible: int) -> None:
    """Read until so many events were seen, and close."""
    with world.client(key).stream("POST", door, json=body_for(door)) as answer:
        assert answer.status_code == 200
        seen = b""
        if visible:
            for piece in answer.iter_bytes():
                seen += piece
                if seen.count(b"\n\n") >= visible:
                    break


@pytest.mark.parametrize("shape", SHAPES)
def test_books_and_budget_agree_wherever_the_client_closes(world: GatewayWorld, shape: str) -> None:
    door, pieces = SHAPES[shape]
    engine = {"engine": EngineKind.ANTHROPIC} if door == MESSAGES else {}
    world.start(answers(), options=[{**PRICED, **engine}])
    paid = []
    for count in range(1, len(pieces) + 1):
        world.upstreams[0].becomes(cut_after(pieces, count))
        books = Books(world, f"t{count}")
        hidden = door in (CHAT, COMPLETIONS) and any(b'"choices": []' in piece for piece in pieces[:count])
        read_so_far(world, books.key, door, count - hidden)
        paid.append(books.agree())
    says = shape in ("chat, usage at the end", "chat, usage beside the last text", "completions, usage at the end")
    if says:
        assert paid[-1] == (4 * 3 + 6 * 1 + 5 * 7) * 1_000


@pytest.mark.parametrize("shape", CROSSED)
def test_books_and_budget_agree_where_the_stream_is_translated(world: GatewayWorld, shape: str) -> None:
    door, engine, pieces = CROSSED[shape]
    world.start(answers(), options=[{**PRICED, "engine": engine}])
    for count in (1, 3, len(pieces)):
        world.upstreams[0].becomes(cut_after(pieces, count))
        books = Books(world, f"t{count}")
        read_so_far(world, books.key, door, 1)
        assert books.agree() > 0


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_call_that_may_have_been_done_stands_in_both_with_what_was_set_aside(
    world: GatewayWorld, is_stream: bool
) -> None:
    async def breaks(request: Request, peer: Peer) -> None:
        peer.reset()

    world.start(breaks, options=[PRICED])
    books = Books(world, "acme")
    answer = world.client(books.key).post(CHAT, json={**ASK, "max_tokens": 1_000, "stream": is_stream})
    assert answer.status_code >= 500
    assert books.agree() >= 1_000 * 7_000


def test_a_call_that_is_left_before_its_answer_is_the_same_in_both(world: GatewayWorld) -> None:
    async def silent(request: Request, peer: Peer) -> None:
        await peer.until_gone()

    world.start(silent, options=[PRICED])
    for name, more in (("stream", {"stream": True}), ("whole", {})):
        books = Books(world, name)
        before = len(world.upstreams[0].posts)
        client = world.client(books.key)
        with pytest.raises(Exception, match="timed out"):
            client.post(CHAT, json={**ASK, "max_tokens": 1_000, **more}, timeout=0.5)
        assert len(world.upstreams[0].posts) == before + 1
        paid = books.agree()
        assert (paid >= 1_000 * 7_000) is (name == "whole"), (
            "only an answer that is not streamed may be written to its end"
        )


@pytest.mark.parametrize(
    ("door", "body", "answer"),
    [
        (CHAT, {**ASK, "max_tokens": 1_000}, chat_with("four four", 10, 2)),
        (CHAT, {**ASK, "max_tokens": 1_000}, b'{"choices":[{"message":{"content":"four four"}}]}'),
        (COMPLETIONS, {"model": "m", "prompt": "a", "max_tokens": 9}, b'{"choices":[{"text":"four"}]}'),
        (
            RESPONSES,
            {"model": "m", "input": "a", "max_output_tokens": 9},
            b'{"output":[{"content":[{"text":"four"}]}]}',
        ),
        (EMBEDDINGS, {"model": "m", "input": "a"}, b'{"data":[{"embedding":"AAAA"}],"usage":{"prompt_tokens":3}}'),
        (EMBEDDINGS, {"model": "m", "input": "a"}, b'{"data":[{"embedding":"AAAA"}]}'),
    ],
)
def test_whole_answers_agree_with_and_without_usage(
    world: GatewayWorld, door: str, body: dict[str, Any], answer: bytes
) -> None:
    world.start(answers(answer), options=[PRICED])
    books = Books(world, "acme")
    assert world.client(books.key).post(door, json=body).status_code == 200
    assert books.agree() > 0


ODD: dict[str, Any] = {
    "negative": {"prompt_tokens": -10, "completion_tokens": 5},
    "texts": {"prompt_tokens": "10", "completion_tokens": "5"},
    "halves": {"prompt_tokens": 10.5, "completion_tokens": 5},
    "too many": {"prompt_tokens": 10, "completion_tokens": 1 << 60},
    "only a prompt": {"prompt_tokens": 10},
    "only an answer": {"completion_tokens": 5},
    "odd details": {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": "6"}},
    "more cached": {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 60}},
    "more reasoning": {"completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 60}},
    "a list": [],
}


@pytest.mark.parametrize("door", [CHAT, MESSAGES])
@pytest.mark.parametrize("is_stream", [True, False])
def test_books_and_budget_agree_whatever_a_server_says_it_used(world: GatewayWorld, door: str, is_stream: bool) -> None:
    world.start(answers(), options=[PRICED])
    for name, usage in ODD.items():
        if is_stream:
            last = event({"choices": [], "usage": usage})
            world.upstreams[0].becomes(streams(chunk(TEXT), chunk(finish="stop"), last, DONE))
        else:
            whole = {**json.loads(chat_with(TEXT)), "usage": usage}
            world.upstreams[0].becomes(answers(json.dumps(whole).encode()))
        books = Books(world, name)
        answer = world.client(books.key).post(door, json={**body_for(door), "stream": is_stream})
        assert answer.status_code == 200, answer.text
        paid = books.agree()
        assert 5 * 1_000 < paid < 300 * 1_000, f"{name}: {paid}"


def test_text_is_counted_and_not_events(world: GatewayWorld) -> None:
    """One event of 4,800 bytes is 1,200 tokens; reasoning and what tools are called with count as well."""
    long = "word " * 960
    call = {"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "x" * 99, "function": {"arguments": long}}]}}
    pieces = (
        chunk(long),
        event({"choices": [{"index": 0, "delta": {"reasoning_content": long}}]}),
        event({"choices": [call]}),
    )
    world.start(answers(), options=[PRICED])
    world.upstreams[0].becomes(cut_after((*pieces, DONE), 3))
    books = Books(world, "acme")
    read_so_far(world, books.key, CHAT, 3)
    assert books.agree() // 7_000 in range(3_600, 3_620)


class Picky:
    """A server that does not know `stream_options`."""

    def __init__(self, refusal: bytes, status: int = 400) -> None:
        self.refused = 0
        self._refusal = refusal
        self._status = status

    async def __call__(self, request: Request, peer: Peer) -> None:
        if b"stream_options" in request.body:
            self.refused += 1
            await peer.answer(self._status, self._refusal)
        else:
            await streams(chunk(TEXT), chunk(finish="stop"), DONE)(request, peer)


@pytest.mark.parametrize("refusal", [(b"{}", 400), (b'{"error":"extra fields"}', 422), (b"include_usage?", 500)])
@pytest.mark.parametrize("door", [CHAT, MESSAGES])
def test_a_server_that_refuses_the_option_is_asked_without_from_then_on(
    world: GatewayWorld, refusal: tuple[bytes, int], door: str
) -> None:
    server = Picky(*refusal)
    world.start(server, options=[PRICED])
    client = world.client()
    for _ in range(3):
        with client.stream("POST", door, json=body_for(door)) as answer:
            assert answer.status_code == 200
            assert TEXT.encode() in answer.read()
    assert server.refused == 1


def test_a_request_that_is_bad_without_the_option_too_is_refused_and_nothing_is_learned(world: GatewayWorld) -> None:
    world.start(answers(b'{"error":{"message":"no"}}', 400), options=[PRICED])
    client = world.client()
    assert client.post(CHAT, json=body_for(CHAT)).status_code == 400
    world.upstreams[0].becomes(streams(chunk(TEXT), DONE))
    client.post(CHAT, json=body_for(CHAT))
    assert json.loads(world.upstreams[0].posts[-1].body)["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("options", "sees"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {"include_usage": False, "x": 1}}, False),
        ({"stream_options": {"include_usage": True}}, True),
    ],
)
def test_the_caller_sees_the_usage_chunk_only_if_it_asked(
    world: GatewayWorld, options: dict[str, Any], sees: bool
) -> None:
    door, pieces = SHAPES["chat, usage at the end"]
    world.start(streams(*pieces))
    with world.client().stream("POST", door, json={**body_for(door), **options}) as answer:
        body = answer.read()
    kept = [piece for piece in pieces if sees or b'"choices": []' not in piece]
    assert body == b"".join(kept)
    asked = json.loads(world.upstreams[0].posts[0].body)["stream_options"]
    assert asked["include_usage"] is True
