"""The leasing of a worker: lease the slices that the scheduler chooses, and give back resting ones.

This module sends no item. Slices that leave are passed on to record, which informs the store.
"""

import asyncio
import math

import msgspec
import structlog

from tidegate.core.budgets.budget import Budget
from tidegate.core.errors import StoreUnavailable
from tidegate.core.nouns import Holding, LeasedSlice
from tidegate.core.ports import Clock, Listener, Upstream
from tidegate.core.schedule import Choice, Pick, Reason, Why
from tidegate.core.schedule.snapshot import NO_SUSPECTS
from tidegate.stages.lease import NONE_SUSPECTED, LeaseStage
from tidegate.stages.record import Recorder
from tidegate.stages.tend.lost_workers import LostWorkers
from tidegate.store.store import Store
from tidegate.worker.call_rules import KeyStates, LeasedCallRules
from tidegate.worker.leased_work import SHORT_WAIT_MS, TOKENS_REST_MS_MAX, LeasedSliceState, LeasedWork
from tidegate.worker.registration import Registration
from tidegate.worker.scheduler import Scheduler
from tidegate.worker.trial import Trial

log = structlog.get_logger()

_UNKNOWN_MODEL_ROOM = 256
LONG_WAITING_EVERY_MS = 250
# The most slices that a worker holds outside of the tide, so that they cannot keep all others out.
LONG_WAITING_MAX = 64


class Leasing:
    """The service of leasing: it leases while there is work and room, then waits for a wake-up."""

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
        # Answers in this host's spool are paid for. They are recorded before their items could be
        # leased and sent again.
        await self._lost_workers.deliver_spool()
        while True:
            if not await self._leaser.fill():
                if not self._leased_work.in_flight:
                    self._recorder.hurry()
                await self._lease_wake.wait(self._poll_ms / 1000)

    def look_again(self) -> None:
        """Send items that wait here and lease more, because more may be sent than before."""
        self._leased_work.wake()
        self._lease_wake.notify()


