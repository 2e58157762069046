"""What a caller asks of a job beside its work: controls that may change while it runs, and a retry of some of its items."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class MaxErrors:
    """How many failed items a job allows: a count, or a share of those that are done, in millionths, once `after` of them are."""

    count: int | None = None
    share_ppm: int | None = None
    after: int = 0


@dataclass(frozen=True, slots=True)
class JobControls:
    """What a caller says when a job is created and may change while it runs. `not_before` is 0 when it may begin at once."""

    priority: int = 0
    not_before: int = 0
    max_cost_nano: int | None = None
    max_errors: MaxErrors | None = None


NO_CONTROLS = JobControls()


@dataclass(frozen=True, slots=True)
class Canary:
    """A sample of so many items that runs before the others. More failures than `error_ppm` millionths of it stop the job; else `then`
    says what comes after it."""

    items: int
    error_ppm: int
    then: str = "continue"
    state: str = "running"


@dataclass(frozen=True, slots=True)
class JobChange:
    """What a caller changes of a running job: some fields of its controls by name, and its window."""

    controls: dict[str, Any] = field(default_factory=dict)
    window_ms: int | None = None
    window_text: str = ""


@dataclass(frozen=True, slots=True)
class RetryChoice:
    """Which items of an ended job run again: those with one of these outcomes and, where some are named, one of these codes and one of
    these kinds of errors (by their ids)."""

    outcomes: tuple[str, ...]
    codes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A retry that is about to be made: of which job, of which of its items, and under which ids. Without controls it has those of the
    first job."""

    of: str
    choice: RetryChoice
    job_id: str
    retry_file_id: str
    merged_file_id: str
    webhook_secret: bytes = field(repr=False)
    controls: JobControls | None = None
    canary: Canary | None = None
    traceparent: str | None = None
