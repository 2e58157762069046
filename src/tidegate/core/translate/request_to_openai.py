"""Translate an Anthropic Messages request to an OpenAI chat completions request."""

from collections.abc import Iterator
from typing import Any

import msgspec

from tidegate.core.translate.fields import Fields, Translated, Voice, decode, each_of, encode

FORMAT_NAME = "answer"
EFFORTS = ("low", "medium", "high", "xhigh")


class OpenAiDialect(msgspec.Struct, frozen=True):
    """The differences among servers of OpenAI's shape: the name of the output limit, and whether
    `top_k` is accepted.
    """

    output_limit: str = "max_completion_tokens"
    takes_top_k: bool = False


OPENAI = OpenAiDialect()
VLLM = OpenAiDialect("max_tokens", takes_top_k=True)


def request_to_openai(body: bytes, dialect: OpenAiDialect = OPENAI) -> Translated:
    """Translate a request; ApiProblem (400) names the first bad or untranslatable field."""
    voice = Voice.request("an OpenAI-style server")
    fields = Fields(decode(body, voice), "", voice)
    out: dict[str, Any] = {"model": fields.need("model", str), "messages": []}
    out["messages"] += _system(fields)
    out["messages"] += _messages(fields)
    limit = fields.need("max_tokens", int)
    if limit < 0:
        raise voice.malformed("max_tokens", "must be 1 or more")
    if limit == 0:
        raise voice.unsupported("max_tokens", "`max_tokens` must be 1 or more here: a cache cannot be warmed this way.")
    out[dialect.output_limit] = limit
    _sampling(fields, out, dialect)
    _tools(fields, out)
    _output_config(fields, out)
    if (metadata := fields.inner("metadata")) is not None:
        user = metadata.field_value("user_id", str)
        metadata.done()
        if user is not None:
            out["user"] = user
    stream = fields.field_value("stream", bool) or False
    if stream:
        # Anthropic's streams always end with the usage, so ask the upstream for it.
        out |= {"stream": True, "stream_options": {"include_usage": True}}
    fields.hint("cache_control")
    fields.done()
    return Translated(encode(out), tuple(voice.left_out), stream, include_usage=stream)


def _sampling(fields: Fields, out: dict[str, Any], dialect: OpenAiDialect) -> None:
    for name in ("temperature", "top_p"):
        if (value := fields.field_value(name, int, float)) is not None:
            out[name] = value
    if dialect.takes_top_k and (top_k := fields.field_value("top_k", int)) is not None:
        out["top_k"] = top_k
    if stop := fields.field_value("stop_sequences", list):
        out["stop"] = stop
    tier = fields.field_value("service_tier", str)
    if tier is not None:
        if tier not in ("auto", "standard_only"):
            raise fields.voice.unsupported("service_tier")
        out["service_tier"] = "auto" if tier == "auto" else "default"
    if (thinking := fields.inner("thinking")) is not None:
        if thinking.field_value("type", str) != "disabled":
            raise fields.voice.unsupported(
                "thinking",
                "`thinking` has no counterpart at an OpenAI-style server: use `output_config.effort` instead.",
            )
        thinking.done()


def _output_config(fields: Fields, out: dict[str, Any]) -> None:
    config = fields.inner("output_config")
    if config is None:
        return
    effort = config.field_value("effort", str)
    if effort is not None:
        if effort not in EFFORTS:
            raise fields.voice.unsupported("output_config.effort")
        out["reasoning_effort"] = effort
    if (shape := config.inner("format")) is not None:
        if shape.need("type", str) != "json_schema":
            raise fields.voice.unsupported("output_config.format.type")
        schema = shape.need("schema", dict)
        shape.done()
        out["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": FORMAT_NAME, "schema": schema, "strict": True},
        }
    config.done()


def _system(fields: Fields) -> Iterator[dict[str, Any]]:
    system = fields.field_value("system", str, list)
    if isinstance(system, str):
        yield {"role": "system", "content": system}
    elif system:
        parts = [_text(_typed(block, "text")) for block in each_of(system, "system", fields.voice)]
        yield {"role": "system", "content": _plain(parts)}


