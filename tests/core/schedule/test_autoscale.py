"""How many replicas every open deadline needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.deployments import Serves
from tidegate.core.schedule.autoscale import DueWork, PoolLoad, model_replicas, whole_scale, worker_replicas

HOUR_MS = 3_600_000


def needed(*due: DueWork, rate: float = 10.0, replicas: int = 1, interactive: int = 0) -> int:
    pool = PoolLoad(replicas, 0, interactive, 8)
    return model_replicas(due, rate, {Serves.BOTH: pool})[Serves.BOTH].count


def test_the_steepest_deadline_decides() -> None:
    assert needed() == 0
    assert needed(DueWork(HOUR_MS, 36_000)) == 1
    assert needed(DueWork(HOUR_MS, 36_001)) == 2
    assert needed(DueWork(10 * HOUR_MS, 36_000), DueWork(HOUR_MS, 108_000)) == 3
    # What is due later counts with what is due before it.
    assert needed(DueWork(HOUR_MS, 36_000), DueWork(2 * HOUR_MS, 36_001)) == 2
    assert needed(DueWork(HOUR_MS, 72_000), rate=20.0, replicas=2) == 2
    assert needed(DueWork(HOUR_MS, 36_000), interactive=9) == 3
    assert needed(interactive=1) == 1


def test_a_deadline_that_passed_asks_for_much_and_not_for_everything() -> None:
    assert 1 < needed(DueWork(-5, 36_000)) <= 10_000
    assert needed(DueWork(-5, 10**15)) == 10_000
    assert needed(DueWork(-5, 10**9), rate=5e-324) == 10_000
    assert needed(DueWork(-5, 10**9), rate=5e-324, replicas=2) == 2, "no rate that could be divided was measured"
    [late] = model_replicas([DueWork(-5, 36_000)], 10.0, {Serves.BOTH: PoolLoad(1, 0, 0, 8)}).values()
    assert late.why == "Work due already needs 600.0 units a second; one replica did 10.0."


def test_each_pool_grows_with_the_calls_that_it_takes() -> None:
    due = [DueWork(HOUR_MS, 72_000)]
    pools = {Serves.INTERACTIVE: PoolLoad(3, 0, 17, 8), Serves.BATCH: PoolLoad(2, 1, 0, 8)}
    found = model_replicas(due, 20.0, pools)
    # The rate is that of the two replicas that run batches: three for users change nothing of it.
    assert found[Serves.BATCH].count == 2
    assert found[Serves.BATCH].why.endswith("one replica did 10.0. 1 of 2 deployments is unhealthy.")
    assert (found[Serves.INTERACTIVE].count, found[Serves.INTERACTIVE].why) == (3, "17 interactive calls need 3.")
    # Beside a pool of its own, background work makes no shared replica grow.
    shared = model_replicas(due, 20.0, {Serves.BOTH: PoolLoad(1, 0, 0, 8), Serves.BATCH: PoolLoad(1, 0, 0, 8)})
    assert {serves: one.count for serves, one in shared.items()} == {Serves.BOTH: 0, Serves.BATCH: 2}
    # Work that no deployment takes asks for one that does.
    lost = model_replicas(due, 0, {Serves.INTERACTIVE: PoolLoad(1, 0, 0, 8)})
    assert (lost[Serves.BATCH].count, lost[Serves.BATCH].why) == (1, "Work waits, and no deployment takes it.")
    assert lost[Serves.INTERACTIVE].count == 0
    assert [one.count for one in model_replicas(due, 5.0, {}).values()] == [1]


def test_a_scale_says_how_many_times_what_is_there() -> None:
    """It does not depend on how many servers stand behind an address, which is not known."""
    due = [DueWork(HOUR_MS, 108_000)]
    [one] = model_replicas(due, 20.0, {Serves.BOTH: PoolLoad(1, 0, 0, 8)}).values()
    [four] = model_replicas(due, 20.0, {Serves.BOTH: PoolLoad(4, 0, 0, 8)}).values()
    assert (one.count, four.count, one.scale, four.scale) == (2, 6, 1.5, 1.5)
    [users] = model_replicas([], 20.0, {Serves.BOTH: PoolLoad(2, 0, 12, 8)}).values()
    assert users.scale == 0.75
    pools = {Serves.INTERACTIVE: PoolLoad(1, 0, 16, 8), Serves.BATCH: PoolLoad(3, 0, 0, 8)}
    found = model_replicas(due, 20.0, pools)
    assert {serves: each.scale for serves, each in found.items()} == {Serves.INTERACTIVE: 2.0, Serves.BATCH: 1.5}
    assert whole_scale(found, pools) == 1.63
    assert whole_scale(model_replicas([], 0, {}), {}) == 0.0
    assert [each.scale for each in model_replicas(due, 0, {}).values()] == [1.0]


_POOLS = st.dictionaries(
    st.sampled_from(Serves), st.builds(PoolLoad, st.integers(0, 50), st.integers(0, 50), st.just(0), st.just(8))
)


@given(
    st.lists(st.builds(DueWork, st.integers(-HOUR_MS, 100 * HOUR_MS), st.integers(1, 10**9)), min_size=1, max_size=20),
    st.floats(0, 1e6),
    _POOLS,
)
def test_it_is_never_none_while_anything_waits(due: list[DueWork], rate: float, pools: dict[Serves, PoolLoad]) -> None:
    found = model_replicas(due, rate, pools)
    assert sum(one.count for serves, one in found.items() if serves is not Serves.INTERACTIVE) >= 1
    assert 0 < whole_scale(found, pools) <= 10_000
    assert worker_replicas([(one.count, 0) for one in found.values()], 256, has_steps=False).count >= 1


def test_workers_follow_the_replicas() -> None:
    assert worker_replicas([], 256, has_steps=False).count == 0
    assert worker_replicas([], 256, has_steps=True).count == 1
    assert worker_replicas([(1, 8)], 256, has_steps=False).count == 1
    assert worker_replicas([(4, 128), (1, 1)], 256, has_steps=False).count == 3


def test_users_need_a_replica_for_as_many_calls_as_one_takes() -> None:
    for slots, count in ((1, 3), (2, 2), (3, 1), (0, 3)):
        found = model_replicas((), 0.0, {Serves.BOTH: PoolLoad(1, 0, 3, slots)})
        assert found[Serves.BOTH].count == count
