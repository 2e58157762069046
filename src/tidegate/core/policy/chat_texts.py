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


# Another way to write a quotation mark in a text.
_QUOTE_IN_DIGITS = b"\\u0022"

_decode_request = msgspec.json.Decoder(_TextRequest).decode
_decode_answer = msgspec.json.Decoder(_TextAnswer).decode


def chat_texts(body: bytes, *, is_answer: bool) -> list[str] | None:
    """Return the texts of an ordinary chat request or answer; None for any other body."""
    if has_too_many_values(body):
        return None
    try:
        chat = _decode_answer(body) if is_answer else _decode_request(body)
    except (ValueError, RecursionError):
        return None
    texts = _of_request(chat) if isinstance(chat, _TextRequest) else [one.message.content for one in chat.choices]
    # A chat without texts is walked through, too.
    if not texts or any(map(is_data_url, texts)):
        return None
    # A name that stands there twice was decoded once, and is not in what is written again.
    again = msgspec.json.encode(chat)
    if body.count(b'"') > again.count(b'"') or _QUOTE_IN_DIGITS in body:
        return None if has_more_names(body, count_keys(msgspec.json.decode(again))) else texts
    return texts


def _of_request(chat: _TextRequest) -> list[str]:
    """Return the texts of a request.

    Return none if a speaker has two turns in a row, which are read as one text, too.
    """
    speaker, texts = "", []
    for turn in chat.messages:
        before, speaker = speaker, SAME_ROLES.get(turn.role, turn.role)
        if speaker == before:
            return []
        texts.append(turn.content)
    return texts
