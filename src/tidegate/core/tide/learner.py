"""How many calls an upstream takes when nothing says so: start safe, grow while calls stay quick, halve when it refuses.

For hosted providers and engines without metrics. Quick is measured per token, so that a round of long answers is not taken for a
slow upstream. It knows no queue and no interactive traffic. Time is an argument.
"""

from collections.abc import Iterable

from tidegate.core.tide.signals import Ended

SAFE_CALLS = 16
SLOWER_FACTOR_MAX = 2.0
GROWTH, SHRINK = 1.25, 0.8
# One round is as many answers as the limit, but never so few that chance rules, nor so many that a slow upstream teaches nothing.
ROUND_CALLS_MIN, ROUND_CALLS_MAX = 8, 64
USED_SHARE_MIN = 0.75
# The baseline follows this slowly, so that an upstream that became slower for good is not held to its youth.
BASELINE_DRIFT = 0.02
ROUND_TRIP_MS = 1_000.0
# What a call costs in answer tokens: about this much for itself, and one for so many prompt tokens.
CALL_TOKENS, PROMPT_TOKENS_PER_TOKEN = 4.0, 200.0


class Learner:
    """`calls` is the limit it believes in, at least 1 and at most its ceiling."""

    def __init__(self, ceiling: int, start: int = SAFE_CALLS, slower_factor_max: float = SLOWER_FACTOR_MAX) -> None:
        self.ceiling = max(1, ceiling)
        self._calls = float(min(start, self.ceiling))
        self._slower_factor_max = slower_factor_max
        self._round_calls = 0
        self._round_ms = self._round_tokens = 0.0
        self._used = 0
        self._baseline_ms: float | None = None
        self._halved_at_ms: float | None = None
        self._round_trip_ms = ROUND_TRIP_MS

    @property
    def calls(self) -> int:
        return max(1, int(self._calls))

    def observe(self, now_ms: float, in_flight: int, ended: Iterable[Ended], refusals: int) -> None:
        """Learn from what ended since the last time."""
        if refusals > 0:
            self._refused(now_ms)
        self._used = max(self._used, in_flight)
        for call in ended:
            self._round_calls += 1
            self._round_ms += max(0.0, call.latency_ms)
            self._round_tokens += CALL_TOKENS + call.prompt_tokens / PROMPT_TOKENS_PER_TOKEN + call.answer_tokens
        if self._round_calls >= min(max(self.calls, ROUND_CALLS_MIN), ROUND_CALLS_MAX):
            self._end_round()

    def _refused(self, now_ms: float) -> None:
        # Calls that were in flight together are refused together: that is one refusal, not many.
        if self._halved_at_ms is not None and 0.0 <= now_ms - self._halved_at_ms < self._round_trip_ms:
            return
        self._halved_at_ms = now_ms
        self._calls = max(1.0, self._calls / 2)
        self._begin_round()

    def _end_round(self) -> None:
        self._round_trip_ms = max(ROUND_TRIP_MS, self._round_ms / self._round_calls)
        pace_ms = self._round_ms / self._round_tokens
        baseline_ms = pace_ms if self._baseline_ms is None else self._baseline_ms
        if pace_ms > baseline_ms * self._slower_factor_max:
            self._calls = max(1.0, self._calls * SHRINK)
        elif self._used >= int(self._calls * USED_SHARE_MIN):
            # A limit that was not used has not been tried: growing it would say nothing.
            self._calls = min(float(self.ceiling), max(self._calls * GROWTH, self._calls + 1))
        self._baseline_ms = min(pace_ms, baseline_ms + BASELINE_DRIFT * max(0.0, pace_ms - baseline_ms))
        self._begin_round()

    def _begin_round(self) -> None:
        self._round_calls = self._used = 0
        self._round_ms = self._round_tokens = 0.0
