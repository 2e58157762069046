"""The structs of OpenAI's Files, Uploads and Batches APIs, and how nouns are written in them.

Only here a job is called a batch.
"""

from typing import Any, TypeVar

import msgspec

from tidegate.core.answer_terms import AnswerTerms
from tidegate.core.files import File, PartedUpload
from tidegate.core.job_controls import Canary, MaxErrors
from tidegate.core.job_shape import JobRetry
from tidegate.core.nouns import Job
from tidegate.core.schedule.ranking import size_class
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.core.usage.prices import units_text
from tidegate.web.jobs.forecast_shapes import UNKNOWN, EtaShown, Forecast
from tidegate.web.jobs.limit_rooms import CallerLimit
from tidegate.web.jobs.validation import BindingLimit, CostShown, EtaSeconds, JobEstimate, Refusal, Tokens

T = TypeVar("T")


class FileObject(msgspec.Struct):
    id: str
    object: str
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: str
    status_details: str | None


class FileDeleted(msgspec.Struct):
    id: str
    object: str
    deleted: bool


class UploadObject(msgspec.Struct):
    """A file that is uploaded in parts. `file` is the finished file."""

    id: str
    object: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str
    file: FileObject | None


class UploadPartObject(msgspec.Struct):
    id: str
    object: str
    created_at: int
    upload_id: str


class BatchDeleted(msgspec.Struct):
    id: str
    object: str
    deleted: bool


class BatchError(msgspec.Struct):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(msgspec.Struct):
    object: str
    data: list[BatchError]


class RequestCounts(msgspec.Struct):
    """`failed` counts every line of the error file; `cancelled` counts those of them that never ran
    because of a cancel.
    """

    total: int
    completed: int
    failed: int
    cancelled: int
    in_progress: int


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class BatchUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class BatchLimit(msgspec.Struct):
    period: str
    requests: int | None
    tokens: int | None
    enabled: bool
    cost: str | None


class BatchMaxErrors(msgspec.Struct):
    count: int | None
    share: float | None
    after: int | None


class BatchAnswers(msgspec.Struct):
    """The schema that answers must fit: a JSON schema, or "response_format" for the schema of each
    request.
    """

    schema: msgspec.Raw
    tries_max: int
    feedback: bool
    escalate_to: str | None


class BatchRetry(msgspec.Struct):
    """A batch's own rules for retries; null stands for the operator's rule."""

    attempts_max: int | None
    backoff_ms: int | None
    backoff_ms_max: int | None
    codes: list[str] | None


class CanaryForecast(msgspec.Struct):
    """The forecast for the whole batch, if the rest of it is like what is done."""

    cost: str
    input_tokens: int
    output_tokens: int


class BatchCanary(msgspec.Struct):
    """`state` is running, waiting, passed or failed.

    The forecast is set once the sample is done.
    """

    items: int
    max_error_share: float
    then: str
    state: str
    forecast: CanaryForecast | None


class BatchWebhook(msgspec.Struct, omit_defaults=True):
    """The URL that is notified of the end of the batch, and the kinds of ends.

    Only the answer that creates the batch has the signing secret.
    """

    url: str
    events: list[str]
    signing_secret: str | None = None


class Extras(msgspec.Struct):
    """Fields that OpenAI's object does not have.

    `shared_prefix_share` is the share of all prompt bytes that an earlier prompt had too.

    `cost` is the exact cost of its answers so far, in the currency of the operator's prices: the
    sum over its result lines. `slack_seconds` is how much sooner than its deadline the batch is
    expected to be done; null while there is no estimate, as is `eta`. `stopped_by` names the
    threshold that ended it. `schema_invalid` counts the requests that failed because no answer
    fitted. A retry names the batch it is `retry_of`, and `merged_output_file_id` holds the answers
    of both once it has ended. `work_units` is its estimated work in tokens, and `size_class` the
    class of that size; null unless it runs.
    """

    ordered: bool
    prefix_order: bool
    invalid_lines: str
    output_bytes: int
    error_bytes: int
    shared_prefix_share: float | None
    queue: str
    begin_by: int | None
    limits: list[BatchLimit]
    slack_seconds: int | None
    eta: EtaShown | None
    warnings: list[str]
    cost: str
    work_units: int | None
    size_class: str | None
    webhook: BatchWebhook | None
    priority: int
    not_before: int | None
    paused_at: int | None
    max_cost: str | None
    max_errors: BatchMaxErrors | None
    stopped_by: str | None
    canary: BatchCanary | None
    defaults: dict[str, Any]
    overrides: dict[str, Any]
    answers: BatchAnswers | None
    schema_invalid: int
    dedupe: bool
    deduplicated: int
    reuse_from: str | None
    reused: int
    retry: BatchRetry | None
    input_file_ids: list[str]
    retry_of: str | None
    retried_by: list[str]
    merged_output_file_id: str | None
    output_file_bytes_max: int | None
    output_file_ids: list[str]
    error_file_ids: list[str]


