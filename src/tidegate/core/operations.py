"""Operations: one action on every job that matches a filter, which workers carry out a few jobs at a time."""

from dataclasses import dataclass, field

from tidegate.core.job_lists import JobFilter
from tidegate.core.states import OperationState

RETRY = "retry"


@dataclass(frozen=True, slots=True)
class OperationScope:
    """What is done, and to which jobs: those of one organization, or of all, that match the filter and that the action can change."""

    action: str
    org: str | None = None
    jobs: JobFilter = field(default_factory=JobFilter)


@dataclass(frozen=True, slots=True)
class Impact:
    """What an operation is about. `tokens` and `cost_nano` are what its items are expected to use from now on. `first_deadline` is
    that of the job that must end first (None without one), and `due_soon` counts the jobs that must end within an hour."""

    jobs: int
    items: int
    tokens: int
    cost_nano: int
    first_deadline: int | None
    due_soon: int


@dataclass(frozen=True, slots=True)
class OperationFailure:
    """Why one job could not be changed."""

    job_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class JobOperation:
    """`done` and `failed` count the jobs that it has come to; `cursor_at` and `cursor_id` name the last of them."""

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
