"""Check the text of answers against a JSON schema, and word the request that asks again after an
answer that does not fit.

The schema is the job's, or what the request itself asks for: `response_format` (chat, completions),
`text.format` (responses) and `output_config.format` or `output_format` (messages). An answer that
was cut off at its token limit never fits. Every text of an answer is checked; an answer without a
text, such as a tool call, does not fit a schema.
"""

from functools import lru_cache
from typing import Any

import msgspec

from tidegate.core.answer_terms import AnswerTerms
from tidegate.core.errors import SettingsError
from tidegate.core.policy.json_schema import Schema
from tidegate.core.policy.schema_cost import check_cost

# The most that a pattern of a caller's schema may be compiled to.
PATTERN_BYTES_MAX = 64 << 10
# A longer rejected answer is not sent back to the model.
REJECTED_CHARS_MAX = 20_000
_SCHEMAS_KEPT = 256
_CUT_OFF = "the answer was cut off at its token limit"
_NO_TEXT = "the answer has no text"
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
CHECKED_ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)


class InvalidSchema(ValueError):
    """A schema that cannot be used; the text says why."""


class _WrittenMessage(msgspec.Struct):
    content: str | None = None


class _WrittenChoice(msgspec.Struct):
    """A choice of a chat or of a completion."""

    message: _WrittenMessage | None = None
    text: str | None = None
    finish_reason: str | None = None


class _OutputPart(msgspec.Struct):
    type: str = ""
    text: str | None = None


class _OutputItem(msgspec.Struct):
    type: str = ""
    content: list[_OutputPart] | None = None


class _Written(msgspec.Struct):
    """The text that the model wrote, in the answers of all endpoints."""

    choices: list[_WrittenChoice] | None = None
    output: list[_OutputItem] | None = None
    content: list[_OutputPart] | None = None
    status: str | None = None
    stop_reason: str | None = None


class _AskedFormat(msgspec.Struct):
    type: str = ""
    json_schema: "_AskedFormat | None" = None
    schema: msgspec.Raw = msgspec.Raw(b"")


class _AskedText(msgspec.Struct):
    format: _AskedFormat | None = None


class _AskedFormats(msgspec.Struct):
    response_format: _AskedFormat | None = None
    text: _AskedText | None = None
    output_config: _AskedText | None = None
    output_format: _AskedFormat | None = None


_written = msgspec.json.Decoder(_Written).decode
_asked = msgspec.json.Decoder(_AskedFormats).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.encode
_ANY_OBJECT = '{"type":"object"}'


def check_schema(text: str) -> None:
    """Raise InvalidSchema when answers cannot be checked against this schema."""
    _schema(text)


class AnswerCheck:
    """The check of one request's answers; without a schema only cut-off answers fail it."""

    def __init__(self, schema: Schema | None) -> None:
        self._schema = schema

    def problem(self, body: bytes) -> str | None:
        """Return what is wrong with an answer, naming fields but no value; None when it fits."""
        try:
            written = _written(body)
        except msgspec.ValidationError:
            return _NO_TEXT
        if _is_cut_off(written):
            return _CUT_OFF
        if self._schema is None:
            return None
        texts = _texts(written)
        if not texts:
            return _NO_TEXT
        for text in texts:
            if (wrong := self._text_problem(text)) is not None:
                return wrong
        return None

    def _text_problem(self, text: str) -> str | None:
        assert self._schema is not None
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeError) as error:
            return f"the answer is not valid JSON: {str(error)[:200]}"
        except RecursionError:
            return "the answer is nested too deeply"
        return self._schema.problem(value)


_CUT_OFF_ONLY = AnswerCheck(None)


def check_of(terms: AnswerTerms, body: bytes) -> AnswerCheck:
    """Return the check of the answer to this request; raise InvalidSchema when there can be
    none."""
    if terms.schema is not None:
        return _check(terms.schema)
    try:
        asked = _asked(body)
    except msgspec.ValidationError:
        raise InvalidSchema("its response_format does not have the shape that the API documents") from None
    text = _own_schema(asked)
    return _CUT_OFF_ONLY if text is None else _check(text)


def rejected_text(body: bytes) -> str:
    """Return the text of an answer that did not fit, to show to the model; empty where it has none
    or too much.
    """
    try:
        texts = _texts(_written(body))
    except msgspec.ValidationError:
        return ""
    return texts[0] if texts and len(texts[0]) <= REJECTED_CHARS_MAX else ""


def with_feedback(endpoint: str, body: bytes, problem: str, rejected: str) -> bytes:
    """Return a request with the answer that did not fit and its problem; unchanged where it has no
    place for them.
    """
    members = _members(body)
    words = f"Your answer could not be used: {problem}. Answer again, with nothing but JSON that fits."
    turns = [{"role": "assistant", "content": rejected}] if rejected else []
    turns.append({"role": "user", "content": words})
    try:
        if endpoint == COMPLETIONS:
            prompt = msgspec.json.decode(members["prompt"], type=str)
            members["prompt"] = msgspec.Raw(_encode("\n\n".join(part for part in (prompt, rejected, words) if part)))
        elif endpoint == RESPONSES:
            asked: Any = msgspec.json.decode(members["input"], type=str | list[msgspec.Raw])
            begun: list[Any] = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
            members["input"] = msgspec.Raw(_encode([*begun, *turns]))
        else:
            begun = msgspec.json.decode(members["messages"], type=list[msgspec.Raw])
            members["messages"] = msgspec.Raw(_encode([*begun, *turns]))
    except (KeyError, msgspec.ValidationError):
        return body
    return _encode(members)


def for_model(body: bytes, model: str) -> bytes:
    """Return a request for another model; every other value keeps its bytes."""
    members = _members(body)
    members["model"] = msgspec.Raw(_encode(model))
    return _encode(members)


def _is_cut_off(written: _Written) -> bool:
    if written.choices is not None:
        return any(choice.finish_reason == "length" for choice in written.choices)
    return written.stop_reason == "max_tokens" or written.status == "incomplete"


def _texts(written: _Written) -> list[str]:
    """Return each text that has to fit: one of each choice, and the joined text of a response or a
    message.
    """
    if written.choices is not None:
        texts = [choice.text if choice.message is None else choice.message.content for choice in written.choices]
        return [text or "" for text in texts]
    if written.output is not None:
        parts = [part for item in written.output if item.type == "message" for part in item.content or ()]
        found = [part.text or "" for part in parts if part.type == "output_text"]
    else:
        found = [part.text or "" for part in written.content or () if part.type == "text"]
    return ["".join(found)] if found else []


def _own_schema(asked: _AskedFormats) -> str | None:
    """Return the schema that a request asks for, as its text; None where it asks for plain text."""
    nested = (holder.format for holder in (asked.text, asked.output_config) if holder is not None)
    wanted = next((one for one in (asked.response_format, asked.output_format, *nested) if one is not None), None)
    if wanted is None:
        return None
    if wanted.type == "json_object":
        return _ANY_OBJECT
    if wanted.type != "json_schema":
        return None
    holder = wanted.json_schema or wanted
    return bytes(holder.schema).decode() or _ANY_OBJECT


@lru_cache(maxsize=_SCHEMAS_KEPT)
def _check(text: str) -> AnswerCheck:
    return AnswerCheck(_schema(text))


def _schema(text: str) -> Schema:
    try:
        value = msgspec.json.decode(text)
        check_cost(value)
        return Schema(value, PATTERN_BYTES_MAX)
    except (SettingsError, msgspec.DecodeError) as error:
        raise InvalidSchema(str(error)) from None
    except RecursionError:
        raise InvalidSchema("schema is nested too deeply") from None
