"""How much a worker holds: enough for the pace at which items go out, and no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.support.ports import HandClock
from tidegate.core.budgets.budget import Budget, LimitBound
from tidegate.core.errors import StoreUnavailable
from tidegate.core.nouns import Holding, Item, LeasedSlice
from tidegate.core.ports import Upstream
from tidegate.core.states import JobState
from tidegate.stages.record import Recorder
from tidegate.worker.leased_work import AHEAD_MS, SHORT_WAIT_MS, LeasedSliceState, LeasedWork
from tidegate.worker.leasing import SliceReader, SliceSettler
from tidegate.worker.supervisor import Supervisor

pytestmark = pytest.mark.anyio


class Room:
    """An upstream that always has so much room for items."""

    def __init__(self, free: int = 1) -> None:
        self.free = free

    def knows(self, model: str) -> bool:
        return True

    def takes_interactive(self, model: str) -> bool:
        return model != "batch only"

    def free_slots(self, model: str) -> int:
        return self.free


def hand_of(clock: HandClock, free: int = 1) -> LeasedWork:
    upstream, recorder = cast(Upstream, cast(Any, Room(free))), cast(Recorder, SimpleNamespace(full=False))
    leased_work = LeasedWork(upstream, clock, recorder, Supervisor())
    leased_work.extend_lease(float("inf"))
    return leased_work


def slice_of(count: int, model: str = "m") -> LeasedSliceState:
    leased = LeasedSlice("job", "tenant", "/v1/x", model, 0, count, 0, "blob", 0, 0, 0, 0, "token", 1)
    return LeasedSliceState(leased, float("inf"))


def go(leased_work: LeasedWork, clock: HandClock, count: int, within_ms: float) -> None:
    """So many items go out and come back within this time."""
    state = slice_of(count)
    leased_work.add(state, [Item(number, b'"x"', b"{}") for number in range(count)])
    for _ in range(count):
        taken = leased_work.take()
        assert taken is not None
        leased_work.mark_done(taken[0])
        clock.advance(within_ms / count)


def test_as_many_items_are_worth_holding_as_went_out_in_the_last_moment() -> None:
    clock = HandClock()
    leased_work = hand_of(clock)
    assert leased_work.ahead("m") == 0
    assert leased_work.is_low("m")
    go(leased_work, clock, 600, 3 * AHEAD_MS)
    assert leased_work.ahead("m") in range(150, 250)


def test_a_pace_is_forgotten_when_nothing_goes_out_any_more_and_so_is_the_model() -> None:
    clock = HandClock()
    leased_work = hand_of(clock)
    go(leased_work, clock, 100, AHEAD_MS)
    clock.advance(3 * AHEAD_MS)
    assert leased_work.ahead("m") == 0
    leased_work.wake()
    assert not leased_work._stocks


def test_what_goes_out_is_counted_one_by_one_and_for_two_moments() -> None:
    clock = HandClock()
    leased_work = hand_of(clock)
    for count in (1, 2):
        go(leased_work, clock, 1, 0)
        assert leased_work.ahead("m") == count
    clock.advance(2 * AHEAD_MS - 1)
    leased_work.wake()
    assert leased_work.ahead("m") == 2
    clock.advance(1)
    leased_work.wake()
    assert leased_work.ahead("m") == 0
    assert not leased_work._stocks


async def test_a_slice_that_cannot_be_read_is_not_held() -> None:
    """Otherwise heartbeats would count it as in work, and it would never be handed back."""
    leased_work, ended = hand_of(HandClock()), list[LeasedSliceState]()

    async def read(_: LeasedSlice) -> list[Item]:
        raise StoreUnavailable("away")

    settler = SliceSettler(
        leased_work, cast(Any, SimpleNamespace(end_slice=ended.append)), cast(Any, None), cast(Any, None)
    )
    stage, keys = SimpleNamespace(read=read), SimpleNamespace(knows=lambda _: True)
    rules = SimpleNamespace(bind=lambda _: None)
    reader = SliceReader(*cast(Any, (stage, keys, rules, None, leased_work, settler)))
    states = [slice_of(3), slice_of(3, "n")]
    states[1].slice = replace(states[1].slice, first=3)
    for state in states:
        leased_work.expect(state)
    with pytest.raises(StoreUnavailable):
        await reader.read(states)
    assert leased_work.state() == []
    assert ended == states


def test_a_slow_model_is_low_when_half_of_what_flies_is_left_and_a_quick_one_sooner() -> None:
    clock = HandClock()
    leased_work = hand_of(clock)
    go(leased_work, clock, 400, 2 * AHEAD_MS)
    state = slice_of(90)
    leased_work.add(state, [Item(number, b'"x"', b"{}") for number in range(90)])
    assert leased_work.is_low("m"), "of 200 that go out in a moment, 90 are too few"
    slow = slice_of(90, "slow")
    leased_work.add(slow, [Item(number, b'"x"', b"{}") for number in range(90)])
    assert not leased_work.is_low("slow")


def test_items_that_waited_long_enough_go_first_and_need_no_slot() -> None:
    clock = HandClock()
    leased_work = hand_of(clock, free=0)
    plain, turning, batch_only = slice_of(1), slice_of(2), slice_of(1, "batch only")
    for state in (turning, batch_only):
        state.interactive_at_ms = clock.monotonic_ms() + 1_000
    for state in (plain, turning, batch_only):
        state.slice = replace(state.slice, token=str(id(state)))
        leased_work.add(state, [Item(number, b'"x"', b"{}") for number in range(state.slice.count)])
    assert leased_work.take() is None
    clock.advance(1_000)
    # A model that rests for background work alone keeps those that do not go as such.
    leased_work.wake()
    leased_work.drop_model("m", clock.monotonic_ms() + 60_000)
    assert [leased_work.take() for _ in range(3)] == [
        (turning, Item(0, b'"x"', b"{}")),
        (turning, Item(1, b'"x"', b"{}")),
        None,
    ]
    assert (plain.dropped, turning.dropped, batch_only.is_interactive) == (True, False, False)


def test_a_slice_of_a_model_that_rests_comes_back_when_it_goes_like_an_interactive_call() -> None:
    clock = HandClock()
    leased_work = hand_of(clock, free=0)
    turning = slice_of(1)
    turning.interactive_at_ms = clock.monotonic_ms() + 1_000
    leased_work.add(turning, [Item(0, b'"x"', b"{}")])
    leased_work.drop_model("m", clock.monotonic_ms() + 60_000)
    assert turning.dropped
    assert leased_work.release_wait_ms(turning) == 1_000


def test_an_item_that_comes_back_goes_behind_those_that_go_like_interactive_calls() -> None:
    clock = HandClock()
    leased_work = hand_of(clock)
    plain, turned = slice_of(2), slice_of(1)
    turned.slice = replace(turned.slice, token="other")
    turned.interactive_at_ms = clock.monotonic_ms()
    leased_work.add(plain, [Item(0, b'"x"', b"{}")])
    leased_work.add(turned, [Item(0, b'"y"', b"{}")])
    leased_work._return(plain, Item(1, b'"x"', b"{}"))
    taken = [leased_work.take() for _ in range(3)]
    assert [one and (one[0] is turned, one[1].number) for one in taken] == [(True, 0), (False, 1), (False, 0)]


def test_what_waits_in_the_router_may_not_begin_after_its_slice_was_lost_or_given_to_another() -> None:
    """An incarnation that was declared gone has lost all of them, one that lives those that the store does not list."""
    leased_work = hand_of(HandClock())
    lost, kept = slice_of(1), slice_of(1)
    lost.slice = replace(lost.slice, token="lost")
    for state in (lost, kept):
        leased_work.add(state, [Item(0, b'"x"', b"{}")])
    of_kept = Holding("job", 0, "token", JobState.IN_PROGRESS, None, 0, False, 60_000)
    assert leased_work.compare(leased_work.keys(), [of_kept]) == []
    assert (lost.may_begin(), kept.may_begin()) == (False, True)
    leased_work.lose_lease()
    assert not kept.may_begin()


async def test_an_item_that_must_wait_long_goes_back_to_the_store_and_a_short_wait_is_spent_here() -> None:
    clock = HandClock()
    leased_work, state = hand_of(clock, free=9), slice_of(2)
    leased_work.add(state, [Item(0, b'"x"', b"{}", wait_ms=SHORT_WAIT_MS), Item(1, b'"y"', b"{}")])
    assert state.deferred == 0
    taken = leased_work.take()
    assert taken is not None
    assert taken[1].number == 1
    for wait_ms, rests_ms in ((SHORT_WAIT_MS + 1, 0), (0, 1)):
        resting = slice_of(1)
        resting.rests_ms = rests_ms
        leased_work.add(resting, [Item(0, b'"x"', b"{}", wait_ms=wait_ms)])
        assert (resting.deferred, leased_work.take()) == (1, None)


def test_unsent_items_under_budgets_that_are_spent_are_given_back_and_others_stay() -> None:
    clock = HandClock()
    leased_work, spent = hand_of(clock, free=9), slice_of(1)
    other = LeasedSliceState(replace(spent.slice, model="n", token="another"), float("inf"))
    budget = Budget(LimitBound.KEY, "k", ())
    spent.budgets = (budget,)
    for state in (spent, other):
        leased_work.add(state, [Item(0, b'"x"', b"{}")])
    assert leased_work.drop_spent((budget,), 77_000.0) == {("job", "m")}
    assert (spent.dropped, spent.deferred_until_ms, other.dropped) == (True, 77_000.0, False)
    assert [state for state, _ in leased_work.queued()] == [other]
    assert leased_work.drop_spent((budget,), 99_000.0) == set(), "once"
