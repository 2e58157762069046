"""Several embedding items as one upstream call, and the split of its answer.

Only items whose answers equal those of single calls are grouped: one text or one row of token ids
each, and every other field of the body the same, byte for byte and in the same order. The answer is
split by `index`; its vectors and every field that we do not know keep the bytes that the upstream
sent. When an answer cannot be split safely, its items are sent one by one. This module does not
send, wait or count time.
"""

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import replace

from tidegate.core.answers.answer import ReportedUsage, loose_usage, usage_of
from tidegate.core.apportion import apportion
from tidegate.core.errors import BrokenAnswer, HandedBack, KeyRejected, PoolExhausted, Refused, UpstreamError, Withheld
from tidegate.core.nouns import Usage
from tidegate.core.usage.estimate import prompt_tokens
from tidegate.core.usage.token_counts import as_count

ENDPOINT = "/v1/embeddings"
# Two inputs already save a call; where calls cost little, a group may need more to pay off.
GROUP_INPUTS_MIN = 2
# After so many good groups in a row, a halved size is doubled again.
GROW_AFTER_GROUPS = 8
GROW_AFTER_GROUPS_MAX = 1_024
TOO_LARGE = 413


class _Known(msgspec.Struct):
    """The fields of a request that matter here; all others keep their bytes."""

    input: msgspec.Raw = msgspec.Raw(b"null")
    stream: msgspec.Raw = msgspec.Raw(b"null")


_INPUT = re.compile(rb'"input"[ \t\r\n]*:[ \t\r\n]*')
_JSON_SPACE = b" \t\r\n"
_decode_known = msgspec.json.Decoder(_Known).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_rows = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_decode_index = msgspec.json.Decoder(int).decode
_decode_usage = msgspec.json.Decoder(dict[str, Any]).decode
_decode_reported = msgspec.json.Decoder(ReportedUsage).decode
_decode_tokens = msgspec.json.Decoder(list[int]).decode
_decode_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.encode
_FIRST = msgspec.Raw(b"0")


class Alone(StrEnum):
    """The reasons why an item is sent by itself."""

    ENDPOINT = "endpoint"
    NO_INPUT = "no_input"
    MANY_INPUTS = "many_inputs"
    STREAM = "stream"
    MALFORMED = "malformed"


class Part(msgspec.Struct, frozen=True, gc=False):
    """One item that may share a call.

    Parts with equal `key` fit together; `tokens` is the estimate that usage is allocated by.
    """

    key: bytes
    fields: bytes
    input: bytes
    tokens: int


class CannotSplit(ValueError):
    """The grouped answer cannot be split beyond doubt; the text says why."""


def read(endpoint: str, model: str, body: bytes) -> Part | Alone:
    """Return an item's part in a group of calls to `model`, or why it goes alone.

    Ingest has checked the body.
    """
    if endpoint != ENDPOINT:
        return Alone.ENDPOINT
    try:
        known = _decode_known(body)
        given = bytes(known.input)
        same = _cut(body, given)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Alone.MALFORMED
    if given == b"null":
        return Alone.NO_INPUT
    if bytes(known.stream) not in (b"false", b"null"):
        return Alone.STREAM
    kind, tokens = _measure(given)
    if tokens is None:
        return Alone.MALFORMED if kind == b"text" else Alone.MANY_INPUTS
    # Text and token ids do not mix in one call, and neither do two models behind one name.
    return Part(b"%b\n%b\n%b" % (kind, model.encode(), same), same, given, tokens)


def _cut(body: bytes, given: bytes) -> bytes:
    """Return every field but the input, as it was written and in its order."""
    found = _INPUT.search(body)
    if found is not None and body.count(b'"input"') == 1 and body.startswith(given, found.end()):
        before = body[: found.start()].strip(_JSON_SPACE)[1:].strip(_JSON_SPACE + b",")
        after = body[found.end() + len(given) :].strip(_JSON_SPACE)[:-1].strip(_JSON_SPACE + b",")
        if b"\\" not in before and b"\\" not in after:
            return before + b"," + after if before and after else before or after
    # The word may occur more than once: only a decode of the whole body shows which one is the
    # field.
    fields = _decode_fields(body)
    fields.pop("input", None)
    return b",".join([_encode(name) + b":" + bytes(value) for name, value in fields.items()])


