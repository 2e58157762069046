"""Compare the flows of one model and the jobs of one flow: who goes first.

Shares, which are elsewhere, bound what each rule may take.

Fair share, between flows, by virtual token counters (Sheng et al., OSDI'24). A flow's counter is
what it was served plus what it has in flight, each divided by its weight; the flow with the least
goes next, and a slice given to it counts at once. Two backlogged flows of equal weight then differ
by at most (workers + 1) slices, plus the largest item, plus the estimates' error in flight: each
worker may choose once on a snapshot that does not show what the others just took.

Deadlines. A job's slack is its time left, less its remaining work over the rate it can expect (its
measured rate, or its flow's fair share while it has none), less the turn of its last slice: a job
that hurries only when that slice should be out is late. Below zero the job is urgent. A job that
would miss even with all that urgent work may take is hopeless, and leaves the others its place.

Size and age. A job's rank is its remaining work less a credit for its age, least first. The credit
has a ceiling, so a job larger than the ceiling could wait behind small ones for ever: such a job is
due for a slice when it had none for `large_interval_ms`.
"""

from collections.abc import Iterable, Sequence

import msgspec

from tidegate.core.schedule import eta
from tidegate.core.schedule.policy import UNITS_PER_DELTALLM_UNIT, Policy
from tidegate.core.schedule.snapshot import FlowView, JobView, ModelView

_WEIGHT_MIN = 1e-6


def weight_of(flow: FlowView) -> float:
    return flow.weight if flow.weight > _WEIGHT_MIN else _WEIGHT_MIN


def flow_counters(flows: Sequence[FlowView], ratio: float, workers: int) -> dict[str, float]:
    """Return the counter of each flow by its share owner, as one of several workers should see it.

    If every worker closed the whole gap at once, they would overshoot by as much as they have room.
    So each takes its part: gaps are divided by the number of workers, which changes no order.
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


def slice_cost(slice_units: int, ratio: float, weight: float) -> float:
    """Return what one slice adds to its flow's counter while it is in flight."""
    return max(slice_units, 1) * ratio / weight


def share_of(weight: float, weights: float) -> float:
    """Return the part of a model that a flow can count on while all others are backlogged too."""
    return min(1.0, weight / weights) if weights > 0 else 1.0


def counter_gap(flows: Sequence[FlowView], ratio: float) -> float:
    """Return the widest gap between the counters of backlogged flows, to compare with the promised
    bound.
    """
    counters_now = flow_counters(flows, ratio, 1).values()
    return max(counters_now) - min(counters_now) if counters_now else 0.0


# A rate close to zero makes a turn close to endless; no deadline lies further ahead than this.
LAST_TURN_MS_MAX = 1e15


class DeadlinePace(msgspec.Struct, frozen=True):
    """The rates that one flow of a model can expect: its fair share, the best with the whole urgent
    share, and the model's.
    """

    fair: float
    best: float
    model: float


def deadline_pace(model: ModelView, share: float, policy: Policy) -> DeadlinePace:
    whole = model.rate if model.rate is not None and model.rate > 0 else policy.rate_units_per_s_default
    best = whole * (policy.urgent_share + (1 - policy.urgent_share) * share)
    return DeadlinePace(whole * share, best, whole)


def begin_slack_ms(job: JobView, model: ModelView, now: int, pace: DeadlinePace) -> float | None:
    """Return the time to spare until the first slice must be out; None without such a moment, or
    once it has passed.

    A slot is sure to be free only when all that is out now, and one slice that may be taken before,
    have come back.
    """
    if job.begin_by is None or job.begin_by <= now:
        return None
    return job.begin_by - now - 1_000 * (model.in_flight_units + 2 * job.slice_units) / pace.model


def last_turn_ms(model: ModelView, pace: DeadlinePace) -> float:
    """Return how long the last slice takes from its turn on: until a slot is free, and until its
    own answer is there.

    The work that is out, over the rate, is how long a slice stays out on average (Little's law).
    """
    return 2_000 * model.in_flight_units / pace.model


