"""All errors of the engine, as one tree.

TidegateError
├── WorkerBroken            a worker met an internal error and handed back what it held
├── StoreError
│   ├── StoreUnavailable    it cannot be reached, or a commit may have happened: replay later
│   │   └── StoreFull       its disk is full: nothing was written
│   └── StoreRefused        it is there but unsafe to use: wrong version, unsafe settings
│       └── StoreTaken      another process writes to it, and may soon be done
├── LostRace                a guarded move found its row changed: another process was first
├── BlobError
│   ├── BlobUnavailable     the bytes cannot be reached or written now: try again later
│   ├── BlobMissing         there is no such blob
│   └── BlobVoid            this writer failed once; what it wrote does not count
├── LimitsUnavailable       the shared budgets cannot be asked: nothing new is sent
├── IngestFailed            an input could not be read, or its work file not written: try again
│   └── IngestCrashed       the pass crashed or did not end: the input may cause that each time
├── ApiProblem              a caller's mistake or a refusal, in words for the caller
├── UpstreamError           sorted once, at the border of `upstream/`
│   ├── Throttled           429: wait, nothing was billed
│   │   ├── Withheld        our own budgets are spent or cannot be asked: nothing was sent
│   │   └── RetryBudgetSpent    its deployment has had as many retries as its budget allows
│   ├── Unavailable         the call never started: refused, TLS, 503, no healthy deployment
│   ├── Refused             4xx: this request will never work
│   │   ├── Overspent       a budget in money has too little left for it: nothing was sent
│   │   ├── Untranslatable  its body has no translation for the engine of its model
│   │   └── Unbounded       nothing says what it can cost, and a budget in money binds it
│   │       └── SurchargeUnpriced   it asks for what no price covers
│   ├── Ambiguous           5xx, 408, broken or timed out after sending: may have been billed
│   ├── BrokenAnswer        2xx that is not an answer
│   │   └── AnswerUnusable  the model wrote it so: that says nothing about its deployment
│   │       └── AnswerTooLong   longer than our limit
│   ├── KeyRejected         401 or 403 on our own key: the deployment is paused
│   ├── HandedBack          cut by us, for an interactive call or with its group: send it later
│   ├── RecordedElsewhere   another process had its answer and recorded it
│   └── PoolExhausted       our own connection ceiling: no deployment's health is harmed
└── SettingsError           a configuration that cannot be used, with what to do about it
"""


class TidegateError(Exception):
    """The root of everything that this program raises on purpose."""


class WorkerBroken(TidegateError):
    """A worker met an internal error.

    It has finished or aborted its calls and handed back what it held.
    """


class StoreError(TidegateError):
    pass


class StoreUnavailable(StoreError):
    pass


class StoreFull(StoreUnavailable):
    pass


class StoreRefused(StoreError):
    pass


class StoreTaken(StoreRefused):
    """Another process has the store. `holder` describes that process."""

    def __init__(self, message: str, holder: str = "another process") -> None:
        super().__init__(message)
        self.holder = holder


class LostRace(TidegateError):
    pass


class BlobError(TidegateError):
    pass


class BlobUnavailable(BlobError):
    pass


class BlobMissing(BlobError):
    pass


class BlobVoid(BlobError):
    pass


class LimitsUnavailable(TidegateError):
    pass


class IngestFailed(TidegateError):
    pass


class IngestCrashed(IngestFailed):
    pass


class SettingsError(TidegateError):
    pass


class ApiProblem(TidegateError):
    """A problem for the caller. Each front door writes it in its own shape."""

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class UpstreamError(TidegateError):
    """A failed call.

    `status` and `body` are the upstream's own, where it answered; `retry_after_ms` is what it asked
    for.
    """

    reason = "upstream_error"
    billed = False

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        body: bytes = b"",
        retry_after_ms: int | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.body = body
        self.retry_after_ms = retry_after_ms
        self.code = code or self.reason

    def put_off(self, retry_after_ms: int | None) -> None:
        """Set how long to wait until another try is worth it; None when it may be made now."""
        self.retry_after_ms = retry_after_ms

    def redact(self, secret: str) -> None:
        """Hide a secret that the upstream's answer quotes."""
        if self.body:
            self.body = self.body.replace(secret.encode(), b"***")


class Throttled(UpstreamError):
    reason = "upstream_throttled"


class Withheld(Throttled):
    """Our own limits hold a call back.

    `spent` names the budget, and `until_ms` is the monotonic moment to ask again.
    """

    reason = "budget_spent"
    # Limits that free themselves within moments: a call waits for these in place.
    BRIEF = frozenset({"budget_spent", "budget_reserved", "max_parallel_requests_exceeded"})

    def __init__(
        self,
        message: str,
        *,
        until_ms: float = 0.0,
        spent: str = "",
        retry_after_ms: int | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms, code=code)
        self.until_ms = until_ms
        self.spent = spent


class RetryBudgetSpent(Throttled):
    """A retry that would go to a deployment which has had as many retries as its budget allows."""

    reason = "retry_budget_spent"


class Unavailable(UpstreamError):
    reason = "upstream_unavailable"


class Refused(UpstreamError):
    reason = "upstream_refused"


class Overspent(Refused):
    reason = "budget_exceeded"


class Unbounded(Refused):
    reason = "max_tokens_required"


class SurchargeUnpriced(Unbounded):
    reason = "surcharge_unpriced"


class Untranslatable(Refused):
    pass


class Ambiguous(UpstreamError):
    reason = "upstream_ambiguous"
    billed = True


class BrokenAnswer(UpstreamError):
    reason = "invalid_upstream_response"
    billed = True


class AnswerUnusable(BrokenAnswer):
    pass


class AnswerTooLong(AnswerUnusable):
    pass


class KeyRejected(UpstreamError):
    reason = "upstream_key_rejected"


class HandedBack(UpstreamError):
    reason = "handed_back"
    billed = True


class RecordedElsewhere(UpstreamError):
    """Another process had the same call's answer and recorded it: there is nothing to send
    again."""

    reason = "recorded_elsewhere"


class PoolExhausted(UpstreamError):
    reason = "upstream_pool_timeout"
