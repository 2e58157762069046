"""The whole answer that a stream says: whatever pieces it comes in, with nothing of it left out; and a stream that says an answer."""

from __future__ import annotations

import contextlib
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.answers.stream_assembly import WholeAnswer
from tidegate.core.answers.stream_synthesis import stream_of
from tidegate.core.translate.sse import StreamBroken

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
BYTES_MAX = 1 << 20


def whole(endpoint: str, *pieces: bytes) -> dict[str, Any]:
    answer = WholeAnswer(endpoint, BYTES_MAX)
    for piece in pieces:
        answer.feed(piece)
    found = json.loads(answer.end_stream())
    assert isinstance(found, dict)
    return found


def as_stream(*events: Any) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in events)


def delta(more: dict[str, Any], index: int = 0, **choice: Any) -> dict[str, Any]:
    named = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return {**named, "choices": [{"index": index, "delta": more, "finish_reason": None, **choice}]}


def test_choices_texts_tools_and_what_is_new_are_put_together() -> None:
    def call(index: int, **more: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, **more}]}

    stream = as_stream(
        delta({"role": "assistant", "content": ""}),
        delta({"content": "it is f"}),
        delta({"content": "orbidden", "reasoning_content": "hm"}),
        delta({"reasoning_content": "m"}, logprobs={"content": [{"token": "a"}]}),
        delta({"content": "second"}, 1, logprobs={"content": [{"token": "b"}]}),
        delta(call(0, id="call_1", type="function", function={"name": "dial", "arguments": ""})),
        delta(call(0, function={"arguments": '{"n":'})),
        delta(call(1, id="call_2", type="function", function={"name": "ring", "arguments": "{}"})),
        delta(call(0, function={"arguments": "1}"})),
        delta({"new": {"deep": ["x"]}}, obfuscation="zzz"),
        delta({"new": {"deep": ["y"], "text": "a"}}),
        delta({"new": {"text": "b"}}, finish_reason="tool_calls"),
        {**delta({}), "choices": [], "usage": {"total_tokens": 5}},
    )
    answer = whole(CHAT, stream + b"data: [DONE]\n\n")
    first, second = answer["choices"]
    assert first["message"] == {
        "role": "assistant",
        "content": "it is forbidden",
        "reasoning_content": "hmm",
        "tool_calls": [
            {"index": 0, "id": "call_1", "type": "function", "function": {"name": "dial", "arguments": '{"n":1}'}},
            {"index": 1, "id": "call_2", "type": "function", "function": {"name": "ring", "arguments": "{}"}},
        ],
        "new": {"deep": ["x", "y"], "text": "ab"},
    }
    assert (first["finish_reason"], first["logprobs"]) == ("tool_calls", {"content": [{"token": "a"}]})
    assert second["message"]["content"] == "second"
    assert (answer["object"], answer["usage"]) == ("chat.completion", {"total_tokens": 5})


@pytest.mark.parametrize("call_id", [{"id": "call_1"}, {}])
def test_a_call_without_a_number_goes_on_under_its_id_or_without_a_name(call_id: dict[str, str]) -> None:
    def call(function: dict[str, str], **named: str) -> dict[str, Any]:
        return delta({"tool_calls": [{**named, "function": function}]})

    answer = whole(
        CHAT,
        as_stream(
            call({"name": "dial", "arguments": '"for'}, **call_id),
            call({"arguments": 'bidden"'}, **call_id),
            call({"name": "ring", "arguments": "{}"}),
            call({"arguments": " "}),
        ),
    )
    assert answer["choices"][0]["message"]["tool_calls"] == [
        {**call_id, "function": {"name": "dial", "arguments": '"forbidden"'}},
        {"function": {"name": "ring", "arguments": "{} "}},
    ]


@pytest.mark.parametrize(
    "event",
    [
        b'{"choices":[{"index":0,"delta":{"content":"forbidden","content":"x"}}]}',
        b'{"choices":[{"index":0,"delta":{"content":"forbidden"}}],"choices":[]}',
    ],
)
def test_a_field_that_an_event_names_twice_is_kept_in_both_readings(event: bytes) -> None:
    assert "forbidden" in whole(CHAT, b"data: %b\n\n" % event)["events"][0]


@pytest.mark.parametrize("at", [1, 3, 10])
def test_a_byte_order_mark_hides_no_event(at: int) -> None:
    stream = b"\xef\xbb\xbf" + as_stream(delta({"content": "forbidden"}))
    assert whole(CHAT, stream[:at], stream[at:])["choices"][0]["message"]["content"] == "forbidden"


