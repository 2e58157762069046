"""How many retries a deployment allows: a share of its first attempts over the last minute, and a few in any case.

A failing server is not helped by everyone asking again. Only a call that this same deployment failed before is a retry here: one that
comes from another deployment is a first attempt. A retry without budget is not failed, only put off. Time is an argument; the window
moves in whole seconds, rounded so that it never allows more than the exact one would.
"""

import msgspec


class RetryBudgetPolicy(msgspec.Struct, frozen=True):
    share: float = 0.1
    retries_min: int = 3
    window_s: int = 60


# A call that was counted: in which second, and whether as a retry. It is what takes the call back.
Attempt = tuple[int, bool]


class RetryBudget:
    def __init__(self, policy: RetryBudgetPolicy) -> None:
        self._policy = policy
        # One bucket more than the window: the oldest second is partly inside it.
        self._length = policy.window_s + 1
        self._firsts = [0] * self._length
        self._retries = [0] * self._length
        self._first_sum = 0
        self._retry_sum = 0
        self._second = 0

    def allows_retry(self, now_ms: float) -> bool:
        second = int(now_ms // 1000)
        if second != self._second:
            self._move_to(second)
        # First attempts of the oldest, partial second do not count; retries in it do.
        firsts = self._first_sum - self._firsts[(second + 1) % self._length]
        return self._retry_sum < self._policy.retries_min + int(firsts * self._policy.share)

    def attempts(self, now_ms: float) -> int:
        """How many calls were counted in the window."""
        second = int(now_ms // 1000)
        if second != self._second:
            self._move_to(second)
        return self._first_sum + self._retry_sum

    def count(self, now_ms: float, *, is_retry: bool) -> Attempt:
        """Count a call that is about to be sent; a retry only after `allows_retry` allowed it."""
        second = int(now_ms // 1000)
        if second != self._second:
            self._move_to(second)
        bucket = second % self._length
        if is_retry:
            self._retries[bucket] += 1
            self._retry_sum += 1
        else:
            self._firsts[bucket] += 1
            self._first_sum += 1
        return second, is_retry

    def undo(self, attempt: Attempt) -> None:
        """That call never was an attempt: the upstream did not take it."""
        second, is_retry = attempt
        if self._second - second >= self._length:
            # The window has passed it, and its bucket counts another second.
            return
        bucket = second % self._length
        if is_retry and self._retries[bucket]:
            self._retries[bucket] -= 1
            self._retry_sum -= 1
        elif not is_retry and self._firsts[bucket]:
            self._firsts[bucket] -= 1
            self._first_sum -= 1

    def _move_to(self, second: int) -> None:
        for passed in range(self._second + 1, min(second, self._second + self._length) + 1):
            bucket = passed % self._length
            self._first_sum -= self._firsts[bucket]
            self._retry_sum -= self._retries[bucket]
            self._firsts[bucket] = self._retries[bucket] = 0
        self._second = second
