"""How much more a worker should hold, and what it gives back to make room: items whose model or budgets rest for long."""

from dataclasses import dataclass

from tidegate.core.budgets.budget import Budget
from tidegate.core.ports import Clock, Upstream
from tidegate.core.schedule import Reason
from tidegate.store.store import Store
from tidegate.worker.leased_work import SHORT_WAIT_MS, LeasedWork
from tidegate.worker.slice_settler import SliceSettler
from tidegate.worker.trial import Trial

_UNKNOWN_MODEL_ROOM = 256


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """How many calls may be in flight from one worker, and how many slices it may hold."""

    in_flight_max: int
    slice_count_max: int


class LeaseRoom:
    def __init__(
        self,
        store: Store,
        upstream: Upstream,
        clock: Clock,
        leased_work: LeasedWork,
        trial: Trial,
        settler: SliceSettler,
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

    def slices_max(self) -> int:
        """Return how many more slices may be leased now."""
        if not self._leased_work.is_open:
            return 0
        return max(self._limits.slice_count_max - self._leased_work.slice_count, int(self._trial.wants_check))

    def has_room(self, model: str) -> bool:
        """Whether items of this model would be taken now."""
        return self._leased_work.is_open and self.items(model)[0] > 0

    def items(self, model: str) -> tuple[int, str | None]:
        """Return how many more items of a model are worth holding, and why, when none: as many as can be in flight, beside those that
        are, or as go out in a moment where calls are quick."""
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

    def give_back_resting(self) -> None:
        """Give back items of a model that rests for long: they are better off in the store than in one worker's hands.

        When the worker holds as many slices as it may, also give back those of a model that rests for a moment, or is probed now and
        then: others could run in their place."""
        is_full = self._leased_work.slice_count >= self._limits.slice_count_max
        from_ms = self._clock.monotonic_ms() + (0 if is_full else SHORT_WAIT_MS)
        for model in self._leased_work.models():
            until_ms = self._upstream.rests_until_ms(model) if model else 0.0
            if until_ms > from_ms:
                self._leased_work.drop_model(model, until_ms)
                self._settler.settle_all()

    def give_back_spent(self, budgets: tuple[Budget, ...]) -> None:
        """Give back every item under these budgets if they allow nothing for long."""
        until_ms = self._upstream.spent_until_ms(budgets)
        if until_ms > self._clock.monotonic_ms() + SHORT_WAIT_MS:
            for job_and_model in self._leased_work.drop_spent(budgets, until_ms):
                self._job_rests[job_and_model] = until_ms
            self._settler.settle_all()

    async def rest_jobs(self) -> None:
        """Have every worker leave jobs alone whose own budgets are spent, until these allow something again."""
        while self._job_rests:
            (job_id, model), until_ms = self._job_rests.popitem()
            wait_ms = int(until_ms - self._clock.monotonic_ms())
            if wait_ms > SHORT_WAIT_MS:
                await self._store.rest_job(job_id, model, wait_ms)
