"""Streams that are held back until they are whole and judged: passed on byte for byte, written again, or refused before the first byte."""

from __future__ import annotations

import json
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.conftest import OwnModule
from tests.support.processes import wait_until
from tests.support.sdks import anthropic, openai
from tests.upstream.raw_server import Peer, Request
from tests.web.gateway_world import ASK, CHAT, MESSAGES, GatewayWorld
from tests.web.upstream import STREAM_END, STREAM_HEAD, chunk, chunked, event, streams
from tidegate.core.answers.stream_assembly import WholeAnswer
from tidegate.core.translate import StreamToAnthropic
from tidegate.settings.guards import GuardrailEntry, HookEntry
from tidegate.upstream.calls.exchange import UpstreamResponse
from tidegate.web.gateway.guarding import _collected

DONE = b"data: [DONE]\n\n"
HELD = GuardrailEntry(patterns=("forbidden",), streams="hold")
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
SAYS: Any = [{"role": "user", "content": "Say hi."}]


def split(text: str) -> list[bytes]:
    """A stream that says this text a few letters at a time, so that no chunk has a whole word."""
    parts = [text[at : at + 3] for at in range(0, len(text), 3)]
    return [chunk(part) for part in parts] + [chunk(finish="stop", usage=USAGE), DONE]


def blocks(*texts: str) -> list[bytes]:
    """The same as an Anthropic engine says it, a block for each text."""
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": []}
    events: list[tuple[str, dict[str, Any]]] = [
        ("message_start", {"message": {**message, "usage": {"input_tokens": 3, "output_tokens": 0}}})
    ]
    for index, text in enumerate(texts):
        events.append(("content_block_start", {"index": index, "content_block": {"type": "text", "text": ""}}))
        for at in range(0, len(text), 3):
            delta = {"type": "text_delta", "text": text[at : at + 3]}
            events.append(("content_block_delta", {"index": index, "delta": delta}))
        events.append(("content_block_stop", {"index": index}))
    last: Any = {"delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": {"output_tokens": 2}}
    events += [("message_delta", last), ("message_stop", {})]
    return [event({"type": name, **fields}, name) for name, fields in events]


@pytest.fixture
def own(own_module: OwnModule) -> str:
    return own_module("def sign(body, about): return {**body, 'signed': True}\n")


def test_a_stream_that_passes_is_passed_on_byte_for_byte(world: GatewayWorld) -> None:
    pieces = [b": a comment\n\n", *split("hello \u00fc"), b"data: {}\r\n\r\n"]
    world.start(streams(*pieces), guardrails={"house": HELD})
    answer = world.client().post(CHAT, json={**ASK, "stream": True})
    assert (answer.status_code, answer.content) == (200, b"".join(pieces))
    assert answer.headers["content-type"].startswith("text/event-stream")
    with world.openai() as client:
        texts = [
            part.choices[0].delta.content
            for part in client.chat.completions.create(model="m", messages=SAYS, stream=True)
            if part.choices
        ]
    assert "".join(filter(None, texts)) == "hello \u00fc"


def test_what_a_stream_says_in_parts_is_refused_before_its_first_byte(world: GatewayWorld) -> None:
    world.start(streams(*split("it is forbidden")), guardrails={"house": HELD})
    with world.openai() as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="m", messages=SAYS, stream=True)
    assert refused.value.code == "guardrail_pattern"
    assert "forbidden" not in str(refused.value)
    with world.anthropic() as theirs, pytest.raises(anthropic.BadRequestError) as caught:
        theirs.messages.create(model="m", max_tokens=9, messages=SAYS, stream=True)
    assert caught.value.body["type"] == "error"  # type: ignore[index]
    assert world.interactive() == (0, 0)


@pytest.mark.parametrize("engine", ["anthropic", "openai"])
def test_messages_are_held_back_whatever_engine_says_them(world: GatewayWorld, engine: str) -> None:
    fine, bad = (blocks("hello"), blocks("fine", "it is forbidden"))
    if engine == "openai":
        fine, bad = split("hello"), split("it is forbidden")
    world.start(streams(*fine), options=[{"engine": engine}], guardrails={"house": HELD})
    with world.anthropic() as client:
        with client.messages.stream(model="m", max_tokens=9, messages=SAYS) as stream:
            assert "".join(stream.text_stream) == "hello"
            assert stream.get_final_message().usage.output_tokens == 2
        raw = world.client().post(MESSAGES, json={**ASK, "max_tokens": 9, "stream": True})
        assert engine == "openai" or raw.content == b"".join(fine)
        world.upstreams[0].becomes(streams(*bad))
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(model="m", max_tokens=9, messages=SAYS, stream=True)


