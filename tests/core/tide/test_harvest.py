"""The benchmark of the harvest, in small: its world is the same twice, and in it the tide does what it is for."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.harvest import FLOOD_CALLS, PLAIN, SEES_ALL, Found, Run, measure
from bench.harvest_shipped import NOTICE_MS
from bench.harvest_traces import TRACES, batch
from bench.harvest_world import CALIBRATED, Apart, Costs, HarvestWorld, Sight
from tidegate.core.tide.controller import Tide
from tidegate.simulate.engine.cost import step_ms
from tidegate.simulate.engine.model import ModelledRequest, Sequence
from tidegate.upstream.tide.tides import HAND_BACKS_MAX

SECONDS = 30.0


SHIPPED = Sight(first_tokens=False)
APART = Sight(first_tokens=False, apart=Apart(NOTICE_MS))
POLLS = Sight(first_tokens=False, apart=Apart())
LOSSY = Sight(first_tokens=False, apart=Apart(NOTICE_MS, lost_share=0.3))


def found(
    name: str,
    trace: str,
    fixed: int = 0,
    sight: Sight = SEES_ALL,
    seconds: float = SECONDS,
    costs: Costs = CALIBRATED,
) -> Found:
    return measure(Run(name, trace, seconds, fixed, sight=sight, costs=costs))


@pytest.mark.parametrize("trace", ["bursty", "steady"])
def test_the_tide_brings_in_more_than_a_fixed_limit_and_users_hardly_feel_it(trace: str) -> None:
    alone, tide, fixed = found("alone", trace), found("tide", trace), found("fixed 2", trace, fixed=2)
    assert tide.between_mean_ms < 1.10 * alone.between_mean_ms
    assert tide.ttft_ms[0] < alone.ttft_ms[0] + 10.0
    assert tide.batch_rate > 3 * fixed.batch_rate
    flood = found("no control", trace, fixed=FLOOD_CALLS)
    assert flood.between_mean_ms > 2 * alone.between_mean_ms


def test_apart_with_notices_is_as_one_process_and_polls_alone_are_not() -> None:
    one, apart, polls = (found("tide", "bursty", sight=sight) for sight in (SHIPPED, APART, POLLS))
    assert apart.ttft_ms[1] <= 1.05 * one.ttft_ms[1]
    assert apart.between_mean_ms <= 1.02 * one.between_mean_ms
    assert apart.batch_rate >= 0.95 * one.batch_rate
    assert polls.ttft_ms[1] > 1.05 * one.ttft_ms[1], "a notice is worth nothing here"


def test_steady_users_hardly_feel_a_batch_in_either_shape_and_lost_notices_do_little() -> None:
    alone = found("alone", "steady")
    for sight in (SHIPPED, APART, LOSSY):
        tide = found("tide", "steady", sight=sight)
        assert tide.between_mean_ms <= 1.08 * alone.between_mean_ms
        assert tide.ttft_ms[0] <= alone.ttft_ms[0] + 8.0


@pytest.mark.parametrize(
    "costs",
    [
        Costs(sequence=2.0),
        *(pytest.param(one, marks=pytest.mark.soak) for one in (Costs(0.5, 1.0, 1.0), Costs(3.0, 3.0, 3.0))),
    ],
)
def test_what_a_sequence_costs_on_an_engine_is_found_out(costs: Costs) -> None:
    seconds = 2 * SECONDS
    policy = Run("tide", "steady", seconds, sight=APART, costs=costs).policy()
    assert isinstance(policy, Tide)
    before = policy.cost.slowdown(10, 0.0)
    HarvestWorld(PLAIN, TRACES["steady"](seconds), batch(), policy, seconds * 1000, APART, costs).run()
    # The mean context of the two kinds of calls lies between 300 and 900 tokens.
    base_ms = step_ms(0, 0, 0) * costs.base
    low, high = (10 * costs.sequence * (step_ms(1, context, 0) - step_ms(0, 0, 0)) / base_ms for context in (300, 900))
    assert low < policy.cost.slowdown(10, 0.0) < high
    assert before == pytest.approx(0.05)


@pytest.mark.parametrize("sight", [SHIPPED, LOSSY])
def test_the_same_run_twice_is_the_same(sight: Sight) -> None:
    first, second = (found("tide", "steady", sight=sight, seconds=10.0) for _ in range(2))
    assert (first.ttft_ms, first.between_mean_ms, first.report) == (
        second.ttft_ms,
        second.between_mean_ms,
        second.report,
    )


def test_no_item_is_handed_back_more_than_twice() -> None:
    run = Run("tide", "steady", SECONDS)
    world = HarvestWorld(PLAIN, TRACES["steady"](SECONDS), batch(), run.policy(), SECONDS * 1000, SEES_ALL)
    submitted: Counter[bytes] = Counter()
    submit = world.engine.submit

    def counted(request: ModelledRequest) -> Sequence:
        submitted[request.prompt[:8]] += 1
        return submit(request)

    world.engine.submit = counted  # type: ignore[method-assign]
    assert world.run().handed_back > 0
    assert max(submitted.values()) <= 1 + HAND_BACKS_MAX
