"""Operations: one action on every job that matches a filter, which workers carry out a few jobs at
a time.
"""

import msgspec

from tidegate.core.job_lists import JobFilter
from tidegate.core.states import OperationState

RETRY = "retry"


class OperationScope(msgspec.Struct, frozen=True):
    """The action of an operation and its jobs: of one organization, or of all, those that match the
    filter and that it can change.
    """

    action: str
    org: str | None = None
    jobs: JobFilter = msgspec.field(default_factory=JobFilter)


class Impact(msgspec.Struct, frozen=True):
    """The impact of an operation.

    `tokens` and `cost_nano` are what its items are expected to use from now on. `first_deadline` is
    that of the job that must end first (None without one), and `due_soon` counts the jobs that must
    end within an hour.
    """

    jobs: int
    items: int
    tokens: int
    cost_nano: int
    first_deadline: int | None
    due_soon: int


class OperationFailure(msgspec.Struct, frozen=True):
    """The reason why one job could not be changed."""

    job_id: str
    code: str
    message: str


class JobOperation(msgspec.Struct, frozen=True):
    """An operation.

    `done` and `failed` count the jobs handled so far; `cursor_at` and `cursor_id` name the last of
    them.
    """

    id: str
    actor: str
    scope: OperationScope
    state: OperationState
    created_at: int
    ended_at: int | None
    impact: Impact
    done: int
    failed: int
    last_failure: OperationFailure | None
    cursor_at: int
    cursor_id: str
