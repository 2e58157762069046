"""Estimate what a job will take before any of it is sent: the tokens of prompts and answers, and
their cost.

Pure arithmetic on a pass over its input, on what the model's answers took lately, and on prices.
Answers are bounded by what their requests allow. Where nothing was measured, only that bound is
known.
"""

import math
from collections.abc import Sequence

import msgspec

from tidegate.core.nouns import Usage
from tidegate.core.schedule.outlooks import Minute
from tidegate.core.usage.prices import Price, cost

# A minute's `tokens` count an output token as two.
_OUTPUT_WEIGHT = 2
# With fewer measured minutes the spread is unknown.
_MINUTES_MIN = 3
# How far the range goes beyond the least and the most of the measured minutes, and beyond the
# estimate of prompts.
_MARGIN = 0.15
_HALF = 0.5


class EstimateRange(msgspec.Struct, frozen=True):
    """A range for an amount: one case in twenty lies below `p5`, half below `p50`, nineteen in
    twenty below `p95`.
    """

    p5: int = 0
    p50: int = 0
    p95: int = 0

    def __add__(self, other: "EstimateRange") -> "EstimateRange":
        return EstimateRange(self.p5 + other.p5, self.p50 + other.p50, self.p95 + other.p95)


class ModelLoad(msgspec.Struct, frozen=True):
    """The load of a job on one model: requests, their prompts' tokens, and the most tokens that
    their answers may have.
    """

    model: str
    items: int
    input_tokens: int
    output_tokens_max: int


def input_tokens(estimated: int) -> EstimateRange:
    """Return the range of the real tokens of prompts that were estimated by their bytes."""
    return EstimateRange(int((1 - _MARGIN) * estimated), estimated, math.ceil((1 + _MARGIN) * estimated))


def output_tokens(load: ModelLoad, minutes: Sequence[Minute]) -> EstimateRange:
    """Return the range of the tokens that all answers of a model will have."""
    most = load.output_tokens_max
    answers = [(_answered(one), _allowed(one)) for one in minutes if one.units]
    shares = [written / allowed for written, allowed in answers if allowed]
    if not shares:
        return EstimateRange(min(load.items, most), int(_HALF * most), most)
    likely = _output(load, sum(written for written, _ in answers) / sum(allowed for _, allowed in answers))
    if len(shares) < _MINUTES_MIN:
        return EstimateRange(min(load.items, likely), likely, most)
    low = int((1 - _MARGIN) * _output(load, min(shares)))
    high = int((1 + _MARGIN) * _output(load, max(shares)))
    return EstimateRange(min(low, likely), likely, min(most, max(high, likely)))


def _answered(minute: Minute) -> int:
    """Return how many tokens the answers of a minute had."""
    return max(0, minute.tokens - minute.input_tokens) // _OUTPUT_WEIGHT


def _allowed(minute: Minute) -> int:
    """Return how many tokens the answers of a minute were allowed: its units are prompts' tokens
    and allowed ones.
    """
    return max(_answered(minute), minute.units - minute.input_tokens)


def _output(load: ModelLoad, share: float) -> int:
    """Return the answers' tokens if they have this share of what they may have."""
    most = load.output_tokens_max
    return max(min(load.items, most), min(most, int(share * most)))


def cost_nano(
    load: ModelLoad, output: EstimateRange, prices: Sequence[Price | None], shared_share: float
) -> EstimateRange:
    """Return what a model's part of a job will cost at its deployments.

    At best every shared prefix is cached, at the cheapest deployment; at worst none is, at the
    dearest. The number of prompt tokens is an estimate, too.
    """
    known = [price or Price() for price in prices]
    if not known:
        return EstimateRange()

    def at(prompts: int, cached_share: float, output_tokens: int) -> list[int]:
        usage = Usage(prompts, int(cached_share * prompts), output_tokens)
        return [cost(usage, price, batch=True).total_nano for price in known]

    prompts = input_tokens(load.input_tokens)
    likely = at(prompts.p50, 0.0, output.p50)
    least, most = at(prompts.p5, shared_share, output.p5), at(prompts.p95, 0.0, output.p95)
    return EstimateRange(min(least), sum(likely) // len(likely), max(most))
