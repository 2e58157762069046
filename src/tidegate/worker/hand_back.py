"""The stop of a worker: hand back unsent items, finish calls, commit their answers, and leave."""

import asyncio

import structlog

from tidegate.core.errors import BlobError, StoreError, StoreUnavailable
from tidegate.failpoints import hit
from tidegate.stages.lease import LeaseStage
from tidegate.stages.record import Recorder
from tidegate.stages.tend.lost_workers import LostWorkers
from tidegate.worker.leased_work import LeasedWork
from tidegate.worker.leasing import SliceSettler
from tidegate.worker.registration import Registration

log = structlog.get_logger()

_LOOK_S = 0.05
_COMMIT_S_MIN = 5.0


class HandBack:
    def __init__(
        self,
        me: Registration,
        leases: LeaseStage,
        leased_work: LeasedWork,
        settler: SliceSettler,
        recorder: Recorder,
        lost_workers: LostWorkers,
        grace_ms: int,
    ) -> None:
        """Stop with a grace of `grace_ms` for calls in flight."""
        self._me = me
        self._leases = leases
        self._leased_work = leased_work
        self._settler = settler
        self._recorder = recorder
        self._lost_workers = lost_workers
        self._grace_ms = grace_ms

    async def run(self) -> None:
        """Hand back unsent items at once, wait for calls in flight, and commit their answers.

        Calls that are out after the grace are aborted. At the end this process leaves.
        """
        self._settler.drop_all()
        self._recorder.hurry()
        await self._release_tails()
        await hit("stop_released")
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._grace_ms / 1000
        # A lease that was under way may still arrive. Without a hand-back its slices would count as
        # a lost worker's.
        while (self._leased_work.in_flight or self._is_leasing()) and loop.time() < end_s:
            self._settler.drop_all()
            self._recorder.hurry()
            await asyncio.sleep(_LOOK_S)
        self._settler.drop_all()
        for state in self._leased_work.state():
            state.abort()
        while self._leased_work.in_flight:  # noqa: ASYNC110 - the aborted calls end within this very loop's next turns
            await asyncio.sleep(0)
        self._settler.settle_all()
        try:
            async with asyncio.timeout(max(_COMMIT_S_MIN, end_s - loop.time())):
                await self._recorder.drain()
            await self._leave()
        except (TimeoutError, StoreError, BlobError) as error:
            log.warning(
                "worker_stop_timed_out", error=str(error), advice="another worker takes over when the lease runs out"
            )

    def _is_leasing(self) -> bool:
        return bool(self._leases.pending) or self._leased_work.is_reading

    async def _leave(self) -> None:
        for left in await self._me.beat() or []:
            # An internal error may have lost a slice before this worker added it to its leased
            # work.
            await self._leases.release(left)
        await self._recorder.close()
        await self._me.leave()
        await self._lost_workers.adopt_logs()

    async def _release_tails(self) -> None:
        """Give back the unsent ends of slices with calls in flight, for other workers to run."""
        for state in self._leased_work.state():
            open_count = self._leased_work.cut(state)
            if not state.in_flight or not open_count:
                continue
            try:
                if await self._leases.release_tail(state.slice, state.sent_to):
                    state.release_tail(open_count)
            except StoreUnavailable as error:
                log.warning("slice_release_failed", job=state.slice.job_id, error=str(error))
