"""Size and age: small ones first, none for ever last, and the fast lane."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.core.schedule import looks
from tests.core.schedule.test_deadlines import VIEW
from tests.core.schedule.test_modes import slices
from tests.core.schedule.world import ScheduleWorld, job
from tidegate.core.schedule import Policy, Why, choose, ranking


@pytest.mark.parametrize(
    ("units", "name"), [(1, "xs"), (2_560, "xs"), (2_561, "s"), (25_601, "m"), (256_001, "l"), (2_560_001, "xl")]
)
def test_size_classes_are_the_documented_ones(units: int, name: str) -> None:
    assert ranking.size_class(units) == name


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**9))
@looks.tried
def test_rank_is_remaining_less_a_bounded_credit(left: int, created_at: int, now: int) -> None:
    policy = Policy()
    rank = ranking.size_rank(replace(VIEW, left_units=left, created_at=created_at), now, policy)
    assert max(0, left - policy.age_units_max) <= rank <= left
    later = ranking.size_rank(replace(VIEW, left_units=left, created_at=created_at), now + 1_000, policy)
    assert later <= rank


def test_small_jobs_of_a_tenant_go_before_its_large_ones() -> None:
    world = ScheduleWorld([job("large", "t", 500, 1_000), job("small", "t", 2, 1_000, created_at=5)], Policy(), slots=2)
    world.act(world.workers[0])
    assert slices(world.last_choice) == {("small", "m"): 2}


@pytest.mark.parametrize("slots", [1, 4])
def test_a_large_job_has_a_slice_at_every_interval(slots: int) -> None:
    """Beside small jobs of the same tenant that would always rank first, and with never more than every second slice."""
    policy = Policy(large_interval_ms=5_000, large_units=10_000, age_units_max=10_000)
    world = ScheduleWorld([job("large", "t", 1_000, 100)], policy, slots=slots)
    number = 0
    leased: list[int] = []

    def top_up() -> None:
        nonlocal number
        world.forget_ended()
        while len(world.jobs) < 6:
            number += 1
            world.add(job(f"s{number}", "t", 1, 100, created_at=world.now))
        at = world.jobs["large"].leased_at
        if at is not None and (not leased or leased[-1] != at):
            leased.append(at)

    top_up()
    world.run(40 * slots, top_up)
    gaps = [after - before for before, after in itertools.pairwise(leased)]
    assert len(leased) >= 5
    assert all(gap <= 5_000 + 2_000 for gap in gaps), gaps


def test_a_job_that_no_credit_lifts_to_the_front_is_due_as_a_large_one_is() -> None:
    def is_due(total_units: int, **ages: Any) -> bool:
        policy = Policy(large_interval_ms=1_000, large_units=10_000, **ages)
        one = replace(VIEW, total_units=total_units, created_at=0)
        return ranking.due_large([one], 1_000, policy) == [one]

    assert [is_due(units, age_units_max=500) for units in (500, 501)] == [False, True]
    assert [is_due(units, age_units_max=50_000) for units in (10_000, 10_001)] == [False, True]
    assert is_due(1, age_units_per_s=0)


def test_many_large_jobs_take_no_more_than_every_second_slice_of_their_tenant() -> None:
    policy = Policy(large_interval_ms=1, large_units=1_000, age_units_max=1_000, age_units_per_s=0)
    jobs = [job(f"large{number}", "t", 100, 100, created_at=-5_000) for number in range(20)]
    world = ScheduleWorld([*jobs, *(job(f"s{number}", "t", 1, 100) for number in range(60))], policy, slots=1)
    world.run(40)
    assert 18 <= sum(one.leased_count for one in jobs) <= 22


@pytest.mark.parametrize("slots", [1, 2, 10])
def test_the_fast_lane_gives_small_jobs_a_part_for_themselves(slots: int) -> None:
    """A tenant that was served much has a small job: without the lane it waits for all others to catch up."""

    def begun(policy: Policy) -> int:
        jobs = [job(f"bulk{number}", f"bulk{number}", 9_999, 1_000) for number in range(5)]
        world = ScheduleWorld([*jobs, job("small", "rich", 1, 500)], policy, slots=slots, units_per_s=1_000)
        world.served["m", "rich"] = 1e9
        world.run(30 * slots)
        return world.jobs["small"].leased_count

    assert begun(Policy()) == 0
    assert begun(Policy(fast_lane=True)) == 1


def test_the_fast_lane_is_bounded_and_named() -> None:
    jobs = [job(f"s{number}", "rich", 1, 100) for number in range(50)] + [job("bulk", "poor", 999, 1_000)]
    world = ScheduleWorld(jobs, Policy(fast_lane=True, fast_lane_share=0.25, fast_lane_units=500), slots=20)
    world.served["m", "rich"] = 1e9
    choice = choose(world.look(world.workers[0]), world.policy)
    fast = sum(pick.slice_count for pick in choice.picks if pick.why is Why.FAST_LANE) * 100
    total = sum(pick.slice_count * (1_000 if pick.job_id == "bulk" else 100) for pick in choice.picks)
    assert 0 < fast <= 0.25 * total
