"""How many replicas every open deadline needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.schedule.autoscale import DueWork, ReplicaLoad, model_replicas, worker_replicas

HOUR_MS = 3_600_000


def needed(*due: DueWork, rate: float | None = 10.0, replicas: int = 1, interactive: int = 0) -> int:
    return model_replicas(ReplicaLoad(due, rate, replicas, interactive, 8)).count


def test_the_steepest_deadline_decides() -> None:
    assert needed() == 0
    assert needed(DueWork(HOUR_MS, 36_000)) == 1
    assert needed(DueWork(HOUR_MS, 36_001)) == 2
    assert needed(DueWork(10 * HOUR_MS, 36_000), DueWork(HOUR_MS, 108_000)) == 3
    # What is due later counts with what is due before it.
    assert needed(DueWork(HOUR_MS, 36_000), DueWork(2 * HOUR_MS, 108_000)) == 2
    assert needed(DueWork(HOUR_MS, 72_000), rate=20.0, replicas=2) == 2
    assert needed(DueWork(HOUR_MS, 36_000), interactive=9) == 3
    assert needed(interactive=1) == 1


def test_a_deadline_that_passed_asks_for_much_and_not_for_everything() -> None:
    assert 1 < needed(DueWork(-5, 36_000)) <= 10_000
    assert needed(DueWork(-5, 10**15)) == 10_000
    assert needed(DueWork(-5, 10**9), rate=5e-324) == 10_000
    assert needed(DueWork(-5, 10**9), rate=5e-324, replicas=2) == 2, "no rate that could be divided was measured"


@given(
    st.lists(st.builds(DueWork, st.integers(-HOUR_MS, 100 * HOUR_MS), st.integers(1, 10**9)), min_size=1, max_size=20),
    st.none() | st.floats(0, 1e6),
    st.integers(0, 50),
)
def test_it_is_never_none_while_anything_waits(due: list[DueWork], rate: float | None, replicas: int) -> None:
    assert model_replicas(ReplicaLoad(due, rate, replicas, 0, 8)).count >= 1


def test_workers_follow_the_replicas() -> None:
    assert worker_replicas([], 256, has_inputs=False).count == 0
    assert worker_replicas([], 256, has_inputs=True).count == 1
    assert worker_replicas([(1, 8)], 256, has_inputs=False).count == 1
    assert worker_replicas([(4, 128), (1, 1)], 256, has_inputs=False).count == 3
