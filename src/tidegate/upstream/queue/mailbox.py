"""The mailbox of one queue: all calls that wait for results share one look, a few times a second.

A result goes to the calls that wait for it, and stays in the queue until it was recorded;
`receipts` removes it then. This module does not read results. If a queue is away, calls wait: its
results are still there when it is back.
"""

import asyncio

import structlog

from tidegate import metrics
from tidegate.core.ports import RequestQueue
from tidegate.core.queues import Found, QueueAway

log = structlog.get_logger(__name__)

# The pauses between looks: short after a result, longer and longer while there is none.
LOOK_S_MIN = 0.01
LOOK_S_MAX = 0.25
# A look names all awaited requests, so with many of them looks are rarer.
LOOK_S_EACH = 0.00005
AWAY_S = 0.5
IDS_MAX = 512
# The pause between looks for requests that the queue no longer knows. Each request costs a
# question.
LOST_S = 1.0
SWEEP_S = 60.0

Waiting = asyncio.Future[Found]


class Mailbox:
    def __init__(self, queue: RequestQueue, result_bytes_max: int) -> None:
        self.queue = queue
        self._result_bytes_max = result_bytes_max
        self._waiting: dict[str, list[Waiting]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._pause_s = LOOK_S_MIN
        self._news = asyncio.Event()
        self._away = False

    def wait_for(self, request_id: str) -> Waiting:
        """Return a future for the result of a queued request; end it with `stop_waiting`."""
        waiting: Waiting = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request_id, []).append(waiting)
        metrics.queue_awaited.inc()
        self._pause_s = LOOK_S_MIN
        self._news.set()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        return waiting

    def stop_waiting(self, request_id: str, waiting: Waiting) -> None:
        """End one call's wait for a request."""
        others = self._waiting.get(request_id, [])
        if waiting in others:
            others.remove(waiting)
            metrics.queue_awaited.dec()
        if not others:
            self._waiting.pop(request_id, None)

    def is_awaited(self, request_id: str) -> bool:
        """Return whether any call in this process waits for this request."""
        return request_id in self._waiting

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self) -> None:
        now_s = asyncio.get_running_loop().time
        lost_at_s = sweep_at_s = now_s()
        while True:
            if not self._waiting:
                self._news.clear()
                await self._news.wait()
            is_lost_due, is_sweep_due = now_s() >= lost_at_s, now_s() >= sweep_at_s
            try:
                found = await self._look_once(look=is_lost_due)
                if is_sweep_due:
                    _count("late", await self.queue.sweep())
            except QueueAway as away:
                self._note(away)
                await asyncio.sleep(AWAY_S)
                continue
            self._note(None)
            if is_lost_due:
                lost_at_s = now_s() + LOST_S
            if is_sweep_due:
                sweep_at_s = now_s() + SWEEP_S
            self._pause_s = LOOK_S_MIN if found else min(self._pause_s * 1.5, LOOK_S_MAX)
            await asyncio.sleep(max(self._pause_s, min(len(self._waiting) * LOOK_S_EACH, LOOK_S_MAX)))

    async def _look_once(self, *, look: bool) -> bool:
        """Look once for all awaited requests. Return whether there was news."""
        ids, news = list(self._waiting), False
        for at in range(0, len(ids), IDS_MAX):
            seen = await self.queue.collect(ids[at : at + IDS_MAX], self._result_bytes_max, look=look)
            for what in ("garbage", "unknown", "duplicate"):
                _count(what, getattr(seen, what))
            for found in seen.found:
                _count(found.kind.value, 1)
                self._tell(found)
            news = news or bool(seen.found) or seen.has_more
        return news

    def _tell(self, found: Found) -> None:
        for waiting in self._waiting.get(found.request_id, ()):
            if not waiting.done():
                waiting.set_result(found)

    def _note(self, away: QueueAway | None) -> None:
        """Log once that the queue is away, and once that it is back."""
        if away is not None and not self._away:
            log.warning(
                "queue_unreachable", why=str(away), advice="what lies in it is waited for; nothing is sent twice"
            )
        elif away is None and self._away:
            log.info("queue_reachable", waiting=len(self._waiting))
        self._away = away is not None


def _count(what: str, more: int) -> None:
    if more:
        metrics.queue_results.of(what).inc(more)
        if what in ("garbage", "unknown", "late"):
            log.warning("queue_dead_letters", what=what, count=more, advice="`tidegate doctor` says where they lie")
