"""Read the counts of tokens that a model server reports, one by one: an odd one is ignored, and
spoils no other.
"""

from typing import Any, NamedTuple

# Above any real count, and so low that a job of wrong ones at the dearest price does not soon cost
# more than a database's integer holds: a worker that recorded such a sum would fail, and so would
# each one after it.
TOKENS_MAX = 1 << 28


COMPACTION = "compaction"


class Compacted(NamedTuple):
    """The tokens of the calls in which a server summed up a conversation before it answered."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


def compacted(iterations: Any) -> Compacted:
    """Return what Anthropic bills for compaction beside the totals of an answer's usage.

    `iterations` is that field of the usage. Its other entries are in the totals already, or are not
    billed.
    """
    fresh = cached = output = 0
    for one in iterations if isinstance(iterations, list) else ():
        if isinstance(one, dict) and one.get("type") == COMPACTION:
            fresh += (token_count(one, "input_tokens") or 0) + (token_count(one, "cache_creation_input_tokens") or 0)
            cached += token_count(one, "cache_read_input_tokens") or 0
            output += token_count(one, "output_tokens") or 0
    return Compacted(fresh + cached, cached, output)


def with_thoughts(prompt: int, output: int, reasoning: int, total: int | None) -> int:
    """Return the tokens of an answer with those of its thoughts.

    Most servers count thoughts within the answer; xAI and Gemini count them apart, as their totals
    show.
    """
    return output + reasoning if total == prompt + output + reasoning else output


def token_count(holder: Any, name: str) -> int | None:
    """Return the count of this name; None where there is no credible one."""
    return as_count(holder.get(name)) if isinstance(holder, dict) else None


def as_count(value: Any) -> int | None:
    """Return a value as a count, also `10.0`; None where it is none."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= TOKENS_MAX else None
