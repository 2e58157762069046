"""Which calls a deployment refused: until when each refused call waits, and whether refusals are so many that the whole deployment rests.

A refusal is a 429, or another failure that came with a Retry-After. One refusal says something about one call; a share of the last calls
says something about the deployment. Time is an argument, in the clock's monotonic milliseconds.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable

LAST_CALLS = 100
# So large a share of the last calls, refused, is about the deployment and not about the one call.
HEAVY_SHARE = 0.05
WAITING_MAX = 10_000


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
