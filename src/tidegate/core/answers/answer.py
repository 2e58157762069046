"""Decide whether a body is an answer, and what it cost.

Only this module reads what a model server says.

Pure, and a few microseconds: a typed decode takes the few fields that decide and skips the rest.
The text of an answer is never kept, changed or re-serialised; the upstream's own bytes are passed
on.
"""

import json
from typing import Annotated, Any

import msgspec

from tidegate.core.nouns import Usage
from tidegate.core.usage.token_counts import TOKENS_MAX, Compacted, compacted, token_count, with_thoughts

_TokenCount = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)] | None
# Python's own reader, and so many programs that read result files, refuses an integer of more
# digits.
DIGITS_MAX = 4_300
# A longer number has nothing but digits between two places that are half as far apart.
_DIGITS_STEP = DIGITS_MAX // 2
# Readers may have used up a part of their stack, and a result line is deeper than its answer.
_OPENERS_MAX = 512
_DEPTH_LEFT = 400
_LINE_ENDS_TO_SPACES = bytes.maketrans(b"\r\n", b"  ")


_NULL = msgspec.Raw(b"null")
_TOO_DEEP = "the upstream's answer is nested too deeply"


# Several chats as one call; each of its answers reports its own usage.
SHARED_CHAT = "/v1/chat/completions/batch"


class NotAnAnswer(ValueError):
    """The body is not an answer of this endpoint; the text says why, without quoting the body."""


class Unreadable(NotAnAnswer):
    """It is valid JSON that usual readers cannot read, because the model wrote it so."""


class _InputDetails(msgspec.Struct):
    cached_tokens: _TokenCount = None


class _OutputDetails(msgspec.Struct):
    """The details of the output tokens; Anthropic calls them thinking tokens."""

    reasoning_tokens: _TokenCount = None
    thinking_tokens: _TokenCount = None


class ReportedUsage(msgspec.Struct):
    """The usage of all dialects side by side: chat, completions and embeddings; responses;
    Anthropic's messages.
    """

    prompt_tokens: _TokenCount = None
    completion_tokens: _TokenCount = None
    prompt_tokens_details: _InputDetails | None = None
    completion_tokens_details: _OutputDetails | None = None
    input_tokens: _TokenCount = None
    output_tokens: _TokenCount = None
    input_tokens_details: _InputDetails | None = None
    output_tokens_details: _OutputDetails | None = None
    cache_read_input_tokens: _TokenCount = None
    cache_creation_input_tokens: _TokenCount = None
    total_tokens: _TokenCount = None
    iterations: Any = None


class _Thing(msgspec.Struct):
    """Any JSON object, of which nothing is kept."""


_Things = list[_Thing]
_SomeThings = Annotated[list[_Thing], msgspec.Meta(min_length=1)]


class _ChoicesAnswer(msgspec.Struct):
    choices: _SomeThings
    usage: ReportedUsage | None = None
    error: msgspec.Raw = _NULL


class _DataAnswer(msgspec.Struct):
    data: _SomeThings
    usage: ReportedUsage | None = None
    error: msgspec.Raw = _NULL


class _OutputAnswer(msgspec.Struct):
    output: _Things
    usage: ReportedUsage | None = None
    error: msgspec.Raw = _NULL


class _ResultsAnswer(msgspec.Struct):
    results: _SomeThings
    usage: ReportedUsage | None = None
    error: msgspec.Raw = _NULL


class _OwnUsage(msgspec.Struct):
    usage: msgspec.Raw = _NULL


class _SharedRow(msgspec.Struct):
    body: msgspec.Raw = _NULL


class _SharedAnswer(msgspec.Struct):
    """A shared call's answers, each with its own usage."""

    results: list[_SharedRow]


class _ContentAnswer(msgspec.Struct):
    content: _Things
    usage: ReportedUsage | None = None
    error: msgspec.Raw = _NULL


class _AnyAnswer(msgspec.Struct):
    usage: ReportedUsage | None = None
    error: msgspec.Raw = _NULL


class _WithoutUsage(msgspec.Struct):
    """A body with numbers that could not be read: the shape is checked again, and each count of the
    usage is read by itself.
    """

    choices: _SomeThings | msgspec.UnsetType = msgspec.UNSET
    data: _SomeThings | msgspec.UnsetType = msgspec.UNSET
    output: _Things | msgspec.UnsetType = msgspec.UNSET
    results: _SomeThings | msgspec.UnsetType = msgspec.UNSET
    content: _Things | msgspec.UnsetType = msgspec.UNSET
    error: msgspec.Raw = _NULL
    usage: msgspec.Raw = _NULL


class _Shape:
    __slots__ = ("decode", "essential", "quoted")

    def __init__(self, struct: type[msgspec.Struct], essential: str) -> None:
        self.decode = msgspec.json.Decoder(struct).decode
        self.essential = essential
        self.quoted = f'"{essential}"'.encode()


