"""The heartbeat of a worker: stay alive, learn which jobs close or are paused, and hand back slices that this process does not know."""

import asyncio

import structlog

from tidegate.core.errors import StoreUnavailable
from tidegate.core.nouns import Holding
from tidegate.stages.lease import LeaseStage
from tidegate.worker.leased_work import LeasedWork
from tidegate.worker.leasing import SliceSettler
from tidegate.worker.registration import Registration

log = structlog.get_logger()

_RETRY_MS = 500


class Heartbeat:
    def __init__(
        self,
        me: Registration,
        leases: LeaseStage,
        leased_work: LeasedWork,
        settler: SliceSettler,
        beat_due: asyncio.Event,
        heartbeat_ms: int,
        grace_ms: int,
    ) -> None:
        """`beat_due` asks for a heartbeat at once. `grace_ms` is how long calls of a job that closes may go on."""
        self._me = me
        self._leases = leases
        self._leased_work = leased_work
        self._settler = settler
        self._beat_due = beat_due
        self._heartbeat_ms = heartbeat_ms
        self._grace_ms = grace_ms

    async def run(self) -> None:
        """Beat until this process has left."""
        self._leased_work.extend_lease(self._me.safe_until_ms)
        while not self._me.has_left:
            wait_ms = self._heartbeat_ms
            self._beat_due.clear()
            try:
                await self._beat()
            except StoreUnavailable as error:
                log.warning("heartbeat_failed", error=str(error))
                wait_ms = min(_RETRY_MS, wait_ms)
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await self._beat_due.wait()
            except TimeoutError:
                pass

    async def _beat(self) -> None:
        known, pending = self._leased_work.keys(), set(self._leases.pending)
        holdings = await self._me.beat()
        if self._me.has_left:
            return
        if holdings is None:
            await self._begin_again()
            return
        self._leased_work.extend_lease(self._me.safe_until_ms)
        # Before anything that the store could fail at: a job that closes or is paused must not wait for the next heartbeat.
        for holding in holdings:
            if holding.closing is not None:
                self._close(holding)
            elif holding.is_held:
                self._leased_work.close_job(holding.job_id)
        self._leased_work.move_deadlines(holdings, self._me.asked_ms)
        pending |= self._leases.pending
        unknown = [
            one
            for one in self._leased_work.compare(known, holdings)
            if one.token not in pending and not self._settler.is_settling(one)
        ]
        self._settler.settle_all()
        for one in unknown:
            await self._leases.release(one)

    async def _begin_again(self) -> None:
        """This incarnation was declared gone: let go of everything and begin the next one."""
        self._settler.begin_again()
        await self._me.begin()
        # What came into our hands while we began was leased to the life that ended.
        self._settler.lose_all()
        self._leased_work.extend_lease(self._me.safe_until_ms)

    def _close(self, holding: Holding) -> None:
        """Send nothing more of a job that closes; abort what is in flight when its grace is over."""
        for state in self._leased_work.close_job(holding.job_id):
            if holding.closing_for_ms >= self._grace_ms:
                state.abort()
