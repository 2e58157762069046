"""Translate a whole answer.

No output of a model is dropped: a part without a translation is an ApiProblem (502). Only a tool
call that was cut off at the token limit comes without its half arguments: Anthropic's clients know
such a call by the answer's `stop_reason`, and its arguments are no text there.

Labels of the envelope (a fingerprint, a tier) are left out. The upstream's own usage is accounted
for, not the translated one.
"""

from typing import Any

import msgspec

from tidegate.core.translate.fields import Fields, Translated, Voice, decode, each_of, encode
from tidegate.core.translate.request_to_anthropic import arguments_object
from tidegate.core.translate.usage import (
    STOP_TO_ANTHROPIC,
    STOP_TO_OPENAI,
    id_to_anthropic,
    id_to_openai,
    usage_to_anthropic,
    usage_to_openai,
)

_CUT_OFF = "length"


def answer_to_anthropic(body: bytes) -> Translated:
    """Translate a chat completion to a message."""
    voice = Voice.answer("a client of Anthropic's API")
    fields = Fields(decode(body, voice), "", voice)
    choices = list(fields.each("choices"))
    if len(choices) != 1:
        raise voice.malformed("choices", f"has {len(choices)} choices, and a message has room for one")
    choice = choices[0]
    message = choice.inner("message")
    if message is None:
        raise voice.malformed("choices[0].message", "is missing")
    finish = choice.need("finish_reason", str)
    content, refused = _blocks(message, is_cut_off=finish == _CUT_OFF)
    called = any(block["type"] == "tool_use" for block in content)
    out: dict[str, Any] = {
        "id": id_to_anthropic(fields.field_value("id", str) or ""),
        "type": "message",
        "role": "assistant",
        "model": fields.field_value("model", str) or "",
        "content": content,
        **_stop(choice, finish, called, refused),
        "usage": usage_to_anthropic(fields.field_value("usage")),
    }
    return Translated(encode(out), tuple(voice.left_out))


def _blocks(message: Fields, *, is_cut_off: bool) -> tuple[list[dict[str, Any]], bool]:
    blocks: list[dict[str, Any]] = []
    thought = message.field_value("reasoning_content", str) or message.field_value("reasoning", str)
    if thought:
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    text = message.field_value("content", str)
    refusal = message.field_value("refusal", str)
    blocks += [{"type": "text", "text": one} for one in (text, refusal) if one]
    calls = list(message.each("tool_calls"))
    for call in calls:
        if call.field_value("type", str) not in (None, "function"):
            raise message.voice.unsupported(call.at("type"))
        function = call.inner("function")
        if function is None:
            raise message.voice.malformed(call.at("function"), "is missing")
        arguments = function.field_value("arguments", str) or ""
        if is_cut_off and call is calls[-1] and not _is_object(arguments):
            arguments = ""
        blocks.append(
            {
                "type": "tool_use",
                "id": call.need("id", str),
                "name": function.need("name", str),
                "input": arguments_object(arguments, function.at("arguments"), message.voice),
            }
        )
    message.only("function_call")
    message.only("audio")
    message.only("annotations", [])
    return blocks, bool(refusal)


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return False


def _stop(choice: Fields, finish: str, called: bool, refused: bool) -> dict[str, Any]:
    reason = STOP_TO_ANTHROPIC.get(finish)
    if reason is None:
        raise choice.voice.unsupported(choice.at("finish_reason"))
    # vLLM names the stop sequence that it met; some servers report "stop" after a tool call.
    met = choice.field_value("stop_reason")
    sequence = met if finish == "stop" and isinstance(met, str) else None
    if finish == "stop":
        reason = "refusal" if refused else "tool_use" if called else "stop_sequence" if sequence else reason
    return {"stop_reason": reason, "stop_sequence": sequence}


def answer_to_openai(body: bytes, created_s: int) -> Translated:
    """Translate a message to a chat completion.

    Anthropic's answers have no time, so the caller gives it.
    """
    voice = Voice.answer("a client of OpenAI's API")
    fields = Fields(decode(body, voice), "", voice)
    if fields.field_value("type", str) != "message":
        raise voice.malformed("type", "is not `message`")
    message = _message(fields)
    reason = fields.need("stop_reason", str)
    if reason not in STOP_TO_OPENAI:
        raise voice.unsupported("stop_reason")
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": STOP_TO_OPENAI[reason],
    }
    sequence = fields.field_value("stop_sequence", str)
    if reason == "stop_sequence" and sequence is not None:
        choice["stop_reason"] = sequence
    out = {
        "id": id_to_openai(fields.field_value("id", str) or ""),
        "object": "chat.completion",
        "created": created_s,
        "model": fields.field_value("model", str) or "",
        "choices": [choice],
        "usage": usage_to_openai(fields.field_value("usage")),
    }
    return Translated(encode(out), tuple(voice.left_out))


def _message(fields: Fields) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in each_of(fields.need("content", list), "content", fields.voice):
        kind = block.need("type", str)
        if kind == "text":
            texts.append(block.need("text", str))
            block.only("citations", [])
        elif kind == "tool_use":
            arguments = encode(block.need("input", dict)).decode()
            function = {"name": block.need("name", str), "arguments": arguments}
            calls.append({"id": block.need("id", str), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(block.need("thinking", str))
        elif kind == "redacted_thinking":
            fields.voice.left_out.append(block.path)
        else:
            raise fields.voice.unsupported(block.at("type"))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts else None, "refusal": None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message
