"""Size and age: small jobs first, waiting counts, and a large job is never forgotten. It looks at one flow; between flows fair share rules.

A job's rank is its remaining work less a credit for its age, least first. The credit has a ceiling, so a job larger than the ceiling could
wait behind small ones for ever: such a job is due for a slice when it had none for `large_interval_ms`.
"""

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
    credit = min(policy.age_units_max, max(0, now - job.created_at) * policy.age_units_per_s / 1_000)
    return max(0.0, job.left_units - credit)


def is_due(job: JobView, now: int, policy: Policy) -> bool:
    """Whether a large job had no slice for the interval. What no credit for age can lift to the front counts as large too."""
    if not policy.large_interval_ms:
        return False
    # Without credit for each second nobody is ever lifted, whatever the ceiling.
    reach = min(policy.large_units, policy.age_units_max) if policy.age_units_per_s > 0 else 0
    return job.total_units > reach and now - waiting_since(job) >= policy.large_interval_ms


def waiting_since(job: JobView) -> int:
    """Since when a job waits for its next slice: by this, turns need no memory, and nobody is passed over for ever."""
    return job.created_at if job.leased_at is None else job.leased_at


def is_small(job: JobView, policy: Policy) -> bool:
    return job.total_units <= policy.fast_lane_units
