"""Requests, answers and streams to translate, and readers that put streams together again as the SDKs do."""

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

TEXT = st.text(min_size=1, max_size=12)
NAME = st.text("abcdefgh_-", min_size=1, max_size=8)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
JSON_OBJECT = st.dictionaries(
    NAME, st.none() | st.booleans() | st.integers(-9, 9) | TEXT | st.lists(TEXT, max_size=2), max_size=3
)

text_block = st.builds(lambda text: {"type": "text", "text": text}, TEXT)
image_block = st.sampled_from(
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
        {"type": "image", "source": {"type": "url", "url": "https://example.test/a.jpg"}},
    ]
)
tool_use = st.builds(
    lambda id, name, input: {"type": "tool_use", "id": id, "name": name, "input": input}, NAME, NAME, JSON_OBJECT
)
tool_result = st.builds(
    lambda id, content: {"type": "tool_result", "tool_use_id": id, "content": content},
    NAME,
    TEXT | st.lists(text_block, min_size=2, max_size=3),
)


@st.composite
def user_content(draw: st.DrawFn) -> Any:
    results = draw(st.lists(tool_result, max_size=2))
    rest = draw(st.lists(text_block | image_block, min_size=0 if results else 1, max_size=3))
    if not results and len(rest) == 1 and rest[0]["type"] == "text":
        return rest[0]["text"]
    return results + rest


@st.composite
def assistant_content(draw: st.DrawFn) -> Any:
    texts = draw(st.lists(text_block, max_size=2))
    calls = draw(st.lists(tool_use, min_size=0 if texts else 1, max_size=2))
    return texts[0]["text"] if len(texts) == 1 and not calls else texts + calls


@st.composite
def anthropic_requests(draw: st.DrawFn) -> dict[str, Any]:
    """Messages requests of the common subset, written the way that translation writes them."""
    messages = []
    for _ in range(draw(st.integers(0, 2))):
        messages.append({"role": "user", "content": draw(user_content())})
        messages.append({"role": "assistant", "content": draw(assistant_content())})
    messages.append({"role": "user", "content": draw(user_content())})
    request: dict[str, Any] = {"model": draw(NAME), "max_tokens": draw(st.integers(1, 9999)), "messages": messages}
    optional = {
        "system": TEXT | st.lists(text_block, min_size=2, max_size=3),
        "temperature": st.floats(0, 1),
        "top_p": st.floats(0, 1),
        "top_k": st.integers(1, 100),
        "stop_sequences": st.lists(TEXT, min_size=1, max_size=3),
        "service_tier": st.sampled_from(["auto", "standard_only"]),
        "metadata": st.builds(lambda user: {"user_id": user}, TEXT),
        "stream": st.just(True),
        "output_config": st.sampled_from(
            [
                {"effort": "low"},
                {"format": {"type": "json_schema", "schema": SCHEMA}},
                {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
            ]
        ),
        "tools": st.lists(
            st.fixed_dictionaries(
                {"name": NAME, "input_schema": st.just(SCHEMA)}, optional={"description": TEXT, "strict": st.booleans()}
            ),
            min_size=1,
            max_size=2,
        ),
    }
    for name, strategy in optional.items():
        if draw(st.booleans()):
            request[name] = draw(strategy)
    if "tools" in request and draw(st.booleans()):
        request["tool_choice"] = draw(
            st.sampled_from(
                [
                    {"type": "auto"},
                    {"type": "none"},
                    {"type": "any", "disable_parallel_tool_use": True},
                    {"type": "tool", "name": "f"},
                    {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
                ]
            )
        )
    return request


@st.composite
def completions(draw: st.DrawFn) -> dict[str, Any]:
    """Whole chat completions of the common subset."""
    message: dict[str, Any] = {"role": "assistant", "content": draw(st.none() | TEXT), "refusal": None}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(TEXT)
    calls = draw(st.lists(st.tuples(NAME, NAME, JSON_OBJECT), max_size=2))
    if calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": compact(input)}}
            for id, name, input in calls
        ]
    choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None}
    choice["finish_reason"] = "tool_calls" if calls else draw(st.sampled_from(["stop", "length", "content_filter"]))
    if choice["finish_reason"] == "stop" and draw(st.booleans()):
        choice["stop_reason"] = draw(TEXT)
    cached, written, fresh, output = (draw(st.integers(0, 99)) for _ in range(4))
    details = {"cached_tokens": cached, **({"cache_write_tokens": written} if written else {})}
    prompt = cached + written + fresh
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": details,
    }
    if output and draw(st.booleans()):
        usage["completion_tokens_details"] = {"reasoning_tokens": draw(st.integers(1, output))}
    return {
        "id": "chatcmpl-" + draw(NAME),
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": draw(NAME),
        "choices": [choice],
        "usage": usage,
    }


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def pieces(draw: Any, text: str) -> list[str]:
    cut = draw(st.integers(0, len(text)))
    return [one for one in (text[:cut], text[cut:]) if one]