class Leaser:
    """One round of leasing: choose, lease, read."""

    def __init__(
        self,
        stage: LeaseStage,
        scheduler: Scheduler,
        room: "LeaseRoom",
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
        """Lease as much as there is room for.

        Return False without work or room, or if no item could be read.
        """
        self._leased_work.wake()
        self._room.give_back_resting()
        if not self._leased_work.is_lease_safe:
            return False
        worker_id = self._me.id
        long_waiting = await self._room.long_waiting()
        slices_max = self._room.slices_max()
        if slices_max > 0:
            await self._room.rest_jobs()
            trial = self._trial if self._trial.is_on else None
            choice = await self._scheduler.choose(worker_id, self._room.items, slices_max, trial)
        else:
            choice = Choice([], [])
        picks = [*long_waiting, *choice.picks]
        if not picks or not self._leased_work.is_open:
            return False
        is_plain = choice.suspects == NO_SUSPECTS and not self._trial.is_on
        bounds = NONE_SUSPECTED if is_plain else self._trial.bounds(choice.suspects)
        taken = await self._stage.lease_slices(worker_id, picks, bounds)
        if worker_id != self._me.id:
            return False
        states = [
            LeasedSliceState(leased, until_ms, _interactive_at_ms(leased, until_ms)) for leased, until_ms in taken
        ]
        for state in states:
            self._leased_work.expect(state)
        if self._trial.is_on:
            self._trial.begin_group(states)
        return await self._reader.read(states)


def _interactive_at_ms(leased: LeasedSlice, until_ms: float) -> float:
    """Return when items of a slice go like interactive calls, on this process's clock.

    `until_ms` is their deadline on that clock.
    """
    if leased.interactive_in_ms is None:
        return math.inf
    return until_ms - leased.expires_in_ms + leased.interactive_in_ms


class SliceReader:
    """A reader that adds the items of leased slices to the leased work."""

    def __init__(
        self,
        stage: LeaseStage,
        keys: KeyStates,
        rules: LeasedCallRules,
        me: Registration,
        leased_work: LeasedWork,
        settler: "SliceSettler",
    ) -> None:
        self._stage = stage
        self._keys = keys
        self._rules = rules
        self._me = me
        self._leased_work = leased_work
        self._settler = settler

    async def read(self, states: list[LeasedSliceState]) -> bool:
        """Read the items of these slices; return False if none could be read."""
        for state in states:
            self._rules.bind(state)
        await self._learn_keys(states)
        # Read all of them even if one fails, because no other worker has them.
        begun = await asyncio.gather(*[self._begin_slice(state) for state in states], return_exceptions=True)
        for result in begun:
            if isinstance(result, BaseException):
                raise result
        return any(begun)

    async def _learn_keys(self, states: list[LeasedSliceState]) -> None:
        """Ask for the states of keys that are not known yet.

        While the store does not answer, their items wait.
        """
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
        self._settler.settle_slice(state)
        return True


class HoldLimits(msgspec.Struct, frozen=True):
    """The number of calls that may be in flight from one worker, and of slices that it may hold."""

    in_flight_max: int
    slice_count_max: int


class LeaseRoom:
    """The room for more work in a worker.

    It gives back items whose model or budgets rest for long.
    """

    def __init__(
        self,
        store: Store,
        upstream: Upstream,
        clock: Clock,
        leased_work: LeasedWork,
        trial: Trial,
        settler: "SliceSettler",
        limits: HoldLimits,
    ) -> None:
        self._store = store
        self._upstream = upstream
        self._clock = clock
        self._leased_work = leased_work
        self._trial = trial
        self._settler = settler
        self._limits = limits
        self._job_rests: dict[tuple[str, str], float] = {}
        self._long_waiting_at_ms = 0.0

    def slices_max(self) -> int:
        """Return how many more slices may be leased now."""
        if not self._leased_work.is_open:
            return 0
        return max(self._limits.slice_count_max - self._leased_work.slice_count, int(self._trial.wants_check))

    async def long_waiting(self) -> list[Pick]:
        """Choose responses that have waited so long that they go like interactive calls.

        Neither the tide nor a full worker holds them back.
        """
        now_ms = self._clock.monotonic_ms()
        count_max = LONG_WAITING_MAX - self._leased_work.interactive_count()
        if now_ms < self._long_waiting_at_ms or count_max <= 0 or not self._leased_work.is_open:
            return []
        self._long_waiting_at_ms = now_ms + LONG_WAITING_EVERY_MS
        found = await self._store.long_waiting_responses(count_max)
        return [
            Pick(job_id, model, 1, Why.INTERACTIVE)
            for job_id, model in found
            if self._upstream.takes_interactive(model)
        ]

    def has_room(self, model: str) -> bool:
        """Return whether items of this model would be taken and sent now."""
        items, reason = self.items(model)
        return self._leased_work.is_open and items > 0 and reason is None

    def items(self, model: str) -> tuple[int, str | None]:
        """Return how many more items of a model to hold, and a reason if none or if it is unknown.

        As many should wait as can be in flight or, with quick calls, as many as go out in a moment.
        """
        if not model or not self._upstream.knows(model):
            room = max(0, _UNKNOWN_MODEL_ROOM - self._leased_work.unsent(model))
            return room, Reason.UNKNOWN_CAPACITY if model else None
        if self._upstream.rests_until_ms(model) > self._clock.monotonic_ms() + SHORT_WAIT_MS:
            return 0, self._upstream.closed(model) or Reason.RESTING
        in_flight_max = self._limits.in_flight_max * self._upstream.items_per_call(model)
        can_fly = min(in_flight_max, self._upstream.free_slots(model) + self._leased_work.calls(model))
        unsent = self._leased_work.unsent(model)
        if self._trial.wants_check:
            return max(1, can_fly - unsent), None
        if not can_fly:
            return 0, self._upstream.closed(model) or Reason.NO_AVAILABLE_SLOTS
        wanted = max(can_fly, self._leased_work.ahead(model))
        return (wanted - unsent, None) if unsent <= wanted // 2 else (0, Reason.WORKER_FULL)

    def give_back_resting(self) -> None:
        """Give back items of a model that rests for long, so that other workers can take them.

        A worker that holds as many slices as it may also gives back those of a model with a short
        rest, because others could run in their place.
        """
        is_full = self._leased_work.slice_count >= self._limits.slice_count_max
        from_ms = self._clock.monotonic_ms() + (0 if is_full else SHORT_WAIT_MS)
        for model in self._leased_work.models():
            until_ms = self._upstream.rests_until_ms(model) if model else 0.0
            if until_ms > from_ms:
                self._leased_work.drop_model(model, until_ms)
                self._settler.settle_all()

    def give_back_spent(self, budgets: tuple[Budget, ...]) -> None:
        """Give back all items under these budgets if the budgets are spent for long."""
        now_ms = self._clock.monotonic_ms()
        until_ms = self._upstream.spent_until_ms(budgets)
        if any(limit.tokens is not None for budget in budgets for limit in budget.limits if limit.enabled):
            until_ms = min(until_ms, now_ms + TOKENS_REST_MS_MAX)
        if until_ms > now_ms + SHORT_WAIT_MS:
            for job_and_model in self._leased_work.drop_spent(budgets, until_ms):
                self._job_rests[job_and_model] = until_ms
            self._settler.settle_all()

    async def rest_jobs(self) -> None:
        """Let all workers skip jobs whose own budgets are spent, until a call may be made again."""
        while self._job_rests:
            (job_id, model), until_ms = self._job_rests.popitem()
            wait_ms = int(until_ms - self._clock.monotonic_ms())
            if wait_ms > SHORT_WAIT_MS:
                await self._store.rest_job(job_id, model, wait_ms)


class SliceSettler:
    """A settler that passes finished slices on to record, as done or to go back to the store."""

    def __init__(self, leased_work: LeasedWork, trial: Trial, recorder: Recorder, lease_wake: Listener) -> None:
        self._leased_work = leased_work
        self._trial = trial
        self._recorder = recorder
        self._lease_wake = lease_wake

    def settle_slice(self, state: LeasedSliceState) -> None:
        """Pass a slice on to record if its work here is done."""
        if not self._leased_work.forget_if_done(state):
            return
        if self._trial.is_on and self._trial.end_slice(state):
            self._lease_wake.notify()
        leased = state.slice
        if state.left == 0:
            self._recorder.finish_slice(leased.job_id, leased.first, leased.token)
        else:
            wait_ms = self._leased_work.release_wait_ms(state)
            self._recorder.release_slice(leased.job_id, leased.first, leased.token, wait_ms)

    def settle_all(self) -> None:
        for state in self._leased_work.state():
            self.settle_slice(state)

    def drop_all(self) -> None:
        """Stop sending all slices; calls in flight go on."""
        for state in self._leased_work.state():
            self._leased_work.drop(state)
        self.settle_all()

    def begin_again(self) -> None:
        """Drop all leased work for a new incarnation, which writes its own logs."""
        self._leased_work.lose_lease()
        self.settle_all()
        self._trial.begin_again()
        self._recorder.renew()

    def forget(self, state: LeasedSliceState) -> None:
        """Forget a slice that could not be read; record has nothing to do for it."""
        self._leased_work.forget(state)
        self._trial.end_slice(state)

    def is_settling(self, holding: Holding) -> bool:
        """Return whether record has this slice and has not committed it yet."""
        return self._recorder.is_settling(holding.job_id, holding.first, holding.token)
