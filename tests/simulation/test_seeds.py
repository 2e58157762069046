"""The whole engine under faults, from fixed seeds: what breaks prints its seed, its last events and the command that replays it."""

import os
import secrets
from collections.abc import Callable

import pytest

from tests.simulation.seeds import FIXED
from tests.simulation.world.estate import CHAT, EMBEDDINGS, MESSAGES, Shape
from tests.simulation.world.plan import KINDS, draw
from tests.simulation.world.report import report, shrink
from tests.simulation.world.settings import SPANS
from tests.simulation.world.world import Verdict, simulate
from tidegate.core.deployments import EngineKind
from tidegate.core.schedule import Mode

# Seeds take as long as they take: beside other work, ten of them came to the limit of a test.
pytestmark = pytest.mark.timeout(600)

DRAWN_COUNT = 160
FRESH_CHUNKS, FRESH_COUNT, FRESH_BELOW = 2, 10, 2**40
SOAK_CHUNKS = 16


def run(seeds: range | list[int]) -> list[Verdict]:
    """Run these seeds; the first that breaks a promise fails the test with everything needed to replay it."""
    verdicts = []
    for seed in seeds:
        verdict = simulate(draw(seed))
        if verdict.broken is not None:
            pytest.fail(report(shrink(verdict)), pytrace=False)
        verdicts.append(verdict)
    return verdicts


def run_noted(first: int, count: int, record_property: Callable[[str, object], None]) -> None:
    record_property("fresh_seeds", f"{first} to {first + count - 1}")
    assert len(run(range(first, first + count))) == count


def test_every_promise_holds() -> None:
    """And the runs meet what they are for: checks that never see a loss or an end state prove nothing."""
    verdicts = run(FIXED)
    assert {state for verdict in verdicts for state in verdict.states} == {
        "completed",
        "failed",
        "expired",
        "cancelled",
    }
    assert sum(verdict.loss_count for verdict in verdicts) > 200


@pytest.mark.parametrize("chunk", range(FRESH_CHUNKS))
def test_every_promise_holds_for_fresh_seeds(chunk: int, record_property: Callable[[str, object], None]) -> None:
    """Seeds that no run has seen: the summary of the run names them, and one that breaks prints how to replay it."""
    run_noted(secrets.randbelow(FRESH_BELOW), FRESH_COUNT, record_property)


def test_without_faults_each_item_is_called_exactly_once() -> None:
    for seed in range(3):
        verdict = simulate(draw(seed, frozenset(KINDS)))
        assert verdict.broken is None, report(verdict)
        assert verdict.call_count == verdict.runnable_count


def test_the_fixed_seeds_have_every_kind_of_fault() -> None:
    plans = [draw(seed) for seed in FIXED]
    assert {kind for plan in plans for kind in plan.kinds} == set(KINDS)
    assert any(not plan.kinds for plan in plans), "some runs are quiet"


def test_the_seeds_mean_every_shape_and_mode() -> None:
    """What is drawn is drawn often enough: shapes, modes, switches, limits of every kind, slots, Redis, weights."""
    estates = [draw(seed).estate for seed in range(DRAWN_COUNT)]
    assert {draw(seed).shape for seed in range(DRAWN_COUNT)} == set(Shape)
    assert {estate.policy.mode for estate in estates} == set(Mode)
    assert {estate.override_mode for estate in estates} == {None, *Mode}
    tenants = [tenant for estate in estates for tenant in estate.tenants]
    for limits in ("limits", "user_limits", "key_limits"):
        assert any(getattr(tenant, limits) for tenant in tenants)
    assert any(estate.resources for estate in estates)
    assert any(limits for estate in estates for limits in estate.job_limits)
    assert {limit.period for estate in estates for one in estate.deployments for limit in one.limits} == set(SPANS)
    assert {len(estate.tenants) for estate in estates} >= {1, 2, 3, 6}
    assert {len(estate.models) for estate in estates} == {1, 2, 3, 4}
    assert sum(estate.uses_redis for estate in estates) > 30
    assert sum(one.deployments[0].price is not None for one in estates) > 10
    assert {one.endpoints for one in estates} >= {(CHAT,), (EMBEDDINGS,), (CHAT, MESSAGES)}
    assert {deployment.engine for one in estates for deployment in one.deployments} == {
        EngineKind.GENERIC, EngineKind.VLLM, EngineKind.ANTHROPIC
    }  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("chunk", range(SOAK_CHUNKS))
def test_many_more_seeds(chunk: int, record_property: Callable[[str, object], None]) -> None:
    """As many as SOAK_SEEDS says, fresh ones unless SOAK_FROM names the first: so a soak goes on where another ended."""
    count = int(os.environ.get("SOAK_SEEDS", "8000")) // SOAK_CHUNKS
    named = os.environ.get("SOAK_FROM")
    first = secrets.randbelow(FRESH_BELOW) if named is None else int(named) + chunk * count
    run_noted(first, count, record_property)


def test_two_items_that_kill_workers_are_not_checked_against_each_other() -> None:
    """With two culprits in one job, each was run as the check of the other, and every check was one more lost worker."""
    run([5045])


def test_a_culprit_among_suspects_of_two_models_is_found_in_few_losses() -> None:
    """Groups of the other model passed for groups of the worst, so that it killed fourteen workers."""
    run([7400132])
