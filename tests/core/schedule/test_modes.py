"""What every mode keeps, whatever the look: rooms, caps, shares, no idle room, a reason for all that waits, and the same answer twice."""

import pytest
from hypothesis import given
from msgspec.structs import replace

from tests.core.schedule import looks
from tests.core.schedule.world import ScheduleWorld, job
from tidegate.core.schedule import Choice, Mode, Policy, Reason, Snapshot, Why, choose, reason_of

MODES = list(Mode)


def slices(choice: Choice) -> dict[tuple[str, str], int]:
    taken: dict[tuple[str, str], int] = {}
    for pick in choice.picks:
        taken[pick.job_id, pick.model] = taken.get((pick.job_id, pick.model), 0) + pick.slice_count
    return taken


def items_of(snapshot: Snapshot, job_id: str) -> int:
    [view] = [job for job in snapshot.jobs if job.job_id == job_id]
    return view.slice_items or snapshot.slice_items


@given(looks.snapshots(), looks.policies)
@looks.tried
def test_the_same_look_gives_the_same_choice(snapshot: Snapshot, policy: Policy) -> None:
    assert choose(snapshot, policy) == choose(snapshot, policy)


@given(looks.snapshots(), looks.policies)
@looks.tried
def test_no_room_is_overdrawn(snapshot: Snapshot, policy: Policy) -> None:
    choice = choose(snapshot, policy)
    keys = [(pick.job_id, pick.model, pick.why) for pick in choice.picks]
    assert len(keys) == len(set(keys)), "equal picks are one pick"
    assert all(pick.slice_count > 0 for pick in choice.picks)
    assert sum(pick.slice_count for pick in choice.picks) <= snapshot.slices_max
    for name, model in snapshot.models.items():
        taken = [(items_of(snapshot, job_id), count) for (job_id, of), count in slices(choice).items() if of == name]
        if model.closed or model.room_items <= 0:
            assert not taken
        else:
            # A slice is begun while there is room for one item of it.
            largest = max((items for items, _ in taken), default=0)
            assert sum(items * count for items, count in taken) < model.room_items + largest or not taken


@given(looks.snapshots(), looks.policies)
@looks.tried
def test_caps_of_a_scope_hold_over_all_models(snapshot: Snapshot, policy: Policy) -> None:
    taken = slices(choose(snapshot, policy))
    if not policy.in_flight_units_max:
        return
    for share_owner in looks.SCOPES:
        before = snapshot.owner_in_flight_units.get(share_owner, 0)
        counted = [
            (job.slice_units, taken.get((job.job_id, job.model), 0))
            for job in snapshot.jobs
            if job.share_owner == share_owner
        ]
        out = sum(units * count for units, count in counted)
        alone = before == 0 and sum(count for units, count in counted if units) <= 1
        assert not out or alone or before + out <= policy.in_flight_units_max


