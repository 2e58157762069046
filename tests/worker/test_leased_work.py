"""How much a worker holds: enough for the pace at which items go out, and no more."""

from __future__ import annotations

from typing import Any, cast

from tidegate.core.nouns import Item, LeasedSlice
from tidegate.core.ports import Upstream
from tidegate.worker.leased_work import AHEAD_MS, LeasedSliceState, LeasedWork


class Clock:
    def __init__(self) -> None:
        self.at_ms = 1_000_000.0

    def monotonic_ms(self) -> float:
        return self.at_ms

    def now_ms(self) -> int:
        return int(self.at_ms)


class Open:
    """An upstream that always has room."""

    def knows(self, model: str) -> bool:
        return True

    def free_slots(self, model: str) -> int:
        return 1


def hand_of(clock: Clock) -> LeasedWork:
    hand = LeasedWork(cast(Upstream, cast(Any, Open())), clock, lambda: True)
    hand.extend_lease(float("inf"))
    return hand


def slice_of(count: int, model: str = "m") -> LeasedSliceState:
    piece = LeasedSlice("job", "tenant", "/v1/x", model, 0, count, 0, "blob", 0, 0, 0, 0, "token", 1)
    return LeasedSliceState(piece, float("inf"))


def go(hand: LeasedWork, clock: Clock, count: int, within_ms: float) -> None:
    """So many items go out and come back within this time."""
    held = slice_of(count)
    hand.add(held, [Item(number, b'"x"', b"{}") for number in range(count)])
    for _ in range(count):
        taken = hand.take()
        assert taken is not None
        hand.landed(taken[0])
        clock.at_ms += within_ms / count


def test_as_many_items_are_worth_holding_as_went_out_in_the_last_moment() -> None:
    clock = Clock()
    hand = hand_of(clock)
    assert hand.ahead("m") == 0
    assert hand.is_low("m")
    go(hand, clock, 600, 3 * AHEAD_MS)
    assert hand.ahead("m") in range(150, 250)


def test_a_pace_is_forgotten_when_nothing_goes_out_any_more_and_so_is_the_model() -> None:
    clock = Clock()
    hand = hand_of(clock)
    go(hand, clock, 100, AHEAD_MS)
    clock.at_ms += 3 * AHEAD_MS
    assert hand.ahead("m") == 0
    hand.wake()
    assert not hand._stocks


def test_a_slow_model_is_low_when_half_of_what_flies_is_left_and_a_quick_one_sooner() -> None:
    clock = Clock()
    hand = hand_of(clock)
    go(hand, clock, 400, 2 * AHEAD_MS)
    held = slice_of(90)
    hand.add(held, [Item(number, b'"x"', b"{}") for number in range(90)])
    assert hand.is_low("m"), "of 200 that go out in a moment, 90 are too few"
    slow = slice_of(90, "slow")
    hand.add(slow, [Item(number, b'"x"', b"{}") for number in range(90)])
    assert not hand.is_low("slow")
