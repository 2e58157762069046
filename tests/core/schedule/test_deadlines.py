"""Deadlines: who is urgent, what urgency may take, and that it is enough where anything is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.core.schedule import looks
from tests.core.schedule.world import ScheduleWorld, job
from tidegate.core.schedule import FlowView, JobView, ModelView, Policy, Snapshot, Why, choose, ranking

MODEL = ModelView("m", 10, None, 0, {}, 100.0)
VIEW = JobView("j", "m", "t", "default", 0, 100_000, None, 5_000, 5_000, 0, 100, None, None)


def test_slack_is_time_left_less_work_over_the_expected_rate() -> None:
    pace = ranking.deadline_pace(MODEL, 0.5, Policy())
    assert ranking.slack_ms(VIEW, MODEL, 0, pace) == 0
    assert ranking.slack_ms(replace(VIEW, rate=100.0), MODEL, 0, pace) == 50_000
    assert ranking.slack_ms(VIEW, MODEL, 10_000, pace) == -10_000
    assert ranking.urgent_jobs([VIEW], MODEL, 0, pace) == []
    assert ranking.urgent_jobs([VIEW], MODEL, 10_000, pace) == [VIEW]


def test_a_begin_by_is_a_deadline_for_the_first_slice_until_it_has_passed() -> None:
    pace = ranking.deadline_pace(MODEL, 1.0, Policy())
    hurried = replace(VIEW, left_units=100, begin_by=500)
    assert ranking.slack_ms(hurried, MODEL, 0, pace) == -1_500
    assert ranking.urgent_jobs([hurried], MODEL, 0, pace) == [hurried]
    assert ranking.due_at(hurried, 0) == 500
    assert ranking.urgent_jobs([hurried], MODEL, 501, pace) == []
    assert ranking.urgent_jobs([replace(hurried, begin_by=9_000)], MODEL, 0, pace) == []


def test_the_last_slice_hurries_while_there_is_time_for_its_turn() -> None:
    busy = replace(MODEL, in_flight_units=300)
    pace = ranking.deadline_pace(busy, 1.0, Policy())
    last = replace(VIEW, left_units=100, rate=100.0, expires_at=6_500)
    assert ranking.slack_ms(last, MODEL, 0, pace) == 5_500
    assert ranking.slack_ms(last, busy, 0, pace) == -500
    assert ranking.urgent_jobs([last], busy, 0, pace) == [last]


def test_a_hopeless_job_is_not_urgent() -> None:
    pace = ranking.deadline_pace(MODEL, 0.1, Policy(urgent_share=0.5))
    late = replace(VIEW, left_units=5_000, expires_at=60_000)
    assert ranking.urgent_jobs([late], MODEL, 0, pace) == []
    assert ranking.is_hopeless(late, 0, pace)
    assert ranking.urgent_jobs([replace(late, expires_at=95_000)], MODEL, 0, pace) != []


@pytest.mark.parametrize(("weights", "why"), [(0.0, Why.FAIR), (1.0, Why.FAIR), (2.0, Why.URGENT)])
def test_a_flow_can_expect_its_share_of_all_flows_also_of_those_that_are_not_shown(weights: float, why: Why) -> None:
    """Alone it needs 50 s, with half of the rate 100 s."""
    flows, jobs = [FlowView("m", "t", 1.0, 0.0, 0)], [replace(VIEW, expires_at=60_000)]
    seen = Snapshot(0, {"m": replace(MODEL, weights=weights)}, flows, jobs, {}, 1, 1, workers=1)
    assert [pick.why for pick in choose(seen, Policy(fast_lane=False, urgent_share=1.0)).picks] == [why]


def test_of_urgent_jobs_the_one_that_is_due_first_is_first_whichever_is_older() -> None:
    pace = ranking.deadline_pace(MODEL, 0.5, Policy())
    younger = replace(VIEW, job_id="k", created_at=1, expires_at=99_000)
    assert ranking.urgent_jobs([VIEW, younger], MODEL, 10_000, pace) == [younger, VIEW]


@given(st.integers(0, 200_000), st.integers(1, 50_000), st.floats(0.01, 1), st.none() | st.floats(0.1, 200))
@looks.tried
def test_urgent_is_negative_slack_that_is_not_hopeless(now: int, left: int, share: float, rate: float | None) -> None:
    pace = ranking.deadline_pace(MODEL, share, Policy())
    view = replace(VIEW, left_units=left, rate=rate)
    slack = ranking.slack_ms(view, MODEL, now, pace)
    found = ranking.urgent_jobs([view], MODEL, now, pace) == [view]
    if abs(slack) > 1:
        assert found == (slack < 0 and not ranking.is_hopeless(view, now, pace))


def crowd(policy: Policy, urgent: int, deadline_ms: int, slots: int, workers: int = 1) -> ScheduleWorld:
    """Nine tenants with work without end, and some whose job fits its deadline only with precedence. A slot serves a slice a second."""
    jobs = [job(f"bulk{number}", f"bulk{number}", 9_999) for number in range(9)]
    jobs += [job(f"urgent{number}", f"u{number}", 20, expires_at=deadline_ms) for number in range(urgent)]
    return ScheduleWorld(jobs, policy, slots=slots, workers=workers)


@pytest.mark.parametrize(("urgent", "slots", "deadline_ms"), [(1, 8, 12_000), (3, 8, 24_000), (2, 2, 60_000)])
def test_urgent_jobs_meet_deadlines_that_the_urgent_share_can_meet(urgent: int, slots: int, deadline_ms: int) -> None:
    world = crowd(Policy(), urgent, deadline_ms, slots)
    world.run(slots * deadline_ms // 1_000 + 50)
    ended = [world.jobs[f"urgent{number}"].ended_at for number in range(urgent)]
    assert all(at is not None and at <= deadline_ms for at in ended), ended
    # The same without urgency: the deadline was not an easy one.
    lazy = crowd(Policy(urgent_share=0.0), urgent, deadline_ms, slots)
    lazy.run(slots * deadline_ms // 1_000 + 50)
    assert any((lazy.jobs[f"urgent{number}"].ended_at or 1 << 60) > deadline_ms for number in range(urgent))


@pytest.mark.parametrize(("slots", "workers", "share"), [(8, 1, 0.5), (8, 1, 0.25), (2, 4, 0.5), (1, 1, 0.5)])
def test_the_urgent_share_is_kept_while_time_goes_by(slots: int, workers: int, share: float) -> None:
    world = crowd(Policy(urgent_share=share), 5, 200_000 // (slots * workers), slots, workers)
    urgent_slices = []

    def look() -> None:
        urgent = world.in_flight("m", why=Why.URGENT)
        assert urgent <= max(100, share * world.in_flight("m") + 100)
        urgent_slices.append(urgent)

    world.run(120, look)
    assert any(urgent_slices)
    # Where one slice is all there is, the bound is kept over time: every second slice.
    assert sum(urgent_slices) <= (max(share, 0.5) + 0.05) * 120 * slots * workers * 100


def test_urgency_is_shared_fairly_and_earliest_first_within_a_tenant() -> None:
    jobs = [job(f"bulk{number}", f"bulk{number}", 9_999) for number in range(6)]
    jobs += [job(f"a{number}", "a", 40, expires_at=60_000 + number) for number in range(4)]
    jobs += [job("b", "b", 40, expires_at=70_000)]
    world = ScheduleWorld(jobs, Policy(), slots=8)
    world.run(60)
    taken = {one.id: one.leased_count for one in jobs if one.share_owner in "ab"}
    assert abs(taken["b"] - sum(count for name, count in taken.items() if name[0] == "a")) <= 3
    assert taken["a0"] >= taken["a1"] >= taken["a2"] >= taken["a3"]


def test_a_job_that_must_begin_begins_in_time() -> None:
    jobs = [
        job("old", "t", 9_999),
        job("bulk", "other", 9_999),
        job("begin", "t", 12_000, begin_by=20_000, created_at=1),
    ]
    world = ScheduleWorld(jobs, Policy(large_interval_ms=0), slots=2)
    world.run(80)
    assert 10_000 < (world.jobs["begin"].begun_at or 1 << 60) <= 20_000
