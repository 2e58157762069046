"""The benchmark of the harvest, in small: its world is the same twice, and in it the tide does what it is for."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.harvest import FLOOD_CALLS, PLAIN, SEES_ALL, Found, Run, measure
from bench.harvest_traces import TRACES, batch
from bench.harvest_world import HAND_BACKS_MAX, Sight, World
from tidegate.simulate.engine.model import Request, Sequence

SECONDS = 30.0


def found(name: str, trace: str, fixed: int = 0, sight: Sight = SEES_ALL, seconds: float = SECONDS) -> Found:
    return measure(Run(name, trace, seconds, fixed, sight=sight))


@pytest.mark.parametrize("trace", ["bursty", "steady"])
def test_the_tide_brings_in_more_than_a_fixed_limit_and_users_hardly_feel_it(trace: str) -> None:
    alone, tide, fixed = found("alone", trace), found("tide", trace), found("fixed 2", trace, fixed=2)
    assert tide.between_mean_ms < 1.10 * alone.between_mean_ms
    assert tide.ttft_ms[0] < alone.ttft_ms[0] + 10.0
    assert tide.batch_rate > 3 * fixed.batch_rate
    flood = found("no control", trace, fixed=FLOOD_CALLS)
    assert flood.between_mean_ms > 2 * alone.between_mean_ms


@pytest.mark.parametrize("sight", [SEES_ALL, Sight(first_tokens=False), Sight(metrics=False), Sight(gateway=False)])
def test_the_same_run_twice_is_the_same(sight: Sight) -> None:
    first, second = (found("tide", "steady", sight=sight, seconds=10.0) for _ in range(2))
    assert (first.ttft_ms, first.between_mean_ms, first.report) == (
        second.ttft_ms,
        second.between_mean_ms,
        second.report,
    )


def test_no_item_is_handed_back_more_than_twice() -> None:
    run = Run("tide", "steady", SECONDS)
    world = World(PLAIN, TRACES["steady"](SECONDS), batch(), run.policy(), SECONDS * 1000, SEES_ALL)
    submitted: Counter[bytes] = Counter()
    submit = world.engine.submit

    def counted(request: Request) -> Sequence:
        submitted[request.prompt[:8]] += 1
        return submit(request)

    world.engine.submit = counted  # type: ignore[method-assign]
    assert world.run().handed_back > 0
    assert max(submitted.values()) <= 1 + HAND_BACKS_MAX
