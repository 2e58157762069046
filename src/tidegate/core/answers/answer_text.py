"""Measure the text of an answer that does not report its usage: words, reasoning, and arguments of
tools.

Every text counts except the names and marks of the protocol, so a field that is new to us counts
too. Four bytes are one token.
"""

from typing import Any

import msgspec

from tidegate.core.nouns import Call, Usage
from tidegate.core.usage.answer_bounds import SILENT
from tidegate.core.usage.estimate import prompt_tokens
from tidegate.core.usage.prompt_bounds import likely_prompt_tokens

# Texts of the protocol, which no model wrote.
_MARKS = frozenset(
    (
        "id",
        "type",
        "role",
        "object",
        "index",
        "call_id",
        "item_id",
        "status",
        "finish_reason",
        "stop_reason",
        "native_finish_reason",
        "signature",
        "obfuscation",
        "encrypted_content",
        "logprobs",
        "model",
        "format",
    )
)
# The fields that hold what the model wrote, one of each endpoint.
_WRITTEN = ("choices", "output", "content")


def text_bytes(value: Any) -> int:
    """Return how many bytes of text a part of an answer holds."""
    if value is None:
        return 0
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    size = 0
    if isinstance(value, dict):
        for name, one in value.items():
            if one is not None and name not in _MARKS:
                size += text_bytes(one)
    elif isinstance(value, list):
        for one in value:
            size += text_bytes(one)
    return size


def counted(call: Call, reported: Usage | None, uncounted_bytes: int) -> Usage:
    """Return what a call used: what its answer reported, and an estimate by text for the rest."""
    reported = reported or Usage()
    return Usage(
        reported.input_tokens or likely_prompt_tokens(call),
        reported.cached_tokens,
        reported.output_tokens + prompt_tokens(uncounted_bytes),
        reported.reasoning_tokens,
    )


def counted_whole(call: Call, reported: Usage, answer: bytes) -> Usage:
    """Return what a call used whose answer came whole."""
    return counted(call, reported, unreported_bytes(call.endpoint, reported, answer))


def unreported_bytes(endpoint: str, reported: Usage, answer: bytes) -> int:
    """Return how many bytes of text a whole answer has that its usage does not count."""
    return 0 if reported.output_tokens or endpoint in SILENT else written_bytes(answer)


def written_bytes(body: bytes) -> int:
    """Return how many bytes of text a whole answer holds."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return len(body)
    return sum(text_bytes(answer.get(name)) for name in _WRITTEN) if isinstance(answer, dict) else len(body)
