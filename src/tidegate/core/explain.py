"""Why a job is or is not running now, in sentences: a pure reading of how it stands in the store."""

from dataclasses import dataclass

from tidegate.core.nouns import Job
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.core.window import spoken


@dataclass(frozen=True, slots=True)
class Standing:
    """How a job stands: its slices, who could run them, who comes first, and why items wait."""

    now: int
    workers_alive: int
    slices_ready: int
    slices_resting: int
    rest_ends_in_ms: int
    slices_leased: int
    jobs_ahead: int
    waiting_reasons: tuple[tuple[str, int], ...]


def explain(job: Job, standing: Standing) -> list[str]:
    """What an operator wants to hear, most important first."""
    if job.state in JOB_ENDED:
        return [f"It ended as {job.state}.", *(f"{error.code}: {error.message}" for error in job.errors[:3])]
    said = [_left(job, standing)]
    if standing.workers_alive == 0:
        said.append("No worker is alive, so nothing runs: start one with `tidegate serve` or `tidegate worker`.")
    if job.state is JobState.VALIDATING:
        said.append(
            "It was told to close and ends without having begun."
            if job.closing
            else "Its input is being checked, or waits for a worker that does it; one input at a time per worker."
        )
    elif job.state is JobState.FINALIZING:
        said.append("Everything that will run has run; its result files are being published.")
    elif job.closing:
        said.append(
            f"It is closing as {job.closing}: nothing new is sent, and {standing.slices_leased} slices are still out."
        )
    else:
        said.extend(_running(job, standing))
    return said


def _left(job: Job, standing: Standing) -> str:
    left_ms = job.expires_at - standing.now
    time_left = f"{spoken(left_ms)} left" if left_ms > 0 else "its window has passed"
    return f"It is {job.state}: {job.done_count:,} of {job.item_count:,} items done, {time_left}."


def _running(job: Job, standing: Standing) -> list[str]:
    said = []
    if standing.slices_leased:
        said.append(f"It is running: workers hold {standing.slices_leased} of its slices.")
    if standing.slices_ready and standing.jobs_ahead:
        said.append(
            f"{standing.slices_ready} slices are ready, behind {standing.jobs_ahead} older batches that have slices ready too: "
            "first come, first served."
        )
    elif standing.slices_ready:
        said.append(
            f"{standing.slices_ready} slices are ready and nothing is ahead of it: workers take them as their upstreams have room. "
            "If none do, see `tidegate doctor` for an upstream that is away."
        )
    if standing.slices_resting:
        said.append(
            f"{standing.slices_resting} slices rest for another {spoken(max(0, standing.rest_ends_in_ms))}, "
            "because an upstream asked for it or failed."
        )
    for reason, count in standing.waiting_reasons:
        said.append(f"{count:,} items were tried and wait to be tried again: {reason}.")
    if not said:
        said.append("Nothing of it is ready or out; the next sweep moves it on.")
    return said
