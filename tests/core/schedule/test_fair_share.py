"""Fair share: the stated bound over random loops, weights, and who is first when a flow wakes."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.core.schedule import looks
from tests.core.schedule.test_modes import slices
from tests.core.schedule.world import ScheduleWorld, job
from tidegate.core.schedule import Mode, Policy, Snapshot, Why, choose, ranking
from tidegate.core.schedule.snapshot import FlowView, JobView

SHARING = [Mode.FAIR_SHARE, Mode.SMART]


@given(
    st.sampled_from(SHARING),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(2, 5),
    st.booleans(),
    st.integers(0, 999),
)
@looks.tried
def test_backlogged_equal_flows_stay_within_the_bound(
    mode: Mode, workers: int, slots: int, flows: int, rough: bool, seed: int
) -> None:
    """(workers + 1) slices plus the largest item plus the estimates' error in flight, though all workers choose on looks of one moment."""
    chance = random.Random(seed)
    largest = 100
    jobs = [job(f"{flow}-{number}", f"t{flow}", 2_000, largest) for flow in range(flows) for number in range(2)]
    world = ScheduleWorld(
        jobs,
        Policy(mode=mode),
        workers=workers,
        slots=slots,
        cost=lambda job, units: units * (chance.uniform(0.5, 1.5) if rough else 1.0),
    )
    for _ in range(25):
        error = sum(abs(flight.cost - flight.units) for flight in world.flights)
        for _ in range(chance.randint(0, len(world.flights))):
            world.finish()
        looked = [world.look(worker) for worker in world.workers]
        for worker, look in zip(world.workers, looked, strict=True):
            world.act(worker, look)
        counters = [world.counter("m", f"t{flow}") for flow in range(flows)]
        assert max(counters) - min(counters) <= (workers + 1) * largest + largest + error


@given(st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=2, max_size=4), st.integers(1, 3))
@looks.tried
def test_service_is_proportional_to_weights(weights: list[float], slots: int) -> None:
    by_scope = {f"t{number}": weight for number, weight in enumerate(weights)}
    world = ScheduleWorld(
        [job(share_owner, share_owner, 9_999) for share_owner in by_scope], Policy(), slots=slots, weights=by_scope
    )
    world.run(60)
    counters = [world.counter("m", share_owner) for share_owner in by_scope]
    assert max(counters) - min(counters) <= 2 * 100


@pytest.mark.parametrize("mode", SHARING)
def test_one_round_deals_equal_flows_equal_slices(mode: Mode) -> None:
    jobs = [job(f"{flow}-{number}", f"t{flow}", 99) for flow in range(4) for number in range(1 + 20 * (flow == 0))]
    world = ScheduleWorld(jobs, Policy(mode=mode), slots=8)
    world.act(world.workers[0])
    taken: dict[str, int] = {}
    for (job_id, _), count in slices(world.last_choice).items():
        taken[job_id[0]] = taken.get(job_id[0], 0) + count
    assert taken == {"0": 2, "1": 2, "2": 2, "3": 2}


@pytest.mark.parametrize("mode", SHARING)
def test_one_small_job_behind_a_million_items_gets_the_next_slice(mode: Mode) -> None:
    world = ScheduleWorld([job(f"big{number}", "big", 5_000) for number in range(3)], Policy(mode=mode), slots=3)
    world.run(40)
    world.add(job("small", "late", 1, created_at=world.now))
    world.step()
    assert world.jobs["small"].leased_count == 1


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 1_000)), min_size=1, max_size=6), st.integers(1, 9))
@looks.tried
def test_sharing_a_gap_between_workers_changes_no_order(flows: list[tuple[float, int]], workers: int) -> None:
    views = [FlowView("m", f"t{number}", 1.0, served, out) for number, (served, out) in enumerate(flows)]
    alone, shared = ranking.flow_counters(views, 1.0, 1), ranking.flow_counters(views, 1.0, workers)
    assert sorted(alone, key=lambda share_owner: (alone[share_owner], share_owner))[0] in {
        share_owner for share_owner in shared if shared[share_owner] == min(shared.values())
    }
    spread = max(shared.values()) - min(shared.values())
    assert spread <= ranking.counter_gap(views, 1.0) / workers + 1e-3


@given(looks.snapshots(), looks.policies, st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10**6)), max_size=4))
@looks.tried
def test_flows_with_nothing_ready_change_nothing(
    snapshot: Snapshot, policy: Policy, others: list[tuple[int, int]]
) -> None:
    """Why a look may leave them out: what is shared is known from the model, and counters are only held against one another."""
    models = {name: replace(view, weights=50.0) for name, view in snapshot.models.items()}
    flows = [replace(flow, served=float(int(flow.served)), in_flight_units=0) for flow in snapshot.flows]
    idle = [FlowView(f"m{model}", f"idle{number}", 1.0, served, 0) for number, (model, served) in enumerate(others)]
    seen = msgspec.structs.replace(snapshot, models=models, flows=flows, jobs=_known(snapshot, flows), workers=4)
    assert choose(msgspec.structs.replace(seen, flows=[*idle, *flows]), policy) == choose(seen, policy)


def _known(snapshot: Snapshot, flows: list[FlowView]) -> list[JobView]:
    """The jobs whose flows are shown, as a store shows them."""
    shown = {(flow.model, flow.share_owner) for flow in flows}
    return [job for job in snapshot.jobs if (job.model, job.share_owner) in shown]


@given(looks.snapshots())
@looks.tried
def test_the_flow_that_was_served_least_is_first(snapshot: Snapshot) -> None:
    """With room for a single slice, no flow with a smaller counter has a job that could have been taken."""
    policy = Policy(mode=Mode.FAIR_SHARE, queue_order=lambda views: [view.queue for view in views])
    one = Snapshot(
        snapshot.now,
        {name: view for name, view in snapshot.models.items() if name == "m0"},
        snapshot.flows,
        [job for job in snapshot.jobs if job.model == "m0" and job.queue == "default"],
        {},
        snapshot.slice_items,
        min(1, snapshot.slices_max),
    )
    choice = choose(one, policy)
    counters = ranking.flow_counters([flow for flow in one.flows if flow.model == "m0"], one.models["m0"].ratio, 1)
    for pick in choice.picks:
        [share_owner] = {job.share_owner for job in one.jobs if job.job_id == pick.job_id}
        assert pick.why is Why.FAIR
        waiting = [counters[job.share_owner] for job in one.jobs if job.share_owner in counters]
        assert share_owner not in counters or counters[share_owner] == min(waiting)
