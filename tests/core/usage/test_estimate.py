"""How many tokens an item will cost, by its bytes alone."""

from __future__ import annotations

import json

import pytest

from tidegate.core.usage import estimate


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "\n\t",
        "\u00e4\u07ff",
        "\u20ac\ud7ff",
        # A surrogate pair begins in one of four ways: each stands for another quarter of the characters beyond the first plane.
        "\U00010000",
        "\U00050000",
        "\U00090000",
        "\U000d0000",
        "\U0010ffff and \u20ac\n",
    ],
)
def test_escapes_are_counted_as_what_they_write_down(text: str) -> None:
    written = json.dumps(text)[1:-1].encode()
    assert len(written) - estimate.escaped_bytes(written) == len(text.encode())


@pytest.mark.parametrize(("count", "tokens"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_a_prompt_has_a_token_for_four_bytes_rounded_up(count: int, tokens: int) -> None:
    assert estimate.prompt_tokens(count) == tokens
    assert estimate.work_units(count, 7) == tokens + 7


def test_an_answer_has_what_the_caller_allows_within_the_bound() -> None:
    bounds = {"default_tokens": 100, "tokens_max": 1_000}
    asked = [estimate.output_tokens(asked, 2, **bounds) for asked in (None, 7, 1_000, 1_001)]
    assert asked == [200, 14, 2_000, 2_000]
