"""Usage says the same in both shapes: what is recorded of an answer is what its translated line says."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.answers import answer
from tidegate.core.translate.usage import usage_to_anthropic, usage_to_openai

counts = (
    st.integers(-2, 50)
    | st.floats(-2, 50)
    | st.none()
    | st.booleans()
    | st.text(max_size=2)
    | st.integers(2**39, 2**42)
)


def some(*names: str, **details: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={**dict.fromkeys(names, counts), **details})


openai = some(
    "prompt_tokens",
    "completion_tokens",
    prompt_tokens_details=some("cached_tokens") | counts,
    completion_tokens_details=some("reasoning_tokens") | counts,
)
anthropic = some(
    "input_tokens",
    "cache_read_input_tokens",
    "cache_creation_input_tokens",
    "output_tokens",
    output_tokens_details=some("thinking_tokens", "reasoning_tokens") | counts,
    input_tokens_details=some("cached_tokens") | counts,
    iterations=st.lists(
        some(
            "input_tokens",
            "cache_read_input_tokens",
            "cache_creation_input_tokens",
            "output_tokens",
            type=st.sampled_from(["compaction", "message", 1]),
        )
        | counts,
        max_size=3,
    )
    | counts,
)


def read_openai(usage: object) -> object:
    return answer.read("/v1/chat/completions", json.dumps({"choices": [{}], "usage": usage}).encode())[1]


def read_anthropic(usage: object) -> object:
    return answer.read("/v1/messages", json.dumps({"content": [], "usage": usage}).encode())[1]


@given(anthropic)
def test_anthropics_usage_is_the_same_to_a_caller_of_openai(usage: dict[str, Any]) -> None:
    assert read_openai(usage_to_openai(usage)) == read_anthropic(usage)


@given(openai, st.integers(0, 1))
def test_openais_usage_is_the_same_to_a_caller_of_anthropic(usage: dict[str, Any], more: int) -> None:
    parts = [usage.get("prompt_tokens"), usage.get("completion_tokens")]
    details = usage.get("completion_tokens_details")
    parts.append(details.get("reasoning_tokens") if isinstance(details, dict) else 0)
    usage["total_tokens"] = sum(part for part in parts if type(part) is int) + more
    assert read_anthropic(usage_to_anthropic(usage)) == read_openai(usage)


def test_the_parts_of_a_prompt_are_never_more_than_the_prompt() -> None:
    details = {"cached_tokens": 7, "cache_write_tokens": 9}
    shown = usage_to_anthropic({"prompt_tokens": 10, "prompt_tokens_details": details})
    assert (shown["cache_read_input_tokens"], shown["cache_creation_input_tokens"], shown["input_tokens"]) == (7, 3, 0)
    shown = usage_to_openai({"input_tokens": 5, "input_tokens_details": {"cached_tokens": 9}})
    assert shown["prompt_tokens_details"] == {"cached_tokens": 5}
