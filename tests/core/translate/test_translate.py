"""Requests, answers and errors in the other shape: there and back is the same, and what has no counterpart is refused by its path."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.translate.world import SCHEMA, anthropic_requests, completions
from tests.support.sdks import openai
from tidegate.core.answers import answer as answers
from tidegate.core.errors import ApiProblem
from tidegate.core.translate import (
    OPENAI,
    VLLM,
    Translated,
    answer_to_anthropic,
    answer_to_openai,
    error_to_anthropic,
    error_to_openai,
    request_to_anthropic,
    request_to_openai,
)


def packed(value: Any) -> bytes:
    return json.dumps(value).encode()


def body_of(translated: Translated) -> Any:
    return json.loads(translated.body)


# ---- there and back


@given(anthropic_requests())
def test_a_messages_request_comes_back_as_it_was(request: dict[str, Any]) -> None:
    there = request_to_openai(packed(request), VLLM)
    back = request_to_anthropic(there.body)
    assert there.left_out == ()
    assert set(back.left_out) <= {"response_format.json_schema.name"}
    assert body_of(back) == request
    assert there.stream == back.stream == request.get("stream", False)
    assert body_of(request_to_openai(back.body, VLLM)) == body_of(there)


@given(completions())
def test_an_answer_comes_back_as_it_was(whole: dict[str, Any]) -> None:
    there = answer_to_anthropic(packed(whole))
    back = answer_to_openai(there.body, whole["created"])
    assert body_of(back) == whole
    openai.types.chat.ChatCompletion.model_validate(body_of(back))


@given(completions())
def test_both_shapes_of_an_answer_cost_the_same(whole: dict[str, Any]) -> None:
    """The accounting of either endpoint reads the same usage, but for reasoning, which Anthropic's own field names otherwise."""
    _, here = answers.read("/v1/chat/completions", packed(whole))
    _, there = answers.read("/v1/messages", answer_to_anthropic(packed(whole)).body)
    assert (here.input_tokens, here.cached_tokens, here.output_tokens) == (
        there.input_tokens,
        there.cached_tokens,
        there.output_tokens,
    )


# ---- by example

CONVERSATION_ANTHROPIC = {
    "model": "sea-1",
    "max_tokens": 300,
    "system": "Be brief.",
    "temperature": 0.2,
    "stop_sequences": ["END"],
    "metadata": {"user_id": "u-7"},
    "tools": [{"name": "tide", "description": "The tide at a port.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "messages": [
        {"role": "user", "content": "When is high water at Emden?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look it up."},
                {"type": "tool_use", "id": "toolu_1", "name": "tide", "input": {"x": 4}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "11:42"},
                {"type": "text", "text": "And what is this?"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
            ],
        },
    ],
}
CONVERSATION_OPENAI = {
    "model": "sea-1",
    "max_completion_tokens": 300,
    "temperature": 0.2,
    "stop": ["END"],
    "user": "u-7",
    "tools": [
        {
            "type": "function",
            "function": {"name": "tide", "description": "The tide at a port.", "parameters": SCHEMA},
        }
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "When is high water at Emden?"},
        {
            "role": "assistant",
            "content": "I look it up.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": {"name": "tide", "arguments": '{"x":4}'}}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "11:42"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And what is this?"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            ],
        },
    ],
}


def test_a_conversation_with_a_tool_and_an_image() -> None:
    assert body_of(request_to_openai(packed(CONVERSATION_ANTHROPIC))) == CONVERSATION_OPENAI
    assert body_of(request_to_anthropic(packed(CONVERSATION_OPENAI))) == CONVERSATION_ANTHROPIC


def test_a_structured_answer_is_asked_for_in_both_shapes() -> None:
    request = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "x"}],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }
    there = body_of(request_to_openai(packed(request)))
    assert there["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
    }


def test_fields_that_say_what_is_so_anyway_pass() -> None:
    request = {
        "model": "m",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}]},
            {"role": "system", "content": "b"},
            {"role": "user", "content": "hi", "name": None},
            {"role": "assistant", "content": None, "tool_calls": [tool_call("")], "refusal": None, "audio": None},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "1"}]},
        ],
        "n": 1,
        "logprobs": False,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "store": False,
        "seed": None,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
    }
    got = body_of(request_to_anthropic(packed(request), output_tokens_default=77))
    assert got == {
        "model": "m",
        "max_tokens": 77,
        "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1"}]}],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {}}}],
        "tool_choice": {"type": "any"},
    }


