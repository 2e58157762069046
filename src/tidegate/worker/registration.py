"""The registration of a process: its row in the store, and the heartbeat that keeps it alive."""

import asyncio

import structlog

from tidegate.core import ids
from tidegate.core.errors import StoreUnavailable
from tidegate.core.nouns import EVERY_JOB, Holding, WorkerDuty
from tidegate.core.ports import Clock, Entropy
from tidegate.store.store import Store

log = structlog.get_logger()


class Registration:
    """The incarnation of a process.

    - When it is declared gone, `enlist` begins another one under another id.
    - `has_left` is true once the process itself ended it.
    - `asked_ms` is when the last answered heartbeat was sent.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        entropy: Entropy,
        *,
        host: str,
        version: str,
        lease_ms: int,
        duty: WorkerDuty = EVERY_JOB,
    ) -> None:
        self._store = store
        self._clock = clock
        self._entropy = entropy
        self._host = host
        self._version = version
        self._lease_ms = lease_ms
        self._duty = duty
        self.id = ""
        self.safe_until_ms = 0.0
        self.asked_ms = 0.0
        self.has_left = False

    async def enlist(self) -> None:
        """Enlist under a fresh id."""
        asked_ms = self._clock.monotonic_ms()
        fresh = ids.make("worker", self._entropy.token_bytes(16))
        await self._store.enlist_worker(fresh, self._host, self._version, self._lease_ms, self._duty)
        self.id = fresh
        self.has_left = False
        self.safe_until_ms = self._safe_from(asked_ms)

    async def beat(self) -> list[Holding] | None:
        """Stay alive and return the leases of this incarnation.

        Return None if the incarnation is over; then `enlist` begins the next.
        """
        asked_ms = self._clock.monotonic_ms()
        holdings = await self._store.beat(self.id, self._lease_ms)
        if holdings is None:
            log.warning("incarnation_lost", worker=self.id)
            self.safe_until_ms = 0.0
            return None
        self.asked_ms = asked_ms
        self.safe_until_ms = self._safe_from(asked_ms)
        return holdings

    def is_safe(self) -> bool:
        """Return whether the store surely counts this incarnation as alive: new leases are ours."""
        return self._clock.monotonic_ms() < self.safe_until_ms

    async def begin_blob(self, kind: str) -> str:
        """Begin a blob and return its id. Unless it is settled, it ends with this incarnation."""
        blob_id = ids.make("blob", self._entropy.token_bytes(16))
        await self._store.begin_blob(blob_id, kind, self.id)
        return blob_id

    async def leave(self) -> None:
        """End this incarnation."""
        self.has_left = True
        self.safe_until_ms = 0.0
        await self._store.declare_gone(self.id, leaving=True)

    def _safe_from(self, asked_ms: float) -> float:
        # The time counts from before the question and is a sixth shorter, so that the lease covers
        # every call.
        return asked_ms + self._lease_ms * 5 / 6


async def beat_until(stop: asyncio.Event, me: Registration, heartbeat_ms: int) -> None:
    """Keep a process without a worker alive until `stop` is set, because it owns blobs."""
    while not stop.is_set():
        try:
            if await me.beat() is None:
                await me.enlist()
        except StoreUnavailable as error:
            log.warning("heartbeat_failed", error=str(error))
        try:
            async with asyncio.timeout(heartbeat_ms / 1000):
                await stop.wait()
        except TimeoutError:
            pass
    try:
        await me.leave()
    except StoreUnavailable as error:
        log.warning(
            "worker_stop_timed_out",
            error=str(error),
            advice="what was being uploaded is collected when the lease runs out",
        )
