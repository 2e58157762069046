"""What a server reports is believed only as far as sums of it can be kept."""

from __future__ import annotations

import pytest

from tidegate.core.nouns import Usage
from tidegate.core.usage.prices import PRICE_UNITS_MAX, Price, cost
from tidegate.core.usage.token_counts import TOKENS_MAX, as_count, token_count
from tidegate.judge import lines

ANSWERS = 16


def test_wrong_counts_at_the_dearest_price_leave_room_in_a_databases_integer() -> None:
    dearest = Price.of(PRICE_UNITS_MAX, None, PRICE_UNITS_MAX)
    assert ANSWERS * cost(Usage(TOKENS_MAX, 0, TOKENS_MAX), dearest, batch=False).total_nano < 1 << 63
    assert lines.TOKENS_MAX == TOKENS_MAX


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (0, 0),
        (7, 7),
        (7.0, 7),
        (TOKENS_MAX, TOKENS_MAX),
        (TOKENS_MAX + 1, None),
        (1e300, None),
        (float("inf"), None),
        (float("nan"), None),
        (-1, None),
        (7.5, None),
        (True, None),
        ("7", None),
        (None, None),
        ([], None),
    ],
)
def test_a_count_is_a_whole_number_of_a_size_that_can_be(value: object, count: int | None) -> None:
    assert as_count(value) == count
    assert token_count({"a": value}, "a") == count
    assert token_count([value], "a") is None