@pytest.mark.parametrize(
    ("tools", "wanted", "choice"),
    [
        (True, None, {"type": "auto", "disable_parallel_tool_use": True}),
        (True, "required", {"type": "any", "disable_parallel_tool_use": True}),
        (True, "none", {"type": "none"}),
        (False, None, None),
    ],
)
def test_only_a_choice_that_may_call_a_tool_is_asked_for_one_call_at_a_time(
    tools: bool, wanted: str | None, choice: dict[str, Any] | None
) -> None:
    """Anthropic refuses the field in a choice of no tool, and a choice without tools."""
    request = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "parallel_tool_calls": False}
    if tools:
        request |= {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": wanted}
    got = body_of(request_to_anthropic(packed(request), output_tokens_default=9))
    assert got.get("tool_choice") == choice


def tool_call(arguments: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_hints_are_left_out_by_name() -> None:
    request = {
        "model": "m",
        "max_tokens": 9,
        "cache_control": {"type": "ephemeral"},
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "t", "name": "f", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "is_error": True}]},
        ],
    }
    got = request_to_openai(packed(request))
    assert got.left_out == (
        "system[0].cache_control",
        "messages[1].content[0]",
        "messages[2].content[0].is_error",
        "cache_control",
    )
    assert body_of(got)["messages"][-1] == {"role": "tool", "tool_call_id": "t", "content": ""}


def test_the_cache_hint_of_every_block_is_left_out_by_name() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    request = {
        "model": "m",
        "max_tokens": 9,
        "tools": [{"name": "f", "input_schema": SCHEMA, **cached}],
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}, **cached}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", **cached},
                    {"type": "image", "source": {"type": "url", "url": "https://example.test/a.jpg"}, **cached},
                ],
            },
        ],
    }
    assert request_to_openai(packed(request)).left_out == (
        "messages[0].content[0].cache_control",
        "messages[1].content[0].cache_control",
        "messages[1].content[1].cache_control",
        "tools[0].cache_control",
    )


def test_a_stream_asks_for_its_usage() -> None:
    request = {"model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "q"}]}
    got = request_to_openai(packed(request))
    assert body_of(got)["stream_options"] == {"include_usage": True}
    assert got.stream
    options = {"include_usage": True, "include_obfuscation": False}
    back = request_to_anthropic(packed({**request, "stream_options": options}))
    assert back.stream
    assert back.include_usage
    assert "stream_options" not in body_of(back)


# ---- refused by name

USER = {"role": "user", "content": "q"}
IMAGE = {"type": "url", "url": "https://example.test/a.jpg"}


def block_of(role: str, **block: Any) -> list[Any]:
    """Messages of which the first has this block alone."""
    return [{"role": role, "content": [block]}, USER]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"top_k": 5}, "top_k"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"output_config": {"effort": "max"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format.type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"model": 7}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages[0].name"),
        ({"messages": [USER, {"role": "assistant", "content": "The answer is ("}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            "messages[0].content[0].source.type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "tool_result"}]}]},
            "messages[0].content[1]",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}],
                    }
                ]
            },
            "messages[0].content[0].content[0].type",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "tool_use", "id": "t", "name": "f", "input": {}},
                            {"type": "text", "text": "x"},
                        ],
                    },
                    USER,
                ]
            },
            "messages[0].content[1]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "citations": [1]}]}]},
            "messages[0].content[0].citations",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tools": [{"name": "w"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "w", "input_schema": {}, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"metadata": {"user_id": "u", "team": "t"}}, "metadata.team"),
        ({"thinking": {"type": "disabled", "odd": 1}}, "thinking.odd"),
        ({"output_config": {"odd": 1}}, "output_config.odd"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}, "odd": 1}}},
            "output_config.format.odd",
        ),
        ({"tool_choice": {"type": "auto", "odd": 1}}, "tool_choice.odd"),
        ({"messages": block_of("user", type="text", text="x", odd=1)}, "messages[0].content[0].odd"),
        ({"messages": block_of("user", type="image", source=IMAGE, odd=1)}, "messages[0].content[0].odd"),
        (
            {"messages": block_of("user", type="image", source={**IMAGE, "odd": 1})},
            "messages[0].content[0].source.odd",
        ),
        ({"messages": block_of("user", type="tool_result", tool_use_id="t", odd=1)}, "messages[0].content[0].odd"),
        (
            {"messages": block_of("assistant", type="tool_use", id="t", name="f", input={}, odd=1)},
            "messages[0].content[0].odd",
        ),
    ],
)
def test_what_openai_has_no_word_for_is_refused_by_its_path(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiProblem) as refused:
        request_to_openai(packed({"model": "m", "max_tokens": 5, "messages": [USER], **change}), OPENAI)
    assert refused.value.status == 400
    assert refused.value.param == param
    assert param in refused.value.message


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"seed": 4}, "seed"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"store": True}, "store"),
        ({"temperature": 1.5}, "temperature"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"reasoning_effort": "minimal"}, "reasoning_effort"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"guided_json": {}}, "guided_json"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [USER, {"role": "system", "content": "x"}]}, "messages[1]"),
        ({"messages": [USER, {"role": "assistant", "content": "x"}]}, "messages[1]"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]},
            "messages[0].content[0].image_url.url",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [tool_call("[1]")]}, USER]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"type": "custom"}]}, USER]},
            "messages[0].tool_calls[0].type",
        ),
        ({"messages": [{"role": "assistant", "content": "x", "refusal": "no"}, USER]}, "messages[0].refusal"),
        (
            {
                "messages": [
                    {"role": "tool", "tool_call_id": "c", "content": "x"},
                    {"role": "system", "content": "s"},
                    USER,
                ]
            },
            "messages[1]",
        ),
        ({"tools": [{"type": "mcp"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"stream_options": {"include_usage": True, "x": 1}}, "stream_options.x"),
    ],
)
def test_what_anthropic_has_no_word_for_is_refused_by_its_path(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiProblem) as refused:
        request_to_anthropic(packed({"model": "m", "messages": [USER], **change}))
    assert refused.value.status == 400
    assert refused.value.param == param
    assert param in refused.value.message


