"""Fair share: virtual token counters (Sheng et al., OSDI'24). It compares flows of one model and knows nothing of their jobs.

A flow's counter is what it was served plus what it has in flight, each divided by its weight; the flow with the least goes next, and a
slice given to it counts at once. Two backlogged flows of equal weight then differ by at most (workers + 1) slices, plus the largest item,
plus the estimates' error in flight: each worker may choose once on a look that does not show what the others just took.
"""

from collections.abc import Sequence

from tidegate.core.schedule.snapshot import FlowView

_WEIGHT_MIN = 1e-6


def weight_of(flow: FlowView) -> float:
    return flow.weight if flow.weight > _WEIGHT_MIN else _WEIGHT_MIN


def counters(flows: Sequence[FlowView], ratio: float, workers: int) -> dict[str, float]:
    """The counter of each flow by its share owner, as one of several workers should see it.

    If all workers set the whole gap right at once, they would overshoot by as much as they have room. So each takes its part: gaps are
    divided by the number of workers, which changes no order.
    """
    counters_now = {
        flow.share_owner: flow.served
        + (flow.in_flight_units * ratio / weight_of(flow) if flow.in_flight_units else 0.0)
        for flow in flows
    }
    if workers <= 1 or not counters_now:
        return counters_now
    least = min(counters_now.values())
    return {share_owner: least + (counter - least) / workers for share_owner, counter in counters_now.items()}


def cost(slice_units: int, ratio: float, weight: float) -> float:
    """What one slice adds to its flow's counter while it is in flight."""
    return max(slice_units, 1) * ratio / weight


def share_of(weight: float, weights: float) -> float:
    """The part of a model that a flow can count on while all others are backlogged too."""
    return min(1.0, weight / weights) if weights > 0 else 1.0


def gap(flows: Sequence[FlowView], ratio: float) -> float:
    """The widest difference between the counters of backlogged flows: what the bound is held against, live."""
    counters_now = counters(flows, ratio, 1).values()
    return max(counters_now) - min(counters_now) if counters_now else 0.0