class Batch(msgspec.Struct):
    id: str
    object: str
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    tidegate: Extras


class LimitList(msgspec.Struct):
    """The limits of a key, with what they have left now."""

    object: str
    data: list[CallerLimit]


class Validation(msgspec.Struct):
    """The answer to a create with `validate_only`."""

    object: str
    valid: bool
    errors: BatchErrors
    request_counts: RequestCounts
    deduplicated: int
    reused: int
    tokens: Tokens
    cost: CostShown
    eta_seconds: EtaSeconds | None
    shared_prefix_share: float | None
    limits: list[BindingLimit]
    refused: list[Refusal]


class ModelObject(msgspec.Struct, omit_defaults=True):
    """A model.

    `max_model_len` is the longest context that all its servers take, as vLLM and SGLang report it;
    left out if unknown.
    """

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int = 0


class AnthropicModel(msgspec.Struct):
    type: str
    id: str
    display_name: str
    created_at: str


class AnthropicModels(msgspec.Struct):
    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ModelList(msgspec.Struct):
    object: str
    data: list[ModelObject]


def file_object(file: File) -> FileObject:
    return FileObject(
        id=file.id,
        object="file",
        bytes=file.size_bytes,
        created_at=file.created_at // 1000,
        expires_at=_seconds(file.expires_at),
        filename=file.filename,
        purpose=file.purpose,
        status="processed",
        status_details=None,
    )


def upload_object(upload: PartedUpload, file: File | None = None) -> UploadObject:
    return UploadObject(
        id=upload.id,
        object="upload",
        bytes=upload.request.size_bytes,
        created_at=upload.created_at // 1000,
        expires_at=upload.expires_at // 1000,
        filename=upload.request.filename,
        purpose=upload.request.purpose,
        status=upload.state.value,
        file=None if file is None else file_object(file),
    )


def batch(job: Job, forecast: Forecast = UNKNOWN, signing_secret: str | None = None) -> Batch:
    """Return the job as an OpenAI batch.

    `signing_secret` is that of its webhook, for the answer that creates the batch.
    """
    output_ids, error_ids = _result_ids(job)
    return Batch(
        id=job.id,
        object="batch",
        endpoint=job.endpoint,
        model=job.model,
        errors=_errors(job),
        input_file_id=job.input_file_id,
        completion_window=job.window_text,
        status=status(job),
        output_file_id=next(iter(output_ids), None),
        error_file_id=next(iter(error_ids), None),
        created_at=job.created_at // 1000,
        in_progress_at=_seconds(job.in_progress_at),
        expires_at=_seconds(job.expires_at),
        finalizing_at=_seconds(job.finalizing_at),
        completed_at=_seconds(job.completed_at),
        failed_at=_seconds(job.failed_at),
        expired_at=_seconds(job.expired_at),
        cancelling_at=_seconds(job.cancelling_at),
        cancelled_at=_seconds(job.cancelled_at),
        request_counts=RequestCounts(
            total=job.item_count,
            completed=job.answered_count,
            failed=job.failed_count + job.expired_count + job.cancelled_count,
            cancelled=job.cancelled_count,
            in_progress=job.item_count - job.done_count,
        ),
        usage=BatchUsage(
            input_tokens=job.usage.input_tokens,
            input_tokens_details=InputTokensDetails(job.usage.cached_tokens),
            output_tokens=job.usage.output_tokens,
            output_tokens_details=OutputTokensDetails(job.usage.reasoning_tokens),
            total_tokens=job.usage.input_tokens + job.usage.output_tokens,
        ),
        metadata=job.metadata,
        tidegate=_extras(job, forecast, signing_secret),
    )