def test_messages_are_put_together_block_by_block() -> None:
    def block(index: int, begun: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
        goes_on = [{"type": "content_block_delta", "index": index, "delta": one} for one in deltas]
        end = {"type": "content_block_stop", "index": index}
        return [{"type": "content_block_start", "index": index, "content_block": begun}, *goes_on, end]

    message = {"id": "msg", "type": "message", "role": "assistant", "content": [], "usage": {"input_tokens": 3}}
    parts = ({"type": "thinking_delta", "thinking": "h"}, {"type": "signature_delta", "signature": "s"})
    cited = {"type": "citations_delta", "citation": {"url": "u"}}
    arguments = [{"type": "input_json_delta", "partial_json": part} for part in ('{"a"', ": [1]}")]
    answer = whole(
        MESSAGES,
        as_stream(
            {"type": "message_start", "message": message},
            {"type": "ping"},
            *block(0, {"type": "thinking", "thinking": "", "signature": ""}, *parts),
            *block(1, {"type": "text", "text": "x"}, {"type": "text_delta", "text": "y"}, cited),
            *block(2, {"type": "tool_use", "id": "t", "name": "n", "input": {}}, *arguments),
            {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 2}},
            {"type": "surprise", "text": "unknown"},
            {"type": "message_stop"},
        ),
    )
    assert answer["content"] == [
        {"type": "thinking", "thinking": "h", "signature": "s"},
        {"type": "text", "text": "xy", "citations": [{"url": "u"}]},
        {"type": "tool_use", "id": "t", "name": "n", "input": {"a": [1]}},
    ]
    assert (answer["stop_reason"], answer["usage"]) == ("tool_use", {"input_tokens": 3, "output_tokens": 2})
    assert answer["events"] == [{"type": "surprise", "text": "unknown"}], "nothing is passed over"


def test_a_response_is_its_last_event_and_what_that_leaves_out() -> None:
    done = {"id": "r", "output": [{"type": "message", "content": [{"type": "output_text", "text": "all of it"}]}]}

    def part(text: str, **more: Any) -> dict[str, Any]:
        return {"type": "response.output_text.delta", "delta": text, "output_index": 0, "content_index": 0, **more}

    events = [part("all "), part("of it"), {"type": "response.completed", "response": done}]
    assert whole(RESPONSES, as_stream(*events)) == done
    assert whole(RESPONSES, as_stream(part("se", item_id="x"), part("cret", item_id="x"), *events))["events"] == [
        "secret"
    ]
    assert whole(RESPONSES, as_stream(part("cut o"), part("ff")))["events"] == ["cut off"]
    assert whole(RESPONSES, as_stream({"type": "error", "message": "no"}))["events"] == [
        {"type": "error", "message": "no"}
    ]


def test_what_only_other_events_of_a_response_say_is_kept_too() -> None:
    """Some servers leave the output out of the last event."""
    item = {"type": "custom_tool_call", "id": "c1", "status": "completed", "name": "dial", "input": "forbidden"}
    events = [
        {"type": "response.created", "response": {"id": "r", "status": "in_progress", "instructions": "be brief"}},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.output_text.done", "item_id": "m1", "text": "not in parts"},
        {"type": "response.completed", "response": {"id": "r", "instructions": "be brief", "output": []}},
    ]
    assert whole(RESPONSES, as_stream(*events))["events"] == ["dial", "forbidden", "not in parts"]


def test_a_message_that_begins_with_content_keeps_it() -> None:
    begin = {
        "type": "message_start",
        "message": {"role": "assistant", "content": [{"type": "text", "text": "forbidden"}]},
    }
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "x"}}
    assert "forbidden" in json.dumps(whole(MESSAGES, as_stream(begin, block)))


@given(cuts=st.lists(st.integers(0, 400), max_size=12), end=st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"]))
def test_pieces_do_not_matter(cuts: list[int], end: bytes) -> None:
    events = [delta({"content": "h\u00fc"}), delta({"content": "llo \U0001f30a"}), delta({}, finish_reason="stop")]
    stream = b"".join(b"data: %b%b" % (json.dumps(one, ensure_ascii=False).encode(), end) for one in events)
    at = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[one:two] for one, two in itertools.pairwise(at)]
    assert whole(CHAT, *pieces)["choices"][0]["message"]["content"] == "h\u00fcllo \U0001f30a"


