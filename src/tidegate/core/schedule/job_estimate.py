"""What a job will probably take, before any of it is sent: tokens of its answers, and what they cost. Pure arithmetic on a pass over its
input, on what the model's answers took lately, and on prices.

Answers are bounded by what their requests allow. Where nothing was measured, only that bound is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.core.nouns import Usage
from tidegate.core.schedule.outlooks import Minute
from tidegate.core.usage.prices import Price, cost

# An output token is charged as two where service is counted.
_OUTPUT_WEIGHT = 2
# With fewer measured minutes nothing is known of the spread.
_MINUTES_MIN = 3
# How much further than the least and the most of the measured minutes the range goes.
_MARGIN = 0.15
_HALF = 0.5


@dataclass(frozen=True, slots=True)
class EstimateRange:
    """An amount: in one of twenty cases below `p5`, in half of them below `p50`, in nineteen below `p95`."""

    p5: int = 0
    p50: int = 0
    p95: int = 0

    def __add__(self, other: "EstimateRange") -> "EstimateRange":
        return EstimateRange(self.p5 + other.p5, self.p50 + other.p50, self.p95 + other.p95)


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """What a job asks of one model: requests, their prompts' tokens, and the most tokens that their answers may have."""

    model: str
    items: int
    input_tokens: int
    output_tokens_max: int


def output_tokens(load: ModelLoad, minutes: Sequence[Minute]) -> EstimateRange:
    """Return how many tokens all answers of a model will have."""
    most = load.output_tokens_max
    measured = [one for one in minutes if one.units]
    if not measured:
        return EstimateRange(min(load.items, most), int(_HALF * most), most)
    ratios = [one.tokens / one.units for one in measured]
    likely = _output(load, sum(one.tokens for one in measured) / sum(one.units for one in measured))
    if len(measured) < _MINUTES_MIN:
        return EstimateRange(min(load.items, likely), likely, most)
    low = int((1 - _MARGIN) * _output(load, min(ratios)))
    high = int((1 + _MARGIN) * _output(load, max(ratios)))
    return EstimateRange(min(low, likely), likely, min(most, max(high, likely)))


def _output(load: ModelLoad, ratio: float) -> int:
    """The answers' tokens if each unit of the load is charged by this ratio."""
    charged = ratio * (load.input_tokens + load.output_tokens_max)
    likely = int((charged - load.input_tokens) / _OUTPUT_WEIGHT)
    return max(min(load.items, load.output_tokens_max), min(load.output_tokens_max, likely))


def cost_nano(
    load: ModelLoad, output: EstimateRange, prices: Sequence[Price | None], shared_share: float
) -> EstimateRange:
    """Return what a model's part of a job will cost at its deployments: at the best with every shared prefix cached and at the cheapest
    of them, at the worst with none and at the dearest."""
    known = [price or Price() for price in prices]
    if not known:
        return EstimateRange()
    cached = int(shared_share * load.input_tokens)

    def at(output_tokens: int, cached_tokens: int) -> list[int]:
        usage = Usage(load.input_tokens, cached_tokens, output_tokens)
        return [cost(usage, price, batch=True).total_nano for price in known]

    likely = at(output.p50, 0)
    return EstimateRange(min(at(output.p5, cached)), sum(likely) // len(likely), max(at(output.p95, 0)))
