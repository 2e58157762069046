"""The arithmetic that limits are judged by, against a plain count of every window."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.windows import exceeded, fullest, used

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
