"""The quota that a deployment reported as left of its limits, less the calls sent since.

The number comes from the deployment, so it includes the calls of other callers and processes, and
those sent before the first answer. It holds until the limits renew or a later answer reports
another number. Time is an argument, in the clock's monotonic milliseconds.
"""

import math

import msgspec

from tidegate.core.budgets.budget import Limit
from tidegate.upstream.budgets.rate_limit_headers import QuotaLeft


class _RemainingQuota(msgspec.Struct):
    """The requests or tokens that may still be sent until a moment."""

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
        """Count a call that goes out and may take these tokens."""
        self._requests.left -= 1
        self._tokens.left -= tokens

    def note(self, left: QuotaLeft, since: int, tokens: int, now_ms: float) -> None:
        """Note the quota left at the answer to a call that takes about these tokens.

        The figure does not include the calls that went out `since`; each is assumed to take as
        many.
        """
        self._requests.note(left.requests, left.requests_renew_ms, since, now_ms)
        self._tokens.note(left.tokens, left.tokens_renew_ms, since * tokens, now_ms)

    def spent_of(self, limit: Limit, sent: int, tokens_each: int) -> tuple[int, int]:
        """Return how many requests and tokens of this limit are spent.

        This follows from the reported rest or, without a report, from this process's last minute.
        """
        return (
            _spent(limit.requests or 0, self._requests.left, sent),
            _spent(limit.tokens or 0, self._tokens.left, sent * tokens_each),
        )

    def opens_at_ms(self, tokens: int = 1) -> float:
        """Return the moment from which a call with these tokens may go out.

        A past one, or 0, means now.
        """
        return max(self._requests.opens_at_ms(1), self._tokens.opens_at_ms(tokens))


def _spent(limit: int, left: float, sent: int) -> int:
    return min(limit, sent if math.isinf(left) else max(0, limit - int(left)))
