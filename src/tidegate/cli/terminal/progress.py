"""The progress of one batch in words, as pure functions of a snapshot and the pace."""

from collections import deque

import msgspec

from tidegate.cli.terminal import terminal
from tidegate.core.nouns import Job, Usage
from tidegate.core.states import JOB_ENDED, JobState

RATE_OVER_S = 20.0
# A shorter time shows no pace.
RATE_AFTER_S = 0.5
_DOING = {
    JobState.VALIDATING: "reading the input",
    JobState.IN_PROGRESS: "running",
    JobState.CANCELLING: "cancelling",
    JobState.FINALIZING: "closing",
}


class ProgressSnapshot(msgspec.Struct, frozen=True):
    """The known state of a batch at one moment of a monotonic clock."""

    at_s: float
    state: JobState
    item_count: int
    answered_count: int
    failed_count: int
    usage: Usage
    trouble: str = ""

    @property
    def done_count(self) -> int:
        return self.answered_count + self.failed_count

    @property
    def failures(self) -> str:
        """Return in words how many have no answer. They are not called failed if the batch was
        stopped, because most never ran."""
        was_stopped = self.state in (JobState.CANCELLING, JobState.CANCELLED, JobState.EXPIRED)
        return f"{self.failed_count:,} {'without an answer' if was_stopped else 'failed'}"


def snapshot(job: Job, at_s: float, trouble: str = "") -> ProgressSnapshot:
    """Return a job as the progress shows it: all that is done but has no answer counts
    as failed."""
    failed_count = job.done_count - job.answered_count
    # Deduplicated lines get the answer of their twin at the end.
    item_count = job.item_count if job.state in JOB_ENDED else job.run_count
    return ProgressSnapshot(at_s, job.state, item_count, job.answered_count, failed_count, job.usage, trouble)


class ProgressPace:
    """The pace of a batch: items per second over the last 20 s, so that a stall shows
    and an old burst does not."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, now: ProgressSnapshot) -> None:
        self._seen.append((now.at_s, now.done_count))
        while len(self._seen) > 2 and self._seen[1][0] <= now.at_s - RATE_OVER_S:
            self._seen.popleft()

    @property
    def per_s(self) -> float | None:
        """Return the items per second; None until two moments lie far enough apart."""
        if len(self._seen) < 2 or self._seen[-1][0] - self._seen[0][0] < RATE_AFTER_S:
            return None
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return max(0.0, (last - first) / (last_s - first_s))

    def left_s(self, now: ProgressSnapshot) -> float | None:
        """Return how long the rest takes at this pace; None if there is no pace yet."""
        per_s = self.per_s
        return (now.item_count - now.done_count) / per_s if per_s else None


def words(now: ProgressSnapshot, pace: ProgressPace) -> str:
    """Return the progress as one plain line, most important first, because a narrow
    terminal cuts the rest."""
    return " · ".join(text for text, _ in facts(now, pace))


def facts(now: ProgressSnapshot, pace: ProgressPace) -> list[tuple[str, str]]:
    """Return the parts of the line, each with its style."""
    trouble = [(f"waiting: {terminal.clean(now.trouble)}", "yellow")] if now.trouble else []
    if now.state is JobState.VALIDATING or not now.item_count:
        return [(_DOING.get(now.state, str(now.state)), ""), *trouble]
    share = 100 * now.done_count / now.item_count
    found = [(f"{now.done_count:,}/{now.item_count:,}", ""), (f"{int(share)} %", "")]
    if now.failed_count:
        found.append((now.failures, "red"))
    found += trouble
    if now.state is not JobState.IN_PROGRESS:
        found.append((_DOING.get(now.state, str(now.state)), ""))
    elif pace.per_s is not None:
        found.append((terminal.pace(pace.per_s), ""))
        left_s = pace.left_s(now)
        if left_s is not None and not now.trouble:
            found.append((f"{terminal.duration(left_s)} left", ""))
    if now.usage.input_tokens or now.usage.output_tokens:
        tokens = f"tokens {terminal.short(now.usage.input_tokens)} in, {terminal.short(now.usage.output_tokens)} out"
        found.append((tokens, ""))
    return found
