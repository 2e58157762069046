"""Sentences that say why a job ended as it did: from its row, from what its error file says of
items, and from why items waited at the end.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from tidegate.core.answers.error_kinds import ErrorKind
from tidegate.core.answers.outcome_lines import NEVER_RAN
from tidegate.core.nouns import Job, LineError
from tidegate.core.states import JobState, Outcome
from tidegate.core.window import spoken

CAUSES_SHOWN_MAX = 5
ERRORS_SHOWN_MAX = 3
MESSAGE_CHARS_MAX = 120
_NEVER_RAN_CODES = frozenset(code for code, _ in NEVER_RAN.values())
_UNRUN_OF_FAILED = NEVER_RAN[Outcome.FAILED][0]


class FailedItems(msgspec.Struct, frozen=True):
    """The kinds of errors in a job's error file with how many lines each has, most frequent first.

    `is_partial`: only the beginning of the file was read.
    """

    kinds: tuple[tuple[ErrorKind, int], ...] = ()
    is_partial: bool = False


NONE_FAILED = FailedItems()


def why_ended(job: Job, failed: FailedItems, waited: Sequence[str]) -> list[str]:
    """Return how a job ended, why, and what to do next.

    `waited` says why items waited that were not run to their end.
    """
    if job.state is JobState.FAILED and not job.item_count:
        return _refused(job.errors)
    sentences = [f"{_how(job)}: {_counts(job, failed)}."]
    sentences.extend(_text(error) for error in job.errors[:ERRORS_SHOWN_MAX])
    sentences.extend(_causes(job.id, failed))
    if job.state in (JobState.EXPIRED, JobState.CANCELLED):
        sentences.extend(_idle(job))
        sentences.extend(waited)
    outcomes = {"failed": job.failed_count, "expired": job.expired_count, "cancelled": job.cancelled_count}
    if any(outcomes.values()):
        asked = "".join(f" --outcome {name}" for name, count in outcomes.items() if count)
        sentences.append(f"To run these requests again: `tidegate batches retry {job.id}{asked}`.")
    return sentences


def _refused(errors: Sequence[LineError]) -> list[str]:
    """Say why an input was refused, with the first of its errors."""
    counts = Counter(error.code for error in errors).most_common(CAUSES_SHOWN_MAX)
    found = ", ".join(f"{count:,} x {code}" for code, count in counts)
    return [
        f"It failed before anything was sent: its input was refused ({found or 'for no reason that is stored'}).",
        *(_text(error) for error in errors[:ERRORS_SHOWN_MAX]),
        "Correct the input, and create the batch again.",
    ]


def _how(job: Job) -> str:
    if job.state is JobState.EXPIRED:
        if job.begin_by is not None and job.expired_at is not None and job.expired_at < job.expires_at:
            return f"It expired, because nothing of it had begun within {spoken(job.begin_by - job.created_at)}"
        return f"It expired, because its window of {job.window_text} was over before all of it had run"
    if job.state is JobState.CANCELLED:
        asked_at = job.cancelling_at or job.cancelled_at or job.created_at
        return f"It was cancelled {spoken(asked_at - job.created_at)} after it was created"
    if job.state is JobState.FAILED:
        return f"It was stopped by {job.stopped_by}" if job.stopped_by else "It failed"
    return "It completed"


def _counts(job: Job, failed: FailedItems) -> str:
    """Say what became of the items.

    A job that was stopped counts those that were not run as failed; their lines tell them apart.
    """
    if not job.item_count:
        return "its input had not been read"
    if job.answered_count == job.item_count:
        return "all of its requests were answered"
    unrun = sum(count for kind, count in failed.kinds if kind.code == _UNRUN_OF_FAILED)
    if unrun and failed.is_partial:
        parts = [(job.failed_count, "failed or were not run")]
    else:
        parts = [(job.failed_count - unrun, "failed"), (unrun, "were not run")]
    parts += [(job.expired_count, "were not done in time"), (job.cancelled_count, "were not run")]
    rest = "".join(f", {count:,} {words}" for count, words in parts if count)
    return f"{job.answered_count:,} of {job.item_count:,} requests were answered{rest}"


def _causes(job_id: str, failed: FailedItems) -> list[str]:
    """Say why items that ran failed, by kind of error, and where each message is whole: numbers and
    quoted texts are left out of a kind.
    """
    kinds = [(kind, count) for kind, count in failed.kinds if kind.code not in _NEVER_RAN_CODES]
    if not kinds:
        return []
    shown = "; ".join(f"{count:,} x {_kind(kind)}" for kind, count in kinds[:CAUSES_SHOWN_MAX])
    more = sum(count for _, count in kinds[CAUSES_SHOWN_MAX:])
    rest = f"; {more:,} x other errors" if more else ""
    of_first = " (of the first ones)" if failed.is_partial else ""
    return [
        f"Why requests failed{of_first}: {shown}{rest}.",
        f"The whole message of each: `tidegate batches output {job_id} --errors`.",
    ]


def _kind(kind: ErrorKind) -> str:
    status = f"{kind.status} " if kind.status and kind.code != f"http_{kind.status}" else ""
    text = kind.text.rstrip(".")
    if len(text) > MESSAGE_CHARS_MAX:
        text = text[:MESSAGE_CHARS_MAX].rsplit(" ", 1)[0] + " …"
    return f"{status}{kind.code}" + (f" ({text})" if text else "")


def _idle(job: Job) -> list[str]:
    """Say which setting of its own kept a job from running at its end."""
    found = []
    if job.paused_at is not None:
        found.append("It was paused when it ended.")
    elif job.canary is not None and job.canary.state == "waiting":
        found.append("Its canary was done, and it waited for a decision.")
    if job.begun_at is None and job.item_count:
        found.append("Nothing of it was ever sent.")
    return found


def _text(error: LineError) -> str:
    place = f"Line {error.line}: " if error.line is not None else ""
    return f"{place}{error.message} ({error.code})"
