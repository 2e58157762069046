"""Lists of jobs: which of them are asked for, and in which order."""

from enum import StrEnum

import msgspec

from tidegate.core.nouns import FOREVER_MS


class JobFilter(msgspec.Struct, frozen=True):
    """Which of a tenant's jobs are asked for; what is not given leaves them all. `words` may stand anywhere in a job's id, endpoint, model,
    metadata or the name of its input, in any case. Times are milliseconds, the last one excluded."""

    status: str | None = None
    model: str | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    from_ms: int = 0
    to_ms: int = FOREVER_MS
    error_code: str | None = None
    words: str | None = None


class JobSort(StrEnum):
    """How a list of jobs is sorted: newest first; the next deadline first, of those that have not ended; largest first; the most of them
    failed first, of those with failures; dearest first, of those that cost anything."""

    CREATED = "created"
    DEADLINE = "deadline"
    SIZE = "size"
    FAILED = "failed"
    COST = "cost"


# One statement has room for so many.
FILTER_PAIRS_MAX = 4
