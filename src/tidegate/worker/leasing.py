"""Keep a worker supplied: lease what the scheduler chooses while there is room, and read its items. It sends and records nothing."""

import asyncio

import structlog

from tidegate.core.errors import StoreUnavailable
from tidegate.core.ports import Listener
from tidegate.stages.lease import LeaseStage
from tidegate.stages.record import Recorder
from tidegate.stages.tend.lost_workers import LostWorkers
from tidegate.worker.call_rules import LeasedCallRules
from tidegate.worker.key_states import KeyStates
from tidegate.worker.lease_room import LeaseRoom
from tidegate.worker.leased_work import LeasedSliceState, LeasedWork
from tidegate.worker.registration import Registration
from tidegate.worker.scheduler import Scheduler
from tidegate.worker.slice_settler import SliceSettler
from tidegate.worker.trial import Trial

log = structlog.get_logger()


class Leasing:
    """The service: lease until there is nothing to take or no room, then wait for a poll or a wake-up."""

    def __init__(
        self,
        leaser: "Leaser",
        leased_work: LeasedWork,
        recorder: Recorder,
        lost_workers: LostWorkers,
        lease_wake: Listener,
        poll_ms: int,
    ) -> None:
        self._leaser = leaser
        self._leased_work = leased_work
        self._recorder = recorder
        self._lost_workers = lost_workers
        self._lease_wake = lease_wake
        self._poll_ms = poll_ms

    async def run(self) -> None:
        # What this host's spool holds is paid for: it is recorded before any of it could be leased and sent again.
        await self._lost_workers.deliver_spool()
        while True:
            if not await self._leaser.fill():
                if not self._leased_work.in_flight:
                    self._recorder.hurry()
                await self._lease_wake.wait(self._poll_ms / 1000)

    def look_again(self) -> None:
        """More may be sent than before: send what waits here, and lease more."""
        self._leased_work.wake()
        self._lease_wake.notify()


class Leaser:
    """One round of leasing: choose, lease, read."""

    def __init__(
        self,
        stage: LeaseStage,
        scheduler: Scheduler,
        room: LeaseRoom,
        trial: Trial,
        me: Registration,
        leased_work: LeasedWork,
        reader: "SliceReader",
    ) -> None:
        self._stage = stage
        self._scheduler = scheduler
        self._room = room
        self._trial = trial
        self._me = me
        self._leased_work = leased_work
        self._reader = reader

    async def fill(self) -> bool:
        """Lease what there is room for; False when there was nothing to take, no room, or nothing of it could be read."""
        self._leased_work.wake()
        self._room.give_back_resting()
        slices_max = self._room.slices_max()
        if slices_max <= 0 or not self._me.is_safe():
            return False
        await self._room.rest_jobs()
        worker_id = self._me.id
        choice = await self._scheduler.choose(worker_id, self._room.items, slices_max, self._trial)
        if not choice.picks or not self._leased_work.is_open:
            return False
        taken = await self._stage.take(worker_id, choice.picks, self._trial.bounds(choice.suspects))
        if worker_id != self._me.id:
            return False
        states = [LeasedSliceState(leased, until_ms) for leased, until_ms in taken]
        for state in states:
            self._leased_work.expect(state)
        self._trial.begin_group(states)
        return await self._reader.read(states)


class SliceReader:
    """Brings the items of leased slices into the worker's hands."""

    def __init__(
        self,
        stage: LeaseStage,
        keys: KeyStates,
        rules: LeasedCallRules,
        me: Registration,
        leased_work: LeasedWork,
        settler: SliceSettler,
    ) -> None:
        self._stage = stage
        self._keys = keys
        self._rules = rules
        self._me = me
        self._leased_work = leased_work
        self._settler = settler

    async def read(self, states: list[LeasedSliceState]) -> bool:
        """Read the items of these slices; False when none could be read."""
        for state in states:
            self._rules.bind(state)
        await self._learn_keys(states)
        # All of them, also when one fails: no other worker reads the others.
        begun = await asyncio.gather(*[self._begin_slice(state) for state in states], return_exceptions=True)
        for result in begun:
            if isinstance(result, BaseException):
                raise result
        return any(begun)

    async def _learn_keys(self, states: list[LeasedSliceState]) -> None:
        """Ask about keys that came only now; while the store does not answer, their items wait."""
        if not all(self._keys.knows(state.slice.key_id) for state in states):
            try:
                await self._keys.ask(self._me.id)
            except StoreUnavailable as error:
                log.warning("key_states_unavailable", error=str(error))

    async def _begin_slice(self, state: LeasedSliceState) -> bool:
        try:
            items = await self._stage.read(state.slice)
        except BaseException:
            self._settler.forget(state)
            raise
        if items is None:
            self._settler.forget(state)
            return False
        self._leased_work.add(state, items)
        self._settler.settle(state)
        return True
