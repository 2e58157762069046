"""The health of a deployment: whether its circuit is open, which calls it refused, and how many retries it may have.

A `Breaker` stops the calls to a server that fails, and always probes its way back. It never gives up: while it is open, one call per probe
interval may go through, for as long as it takes, and any success closes it.

`Refusals` are 429s, and other failures that came with a Retry-After: until when each refused call waits, and whether refusals are so many
that the whole deployment rests. One refusal says something about one call; a share of the last calls says something about the deployment.

A `RetryBudget` allows retries up to a share of a deployment's first attempts over the last minute, and a few in any case. A failing server
is not helped by everyone asking again. Only a call that this same deployment failed before is a retry here: one that comes from another
deployment is a first attempt. A retry without budget is not failed, only put off. The window moves in whole seconds, rounded so that it
never allows more than the exact one would.

Time is an argument, in the clock's monotonic milliseconds; nothing here waits, logs or calls.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from enum import StrEnum

import msgspec

LAST_CALLS = 100

# So large a share of the last calls, refused, is about the deployment and not about the one call.
HEAVY_SHARE = 0.05
WAITING_MAX = 10_000


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"
    PAUSED = "paused"


class BreakerPolicy(msgspec.Struct, frozen=True):
    """It opens after so many failures in a row, or at a share of failures over enough calls in one window."""

    consecutive_failures_max: int = 5
    failure_share_max: float = 0.5
    share_calls_min: int = 20
    share_window_ms: int = 30_000
    probe_interval_ms: int = 5_000
    paused_probe_interval_ms: int = 60_000


class Breaker:
    """`is_open`, `opened_at_ms` and `ready_at_ms` (the moment from which a call may go through; 0 while it is closed) are for reading."""

    def __init__(self, policy: BreakerPolicy) -> None:
        self.is_open = False
        self.ready_at_ms = 0.0
        self.opened_at_ms = 0.0
        self._policy = policy
        # A probe beside the calls was answered: the next call may prove that the deployment is healthy.
        self.has_answered = False
        self._paused = False
        self._probes_in_flight = 0
        self._consecutive = 0
        self._window_from_ms = 0.0
        self._answered = 0
        self._failed = 0

    @property
    def state(self) -> BreakerState:
        if not self.is_open:
            return BreakerState.CLOSED
        if self._probes_in_flight:
            return BreakerState.PROBING
        return BreakerState.PAUSED if self._paused else BreakerState.OPEN

    @property
    def is_paused(self) -> bool:
        """Whether it is open because our key was rejected, also while a probe is out."""
        return self.is_open and self._paused

    def begin_probe(self, now_ms: float) -> None:
        """This call is the interval's probe: the next may come one interval later, whether this one has ended or not."""
        self.ready_at_ms = now_ms + self._interval_ms()
        self.has_answered = False
        self._probes_in_flight += 1

    def probe_answered(self) -> None:
        """The deployment answered a question that was asked beside the calls."""
        self.has_answered = True

    def try_at_once(self) -> None:
        """The next probe is due now."""
        self.ready_at_ms = 0.0

    def end_probe(self) -> None:
        self._probes_in_flight -= 1

    def succeeded(self) -> bool:
        """The deployment answered. True when this closed the breaker."""
        self._consecutive = 0
        self._answered += 1
        if not self.is_open:
            return False
        self.is_open = self._paused = False
        self.ready_at_ms = 0.0
        self._answered = self._failed = 0
        return True

    def failed(self, now_ms: float) -> bool:
        """The deployment failed. True when this opened the breaker."""
        policy = self._policy
        if now_ms - self._window_from_ms > policy.share_window_ms:
            # The window begins with a failure: what went well before it is no reason to wait longer now.
            self._window_from_ms = now_ms
            self._answered = self._failed = 0
        self._consecutive += 1
        self._failed += 1
        if self.is_open:
            return False
        calls = self._answered + self._failed
        too_many_in_a_row = self._consecutive >= policy.consecutive_failures_max
        too_large_a_share = calls >= policy.share_calls_min and self._failed >= policy.failure_share_max * calls
        if not (too_many_in_a_row or too_large_a_share):
            return False
        self.is_open = True
        self.opened_at_ms = now_ms
        self.ready_at_ms = now_ms + policy.probe_interval_ms
        return True

    def key_rejected(self, now_ms: float) -> bool:
        """Our key is refused: only a person can fix that, so the probes are rarer. True when this paused the deployment."""
        newly = not self._paused
        if newly:
            self.opened_at_ms = now_ms
        self.is_open = self._paused = True
        self.ready_at_ms = max(self.ready_at_ms, now_ms + self._interval_ms())
        return newly

    def _interval_ms(self) -> int:
        return self._policy.paused_probe_interval_ms if self._paused else self._policy.probe_interval_ms


class Refusals:
    def __init__(self) -> None:
        self._last: deque[bool] = deque(maxlen=LAST_CALLS)
        self._refused = 0
        self._waiting: OrderedDict[str, float] = OrderedDict()

    def answered(self) -> None:
        """A call ended otherwise than by a refusal."""
        last = self._last
        if self._refused and len(last) == LAST_CALLS and last[0]:
            self._refused -= 1
        last.append(False)

    def refused(self, idempotency_key: str, until_ms: float) -> float:
        """A call was refused until this moment; a longer wait of the same call wins. Returns until when calls wait that had to be forgotten
        because too many do: 0 when there are none."""
        last = self._last
        if not (len(last) == LAST_CALLS and last[0]):
            self._refused += 1
        last.append(True)
        waiting = self._waiting
        waiting[idempotency_key] = max(until_ms, waiting.get(idempotency_key, 0.0))
        waiting.move_to_end(idempotency_key)
        forgotten_ms = 0.0
        while len(waiting) > WAITING_MAX:
            forgotten_ms = max(forgotten_ms, waiting.popitem(last=False)[1])
        return forgotten_ms

    def pass_on(self, idempotency_key: str, others: Iterable[str]) -> None:
        """These calls went in one with a call that was refused: they wait as it does."""
        until_ms = self._waiting.get(idempotency_key)
        if until_ms is not None:
            self._waiting.update(dict.fromkeys(others, until_ms))

    def are_heavy(self, in_flight: int) -> bool:
        """Whether the deployment refused 5 % or more of its last 100 calls. Those in flight count too: a refusal comes at once, and answers
        take longer."""
        return self._refused >= HEAVY_SHARE * min(len(self._last) + in_flight, LAST_CALLS)

    def waits_until_ms(self, idempotency_key: str) -> float:
        """Until when this call must not go to this deployment; 0 when it never was refused there."""
        return self._waiting.get(idempotency_key, 0.0) if self._waiting else 0.0


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