def _extras(job: Job, forecast: Forecast, signing_secret: str | None) -> Extras:
    is_open = job.state not in JOB_ENDED and job.closing is None
    output_ids, error_ids = _result_ids(job)
    return Extras(
        ordered=job.ordered,
        prefix_order=job.prefix_order,
        invalid_lines=job.invalid_lines,
        output_bytes=job.output_bytes,
        error_bytes=job.error_bytes,
        shared_prefix_share=round(job.shared_prefix_bytes / job.prompt_bytes, 4) if job.prompt_bytes else None,
        queue=job.queue,
        begin_by=_seconds(job.begin_by),
        limits=[
            BatchLimit(
                one.period,
                one.requests,
                one.tokens,
                one.enabled,
                None if one.nano is None else units_text(one.nano),
            )
            for one in job.limits
        ],
        slack_seconds=forecast.slack_seconds,
        eta=forecast.eta,
        warnings=list(forecast.warnings),
        cost=units_text(job.cost_nano),
        work_units=forecast.work_units,
        size_class=None if forecast.work_units is None else size_class(forecast.work_units),
        webhook=BatchWebhook(job.webhook.url, list(job.webhook.events), signing_secret) if job.webhook else None,
        priority=job.controls.priority,
        not_before=_seconds(job.controls.not_before or None),
        paused_at=_seconds(job.paused_at) if is_open else None,
        max_cost=None if job.controls.max_cost_nano is None else units_text(job.controls.max_cost_nano),
        max_errors=_max_errors(job.controls.max_errors),
        stopped_by=job.stopped_by,
        canary=None if job.canary is None else _canary(job, job.canary),
        defaults=job.shape.defaults,
        overrides=job.shape.overrides,
        answers=_answers(job.answers),
        schema_invalid=job.schema_invalid_count,
        dedupe=job.shape.dedupe,
        deduplicated=job.copied.deduplicated,
        reuse_from=job.shape.reuse_from or None,
        reused=job.copied.reused,
        retry=_retry(job.shape.retry),
        input_file_ids=[job.input_file_id, *job.shape.more_inputs],
        retry_of=job.retry_of,
        retried_by=list(job.retried_by),
        merged_output_file_id=job.merged_file_id if job.state in JOB_ENDED else None,
        output_file_bytes_max=job.shape.output_file_bytes_max or None,
        output_file_ids=output_ids,
        error_file_ids=error_ids,
    )


def validation(estimate: JobEstimate) -> Validation:
    """Return the result of a dry run in the shape of the API."""
    bad, reported = estimate.bad_count, [*estimate.errors, *estimate.bad_lines]
    return Validation(
        object="batch.validation",
        valid=not estimate.errors and not any(one.count is None for one in estimate.refused),
        errors=BatchErrors("list", [BatchError(one.code, one.message, one.param, one.line) for one in reported]),
        request_counts=RequestCounts(estimate.item_count, 0, bad, 0, estimate.item_count - bad),
        deduplicated=estimate.deduplicated,
        reused=estimate.reused,
        tokens=estimate.tokens,
        cost=estimate.cost,
        eta_seconds=estimate.eta,
        shared_prefix_share=estimate.shared_prefix_share,
        limits=estimate.limits,
        refused=estimate.refused,
    )


def status(job: Job) -> str:
    """Return a job's status.

    A cancel shows at once, even for a job that waits for ingest and so cannot be `cancelling`.
    """
    if job.state is JobState.VALIDATING and job.closing is JobState.CANCELLED:
        return JobState.CANCELLING.value
    return job.state.value


def _answers(terms: AnswerTerms | None) -> BatchAnswers | None:
    if terms is None:
        return None
    schema = msgspec.Raw(terms.schema or b'"response_format"')
    return BatchAnswers(schema, terms.tries_max, terms.feedback, terms.escalate_to)


def _canary(job: Job, canary: Canary) -> BatchCanary:
    done, forecast = job.answered_count + job.failed_count, None
    if canary.state != "running" and done:
        forecast = CanaryForecast(
            units_text(job.cost_nano * job.run_count // done),
            job.usage.input_tokens * job.run_count // done,
            job.usage.output_tokens * job.run_count // done,
        )
    return BatchCanary(canary.items, canary.error_ppm / 1_000_000, canary.then, canary.state, forecast)


def _max_errors(errors: MaxErrors | None) -> BatchMaxErrors | None:
    if errors is None:
        return None
    share = None if errors.share_ppm is None else errors.share_ppm / 1_000_000
    return BatchMaxErrors(errors.count, share, errors.after or None)


def _result_ids(job: Job) -> tuple[list[str], list[str]]:
    """Return the ids of the output and error files.

    Before the end both still grow, so no id is returned.
    """
    if job.state not in JOB_ENDED:
        return [], []
    whole = [[job.output_file_id] if job.output_file_id else [], [job.error_file_id] if job.error_file_id else []]
    return list(job.parts.output) or whole[0], list(job.parts.error) or whole[1]


def _retry(asked: JobRetry | None) -> BatchRetry | None:
    if asked is None:
        return None
    codes = None if asked.codes is None else list(asked.codes)
    return BatchRetry(asked.attempts_max, asked.backoff_ms, asked.backoff_ms_max, codes)


def _errors(job: Job) -> BatchErrors | None:
    if not job.errors:
        return None
    return BatchErrors("list", [BatchError(error.code, error.message, error.param, error.line) for error in job.errors])


def _seconds(moment_ms: int | None) -> int | None:
    return None if moment_ms is None else moment_ms // 1000
