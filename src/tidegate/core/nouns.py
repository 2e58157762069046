"""The nouns of the engine, as stages pass them on.

They are msgspec structs: each costs a fifth of a dataclass to make, and its class a fortieth to
load.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b

import msgspec

from tidegate.core.answer_terms import AnswerTerms
from tidegate.core.audio_file import AudioFile
from tidegate.core.budgets.budget import Budget, Limit
from tidegate.core.files import Placed
from tidegate.core.job_controls import NO_CONTROLS, Canary, JobControls, RetryChoice
from tidegate.core.job_shape import NO_COPIES, PLAIN, WHOLE, CopiedItems, JobRetry, JobShape, ResultParts
from tidegate.core.states import JobKind, JobState, Outcome

# The first bytes of a request by which requests are grouped for an engine, where no neighbour of
# its batch shares a beginning.
PREFIX_BYTES = 1024
# Later than every moment.
FOREVER_MS = 1 << 62


# The organization of callers without a key.
DEFAULT_TENANT = "default"


class Caller(msgspec.Struct, frozen=True):
    """The caller of a request: every statement about a tenant's things carries its id.

    `limits` and `parallel_max` are the key's own.
    """

    tenant_id: str
    key_id: str | None = None
    team: str | None = None
    user: str | None = None
    scopes: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    resources: frozenset[str] = frozenset()
    limits: tuple[Limit, ...] = ()
    parallel_max: int = 0
    environments: frozenset[str] = frozenset()


class Usage(msgspec.Struct, frozen=True, gc=False):
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @staticmethod
    def total(parts: "Iterable[Usage]") -> "Usage":
        input_tokens = cached_tokens = output_tokens = reasoning_tokens = 0
        for part in parts:
            input_tokens += part.input_tokens
            cached_tokens += part.cached_tokens
            output_tokens += part.output_tokens
            reasoning_tokens += part.reasoning_tokens
        return Usage(input_tokens, cached_tokens, output_tokens, reasoning_tokens)


class AnswerTry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An answer that was paid for: its model and deployment, its usage and cost, and its
    problem."""

    model: str
    deployment: str
    usage: Usage
    cost_nano: tuple[int, int, int]
    problem: str | None


class JobWebhook(msgspec.Struct, frozen=True):
    """The URL that is notified of one job's end, and of which ends.

    The secret is drawn with the job and is not read back with it. Where `door` names a front door,
    that door words the events; `headers` are sent along and are not read back either.
    """

    url: str
    events: tuple[str, ...]
    secret: bytes = b""
    door: str | None = None
    headers: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"JobWebhook(url={self.url!r}, events={self.events!r}, door={self.door!r})"


class JobRequest(msgspec.Struct, frozen=True):
    """A caller's request for a new job, already checked by the front door.

    With `door`, text of that door's own, the outcome of each item is recorded as an event.
    """

    endpoint: str
    input_file_id: str
    window_ms: int
    window_text: str
    begin_within_ms: int | None = None
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    ordered: bool = False
    prefix_order: bool = True
    invalid_lines: str = "fail"
    queue: str = "default"
    limits: tuple[Limit, ...] = ()
    webhook: JobWebhook | None = None
    door: str | None = None
    controls: JobControls = NO_CONTROLS
    shape: JobShape = PLAIN
    canary: Canary | None = None
    kind: JobKind = JobKind.BATCH
    answers: AnswerTerms | None = None
    traceparent: str | None = None


