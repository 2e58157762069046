"""Deadlines: who is urgent, and in which order. It reads slack from measured rates and bounds nothing: shares do that.

A job's slack is its time left less its remaining work over the rate it can expect (its measured rate, or its flow's fair share while it
has none) and less the turn of its last slice: who hurries only when that should be out already is late. Below zero it is urgent. One that
would miss even with all that urgent work may take is hopeless, and leaves the rest its place.
"""

from collections.abc import Iterable

import msgspec

from tidegate.core.schedule import eta
from tidegate.core.schedule.policy import Policy
from tidegate.core.schedule.snapshot import JobView, ModelView

# A rate next to nothing makes a turn next to endless; no deadline lies further ahead than this.
LAST_TURN_MS_MAX = 1e15


class DeadlinePace(msgspec.Struct, frozen=True):
    """What one flow of a model can expect, in units a second: ordinarily, at best with the whole urgent share, and the model in all."""

    fair: float
    best: float
    model: float


def pace(model: ModelView, share: float, policy: Policy) -> DeadlinePace:
    whole = model.rate if model.rate is not None and model.rate > 0 else policy.rate_units_per_s_default
    best = whole * (policy.urgent_share + (1 - policy.urgent_share) * share)
    return DeadlinePace(whole * share, best, whole)


def begin_slack_ms(job: JobView, model: ModelView, now: int, pace: DeadlinePace) -> float | None:
    """Time to spare until the first slice must be out: what is out now, and one slice that may be taken before it, has to come back before
    a slot is sure to be free. None when there is no such moment, or it has passed and cannot be kept any more."""
    if job.begin_by is None or job.begin_by <= now:
        return None
    return job.begin_by - now - 1_000 * (model.in_flight_units + 2 * job.slice_units) / pace.model


def last_turn_ms(model: ModelView, pace: DeadlinePace) -> float:
    """What the last slice takes from when it hurries: until a slot is free, and until its own answer is there. What is out over the rate is
    how long one of them stays out on average (Little's law)."""
    return 2_000 * model.in_flight_units / pace.model


def slack_ms(job: JobView, model: ModelView, now: int, pace: DeadlinePace) -> float:
    """Time to spare, negative when there is none."""
    rate = pace.fair if job.rate is None else job.rate
    slack = eta.slack_ms(
        job.expires_at - now - int(min(last_turn_ms(model, pace), LAST_TURN_MS_MAX)), job.left_units, rate
    )
    begin = begin_slack_ms(job, model, now, pace)
    assert slack is not None, "there is always some rate to expect"
    return slack if begin is None else min(slack, begin)


def due_at(job: JobView, now: int) -> int:
    """The moment that earliest deadline first goes by."""
    if job.begin_by is not None and job.begin_by > now:
        return min(job.begin_by, job.expires_at)
    return job.expires_at


def is_hopeless(job: JobView, now: int, pace: DeadlinePace) -> bool:
    return 1_000 * job.left_units > max(0, job.expires_at - now) * pace.best


def urgent(jobs: Iterable[JobView], model: ModelView, now: int, pace: DeadlinePace) -> list[JobView]:
    """The urgent jobs of one flow, earliest deadline first."""
    fair, best = pace.fair, pace.best
    last_turn = int(min(last_turn_ms(model, pace), LAST_TURN_MS_MAX))
    found = []
    for job in jobs:
        # This loop sees every job of a look, so it multiplies where `slack_ms` divides, and calls nothing for a job with time to spare.
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
