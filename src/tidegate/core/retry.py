"""Decide when a failed call is made again and when it is given up, from the error's class alone.

Only calls that may have been billed are counted. Waits for capacity, for a deployment that is away
or for a rejected key of ours say nothing about the item. So they never use up its attempts and end
only at the job's deadline.
"""

import msgspec
from msgspec.structs import replace

from tidegate.core.errors import Ambiguous, BrokenAnswer, RecordedElsewhere, Refused, UpstreamError
from tidegate.core.job_shape import JobRetry
from tidegate.core.wording import in_words

# An item fails when this many workers were lost while each ran only this item (`alone_losses`).
ALONE_LOSSES_MAX = 3
# The rest of an item whose answer another process has recorded: longer than a worker keeps an item
# that waits.
RECORDED_MS = 6_000


class RetryPolicy(msgspec.Struct, frozen=True):
    """The rules for retries.

    Backoff grows from `backoff_ms` to `backoff_ms_max` with full jitter.

    Without `codes` the class of an error decides. Half a second is enough for a connection that
    broke; the breaker holds back a deployment that is really down, so the long waits that other
    gateways begin with (5 s) would only slow down the common case.
    """

    attempts_max: int = 3
    broken_attempts_max: int = 2
    backoff_ms: int = 500
    backoff_ms_max: int = 30_000
    backoff_multiplier: float = 2.0
    deferral_ms: int = 2_000
    retry_after_ms_max: int = 86_400_000
    codes: frozenset[str] | None = None

    def of_job(self, asked: JobRetry) -> "RetryPolicy":
        """Return this policy with what one job asks for."""
        return replace(
            self,
            attempts_max=asked.attempts_max or self.attempts_max,
            broken_attempts_max=asked.attempts_max or self.broken_attempts_max,
            backoff_ms=self.backoff_ms if asked.backoff_ms is None else asked.backoff_ms,
            backoff_ms_max=self.backoff_ms_max if asked.backoff_ms_max is None else asked.backoff_ms_max,
            codes=None if asked.codes is None else frozenset(asked.codes),
        )

    def names(self, error: UpstreamError) -> bool:
        """Return whether a failure has one of the codes that are to be tried again."""
        if self.codes is None:
            return False
        return error.code in self.codes or (error.status > 0 and str(error.status) in self.codes)


class RetryAt(msgspec.Struct, frozen=True):
    """The item is tried again at this moment; `counts`: the failed call used up one of its
    attempts.
    """

    at_ms: int
    counts: bool


class GiveUp(msgspec.Struct, frozen=True):
    """The item has failed with the code and message of its error line."""

    code: str
    message: str


def decide(
    error: UpstreamError, attempts: int, now_ms: int, expires_at_ms: int, policy: RetryPolicy, jitter: float
) -> RetryAt | GiveUp:
    """Decide what happens to an item after a failed call.

    `attempts` are those counted before this call; `jitter` is a random number from 0 to 1. A moment
    past the deadline becomes the deadline: nothing is sent then, and the job's end gives the item
    its outcome.
    """
    # A refusal without a call, such as an overspent budget, has no status and stays final.
    named = policy.names(error) and (error.status > 0 or error.billed)
    if isinstance(error, Refused) and not named:
        return GiveUp(error.code, error.message)
    counts = isinstance(error, Ambiguous | BrokenAnswer | Refused)
    if counts and policy.codes is not None and not named:
        return GiveUp(error.code, error.message)
    if counts:
        used = attempts + 1
        allowed = policy.broken_attempts_max if isinstance(error, BrokenAnswer) else policy.attempts_max
        if used >= allowed:
            tries = in_words(used, "try", "tries")
            return GiveUp(error.code, f"{error.message} (given up after {tries})")
    if now_ms >= expires_at_ms:
        return GiveUp("batch_expired", "This request could not be executed before the completion window expired.")
    if isinstance(error, RecordedElsewhere):
        # Wait long enough that the item goes back with its slice: its next lease sees the outcome.
        return RetryAt(min(now_ms + RECORDED_MS, expires_at_ms), counts=False)
    grown_ms = min(policy.backoff_ms_max, policy.backoff_ms * policy.backoff_multiplier ** min(attempts, 30))
    spread_ms = grown_ms if counts else policy.deferral_ms
    # Retry-After is a floor; the jitter on top keeps items from coming all at once.
    floor_ms = min(max(error.retry_after_ms or 0, 0), policy.retry_after_ms_max)
    at_ms = now_ms + floor_ms + int(spread_ms * min(max(jitter, 0.0), 1.0))
    return RetryAt(min(at_ms, expires_at_ms), counts)
