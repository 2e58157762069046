"""What the model servers answer, by endpoint: each answer has the mark of its call and of its item."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from tests.simulation.world.estate import EMBEDDINGS, MESSAGES
from tests.simulation.world.witness import INVALID, Witnessed, mark_of
from tidegate.core.grouping.chat import BATCH_ENDPOINT


def whole(path: str, seen: Sequence[Witnessed], dice: random.Random | None = None) -> bytes:
    """A whole answer; that for several items is in no order."""
    if path == EMBEDDINGS:
        return _embeddings(seen, dice)
    if path == BATCH_ENDPOINT:
        return _results(seen, dice)
    one = seen[0]
    return msgspec.json.encode(_message(one) if path == MESSAGES else _chat(one))


def pieces(one: Witnessed, body: bytes, *, is_stream: bool) -> list[bytes]:
    """How an answer comes: as it is, or as a stream of events."""
    if one.mood != "ok" or not is_stream:
        return [body] if body else []
    delta = {"id": f"call-{one.serial}", "choices": [{"index": 0, "delta": {"content": mark_of(one.serial, one.tag)}}]}
    usage = {"id": f"call-{one.serial}", "choices": [], "usage": _chat(one)["usage"]}
    last = b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode(usage)
    return [b"data: %b\n\n" % msgspec.json.encode(delta), last]


def _text(one: Witnessed) -> str:
    """What the model writes: its mark, as JSON where that is asked for. One that does not fit is JSON of another shape, or none."""
    mark = mark_of(one.serial, one.tag)
    if not one.wants_json:
        return mark
    if one.mood != INVALID:
        return f'{{"mark":"{mark}"}}'
    return f'{{"mork":"{mark}"}}' if one.serial % 2 else mark


def _chat(one: Witnessed) -> dict[str, Any]:
    message = {"role": "assistant", "content": _text(one)}
    return {
        "id": f"call-{one.serial}",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": one.usage.input_tokens, "completion_tokens": one.usage.output_tokens},
    }


def _message(one: Witnessed) -> dict[str, Any]:
    return {
        "id": f"msg_{one.serial}",
        "type": "message",
        "role": "assistant",
        "model": "any",
        "content": [{"type": "text", "text": _text(one)}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": one.usage.input_tokens, "output_tokens": one.usage.output_tokens},
    }


def _results(seen: Sequence[Witnessed], dice: random.Random | None) -> bytes:
    rows = [{"index": index, "body": _chat(one)} for index, one in enumerate(seen)]
    if dice is not None:
        dice.shuffle(rows)
    prompt, output = sum(one.usage.input_tokens for one in seen), sum(one.usage.output_tokens for one in seen)
    return msgspec.json.encode({"results": rows, "usage": {"prompt_tokens": prompt, "completion_tokens": output}})


def _embeddings(seen: Sequence[Witnessed], dice: random.Random | None) -> bytes:
    rows = [
        {"object": "embedding", "index": index, "embedding": [0.5], "mark": mark_of(one.serial, one.tag)}
        for index, one in enumerate(seen)
    ]
    if dice is not None and len(rows) > 1:
        dice.shuffle(rows)
    tokens = sum(one.usage.input_tokens for one in seen)
    return msgspec.json.encode({"data": rows, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})
