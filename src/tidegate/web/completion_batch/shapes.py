"""The structs of the completion-batch API, and how jobs and items are written in them."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Raw

from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Job, Usage
from tidegate.core.problems import shown_id
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.core.wording import in_words

PENDING, RUNNING, COMPLETED, FAILED, CANCELLED = "PENDING", "RUNNING", "COMPLETED", "FAILED", "CANCELLED"
NULL = Raw(b"null")
EXPIRED_MESSAGE = "batch_expired: The batch was not done within its completion window."
CANCELLED_MESSAGE = "batch_cancelled: This request was not executed because the batch was cancelled."


class CallbackShown(msgspec.Struct, rename="camel"):
    """A callback as reads show it: the names of its headers, without their values.

    Only the answer to the create has the signing secret.
    """

    url: str
    events: list[str]
    headers: list[str]
    signing_secret: str | msgspec.UnsetType | None = msgspec.UNSET


class DoorNotes(msgspec.Struct, tag="completion-batch", tag_field="door"):
    """What this door stores about a job, beyond what every job has."""

    workspace: str
    environment: str
    type: str
    total: int
    estimated_tokens: int
    user: str | None = None
    capacity: list[dict[str, Any]] | None = None
    callback: CallbackShown | None = None


class BatchEntity(msgspec.Struct, rename="camel"):
    workspace_id: str
    environment_id: str
    batch_id: str
    timestamp: str
    type: str
    status: str
    callback_options: CallbackShown | None
    completed: int
    failed: int
    running: int
    pending: int
    cancelled: int
    total_items: int
    total_estimated_prompt_tokens: int
    total_prompt_tokens: int
    total_completion_tokens: int
    total_output_tokens: int
    capacity: list[dict[str, Any]] | None
    error_message: str | None
    created_at: str
    completed_at: str | None
    created_by_user_id: str | None
    created_by_api_key_id: str | None
    updated_at: str
    created_by_user: dict[str, str] | msgspec.UnsetType | None = msgspec.UNSET
    created_by_api_key: dict[str, str] | msgspec.UnsetType | None = msgspec.UNSET
    completed_percentage: int = 0
    # Last, so that the items can be appended to the encoded batch.
    items: list[Raw] = []


class ItemEntity(msgspec.Struct, rename="camel"):
    """One item. `response` is null until the item completed; `error_code` is our own."""

    workspace_id: str
    environment_id: str
    item_id: str
    batch_id: str
    status: str
    resource_id: str
    request: Raw
    response: Raw
    error_message: str | None
    error_code: str | None
    retry_count: int
    estimated_prompt_tokens: int
    prompt_tokens: int
    completion_tokens: int
    output_tokens: int
    total_tokens: int
    created_at: str
    completed_at: str | None


class DoorError(msgspec.Struct, rename="camel"):
    error_message: str
    error_code: str
    details: dict[str, str | None]


_decode_notes = msgspec.json.Decoder(DoorNotes).decode


def notes_of(job: Job) -> DoorNotes | None:
    """Return this door's notes about a job; None if another door made the job."""
    if job.door is None:
        return None
    try:
        return _decode_notes(job.door)
    except msgspec.ValidationError:
        return None


def error_body(problem: ApiProblem, request_id: str) -> bytes:
    """Return a refusal in the shape of this door."""
    details = {"param": problem.param, "requestId": request_id}
    return msgspec.json.encode(DoorError(problem.message, problem.code.upper(), details))


def no_such_batch(sent: str) -> ApiProblem:
    message = f"No completion batch found with id '{shown_id(sent)}' in this workspace and environment."
    return ApiProblem(404, "completion_batch_not_found", message, param="batchId")


def no_such_item() -> ApiProblem:
    message = "There is no such item in this batch, or the results of the batch are not kept any more."
    return ApiProblem(404, "completion_batch_item_not_found", message, param="itemId")


