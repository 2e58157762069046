"""The services that close and publish jobs: jobs must close while the blob store is away."""

import asyncio

from tidegate.core.ports import Wake
from tidegate.stages.ship import Ship
from tidegate.stages.tend import deadlines
from tidegate.store.store import Store
from tidegate.worker.registration import Registration

_NEVER_MS = 10**15


class Closing:
    """The service that lets jobs expire, and closes jobs that have no call in flight any more.

    After an outage of the store, workers get the whole grace once more: they hold answers that the
    store does not have yet, and a closed job would refuse them.
    """

    def __init__(self, store: Store, ship: Ship, publish_due: asyncio.Event, grace_ms: int, poll_ms: int) -> None:
        """Give workers `grace_ms` to release a job that closes."""
        self._store = store
        self._ship = ship
        self._publish_due = publish_due
        self._grace_ms = grace_ms
        self._poll_ms = poll_ms

    async def run(self) -> None:
        """Close jobs until the store fails. When run again, count the grace from then."""
        loop = asyncio.get_running_loop()
        met_s = loop.time()
        while True:
            await deadlines.tend(self._store)
            is_grace_over = (loop.time() - met_s) * 1000 >= self._grace_ms
            if await self._ship.close_drained(self._grace_ms if is_grace_over else _NEVER_MS):
                self._publish_due.set()
            await asyncio.sleep(self._poll_ms / 1000)


class Publishing:
    """The services that publish closed jobs: one for quick ones, one for jobs with a rewrite.

    The second takes one job of each tenant after the other.
    """

    def __init__(
        self, quick: Ship, long: Ship, me: Registration, publish_due: asyncio.Event, news: Wake, poll_ms: int
    ) -> None:
        self._quick = quick
        self._long = long
        self._me = me
        self._publish_due = publish_due
        self._long_due = asyncio.Event()
        self._news = news
        self._poll_ms = poll_ms

    async def run(self) -> None:
        while True:
            self._publish_due.clear()
            self._long_due.set()
            await self._publish(self._quick, self._publish_due)

    async def run_long(self) -> None:
        while True:
            self._long_due.clear()
            await self._publish(self._long, self._long_due)

    async def _publish(self, ship: Ship, due: asyncio.Event) -> None:
        """Publish the jobs that are due; if none is left, wait for the next look."""
        if await ship.publish_all(self._me.id):
            self._news.notify()
            return
        try:
            async with asyncio.timeout(self._poll_ms / 1000):
                await due.wait()
        except TimeoutError:
            pass
