"""The reasons of skips: why a job, a flow or a model was not taken.

Other rooms close models with them too.
"""

from enum import StrEnum

from tidegate.core.schedule.snapshot import Choice


class Reason(StrEnum):
    # Of a model: no job of it can run here now.
    NO_AVAILABLE_SLOTS = "no_available_slots"
    UNKNOWN_CAPACITY = "unknown_capacity"
    RPM_EXHAUSTED = "rpm_exhausted"
    TPM_EXHAUSTED = "tpm_exhausted"
    BUDGET_SPENT = "budget_spent"
    RESTING = "resting"
    DRAINED = "drained"
    TIDE_CLOSED = "tide_closed"
    UNHEALTHY = "unhealthy"
    RETRY_BUDGET_SPENT = "retry_budget_spent"
    # Of a worker: it holds as many slices as it may.
    WORKER_FULL = "worker_full"
    # Of a flow or a job: it may run, and others went first.
    TENANT_IN_FLIGHT_MAX = "tenant_in_flight_max"
    FAIR_SHARE = "fair_share"
    BEHIND_IN_FLOW = "behind_in_flow"
    BEHIND_OTHER_JOBS = "behind_other_jobs"


def reason_of(choice: Choice, model: str, share_owner: str, job_id: str) -> str | None:
    """Return why nothing of a job was taken: the reason of the job, else of its flow, else of its
    model.

    None when it was picked, or when it had nothing to take.
    """
    if any(pick.job_id == job_id and pick.model == model for pick in choice.picks):
        return None
    reasons = {(skip.share_owner, skip.job_id): skip.reason for skip in choice.skips if skip.model == model}
    for place in ((share_owner, job_id), (share_owner, ""), ("", "")):
        if place in reasons:
            return reasons[place]
    return None
