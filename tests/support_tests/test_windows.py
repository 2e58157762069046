"""The arithmetic that limits are judged by, against a plain count of every window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.windows import exceeded, fullest, mean_use, used

USES = st.lists(st.tuples(st.integers(0, 300).map(float), st.integers(0, 5)), max_size=40)


@given(USES, st.integers(1, 20))
def test_windows_are_counted_right(uses: list[tuple[float, int]], limit: int) -> None:
    held = [sum(amount for at, amount in uses if end - 60 < at <= end) for end, _ in uses]
    assert fullest(uses) == max(held, default=0)
    assert (exceeded(uses, limit) > 0) == any(one > limit for one in held)


def test_what_was_used_is_a_part_of_what_was_allowed() -> None:
    uses = [(float(second), 1) for second in range(120)]
    assert used(uses, 0, 120, 60) == 1.0
    assert used(uses, 30, 90, 120) == 0.5


@given(USES)
def test_the_mean_use_is_that_of_every_window_in_turn(uses: list[tuple[float, int]]) -> None:
    counts = [sum(amount for at, amount in uses if start < at <= start + 60) for start in range(10, 200)]
    assert mean_use(uses, 10, 260, 7) == pytest.approx(sum(counts) / (190 * 7))


def test_bursts_a_little_more_than_a_minute_apart_are_used_fully_wherever_the_measure_ends() -> None:
    uses = [(number * 60.5 + 4.4 + place / 10, 10) for number in range(4) for place in range(10)]
    assert used(uses, 5, 185, 100) < 0.95
    assert mean_use(uses, 5, 185, 100) > 0.985
