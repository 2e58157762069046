"""The health of a deployment: whether its circuit is open, and which calls it refused.

- A `Breaker` stops the calls to a server that fails. While it is open, one call in each probe
  interval may go through, however long it takes, and any success closes it.
- `Refusals` are 429s, and other failures with a Retry-After. They know how long each refused call
  waits. One refusal is about one call; after a share of the last calls the whole deployment rests.

Time is an argument, in the clock's monotonic milliseconds. This module does not wait, log or call.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from enum import StrEnum

import msgspec

LAST_CALLS = 100

# If this share of the last calls was refused, the whole deployment rests.
HEAVY_SHARE = 0.05
WAITING_MAX = 10_000


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"
    PAUSED = "paused"


class BreakerPolicy(msgspec.Struct, frozen=True):
    """The rules of a breaker.

    It opens after failures in a row, or at a share of failures over enough calls in a window.
    """

    consecutive_failures_max: int = 5
    failure_share_max: float = 0.5
    share_calls_min: int = 20
    share_window_ms: int = 30_000
    probe_interval_ms: int = 5_000
    paused_probe_interval_ms: int = 60_000


class Breaker:
    """The breaker of one deployment.

    - `is_open`, `opened_at_ms`, `ready_at_ms` and `is_calm` are for reading.
    - From `ready_at_ms` on a call may go through; it is 0 while the breaker is closed.
    - While `is_calm`, no call has failed since the breaker was made or closed, and successes need
      not be reported.
    """

    def __init__(self, policy: BreakerPolicy) -> None:
        self.is_open = False
        self.is_calm = True
        self.ready_at_ms = 0.0
        self.opened_at_ms = 0.0
        self._policy = policy
        # True if a separate probe was answered. Then a user's call may go through too.
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
        """Return whether the breaker is open because our key was rejected, even during a probe."""
        return self.is_open and self._paused

    def begin_probe(self, now_ms: float) -> None:
        """Make this call the probe of its interval.

        The next may come one interval later in any case.
        """
        self.ready_at_ms = now_ms + self._interval_ms()
        self.has_answered = False
        self._probes_in_flight += 1

    def probe_answered(self) -> None:
        """Note that the deployment answered a separate probe."""
        self.has_answered = True

    def try_at_once(self) -> None:
        """Make the next probe due now."""
        self.ready_at_ms = 0.0

    def end_probe(self) -> None:
        self._probes_in_flight -= 1

    def succeeded(self) -> bool:
        """Note that the deployment answered. Return True if this closed the breaker."""
        self._consecutive = 0
        self._answered += 1
        if not self.is_open:
            return False
        self.is_open = self._paused = False
        self.is_calm = True
        self.ready_at_ms = 0.0
        return True

    def failed(self, now_ms: float) -> bool:
        """Note that the deployment failed. Return True if this opened the breaker."""
        policy = self._policy
        if self.is_calm or now_ms - self._window_from_ms > policy.share_window_ms:
            # The window begins with a failure, so that earlier successes do not delay the breaker.
            self.is_calm = False
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
        """Open the breaker because our key was refused. Return True if this paused the deployment.

        Only a person can fix a key, so probes are rarer.
        """
        newly = not self._paused
        if newly:
            self.opened_at_ms = now_ms
        self.is_open = self._paused = True
        self.is_calm = False
        self.ready_at_ms = max(self.ready_at_ms, now_ms + self._interval_ms())
        return newly

    def _interval_ms(self) -> int:
        return self._policy.paused_probe_interval_ms if self._paused else self._policy.probe_interval_ms


class Refusals:
    """The refused calls of one deployment.

    `waiting` has, for reading, the end of each call's wait by its key.
    """

    def __init__(self) -> None:
        # The numbers of the refused calls among those that ended.
        self._refused: deque[int] = deque(maxlen=LAST_CALLS)
        self.waiting: OrderedDict[str, float] = OrderedDict()

    def refused(self, idempotency_key: str, until_ms: float, ended: int) -> float:
        """Note that a call, the last of `ended` calls, was refused until this moment.

        A longer wait of the same call wins. If too many calls wait, the oldest are forgotten.
        Return the end of the forgotten waits; 0 if there are none.
        """
        self._refused.append(ended)
        waiting = self.waiting
        waiting[idempotency_key] = max(until_ms, waiting.get(idempotency_key, 0.0))
        waiting.move_to_end(idempotency_key)
        forgotten_ms = 0.0
        while len(waiting) > WAITING_MAX:
            forgotten_ms = max(forgotten_ms, waiting.popitem(last=False)[1])
        return forgotten_ms

    def pass_on(self, idempotency_key: str, others: Iterable[str]) -> None:
        """Let these calls wait as long as the refused call that they shared."""
        until_ms = self.waiting.get(idempotency_key)
        if until_ms is not None:
            self.waiting.update(dict.fromkeys(others, until_ms))

    def are_heavy(self, ended: int, in_flight: int) -> bool:
        """Return whether the deployment refused 5 % or more of the last 100 calls.

        Calls in flight count too, because a refusal comes at once but an answer takes longer.
        """
        lately = sum(number > ended - LAST_CALLS for number in self._refused)
        return lately >= HEAVY_SHARE * min(ended + in_flight, LAST_CALLS)

    def waits_until_ms(self, idempotency_key: str) -> float:
        """Return the moment until which this call must not go here; 0 if it was never refused."""
        return self.waiting.get(idempotency_key, 0.0)
