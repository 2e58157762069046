"""Size and age: small jobs first, waiting counts, and a large job is never forgotten. It looks at one flow; between flows fair share rules.

A job's rank is its remaining work less a credit for its age, least first. The credit has a ceiling, so a job larger than the ceiling could
wait behind small ones for ever: such a job is due for a slice when it had none for `large_interval_ms`.
"""

from collections.abc import Sequence

from tidegate.core.schedule.policy import UNITS_PER_DELTALLM_UNIT, Policy
from tidegate.core.schedule.snapshot import JobView

_CLASSES = (("xs", 10), ("s", 100), ("m", 1_000), ("l", 10_000))


def size_class(total_units: int) -> str:
    """DeltaLLM's classes: xs up to 10 of its units, s to 100, m to 1,000, l to 10,000, xl beyond."""
    for name, most in _CLASSES:
        if total_units <= most * UNITS_PER_DELTALLM_UNIT:
            return name
    return "xl"


def rank(job: JobView, now: int, policy: Policy) -> float:
    # Every job of a flow whose turn it is passes through here, so it compares instead of calling min and max.
    credit = (now - job.created_at) * policy.age_units_per_s / 1_000
    if credit > policy.age_units_max:
        credit = policy.age_units_max
    elif credit < 0:
        credit = 0
    return job.left_units - credit if job.left_units > credit else 0.0


def ranked(jobs: Sequence[JobView], now: int, policy: Policy) -> list[JobView]:
    """Jobs of one flow by rank, the older first between equals."""
    if len(jobs) == 1:
        return list(jobs)
    return sorted(jobs, key=lambda job: (rank(job, now, policy), job.created_at, job.job_id))


def due(jobs: Sequence[JobView], now: int, policy: Policy) -> list[JobView]:
    """The large jobs of one flow that had no slice for the interval, the longest without first. What no credit for age can lift to the
    front counts as large too."""
    if not policy.large_interval_ms:
        return []
    # Without credit for each second no job is ever lifted, at any ceiling.
    reach = min(policy.large_units, policy.age_units_max) if policy.age_units_per_s > 0 else 0
    large = [job for job in jobs if job.total_units > reach]
    return sorted((job for job in large if now - waiting_since(job) >= policy.large_interval_ms), key=waiting_since)


def waiting_since(job: JobView) -> int:
    """Return since when a job waits for its next slice, so that turns need no memory."""
    return job.created_at if job.leased_at is None else job.leased_at


def is_small(job: JobView, policy: Policy) -> bool:
    return job.total_units <= policy.fast_lane_units