@given(looks.snapshots(), looks.policies)
@looks.tried
def test_no_room_stays_empty_that_a_job_could_use(snapshot: Snapshot, policy: Policy) -> None:
    """Work conservation: when a choice ends with room on the worker and on a model, every job of it is used up or capped."""
    choice = choose(snapshot, policy)
    taken = slices(choice)
    if sum(taken.values()) >= snapshot.slices_max:
        return
    owners = dict(snapshot.owner_in_flight_units)
    for job_ in snapshot.jobs:
        owners[job_.share_owner] = owners.get(job_.share_owner, 0) + job_.slice_units * taken.get(
            (job_.job_id, job_.model), 0
        )
    for name, model in snapshot.models.items():
        used = sum(items_of(snapshot, job_id) * count for (job_id, of), count in taken.items() if of == name)
        if model.closed or used >= model.room_items:
            continue
        for view in snapshot.jobs:
            if view.model != name:
                continue
            ready = max(1, -(-(view.left_units - view.in_flight_units) // max(1, view.slice_units)))
            used_up = taken.get((view.job_id, name), 0) >= ready
            out = owners.get(view.share_owner, 0)
            capped = policy.in_flight_units_max and out and out + view.slice_units > policy.in_flight_units_max
            assert used_up or capped, view


@given(looks.snapshots(), looks.policies)
@looks.tried
def test_whatever_is_not_picked_has_a_reason(snapshot: Snapshot, policy: Policy) -> None:
    choice = choose(snapshot, policy)
    for view in snapshot.jobs:
        reason = reason_of(choice, view.model, view.share_owner, view.job_id)
        assert (reason is None) == ((view.job_id, view.model) in slices(choice))
        model = snapshot.models.get(view.model)
        if model is None:
            assert reason == Reason.UNKNOWN_CAPACITY
        elif model.closed:
            assert reason == model.closed
        elif model.room_items <= 0:
            assert reason == Reason.NO_AVAILABLE_SLOTS


@given(looks.snapshots(), looks.policies)
@looks.tried
def test_a_closed_model_never_blocks_an_open_one(snapshot: Snapshot, policy: Policy) -> None:
    """What is chosen on the open models is what would be chosen if the closed ones, and their jobs, were not there."""
    open_ones = {name: view for name, view in snapshot.models.items() if not view.closed and view.room_items > 0}
    without = replace(
        snapshot,
        models=open_ones,
        jobs=[job for job in snapshot.jobs if job.model in open_ones],
        flows=[flow for flow in snapshot.flows if flow.model in open_ones],
    )
    assert choose(snapshot, policy).picks == choose(without, policy).picks


@given(looks.snapshots(), looks.policies)
@looks.tried
def test_bounded_shares_are_never_exceeded(snapshot: Snapshot, policy: Policy) -> None:
    choice = choose(snapshot, policy)
    units = {(job.job_id, job.model): job.slice_units for job in snapshot.jobs}
    for name, model in snapshot.models.items():
        picks = [(pick.why, pick.slice_count, units[pick.job_id, name]) for pick in choice.picks if pick.model == name]
        total = model.in_flight_units + sum(count * size for _, count, size in picks)
        for why, share in ((Why.URGENT, policy.urgent_share), (Why.FAST_LANE, policy.fast_lane_share)):
            taken = sum(count * size for rule, count, size in picks if rule is why)
            before = model.in_flight_by_why.get(why, 0)
            one = before == 0 and sum(count for rule, count, size in picks if rule is why and size) <= 1
            assert not taken or one or before + taken <= share * total + 1e-6


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode is not Mode.FIFO])
@pytest.mark.parametrize(("slots", "workers"), [(1, 1), (3, 1), (1, 3)])
def test_every_backlogged_job_gets_its_slices(mode: Mode, slots: int, workers: int) -> None:
    """Large and small, old and new, urgent and idle, beside tenants that bring new small jobs without end."""
    policy = Policy(
        mode=mode, large_units=2_000, age_units_max=2_000, age_units_per_s=50, large_interval_ms=2_000, fast_lane=True
    )
    waiting = [
        job("huge", "a", 1_000, 100),
        job("large", "a", 60, 100),
        job("medium", "a", 15, 100),
        job("small", "b", 2, 100),
        job("urgent", "c", 20, 100, expires_at=30_000),
        job("other", "b", 50, 100, model="n"),
    ]
    world = ScheduleWorld(waiting, policy, workers=workers, slots=slots, slices_max=slots + 1)
    number = 0

    def add_small_job() -> None:
        nonlocal number
        world.forget_ended()
        if len(world.jobs) < 16:
            number += 1
            share_owner, model = "abd"[number % 3], "mn"[number % 2]
            world.add(
                job(
                    f"new{number}", share_owner, 1, 50, model=model, created_at=world.now, expires_at=world.now + 60_000
                )
            )

    world.run(250, add_small_job)
    assert {one.id: one.leased_count for one in waiting if one.slices and one.leased_count < 2} == {}


