"""Translate an OpenAI chat completions request to an Anthropic Messages request."""

import re
from typing import Any

import msgspec

from tidegate.core.translate.fields import Fields, Translated, Voice, decode, each_of, encode
from tidegate.core.translate.request_to_openai import EFFORTS

OUTPUT_TOKENS_DEFAULT = 4096
_DATA_URL = re.compile(r"data:(image/[a-z0-9.+-]+);base64,", re.ASCII | re.IGNORECASE)


def request_to_anthropic(body: bytes, output_tokens_default: int = OUTPUT_TOKENS_DEFAULT) -> Translated:
    """Translate a request.

    Raises ApiProblem (400) with the path of the first bad or untranslatable field.

    Anthropic requires a limit of the output: a request without one gets `output_tokens_default`.
    """
    voice = Voice.request("an Anthropic-style server")
    fields = Fields(decode(body, voice), "", voice)
    out: dict[str, Any] = {"model": fields.need("model", str), "max_tokens": _limit(fields, output_tokens_default)}
    system, out["messages"] = _messages(fields)
    if system:
        out["system"] = system
    _sampling(fields, out)
    _tools(fields, out)
    _output_config(fields, out)
    _user(fields, out)
    stream = fields.field_value("stream", bool) or False
    include_usage = False
    if stream:
        out["stream"] = True
    if (options := fields.inner("stream_options")) is not None:
        include_usage = options.field_value("include_usage", bool) or False
        options.hint("include_obfuscation")
        options.done()
    fields.hint("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "prediction", "metadata")
    _nothing_special(fields)
    fields.done()
    return Translated(encode(out), tuple(voice.left_out), stream, include_usage)


def _nothing_special(fields: Fields) -> None:
    """Refuse fields that Anthropic does not have, unless they ask for what it does anyway."""
    fields.only("n", 1)
    fields.only("logprobs", False)
    fields.only("logit_bias", {})
    fields.only("presence_penalty", 0, 0.0)
    fields.only("frequency_penalty", 0, 0.0)
    fields.only("store", False)
    fields.only("modalities", ["text"])


def _limit(fields: Fields, default: int) -> int:
    newer, older = fields.field_value("max_completion_tokens", int), fields.field_value("max_tokens", int)
    if newer is not None and older is not None and newer != older:
        raise fields.voice.malformed("max_tokens", "and `max_completion_tokens` differ: give one of them")
    limit: int = newer if newer is not None else older if older is not None else default
    return limit


def _sampling(fields: Fields, out: dict[str, Any]) -> None:
    temperature = fields.field_value("temperature", int, float)
    if temperature is not None:
        if temperature > 1:
            raise fields.voice.unsupported(
                "temperature", "`temperature` goes from 0 to 1 on an Anthropic-style server."
            )
        out["temperature"] = temperature
    for name, kinds in (("top_p", (int, float)), ("top_k", (int,))):
        if (value := fields.field_value(name, *kinds)) is not None:
            out[name] = value
    stop = fields.field_value("stop", str, list)
    if stop:
        out["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    tier = fields.field_value("service_tier", str)
    if tier is not None:
        if tier not in ("auto", "default"):
            raise fields.voice.unsupported("service_tier")
        out["service_tier"] = "auto" if tier == "auto" else "standard_only"


def _user(fields: Fields, out: dict[str, Any]) -> None:
    user = fields.field_value("user", str)
    if user is None:
        user = fields.field_value("safety_identifier", str)
    fields.hint("safety_identifier")
    if user is not None:
        out["metadata"] = {"user_id": user}


def _output_config(fields: Fields, out: dict[str, Any]) -> None:
    config: dict[str, Any] = {}
    effort = fields.field_value("reasoning_effort", str)
    if effort is not None:
        if effort not in EFFORTS:
            raise fields.voice.unsupported("reasoning_effort")
        config["effort"] = effort
    if (shape := fields.inner("response_format")) is not None:
        kind = shape.need("type", str)
        if kind == "json_schema":
            named = shape.inner("json_schema")
            if named is None:
                raise fields.voice.malformed("response_format.json_schema", "is missing")
            config["format"] = {"type": "json_schema", "schema": named.need("schema", dict)}
            named.hint("name", "description")
            # Anthropic always follows the schema, so a caller who does not insist gets no less.
            named.field_value("strict", bool)
            named.done()
        elif kind != "text":
            raise fields.voice.unsupported(
                "response_format.type",
                f"`response_format.type` {kind!r} has no counterpart at an Anthropic-style server: use json_schema.",
            )
        shape.done()
    if config:
        out["output_config"] = config


def _messages(fields: Fields) -> tuple[Any, list[dict[str, Any]]]:
    """Return the system prompt and the turns.

    Tool results open the user's turn that follows them.
    """
    given = fields.need("messages", list)
    system: list[Any] = []
    turns: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    role = ""
    for message in each_of(given, "messages", fields.voice):
        role = message.need("role", str)
        if role == "tool":
            results.append(_tool_result(message))
            continue
        if role in ("system", "developer"):
            if turns or results:
                raise fields.voice.unsupported(
                    message.path, f"`{message.path}` gives instructions behind other messages: put them first."
                )
            system.append(_content(message, ("text",)))
        elif role == "user":
            content = _content(message, ("text", "image_url"))
            if results:
                content = results + (_text_blocks(content) if isinstance(content, str) else content)
                results = []
            turns.append({"role": "user", "content": content})
        elif role == "assistant":
            if results:
                turns.append({"role": "user", "content": results})
                results = []
            turns.append({"role": "assistant", "content": _assistant(message)})
        else:
            raise fields.voice.unsupported(message.at("role"))
        message.done()
    if results:
        turns.append({"role": "user", "content": results})
    if not turns:
        raise fields.voice.malformed("messages", "has no message of a user")
    if role == "assistant":
        last = f"messages[{len(given) - 1}]"
        raise fields.voice.unsupported(
            last,
            f"`{last}` is the assistant's: an Anthropic-style server would go on from it; end with a user message.",
        )
    if len(system) == 1:
        return system[0], turns
    blocks = [block for one in system for block in (_text_blocks(one) if isinstance(one, str) else one)]
    return blocks, turns


def _text_blocks(text: str) -> list[dict[str, Any]]:
    # Anthropic refuses an empty text block.
    return [{"type": "text", "text": text}] if text else []


def _content(message: Fields, kinds: tuple[str, ...]) -> Any:
    content = message.need("content", str, list)
    if isinstance(content, str):
        return content
    return [_part(part, kinds) for part in each_of(content, message.at("content"), message.voice)]


def _part(part: Fields, kinds: tuple[str, ...]) -> dict[str, Any]:
    kind = part.need("type", str)
    if kind not in kinds:
        raise part.voice.unsupported(part.at("type"))
    block = {"type": "text", "text": part.need("text", str)} if kind == "text" else _image(part)
    part.hint("prompt_cache_breakpoint")
    part.done()
    return block


def _image(part: Fields) -> dict[str, Any]:
    image = part.inner("image_url")
    if image is None:
        raise part.voice.malformed(part.at("image_url"), "is missing")
    url = image.need("url", str)
    image.hint("detail")
    image.done()
    if found := _DATA_URL.match(url):
        source = {"type": "base64", "media_type": found[1].lower(), "data": url[found.end() :]}
    elif url.startswith(("https://", "http://")):
        source = {"type": "url", "url": url}
    else:
        raise part.voice.unsupported(image.at("url"), f"`{image.at('url')}` must be http(s), or a base64 data: URL.")
    return {"type": "image", "source": source}


def _tool_result(message: Fields) -> dict[str, Any]:
    answered = message.need("tool_call_id", str)
    content = _content(message, ("text",))
    message.done()
    return {"type": "tool_result", "tool_use_id": answered, "content": content}


def _assistant(message: Fields) -> Any:
    content = message.field_value("content", str, list) or ""
    if isinstance(content, list):
        content = [_part(part, ("text",)) for part in each_of(content, message.at("content"), message.voice)]
    calls = [_tool_use(call) for call in message.each("tool_calls")]
    # A model's thoughts are its own: servers that show them do not want them back.
    message.hint("reasoning_content", "reasoning")
    message.only("refusal", "")
    if not calls:
        return content
    return (_text_blocks(content) if isinstance(content, str) else content) + calls


def _tool_use(call: Fields) -> dict[str, Any]:
    if call.need("type", str) != "function":
        raise call.voice.unsupported(call.at("type"))
    function = call.inner("function")
    if function is None:
        raise call.voice.malformed(call.at("function"), "is missing")
    name, path = function.need("name", str), function.at("arguments")
    arguments = arguments_object(function.field_value("arguments", str) or "", path, call.voice)
    function.done()
    block = {"type": "tool_use", "id": call.need("id", str), "name": name, "input": arguments}
    call.field_value("index", int)
    call.done()
    return block


def arguments_object(text: str, path: str, voice: Voice) -> dict[str, Any]:
    """Return the arguments of a tool call as an object; an empty text is an empty object."""
    if not text.strip():
        return {}
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise voice.malformed(path, "is not the text of a JSON object")
    return arguments


def _tools(fields: Fields, out: dict[str, Any]) -> None:
    tools = []
    for tool in fields.each("tools"):
        if tool.need("type", str) != "function":
            raise fields.voice.unsupported(tool.at("type"))
        function = tool.inner("function")
        if function is None:
            raise fields.voice.malformed(tool.at("function"), "is missing")
        translated = {"name": function.need("name", str)}
        if (description := function.field_value("description", str)) is not None:
            translated["description"] = description
        translated["input_schema"] = function.field_value("parameters", dict) or {"type": "object", "properties": {}}
        if (strict := function.field_value("strict", bool)) is not None:
            translated["strict"] = strict
        function.done()
        tool.done()
        tools.append(translated)
    if tools:
        out["tools"] = tools
    choice = _tool_choice(fields)
    if fields.field_value("parallel_tool_calls", bool) is False and tools:
        choice = choice or {"type": "auto"}
        if choice["type"] != "none":
            choice["disable_parallel_tool_use"] = True
    if choice is not None:
        out["tool_choice"] = choice


def _tool_choice(fields: Fields) -> dict[str, Any] | None:
    wanted = fields.field_value("tool_choice", str, dict)
    if wanted is None:
        return None
    if isinstance(wanted, str):
        if wanted not in ("auto", "none", "required"):
            raise fields.voice.unsupported("tool_choice")
        return {"type": "any" if wanted == "required" else wanted}
    choice = Fields(wanted, "tool_choice", fields.voice)
    if choice.need("type", str) != "function":
        raise fields.voice.unsupported("tool_choice.type")
    function = choice.inner("function")
    if function is None:
        raise fields.voice.malformed("tool_choice.function", "is missing")
    name = function.need("name", str)
    function.done()
    choice.done()
    return {"type": "tool", "name": name}