class LineError(msgspec.Struct, frozen=True):
    """One entry of a job's `errors`: the fault, and its 1-based line."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Job(msgspec.Struct, frozen=True):
    id: str
    tenant_id: str
    key_id: str | None
    endpoint: str
    input_file_id: str
    window_text: str
    state: JobState
    closing: JobState | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    metadata: dict[str, str] | None
    output_expires_after_s: int | None
    ordered: bool
    prefix_order: bool
    invalid_lines: str
    errors: tuple[LineError, ...]
    model: str | None
    item_count: int
    answered_count: int
    failed_count: int
    expired_count: int
    cancelled_count: int
    unused_count: int
    usage: Usage
    output_file_id: str | None
    error_file_id: str | None
    output_bytes: int
    error_bytes: int
    work_blob_id: str | None
    work_bytes: int
    prompt_bytes: int
    shared_prefix_bytes: int
    share_owner: str
    queue: str
    begin_by: int | None
    limits: tuple[Limit, ...] = ()
    cost_nano: int = 0
    webhook: JobWebhook | None = None
    door: str | None = None
    controls: JobControls = NO_CONTROLS
    shape: JobShape = PLAIN
    canary: Canary | None = None
    kind: JobKind = JobKind.BATCH
    paused_at: int | None = None
    begun_at: int | None = None
    parts: ResultParts = WHOLE
    stopped_by: str | None = None
    answers: AnswerTerms | None = None
    schema_invalid_count: int = 0
    unsent_count: int = 0
    retry_of: str | None = None
    retry_choice: RetryChoice | None = None
    retry_file_id: str | None = None
    merged_file_id: str | None = None
    retried_by: tuple[str, ...] = ()
    copied: CopiedItems = NO_COPIES
    traceparent: str | None = None

    @property
    def done_count(self) -> int:
        return self.answered_count + self.failed_count + self.expired_count + self.cancelled_count

    @property
    def run_count(self) -> int:
        """Return how many items are run; the others get their lines when the job is published."""
        return self.item_count - self.copied.count


class SlicePlan(msgspec.Struct, frozen=True):
    """A slice as ingest cuts it: a range of item numbers and the byte range of the work file that
    holds them. Items that cannot be sent have no model and no endpoint.
    """

    first: int
    count: int
    model: str
    endpoint: str
    work_at: int
    work_bytes: int
    work_units: int


class IngestPlan(msgspec.Struct, frozen=True):
    """The result of reading an input; slices are in work order.

    The first `sample_count` items are the job's canary; None without one. `file_bytes` are the part
    of `prompt_bytes` that is letters of files and no text.
    """

    item_count: int
    model: str | None
    slices: list[SlicePlan]
    work_bytes: int
    prompt_bytes: int
    shared_prefix_bytes: int
    errors: list[LineError] = msgspec.field(default_factory=list)
    sample_count: int | None = None
    copied: CopiedItems = NO_COPIES
    file_bytes: int = 0


class IngestSource(msgspec.Struct, frozen=True):
    """The data that a worker needs to ingest a job.

    `blob_id` is None when the input is gone. `key_names` are the models and the resources that the
    job's key may use, as the store keeps them; None without a key. `more` are the files after the
    first: id, hash and blob of each.
    """

    job: Job
    sha256: str
    blob_id: str | None
    tenant: str
    key_names: tuple[str, str] | None
    more: tuple[tuple[str, str, str | None], ...] = ()


class JobStart(msgspec.Struct, frozen=True):
    """A job whose input was read.

    `weight_milli` is a thousand times the weight of its flows; with None flows keep their weight,
    and a new flow has 1.
    """

    job_id: str
    token: str
    plan: IngestPlan
    work_blob_id: str
    output_file_id: str
    error_file_id: str
    weight_milli: int | None = None


class Attempts(msgspec.Struct, frozen=True):
    """The record of an item that failed at least once and may be tried again, not before `wait_ms`
    from now. `tries` are its answers that did not fit.
    """

    number: int
    count: int
    wait_ms: int
    reason: str
    hand_backs: int = 0
    alone_losses: int = 0
    tries: tuple[AnswerTry, ...] = ()


class LeasedSlice(msgspec.Struct, frozen=True):
    """A slice that this worker may run until its heartbeat fails.

    `read_first` is the number of the first item in the byte range: a slice that was split out of a
    larger one reads the larger one's range and takes only its own numbers. `tenant` is the tenant's
    name; `item_units` are the work units of a mean item; `limits` and `retry` are the job's own.
    `interactive_in_ms` from now on its items go like interactive calls; None where they never do.
    """

    job_id: str
    tenant_id: str
    endpoint: str
    model: str
    first: int
    count: int
    read_first: int
    work_blob_id: str
    work_at: int
    work_bytes: int
    item_units: int
    lost_count: int
    token: str
    expires_in_ms: int
    tenant: str = ""
    share_owner: str = ""
    key_id: str | None = None
    user: str | None = None
    team: str | None = None
    limits: tuple[Limit, ...] = ()
    done: frozenset[int] = frozenset()
    attempts: dict[int, Attempts] = msgspec.field(default_factory=dict)
    answers: AnswerTerms | None = None
    retry: JobRetry | None = None
    betas: str = ""
    traceparent: str | None = None
    interactive_in_ms: int | None = None


class WorkerDuty(msgspec.Struct, frozen=True):
    """The duty of a process.

    With a share owner it runs the jobs of that owner alone. `servers` is a name for the model
    servers of a `tidegate run`, whose rates are kept apart from those of others with the same
    model.
    """

    runs_items: bool = True
    share_owner: str = ""
    servers: str = ""


EVERY_JOB = WorkerDuty()


class Holding(msgspec.Struct, frozen=True):
    """The store's entry of one slice that a worker holds, at a heartbeat.

    `must_wait`: its job is paused, or must not run yet.
    """

    job_id: str
    first: int
    token: str
    state: JobState
    closing: JobState | None
    closing_for_ms: int
    must_wait: bool
    expires_in_ms: int


class Item(msgspec.Struct):
    """A line of the work file that a worker has.

    `line` is the caller's own line; `body` is the request inside it, byte for byte.
    """

    number: int
    custom_id: bytes
    body: bytes
    attempt_count: int = 0
    wait_ms: int = 0
    hand_backs: int = 0
    alone_losses: int = 0
    # How many bytes of its body its neighbours in the work file share; 0 when they share too
    # little.
    prefix_bytes: int = 0
    # Its answers that did not fit, and the text of the last one, for as long as this worker has the
    # item.
    tries: tuple[AnswerTry, ...] = ()
    rejected_text: str = ""

    def count_attempts(self, attempt_count: int, hand_backs: int) -> None:
        """Note how many attempts are used up by now, and how often a call was handed back for an
        interactive one.
        """
        self.attempt_count = attempt_count
        self.hand_backs = hand_backs

    def note_answer(self, tries: tuple[AnswerTry, ...], rejected_text: str) -> None:
        """Note the answers that did not fit, and the text of the last one."""
        self.tries = tries
        self.rejected_text = rejected_text


class Call(msgspec.Struct, frozen=True, gc=False):
    """One upstream request.

    `attempt_count` is how many calls of its item counted before: above 0 this is a retry.
    """

    job_id: str
    number: int
    endpoint: str
    model: str
    body: bytes
    idempotency_key: str
    deadline_ms: float
    attempt_count: int = 0
    grace_ms: int = 0
    begin_by_ms: float = math.inf
    budgets: tuple[Budget, ...] = ()
    tokens: int = 0
    share_owner: str = ""
    prefix_salt: bytes = b""
    prefix_bytes: int = 0
    hand_backs: int = 0
    items: int = 1
    parallel: tuple[tuple[str, int], ...] = ()
    models: frozenset[str] = frozenset()
    audio: AudioFile | None = None
    betas: str = ""
    trace_header: bytes = b""
    may_begin: Callable[[], bool] | None = None

    @property
    def prefix_group(self) -> str:
        """Return one word for all requests that begin alike, because engines cache prompts'
        beginnings.
        """
        if not self.prefix_salt:
            return ""
        return blake2b(self.body[: self.prefix_bytes or PREFIX_BYTES], digest_size=8, salt=self.prefix_salt).hexdigest()


class Answer(msgspec.Struct, frozen=True, gc=False):
    """A whole 2xx answer.

    `body` is one line of JSON. `is_grouped`: other items shared its call. `priced` is the usage
    that budgets were settled with, or its part of that; None where that is the reported usage, or
    where no budgets were asked.
    """

    status: int
    body: bytes
    usage: Usage
    deployment: str
    is_grouped: bool = False
    priced: Usage | None = None


class Finished(msgspec.Struct, frozen=True, gc=False):
    """One finished item on its way to the store: its line has `size_bytes` and follows those of its
    predecessors in the log.
    """

    number: int
    outcome: Outcome
    size_bytes: int
    slice_first: int
    token: str
    usage: Usage = Usage()
    attempt_count: int = 0
    model: str | None = None
    units: int = 0
    deployment: str = ""
    cost_nano: tuple[int, int, int] = (0, 0, 0)
    crc32: int | None = None
    took_ms: int = 0
    tries: tuple[AnswerTry, ...] = ()
    is_schema_invalid: bool = False


class ItemVerdict(msgspec.Struct, frozen=True, gc=False):
    """The result of an item: its line for a result file, and what the store must know of it."""

    job_id: str
    number: int
    line: bytes
    finished: Finished


class JobFlush(msgspec.Struct, frozen=True):
    """The part of one flush that belongs to one job.

    Lines lie in `finished` order from `placed.at` on, per log.
    """

    job_id: str
    answers: list[Finished] = msgspec.field(default_factory=list)
    answers_placed: Placed | None = None
    errors: list[Finished] = msgspec.field(default_factory=list)
    errors_placed: Placed | None = None
    attempts: list[tuple[str, Attempts]] = msgspec.field(default_factory=list)


class Recorded(msgspec.Struct, frozen=True):
    """The result of recording one job's part of a flush.

    `stopped`: it passed a threshold of its job, which closes. `let_go`: it ended the job's canary,
    and the other items may run.
    """

    job_id: str
    new_count: int
    unused_count: int
    closed: bool
    complete: bool
    stopped: bool = False
    let_go: bool = False


class Idempotency(msgspec.Struct, frozen=True):
    """A caller's Idempotency-Key and the hash of the request that it came with."""

    key: str
    body_hash: str


