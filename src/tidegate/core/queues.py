"""The nouns of asynchronous sending: a queue of requests that a processor takes from, and what
comes back.

The processor is not ours: it may take a request twice, answer twice, answer late or never. What
this module says about a request is what the queue itself knows; it opens no connection and reads no
message.
"""

from enum import StrEnum

import msgspec

from tidegate.core.errors import TidegateError


class QueueAway(TidegateError):
    """The queue cannot be asked now. `is_unsure` says that it may have done what it was asked all the same."""

    def __init__(self, message: str, *, is_unsure: bool) -> None:
        super().__init__(message)
        self.is_unsure = is_unsure


class Put(StrEnum):
    """What became of laying a request down: it lies there now, it was out already and is ours to wait for, or its answer is recorded."""

    LAID = "laid"
    OUT = "out"
    RECORDED = "recorded"


class Withdrawal(StrEnum):
    """What became of a withdrawal: it worked, the request was taken, or it is another's."""

    WITHDRAWN = "withdrawn"
    TAKEN = "taken"
    NOT_OURS = "not_ours"


class QueueKind(StrEnum):
    """What the queue knows of a request that we wait for."""

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
    """What one look at the results came to: news of our own, and how many were garbage, unexpected,
    or there already."""

    found: tuple[Found, ...] = ()
    garbage: int = 0
    unknown: int = 0
    duplicate: int = 0
    has_more: bool = False


class QueueRequest(msgspec.Struct, frozen=True):
    """One request on its way into the queue. `score` orders it among the others, the least first;
    `token` tells this laying down from any other of the same id; after `keep_ms` no process waits
    for it any more."""

    id: str
    message: bytes
    score: float
    token: str
    keep_ms: int


class QueueState(msgspec.Struct, frozen=True):
    """How a queue stands, for those who operate it."""

    waiting: int
    oldest_deadline_s: float
    results: int
    unacknowledged: int
    dead: int
    evicts: bool
    is_persistent: bool
