"""Learn how many background calls an engine has room for, by its KV cache and its slots.

A full cache makes the engine preempt, and full slots make interactive calls queue behind ours. The
engine announces neither: the cache shows in its use, full slots in calls that wait while the number
that runs does not change. This module knows only samples.
"""

from tidegate.core.tide.signals import EngineSample

KV_USE_MAX = 0.92
# The share of all slots that batch may fill, so that interactive calls find some free.
SLOTS_SHARE = 0.875
SHRINK = 0.9
GROWTH_PER_SAMPLE = 0.01
# The same number may run in two samples by chance, but not in this many.
SAME_SAMPLES_MIN = 3


class EngineRoom:
    """The room of one engine: `calls` is how many background calls fit, as far as the samples say.

    It grows back slowly.
    """

    def __init__(self, ceiling: int) -> None:
        self._ceiling = float(ceiling)
        self._calls = float(ceiling)
        self._running = -1.0
        self._same_samples = 0

    @property
    def calls(self) -> int:
        return int(self._calls)

    def learn(self, sample: EngineSample, in_flight: int) -> None:
        """Learn from one sample, taken while so many of our calls were in flight."""
        running = sample.running or 0.0
        stands = (sample.waiting or 0.0) >= 1.0 and running == self._running
        self._same_samples = self._same_samples + 1 if stands else 1
        self._running = running
        if (sample.kv_use or 0.0) > KV_USE_MAX:
            self._calls = min(self._calls, in_flight * SHRINK)
        elif self._same_samples >= SAME_SAMPLES_MIN:
            self._calls = min(self._calls, running * SLOTS_SHARE)
        else:
            self._calls += 1.0 + GROWTH_PER_SAMPLE * self._calls
        self._calls = min(max(1.0, self._calls), self._ceiling)
