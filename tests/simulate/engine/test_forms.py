"""Tools, response formats and strict types: what the simulated engine answers is what the SDKs' own models take, field by field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from tests.simulate.engine.conftest import engine_running
from tests.simulate.engine.wire import Address
from tests.support.sdks import anthropic, openai
from tidegate.core.policy.json_schema import Schema
from tidegate.simulate.engine import EngineOptions
from tidegate.simulate.engine.fitting import Fitting, Unfit

USER = {"role": "user", "content": "What is the tide?"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"enum": ["m", "ft"]},
        "why": {"type": ["string", "null"]},
        "marks": {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}, "minItems": 1},
    },
    "required": ["city", "days", "unit", "why", "marks"],
    "additionalProperties": False,
}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "tide", "parameters": SCHEMA}}
RESPONSE_TOOL: Any = {"type": "function", "name": "tide", "parameters": SCHEMA}
MESSAGE_TOOL: Any = {"name": "tide", "input_schema": SCHEMA}
CHAT_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "tide", "strict": True, "schema": SCHEMA}}
TEXT_FORMAT: Any = {"format": {"type": "json_schema", "name": "tide", "strict": True, "schema": SCHEMA}}
JSON_FORMAT: Any = {"type": "json_object"}

CHATS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"max_tokens": 2},
    {"tools": [CHAT_TOOL]},
    {"tools": [CHAT_TOOL], "tool_choice": "none"},
    {"tools": [CHAT_TOOL], "tool_choice": "required", "n": 2},
    {"tools": [CHAT_TOOL], "tool_choice": "required", "max_tokens": 3},
    {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "tide"}}},
    {"tools": None, "tool_choice": None, "response_format": None},
    {"response_format": JSON_FORMAT},
    {"response_format": CHAT_FORMAT},
    {"response_format": {"type": "text"}},
]
RESPONSES: list[dict[str, Any]] = [
    {},
    {"max_output_tokens": 2},
    {"tools": [RESPONSE_TOOL]},
    {"tools": [RESPONSE_TOOL, {"type": "web_search"}], "tool_choice": "required"},
    {"tools": [RESPONSE_TOOL], "tool_choice": {"type": "function", "name": "tide"}, "parallel_tool_calls": False},
    {"tools": [{"type": "custom", "name": "run"}], "tool_choice": "required"},
    {"text": {"format": JSON_FORMAT}},
    {"text": TEXT_FORMAT},
    {"text": {"verbosity": "low"}},
]
MESSAGES: list[dict[str, Any]] = [
    {},
    {"max_tokens": 2},
    {"tools": [MESSAGE_TOOL]},
    {"tools": [MESSAGE_TOOL], "tool_choice": {"type": "any"}},
    {"tools": [MESSAGE_TOOL], "tool_choice": {"type": "tool", "name": "tide"}, "max_tokens": 3},
    {"tools": [MESSAGE_TOOL], "tool_choice": {"type": "none"}},
    {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "system": "Answer in JSON."},
]


def strictly(model: Any, data: bytes) -> None:
    """The strict type takes the bytes, and knows every field in them."""
    known(adapter(model).validate_json(data, strict=True))


@cache
def adapter(model: Any) -> TypeAdapter[Any]:
    return TypeAdapter(model)


def known(value: Any) -> None:
    if isinstance(value, list):
        for one in value:
            known(one)
    elif isinstance(value, BaseModel):
        assert not value.model_extra, f"{type(value).__name__} does not know {value.model_extra}"
        for name in type(value).model_fields:
            known(getattr(value, name))


def events(data: bytes) -> Iterator[bytes]:
    for line in data.splitlines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield line.removeprefix(b"data: ")


def body(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = (
        {"model": "m", "input": [USER]} if path == "responses" else {"model": "m", "messages": [USER]}
    )
    return given | ({"max_tokens": 400} if path == "messages" else {}) | fields


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *(("chat/completions", fields) for fields in CHATS),
        *(("responses", fields) for fields in RESPONSES),
        *(("messages", fields) for fields in MESSAGES),
    ],
)
def test_every_answer_fits_the_sdks_strict_types(address: Address, path: str, fields: dict[str, Any]) -> None:
    whole, event = {
        "chat/completions": (openai.types.chat.ChatCompletion, openai.types.chat.ChatCompletionChunk),
        "responses": (openai.types.responses.Response, openai.types.responses.ResponseStreamEvent),
        "messages": (anthropic.types.Message, anthropic.types.RawMessageStreamEvent),
    }[path]
    asked = body(path, fields)
    seen = address.call(f"/v1/{path}", asked)
    assert seen.status == 200, seen.body
    strictly(whole, seen.body)
    options = {"stream_options": {"include_usage": True}} if path == "chat/completions" else {}
    streamed = address.call(f"/v1/{path}", asked | {"stream": True} | options)
    assert streamed.status == 200
    for one in events(streamed.body):
        if b'"ping"' not in one:
            strictly(event, one)


def test_the_other_endpoints_fit_the_strict_types(address: Address) -> None:
    types = openai.types
    strictly(types.Completion, address.call("/v1/completions", {"model": "m", "prompt": ["a", "b"], "n": 2}).body)
    strictly(types.CreateEmbeddingResponse, address.call("/v1/embeddings", {"model": "m", "input": ["a"]}).body)
    strictly(types.ModerationCreateResponse, address.call("/v1/moderations", {"input": "a"}).body)


@pytest.fixture(scope="module")
def sdk(address: Address) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address.url, api_key="any", max_retries=0, timeout=20) as found:
        yield found


@pytest.fixture(scope="module")
def claude(address: Address) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=address.url.removesuffix("/v1"), api_key="any", max_retries=0) as found:
        yield found


def fits(text: str | None, schema: Any = SCHEMA) -> None:
    assert text is not None
    assert Schema(schema).problem(json.loads(text)) is None


@pytest.mark.parametrize(
    "fields", [{"tools": [CHAT_TOOL]}, {"response_format": CHAT_FORMAT}, {"response_format": JSON_FORMAT}]
)
def test_several_conversations_in_one_call_are_answered_as_each_alone(address: Address, fields: dict[str, Any]) -> None:
    conversations = [[{"role": "user", "content": f"question {number}"}] for number in range(4)]
    together = address.call("/v1/chat/completions/batch", {"model": "m", "messages": conversations, **fields}).json
    for result, messages in zip(together["results"], conversations, strict=True):
        alone = address.call("/v1/chat/completions", {"model": "m", "messages": messages, **fields}).json
        assert result["body"]["choices"] == alone["choices"]


class Tide(BaseModel):
    city: str
    days: int
    next: Tide | None


def test_chat_calls_tools_and_obeys_formats(sdk: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "m", "messages": [USER]}
    called = sdk.chat.completions.create(**ask, tools=[CHAT_TOOL], tool_choice="required")
    assert called.choices[0].finish_reason == "tool_calls"
    [call] = called.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "tide"
    fits(call.function.arguments)
    with sdk.chat.completions.stream(**ask, tools=[CHAT_TOOL], tool_choice="required") as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls is not None
    assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    fits(sdk.chat.completions.create(**ask, response_format=CHAT_FORMAT).choices[0].message.content)
    plain = sdk.chat.completions.create(**ask, response_format=JSON_FORMAT, max_tokens=20).choices[0]
    assert isinstance(json.loads(plain.message.content or ""), dict)
    assert sdk.chat.completions.parse(**ask, response_format=Tide).choices[0].message.parsed is not None


def test_a_conversation_with_tool_results_is_read_and_ends_in_words(sdk: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "tide", "arguments": "{}"}}
    messages: list[Any] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "high"},
    ]
    choice = sdk.chat.completions.create(model="m", messages=messages, tools=[CHAT_TOOL]).choices[0]
    assert choice.message.content
    items: list[Any] = [
        USER,
        {"type": "function_call", "call_id": "c", "name": "tide", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "high"},
    ]
    assert sdk.responses.create(model="m", input=items, tools=[RESPONSE_TOOL]).output_text


def test_offered_tools_are_called_by_some_prompts_and_not_by_others(sdk: openai.OpenAI) -> None:
    def reason(number: int) -> str:
        messages: Any = [{"role": "user", "content": f"question {number}"}]
        return sdk.chat.completions.create(model="m", messages=messages, tools=[CHAT_TOOL]).choices[0].finish_reason

    first = [reason(number) for number in range(12)]
    assert set(first) == {"stop", "tool_calls"}
    assert first == [reason(number) for number in range(12)]


def test_responses_call_tools_and_obey_formats(sdk: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "m", "input": "What is the tide?"}
    with sdk.responses.stream(**ask, tools=[RESPONSE_TOOL], tool_choice="required") as stream:
        final = stream.get_final_response()
    [call] = final.output
    assert call.type == "function_call"
    fits(call.arguments)
    assert final.usage is not None
    assert final.usage.input_tokens_details.cache_write_tokens == 0
    fits(sdk.responses.create(**ask, text=TEXT_FORMAT).output_text)
    assert sdk.responses.parse(**ask, text_format=Tide).output_parsed is not None


def test_messages_use_tools_and_obey_schemas(claude: anthropic.Anthropic) -> None:
    ask: dict[str, Any] = {"model": "m", "max_tokens": 400, "messages": [USER]}
    used = claude.messages.create(**ask, tools=[MESSAGE_TOOL], tool_choice={"type": "any"})
    assert used.stop_reason == "tool_use"
    [block] = used.content
    assert block.type == "tool_use"
    assert Schema(SCHEMA).problem(block.input) is None
    with claude.messages.stream(**ask, tools=[MESSAGE_TOOL], tool_choice={"type": "any"}) as stream:
        final = stream.get_final_message()
    assert final.content[0].type == "tool_use"
    assert final.content[0].input == block.input
    assert final.usage.output_tokens == used.usage.output_tokens
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(**ask, tools=[MESSAGE_TOOL], tool_choice={"type": "tool", "name": "other"})


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {}}]},
        {"tools": {"a": 1}},
        {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tool_choice": "required", "tools": []},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/no"}}}},
    ],
)
def test_forms_that_no_server_takes_are_refused(address: Address, fields: dict[str, Any]) -> None:
    assert address.chat("hello", **fields).status == 400


LIST = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]}


@pytest.mark.parametrize(
    "schema",
    [
        SCHEMA,
        LIST,
        True,
        {"type": "string", "minLength": 30, "maxLength": 31},
        {"type": "string", "pattern": "^[A-Z]{2}-\\d{3,5}(x|y)?$"},
        {"type": "number", "minimum": 0.25, "maximum": 0.5},
        {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5},
        {"type": "integer", "maximum": -7},
        {"enum": [None, 3, "a"]},
        {"const": {"a": 1}},
        {"allOf": [{"type": "object", "properties": {"a": {"type": "null"}}}, {"required": ["a"]}]},
        {"$defs": {"leaf": {"type": "boolean"}}, "type": "array", "items": {"$ref": "#/$defs/leaf"}, "minItems": 5},
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_values_fit_their_schema(schema: Any, seed: int) -> None:
    value = Fitting(schema, seed, "0badcafe").value()
    assert value == Fitting(schema, seed, "0badcafe").value()
    if schema is not LIST:
        assert Schema(schema).problem(value) is None
    json.dumps(value)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"$ref": "#"},
        {"type": "array", "items": {"const": 1}, "minItems": 2, "uniqueItems": True},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    ],
)
def test_schemas_that_nothing_fits_are_refused(schema: Any) -> None:
    with pytest.raises(Unfit):
        Fitting(schema, 0, "0badcafe").value()


def test_the_modelled_engine_says_what_it_wrote_into_its_cache() -> None:
    with engine_running(EngineOptions(port=0, mode="modelled")) as address:
        first = address.chat("sea " * 64, max_tokens=1).json["usage"]["prompt_tokens_details"]
        again = address.chat("sea " * 64, max_tokens=1).json["usage"]["prompt_tokens_details"]
    assert first["cached_tokens"] == 0
    assert first["cache_write_tokens"] >= 64
    assert again["cached_tokens"] >= 64
    assert again["cached_tokens"] + again["cache_write_tokens"] == first["cache_write_tokens"]
