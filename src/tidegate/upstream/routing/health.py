"""The health of a deployment: whether its circuit is open, and which calls it refused. Until something fails, none of this is looked at.

A `Breaker` stops the calls to a server that fails. While it is open, one call in each probe interval may go through, for as long as it
takes, and any success closes it.

`Refusals` are 429s, and other failures with a Retry-After. They hold until when each refused call waits, and tell when there are so
many that the whole deployment rests: one refusal is about one call, a share of the last calls is about the deployment.

Time is an argument, in the clock's monotonic milliseconds; nothing here waits, logs or calls.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from enum import StrEnum

import msgspec

LAST_CALLS = 100

# When so large a share of the last calls was refused, the whole deployment rests.
HEAVY_SHARE = 0.05
WAITING_MAX = 10_000


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"
    PAUSED = "paused"


class BreakerPolicy(msgspec.Struct, frozen=True):
    """The rules of a breaker: it opens after so many failures in a row, or at a share of failures over enough calls in one window."""

    consecutive_failures_max: int = 5
    failure_share_max: float = 0.5
    share_calls_min: int = 20
    share_window_ms: int = 30_000
    probe_interval_ms: int = 5_000
    paused_probe_interval_ms: int = 60_000


class Breaker:
    """The breaker of one deployment. `is_open`, `opened_at_ms`, `ready_at_ms` and `is_calm` are for reading. From `ready_at_ms` on a
    call may go through; it is 0 while the breaker is closed. While `is_calm`, nothing has failed since the breaker was made or closed,
    and successes need not be reported."""

    def __init__(self, policy: BreakerPolicy) -> None:
        self.is_open = False
        self.is_calm = True
        self.ready_at_ms = 0.0
        self.opened_at_ms = 0.0
        self._policy = policy
        # True when a separate probe was answered: then a user's call may go through, too.
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
        """True while the breaker is open because our key was rejected, also while a probe is out."""
        return self.is_open and self._paused

    def begin_probe(self, now_ms: float) -> None:
        """Make this call the probe of its interval: the next may come one interval later, whether this one has ended or not."""
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
        """Note that the deployment answered. Return True when this closed the breaker."""
        self._consecutive = 0
        self._answered += 1
        if not self.is_open:
            return False
        self.is_open = self._paused = False
        self.is_calm = True
        self.ready_at_ms = 0.0
        return True

    def failed(self, now_ms: float) -> bool:
        """Note that the deployment failed. Return True when this opened the breaker."""
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
        """Open the breaker because our key was refused. Only a person can fix that, so probes are rarer. Return True when this paused
        the deployment."""
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
    """The refused calls of one deployment. `waiting` holds until when each of them waits, by their keys: for reading."""

    def __init__(self) -> None:
        # The numbers of the refused calls among those that ended.
        self._refused: deque[int] = deque(maxlen=LAST_CALLS)
        self.waiting: OrderedDict[str, float] = OrderedDict()

    def refused(self, idempotency_key: str, until_ms: float, ended: int) -> float:
        """Note that a call was refused until this moment, the last of `ended` calls; a longer wait of the same call wins. When too many
        calls wait, the oldest are forgotten: return until when those wait, or 0 when there are none."""
        self._refused.append(ended)
        waiting = self.waiting
        waiting[idempotency_key] = max(until_ms, waiting.get(idempotency_key, 0.0))
        waiting.move_to_end(idempotency_key)
        forgotten_ms = 0.0
        while len(waiting) > WAITING_MAX:
            forgotten_ms = max(forgotten_ms, waiting.popitem(last=False)[1])
        return forgotten_ms

    def pass_on(self, idempotency_key: str, others: Iterable[str]) -> None:
        """Let these calls wait as long as a refused call in which they were sent together."""
        until_ms = self.waiting.get(idempotency_key)
        if until_ms is not None:
            self.waiting.update(dict.fromkeys(others, until_ms))

    def are_heavy(self, ended: int, in_flight: int) -> bool:
        """Return whether the deployment refused 5 % or more of the last 100 calls. Calls in flight count too, because a refusal comes
        at once and answers take longer."""
        lately = sum(number > ended - LAST_CALLS for number in self._refused)
        return lately >= HEAVY_SHARE * min(ended + in_flight, LAST_CALLS)

    def waits_until_ms(self, idempotency_key: str) -> float:
        """The moment until which this call must not go to this deployment; 0 when it was never refused there."""
        return self.waiting.get(idempotency_key, 0.0)
