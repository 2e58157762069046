"""How much a worker holds: enough for the pace at which items go out, and no more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
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


def leased_work_of(clock: HandClock, free: int = 1) -> LeasedWork:
    upstream, recorder = (
        cast(Upstream, cast(Any, Room(free))),
        cast(Recorder, SimpleNamespace(full=False, expect=lambda: None)),
    )
    leased_work = LeasedWork(upstream, clock, recorder, Supervisor())
    leased_work.extend_lease(float("inf"))
    return leased_work


def slice_of(count: int, model: str = "m") -> LeasedSliceState:
    leased = LeasedSlice("job", "tenant", "/v1/x", model, 0, count, 0, "blob", 0, 0, 0, 0, "token", 1)
    return LeasedSliceState(leased, float("inf"))


def items(count: int) -> list[Item]:
    return [Item(number, b'"x"', b"{}") for number in range(count)]


def numbers(leased_work: LeasedWork, count: int) -> list[int | None]:
    """The numbers of the next items to go."""
    taken = [leased_work.take_item() for _ in range(count)]
    return [one and one[1].number for one in taken]


def go(leased_work: LeasedWork, clock: HandClock, count: int, within_ms: float) -> None:
    """So many items go out and come back within this time."""
    state = slice_of(count)
    leased_work.add(state, [Item(number, b'"x"', b"{}") for number in range(count)])
    for _ in range(count):
        taken = leased_work.take_item()
        assert taken is not None
        leased_work.mark_done(taken[0])
        clock.advance(within_ms / count)


def test_as_many_items_are_worth_holding_as_were_sent_in_the_last_moment() -> None:
    clock = HandClock()
    leased_work = leased_work_of(clock)
    assert leased_work.ahead("m") == 0
    assert leased_work.is_low("m")
    go(leased_work, clock, 600, 3 * AHEAD_MS)
    assert leased_work.ahead("m") in range(150, 250)


def test_a_pace_is_forgotten_when_nothing_goes_out_any_more_and_so_is_the_model() -> None:
    clock = HandClock()
    leased_work = leased_work_of(clock)
    go(leased_work, clock, 100, AHEAD_MS)
    clock.advance(3 * AHEAD_MS)
    assert leased_work.ahead("m") == 0
    leased_work.wake()
    assert not leased_work._stocks


def test_what_goes_out_is_counted_one_by_one_and_for_two_moments() -> None:
    clock = HandClock()
    leased_work = leased_work_of(clock)
    for count in (1, 2):
        go(leased_work, clock, 1, 0)
        assert leased_work.ahead("m") == count
    clock.advance(2 * AHEAD_MS - 1)
    leased_work.wake()
    assert leased_work.ahead("m") == 2
    clock.advance(1)
    assert leased_work.ahead("m") == 0
    leased_work.wake()
    assert leased_work.ahead("m") == 0
    assert not leased_work._stocks


def test_the_pace_is_that_of_this_moment_or_of_the_one_right_before() -> None:
    clock = HandClock()
    leased_work, paces = leased_work_of(clock), []
    for count, wait_ms in ((3, AHEAD_MS), (1, AHEAD_MS), (5, AHEAD_MS), (1, 2 * AHEAD_MS), (6, 2 * AHEAD_MS), (1, 0)):
        go(leased_work, clock, count, 0)
        paces.append(leased_work.ahead("m"))
        clock.advance(wait_ms)
    assert paces == [3, 3, 5, 5, 6, 1]


@pytest.mark.parametrize(("flew_before", "flew", "fly"), [(2, 1, 2), (0, 2, 0), (2, 1, 0)])
def test_a_model_is_low_from_half_of_what_flies_or_flew_in_one_of_the_last_two_moments_on(
    flew_before: int, flew: int, fly: int
) -> None:
    is_low = []
    for waiting in (1, 2):
        clock = HandClock()
        leased_work, state = leased_work_of(clock), slice_of(9)
        leased_work.add(state, items(flew_before + flew + waiting))
        numbers(leased_work, flew_before)
        clock.advance(AHEAD_MS)
        numbers(leased_work, flew)
        for _ in range(flew_before + flew - fly):
            leased_work.mark_done(state)
        is_low.append(leased_work.is_low("m"))
    assert is_low == [True, False]


@pytest.mark.parametrize("is_away", [True, False], ids=["its blobs are away", "its lease is over"])
async def test_a_slice_that_cannot_be_read_is_not_held(is_away: bool) -> None:
    """Otherwise heartbeats would count it as in work, and it would never be handed back."""
    leased_work, ended = leased_work_of(HandClock()), list[LeasedSliceState]()

    async def read(_: LeasedSlice) -> list[Item] | None:
        if is_away:
            raise StoreUnavailable("away")
        return None

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
    with pytest.raises(StoreUnavailable) if is_away else contextlib.nullcontext():
        assert not await reader.read(states)
    assert leased_work.state() == []
    assert ended == states


def test_a_slow_model_is_low_when_half_of_what_flies_is_left_and_a_quick_one_sooner() -> None:
    clock = HandClock()
    leased_work = leased_work_of(clock)
    go(leased_work, clock, 400, 2 * AHEAD_MS)
    state = slice_of(90)
    leased_work.add(state, [Item(number, b'"x"', b"{}") for number in range(90)])
    assert leased_work.is_low("m"), "of 200 that go out in a moment, 90 are too few"
    slow = slice_of(90, "slow")
    leased_work.add(slow, [Item(number, b'"x"', b"{}") for number in range(90)])
    assert not leased_work.is_low("slow")


def test_items_that_waited_long_enough_go_first_and_need_no_slot() -> None:
    clock = HandClock()
    leased_work = leased_work_of(clock, free=0)
    plain, turning, batch_only = slice_of(1), slice_of(2), slice_of(1, "batch only")
    for state in (turning, batch_only):
        state.interactive_at_ms = clock.monotonic_ms() + 1_000
    for state in (plain, turning, batch_only):
        state.slice = replace(state.slice, token=str(id(state)))
        leased_work.add(state, [Item(number, b'"x"', b"{}") for number in range(state.slice.count)])
    assert leased_work.take_item() is None
    clock.advance(1_000)
    # A model that rests for background work alone keeps those that do not go as such.
    leased_work.wake()
    leased_work.drop_model("m", clock.monotonic_ms() + 60_000)
    assert [leased_work.take_item() for _ in range(3)] == [
        (turning, Item(0, b'"x"', b"{}")),
        (turning, Item(1, b'"x"', b"{}")),
        None,
    ]
    assert (plain.dropped, turning.dropped, batch_only.is_interactive) == (True, False, False)
    later = slice_of(1)
    later.interactive_at_ms = clock.monotonic_ms() + 1
    leased_work.add(later, [])
    assert leased_work._turning == [later], "those that have turned, or cannot, are not looked at again"
    assert leased_work.forget_if_done(later)
    leased_work.wake()
    assert leased_work._turning == []


def test_a_slice_of_a_model_that_rests_comes_back_when_it_goes_like_an_interactive_call() -> None:
    clock = HandClock()
    leased_work = leased_work_of(clock, free=0)
    turning = slice_of(1)
    turning.interactive_at_ms = clock.monotonic_ms() + 1_000
    leased_work.add(turning, [Item(0, b'"x"', b"{}")])
    leased_work.drop_model("m", clock.monotonic_ms() + 60_000)
    assert turning.dropped
    assert leased_work.release_wait_ms(turning) == 1_000


def test_an_item_that_comes_back_goes_behind_those_that_go_like_interactive_calls() -> None:
    clock = HandClock()
    leased_work = leased_work_of(clock)
    plain, turned = slice_of(2), slice_of(1)
    turned.slice = replace(turned.slice, token="other")
    turned.interactive_at_ms = clock.monotonic_ms()
    leased_work.add(plain, [Item(0, b'"x"', b"{}")])
    leased_work.add(turned, [Item(0, b'"y"', b"{}")])
    leased_work._return(plain, Item(1, b'"x"', b"{}"))
    taken = [leased_work.take_item() for _ in range(3)]
    assert [one and (one[0] is turned, one[1].number) for one in taken] == [(True, 0), (False, 1), (False, 0)]


def test_what_waits_in_the_router_may_not_begin_after_its_slice_was_lost_or_given_to_another() -> None:
    """An incarnation that was declared gone has lost all of them, one that lives those that the store does not list."""
    leased_work = leased_work_of(HandClock())
    lost, kept = slice_of(1), slice_of(1)
    lost.slice = replace(lost.slice, token="lost")
    for state in (lost, kept):
        leased_work.add(state, [Item(0, b'"x"', b"{}")])
    of_kept = Holding("job", 0, "token", JobState.IN_PROGRESS, None, 0, False, 60_000)
    known = leased_work.keys() | {("job", 0, "settled meanwhile")}
    unknown = replace(of_kept, token="unknown")
    fresh = slice_of(1)
    fresh.slice = replace(fresh.slice, token="leased since the store was asked")
    leased_work.add(fresh, [Item(0, b'"x"', b"{}")])
    assert leased_work.compare(known, [of_kept, unknown]) == [unknown]
    assert (lost.may_begin(), kept.may_begin(), fresh.may_begin()) == (False, True, True)
    assert [entry[0] for entry in leased_work.queued()] == [kept, fresh]
    leased_work.lose_lease()
    assert (kept.may_begin(), leased_work.queued()) == (False, [])


async def test_an_item_that_must_wait_long_goes_back_to_the_store_and_a_short_wait_is_spent_here() -> None:
    clock = HandClock()
    leased_work, state = leased_work_of(clock, free=9), slice_of(2)
    leased_work.add(state, [Item(0, b'"x"', b"{}", wait_ms=SHORT_WAIT_MS), Item(1, b'"y"', b"{}")])
    assert state.deferred == 0
    taken = leased_work.take_item()
    assert taken is not None
    assert taken[1].number == 1
    for wait_ms, rests_ms in ((SHORT_WAIT_MS + 1, 0), (0, 1)):
        resting = slice_of(1)
        resting.rests_ms = rests_ms
        leased_work.add(resting, [Item(0, b'"x"', b"{}", wait_ms=wait_ms)])
        assert (resting.deferred, leased_work.take_item()) == (1, None)
        assert leased_work.release_wait_ms(resting) == max(wait_ms, rests_ms)
    soon = slice_of(1)
    leased_work.add(soon, [Item(0, b'"x"', b"{}", wait_ms=1)])
    assert leased_work.take_item() is None
    assert leased_work.release_wait_ms(soon) == 1
    assert (await leased_work.next())[0] is soon


def test_what_is_given_back_of_a_slice_lies_behind_every_item_that_was_ever_sent() -> None:
    """An item that is sent again, behind later ones, must not make these look unsent."""
    leased_work, state = leased_work_of(HandClock(), free=9), slice_of(4)
    leased_work.add(state, items(3))
    assert numbers(leased_work, 3) == [0, 1, 2]
    leased_work._return(state, Item(0, b'"x"', b"{}"))
    assert numbers(leased_work, 1) == [0]
    assert leased_work.cut(state) == 1


def test_a_slice_that_goes_back_rests_as_long_as_the_item_that_waits_longest() -> None:
    leased_work, state = leased_work_of(HandClock()), slice_of(2)
    leased_work.add(state, [Item(0, b'"x"', b"{}", wait_ms=90_000), Item(1, b'"y"', b"{}", wait_ms=60_000)])
    assert leased_work.release_wait_ms(state) == 90_000


def test_unsent_items_under_budgets_that_are_spent_are_given_back_and_others_stay() -> None:
    clock = HandClock()
    leased_work, spent = leased_work_of(clock, free=9), slice_of(1)
    other = LeasedSliceState(replace(spent.slice, model="n", token="another"), float("inf"))
    budget = Budget(LimitBound.KEY, "k", ())
    spent.budgets = (budget,)
    for state in (spent, other):
        leased_work.add(state, [Item(0, b'"x"', b"{}")])
    assert leased_work.drop_spent((budget,), 77_000.0) == {("job", "m")}
    assert (spent.dropped, spent.deferred_until_ms, other.dropped) == (True, 77_000.0, False)
    assert [state for state, _ in leased_work.queued()] == [other]
    assert leased_work.drop_spent((budget,), 99_000.0) == set(), "once"


def test_nothing_goes_from_the_moment_on_at_which_a_lease_or_a_deadline_ends() -> None:
    clock = HandClock()
    leased_work, late, other = leased_work_of(clock), slice_of(2), slice_of(1)
    other.slice = replace(other.slice, token="other")
    late.move_deadline(clock.monotonic_ms() + 50)
    for state in (late, other):
        leased_work.add(state, items(state.slice.count))
    leased_work.extend_lease(clock.monotonic_ms() + 100)
    clock.advance(49)
    assert numbers(leased_work, 1) == [0]
    clock.advance(1)
    taken = leased_work.take_item()
    assert taken is not None
    assert taken[0] is other, "what is too late is passed over"
    assert (late.deferred, late.deferred_until_ms) == (1, clock.monotonic_ms())
    leased_work.add(slice_of(1, "o"), items(1))
    clock.advance(50)
    assert leased_work.take_item() is None, "the lease is over"
    leased_work.extend_lease(clock.monotonic_ms() + 1)
    assert numbers(leased_work, 1) == [0]


def test_models_take_turns() -> None:
    leased_work = leased_work_of(HandClock())
    for model in ("m", "n"):
        leased_work.add(slice_of(2, model), items(2))
    taken = [leased_work.take_item() for _ in range(4)]
    assert [one and one[0].slice.model for one in taken] == ["m", "n", "m", "n"]


def test_while_it_is_closed_one_admitted_item_goes_at_a_time_under_the_same_conditions_as_any() -> None:
    clock = HandClock()
    leased_work, state, late = leased_work_of(clock), slice_of(4), slice_of(1, "n")
    late.move_deadline(clock.monotonic_ms() + 50)
    leased_work.add(state, items(4))
    leased_work.add(late, items(1))
    flying = leased_work.take_item()
    assert flying is not None
    leased_work.send_one_at_a_time()
    assert leased_work.take_item() is None
    entry = (state, Item(2, b'"x"', b"{}"))
    leased_work.admit(entry)
    assert leased_work.take_item() is None, "something is in flight"
    leased_work.mark_done(flying[0])
    cast(Room, leased_work._upstream).free = 0
    assert leased_work.take_item() is None, "no slot is free"
    cast(Room, leased_work._upstream).free = 1
    assert leased_work.take_item() == entry
    assert (leased_work.admitted, leased_work.take_item()) == (None, None)
    leased_work.mark_done(state)
    leased_work.admit((late, Item(0, b'"x"', b"{}")))
    clock.advance(50)
    assert leased_work.take_item() is None, "its deadline is over"
    leased_work.admit((state, Item(1, b'"x"', b"{}")))
    leased_work.admit(None)
    assert leased_work.take_item() is None, "it was taken back"
    leased_work.admit((state, Item(1, b'"x"', b"{}")))
    leased_work.drop(state)
    assert leased_work.take_item() is None, "its slice is dropped"
    assert (state.sent_to, leased_work.cut(state)) == (3, 1)
    leased_work.reopen()
    leased_work.add(slice_of(1), items(1))
    assert numbers(leased_work, 2) == [0, None]
    leased_work.send_one_at_a_time()
    assert leased_work.admitted is None


async def test_an_admitted_item_a_reopening_and_a_longer_lease_wake_a_runner_that_waits() -> None:
    clock = HandClock()
    leased_work, state = leased_work_of(clock, free=9), slice_of(3)
    leased_work.send_one_at_a_time()
    leased_work.add(state, items(3))
    notifications: list[tuple[Callable[[], None], int]] = [
        (lambda: leased_work.admit((state, items(3)[2])), 2),
        (leased_work.reopen, 0),
        (lambda: leased_work.extend_lease(clock.monotonic_ms() + 1), 1),
    ]
    for notify, number in notifications:
        waits = asyncio.create_task(leased_work.next())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waits.done()
        notify()
        assert (await waits)[1].number == number
        leased_work.mark_done(state)
        if number == 0:
            leased_work.extend_lease(0.0)
    assert leased_work.take_item() is None, "what was admitted went once"


def test_nothing_goes_before_the_first_heartbeat_after_the_last_or_while_the_worker_stops_or_record_is_full() -> None:
    clock, supervisor, recorder = HandClock(), Supervisor(), SimpleNamespace(full=False)
    leased_work = LeasedWork(*cast(Any, (Room(), clock, recorder, supervisor)))
    assert (leased_work.take_item(), leased_work.is_idle) == (None, True)
    leased_work.add(slice_of(9), items(9))
    assert (leased_work.take_item(), leased_work.is_idle) == (None, False)
    leased_work.extend_lease(clock.monotonic_ms() + 1)
    assert numbers(leased_work, 1) == [0]
    recorder.full = True
    assert leased_work.take_item() is None
    recorder.full = False
    supervisor.stop()
    assert leased_work.take_item() is None
    supervisor.is_working = True
    leased_work.lose_lease()
    later = slice_of(1, "n")
    leased_work.add(later, items(1))
    assert leased_work.take_item() is None, "it was leased to the life that ended"
    assert leased_work.is_idle is False


def test_what_is_held_is_counted_by_model() -> None:
    leased_work, state, keyed = leased_work_of(HandClock()), slice_of(3), slice_of(1, "n")
    assert (leased_work.unsent("m"), leased_work.calls("m"), leased_work.has_keys()) == (0, 0, False)
    leased_work.add(state, items(3))
    assert (leased_work.models(), leased_work.has_keys(), leased_work.slice_count) == (["m"], False, 1)
    assert numbers(leased_work, 1) == [0]
    assert (leased_work.unsent("m"), leased_work.calls("m"), leased_work.is_idle) == (2, 1, False)
    assert (state.sent_to, leased_work.cut(state)) == (1, 2)
    keyed.slice = replace(keyed.slice, key_id="key", done=frozenset({0}), count=3, token="other")
    keyed.interactive_at_ms = 7.0
    leased_work.add(keyed, [])
    assert (leased_work.has_keys(), leased_work.interactive_count(), leased_work.cut(keyed)) == (True, 1, 2)
    leased_work.drop_model("m", 0.0)
    assert (leased_work.is_idle, leased_work.queued()) == (False, [])
    leased_work.mark_done(state)
    assert (leased_work.is_idle, leased_work.calls("m")) == (True, 0)


class Groups(Room):
    """Several items share a call."""

    def __init__(self, free: int, per_call: int) -> None:
        super().__init__(free)
        self.per_call = per_call
        self.asked_count = 0

    def items_per_call(self, model: str | None = None) -> int:
        self.asked_count += 1
        return self.per_call


@pytest.mark.parametrize(("per_call", "model", "taken_count"), [(2, "m", 2 + 3), (1, "m", 2), (8, "", 2)])
async def test_where_items_share_calls_runners_that_take_some_invite_others_to_the_room_that_is_left(
    per_call: int, model: str, taken_count: int
) -> None:
    upstream = Groups(0, per_call)
    leased_work = leased_work_of(HandClock())
    leased_work._upstream = cast(Upstream, cast(Any, upstream))
    parked = [asyncio.create_task(leased_work.next()) for _ in range(6)]
    await asyncio.sleep(0)
    state = slice_of(9, model)
    leased_work._stock(model).queue.extend((state, item) for item in items(9))
    upstream.free = 3
    for _ in range(2):
        await leased_work.next()
    for _ in range(3):
        await asyncio.sleep(0)
    assert 2 + sum(task.done() for task in parked) == taken_count
    assert upstream.asked_count <= 1, "once for all that were taken in one turn"
    upstream.free = 1
    await leased_work.next()
    for _ in range(3):
        await asyncio.sleep(0)
    assert 2 + sum(task.done() for task in parked) == taken_count + (taken_count > 2), "and again in the next"
    for task in parked:
        task.cancel()


async def test_as_many_runners_wake_as_there_are_items_and_those_that_gave_up_take_no_turn() -> None:
    leased_work = leased_work_of(HandClock(), free=9)
    parked = [asyncio.create_task(leased_work.next()) for _ in range(4)]
    await asyncio.sleep(0)
    parked[0].cancel()
    await asyncio.sleep(0)
    leased_work.add(slice_of(2), items(2))
    assert leased_work._idle_count == 1, "the fourth is not woken in vain"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [task.done() for task in parked] == [True, True, True, False]
    parked[3].cancel()
    await asyncio.sleep(0)
    waits = asyncio.create_task(leased_work.next())
    await asyncio.sleep(0)
    state = slice_of(1)
    leased_work._return(state, items(1)[0])
    assert await waits == (state, items(1)[0])
    state.turn_interactive()
    leased_work._return(slice_of(1), items(1)[0])
    leased_work._return(state, items(1)[0])
    assert leased_work.queued()[0][0] is state, "before those that do not go like interactive calls"


def test_a_slice_is_settled_once_when_nothing_of_it_is_out_and_the_rest_waits_elsewhere() -> None:
    clock = HandClock()
    leased_work, state = leased_work_of(clock), slice_of(3)
    leased_work.expect(state)
    assert (leased_work.is_reading, leased_work.forget_if_done(state)) == (True, False)
    leased_work.add(state, items(3))
    assert not leased_work.is_reading
    assert numbers(leased_work, 1) == [0]
    leased_work.drop(state)
    assert not leased_work.forget_if_done(state), "a call is in the air"
    leased_work.mark_done(state)
    state.dropped = False
    state.end_item(0, was_answered=True)
    leased_work.defer(state, 9_000)
    assert not leased_work.forget_if_done(state), "one item still waits here"
    leased_work.defer_for_budget(state, 7_000)
    assert [leased_work.forget_if_done(state), leased_work.forget_if_done(state)] == [True, False]
    assert leased_work.state() == []
    assert leased_work.release_wait_ms(state) == 9_000, "a server asked for that rest"


def test_a_slice_that_waits_for_budgets_alone_comes_back_for_the_first_of_its_items() -> None:
    clock = HandClock()
    leased_work, state = leased_work_of(clock), slice_of(2)
    for wait_ms in (8_000, 6_000, 7_000):
        leased_work.defer_for_budget(state, wait_ms)
    assert (leased_work.release_wait_ms(state), state.deferred) == (6_000, 3)
    clock.advance(6_001)
    assert leased_work.release_wait_ms(state) == 0
    assert leased_work.release_wait_ms(slice_of(1)) == 0
    late = slice_of(1)
    leased_work.defer_for_budget(late, 600_000)
    assert leased_work.release_wait_ms(late) == 30_000, "calls in flight may give back tokens that they did not take"


def test_jobs_that_close_and_deadlines_that_move_change_only_what_is_held_of_them() -> None:
    leased_work, state, other = leased_work_of(HandClock()), slice_of(1), slice_of(1, "n")
    other.slice = replace(other.slice, job_id="other")
    for one in (state, other):
        leased_work.add(one, items(1))
    held = Holding("other", 0, "token", JobState.IN_PROGRESS, None, 0, False, 60_000)
    leased_work.move_deadlines([held, replace(held, job_id="gone")], 5_000.0)
    assert (state.deadline_ms, other.deadline_ms) == (float("inf"), 65_000.0)
    assert leased_work.close_job("job") == [state]
    assert (state.may_begin(), other.may_begin()) == (False, True)
    assert [entry[0] for entry in leased_work.queued()] == [other]


@pytest.mark.parametrize(("free", "model", "called"), [(0, "m", 0), (2, "m", 2), (9, "m", 5), (0, "", 5)])
async def test_only_as_many_look_again_as_may_send(free: int, model: str, called: int) -> None:
    leased_work = leased_work_of(HandClock(), free)
    runners = [asyncio.ensure_future(leased_work.next()) for _ in range(8)]
    await asyncio.sleep(0)
    looks = 0
    take = leased_work.take_item

    def look() -> tuple[LeasedSliceState, Item] | None:
        nonlocal looks
        looks += 1
        return take()

    leased_work.take_item = look  # type: ignore[method-assign]
    leased_work.add(slice_of(5, model), items(5))
    for _ in range(3):
        await asyncio.sleep(0)
    assert looks == called
    for runner in runners:
        runner.cancel()


@pytest.mark.parametrize("is_group_over", [False, True])
async def test_more_is_leased_at_once_when_a_group_of_suspects_is_over(is_group_over: bool) -> None:
    """Until then the others stay with the store: without word of its end, they would lie there until the next look."""
    events: list[str] = []
    leased_work, state = leased_work_of(HandClock()), slice_of(0)
    leased_work.expect(state)
    leased_work.add(state, [])
    settler = SliceSettler(
        leased_work,
        cast(Any, SimpleNamespace(is_on=True, end_slice=lambda ended: ended is state and is_group_over)),
        cast(Recorder, SimpleNamespace(finish_slice=lambda *slice_key: events.append("finished"))),
        cast(Any, SimpleNamespace(notify=lambda: events.append("woken"))),
    )
    settler.settle_slice(state)
    assert events == [*(["woken"] if is_group_over else []), "finished"]


async def test_a_runner_that_leaves_when_its_turn_has_come_passes_it_on() -> None:
    leased_work = leased_work_of(HandClock(), free=9)
    leaving, next_one = [asyncio.create_task(leased_work.next()) for _ in range(2)]
    await asyncio.sleep(0)
    leased_work.add(slice_of(1), items(1))
    leaving.cancel()
    state, item = await next_one
    assert (state.in_flight, item.number) == (1, 0)