_SHAPES = {
    "/v1/chat/completions": _Shape(_ChoicesAnswer, "choices"),
    SHARED_CHAT: _Shape(_ResultsAnswer, "results"),
    "/v1/completions": _Shape(_ChoicesAnswer, "choices"),
    "/v1/embeddings": _Shape(_DataAnswer, "data"),
    "/v1/responses": _Shape(_OutputAnswer, "output"),
    "/v1/moderations": _Shape(_ResultsAnswer, "results"),
    "/v1/messages": _Shape(_ContentAnswer, "content"),
}
_ANY_SHAPE = _Shape(_AnyAnswer, "")
_decode_without_usage = msgspec.json.Decoder(_WithoutUsage).decode
_decode_shared = msgspec.json.Decoder(_SharedAnswer).decode
_decode_own = msgspec.json.Decoder(_OwnUsage).decode
_decode_raw = msgspec.json.Decoder(msgspec.Raw).decode


def read(endpoint: str, body: bytes) -> tuple[bytes, Usage]:
    """Return the answer as one line, byte for byte, and its usage; raise NotAnAnswer for any other
    body.

    A pretty-printed answer loses its line ends, which in valid JSON stand only between tokens.
    """
    if not body.isascii():
        _check_utf8(body)
    shape = _SHAPES.get(endpoint, _ANY_SHAPE)
    try:
        decoded: Any = shape.decode(body)
        usage = decoded.usage
    except msgspec.ValidationError as wrong:
        decoded = _without_usage(shape, body, wrong)
        usage = _raw_usage(decoded.usage)
    except (msgspec.DecodeError, RecursionError) as wrong:
        raise _not_json(body, wrong) from None
    if decoded.error is not _NULL:
        _check_no_error(decoded.error)
    if body.count(b'"usage"') > 1 or (shape.essential and body.count(shape.quoted) > 1):
        _check_read_once(body, shape.essential)
    _check_readable(body)
    if b"\n" in body or b"\r" in body:
        body = body.strip().translate(_LINE_ENDS_TO_SPACES)
    if endpoint == SHARED_CHAT and (shared := _sum_of_shared(body)).input_tokens:
        return body, shared
    return body, _NO_USAGE if usage is None else usage_of(usage)


def _sum_of_shared(body: bytes) -> Usage:
    """Return the sum of what the answers of a shared call report, which its items are charged."""
    rows = _decode_shared(body).results
    answers = [_decode_own(row.body) for row in rows if bytes(row.body)[:1] == b"{"]
    own = [_raw_usage(one.usage) for one in answers]
    return Usage.total(usage_of(one) for one in own if one is not None)


_NO_USAGE = Usage()


def usage_of(reported: ReportedUsage) -> Usage:
    cached = reasoning = 0
    read_cached = reported.prompt_tokens_details or reported.input_tokens_details
    if read_cached is not None:
        cached = read_cached.cached_tokens or 0
    thought = reported.completion_tokens_details or reported.output_tokens_details
    if thought is not None:
        reasoning = thought.reasoning_tokens or thought.thinking_tokens or 0
    tokens = reported.prompt_tokens
    more = Compacted()
    if tokens is None:
        # Anthropic counts what it read from or wrote to its cache apart from the other input.
        from_cache = reported.cache_read_input_tokens or 0
        tokens = (reported.input_tokens or 0) + from_cache + (reported.cache_creation_input_tokens or 0)
        if reported.iterations:
            more = compacted(reported.iterations)
        tokens = min(tokens + more.input_tokens, TOKENS_MAX)
        cached = (cached or from_cache) + more.cached_tokens
    output = reported.completion_tokens if reported.completion_tokens is not None else reported.output_tokens or 0
    output = with_thoughts(tokens, output, reasoning, reported.total_tokens)
    output = min(output + more.output_tokens, TOKENS_MAX)
    return Usage(tokens, cached if cached < tokens else tokens, output, reasoning if reasoning < output else output)


def loose_usage(reported: Any) -> ReportedUsage | None:
    """Return the credible counts of a usage that has others too; None where it is no object."""
    if not isinstance(reported, dict):
        return None
    inputs = [reported.get(name) for name in ("prompt_tokens_details", "input_tokens_details")]
    outputs = [reported.get(name) for name in ("completion_tokens_details", "output_tokens_details")]
    of_input = next((one for one in inputs if isinstance(one, dict)), None)
    of_output = next((one for one in outputs if isinstance(one, dict)), None)
    return ReportedUsage(
        prompt_tokens=token_count(reported, "prompt_tokens"),
        completion_tokens=token_count(reported, "completion_tokens"),
        input_tokens=token_count(reported, "input_tokens"),
        output_tokens=token_count(reported, "output_tokens"),
        cache_read_input_tokens=token_count(reported, "cache_read_input_tokens"),
        cache_creation_input_tokens=token_count(reported, "cache_creation_input_tokens"),
        total_tokens=token_count(reported, "total_tokens"),
        iterations=reported.get("iterations"),
        prompt_tokens_details=_InputDetails(token_count(of_input, "cached_tokens")),
        completion_tokens_details=_OutputDetails(
            token_count(of_output, "reasoning_tokens"), token_count(of_output, "thinking_tokens")
        ),
    )


