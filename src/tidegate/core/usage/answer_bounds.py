"""Bound the tokens that all answers to one request may have together, as a lenient server would
read the request.

A server may read any of the fields that limit an answer, take `128.0`, `"128"` or `true` for a
number, ignore the case of a name, and use the first or the last of two fields of one name. So every
one of them counts, and the largest bounds. A server may also ignore a field that its endpoint does
not have: without one of the endpoint's own fields there is no bound. A value that cannot be read as
a number above zero bounds nothing. A text that the caller predicts is billed as an answer where the
model does not follow it, whatever the length is. This module knows no price.
"""

import json
import math
import re
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from tidegate.core.json_limits import has_too_many_values

# Names that some server takes for the length of an answer, and for the number of answers.
LENGTHS = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "max_tokens_to_sample",
    "max_gen_len",
    "n_predict",
    "num_predict",
)
LEAST_LENGTHS = ("min_tokens", "min_new_tokens", "min_length")
COUNTS = ("n", "best_of", "num_return_sequences", "candidate_count", "num_beams", "beam_width")
# The length fields of each endpoint. At an endpoint that an operator added, any of the names may be
# one.
_OWN_LENGTHS = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/chat/completions/batch": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/audio/transcriptions": ("max_completion_tokens",),
    "/v1/audio/translations": ("max_completion_tokens",),
}
# These return no text of tokens.
SILENT = ("/v1/embeddings", "/v1/moderations", "/v1/score", "/v1/rerank", "/v1/classify", "/v1/pooling")
# Endpoints that answer each entry of `prompt` by itself.
_ONE_PROMPT = ("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/messages", "/v1/responses")
_READ = frozenset((*LENGTHS, *LEAST_LENGTHS, *COUNTS, "prompt", "messages", "thinking", "prediction", "extra_body"))
_NAMED = re.compile(rb'"(?:%s)"\s*:' % "|".join(sorted(_READ)).encode(), re.IGNORECASE)
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")

NUMBER_CHARS_MAX = 40
# Exact as a float, and far above any answer: a larger number bounds nothing.
NUMBER_MAX = 1 << 50
# A larger body that may repeat a name is not read a second time, and so has no bound.
REREAD_BYTES_MAX = 8 << 20

_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _MemberPairs(list[tuple[str, Any]]):
    """The members of an object, including those that share a name."""


def output_tokens_max(endpoint: str, body: bytes, otherwise: int = 0, items: int = 1) -> int | None:
    """Return the most tokens that all answers may have; None when neither the caller nor
    `otherwise` bounds one.

    `items` is how many items are known to share the request.
    """
    try:
        members = _read(body)
    except (ValueError, RecursionError):
        return None
    lengths = [_number(value) for name, value in members if name in LENGTHS and value is not None]
    least = [_number(value) for name, value in members if name in LEAST_LENGTHS and value is not None]
    least += [_number(number) for name, value in members if name == "thinking" for number in _budgets(value)]
    counts = [_number(value) for name, value in members if name in COUNTS and value is not None]
    if any(math.isinf(number) for number in (*least, *counts)):
        return None
    own = _OWN_LENGTHS.get(endpoint, LENGTHS)
    is_bounded = any(name in own and value is not None for name, value in members)
    is_bounded = is_bounded and all(0 < number < math.inf for number in lengths)
    if not is_bounded:
        if not otherwise:
            return None
        lengths = [otherwise, *(number for number in lengths if number < math.inf)]
    prompts = max(items, *(_prompts(endpoint, name, value) for name, value in members), 1)
    predicted = sum(_text_bytes(value) for name, value in members if name == "prediction")
    return (int(max(*lengths, *least, 0)) + predicted) * int(max(1, *counts, 1)) * prompts


def _read(body: bytes) -> list[tuple[str, Any]]:
    """Return the members that matter, their names in small letters, including those that share a
    name.
    """
    found = [(name.lower(), raw) for name, raw in _members(body).items() if name.lower() in _READ]
    if len(_NAMED.findall(body)) == len(found) and not _ESCAPED_LETTER.search(body):
        return _flat((name, msgspec.json.decode(raw)) for name, raw in found)
    if len(body) > REREAD_BYTES_MAX or has_too_many_values(body):
        raise ValueError("the body is too large to be read twice")
    pairs: Any = json.loads(body, object_pairs_hook=_MemberPairs)
    return _flat(pairs)


def _flat(pairs: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the members that matter, and those of `extra_body`, which a gateway puts beside the
    others.
    """
    flat: list[tuple[str, Any]] = []
    for name, value in pairs:
        if name.lower() == "extra_body":
            flat += _flat(
                value.items() if isinstance(value, dict) else value if isinstance(value, _MemberPairs) else ()
            )
        elif name.lower() in _READ:
            flat.append((name.lower(), value))
    return flat


def _number(value: Any) -> float:
    """Return the number a lenient server may read, rounded up; infinity when it is unknown."""
    if isinstance(value, str):
        try:
            number = float(Decimal(value.strip())) if len(value) <= NUMBER_CHARS_MAX else math.inf
        except (InvalidOperation, OverflowError, ValueError):
            return math.inf
    elif isinstance(value, int | float):
        number = value
    else:
        return math.inf
    return math.ceil(number) if abs(number) < NUMBER_MAX else math.inf


def _budgets(thinking: Any) -> Iterable[Any]:
    pairs = thinking if isinstance(thinking, _MemberPairs) else thinking.items() if isinstance(thinking, dict) else ()
    return [value for name, value in pairs if name == "budget_tokens" and value is not None]


def _text_bytes(value: Any) -> int:
    """Return how many bytes the texts in a value have: they cannot have more tokens."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    if isinstance(value, _MemberPairs):
        return sum(_text_bytes(one) for _, one in value)
    return sum(
        map(_text_bytes, value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
    )


def _prompts(endpoint: str, name: str, value: Any) -> int:
    """Return how many prompts a member holds that are answered each by itself."""
    if not isinstance(value, list) or isinstance(value, _MemberPairs):
        return 1
    if name == "messages":
        return max(1, sum(isinstance(one, list) and not isinstance(one, _MemberPairs) for one in value))
    return 1 if name != "prompt" or endpoint in _ONE_PROMPT else _listed_prompts(value)


def _listed_prompts(prompts: list[Any]) -> int:
    """Return how many prompts there are where a server may also look into lists of lists.

    Numbers are the tokens of one prompt.
    """
    count = 0
    lists = [prompts]
    while lists:
        value = lists.pop()
        if all(isinstance(one, int | float) for one in value):
            count += 1
            continue
        inner = [one for one in value if isinstance(one, list) and not isinstance(one, _MemberPairs)]
        count += len(value) - len(inner)
        lists += inner
    return count
