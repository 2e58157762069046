"""Slots are shared max-min fair and never above the cap, however the answers and the calls in flight interleave."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.core.budgets.slots import fair_shares, next_holding

wants = st.dictionaries(st.sampled_from("abcdefg"), st.integers(0, 30), max_size=7)


@given(st.integers(-3, 100), wants, st.integers(0, 50))
def test_shares_are_max_min_fair_and_use_everything(cap: int, wanted: dict[str, int], turn: int) -> None:
    shares = fair_shares(cap, wanted, turn)
    assert shares.keys() == wanted.keys()
    assert all(0 <= shares[name] <= want for name, want in wanted.items())
    assert sum(shares.values()) == min(max(cap, 0), sum(wanted.values()))
    hungry = [shares[name] for name, want in wanted.items() if shares[name] < want]
    for name in wanted:
        # None has more than one that still wants: but for the slot that cannot be divided.
        assert all(shares[name] <= less + 1 for less in hungry)


def test_what_cannot_be_divided_goes_round() -> None:
    had = [fair_shares(1, {"a": 5, "b": 5, "c": 5}, turn) for turn in range(3)]
    assert sorted(name for shares in had for name, count in shares.items() if count) == ["a", "b", "c"]


@given(
    st.integers(1, 10),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12), st.integers(0, 12)), max_size=40),
)
@settings(deadline=None)
def test_what_is_in_flight_never_exceeds_the_cap(cap: int, steps: list[tuple[str, int, int]]) -> None:
    """Each step a worker asks with what it wants, then fills up as far as it may or ends some calls."""
    may = dict.fromkeys("abc", 0)
    held = dict.fromkeys("abc", 0)
    flying = dict.fromkeys("abc", 0)
    wanted = dict.fromkeys("abc", 0)
    for turn, (name, want, flying_next) in enumerate(steps):
        wanted[name] = want
        in_use = max(flying[name], may[name])
        others = sum(count for other, count in held.items() if other != name)
        may[name], held[name] = next_holding(cap, others, fair_shares(cap, wanted, turn)[name], in_use)
        flying[name] = min(flying_next, max(may[name], flying[name]))
        assert sum(held.values()) <= cap
        assert all(flying[one] <= held[one] for one in "abc")
