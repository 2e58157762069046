"""The structs of Anthropic's Message Batches API, and how jobs are written in them."""

from datetime import UTC, datetime

import msgspec

from tidegate.core import ids
from tidegate.core.nouns import Job
from tidegate.core.states import JOB_ENDED, JobState

PREFIX = "msgbatch_"
_JOB_PREFIX = ids.PREFIXES["batch"]


class MessageBatchCounts(msgspec.Struct):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(msgspec.Struct):
    id: str
    type: str
    processing_status: str
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None
    results_url: str | None


class MessageBatchPage(msgspec.Struct):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageBatchDeleted(msgspec.Struct):
    id: str
    type: str


def public_id(job_id: str) -> str:
    """Return the id of a job at this door."""
    return PREFIX + job_id.removeprefix(_JOB_PREFIX)


def job_id_of(sent: str) -> str | None:
    """Return the job's id for an id of this door; None for an id that cannot exist."""
    job_id = _JOB_PREFIX + sent.removeprefix(PREFIX)
    return job_id if sent.startswith(PREFIX) and ids.is_valid("batch", job_id) else None


def message_batch(job: Job, total: int, base: str) -> MessageBatch:
    """Return a job in Anthropic's shape.

    `total` is the number of its requests, and `base` the URL that its caller uses.
    """
    has_ended = job.state in JOB_ENDED
    batch_id = public_id(job.id)
    return MessageBatch(
        id=batch_id,
        type="message_batch",
        processing_status=_status(job),
        request_counts=_counts(job, total),
        created_at=_moment(job.created_at),
        expires_at=_moment(job.expires_at),
        ended_at=_moment_or_none(_ended_at(job)) if has_ended else None,
        cancel_initiated_at=_moment_or_none(job.cancelling_at),
        archived_at=None,
        results_url=f"{base}/v1/messages/batches/{batch_id}/results" if has_ended else None,
    )


def _status(job: Job) -> str:
    if job.state in JOB_ENDED:
        return "ended"
    return "canceling" if job.closing is JobState.CANCELLED else "in_progress"


def _counts(job: Job, total: int) -> MessageBatchCounts:
    """Return the counts of a job's requests. Until the end all are processing.

    If a job ended before it began, none of its requests ran, all for the same reason."""
    if job.state not in JOB_ENDED:
        return MessageBatchCounts(total, 0, 0, 0, 0)
    rest = total - job.done_count
    expired = job.expired_count + (rest if job.state is JobState.EXPIRED else 0)
    canceled = job.cancelled_count + (rest if job.state is JobState.CANCELLED else 0)
    return MessageBatchCounts(0, job.answered_count, total - job.answered_count - canceled - expired, canceled, expired)


def _ended_at(job: Job) -> int | None:
    return job.completed_at or job.failed_at or job.expired_at or job.cancelled_at


def _moment(moment_ms: int) -> str:
    return datetime.fromtimestamp(moment_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _moment_or_none(moment_ms: int | None) -> str | None:
    return None if moment_ms is None else _moment(moment_ms)
