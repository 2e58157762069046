"""What a deployment reported is left of its own limits, less what was sent since that report.

The number left is the deployment's own, so it counts what other callers and other processes sent, and what went out before its first
answer. It holds until its limits renew, or until a later answer says something else. Time is an argument, in the clock's monotonic
milliseconds.
"""

import math

import msgspec

from tidegate.core.budgets.budget import Limit
from tidegate.upstream.budgets.rate_limit_headers import QuotaLeft


class _RemainingQuota(msgspec.Struct):
    """So much may still be sent until a moment."""

    left: float = math.inf
    until_ms: float = 0.0

    def note(self, left: int | None, renew_ms: int, spent: int, now_ms: float) -> None:
        if left is not None:
            self.left, self.until_ms = float(left - spent), now_ms + renew_ms

    def opens_at_ms(self, needed: float) -> float:
        return self.until_ms if self.left < needed else 0.0


class Quota:
    def __init__(self) -> None:
        self._requests = _RemainingQuota()
        self._tokens = _RemainingQuota()

    def count(self, tokens: int) -> None:
        """A call goes out that may take so many tokens."""
        self._requests.left -= 1
        self._tokens.left -= tokens

    def note(self, left: QuotaLeft, since: int, tokens: int, now_ms: float) -> None:
        """Note what is left by the answer to a call, which takes about so many tokens. The calls that went out `since` are not in that
        figure; they are assumed to take as much as it does."""
        self._requests.note(left.requests, left.requests_renew_ms, since, now_ms)
        self._tokens.note(left.tokens, left.tokens_renew_ms, since * tokens, now_ms)

    def spent_of(self, limit: Limit, sent: int, tokens_each: int) -> tuple[int, int]:
        """Return how many requests and tokens of this limit are spent: by what is reported to be left or, without a report, by what
        this process sent in the last minute."""
        return (
            _spent(limit.requests or 0, self._requests.left, sent),
            _spent(limit.tokens or 0, self._tokens.left, sent * tokens_each),
        )

    def opens_at_ms(self, tokens: int = 1) -> float:
        """The moment from which a call with so many tokens may go out: 0 or in the past when it may now."""
        return max(self._requests.opens_at_ms(1), self._tokens.opens_at_ms(tokens))


def _spent(limit: int, left: float, sent: int) -> int:
    return min(limit, sent if math.isinf(left) else max(0, limit - int(left)))
