"""Keep a worker's hand full: lease what the scheduler chooses while there is room, read its items, give back what must wait for long.

It sends nothing and records nothing. A slice that is on its way into the hand is named in `pending` until it is there, so that a
heartbeat does not take it for one that nobody knows of.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from tidegate.core.budgets.budget import Budget
from tidegate.core.errors import BlobError, BlobMissing, StoreUnavailable
from tidegate.core.nouns import LeasedSlice, LineError
from tidegate.core.ports import Blobs, Clock, Entropy, Upstream
from tidegate.core.schedule import Reason
from tidegate.stages import lease
from tidegate.store.store import Store
from tidegate.worker.key_states import KeyStates
from tidegate.worker.leased_work import SHORT_WAIT_MS, LeasedSliceState, LeasedWork
from tidegate.worker.registration import Registration
from tidegate.worker.scheduler import Scheduler
from tidegate.worker.trial import Trial

log = structlog.get_logger()

_UNKNOWN_MODEL_ROOM = 256


@dataclass(frozen=True, slots=True)
class FillLimits:
    in_flight_max: int
    slice_count_max: int


class Leaser:
    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        upstream: Upstream,
        clock: Clock,
        entropy: Entropy,
        leased_work: LeasedWork,
        chooser: Scheduler,
        me: Registration,
        limits: FillLimits,
        budgets_of: Callable[[LeasedSlice], tuple[Budget, ...]],
        keys: KeyStates,
        may_take: Callable[[], bool],
        settle: Callable[[LeasedSliceState], None],
        trial: Trial,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._upstream = upstream
        self._clock = clock
        self._entropy = entropy
        self._leased_work = leased_work
        self._scheduler = chooser
        self._me = me
        self._limits = limits
        self._budgets_of = budgets_of
        self._keys = keys
        self._may_take = may_take
        self._settle = settle
        self._trial = trial
        self._job_rests: dict[tuple[str, str], float] = {}
        self.pending: set[str] = set()
        self.busy = False

    async def follow(self) -> None:
        """Take over the mode that an operator has switched the scheduler to, if any."""
        await self._scheduler.follow()

    async def fill(self) -> bool:
        """Lease what there is room for; False when there was nothing to take, no room, or nothing of it could be read."""
        self.busy = True
        try:
            return await self._fill()
        finally:
            self.busy = False

    async def _fill(self) -> bool:
        self._leased_work.wake()
        self._give_back_resting()
        slices_max = max(self._limits.slice_count_max - self._leased_work.slice_count, int(self._trial.wants_check))
        if slices_max <= 0 or not self._may_take() or self._clock.monotonic_ms() >= self._me.safe_until_ms:
            return False
        worker_id = self._me.id
        await self._rest_jobs()
        choice = await self._scheduler.choose(worker_id, self._room, slices_max, self._trial)
        if not choice.picks or not self._may_take():
            return False
        picks = [(pick, self._entropy.token_bytes(16).hex()) for pick in choice.picks]
        tokens = {token for _, token in picks}
        self.pending |= tokens
        try:
            bounds = lease.SuspectBounds(
                self._trial.suspects_max(choice.suspects),
                keeps_rest=choice.suspects.is_searching and not self._trial.wants_check,
            )
            taken = await lease.take(self._store, self._clock, worker_id, picks, bounds)
            leased = [LeasedSliceState(one, until_ms) for one, until_ms in taken]
            if worker_id != self._me.id:
                return False
            for state in leased:
                state.budgets = self._budgets_of(state.slice)
                self._leased_work.expect(state)
            self._trial.begin_group(leased)
        finally:
            self.pending -= tokens
        await self._learn_keys(leased)
        # All of them, also when one fails: nobody else reads the others.
        begun = await asyncio.gather(*[self._begin_slice(state) for state in leased], return_exceptions=True)
        for result in begun:
            if isinstance(result, BaseException):
                raise result
        return any(begun)

    async def _learn_keys(self, leased: list[LeasedSliceState]) -> None:
        """Ask about keys that came only now; while nobody can say how they stand, their items wait."""
        if not all(self._keys.knows(state.slice.key_id) for state in leased):
            try:
                await self._keys.ask(self._me.id)
            except StoreUnavailable as error:
                log.warning("key_states_unavailable", error=str(error))

    async def _begin_slice(self, state: LeasedSliceState) -> bool:
        """Read a slice's items into the hand; False when they cannot be had."""
        leased = state.slice
        try:
            items = await lease.read_items(self._blobs, leased)
        except BlobMissing as error:
            self._forget(state)
            log.error("work_file_gone", job=leased.job_id, error=str(error))
            await self._store.fail_job(
                leased.job_id, LineError("work_file_gone", "The batch's stored requests are gone.")
            )
            await self._store.release_slice(leased.job_id, leased.first, leased.token, 0)
        except BlobError as error:
            self._forget(state)
            log.warning("work_file_read_failed", job=leased.job_id, error=str(error))
            await self._store.release_slice(leased.job_id, leased.first, leased.token, SHORT_WAIT_MS)
        except BaseException:
            self._forget(state)
            raise
        else:
            self._leased_work.add(state, items)
            self._settle(state)
            return True
        return False

    def has_room(self, model: str) -> bool:
        """Whether items of this model would be taken now."""
        return self._may_take() and self._room(model)[0] > 0

    def _forget(self, state: LeasedSliceState) -> None:
        self._leased_work.forget(state)
        self._trial.end_slice(state)

    def _room(self, model: str) -> tuple[int, str | None]:
        """How many more items of a model are worth holding, and why, when none: as many as can be in flight, beside those that are, or
        as go out in a moment where calls are quick."""
        if not model or not self._upstream.knows(model):
            return max(0, _UNKNOWN_MODEL_ROOM - self._leased_work.unsent(model)), None
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

    def _give_back_resting(self) -> None:
        """Items of a model that rests for long are better off in the store than in one worker's hands.

        When the hand is full, also those of one that rests for a moment, or is probed now and then: others could run in their place."""
        is_full = self._leased_work.slice_count >= self._limits.slice_count_max
        from_ms = self._clock.monotonic_ms() + (0 if is_full else SHORT_WAIT_MS)
        for model in self._leased_work.models():
            until_ms = self._upstream.rests_until_ms(model) if model else 0.0
            if until_ms > from_ms:
                self._leased_work.drop_model(model, until_ms)
                self._settle_all()

    def give_back_spent(self, budgets: tuple[Budget, ...]) -> None:
        """Items whose own budgets bear nothing for long go back, and so do the others under the same budgets."""
        until_ms = self._upstream.spent_until_ms(budgets)
        if until_ms > self._clock.monotonic_ms() + SHORT_WAIT_MS:
            for job_and_model in self._leased_work.drop_spent(budgets, until_ms):
                self._job_rests[job_and_model] = until_ms
            self._settle_all()

    async def _rest_jobs(self) -> None:
        """Jobs whose own budgets are spent are left alone by everyone until these bear something again."""
        while self._job_rests:
            (job_id, model), until_ms = self._job_rests.popitem()
            wait_ms = int(until_ms - self._clock.monotonic_ms())
            if wait_ms > SHORT_WAIT_MS:
                await self._store.rest_job(job_id, model, wait_ms)

    def _settle_all(self) -> None:
        for state in self._leased_work.state():
            self._settle(state)
