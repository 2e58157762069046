"""The heartbeat of a worker: it keeps the worker alive and learns which jobs close or are paused.

Slices that the store lists but this process does not know are handed back.
"""

import asyncio

import msgspec
import structlog

from tidegate.core.errors import StoreUnavailable
from tidegate.core.nouns import Holding
from tidegate.core.states import JobState
from tidegate.stages.lease import LeaseStage
from tidegate.worker.leased_work import LeasedWork
from tidegate.worker.leasing import SliceSettler
from tidegate.worker.registration import Registration

log = structlog.get_logger()

_RETRY_MS = 500


class CloseGrace(msgspec.Struct, frozen=True):
    """The grace of calls in flight when their job closes, and when it closes by a cancel."""

    closing_ms: int
    cancel_ms: int

    def of(self, closing: JobState | None) -> int:
        return self.cancel_ms if closing is JobState.CANCELLED else self.closing_ms


class Heartbeat:
    def __init__(
        self,
        me: Registration,
        leases: LeaseStage,
        leased_work: LeasedWork,
        settler: SliceSettler,
        beat_due: asyncio.Event,
        heartbeat_ms: int,
        grace: CloseGrace,
    ) -> None:
        """Beat every `heartbeat_ms`, and at once when `beat_due` is set."""
        self._me = me
        self._leases = leases
        self._leased_work = leased_work
        self._settler = settler
        self._beat_due = beat_due
        self._heartbeat_ms = heartbeat_ms
        self._grace = grace

    async def run(self) -> None:
        """Beat until this process has left."""
        self._leased_work.extend_lease(self._me.safe_until_ms)
        while not self._me.has_left:
            wait_ms = self._heartbeat_ms
            self._beat_due.clear()
            try:
                wait_ms = min(wait_ms, await self._beat())
            except StoreUnavailable as error:
                log.warning("heartbeat_failed", error=str(error))
                wait_ms = min(_RETRY_MS, wait_ms)
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await self._beat_due.wait()
            except TimeoutError:
                pass

    async def _beat(self) -> int:
        """Beat once.

        Return the milliseconds until the next heartbeat, or until a grace ends before it.
        """
        known, pending = self._leased_work.keys(), set(self._leases.pending)
        holdings = await self._me.beat()
        if self._me.has_left:
            return self._heartbeat_ms
        if holdings is None:
            await self._begin_again()
            return self._heartbeat_ms
        self._leased_work.extend_lease(self._me.safe_until_ms)
        # This comes before all calls to the store, which may fail: a closing job must not wait for
        # the next heartbeat.
        ends_in_ms = self._heartbeat_ms
        for holding in holdings:
            if holding.closing is not None:
                ends_in_ms = min(ends_in_ms, self._close(holding))
            elif holding.must_wait:
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
        return ends_in_ms

    async def _begin_again(self) -> None:
        """Drop all leased work, and begin the next incarnation after this one was declared gone."""
        self._settler.begin_again()
        await self._me.enlist()
        # Slices and logs that came meanwhile belong to the incarnation that ended.
        self._settler.begin_again()
        self._leased_work.extend_lease(self._me.safe_until_ms)

    def _close(self, holding: Holding) -> int:
        """Stop sending for a job that closes, and abort its calls in flight once its grace is over.

        Return the milliseconds until then; a whole heartbeat if the grace is over.
        """
        left_ms = self._grace.of(holding.closing) - holding.closing_for_ms
        for state in self._leased_work.close_job(holding.job_id):
            if left_ms <= 0:
                state.abort()
        return left_ms if left_ms > 0 else self._heartbeat_ms
