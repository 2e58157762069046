"""How slices of one look are dealt: shares of rules are used up and not passed, and jobs of one flow take their turns."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from tidegate.core.schedule import FlowView, JobView, Mode, ModelView, Policy, Reason, Snapshot, Turn, Why, choose

NOW = 10_000_000


def job(name: str, left: int = 400, owner: str = "tenant:a", **more: Any) -> JobView:
    """One with as many slices of 50 units as it has left, and time enough."""
    plain = JobView(name, "m", owner, "default", NOW - 1_000, NOW + 10**9, None, left, left, 0, 50, None, None, 1)
    return replace(plain, **more)


def picked(
    jobs: list[JobView], slices_max: int, in_flight: dict[Why, int] | None = None, **policy: Any
) -> Counter[Any]:
    """How many slices of which job are taken by which rule."""
    by_why = in_flight or {}
    owners = sorted({one.share_owner for one in jobs})
    flows = [FlowView("m", owner, 1.0, 0.0, 0) for owner in owners]
    model = ModelView("m", 64, None, sum(by_why.values()), by_why, 10.0)
    look = Snapshot(NOW, {"m": model}, flows, jobs, {}, 1, slices_max)
    found: Counter[Any] = Counter()
    for pick in choose(look, Policy(**policy)).picks:
        found[pick.job_id, pick.why] += pick.slice_count
    return found


LATE: dict[str, Any] = {"expires_at": NOW + 60_000}


@pytest.mark.parametrize(
    ("urgent", "fair", "slices_max", "taken"),
    [(50, 100, 1, 1), (51, 99, 1, 0), (50, 100, 2, 1), (0, 150, 2, 2), (0, 0, 2, 1), (200, 0, 2, 0)],
)
def test_urgent_work_takes_its_share_of_what_is_in_flight_and_no_slice_more(
    urgent: int, fair: int, slices_max: int, taken: int
) -> None:
    """400 units in a minute are more than half of ten a second, and less than urgency may have."""
    in_flight = {Why.URGENT: urgent, Why.FAIR: fair}
    found = picked([job("late", **LATE), job("other", owner="tenant:b", left=5_000)], slices_max, in_flight)
    assert found["late", Why.URGENT] == taken
    assert sum(found.values()) == slices_max, "no room stays empty"


def test_of_a_job_that_must_begin_only_the_first_slice_hurries() -> None:
    other = job("other", owner="tenant:b", left=5_000)
    for late, count in ((job("late", **LATE), 4), (job("late", begin_by=NOW + 1), 1)):
        found = picked([late, other], 4, urgent_share=1.0)
        assert found["late", Why.URGENT] == count
    for begin_in_ms, hurries in ((10_000, False), (9_999, True)):
        found = picked([job("late", begin_by=NOW + begin_in_ms), other], 4)
        assert (("late", Why.URGENT) in found) is hurries, "two slices take ten seconds"
    passed = picked([job("late", begin_by=NOW), other], 4, urgent_share=1.0)
    assert ("late", Why.URGENT) not in passed, "what cannot be kept any more makes nothing hurry"
    assert ("late", Why.URGENT) not in picked([job("late", **LATE), other], 4, urgent_share=0.0)


@pytest.mark.parametrize("mode", [Mode.FAIR_SHARE, Mode.SLICE, Mode.MODEL_CAPACITY])
def test_jobs_of_one_flow_take_turns(mode: Mode) -> None:
    why = Why.FAIR if mode is Mode.FAIR_SHARE else Why.FIFO
    found = picked([job(name) for name in ("a", "b", "c")], 7, mode=mode)
    assert sorted(found.values()) == [2, 2, 3]
    assert {rule for _, rule in found} <= {why, Why.FAIR, Why.FIFO}
    waits = picked([job("had", leased_at=NOW), job("waits", created_at=NOW - 1)], 1, mode=mode)
    assert [name for name, _ in waits] == ["waits"], "the one that waits longest for its next slice"


def test_a_large_job_that_waited_too_long_has_every_second_slice_at_most() -> None:
    small, large = job("small"), job("large", left=10**6, created_at=NOW - 10**8)
    assert picked([small, large], 3, age_units_max=0) == {("small", Why.FAIR): 2, ("large", Why.LARGE): 1}
    other = replace(large, job_id="other", created_at=large.created_at + 1)
    assert picked([small, large, other], 2, age_units_max=0) == {("small", Why.FAIR): 1, ("large", Why.LARGE): 1}
    just_had = replace(large, leased_at=NOW - 29_999)
    assert picked([small, just_had], 3, age_units_max=0) == {("small", Why.FAIR): 3}
    lesser = replace(large, priority=-1)
    assert picked([small, lesser], 3, age_units_max=0) == {("small", Why.FAIR): 3}, "priorities come first"


def test_the_fast_lane_is_for_small_jobs_of_the_highest_priority() -> None:
    fast: dict[str, Any] = {"fast_lane": True, "fast_lane_share": 1.0, "fast_lane_units": 500}
    big = job("big", left=5_000)
    assert picked([job("small"), big], 2, **fast)["small", Why.FAST_LANE] == 2
    assert picked([job("small", left=600), big], 2, **fast)["small", Why.FAST_LANE] == 0
    behind = picked([job("small"), replace(big, priority=1)], 2, **fast)
    assert behind["small", Why.FAST_LANE] == 0
    same = picked([job("small", priority=1), replace(big, priority=1)], 2, **fast)
    assert same["small", Why.FAST_LANE] == 2


def test_a_cap_lets_the_last_slice_in_that_still_fits_and_one_of_any_size_to_an_owner_without_any() -> None:
    for most, taken in ((149, 2), (150, 3), (1, 1)):
        assert sum(picked([job("a")], 9, in_flight_units_max=most).values()) == taken


def test_an_owner_that_is_shown_for_a_deadline_alone_was_served_as_much_as_any() -> None:
    """A look leaves out the flows that were served most, and still shows their jobs that are due first."""
    jobs = [job("least"), job("most", owner="tenant:b"), job("due", owner="tenant:c")]
    flows = [FlowView("m", "tenant:a", 1.0, 0.0, 0), FlowView("m", "tenant:b", 1.0, 1_000.0, 0)]
    look = Snapshot(NOW, {"m": ModelView("m", 64, None, 0, {}, 10.0)}, flows, jobs, {}, 1, 4)
    [pick] = choose(look, Policy(mode=Mode.FAIR_SHARE)).picks
    assert (pick.job_id, pick.slice_count) == ("least", 4)


def test_as_many_slices_are_dealt_as_a_job_has_ready() -> None:
    assert sum(picked([job("a", left=101, in_flight_units=50)], 9).values()) == 2
    assert sum(picked([job("a", left=100, in_flight_units=50)], 9).values()) == 1
    assert sum(picked([job("a", left=50, in_flight_units=50)], 9).values()) == 1, "it is only shown when there is one"


def test_what_is_closed_full_or_unknown_is_passed_over_with_a_reason() -> None:
    models = {
        "m": ModelView("m", 64, None, 0, {}, None),
        "full": ModelView("full", 0, None, 0, {}, None),
        "closed": ModelView("closed", 64, Reason.RESTING, 0, {}, None),
    }
    names = ("m", "full", "closed", "gone")
    jobs = [job(name, model=name) for name in names]
    flows = [FlowView(name, "tenant:a", 1.0, 0.0, 0) for name in names]
    for mode in Mode:
        choice = choose(Snapshot(NOW, models, flows, jobs, {}, 1, 2), Policy(mode=mode))
        assert {pick.model for pick in choice.picks} == {"m"}
        assert [(skip.model, skip.reason) for skip in choice.skips if not skip.share_owner] == [
            ("full", Reason.NO_AVAILABLE_SLOTS),
            ("closed", Reason.RESTING),
            ("gone", Reason.UNKNOWN_CAPACITY),
        ]


def test_models_take_turns_from_the_one_whose_turn_was_longest_ago() -> None:
    models = {
        name: ModelView(name, 64, None, 0, {}, None, turn=turn)
        for name, turn in (("a", Turn(9, Why.FAIR, {})), ("b", Turn(3, Why.FAIR, {})), ("c", None))
    }
    flows = [FlowView(name, "tenant:a", 1.0, 0.0, 0) for name in models]
    jobs = [job(name, model=name) for name in models]
    for slices_max, taken in (
        (1, {"c": 1}),
        (2, {"c": 1, "b": 1}),
        (4, {"c": 2, "b": 1, "a": 1}),
        (7, {"c": 3, "b": 2, "a": 2}),
    ):
        choice = choose(Snapshot(NOW, models, flows, jobs, {}, 1, slices_max), Policy())
        assert {pick.model: pick.slice_count for pick in choice.picks} == taken