@pytest.mark.parametrize("temperature", [0, 1, 1.0])
def test_a_temperature_that_both_have_is_passed_on(temperature: float) -> None:
    sent = request_to_anthropic(packed({"model": "m", "messages": [USER], "temperature": temperature}))
    assert json.loads(sent.body)["temperature"] == temperature


@given(st.binary(max_size=60) | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(packed))
def test_garbage_is_refused_in_words(garbage: bytes) -> None:
    for translate in (request_to_openai, request_to_anthropic, answer_to_anthropic):
        with pytest.raises(ApiProblem):
            translate(garbage)
    with pytest.raises(ApiProblem):
        answer_to_openai(garbage, 1)


def test_a_deep_body_is_refused_and_not_followed() -> None:
    with pytest.raises(ApiProblem, match="nested"):
        request_to_openai(b'{"model":' + b"[" * 100_000)


# ---- answers


def completion(**message: Any) -> dict[str, Any]:
    finish = message.pop("finish", "stop")
    return {"id": "c", "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}]}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (completion(content="x"), "end_turn"),
        (completion(content="x", finish="length"), "max_tokens"),
        (completion(content="x", finish="content_filter"), "refusal"),
        (completion(content=None, refusal="I will not."), "refusal"),
        (completion(content=None, tool_calls=[tool_call("{}")], finish="tool_calls"), "tool_use"),
        (completion(content=None, tool_calls=[tool_call("")]), "tool_use"),
    ],
)
def test_why_a_model_stopped(answer: dict[str, Any], reason: str) -> None:
    assert body_of(answer_to_anthropic(packed(answer)))["stop_reason"] == reason


def test_a_tool_call_that_was_cut_off_comes_without_its_half_arguments() -> None:
    """Anthropic's clients look at `stop_reason` and ask again with more tokens."""
    calls = [tool_call('{"a":1}'), {**tool_call('{"b'), "id": "d"}]
    message = body_of(answer_to_anthropic(packed(completion(content="x", tool_calls=calls, finish="length"))))
    assert message["stop_reason"] == "max_tokens"
    assert [block.get("input") for block in message["content"]] == [None, {"a": 1}, {}]
    whole = completion(content=None, tool_calls=[tool_call('{"a":1}')], finish="length")
    assert body_of(answer_to_anthropic(packed(whole)))["content"][0]["input"] == {"a": 1}


