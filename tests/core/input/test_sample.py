"""The items of a canary: spread evenly over the input, each once, before all others."""

from __future__ import annotations

from array import array

import pytest

from tidegate.core.input.slices import WorkRun, sample_first


def runs_of(*numbers: list[int]) -> list[WorkRun]:
    return [WorkRun("/v1/x", f"m{at}", array("I", some)) for at, some in enumerate(numbers)]


@pytest.mark.parametrize(
    ("count", "sample"),
    [(1, [5]), (2, [2, 7]), (3, [1, 5, 8]), (10, list(range(10))), (99, list(range(10)))],
)
def test_a_sample_is_spread_evenly_and_goes_first(count: int, sample: list[int]) -> None:
    parts = sample_first(runs_of(list(range(10))), count)
    assert [list(part.numbers) for part in parts] == [
        some for some in (sample, [one for one in range(10) if one not in sample]) if some
    ]


def test_the_sample_of_every_run_goes_before_the_rest_of_any() -> None:
    parts = sample_first(runs_of([0, 2, 4, 6], [1, 3, 5, 7]), 4)
    assert [(part.model, list(part.numbers)) for part in parts] == [
        ("m1", [1, 3, 5, 7]),
        ("m0", [0, 2, 4, 6]),
    ]
    parts = sample_first(runs_of([3, 2, 1, 0], [7, 6, 5, 4]), 4)
    assert [(part.model, list(part.numbers)) for part in parts] == [
        ("m0", [3, 1]),
        ("m1", [7, 5]),
        ("m0", [2, 0]),
        ("m1", [6, 4]),
    ]
