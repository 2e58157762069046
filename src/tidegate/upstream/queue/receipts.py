"""The results that were read but not recorded yet.

Each is acknowledged only once the store has its outcome. Until then the result stays in the queue,
so a later process finds it there. If a receipt is forgotten here, the queue removes the result when
its request's time is over. This module knows items and ids, but no messages and no outcomes.
"""

import asyncio
from collections.abc import Iterable

import structlog

from tidegate.core.ids import item_id
from tidegate.core.ports import RequestQueue
from tidegate.core.queues import QueueAway

log = structlog.get_logger(__name__)

TOGETHER_MAX = 256
AGAIN_S = 0.5
CLOSE_S = 2.0
UNACKNOWLEDGED_MAX = 100_000


class Receipts:
    def __init__(self) -> None:
        self._unacknowledged: dict[str, list[tuple[RequestQueue, str]]] = {}
        self._due: dict[RequestQueue, list[str]] = {}
        self._telling: asyncio.Task[None] | None = None

    def hold(self, item: str, queue: RequestQueue, request_id: str) -> None:
        """Note that a result was read for an item.

        It stays in the queue until the item is recorded.
        """
        if len(self._unacknowledged) >= UNACKNOWLEDGED_MAX:
            # An item that was given up is never recorded by this process; the oldest entry is most
            # likely one of those.
            self._unacknowledged.pop(next(iter(self._unacknowledged)))
        self._unacknowledged.setdefault(item, []).append((queue, request_id))

    def recorded(self, items: Iterable[tuple[str, int]]) -> None:
        """Acknowledge the results of these items, because the store has their outcomes."""
        if not self._unacknowledged:
            return
        for job_id, number in items:
            for queue, request_id in self._unacknowledged.pop(item_id(job_id, number), ()):
                self._due.setdefault(queue, []).append(request_id)
        if self._due and (self._telling is None or self._telling.done()):
            self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        while self._due:
            queue, ids = next(iter(self._due.items()))
            some = ids[:TOGETHER_MAX]
            try:
                await queue.acknowledge(some)
            except QueueAway:
                await asyncio.sleep(AGAIN_S)
                # Another queue may be there while this one is not.
                self._due[queue] = self._due.pop(queue)
                continue
            del ids[: len(some)]
            if not ids:
                del self._due[queue]

    async def close(self) -> None:
        """Acknowledge results for a short time. Other processes remove the rest later."""
        if self._telling is None:
            return
        done, _ = await asyncio.wait({self._telling}, timeout=CLOSE_S)
        if not done:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
            count = sum(len(ids) for ids in self._due.values())
            log.warning(
                "results_acknowledgement_failed", count=count, advice="they are put away when their time is over"
            )
