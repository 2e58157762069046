"""Streams in the other shape: whatever the pieces, what a client puts together is the answer; and what cannot be followed ends in words."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.translate.world import (
    assemble_anthropic,
    assemble_openai,
    completions,
    cut_up,
    openai_stream,
    read_events,
)
from tests.support.sdks import openai
from tidegate.core.translate import StreamToAnthropic, StreamToOpenai, answer_to_anthropic
from tidegate.core.translate.sse import EventReader, StreamBroken


def run(translator: StreamToAnthropic | StreamToOpenai, pieces: Any) -> bytes:
    return b"".join([translator.feed(piece) for piece in pieces]) + translator.end_stream()


@given(completions(), st.data())
def test_a_translated_stream_is_the_translated_answer(whole: dict[str, Any], data: st.DataObject) -> None:
    stream = openai_stream(data.draw, whole)
    translator = StreamToAnthropic()
    events = run(translator, cut_up(data.draw, stream))
    assert translator.ended
    assert assemble_anthropic(events) == json.loads(answer_to_anthropic(json.dumps(whole).encode()).body)


@given(completions(), st.data())
def test_there_and_back_is_the_same_completion(whole: dict[str, Any], data: st.DataObject) -> None:
    events = run(StreamToAnthropic(), [openai_stream(data.draw, whole)])
    chunks = run(StreamToOpenai(whole["created"], include_usage=True), cut_up(data.draw, events))
    assert assemble_openai(chunks) == whole
    for chunk in read_events(chunks):
        openai.types.chat.ChatCompletionChunk.model_validate(chunk)


def event(**fields: Any) -> bytes:
    return f"event: {fields['type']}\ndata: {json.dumps(fields)}\n\n".encode()


START = event(
    type="message_start",
    message={
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "usage": {"input_tokens": 9},
    },
)
TOOL = {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}}
STOP = event(type="message_delta", delta={"stop_reason": "tool_use", "stop_sequence": None}, usage={"output_tokens": 4})


def test_a_stream_as_anthropic_documents_it() -> None:
    stream = [
        START,
        event(type="content_block_start", index=0, content_block={"type": "text", "text": ""}),
        event(type="ping"),
        event(type="content_block_delta", index=0, delta={"type": "text_delta", "text": "Let me look."}),
        event(type="content_block_stop", index=0),
        event(type="content_block_start", index=1, content_block=TOOL),
        event(type="content_block_stop", index=1),
        event(type="brand_new_event", whatever=1),
        STOP,
        event(type="message_stop"),
    ]
    whole = assemble_openai(run(StreamToOpenai(7, include_usage=True), stream))
    assert whole["id"] == "chatcmpl-msg_1"
    assert whole["created"] == 7
    assert whole["choices"][0]["message"]["content"] == "Let me look."
    call = whole["choices"][0]["message"]["tool_calls"][0]
    assert call == {"id": "toolu_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (9, 4)


def test_usage_is_sent_only_when_it_was_asked_for() -> None:
    chunks = read_events(run(StreamToOpenai(7), [START, STOP, event(type="message_stop")]))
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def chunk(delta: Any = None, finish: str | None = None, **fields: Any) -> bytes:
    choices = [{"index": 0, "delta": delta or {}, "finish_reason": finish}]
    return f"data: {json.dumps({'id': 'chatcmpl-1', 'model': 'm', 'choices': choices, **fields})}\n\n".encode()


def call(index: Any = 0, **fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **fields}]}


NEW_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}


@pytest.mark.parametrize(
    "stream",
    [
        [b"data: {not json}\n\n"],
        [b"data: [1]\n\n"],
        [b"data: \xff\n\n"],
        [b"data: " + b"[" * 100_000 + b"\n\n"],
        [chunk(choices=[{"index": 1, "delta": {"content": "x"}}])],
        [chunk(choices=[7])],
        [chunk({"function_call": {"name": "f"}})],
        [chunk({"audio": {"id": "a"}})],
        [chunk(call(function={"arguments": "1"}))],
        [chunk(call(**NEW_CALL)), chunk(call(1, **NEW_CALL)), chunk(call(function={"arguments": "1"}))],
        [chunk(call(**NEW_CALL)), chunk({"content": "x"}), chunk(call(function={"arguments": "1"}))],
        [chunk(call(None, **NEW_CALL))],
        [chunk({"tool_calls": ["x"]})],
        [b'data: {"error":{"message":"engine died","type":"server_error","code":500}}\n\n'],
        [b'data: {"error":"engine died"}\n\n'],
    ],
)
def test_what_cannot_be_followed_ends_in_an_error_event(stream: list[bytes]) -> None:
    translator = StreamToAnthropic()
    events = read_events(run(translator, [*stream, chunk(finish="stop"), b"data: [DONE]\n\n"]))
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["message"]
    assert translator.ended
    assert translator.feed(chunk({"content": "more"})) == b""


@pytest.mark.parametrize(
    "stream",
    [
        [b""],
        [chunk({"content": "half"})],
        [chunk({"content": "half"}), b"data: [DONE]\n\n"],
        [chunk(finish="because")],
    ],
)
def test_a_stream_without_a_known_end_ends_in_an_error_event(stream: list[bytes]) -> None:
    translator = StreamToAnthropic()
    assert read_events(run(translator, stream))[-1]["type"] == "error"
    assert translator.ended


@pytest.mark.parametrize(
    "stream",
    [
        [START, b"data: nope\n\n"],
        [START, b"data: 1\n\n"],
        [event(type="message_start")],
        [START, event(type="content_block_start", index=0, content_block={"type": "server_tool_use"})],
        [START, event(type="content_block_delta", index=0, delta={"type": "citations_delta"})],
        [START, event(type="message_delta", delta={"stop_reason": "pause_turn"})],
        [START, event(type="error", error={"type": "overloaded_error", "message": "Overloaded"})],
    ],
)
def test_what_cannot_be_followed_ends_in_an_error_chunk(stream: list[bytes]) -> None:
    translator = StreamToOpenai(1)
    out = run(translator, [*stream, STOP, event(type="message_stop")])
    assert read_events(out)[-1]["error"]["message"]
    assert b"[DONE]" not in out
    assert translator.ended


@pytest.mark.parametrize("stream", [[b""], [START], [START, event(type="message_stop")]])
def test_a_stream_without_a_known_end_ends_in_an_error_chunk(stream: list[bytes]) -> None:
    translator = StreamToOpenai(1)
    out = run(translator, stream)
    assert read_events(out)[-1]["error"]["message"]
    assert b"[DONE]" not in out
    assert translator.ended
    assert translator.feed(STOP) == b""


@pytest.mark.parametrize(
    ("kind", "there"),
    [
        ("invalid_request_error", "invalid_request_error"),
        ("authentication_error", "authentication_error"),
        ("billing_error", "invalid_request_error"),
        ("permission_error", "permission_error"),
        ("not_found_error", "not_found_error"),
        ("request_too_large", "invalid_request_error"),
        ("rate_limit_error", "rate_limit_error"),
        ("api_error", "server_error"),
        ("timeout_error", "server_error"),
        ("overloaded_error", "server_error"),
        ("a_later_kind", "server_error"),
    ],
)
def test_the_kind_of_an_error_survives_in_both_directions(kind: str, there: str) -> None:
    out = read_events(StreamToOpenai(1).feed(event(type="error", error={"type": kind, "message": "why"})))
    assert out[-1]["error"] == {"message": "why", "type": there, "param": None, "code": kind}
    back = read_events(StreamToAnthropic().feed(f"data: {json.dumps(out[-1])}\n\n".encode()))
    assert back[-1]["error"]["type"] == {"server_error": "api_error"}.get(there, there)
    same = {"error": {"message": "why", "type": kind}}
    events = read_events(StreamToAnthropic().feed(f"data: {json.dumps(same)}\n\n".encode()))
    assert events[-1]["error"]["type"] == ("api_error" if kind == "a_later_kind" else kind)


@pytest.mark.parametrize(
    ("reported", "kind"),
    [
        ({"code": 429}, "rate_limit_error"),
        ({"status": 529, "code": 400}, "overloaded_error"),
        ({"code": 399, "type": "not_found_error"}, "not_found_error"),
        ({"code": 400}, "invalid_request_error"),
        ({"code": 599}, "api_error"),
        ({"code": 600, "type": "not_found_error"}, "not_found_error"),
        ({"code": True}, "api_error"),
        ({}, "api_error"),
    ],
)
def test_an_error_in_a_stream_may_say_its_status(reported: dict[str, Any], kind: str) -> None:
    text = json.dumps({"error": {"message": "why", **reported}})
    events = read_events(StreamToAnthropic().feed(f"data: {text}\n\n".encode()))
    assert events[-1]["error"]["type"] == kind


def test_an_empty_delta_opens_no_block_and_a_thought_under_two_names_is_sent_once() -> None:
    empty = {"role": "assistant", "content": "", "refusal": "", "reasoning": "", "reasoning_content": ""}
    twice = {"reasoning": "hm", "reasoning_content": "hm"}
    stream = [chunk(empty), chunk(twice), chunk({"content": "x"}), chunk(empty, "stop"), b"data: [DONE]\n\n"]
    message = assemble_anthropic(run(StreamToAnthropic(), stream))
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "x"},
    ]
    assert message["stop_reason"] == "end_turn"


def test_calls_of_one_number_are_distinguished_by_their_ids() -> None:
    """Some servers number each of several calls 0."""
    first = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    second = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": '{"x"'}}
    rest = {"id": "c3", "function": {"arguments": ": 2}"}}
    stream = [chunk(call(**one)) for one in (first, second, rest)]
    message = assemble_anthropic(run(StreamToAnthropic(), [*stream, chunk(finish="tool_calls"), b"data: [DONE]\n\n"]))
    assert [(block["id"], block["input"]) for block in message["content"]] == [("c1", {"x": 1}), ("c2", {"x": 2})]


@pytest.mark.parametrize("endless", [b"data: " + b"x" * 50, b"x" * 50, b"data: x\n" * 8, b"event: " + b"y" * 50])
def test_an_event_without_end_is_given_up_and_not_kept(endless: bytes) -> None:
    for translator in (StreamToAnthropic(event_bytes_max=200), StreamToOpenai(1, event_bytes_max=200)):
        for _ in range(100):
            translator.feed(endless)
        assert translator.ended
    reader = EventReader(10**6)
    for _ in range(10_000):
        reader.feed(b"data: x\n\n: note\n\n")
    assert not reader._rest


def test_an_event_of_four_mebibytes_is_read_and_a_longer_one_is_not() -> None:
    data = b"x" * (4 * 1024 * 1024 - 1)
    [event] = EventReader().feed(b"data: " + data + b"\n\n")
    assert event.data == data
    with pytest.raises(StreamBroken, match="longer than 4194304 bytes"):
        EventReader().feed(b"data: x" + data + b"\n\n")


def test_an_odd_but_lawful_stream_is_read() -> None:
    reader = EventReader()
    got = reader.feed(b":hello\r\nevent:a\r\nid: 7\r\ndata:1\r\ndata: 2\r\n\r\ndata\n\nretry: 5\n\n")
    assert [(one.name, one.data) for one in got] == [(":", b"hello"), ("a", b"1\n2"), ("", b"")]


@given(st.binary(max_size=200), st.data())
def test_garbage_never_raises(garbage: bytes, data: st.DataObject) -> None:
    for translator in (StreamToAnthropic(), StreamToOpenai(1)):
        assert translator.feed(b"data:\n\n") in (b"", b'event: ping\ndata: {"type":"ping"}\n\n')
        run(translator, cut_up(data.draw, b"data: " + garbage + b"\n\n" + garbage))
        assert translator.ended


def test_comments_keep_a_client_awake_and_done_ends_the_message_at_once() -> None:
    def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return b"data: " + json.dumps({"id": "c", "model": "m", "choices": [choice]}).encode() + b"\n\n"

    translator = StreamToAnthropic()
    assert read_events(translator.feed(b": waiting\n\n")) == [{"type": "ping"}]
    [start, *_] = read_events(translator.feed(chunk({"role": "assistant", "content": "hi"})))
    assert (start["type"], start["message"]["usage"]["output_tokens"]) == ("message_start", 0)
    assert not translator.ended
    last = read_events(translator.feed(chunk({}, "stop") + b"data: [DONE]\n\n"))
    assert (last[-1]["type"], translator.ended, translator.end_stream()) == ("message_stop", True, b"")
