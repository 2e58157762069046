"""Traces of jobs and calls, for OpenTelemetry collectors. The SDK is loaded only if they are on."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING

from tidegate.core.nouns import Job

if TYPE_CHECKING:
    from tidegate.tracing.spans import Spans

# None while traces are off.
ACTIVE: "Spans | None" = None
# The `traceparent` header of the request that this task answers.
CALLER: ContextVar[str] = ContextVar("caller", default="")
# The job whose step this task takes.
JOB: ContextVar[Job | None] = ContextVar("job", default=None)
_OFF: AbstractContextManager[None] = nullcontext()


def start(version: str) -> None:
    """Begin to send spans to the collector that the OTEL_* variables name.

    Raise ImportError if OpenTelemetry is not installed.
    """
    global ACTIVE
    from tidegate.tracing.spans import Spans

    ACTIVE = Spans(version)


def stop(timeout_s: float) -> None:
    """Send the waiting spans, for at most `timeout_s`, and stop."""
    global ACTIVE
    if ACTIVE is not None:
        ACTIVE.close(timeout_s)
        ACTIVE = None


def end_job(job: Job | None) -> None:
    """Send the span of a job that ended just now."""
    if ACTIVE is not None and job is not None:
        ACTIVE.end_job(job)


def postpone(job: Job, error: Exception) -> None:
    """Send a span for a step of a job that failed and will be tried again."""
    if ACTIVE is not None:
        ACTIVE.postpone(job, error)


def step_of(job: Job) -> AbstractContextManager[None]:
    """Count operations on blobs inside this context as a job's."""
    return _OFF if ACTIVE is None else _step_of(job)


def storage(operation: str) -> AbstractContextManager[None]:
    """Time an operation on a blob: `store`, `retrieve` or `delete`."""
    return _OFF if ACTIVE is None else ACTIVE.storage(operation)


@contextmanager
def _step_of(job: Job) -> Iterator[None]:
    before = JOB.set(job)
    try:
        yield
    finally:
        JOB.reset(before)
