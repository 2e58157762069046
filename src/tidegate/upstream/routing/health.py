"""The health of a deployment: whether its circuit is open, and which calls it refused. While nothing failed, nothing here is asked.

A `Breaker` stops the calls to a server that fails, and always probes its way back. It never gives up: while it is open, one call per probe
interval may go through, for as long as it takes, and any success closes it.

`Refusals` are 429s, and other failures that came with a Retry-After: until when each refused call waits, and whether refusals are so many
that the whole deployment rests. One refusal says something about one call; a share of the last calls says something about the deployment.

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
    """`is_open`, `opened_at_ms` and `ready_at_ms` (the moment from which a call may go through; 0 while it is closed) are for reading; so
    is `is_calm`: nothing failed since it was made or closed, and a success tells it nothing."""

    def __init__(self, policy: BreakerPolicy) -> None:
        self.is_open = False
        self.is_calm = True
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
        self.is_calm = True
        self.ready_at_ms = 0.0
        return True

    def failed(self, now_ms: float) -> bool:
        """The deployment failed. True when this opened the breaker."""
        policy = self._policy
        if self.is_calm or now_ms - self._window_from_ms > policy.share_window_ms:
            # The window begins with a failure: what went well before it is no reason to wait longer now.
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
        """Our key is refused: only a person can fix that, so the probes are rarer. True when this paused the deployment."""
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
    """`waiting` is until when refused calls wait, by their keys: for reading."""

    def __init__(self) -> None:
        # Which of the calls that ended were refused, by their number among them.
        self._refused: deque[int] = deque(maxlen=LAST_CALLS)
        self.waiting: OrderedDict[str, float] = OrderedDict()

    def refused(self, idempotency_key: str, until_ms: float, ended: int) -> float:
        """A call was refused until this moment, the last of so many that ended; a longer wait of the same call wins. Returns until when
        calls wait that had to be forgotten because too many do: 0 when there are none."""
        self._refused.append(ended)
        waiting = self.waiting
        waiting[idempotency_key] = max(until_ms, waiting.get(idempotency_key, 0.0))
        waiting.move_to_end(idempotency_key)
        forgotten_ms = 0.0
        while len(waiting) > WAITING_MAX:
            forgotten_ms = max(forgotten_ms, waiting.popitem(last=False)[1])
        return forgotten_ms

    def pass_on(self, idempotency_key: str, others: Iterable[str]) -> None:
        """These calls went in one with a call that was refused: they wait as it does."""
        until_ms = self.waiting.get(idempotency_key)
        if until_ms is not None:
            self.waiting.update(dict.fromkeys(others, until_ms))

    def are_heavy(self, ended: int, in_flight: int) -> bool:
        """Whether the deployment refused 5 % or more of the last 100 of so many calls that ended. Those in flight count too: a refusal
        comes at once, and answers take longer."""
        lately = sum(number > ended - LAST_CALLS for number in self._refused)
        return lately >= HEAVY_SHARE * min(ended + in_flight, LAST_CALLS)

    def waits_until_ms(self, idempotency_key: str) -> float:
        """Until when this call must not go to this deployment; 0 when it never was refused there."""
        return self.waiting.get(idempotency_key, 0.0)