class JobEnd(msgspec.Struct, frozen=True):
    """How a job is published: how long its results are kept, and the status of its answer if the
    job is a response.
    """

    keep_ms: int | None = None
    response_status: str = "completed"


class KeepTimes(msgspec.Struct, frozen=True):
    """How long things are kept after a job's end, and how many rows a round of upkeep takes."""

    completed_ms: int = 7 * 86_400_000
    failed_ms: int = 14 * 86_400_000
    metadata_ms: int = 30 * 86_400_000
    audit_ms: int = 365 * 86_400_000
    orphan_ms: int = 86_400_000
    scan_max: int = 200

    def results_ms(self, job: "Job") -> int | None:
        """Return how long a closing job's results are kept by default; None: as long as its record,
        as a response's are.
        """
        if job.kind is not JobKind.BATCH:
            return None
        return self.completed_ms if job.closing is JobState.COMPLETED else self.failed_ms


class PublishTurns(msgspec.Struct, frozen=True):
    """The closed jobs to publish: those that cost so many bytes, and at most so many of each tenant
    before the next look.
    """

    bytes_min: int = 0
    bytes_max: int = 1 << 62
    tenant_max: int = 50
    count_max: int = 50


class Quotas(msgspec.Struct, frozen=True):
    """The most that one tenant may have waiting and create; 0 switches a limit off.

    Pending jobs count for the share owner and for the key. A background response counts against
    `pending_responses_max` alone.
    """

    pending_jobs_max: int = 0
    queued_items_max: int = 0
    stored_bytes_max: int = 0
    jobs_per_hour_max: int = 0
    bytes_per_day_max: int = 0
    queued_units_max: int = 0
    creation: tuple[Budget, ...] = ()
    pending_jobs_per_key_max: int = 0
    pending_responses_max: int = 0