@pytest.mark.parametrize(
    ("answer", "param"),
    [
        ({"choices": []}, "choices"),
        (
            completion(content=None, tool_calls=[tool_call("{"), tool_call("{}")], finish="length"),
            "choices[0].message.tool_calls[0].function.arguments",
        ),
        ({"choices": [completion()["choices"][0]] * 2}, "choices"),
        (completion(content="x", finish="function_call"), "choices[0].finish_reason"),
        (completion(content="x", finish=None), "choices[0].finish_reason"),
        (completion(content=["x"]), "choices[0].message.content"),
        ({"choices": [{"index": 0, "finish_reason": "stop"}]}, "choices[0].message"),
        (completion(content="x", audio={"id": "a"}), "choices[0].message.audio"),
        (completion(content="x", function_call={"name": "f"}), "choices[0].message.function_call"),
        (completion(content="x", annotations=[{"type": "url_citation"}]), "choices[0].message.annotations"),
        (completion(content=None, tool_calls=[tool_call("{")]), "choices[0].message.tool_calls[0].function.arguments"),
        (completion(content=None, tool_calls=[{"type": "custom"}]), "choices[0].message.tool_calls[0].type"),
        (completion(content=None, tool_calls=[{"id": "t"}]), "choices[0].message.tool_calls[0].function"),
    ],
)
def test_an_answer_that_cannot_be_translated_is_the_upstreams_fault(answer: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiProblem) as refused:
        answer_to_anthropic(packed(answer))
    assert (refused.value.status, refused.value.param) == (502, param)


@pytest.mark.parametrize("translate", [answer_to_anthropic, lambda body: answer_to_openai(body, 1)])
def test_an_answer_that_is_no_json_is_not_called_the_callers_body(translate: Callable[[bytes], Any]) -> None:
    with pytest.raises(ApiProblem) as refused:
        translate(b'{"usage":{"total_tokens":1e400}}')
    assert refused.value.status == 502
    assert refused.value.message.startswith("The model server's answer is not valid JSON: ")


def test_a_message_with_every_kind_of_stop_and_content() -> None:
    message = {
        "id": "msg_9",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "a"},
            {"type": "text", "text": "b", "citations": []},
        ],
        "stop_reason": "model_context_window_exceeded",
        "usage": {
            "input_tokens": 3,
            "cache_read_input_tokens": 5,
            "cache_creation_input_tokens": None,
            "output_tokens": 2,
        },
    }
    got = answer_to_openai(packed(message), 12)
    whole = body_of(got)
    assert got.left_out == ("content[1]",)
    assert whole["choices"][0]["message"] == {
        "role": "assistant",
        "content": "ab",
        "refusal": None,
        "reasoning_content": "hm",
    }
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["prompt_tokens"] == 8
    for wrong, param in (
        ({"stop_reason": "pause_turn"}, "stop_reason"),
        ({"type": "error"}, "type"),
        ({"content": [{"type": "server_tool_use"}]}, "content[0].type"),
        ({"content": [{"type": "text", "text": "x", "citations": [{"url": "u"}]}]}, "content[0].citations"),
        ({"content": "x"}, "content"),
    ):
        with pytest.raises(ApiProblem) as refused:
            answer_to_openai(packed({**message, **wrong}), 1)
        assert refused.value.param == param


# ---- errors


@pytest.mark.parametrize(
    ("status", "kind", "back"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (402, "billing_error", "invalid_request_error"),
        (403, "permission_error", "permission_error"),
        (404, "not_found_error", "not_found_error"),
        (413, "request_too_large", "invalid_request_error"),
        (422, "invalid_request_error", "invalid_request_error"),
        (429, "rate_limit_error", "rate_limit_error"),
        (500, "api_error", "server_error"),
        (503, "overloaded_error", "server_error"),
        (504, "timeout_error", "server_error"),
        (529, "overloaded_error", "server_error"),
    ],
)
def test_an_error_says_its_kind_in_either_shape(status: int, kind: str, back: str) -> None:
    openai = {"error": {"message": "why", "type": "whatever", "param": "p", "code": "c"}}
    there = json.loads(error_to_anthropic(status, packed(openai), "req_1"))
    assert there == {
        "type": "error",
        "error": {"type": kind, "message": "why", "code": "c", "param": "p"},
        "request_id": "req_1",
    }
    assert json.loads(error_to_openai(status, packed(there))) == {
        "error": {"message": "why", "type": back, "param": "p", "code": "c"}
    }


@given(st.binary(max_size=40) | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(packed))
def test_any_body_makes_an_error_with_a_message(body: bytes) -> None:
    assert json.loads(error_to_anthropic(500, body))["error"]["message"]
    assert json.loads(error_to_openai(500, body))["error"]["message"]


def test_a_field_of_the_wrong_kind_is_refused_with_what_it_may_be() -> None:
    with pytest.raises(ApiProblem, match=r"tool_choice.* must be text or an object"):
        request_to_anthropic(packed({"model": "m", "messages": [USER], "tool_choice": 1}))
