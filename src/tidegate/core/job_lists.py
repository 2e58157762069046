"""Lists of jobs: filters and orders."""

from enum import StrEnum

import msgspec

from tidegate.core.nouns import FOREVER_MS


class JobFilter(msgspec.Struct, frozen=True):
    """A filter for a tenant's jobs; a field that is not given matches all of them.

    `words` may occur anywhere in a job's id, endpoint, model, metadata or the name of its input, in
    any case. Times are milliseconds, the last one excluded.
    """

    status: str | None = None
    model: str | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    from_ms: int = 0
    to_ms: int = FOREVER_MS
    error_code: str | None = None
    words: str | None = None


class JobSort(StrEnum):
    """The orders of a list of jobs.

    Newest first; the next deadline first, among jobs that have not ended; largest first; most
    failures first, among jobs with failures; dearest first, among jobs that cost anything.
    """

    CREATED = "created"
    DEADLINE = "deadline"
    SIZE = "size"
    FAILED = "failed"
    COST = "cost"


# One statement has room for this many.
FILTER_PAIRS_MAX = 4
