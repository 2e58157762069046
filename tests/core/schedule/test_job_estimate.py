"""What a job will probably take before any of it is sent: bounded by what its requests allow, narrowed by what was measured."""

from __future__ import annotations

import pytest

from tidegate.core.schedule.job_estimate import EstimateRange, ModelLoad, cost_nano, input_tokens, output_tokens
from tidegate.core.schedule.outlooks import Minute
from tidegate.core.usage.prices import Price

LOAD = ModelLoad("m", 10, 1_000, 4_000)


def minute(answered: int, allowed: int) -> Minute:
    """One in which prompts had 100 tokens, and answers so many of those that they might have had."""
    return Minute(0, 100 + allowed, 100 + 2 * answered, 1, input_tokens=100)


def test_prompts_are_estimated_within_a_margin() -> None:
    assert input_tokens(1_001) == EstimateRange(850, 1_001, 1_152)


def test_where_nothing_was_measured_only_the_bound_is_known() -> None:
    for minutes in ([], [Minute(0, 0, 0, 0)], [Minute(0, 100, 100, 1, input_tokens=100)]):
        assert output_tokens(LOAD, minutes) == EstimateRange(10, 2_000, 4_000)
    assert output_tokens(ModelLoad("m", 10, 0, 4), []) == EstimateRange(4, 2, 4), "an answer may be empty"


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [
        ([(10, 100), (30, 100)], EstimateRange(10, 800, 4_000)),
        ([(10, 100), (30, 100), (20, 100)], EstimateRange(340, 800, 1_380)),
        ([(10, 100), (300, 1_000), (20, 100)], EstimateRange(340, 1_100, 1_380)),
        ([(100, 100), (100, 100), (100, 100)], EstimateRange(3_400, 4_000, 4_000)),
        # Answers were longer than their requests allowed.
        ([(200, 100), (200, 100), (200, 100)], EstimateRange(3_400, 4_000, 4_000)),
        # Nearly nothing: each request is still answered with something.
        ([(0, 100), (0, 100), (0, 100)], EstimateRange(8, 10, 11)),
    ],
)
def test_answers_take_the_share_of_what_they_may_that_others_took(
    minutes: list[tuple[int, int]], expected: EstimateRange
) -> None:
    assert output_tokens(LOAD, [minute(*one) for one in minutes]) == expected


def test_costs_reach_from_the_cheapest_with_a_warm_cache_to_the_dearest_with_none() -> None:
    cheap = Price(input_nano=1_000_000, cached_nano=500_000, output_nano=2_000_000, batch_factor_ppm=500_000)
    dear = Price(input_nano=4_000_000, output_nano=8_000_000)
    output = EstimateRange(100, 200, 300)
    # Of 850 prompt tokens at the least, 425 are cached: (425 + 425 / 2 + 2 * 100) / 2.
    assert cost_nano(LOAD, output, [cheap], 0.5) == EstimateRange(419, 700, 875)
    assert cost_nano(LOAD, output, [cheap, dear], 0.5) == EstimateRange(419, (700 + 5_600) // 2, 7_000)
    assert cost_nano(LOAD, output, [None, dear], 0.5) == EstimateRange(0, 2_800, 7_000)
    assert cost_nano(LOAD, output, [], 0.5) == EstimateRange()


def test_ranges_add_up() -> None:
    assert EstimateRange(1, 2, 3) + EstimateRange(10, 20, 30) == EstimateRange(11, 22, 33)
