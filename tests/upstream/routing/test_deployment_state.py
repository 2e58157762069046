"""One deployment's own state: what it counts as in flight, what it learns from refusals, and what it says about itself. Nothing is sent."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.upstream.world import deployment
from tidegate.core.budgets.budget import Limit, Period
from tidegate.core.errors import (
    Ambiguous,
    AnswerTooLong,
    AnswerUnusable,
    KeyRejected,
    Refused,
    Throttled,
    Unavailable,
    UpstreamError,
)
from tidegate.upstream.budgets.rate_limit_headers import QuotaLeft, RateLimitHeaders
from tidegate.upstream.routing.deployment_state import (
    CALLS_REMEMBERED_MAX,
    FAILING,
    DeploymentPolicy,
    DeploymentState,
)
from tidegate.upstream.routing.slots import ModelSlots, SlotDemand

NOW_MS = 1_000.0
# It is asked for nothing here, so nothing is connected.
NO_LINE: Any = None


def state_of(*, is_alone: bool = True, **more: Any) -> DeploymentState:
    return DeploymentState(deployment("http://one/v1", **more), NO_LINE, NO_LINE, DeploymentPolicy(), is_alone=is_alone)


def change(state: DeploymentState, **more: Any) -> None:
    state.update(replace(state.deployment, **more), NO_LINE, NO_LINE)


def test_a_drained_deployment_is_draining_until_its_last_interactive_call_has_ended() -> None:
    state = state_of()
    state.begin_interactive("user", NOW_MS)
    change(state, is_drained=True)
    assert state.status(NOW_MS).state == "draining"
    state.end_interactive("user")
    assert state.status(NOW_MS).state == "drained"


def test_calls_in_flight_still_count_after_a_change_of_its_settings() -> None:
    state = state_of(is_alone=False, max_in_flight=3)
    state.slots.grant(3)
    state.begin_background()
    for _ in range(2):
        state.begin_interactive("user", NOW_MS)
    change(state, weight=2.0)
    assert (state.slots.in_flight, state.slots_in_use, state.takes_interactive("other"), state.free_slots(NOW_MS)) == (
        3,
        3,
        False,
        0,
    )
    change(state, is_capacity_known=False)
    assert state.slots.in_flight == state.slots_in_use == 1, "only batch work is held to what is learned"
    change(state, is_capacity_known=True)
    assert state.slots.in_flight == state.slots_in_use == 3
    # Batch work gets a part of its own while calls of it are in flight.
    change(state, batch_fraction=0.4)
    assert state.background_slots is not None
    assert (state.background_slots.in_flight, state.background_slots.let_go(0)) == (1, 1)
    state.end_background()
    assert (state.slots.in_flight, state.slots_in_use, state.background_slots.in_flight) == (2, 2, 0)


def test_a_process_has_as_much_of_the_tokens_as_of_the_slots() -> None:
    state = state_of(is_alone=False, max_in_flight=8, tokens_in_flight_max=800)
    assert state.background_slots is not None
    for share, tokens in ((2, 200), (8, 800), (0, 1)):
        state.background_slots.grant(share)
        state.has_share()
        assert state.tokens_max == tokens
    uneven = state_of(is_alone=False, max_in_flight=3, tokens_in_flight_max=100)
    assert uneven.background_slots is not None
    uneven.background_slots.grant(1)
    uneven.has_share()
    assert uneven.tokens_max == 33, "three processes have no more than all of them together"


def test_a_refusal_without_a_time_waits_between_half_and_all_of_the_backoff() -> None:
    for jitter, wait_ms in ((0.0, 500), (0.5, 750), (1.0, 1_000)):
        state = state_of()
        state.failed(Throttled("429", status=429), "key", NOW_MS, jitter)
        assert state.refusals.waits_until_ms("key") == NOW_MS + wait_ms


def test_interactive_calls_in_flight_count_when_refusals_are_weighed() -> None:
    """One refusal among thirty calls is about that call; among none, it is about the deployment."""
    busy, idle = state_of(), state_of()
    for _ in range(30):
        busy.begin_interactive("user", NOW_MS)
    idle.begin_interactive("user", NOW_MS)
    for state in (busy, idle):
        state.failed(Throttled("429", status=429, retry_after_ms=5_000), "key", NOW_MS, 0.0)
    assert [state.rests_until_ms for state in (busy, idle)] == [0.0, NOW_MS + 5_000]


def test_a_second_403_is_about_the_request_only_if_the_key_has_worked_since_the_first() -> None:
    state = state_of()
    state.failed(KeyRejected("403", status=403), "key", NOW_MS, 0.0)
    assert not state.blames_the_request("key")
    state.succeeded()
    assert state.blames_the_request("key")
    assert not state.blames_the_request("other")


def test_slots_that_may_be_taken_for_anothers_are_asked_for_and_not_looked_at() -> None:
    """Those of a life that was declared gone, or is about to be, are no slots that a call saw free."""
    for safe_until_ms, is_asked in ((NOW_MS, True), (NOW_MS + 1, False)):
        state = state_of(is_alone=False)
        state.slots.grant(4)
        demand = SlotDemand(lambda: "me", ModelSlots({}, 0, is_alone=False), partial(float, safe_until_ms))
        demand.given_to("me")
        demand.note_background([state], "m", NOW_MS)
        assert state.slots.is_asked is is_asked


@pytest.mark.anyio
async def test_a_wait_for_what_is_urgent_does_not_end_by_what_is_not() -> None:
    demand = SlotDemand(lambda: "me", ModelSlots({}, 0, is_alone=False))
    demand.hurry()
    await demand.wait(60, is_urgent=False)
    waiting = asyncio.create_task(demand.wait(60, is_urgent=True))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    demand.hurry(is_urgent=True)
    await waiting


def test_a_worker_that_would_send_asks_for_slots_under_each_cap_of_its_model() -> None:
    slots = ModelSlots({"m": 4, "other": 4}, 8, is_alone=False)
    slots.ask_for("m")
    assert {one.name: one.wanted() for one in slots.slots()} == {"model:m": 1, "model:other": 0, "global": 1}


@pytest.mark.parametrize("kind", [Throttled, Refused, AnswerTooLong, AnswerUnusable])
def test_an_answer_that_is_no_fault_of_the_server_opens_no_circuit(kind: type[UpstreamError]) -> None:
    state = state_of()
    assert not any(state.failed(kind("no", status=429), f"k{number}", NOW_MS, 0.0) for number in range(50))
    assert state.failures == {kind.reason: 50}
    assert not state.breaker.is_open


class Tide:
    calls = 5


def test_what_is_free_to_batch_work_is_the_least_of_all_that_bounds_it() -> None:
    state = state_of(max_in_flight=8, tokens_in_flight_max=100)
    assert state.free_slots(NOW_MS) == 8
    state.begin_expecting()
    state.begin_background()
    assert state.free_slots(NOW_MS) == 6
    state.tide = cast(Any, Tide())
    assert state.free_slots(NOW_MS) == 3, "of five that the tide allows, one flies and one is kept for"
    state.end_expecting()
    assert state.free_slots(NOW_MS) == 4
    state.add_tokens(99)
    assert (state.free_slots(NOW_MS), state.can_take(1), state.can_take(2)) == (4, True, False)
    state.add_tokens(1)
    assert state.free_slots(NOW_MS) == 0
    state.add_tokens(-100)
    assert state.can_take(1_000), "one call alone always fits"
    for _ in range(4):
        state.begin_background()
    assert state.free_slots(NOW_MS) == 0
    state.tide = None
    assert state.free_slots(NOW_MS) == 3


@pytest.mark.parametrize(
    "against", ["rest", "circuit", "background", "quota"], ids=["rest", "circuit", "background", "quota"]
)
def test_nothing_is_free_before_the_moment_at_which_a_rest_ends(against: str) -> None:
    state, free = state_of(max_in_flight=8), 8
    if against == "rest":
        state.rest_until(NOW_MS + 100)
        state.rest_until(NOW_MS + 50)
    elif against == "circuit":
        while not state.breaker.is_open:
            state.failed(Ambiguous("lost"), "key", NOW_MS - 4_900, 0.0)
        free = 1
    elif against == "background":
        state.rest_background_until(NOW_MS + 100)
    else:
        state.note_quota(QuotaLeft(requests=0, requests_renew_ms=100), 0, 0, NOW_MS)
    assert [state.free_slots(NOW_MS + ms) for ms in (0, 99, 100)] == [0, 0, free]
    assert [state.ready_in_ms(NOW_MS + ms) for ms in (0, 99.5, 100, 101)] == (
        [0, 0, 0, 0] if against == "background" else [100, 1, 0, 0]
    )
    assert state.takes_interactive("user")


def test_calls_in_flight_are_not_in_the_figure_that_an_answer_reports_and_count_too() -> None:
    state = state_of()
    numbers = [state.count_sent(10) for _ in range(8)]
    state.note_quota(QuotaLeft(), numbers[0], 10, 0.0)
    assert state.quota is None, "an answer that says nothing changes nothing"
    state.note_quota(QuotaLeft(requests=10, tokens=1_000), numbers[0], 10, 0.0)
    assert state.quota_opens_at_ms() == state.ready_at_ms() == 0.0
    assert [state.count_sent(10) for _ in range(3)][-1] == 11
    assert state.quota_opens_at_ms() == state.ready_at_ms() == 60_000.0, "7 went out with it and 3 since"
    state.note_quota(QuotaLeft(requests=4, requests_renew_ms=500), numbers[7], 10, 100.0)
    assert state.quota_opens_at_ms() == 0.0, "a later answer knows better"


def test_while_users_come_batch_work_leaves_them_an_eighth_and_what_they_wait_for() -> None:
    state = state_of(max_in_flight=16)
    state.begin_interactive("user", NOW_MS)
    state.end_interactive("user")
    assert [state.free_slots(NOW_MS + ms) for ms in (0, 59_999, 60_000)] == [14, 14, 16]
    state.begin_wait("user")
    state.begin_wait("user")
    state.end_wait("user")
    assert state.free_slots(NOW_MS + 60_000) == 15
    state.end_wait("user")
    state.begin_wait(None)
    assert (state.waiting, state.interactive_waiting, state.free_slots(NOW_MS + 60_000)) == (1, {}, 16)
    for most, free in ((1, 1), (2, 1), (3, 2)):
        small = state_of(max_in_flight=most)
        small.begin_interactive("user", NOW_MS)
        small.end_interactive("user")
        assert small.free_slots(NOW_MS) == free, "one is left to batch"
    for share in (1, 2):
        shared = state_of(is_alone=False, max_in_flight=16)
        assert shared.background_slots is not None
        shared.slots.grant(share)
        shared.background_slots.grant(share)
        shared.begin_interactive("user", NOW_MS)
        shared.end_interactive("user")
        assert shared.free_slots(NOW_MS) == 1, "also of a small share of many slots"


def test_where_the_number_is_learned_users_need_no_slot_of_batch_and_only_the_ceiling_holds_both() -> None:
    state = state_of(max_in_flight=4, is_capacity_known=False, batch_fraction=0.75)
    assert (state.free_slots(NOW_MS), state.background_slots) == (3, None)
    state.begin_interactive("user", NOW_MS)
    assert state.free_slots(NOW_MS) == 3
    state.begin_interactive("user", NOW_MS)
    state.begin_background()
    assert (state.free_slots(NOW_MS), state.slots_in_use) == (1, 1)
    state.begin_interactive("user", NOW_MS)
    assert (state.free_slots(NOW_MS), state.takes_interactive("other")) == (0, True)
    state.begin_interactive("user", NOW_MS)
    assert not state.takes_interactive("other")


def test_one_owner_leaves_a_slot_to_others_and_who_has_fewest_goes_first() -> None:
    state = state_of(max_in_flight=4)
    for _ in range(3):
        assert state.takes_interactive("many")
        state.begin_interactive("many", NOW_MS)
    assert (state.takes_interactive("many"), state.takes_interactive("other"), state.takes_interactive("")) == (
        False,
        True,
        True,
    )
    for most, begun in ((3, 3), (32, 30), (31, 30)):
        wide = state_of(max_in_flight=most)
        while wide.takes_interactive("many"):
            wide.begin_interactive("many", NOW_MS)
        assert wide.interactive_in_flight == begun
    fair = state_of(max_in_flight=8)
    for owner in ("two", "two", "one"):
        fair.begin_interactive(owner, NOW_MS)
        fair.begin_wait(owner)
    assert (fair.takes_interactive("two"), fair.takes_interactive("one")) == (False, True)
    fair.begin_interactive("one", NOW_MS)
    assert fair.takes_interactive("two"), "both have two"


def test_refusals_without_a_time_wait_longer_each_time_up_to_a_bound_until_it_answers() -> None:
    state, now_ms, waits = state_of(), NOW_MS, []

    def refused() -> float:
        state.failed(Throttled("429", status=429), f"call {now_ms}", now_ms, 1.0)
        return state.refusals.waits_until_ms(f"call {now_ms}") - now_ms

    for _ in range(8):
        waits.append(refused())
        now_ms = max(now_ms, state.rests_until_ms) + 1
    assert waits == [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000]
    state.succeeded()
    first = refused()
    now_ms += 1
    together = [refused() for _ in range(3)]
    assert (first, together) == (1_000, [2_000] * 3), "those in flight together are one refusal"
    assert state.rests_until_ms == now_ms + 2_000
    state.failed(Throttled("429", status=429, retry_after_ms=10**12), "far", now_ms, 1.0)
    assert state.refusals.waits_until_ms("far") == state.rests_until_ms == now_ms + 86_400_000


def test_limits_and_rests_that_it_reports_are_taken_over_once() -> None:
    state = state_of()
    assert not state.note_limits(RateLimitHeaders(empty_for_ms=500), NOW_MS)
    assert (state.rests_until_ms, state.budgets, state.is_plain) == (NOW_MS + 500, (), True)
    reported = RateLimitHeaders(requests=60)
    assert [state.note_limits(reported, NOW_MS) for _ in range(2)] == [True, False]
    assert (state.rests_until_ms, state.is_plain) == (NOW_MS + 500, False)
    [budget] = state.budgets
    assert (budget.name, budget.limits) == ("one/discovered", (Limit(Period.MINUTE, 60, None),))
    assert state.status(NOW_MS).limits == budget.limits
    assert state.note_limits(RateLimitHeaders(tokens=9), NOW_MS)


def test_a_call_that_may_have_been_billed_is_remembered_and_one_that_was_not_taken_is_not() -> None:
    state = state_of()
    assert not state.has_failed_lately(NOW_MS)
    state.failed(Unavailable("refused"), "untaken", NOW_MS, 0.0)
    assert (state.has_failed("untaken"), state.has_failed_lately(NOW_MS)) == (False, False)
    state.failed(Ambiguous("lost", status=500), "lost", NOW_MS, 0.0)
    window_ms = DeploymentPolicy().retry_budget.window_s * 1000
    assert [state.has_failed_lately(NOW_MS + ms) for ms in (window_ms - 1, window_ms)] == [True, False]
    assert state.has_failed("lost")
    assert (state.failures, state.last_failure, state.failure_code) == (
        {Unavailable.reason: 1, Ambiguous.reason: 1},
        "lost",
        FAILING,
    )
    for number in range(CALLS_REMEMBERED_MAX):
        state.failed(Ambiguous("lost"), str(number), NOW_MS, 0.0)
    assert (state.has_failed("lost"), state.has_failed("0"), state.failure_code) == (False, True, Ambiguous("x").code)


@pytest.mark.parametrize(("status", "count_max"), [(401, 1), (403, 3)])
def test_a_rejected_key_pauses_at_once_and_403_only_three_times_in_a_row(status: int, count_max: int) -> None:
    fresh = state_of()
    before = [fresh.failed(KeyRejected("no", status=status), str(number), NOW_MS, 0.0) for number in range(count_max)]
    assert before == [False] * (count_max - 1) + [True]
    state = state_of()
    pauses = []
    for number in range(count_max):
        pauses.append(state.failed(KeyRejected("no", status=status), str(number), NOW_MS, 0.0))
        if number == 0 and count_max > 1:
            state.succeeded()
            pauses.append(state.failed(KeyRejected("no", status=status), "again", NOW_MS, 0.0))
    assert pauses == [False] * (len(pauses) - 1) + [True]
    status_of = state.status(NOW_MS)
    assert (status_of.is_key_rejected, status_of.open_for_ms, status_of.state) == (True, 0, "paused")
    assert state.rest_ends_ms(NOW_MS) == NOW_MS + 6_000, "a key may be put right at any moment"
    assert state.rest_ends_ms(NOW_MS + 59_000) == NOW_MS + 60_000
    state.rest_until(NOW_MS + 9_000)
    assert state.rest_ends_ms(NOW_MS) == NOW_MS + 9_000


def test_what_it_says_about_itself() -> None:
    state = state_of(max_in_flight=4)
    assert (state.status(NOW_MS).state, state.status(NOW_MS).open_for_ms) == ("closed", None)
    state.rest_until(NOW_MS + 10)
    assert [state.status(NOW_MS + ms).state for ms in (9, 10)] == ["resting", "closed"]
    assert [state.status(NOW_MS, NOW_MS + ms).spent_for_ms for ms in (-5, 0.5)] == [0, 1]
    change(state, is_drained=True)
    seen = state.status(NOW_MS)
    assert (seen.state, seen.rests_for_ms, state.rest_ends_ms(NOW_MS)) == ("drained", 0, NOW_MS + 5_000)
    assert (state.ready_in_ms(NOW_MS), state.free_slots(NOW_MS)) == (5_000, 0)
    change(state, is_drained=False)
    assert (state.status(NOW_MS).state, state.free_slots(NOW_MS)) == ("closed", 4)
    while not state.breaker.is_open:
        state.failed(Ambiguous("lost"), "key", NOW_MS, 0.0)
    state.rest_until(NOW_MS + 99_000)
    state.rest_background_until(NOW_MS + 99_000)
    assert state.status(NOW_MS + 7).open_for_ms == 7
    assert (state.status(NOW_MS).state, state.status(NOW_MS).rests_for_ms) == ("open", 99_000)
    change(state, refresh_count=1)
    assert state.free_slots(NOW_MS) == 1, "it is tried at once"
    assert (state.count_probe(), state.count_probe()) == (1, 2)
    state.failed(Throttled("429", status=429), "key", NOW_MS, 0.0)
    assert not state.breaker.is_open, "it answered"


def test_a_share_is_asked_for_with_room_for_users_and_a_part_for_batch() -> None:
    state = state_of(is_alone=False, max_in_flight=16, batch_fraction=0.5)
    [whole, batch] = state.own_slots(NOW_MS)
    assert (whole.name, whole.cap, whole.spare, batch.name, batch.cap) == ("one", 16, 0, "background:one", 8)
    state.begin_interactive("user", NOW_MS)
    change(state, batch_fraction=1.0)
    [whole, batch] = state.own_slots(NOW_MS + 59_999)
    assert (whole.spare, batch.cap) == (2, 14)
    [whole, batch] = state.own_slots(NOW_MS + 60_000)
    assert (whole.spare, batch.cap) == (0, 16)
    state.ask_for_slots()
    assert (whole.is_asked, batch.is_asked) == (True, True)
    state.note_demand(NOW_MS)
    assert (whole.is_short, batch.is_short, whole.is_seen) == (True, True, True)
    for one in (whole, batch):
        one.grant(8)
    state.note_interactive_demand("user")
    state.note_demand(NOW_MS)
    assert [(one.is_short, one.is_seen) for one in (whole, batch)] == [(False, True), (False, True)]
    for one in (whole, batch):
        one.grant(0)
    state.rest_background_until(NOW_MS + 1)
    state.note_demand(NOW_MS)
    assert [(one.is_short, one.is_seen) for one in (whole, batch)] == [(False, False), (False, False)], "it rests"
    state.note_demand(NOW_MS + 1)
    assert (whole.is_short, batch.is_short) == (True, True)
    whole.grant(0)
    state.note_interactive_demand("user")
    assert whole.is_short


def test_calls_are_counted_by_kind_and_owner_while_they_are_out() -> None:
    state = state_of(is_alone=False, max_in_flight=16, weight=2.0)
    assert state.background_slots is not None
    for _ in range(3):
        state.begin_background()
    state.end_background()
    assert (state.in_flight, state.slots.in_flight, state.background_slots.in_flight) == (2, 2, 2)
    for owner in ("a", "a", "b", ""):
        state.begin_interactive(owner, NOW_MS)
    state.first_token_came()
    assert (state.interactive_in_flight, state.interactive_awaiting, state.slots.in_flight) == (4, 3, 6)
    assert state.load() == 3.5
    for owner in ("a", "b", ""):
        state.end_interactive(owner)
    assert (state.interactive_in_flight, dict(state._interactive_owners)) == (1, {"a": 1})


@pytest.mark.parametrize(
    ("others", "in_flight", "rests"), [(19, 1, True), (20, 1, False), (19, 2, False), (18, 2, True)]
)
def test_a_refusal_is_weighed_against_all_that_ended_otherwise(others: int, in_flight: int, rests: bool) -> None:
    state = state_of()
    for number in range(others):
        if number % 2:
            state.succeeded()
        else:
            state.failed(Refused("no", status=400), "bad", NOW_MS, 0.0)
    for _ in range(in_flight):
        state.begin_background()
    state.failed(Unavailable("busy", status=503, retry_after_ms=700), "key", NOW_MS, 0.0)
    assert state.refusals.waits_until_ms("key") == NOW_MS + 700
    assert state.rests_until_ms == (NOW_MS + 700 if rests else 0.0)
    assert state.answered == others // 2
    empty = state_of()
    for _ in range(30):
        empty.succeeded()
    empty.note_empty(is_empty=True)
    empty.failed(Throttled("busy", status=429, retry_after_ms=700), "key", NOW_MS, 0.0)
    assert empty.rests_until_ms == NOW_MS + 700, "it reported that nothing is left"


def test_an_answer_about_the_request_shows_that_the_server_is_there() -> None:
    state = state_of()
    while not state.breaker.is_open:
        state.failed(Unavailable("away"), "key", NOW_MS, 0.0)
    assert (state.refusals.waits_until_ms("key"), state.failure_code) == (0.0, Unavailable("away").code)
    state.failed(Refused("no", status=400), "bad", NOW_MS, 0.0)
    assert (state.breaker.is_open, state.failure_code) == (False, FAILING)


def test_a_probe_goes_out_on_a_free_slot_alone() -> None:
    state, later_ms = state_of(max_in_flight=8), NOW_MS + 3_600_000
    for _ in range(8):
        state.breaker.failed(NOW_MS)
    assert (state.free_slots(NOW_MS), state.free_slots(later_ms)) == (0, 1)
    state.tide = cast(Any, Tide())
    for _ in range(4):
        state.begin_background()
    assert state.free_slots(later_ms) == 1
    state.begin_background()
    assert state.free_slots(later_ms) == 0, "the tide allows no sixth"
    state.tide = None
    for _ in range(3):
        state.begin_background()
    assert state.free_slots(later_ms) == 0