def no_results() -> ApiProblem:
    message = "The results of this batch are not kept any more, and its events went with them. Read the batch itself."
    return ApiProblem(404, "file_not_found", message, param="batchId")


def batch_status(job: Job, running: int) -> str:
    """Return a job's status at this door. The table is in the page about this API."""
    if JobState.CANCELLED in (job.state, job.closing):
        return CANCELLED
    if job.state is JobState.COMPLETED:
        return FAILED if job.failed_count or job.expired_count else COMPLETED
    if job.state in JOB_ENDED:
        return FAILED
    return RUNNING if running or job.done_count or job.state is JobState.FINALIZING else PENDING


def created_entity(job: Job, notes: DoorNotes) -> BatchEntity:
    """Return a batch as it was when it was created."""
    return BatchEntity(
        workspace_id=notes.workspace,
        environment_id=notes.environment,
        batch_id=job.id,
        timestamp=moment(job.created_at),
        type=notes.type,
        status=PENDING,
        callback_options=notes.callback,
        completed=0,
        failed=0,
        running=0,
        pending=notes.total,
        cancelled=0,
        total_items=notes.total,
        total_estimated_prompt_tokens=notes.estimated_tokens,
        total_prompt_tokens=0,
        total_completion_tokens=0,
        total_output_tokens=0,
        capacity=notes.capacity,
        error_message=None,
        created_at=moment(job.created_at),
        completed_at=None,
        created_by_user_id=notes.user,
        created_by_api_key_id=job.key_id,
        updated_at=moment(job.created_at),
    )


def batch_entity(job: Job, notes: DoorNotes, running: int) -> BatchEntity:
    """Return a batch in its present state.

    `running` is the number of items that workers are running.
    """
    has_ended = job.state in JOB_ENDED
    status = batch_status(job, running)
    failed, cancelled = job.failed_count + job.expired_count, job.cancelled_count
    rest = max(0, notes.total - job.done_count)
    running = 0 if has_ended else min(running, rest)
    if status == CANCELLED:
        cancelled += rest - running
    elif has_ended:
        failed += rest
    done = job.answered_count + failed + cancelled
    ended_at = job.completed_at or job.failed_at or job.expired_at or job.cancelled_at
    moments = (job.created_at, job.in_progress_at, job.cancelling_at, job.finalizing_at, ended_at)
    return msgspec.structs.replace(
        created_entity(job, notes),
        status=status,
        completed=job.answered_count,
        failed=failed,
        running=running,
        pending=notes.total - done - running,
        cancelled=cancelled,
        total_prompt_tokens=job.usage.input_tokens,
        total_completion_tokens=job.usage.output_tokens,
        total_output_tokens=job.usage.output_tokens,
        error_message=_error_message(job, status, failed, notes.total) if has_ended else None,
        completed_at=moment(ended_at) if has_ended and ended_at is not None else None,
        updated_at=moment(max(one for one in moments if one is not None)),
        completed_percentage=100 * done // max(1, notes.total),
    )


def error_message(job: Job) -> str | None:
    """Return why a job failed as a whole; None if it did not."""
    if job.state is JobState.EXPIRED:
        return EXPIRED_MESSAGE
    return f"{job.errors[0].code}: {job.errors[0].message}" if job.errors else None


def _error_message(job: Job, status: str, failed: int, total: int) -> str | None:
    return error_message(job) or (f"{failed} of {in_words(total, 'item')} failed." if status == FAILED else None)


def completed(entity: ItemEntity, response: Raw, usage: Usage) -> ItemEntity:
    """Return an item with its answer and its usage, in both spellings of the usage."""
    return msgspec.structs.replace(
        entity,
        status=COMPLETED,
        response=response,
        prompt_tokens=usage.input_tokens,
        completion_tokens=usage.output_tokens,
        output_tokens=usage.output_tokens,
        total_tokens=usage.input_tokens + usage.output_tokens,
    )


def moment(moment_ms: int) -> str:
    return datetime.fromtimestamp(moment_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
