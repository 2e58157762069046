"""Write a whole answer as a stream in one part, after a rule has changed an answer that came as a
stream.

This works for chat completions, completions and Anthropic's messages; for any other the result is
None.
"""

from typing import Any

import msgspec

MESSAGES = "/v1/messages"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_DONE = b"data: [DONE]\n\n"
# Blocks that hold a text under the name of their kind, and the kind of delta for it.
_DELTA_OF = {"text": "text_delta", "thinking": "thinking_delta"}


def stream_of(endpoint: str, body: bytes) -> bytes | None:
    """Return the events that make up this answer; None when it cannot be written as a stream."""
    try:
        answer = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    answer.pop("events", None)
    if endpoint == MESSAGES:
        return _message(answer)
    if endpoint in (CHAT, COMPLETIONS):
        return _chunks(answer, is_chat=endpoint == CHAT)
    return None


def _chunks(answer: dict[str, Any], *, is_chat: bool) -> bytes | None:
    choices = answer.pop("choices", None)
    usage = answer.pop("usage", None)
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        return None
    if is_chat:
        answer["object"] = "chat.completion.chunk"
    chunks = []
    for choice in choices:
        begun, ended = dict(choice), {"index": choice.get("index", 0), "finish_reason": choice.get("finish_reason")}
        if is_chat:
            delta = begun.pop("message", None)
            begun["delta"] = _with_indexes(delta) if isinstance(delta, dict) else {}
            ended["delta"] = {}
        else:
            ended["text"] = ""
        chunks += [{**answer, "choices": [{**begun, "finish_reason": None}]}, {**answer, "choices": [ended]}]
    if usage is not None:
        chunks.append({**answer, "choices": [], "usage": usage})
    return b"".join(b"data: %b\n\n" % msgspec.json.encode(one) for one in chunks) + _DONE


def _with_indexes(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]}


def _message(answer: dict[str, Any]) -> bytes | None:
    blocks = answer.get("content")
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        return None
    last = {name: answer.get(name) for name in ("stop_reason", "stop_sequence")}
    out = [_event("message_start", {"message": {**answer, "content": [], "stop_reason": None, "stop_sequence": None}})]
    for index, block in enumerate(blocks):
        begun, delta = _block(block)
        out.append(_event("content_block_start", {"index": index, "content_block": begun}))
        if delta is not None:
            out.append(_event("content_block_delta", {"index": index, "delta": delta}))
        out.append(_event("content_block_stop", {"index": index}))
    usage = answer.get("usage")
    out.append(_event("message_delta", {"delta": last, "usage": usage if isinstance(usage, dict) else {}}))
    out.append(_event("message_stop", {}))
    return b"".join(out)


def _block(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    if block.get("type") == "tool_use":
        text = msgspec.json.encode(block.get("input", {})).decode()
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": text}
    kind = str(block.get("type"))
    if kind not in _DELTA_OF:
        return block, None
    return {**block, kind: ""}, {"type": _DELTA_OF[kind], kind: block.get(kind, "")}


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))