class ResponseInput(msgspec.Struct, frozen=True):
    """The request of a background response, durable as the first bytes of its job's work file: the
    file that shows it, and its hash.
    """

    file_id: str
    sha256: str
    idempotency: Idempotency | None


class ResponseTerms(msgspec.Struct, frozen=True):
    """The terms of a background response besides its request, which is kept for `keep_ms`;
    `interactive_after_ms` is counted from now.
    """

    endpoint: str
    keep_ms: int
    share_owner: str
    quotas: Quotas
    interactive_after_ms: int | None = None


class UnrunLines(msgspec.Struct, frozen=True):
    """Lines of items that were not run, which publish adds to the end of a result file: number,
    outcome and size of each. `schema_invalid` counts those that say that no answer fitted.
    """

    placed: Placed
    numbers: "array[int]"
    outcomes: list[Outcome]
    sizes: "array[int]"
    schema_invalid: int = 0

    def lines(self) -> Iterator[tuple[int, Outcome, int]]:
        return zip(self.numbers, self.outcomes, self.sizes, strict=True)


class Rewrite(msgspec.Struct, frozen=True):
    """A result file in input order: where it lies, its items in that order, and each one's new
    place.
    """

    placed: Placed
    numbers: "array[int]"
    places: "array[int]"


class ModelPace(msgspec.Struct, frozen=True):
    """The recent pace of a model, and the flows that share it now.

    `rate` is in work units a second; None while nothing was answered. `ratio` is the tokens that a
    unit really cost. The pace changes slowly, so it is read less often than decisions are made.
    """

    rate: float | None = None
    ratio: float = 1.0
    flow_count: int = 0
    weights: float = 0.0


class AwakeFlow(msgspec.Struct, frozen=True):
    """A flow as a sweep sees it.

    `has_spent`: a job of it has no slice of the model left. `is_active`: it has slices out or
    ready.
    """

    model: str
    served: int
    share_owner: str
    weight_milli: int
    tenant: str
    has_spent: bool
    is_active: bool