def test_fifo_is_whole_jobs_in_order_of_age() -> None:
    jobs = [job("second", "a", 3, created_at=2), job("first", "b", 5, created_at=1), job("third", "b", 1, created_at=3)]
    world = ScheduleWorld(jobs, Policy(mode=Mode.FIFO), slots=6)
    world.act(world.workers[0])
    assert [(pick.job_id, pick.slice_count, pick.why) for pick in world.last_choice.picks] == [
        ("first", 5, Why.FIFO),
        ("second", 1, Why.FIFO),
    ]


def test_a_priority_beats_no_older_job_of_another_owner() -> None:
    jobs = [job("old", "a", 1, created_at=1), job("young", "b", 1, created_at=2, priority=9)]
    world = ScheduleWorld(jobs, Policy(mode=Mode.FIFO), slots=2)
    world.act(world.workers[0])
    assert [pick.job_id for pick in world.last_choice.picks] == ["old", "young"]


def test_slices_go_round_the_jobs() -> None:
    jobs = [job("b", "a", 9, created_at=2), job("a", "a", 9, created_at=1), job("c", "b", 1, created_at=3)]
    world = ScheduleWorld(jobs, Policy(mode=Mode.SLICE), slots=6)
    world.act(world.workers[0])
    assert slices(world.last_choice) == {("a", "m"): 3, ("b", "m"): 2, ("c", "m"): 1}


def test_a_model_with_many_jobs_leaves_the_worker_room_for_another() -> None:
    jobs = [job(f"x{number}", "a", 9, model="x", created_at=number) for number in range(20)]
    jobs.append(job("y", "b", 9, model="y", created_at=99))
    for mode, of_y in ((Mode.SLICE, 0), (Mode.MODEL_CAPACITY, 4), (Mode.FAIR_SHARE, 4), (Mode.SMART, 4)):
        world = ScheduleWorld(jobs, Policy(mode=mode), slots=8, slices_max=8)
        choice = choose(world.look(world.workers[0]), world.policy)
        assert slices(choice).get(("y", "y"), 0) == of_y


@pytest.mark.parametrize("mode", [Mode.MODEL_CAPACITY, Mode.FAIR_SHARE, Mode.SMART])
def test_models_take_turns_where_a_worker_holds_one_slice(mode: Mode) -> None:
    jobs = [job(f"x{number}", "a", 1, model="x") for number in range(50)] + [job("y", "b", 50, model="y")]
    world = ScheduleWorld(jobs, Policy(mode=mode), slots=1, slices_max=1)
    world.run(20)
    assert world.jobs["y"].leased_count in (10, 11)


def test_a_full_worker_says_so() -> None:
    world = ScheduleWorld([job("a", "t", 2)], Policy(), slots=1, slices_max=0)
    world.act(world.workers[0])
    assert world.last_choice.picks == []
    assert [skip.reason for skip in world.last_choice.skips] == [Reason.WORKER_FULL]


@pytest.mark.parametrize("mode", MODES)
def test_of_one_owner_a_higher_priority_goes_first_and_no_other_owner_waits_for_it(mode: Mode) -> None:
    def jobs(*priorities: int) -> list[str]:
        """Whose slices are taken, one after another, where `a` has three jobs of these priorities and `b` has one."""
        mine = [job(f"a{n}", "a", 2, created_at=n, priority=one) for n, one in enumerate(priorities)]
        world = ScheduleWorld([*mine, job("b", "b", 6, created_at=9)], Policy(mode), slots=1, slices_max=1)
        order = []
        while any(one.slices for one in world.jobs.values()):
            before = {one.id: len(one.slices) for one in world.jobs.values()}
            world.step()
            order += [name for name, left in before.items() if len(world.jobs[name].slices) < left]
        return order

    plain, ranked = jobs(0, 0, 0), jobs(-5, 0, 5)
    assert [name for name in ranked if name != "b"] == ["a2", "a2", "a1", "a1", "a0", "a0"]
    places = [[place for place, name in enumerate(order) if name == "b"] for order in (ranked, plain)]
    assert all(now <= before for now, before in zip(*places, strict=True)), "priority is the owner's own affair"