@pytest.mark.parametrize("engine", ["anthropic", "openai"])
def test_what_is_redacted_is_streamed_again(world: GatewayWorld, engine: str) -> None:
    text = "call 555-1234 now"
    redact = GuardrailEntry(patterns=(r"\d{3}-\d{4}",), action="redact", replacement="[number]", streams="hold")
    pieces = blocks(text) if engine == "anthropic" else split(text)
    world.start(streams(*pieces), options=[{"engine": engine}], guardrails={"house": redact})
    with world.openai() as client:
        options: Any = {"include_usage": True}
        parts = list(
            client.chat.completions.create(model="m", messages=SAYS, stream=True, stream_options=options, max_tokens=9)
        )
    texts = [choice.delta.content for part in parts for choice in part.choices]
    assert "".join(filter(None, texts)) == "call [number] now"
    assert [choice.finish_reason for part in parts for choice in part.choices][-1] == "stop"
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 2
    with world.anthropic() as theirs, theirs.messages.stream(model="m", max_tokens=9, messages=SAYS) as stream:
        assert "".join(stream.text_stream) == "call [number] now"
        assert stream.get_final_message().stop_reason == "end_turn"


def test_tool_calls_are_judged_and_written_again(world: GatewayWorld) -> None:
    def call(arguments: str, **more: Any) -> bytes:
        one = {"index": 0, "function": {"arguments": arguments, **more}}
        delta = {"tool_calls": [{**one, "id": "call_1", "type": "function"} if more else one]}
        return event({"id": "c", "model": "m", "created": 1, "choices": [{"index": 0, "delta": delta}]})

    pieces = [call("", name="dial"), call('{"number": "555-'), call('1234"}'), chunk(finish="tool_calls"), DONE]
    redact = GuardrailEntry(patterns=(r"\d{3}-\d{4}",), action="redact", replacement="[number]", streams="hold")
    world.start(streams(*pieces), guardrails={"house": redact})
    with world.openai() as client, client.chat.completions.stream(model="m", messages=SAYS) as stream:
        made = stream.get_final_completion().choices[0]
    assert made.finish_reason == "tool_calls"
    assert made.message.tool_calls is not None
    assert made.message.tool_calls[0].function.name == "dial"
    assert json.loads(made.message.tool_calls[0].function.arguments) == {"number": "[number]"}


def test_responses_are_judged_by_all_that_they_say(world: GatewayWorld) -> None:
    """The last event is the answer; what only a part before it says is not passed unseen, and a changed one is not streamed."""
    text = "it is forbidden"
    done: dict[str, Any] = {"id": "r", "object": "response", "output": [{"type": "message", "content": []}]}
    kind = "response.output_text.delta"
    pieces = [event({"type": kind, "delta": part, "output_index": 0}, kind) for part in (text[:9], text[9:])]
    pieces.append(event({"type": "response.completed", "response": done}, "response.completed"))
    body = {"model": "m", "input": "hi", "stream": True}
    world.start(streams(*pieces), guardrails={"house": HELD})
    assert world.client().post("/v1/responses", json=body).json()["error"]["code"] == "guardrail_pattern"
    world.upstreams[0].becomes(streams(pieces[0], pieces[-1]))
    assert world.client().post("/v1/responses", json=body).content == pieces[0] + pieces[-1]


def test_a_changed_response_is_refused_with_a_way_out(world: GatewayWorld, own: str) -> None:
    end = event({"type": "response.completed", "response": {"output": []}}, "response.completed")
    world.start(streams(end), hooks={"house": HookEntry(after=f"{own}:sign", streams="hold")})
    refused = world.client().post("/v1/responses", json={"model": "m", "input": "hi", "stream": True}).json()["error"]
    assert (refused["code"], "without `stream`" in refused["message"]) == ("stream_not_allowed", True)
    assert refused["param"] == "stream"