def test_what_says_nothing_is_passed_over() -> None:
    stream = b": awake\n\nid: 7\nretry: 10\nevent: chunk\n" + as_stream(delta({"content": "x"})) + b"data\n\n"
    assert whole(CHAT, stream) == whole(CHAT, as_stream(delta({"content": "x"})))


def test_an_event_without_its_end_counts() -> None:
    stream = as_stream(delta({"content": "for"})) + b"data: " + json.dumps(delta({"content": "bidden"})).encode()
    assert whole(CHAT, stream)["choices"][0]["message"]["content"] == "forbidden"


@pytest.mark.parametrize(
    "stream",
    [
        b"data: {\n\n",
        b"data: 5\n\n",
        b"data: \xff\n\n",
        # An answer that is no stream of events, but is called one.
        json.dumps(delta({"content": "forbidden"}), indent=1).encode(),
        as_stream(delta({})) + b"odd: line\n\n",
        b"data: " + b"[" * 100_000 + b"\n\n",
        b"data: " + b"x" * (BYTES_MAX + 1),
        as_stream({"choices": ["text"]}),
        as_stream({"choices": [{"index": "first", "delta": {}}]}),
    ],
)
def test_what_cannot_be_followed_is_refused(stream: bytes) -> None:
    with pytest.raises(StreamBroken):
        whole(CHAT, stream)


@pytest.mark.parametrize("depth", [600, 990])
@pytest.mark.parametrize("endpoint", [CHAT, MESSAGES, RESPONSES])
def test_an_event_that_is_nested_too_deeply_is_refused(endpoint: str, depth: int) -> None:
    """The decoder reads deeper than what puts texts together can go."""
    deep = b'{"a":' * depth + b'"x"' + b"}" * depth
    for event in (
        b'{"choices":[{"index":0,"delta":%b}]}',
        b'{"type":"response.completed","response":%b}',
        b'{"odd":%b}',
    ):
        with pytest.raises(StreamBroken) if endpoint == CHAT else contextlib.suppress(StreamBroken):
            whole(endpoint, b"data: %b\n\n" % (event % deep))


@pytest.mark.parametrize(
    "events",
    [
        [{"choices": None}, {"choices": {"index": 0, "delta": {"content": "x"}}}],
        [{"choices": [{"index": 0, "delta": "forbidden"}]}],
        [delta({"content": "a"}), delta({"content": {"odd": "forbidden"}}), delta({"content": ["forbidden"]})],
        [delta({"tool_calls": "forbidden"}), delta({"tool_calls": [{"index": 0}]}), delta({"tool_calls": 5})],
        [{"error": {"message": "forbidden"}}, {"error": "forbidden"}],
        [{"type": "content_block_delta", "index": 7, "delta": {"text": "forbidden"}}],
    ],
)
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_odd_shapes_lose_no_text(endpoint: str, events: list[Any]) -> None:
    stream = as_stream(*events)
    assert ("forbidden" in json.dumps(whole(endpoint, stream))) == (b"forbidden" in stream)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(texts=st.lists(TEXTS, min_size=1, max_size=3), arguments=TEXTS)
def test_an_answer_written_as_a_stream_reads_the_same(texts: list[str], arguments: str) -> None:
    function = {"name": "f", "arguments": arguments}
    calls = [{"index": 0, "id": "c", "type": "function", "function": function}]
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": text, "tool_calls": calls},
            "finish_reason": "stop",
        }
        for index, text in enumerate(texts)
    ]
    chat = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": choices, "usage": {"n": 1}}
    stream = stream_of(CHAT, json.dumps(chat).encode())
    assert stream is not None
    assert whole(CHAT, stream) == chat
    blocks = [{"type": "text", "text": text} for text in texts] + [
        {"type": "tool_use", "id": "t", "name": "n", "input": {"a": arguments}},
        {"type": "image", "source": arguments},
    ]
    message: dict[str, Any] = {"id": "m", "type": "message", "role": "assistant", "content": blocks}
    message |= {"usage": {"input_tokens": 1}, "stop_reason": "end_turn", "stop_sequence": None}
    stream = stream_of(MESSAGES, json.dumps(message).encode())
    assert stream is not None
    assert whole(MESSAGES, stream) == message


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b'{"choices": 5}', b'{"content": ["x"]}'])
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_what_is_no_answer_makes_no_stream(endpoint: str, body: bytes) -> None:
    assert stream_of(endpoint, body) is None