def _raw_usage(raw: msgspec.Raw) -> ReportedUsage | None:
    try:
        return loose_usage(json.loads(bytes(raw)))
    except (ValueError, RecursionError):
        return None


def _without_usage(shape: _Shape, body: bytes, wrong: msgspec.ValidationError) -> _WithoutUsage:
    # A paid answer is not thrown away because its numbers are odd: only those numbers are.
    try:
        decoded = _decode_without_usage(body)
    except msgspec.ValidationError:
        raise NotAnAnswer(f"the upstream's answer has the wrong shape: {_field_only(wrong)}") from None
    except (msgspec.DecodeError, RecursionError) as broken:
        raise _not_json(body, broken) from None
    _check_no_error(decoded.error)
    if shape.essential and getattr(decoded, shape.essential) is msgspec.UNSET:
        raise NotAnAnswer(f"the upstream's answer has no `{shape.essential}`")
    return decoded


def _check_no_error(error: msgspec.Raw) -> None:
    if bytes(error) != b"null":
        raise NotAnAnswer("the upstream answered 2xx with an error object")


def _field_only(wrong: msgspec.ValidationError) -> str:
    # msgspec quotes types and paths, never values, except the name of an unknown tag or key:
    # neither is used here.
    return str(wrong)[:200]


def _check_readable(body: bytes) -> None:
    """Refuse valid JSON that usual readers cannot read: in a result file it would make all other
    answers unreadable too.
    """
    if body.count(b"[") + body.count(b"{") > _OPENERS_MAX:
        try:
            _decode_raw(b"[" * _DEPTH_LEFT + body + b"]" * _DEPTH_LEFT)
        except RecursionError:
            raise Unreadable(_TOO_DEEP) from None
    if len(body) > DIGITS_MAX and _may_have_long_number(body):
        try:
            json.loads(body)
        except ValueError:
            raise Unreadable(f"the upstream's answer has a number of more than {DIGITS_MAX:,} digits") from None


def _may_have_long_number(body: bytes) -> bool:
    places = range(0, len(body) - _DIGITS_STEP, _DIGITS_STEP)
    return any(body[at : at + _DIGITS_STEP + 1].isdigit() for at in places)


def _check_utf8(body: bytes) -> None:
    # msgspec does not check strings that it skips.
    try:
        body.decode()
    except UnicodeDecodeError as wrong:
        raise NotAnAnswer(f"the upstream's answer is not UTF-8 (byte {wrong.start})") from None


def _not_json(body: bytes, wrong: Exception) -> NotAnAnswer:
    if isinstance(wrong, RecursionError):
        return Unreadable(_TOO_DEEP)
    return NotAnAnswer(_why_not_json(body, wrong))


def _why_not_json(body: bytes, wrong: Exception) -> str:
    if not body.strip():
        return "the upstream answered 2xx with an empty body"
    if body.lstrip()[:1] == b"<":
        return "the upstream answered 2xx with HTML or XML instead of JSON: check the deployment's url"
    if body.lstrip().startswith((b"data:", b"event:")):
        return "the upstream answered with a stream of events, which was not asked for"
    return f"the upstream's answer is not valid JSON: {str(wrong)[:200]}"


def _check_read_once(body: bytes, essential: str) -> None:
    """Refuse a body with two copies of a field that we read: two readers could take it for two
    different answers.
    """

    def pairs(found: list[tuple[str, Any]]) -> list[str]:
        return [name for name, _ in found]

    try:
        names = json.loads(body, object_pairs_hook=pairs)
    except (ValueError, RecursionError):
        raise NotAnAnswer("the upstream's answer is not valid JSON") from None
    for name in ("usage", essential):
        if names.count(name) > 1:
            raise NotAnAnswer(f"the upstream's answer has `{name}` twice")


def one_line(body: bytes, bytes_max: int) -> bytes:
    """Return any bytes as one line of valid JSON: JSON that fits stays as it is, everything else
    becomes a (cut) string.
    """
    if not body:
        return b""
    if len(body) <= bytes_max:
        try:
            body.decode()
            _decode_raw(body)
            return body.strip().translate(_LINE_ENDS_TO_SPACES)
        except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError):
            pass
    return msgspec.json.encode(body[:bytes_max].decode("utf-8", "replace"))
