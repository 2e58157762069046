"""What a caller asks of a job beside its work: controls that may change while it runs, and the
items that a retry takes.
"""

from typing import Any

import msgspec

EVERYTHING = 1_000_000


class MaxErrors(msgspec.Struct, frozen=True):
    """How many failed items a job allows: a count, or a share of the done items, in millionths,
    once `after` are done.

    A share of EVERYTHING stops a job without an answer once `after` of the items that were sent
    have failed; bad lines, which are never sent, do not count there.
    """

    count: int | None = None
    share_ppm: int | None = None
    after: int = 0


class JobControls(msgspec.Struct, frozen=True):
    """Controls that a caller sets when creating a job and may change while it runs.

    `not_before` 0: it may begin at once.
    """

    priority: int = 0
    not_before: int = 0
    max_cost_nano: int | None = None
    max_errors: MaxErrors | None = None


NO_CONTROLS = JobControls()


class Canary(msgspec.Struct, frozen=True):
    """A sample of `items` items that runs before the others.

    More failures than `error_ppm` millionths of it stop the job; otherwise `then` says what comes
    after it.
    """

    items: int
    error_ppm: int
    then: str = "continue"
    state: str = "running"


class JobChange(msgspec.Struct, frozen=True):
    """A caller's change to a running job: some fields of its controls by name, and its window."""

    controls: dict[str, Any] = msgspec.field(default_factory=dict)
    window_ms: int | None = None
    window_text: str = ""


class RetryChoice(msgspec.Struct, frozen=True):
    """The items of an ended job that run again.

    They have one of these outcomes and, where some are named, one of these codes and one of these
    kinds of errors (by their ids).
    """

    outcomes: tuple[str, ...]
    codes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
