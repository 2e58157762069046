"""The texts of an ordinary chat, for guardrails: one typed decode instead of a walk over all its
values.

An ordinary chat has only fields from a short list, its messages are strings, and its speakers take
turns. Most bodies are ordinary. `BodyTexts` reads every other body, and for an ordinary one it
would find the same texts.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tidegate.core.json_limits import has_too_many_values
from tidegate.core.policy.body_texts import SAME_ROLES, count_keys, has_more_names, is_data_url

_Role = Literal["system", "developer", "user", "assistant"]
_Finish = Literal["stop", "length", "content_filter", "tool_calls"]
_Absent = list[None] | None | UnsetType


class _TextTurn(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    role: _Role
    content: str


class _TextRequest(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A request with one text for each message, and numbers that cannot hide a text."""

    messages: list[_TextTurn]
    model: str | UnsetType = UNSET
    stream: bool | UnsetType = UNSET
    max_tokens: int | UnsetType | None = UNSET
    max_completion_tokens: int | UnsetType | None = UNSET
    temperature: float | UnsetType | None = UNSET
    top_p: float | UnsetType | None = UNSET
    frequency_penalty: float | UnsetType | None = UNSET
    presence_penalty: float | UnsetType | None = UNSET
    n: int | UnsetType | None = UNSET
    seed: int | UnsetType | None = UNSET


class _TextReply(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The text of a choice; all other fields are there and empty, or not there."""

    role: _Role
    content: str
    refusal: _Absent = UNSET
    annotations: _Absent = UNSET
    audio: _Absent = UNSET
    function_call: _Absent = UNSET
    tool_calls: _Absent = UNSET
    reasoning: _Absent = UNSET
    reasoning_content: _Absent = UNSET


class _TextChoice(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    message: _TextReply
    index: int | UnsetType = UNSET
    finish_reason: _Finish | UnsetType | None = UNSET
    logprobs: _Absent = UNSET
    stop_reason: _Absent = UNSET
    token_ids: _Absent = UNSET


class _TextAnswer(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """An answer in texts. The server writes the fields around its choices, and the model none of
    them."""

    choices: list[_TextChoice]
    id: str | UnsetType = UNSET
    object: str | UnsetType = UNSET
    created: int | UnsetType = UNSET
    model: str | UnsetType = UNSET
    system_fingerprint: str | UnsetType | None = UNSET
    service_tier: str | UnsetType | None = UNSET
    prompt_token_ids: _Absent = UNSET
    prompt_logprobs: _Absent = UNSET
    kv_transfer_params: _Absent = UNSET
    usage: Any = UNSET


_decode_request = msgspec.json.Decoder(_TextRequest).decode
_decode_answer = msgspec.json.Decoder(_TextAnswer).decode


def chat_texts(body: bytes, *, is_answer: bool) -> list[str] | None:
    """Return the texts of an ordinary chat request or answer; None for any other body."""
    if has_too_many_values(body):
        return None
    try:
        found = _of_answer(_decode_answer(body)) if is_answer else _of_request(_decode_request(body))
    except (ValueError, RecursionError):
        return None
    texts, names, quotes = found
    # A chat without texts is walked through, too.
    if not texts or any(map(is_data_url, texts)):
        return None
    # A name that stands there twice was decoded once.
    return None if _has_more_quotes(body, quotes) and has_more_names(body, names) else texts


def _of_request(chat: _TextRequest) -> tuple[list[str], int, int]:
    """Return the texts of a request, and how many names and quotation marks it has around them.

    Return no texts if a speaker has two turns in a row, which are read as one text, too.
    """
    speaker, texts = "", []
    for turn in chat.messages:
        before, speaker = speaker, SAME_ROLES.get(turn.role, turn.role)
        if speaker == before:
            return [], 0, 0
        texts.append(turn.content)
    names, quotes = _counts(chat)
    return texts, names + 2 * len(texts), quotes + 8 * len(texts)


def _of_answer(chat: _TextAnswer) -> tuple[list[str], int, int]:
    """Return the texts of an answer, and how many names and quotation marks it has around them."""
    names = count_keys(chat.usage)
    quotes = 2 * names
    for part in (chat, *chat.choices, *(choice.message for choice in chat.choices)):
        more_names, more_quotes = _counts(part)
        names, quotes = names + more_names, quotes + more_quotes
    return [choice.message.content for choice in chat.choices], names, quotes


def _counts(part: msgspec.Struct) -> tuple[int, int]:
    """Return how many names a part has, and how many quotation marks around names and strings."""
    values = msgspec.structs.astuple(part)
    names = len(values) - values.count(UNSET)
    return names, 2 * (names + list(map(type, values)).count(str))


def _has_more_quotes(body: bytes, count: int) -> bool:
    """Return whether a body may have more than so many quotation marks outside its texts."""
    quotes = body.count(b'"')
    if quotes > count and b"\\\\" not in body:
        # These stand in its texts.
        quotes -= body.count(b'\\"')
    return quotes > count
