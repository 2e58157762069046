"""What a caller asks of a job beside its work: controls that may change while it runs, and which of its items a retry takes."""

from typing import Any

import msgspec

EVERYTHING = 1_000_000


class MaxErrors(msgspec.Struct, frozen=True):
    """How many failed items a job allows: a count, or a share of those that are done, in millionths, once `after` of them are. A share of
    EVERYTHING stops a job that has no answer when `after` items were sent in vain; bad lines, which are never sent, do not count there."""

    count: int | None = None
    share_ppm: int | None = None
    after: int = 0


class JobControls(msgspec.Struct, frozen=True):
    """What a caller says when a job is created and may change while it runs. `not_before` is 0 when it may begin at once."""

    priority: int = 0
    not_before: int = 0
    max_cost_nano: int | None = None
    max_errors: MaxErrors | None = None


NO_CONTROLS = JobControls()


class Canary(msgspec.Struct, frozen=True):
    """A sample of so many items that runs before the others. More failures than `error_ppm` millionths of it stop the job; else `then`
    says what comes after it."""

    items: int
    error_ppm: int
    then: str = "continue"
    state: str = "running"


class JobChange(msgspec.Struct, frozen=True):
    """What a caller changes of a running job: some fields of its controls by name, and its window."""

    controls: dict[str, Any] = msgspec.field(default_factory=dict)
    window_ms: int | None = None
    window_text: str = ""


class RetryChoice(msgspec.Struct, frozen=True):
    """Which items of an ended job run again: those with one of these outcomes and, where some are named, one of these codes and one of
    these kinds of errors (by their ids)."""

    outcomes: tuple[str, ...]
    codes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
