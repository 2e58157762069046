"""The nouns of asynchronous sending: a queue of requests that a processor takes from, and what
comes back.

The processor is not ours: it may take a request twice, answer twice, answer late or never. These
values hold only what the queue itself knows; this module opens no connection and reads no message.
"""

from enum import StrEnum

import msgspec

from tidegate.core.errors import TidegateError


class QueueAway(TidegateError):
    """The queue cannot be asked now.

    `is_unsure`: it may have carried out the command all the same.
    """

    def __init__(self, message: str, *, is_unsure: bool) -> None:
        super().__init__(message)
        self.is_unsure = is_unsure


class Put(StrEnum):
    """The results of putting a request: it lies there now, it was out already and is ours to wait
    for, or its answer is recorded.
    """

    LAID = "laid"
    OUT = "out"
    RECORDED = "recorded"


class Withdrawal(StrEnum):
    """The results of a withdrawal: it worked, the request was taken, or it is another's."""

    WITHDRAWN = "withdrawn"
    TAKEN = "taken"
    NOT_OURS = "not_ours"


class QueueKind(StrEnum):
    """The kinds of news of a request that we wait for."""

    ANSWERED = "answered"
    TOO_LARGE = "too_large"
    LOST = "lost"
    RECORDED = "recorded"


class Found(msgspec.Struct, frozen=True):
    """News of one request; `message` is its result as it came, where there is one."""

    request_id: str
    kind: QueueKind
    message: bytes = b""


class Sorted(msgspec.Struct, frozen=True):
    """The result of one look at the results: news of our own requests, and counts of garbage,
    unknown and duplicate ones.
    """

    found: tuple[Found, ...] = ()
    garbage: int = 0
    unknown: int = 0
    duplicate: int = 0
    has_more: bool = False


class QueueRequest(msgspec.Struct, frozen=True):
    """One request on its way into the queue.

    `score` orders it among the others, the least first; `token` tells this attempt to put it from
    any other with the same id; after `keep_ms` no process waits for it any more.
    """

    id: str
    message: bytes
    score: float
    token: str
    keep_ms: int


class QueueState(msgspec.Struct, frozen=True):
    """The state of a queue, for its operators."""

    waiting: int
    oldest_deadline_s: float
    results: int
    unacknowledged: int
    dead: int
    evicts: bool
    is_persistent: bool