def test_a_rule_that_refuses_streams_wins_and_one_that_passes_them_does_not_look(world: GatewayWorld) -> None:
    passing = GuardrailEntry(patterns=("hello",), streams="pass")
    refusing = GuardrailEntry(patterns=("never",), models=("m",), tenants=("strict",))
    world.start(streams(*split("hello")), guardrails={"a": HELD, "b": passing, "c": refusing})
    strict, free = world.client(world.web.make_key("strict")), world.client(world.web.make_key("free"))
    assert strict.post(CHAT, json={**ASK, "stream": True}).json()["error"]["code"] == "stream_not_allowed"
    assert free.post(CHAT, json={**ASK, "stream": True}).status_code == 200


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([b"data: {not json\n\n"], "no answer"),
        ([b'data: ["a list"]\n\n'], "no answer"),
        ([chunk("x" * 3_000)] * 4, "no answer"),
        ([chunk("hello")], "broke off"),
    ],
)
def test_a_stream_that_breaks_or_never_ends_is_an_error_of_its_own(
    world: GatewayWorld, pieces: list[bytes], says: str
) -> None:
    is_cut = says == "broke off"

    async def script(request: Request, peer: Peer) -> None:
        await peer.send(STREAM_HEAD, *(chunked(piece) for piece in pieces), b"" if is_cut else STREAM_END)
        if is_cut:
            peer.close()

    world.start(script, guardrails={"house": HELD}, http={"response_bytes_max": 8_192})
    answer = world.client().post(CHAT, json={**ASK, "stream": True})
    assert answer.status_code == 502, answer.text
    assert says in answer.json()["error"]["message"]
    assert world.interactive() == (0, 0)


def test_a_client_that_leaves_while_its_stream_is_held_back_ends_the_call_upstream(world: GatewayWorld) -> None:
    async def begin(request: Request, peer: Peer) -> None:
        await peer.send(STREAM_HEAD, chunked(chunk("hello")))
        await peer.until_gone()

    world.start(begin, guardrails={"house": HELD})
    with socket.create_connection(("127.0.0.1", world.web.port)) as client:
        body = json.dumps({**ASK, "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        # Its first token is there, and is kept from the client.
        wait_until(lambda: world.interactive() == (1, 0), timeout_s=20, what="the stream to begin")
    wait_until(world.upstreams[0].posts[0].gone.is_set, timeout_s=20, what="the upstream to see it")
    wait_until(lambda: world.interactive() == (0, 0), timeout_s=20, what="the place to be given back")
    assert world.states() == ["closed"]


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("how", ["breaks", "lingers"])
def test_what_an_upstream_does_after_its_last_event_does_not_spoil_a_translated_stream(
    world: GatewayWorld, is_held: bool, how: str
) -> None:
    async def script(request: Request, peer: Peer) -> None:
        await peer.send(STREAM_HEAD, *(chunked(piece) for piece in split("hello")))
        if how == "breaks":
            peer.close()
        else:
            await peer.until_gone()

    world.start(script, guardrails={"house": HELD} if is_held else {})
    with world.anthropic() as client, client.messages.stream(model="m", max_tokens=9, messages=SAYS) as stream:
        assert "".join(stream.text_stream) == "hello"
        assert stream.get_final_message().stop_reason == "end_turn"
    wait_until(lambda: world.interactive() == (0, 0), timeout_s=20, what="the place to be given back")


@pytest.mark.anyio
@pytest.mark.parametrize(
    "pieces", [split("hello")[:-1], [], [*split("hello"), b""]], ids=["no end", "nothing", "end behind the last event"]
)
async def test_a_translated_stream_is_judged_as_its_client_would_get_it(pieces: list[bytes]) -> None:
    """The engine's stream may end without its last event: what the translator says then belongs to the answer.

    It is read to its end, or other calls could not use its connection.
    """

    async def read() -> bytes:
        return rest.pop(0) if rest else b""

    rest = list(pieces)
    response = cast(UpstreamResponse, SimpleNamespace(read=read, bytes_max=1 << 20, status=200))
    judged, taken = WholeAnswer(MESSAGES, 1 << 20), WholeAnswer(MESSAGES, 1 << 20)
    taken.feed(await _collected(response, StreamToAnthropic(), judged))
    assert judged.end_stream() == taken.end_stream()
    assert rest == []