def openai_stream(draw: Any, whole: dict[str, Any]) -> bytes:
    """The chunks that a server would have sent for this completion."""
    choice = whole["choices"][0]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "content"):
        deltas += [{name: one} for one in pieces(draw, message.get(name) or "")]
    for index, call in enumerate(message.get("tool_calls", [])):
        function = call["function"]
        deltas.append({"tool_calls": [{**call, "index": index, "function": {**function, "arguments": ""}}]})
        for one in pieces(draw, function["arguments"]):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": one}}]})
    envelope = {
        "id": whole["id"],
        "object": "chat.completion.chunk",
        "created": whole["created"],
        "model": whole["model"],
    }
    chunks = [{**envelope, "choices": [{"index": 0, "delta": one, "finish_reason": None}]} for one in deltas]
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    if "stop_reason" in choice:
        last["stop_reason"] = choice["stop_reason"]
    chunks += [{**envelope, "choices": [last]}, {**envelope, "choices": [], "usage": whole["usage"]}]
    end: str = draw(st.sampled_from(["\n\n", "\r\n\r\n", "\r\r"]))
    return "".join(f"data: {compact(one)}{end}" for one in chunks).encode() + b"data: [DONE]" + end.encode()


def cut_up(draw: Any, data: bytes) -> Iterator[bytes]:
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=6)))
    for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
        yield data[start:stop]


def read_events(stream: bytes) -> list[dict[str, Any]]:
    events = []
    for block in stream.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        data = "".join(line.removeprefix("data: ") for line in lines if line.startswith("data: "))
        if data != "[DONE]":
            events.append(json.loads(data))
            named = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
            assert not named or named == [events[-1]["type"]]
    return events


def assemble_anthropic(stream: bytes) -> dict[str, Any]:
    """The message that a client puts together, with every rule of the order of events checked on the way."""
    events = [event for event in read_events(stream) if event["type"] != "ping"]
    message: dict[str, Any] = events[0]["message"]
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    open_index: int | None = None
    partial = ""
    for event in events[1:-1]:
        kind = event["type"]
        if kind == "content_block_start":
            assert open_index is None
            open_index, partial = event["index"], ""
            assert open_index == len(message["content"])
            message["content"].append(event["content_block"])
        elif kind == "content_block_delta":
            assert event["index"] == open_index
            delta, block = event["delta"], message["content"][-1]
            if delta["type"] == "input_json_delta":
                partial += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif kind == "content_block_stop":
            assert event["index"] == open_index
            if partial:
                message["content"][-1]["input"] = json.loads(partial)
            open_index = None
        else:
            assert kind == "message_delta"
            assert event is events[-2]
            assert open_index is None
            message |= event["delta"]
            message["usage"] |= event["usage"]
    return message


def assemble_openai(stream: bytes) -> dict[str, Any]:
    assert stream.endswith(b"data: [DONE]\n\n")
    chunks = read_events(stream)
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    calls: list[dict[str, Any]] = []
    choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None}
    for chunk in chunks:
        for one in chunk["choices"]:
            delta = one["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls", []):
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": "function", "function": {**call["function"]}})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            assert choice.get("finish_reason") is None, "the reason to stop comes last"
            choice["finish_reason"] = one["finish_reason"]
            if "stop_reason" in one:
                choice["stop_reason"] = one["stop_reason"]
    if calls:
        message["tool_calls"] = calls
    first, usage = chunks[0], chunks[-1]["usage"]
    assert len({(one["id"], one["object"], one["created"], one["model"]) for one in chunks}) == 1
    return {
        "id": first["id"],
        "object": "chat.completion",
        "created": first["created"],
        "model": first["model"],
        "choices": [choice],
        "usage": usage,
    }
