"""The data of the overview's charts: requests and tokens a second, and the calls at each
deployment, now and lately.

Rates come from the store's counts by minute, so they are those of all processes. The calls of
deployments are kept only here, while the overview is open; nothing is stored for them.
"""

from collections import deque

import msgspec

from tidegate.store.store import Store
from tidegate.web.admin.overview import DeploymentHealth

SAMPLES_MAX = 240
SAMPLE_MS_MIN = 1_500
# After a longer pause the rate is that of the present minute, or of two minutes if the present one
# has just begun.
PAUSE_MS = 60_000
MINUTE_MS = 60_000
MINUTE_MS_MIN = 10_000
DEPLOYMENTS_MAX = 12

Counts = dict[int, tuple[int, int]]


class LoadPoint(msgspec.Struct, frozen=True):
    """One moment, in unix seconds.

    `deployments` has, by name, the background calls, those that the tide allows (0: not known) and
    the interactive calls.
    """

    at: float
    requests: float
    tokens: float
    deployments: dict[str, tuple[int, int, int]] = {}


class LoadHistory:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._points: deque[LoadPoint] = deque(maxlen=SAMPLES_MAX)
        self._minutes: list[LoadPoint] = []
        self._seen_ms = 0
        self._counts: Counts = {}

    async def look(self, deployments: list[DeploymentHealth]) -> LoadPoint:
        """Return the load at this moment; the last one again if it is very recent."""
        now_ms, counts = await self._store.minute_counts()
        if self._points and 0 <= now_ms - self._seen_ms < SAMPLE_MS_MIN:
            return self._points[-1]
        requests, tokens = rates_between(self._seen_ms, self._counts, now_ms, counts)
        busiest = sorted(deployments, key=lambda one: -one.calls_everywhere - one.interactive_everywhere)
        shown = sorted(busiest[:DEPLOYMENTS_MAX], key=lambda one: one.name)
        loads = {one.name: (one.calls_everywhere, one.tide_calls, one.interactive_everywhere) for one in shown}
        point = LoadPoint(now_ms / 1000, round(requests, 2), round(tokens, 1), loads)
        self._seen_ms, self._counts = now_ms, counts
        self._points.append(point)
        self._minutes = [
            LoadPoint((minute + 1) * MINUTE_MS / 1000, round(items / 60, 2), round(used / 60, 1))
            for minute, (items, used) in sorted(counts.items())
            if minute < now_ms // MINUTE_MS
        ]
        return point

    def points(self) -> list[LoadPoint]:
        """Return the known points of the last hour: first by minute, then each look."""
        first = self._points[0].at if self._points else 0.0
        return [*(one for one in self._minutes if one.at < first), *self._points]


def rates_between(before_ms: int, before: Counts, now_ms: int, now: Counts) -> tuple[float, float]:
    """Return requests and tokens a second since the last look.

    After a pause, return those of the present minute, or of two if it has just begun.
    """
    if not 0 < now_ms - before_ms < PAUSE_MS:
        items, tokens = now.get(now_ms // MINUTE_MS, (0, 0))
        span_ms = now_ms % MINUTE_MS
        if span_ms < MINUTE_MS_MIN:
            items_before, tokens_before = now.get(now_ms // MINUTE_MS - 1, (0, 0))
            items, tokens, span_ms = items + items_before, tokens + tokens_before, span_ms + MINUTE_MS
        return 1000 * items / span_ms, 1000 * tokens / span_ms
    since = [
        (items - before.get(minute, (0, 0))[0], tokens - before.get(minute, (0, 0))[1])
        for minute, (items, tokens) in now.items()
        if minute >= before_ms // MINUTE_MS - 1
    ]
    seconds = (now_ms - before_ms) / 1000
    return sum(max(0, one[0]) for one in since) / seconds, sum(max(0, one[1]) for one in since) / seconds