def _messages(fields: Fields) -> Iterator[dict[str, Any]]:
    given = fields.need("messages", list)
    if not given:
        raise fields.voice.malformed("messages", "is empty: it needs at least one message")
    role = ""
    for message in each_of(given, "messages", fields.voice):
        role = message.need("role", str)
        if role not in ("user", "assistant"):
            raise fields.voice.unsupported(
                message.at("role"), f"`{message.at('role')}` must be user or assistant: put instructions into `system`."
            )
        content = message.need("content", str, list)
        message.done()
        if isinstance(content, str):
            yield {"role": role, "content": content}
        else:
            blocks = each_of(content, message.at("content"), fields.voice)
            yield from _user(blocks) if role == "user" else _assistant(blocks)
    if role == "assistant":
        last = f"messages[{len(given) - 1}]"
        raise fields.voice.unsupported(
            last,
            f"`{last}` is the assistant's: an OpenAI-style server does not go on from it; end with a user message.",
        )


def _user(blocks: Iterator[Fields]) -> Iterator[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.need("type", str)
        if kind == "tool_result":
            if parts:
                raise block.voice.unsupported(
                    block.path, f"`{block.path}` is a tool_result behind other content: put tool results first."
                )
            yield _tool_result(block)
        elif kind == "text":
            parts.append(_text(block))
        elif kind == "image":
            parts.append(_image(block))
        else:
            raise block.voice.unsupported(block.at("type"))
    if parts:
        yield {"role": "user", "content": _plain(parts)}


def _assistant(blocks: Iterator[Fields]) -> Iterator[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.need("type", str)
        if kind == "text":
            if calls:
                raise block.voice.unsupported(
                    block.path,
                    f"`{block.path}` is text behind a tool_use: put the text of a turn before its tool calls.",
                )
            parts.append(_text(block))
        elif kind == "tool_use":
            call = {"name": block.need("name", str), "arguments": encode(block.need("input", dict)).decode()}
            calls.append({"id": block.need("id", str), "type": "function", "function": call})
            block.hint("cache_control")
            block.done()
        elif kind in ("thinking", "redacted_thinking"):
            # Only the model that thought it can read it, and Anthropic itself ignores it in earlier
            # turns.
            block.voice.left_out.append(block.path)
        else:
            raise block.voice.unsupported(block.at("type"))
    content = _plain(parts) if parts else (None if calls else "")
    yield {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def _tool_result(block: Fields) -> dict[str, Any]:
    content = block.field_value("content", str, list)
    if isinstance(content, list):
        parts = [_text(_typed(one, "text")) for one in each_of(content, block.at("content"), block.voice)]
        content = _plain(parts) if parts else ""
    if block.field_value("is_error", bool):
        block.voice.left_out.append(block.at("is_error"))
    answered = block.need("tool_use_id", str)
    block.hint("cache_control")
    block.done()
    return {"role": "tool", "tool_call_id": answered, "content": content or ""}


def _typed(block: Fields, kind: str) -> Fields:
    if block.need("type", str) != kind:
        raise block.voice.unsupported(block.at("type"))
    return block


def _text(block: Fields) -> dict[str, Any]:
    text = block.need("text", str)
    block.only("citations", [])
    block.hint("cache_control")
    block.done()
    return {"type": "text", "text": text}


def _image(block: Fields) -> dict[str, Any]:
    source = block.inner("source")
    if source is None:
        raise block.voice.malformed(block.at("source"), "is missing")
    kind = source.need("type", str)
    if kind == "base64":
        url = f"data:{source.need('media_type', str)};base64,{source.need('data', str)}"
    elif kind == "url":
        url = source.need("url", str)
    else:
        raise block.voice.unsupported(source.at("type"))
    source.done()
    block.hint("cache_control")
    block.done()
    return {"type": "image_url", "image_url": {"url": url}}


def _plain(parts: list[dict[str, Any]]) -> Any:
    """Write one text as a string: every server takes that, and it means the same."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _tools(fields: Fields, out: dict[str, Any]) -> None:
    tools = []
    for tool in fields.each("tools"):
        tool.only("type", "custom")
        function = {"name": tool.need("name", str)}
        if (description := tool.field_value("description", str)) is not None:
            function["description"] = description
        function["parameters"] = tool.need("input_schema", dict)
        if (strict := tool.field_value("strict", bool)) is not None:
            function["strict"] = strict
        tool.hint("cache_control")
        tool.done()
        tools.append({"type": "function", "function": function})
    if tools:
        out["tools"] = tools
    choice = fields.inner("tool_choice")
    if choice is None:
        return
    kind = choice.need("type", str)
    if kind == "tool":
        out["tool_choice"] = {"type": "function", "function": {"name": choice.need("name", str)}}
    elif kind in ("auto", "any", "none"):
        out["tool_choice"] = "required" if kind == "any" else kind
    else:
        raise fields.voice.unsupported("tool_choice.type")
    if choice.field_value("disable_parallel_tool_use", bool):
        out["parallel_tool_calls"] = False
    choice.done()