def slack_ms(job: JobView, model: ModelView, now: int, pace: DeadlinePace) -> float:
    """Return the time to spare, negative when there is none."""
    rate = pace.fair if job.rate is None else job.rate
    slack = eta.slack_ms(
        job.expires_at - now - int(min(last_turn_ms(model, pace), LAST_TURN_MS_MAX)), job.left_units, rate
    )
    begin = begin_slack_ms(job, model, now, pace)
    assert slack is not None, "there is always some rate to expect"
    return slack if begin is None else min(slack, begin)


def due_at(job: JobView, now: int) -> int:
    """Return the moment that counts for earliest deadline first."""
    if job.begin_by is not None and job.begin_by > now:
        return min(job.begin_by, job.expires_at)
    return job.expires_at


def is_hopeless(job: JobView, now: int, pace: DeadlinePace) -> bool:
    return 1_000 * job.left_units > max(0, job.expires_at - now) * pace.best


def urgent_jobs(jobs: Iterable[JobView], model: ModelView, now: int, pace: DeadlinePace) -> list[JobView]:
    """Return the urgent jobs of one flow, earliest deadline first."""
    fair, best = pace.fair, pace.best
    last_turn = int(min(last_turn_ms(model, pace), LAST_TURN_MS_MAX))
    found = []
    for job in jobs:
        # This loop sees every job of a snapshot, so it multiplies where `slack_ms` divides, and
        # calls nothing for a job with time to spare.
        left_ms, work = job.expires_at - now, 1_000 * job.left_units
        late = work > (left_ms - last_turn) * (fair if job.rate is None else job.rate) and work <= left_ms * best
        if not late and job.begin_by is not None:
            begin = begin_slack_ms(job, model, now, pace)
            late = begin is not None and begin < 0
        if late:
            found.append(job)
    if len(found) > 1:
        found.sort(key=lambda job: (due_at(job, now), job.created_at, job.job_id))
    return found


_CLASSES = (("xs", 10), ("s", 100), ("m", 1_000), ("l", 10_000))


def size_class(total_units: int) -> str:
    """Return the size class, in DeltaLLM's units: xs up to 10, s to 100, m to 1,000, l to 10,000,
    xl beyond.
    """
    for name, most in _CLASSES:
        if total_units <= most * UNITS_PER_DELTALLM_UNIT:
            return name
    return "xl"


def size_rank(job: JobView, now: int, policy: Policy) -> float:
    # This runs for every job of a flow whose turn it is, so it compares instead of calling min and
    # max.
    credit = (now - job.created_at) * policy.age_units_per_s / 1_000
    if credit > policy.age_units_max:
        credit = policy.age_units_max
    elif credit < 0:
        credit = 0
    return job.left_units - credit if job.left_units > credit else 0.0


def ranked_by_size(jobs: Sequence[JobView], now: int, policy: Policy) -> list[JobView]:
    """Return the jobs of one flow by rank, the older first between equals."""
    if len(jobs) == 1:
        return list(jobs)
    return sorted(jobs, key=lambda job: (size_rank(job, now, policy), job.created_at, job.job_id))


def due_large(jobs: Sequence[JobView], now: int, policy: Policy) -> list[JobView]:
    """Return the large jobs of one flow that had no slice for the interval, the longest without
    first.

    A job that no credit for age can lift to the front counts as large too.
    """
    if not policy.large_interval_ms:
        return []
    # Without credit for age no job is ever lifted, at any ceiling.
    reach = min(policy.large_units, policy.age_units_max) if policy.age_units_per_s > 0 else 0
    large = [job for job in jobs if job.total_units > reach]
    return sorted((job for job in large if now - waiting_since(job) >= policy.large_interval_ms), key=waiting_since)


def waiting_since(job: JobView) -> int:
    """Return since when a job waits for its next slice, so that turns need no memory."""
    return job.created_at if job.leased_at is None else job.leased_at


def is_small(job: JobView, policy: Policy) -> bool:
    return job.total_units <= policy.fast_lane_units