def _measure(given: bytes) -> tuple[bytes, int | None]:
    """Return whether an input is text or ids, and its tokens; None when it is anything but one
    input.
    """
    kind = b"text" if given[:1] == b'"' else b"ids"
    try:
        if kind == b"text":
            # Escapes count as they are written; only what may not be UTF-8 has to be looked at.
            if not given.isascii():
                _decode_text(given)
            return kind, max(1, prompt_tokens(len(given) - 2))
        return kind, len(_decode_tokens(given)) or None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return kind, None


def plan(parts: Sequence[Part | Alone], inputs_max: int, inputs_min: int = GROUP_INPUTS_MIN) -> list[list[int]]:
    """Return which items go together, as places in `parts`: each exactly once, in order within a
    group.

    Groups come in the order of their first items. A group is cut into pieces of nearly equal size,
    none above `inputs_max`; a piece below `inputs_min` is not worth a group.
    """
    together: dict[bytes, list[int]] = {}
    calls: list[list[int]] = []
    for place, part in enumerate(parts):
        if isinstance(part, Alone) or inputs_max < 2:
            calls.append([place])
        else:
            together.setdefault(part.key, []).append(place)
    for places in together.values():
        chunks = -(-len(places) // inputs_max)
        size, larger = divmod(len(places), chunks)
        at = 0
        for number in range(chunks):
            chunk = places[at : at + size + (number < larger)]
            at += len(chunk)
            calls.extend([chunk] if len(chunk) >= inputs_min else [[place] for place in chunk])
    calls.sort()
    return calls


def build(parts: Sequence[Part]) -> bytes:
    """Build one request for all of these parts, which share their key; inputs in order."""
    first = parts[0]
    if any(part.key != first.key for part in parts):
        raise ValueError("only parts with the same key share a call")
    inputs = b",".join([part.input for part in parts])
    return b'{%b%b"input":[%b]}' % (first.fields, b"," if first.fields else b"", inputs)


def split(body: bytes, parts: Sequence[Part]) -> list[tuple[bytes, Usage]]:
    """Split a grouped answer into an answer and a usage for each part, in order, as from calls of
    their own.

    The body is one that was accepted as an answer, on one line.
    """
    try:
        fields = _decode_fields(body)
        rows = _decode_rows(fields.get("data", b"null"))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise CannotSplit("the answer has no list of vectors in `data`") from None
    if bytes(fields.get("error", b"null")) != b"null":
        raise CannotSplit("the answer carries an error object")
    if len(rows) != len(parts):
        raise CannotSplit(f"{len(parts)} inputs were sent and {len(rows)} vectors came back")
    in_order = _by_index(rows)
    usages = _split_usage(fields.get("usage"), [part.tokens for part in parts])
    answers = []
    for row, (usage, used) in zip(in_order, usages, strict=True):
        row["index"] = _FIRST
        fields["data"] = msgspec.Raw(b"[%b]" % _encode(row))
        if usage is not None:
            fields["usage"] = usage
        answers.append((_encode(fields), used))
    return answers


def _by_index(rows: list[dict[str, msgspec.Raw]]) -> list[dict[str, msgspec.Raw]]:
    placed: dict[int, dict[str, msgspec.Raw]] = {}
    for row in rows:
        try:
            index = _decode_index(row.get("index", b"null"))
        except msgspec.MsgspecError:
            raise CannotSplit("a vector has no `index`") from None
        if index in placed or not 0 <= index < len(rows):
            raise CannotSplit(f"the index {index} is named twice or belongs to no input")
        if bytes(row.get("embedding", b"null")) == b"null":
            raise CannotSplit(f"there is no `embedding` at index {index}")
        placed[index] = row
    return [placed[index] for index in range(len(rows))]


def _split_usage(reported: msgspec.Raw | None, weights: Sequence[int]) -> list[tuple[msgspec.Raw | None, Usage]]:
    """Split usage into parts, in the upstream's own fields; every number adds up exactly."""
    if reported is None or bytes(reported) == b"null":
        return [(None, Usage())] * len(weights)
    try:
        whole = _decode_usage(reported)
    except (msgspec.MsgspecError, RecursionError):
        # A paid answer is not thrown away because its usage cannot be divided: only the usage is,
        # so that no part has all of it.
        return [(msgspec.Raw(b"null"), Usage())] * len(weights)
    prompts = apportion(as_count(whole.get("prompt_tokens")) or 0, weights)
    parts: list[dict[str, Any]] = [{} for _ in weights]
    for name, value in whole.items():
        for part, share in zip(parts, _divide(name, value, whole, prompts, weights), strict=True):
            part[name] = share
    return [_counted(_encode(part)) for part in parts]


def _counted(reported: bytes) -> tuple[msgspec.Raw, Usage]:
    try:
        found: ReportedUsage | None = _decode_reported(reported)
    except msgspec.MsgspecError:
        found = loose_usage(_decode_usage(reported))
    return msgspec.Raw(reported), Usage() if found is None else usage_of(found)


def _divide(name: str, value: Any, whole: dict[str, Any], prompts: list[int], weights: Sequence[int]) -> list[Any]:
    count = as_count(value)
    if name == "prompt_tokens" and count is not None:
        return prompts
    if count is not None:
        prompt, completion = as_count(whole.get("prompt_tokens")), as_count(whole.get("completion_tokens")) or 0
        if name == "total_tokens" and prompt is not None and count == prompt + completion:
            # The total is the sum of two numbers that are divided already; divided by itself it
            # could round differently.
            return [mine + other for mine, other in zip(prompts, apportion(completion, weights), strict=True)]
        return apportion(count, weights)
    if isinstance(value, dict):
        # Cached tokens are a part of the prompt: divided alike, no item has more of them than
        # prompt.
        nested: list[dict[str, Any]] = [{} for _ in weights]
        for inner, detail in value.items():
            number = as_count(detail)
            shares = [detail] * len(weights) if number is None else apportion(number, prompts)
            for part, share in zip(nested, shares, strict=True):
                part[inner] = share
        return list(nested)
    return [value] * len(weights)


class Remedy(StrEnum):
    """The ways to go on with the items of a group whose call failed."""

    REQUEUE = "requeue"
    SHRINK = "shrink"
    SINGLES = "singles"


class GroupSize(msgspec.Struct, frozen=True):
    """The size of a deployment's next groups, learned from how the last ones went.

    A first overload is waited out; a second halves the size, down to single calls. Good calls
    double it again, up to what the operator allowed, but later each time: a server that cannot do
    groups is not asked for one over and over. Many groups are in flight at once. So a call
    remembers the `epoch` in which it was sent, and the result of a call from an earlier epoch
    changes nothing: one overload is counted once.
    """

    inputs_max: int
    inputs: int
    overloads: int = 0
    good: int = 0
    epoch: int = 0
    patience: int = GROW_AFTER_GROUPS

    @classmethod
    def fresh(cls, inputs_max: int) -> "GroupSize":
        return cls(inputs_max, inputs_max)

    def succeeded(self, epoch: int) -> "GroupSize":
        """Return the size after an answered call; single calls count too, or a size of 1 would
        never grow again.
        """
        if epoch != self.epoch:
            return self
        good = self.good + 1
        if good < self.patience:
            return replace(self, overloads=0, good=good)
        if self.inputs < self.inputs_max:
            return replace(
                self, inputs=min(self.inputs_max, self.inputs * 2), overloads=0, good=0, epoch=self.epoch + 1
            )
        return replace(self, overloads=0, good=good, patience=GROW_AFTER_GROUPS)

    def failed(self, error: UpstreamError, epoch: int) -> tuple["GroupSize", Remedy]:
        """Return the size after a grouped call that failed, and what to do with its items."""
        if isinstance(error, Refused | BrokenAnswer):
            # One bad input, or a server that cannot do groups: sent alone, each item gets its own
            # verdict.
            is_too_large = isinstance(error, BrokenAnswer) or error.status == TOO_LARGE
            return (self.unfit(epoch) if is_too_large else self), Remedy.SINGLES
        if isinstance(error, KeyRejected | PoolExhausted | Withheld | HandedBack) or epoch != self.epoch:
            return self, Remedy.REQUEUE
        overloads = self.overloads + 1
        if overloads == 1:
            return replace(self, overloads=1, good=0, epoch=epoch + 1), Remedy.REQUEUE
        smaller = replace(self.unfit(epoch), overloads=overloads, patience=self.patience)
        return smaller, Remedy.SINGLES if smaller.inputs == 1 else Remedy.SHRINK

    def unfit(self, epoch: int) -> "GroupSize":
        """Return the size after a call that failed for being a group, and not for anything in
        it."""
        if epoch != self.epoch:
            return self
        return GroupSize(
            self.inputs_max,
            max(1, self.inputs // 2),
            epoch=epoch + 1,
            patience=min(self.patience * 2, GROW_AFTER_GROUPS_MAX),
        )
