"""The search for an item that kills its workers, beside the other work.

Slices that have lost three owners or more are suspects. A worker runs its suspects in groups:

1. half of those that lost the most owners,
2. the rest of those, but for a few,
3. all others at once.

All other slices run beside them. A group that ends is innocent. If a group is lost with its worker,
the next worker begins with half of it.

A single item that lost many owners runs alone: its worker has no other call in flight, and the
store knows of the item before it is sent. Only such losses can fail an item, and the second and
later ones count only if another item ran alone in between and its worker survived. So workers that
are killed from outside fail no item.

An item that runs alone stops all other work, so a worker with other work spends a tenth of its time
on trials:

- Before the first trial it ends nine times as many calls as a trial displaces.
- Between two trials it works nine times as long as the last one stopped it, at most a minute.
- The item goes back to the store until then.

In a worker without other work the item runs at once.
"""

import asyncio
from collections.abc import Callable
from enum import IntEnum

import structlog

from tidegate.core.errors import StoreUnavailable
from tidegate.core.nouns import Item
from tidegate.core.ports import Listener
from tidegate.core.retry import ALONE_LOSSES_MAX
from tidegate.core.schedule.snapshot import Suspects
from tidegate.stages.lease import SuspectBounds
from tidegate.stages.record import Recorder
from tidegate.store.road.leases import ALL_SUSPECTS, KEPT_FOR_CHECKS, SUSPECT_AFTER
from tidegate.store.store import Store
from tidegate.worker.leased_work import SHORT_WAIT_MS, LeasedSliceState, LeasedWork
from tidegate.worker.registration import Registration

log = structlog.get_logger()

# A single suspect that lost fewer owners runs beside others, because running alone stops all other
# calls.
ALONE_AFTER = 4
REST_S_MAX = 60.0
REST_SHARE = 9
# A trial takes the time of three calls: those in flight end, then the check's item runs, then the
# suspect.
FIRST_ROUNDS = REST_SHARE * 3
_LOOK_AGAIN_S = 1.0
_POLL_S = 0.02
_CHECK_WAIT_S = 2.0
# For this long only innocent items are taken for a check: of two culprits, each could be the
# other's check.
_INNOCENT_WAIT_S = 1.0
_RETRY_S = 0.5


class _Stage(IntEnum):
    HALF = 0
    REST = 1
    ALL = 2


class Trial:
    def __init__(
        self,
        store: Store,
        leased_work: LeasedWork,
        recorder: Recorder,
        me: Registration,
        lease_wake: Listener,
    ) -> None:
        """Search in the leased work; `lease_wake` makes the worker lease at once."""
        self._store = store
        self._leased_work = leased_work
        self._recorder = recorder
        self._me = me
        self._lease_wake = lease_wake
        # True while there may be suspects. Otherwise leasing need not ask this trial.
        self.is_on = False
        self._stage = _Stage.HALF
        self._level = 0
        self._group: set[LeasedSliceState] = set()
        self._has_sent = False
        self._alone: LeasedSliceState | None = None
        self.wants_check = False
        self._takes_suspect = False
        self._alone_wanted = asyncio.Event()
        self._begun_s: float | None = None
        self._rests_until_s: float | None = None
        self._began_alone_s = 0.0

    def begin_again(self) -> None:
        """Forget the groups that ended, because a new incarnation or a new search begins."""
        self._stage, self._level, self._has_sent = _Stage.HALF, 0, False
        self._group.clear()

    @property
    def hides_suspects(self) -> bool:
        """Return whether this worker takes no suspects now.

        It does not while it holds a group of them, or looks for an innocent item for a check.
        """
        if self.wants_check:
            return not self._takes_suspect
        return bool(self._group) and self._stage is not _Stage.ALL

    def suspects_max(self, seen: Suspects) -> int:
        """Return how many suspect slices this worker may hold, after a look at ready ones."""
        if self.wants_check:
            return len(self._group) + int(self._takes_suspect)
        if self.hides_suspects:
            return 0
        if not seen.count:
            if not self._group:
                self.begin_again()
                self.is_on = self._alone is not None
            # A suspect that became ready since the look was not counted. The next look counts it.
            return len(self._group)
        self.is_on = True
        if seen.level > self._level:
            self.begin_again()
        elif self._stage is _Stage.REST and seen.level < self._level:
            self._stage = _Stage.ALL
        # Worse suspects may come later, from a model that had no room or was resting. They are
        # halved again.
        self._level = seen.level
        return self._bound(seen)

    def bounds(self, seen: Suspects) -> SuspectBounds:
        """Return how many suspects may be leased, and whether other slices wait for the search."""
        return SuspectBounds(self.suspects_max(seen), keeps_rest=seen.is_searching and not self.wants_check)

    def _bound(self, seen: Suspects) -> int:
        kept = max(0, seen.count - KEPT_FOR_CHECKS)
        if seen.out_level > seen.level:
            return 0
        bounds = {_Stage.HALF: (seen.count + 1) // 2, _Stage.REST: kept or seen.count, _Stage.ALL: ALL_SUSPECTS}
        bound = bounds[self._stage]
        return min(bound, kept) if seen.out_level == seen.level else bound

    def begin_group(self, leased: list[LeasedSliceState]) -> None:
        """Add the suspects among fresh leased slices.

        A single one that lost many owners will run alone.
        """
        self._group.update(state for state in leased if state.slice.lost_count >= SUSPECT_AFTER)
        if self.hides_suspects and len(self._group) == 1 and self._alone is None:
            (only,) = self._group
            if _goes_alone(only):
                self._stop_others_for(only)

    def _stop_others_for(self, only: LeasedSliceState) -> None:
        now_s = asyncio.get_running_loop().time()
        rests_s = self._rests_s(now_s)
        if rests_s > 0 and self._leased_work.slice_count > 1:
            self._group.discard(only)
            only.rest(rests_s * 1000)
            return
        self._alone, self._began_alone_s = only, now_s
        self._leased_work.send_one_at_a_time()
        self._alone_wanted.set()

    def _rests_s(self, now_s: float) -> float:
        """Return how long this worker must work before it runs an item alone, by its pace."""
        if self._rests_until_s is not None:
            return self._rests_until_s - now_s
        if self._begun_s is None:
            self._begun_s = now_s
        worked_s = now_s - self._begun_s
        ended, wanted = self._leased_work.ended_count, FIRST_ROUNDS * max(1, self._leased_work.in_flight_most)
        if ended >= wanted:
            return 0.0
        left_s = worked_s * (wanted / ended - 1) if ended else 0.0
        return min(max(left_s, _LOOK_AGAIN_S), REST_S_MAX - worked_s)

    def end_slice(self, state: LeasedSliceState) -> bool:
        """Note that the work on this slice is done here.

        Return True if the whole group has ended, so that the next one may be larger.
        """
        if state not in self._group:
            return False
        self._group.discard(state)
        # A group without the worst suspects, perhaps of another model, proves nothing about them.
        # Nor does a slice that is given up, because it was not sent; the search goes on at once.
        is_given_up = _alone_losses(state) >= ALONE_LOSSES_MAX
        is_worst = state.slice.lost_count >= self._level
        self._has_sent = self._has_sent or (state.sent_to > 0 and is_worst and not is_given_up)
        if self._group:
            return False
        if not self._has_sent:
            return is_given_up
        self._has_sent = False
        self._stage = _Stage(min(self._stage + 1, _Stage.ALL))
        return True

    async def run(self) -> None:
        """Run the items that must run alone, without end."""
        self._begun_s = asyncio.get_running_loop().time()
        while True:
            await self._alone_wanted.wait()
            self._alone_wanted.clear()
            try:
                if self._alone is not None:
                    await self._run_alone(self._alone)
            finally:
                self._alone = None
                self._leased_work.reopen()
                now_s = asyncio.get_running_loop().time()
                self._rests_until_s = now_s + min(REST_SHARE * (now_s - self._began_alone_s), REST_S_MAX)

    async def _run_alone(self, state: LeasedSliceState) -> None:
        await _until(lambda: not self._leased_work.in_flight and not self._leased_work.is_reading)
        entry = next((entry for entry in self._leased_work.queued() if entry[0] is state), None)
        if entry is None:
            return
        log.info("item_runs_alone", job=state.slice.job_id, item=entry[1].number, lost_count=state.slice.lost_count)
        is_checked = _alone_losses(state) > 0 and await self._check(state)
        if await self._say(entry, is_checked=is_checked):
            await self._flies(entry)
        await self._say(None)

    async def _check(self, suspect: LeasedSliceState) -> bool:
        """Run another item alone first, the least suspected one.

        Return True if a model server answered it. Return False if there is no other item, or if it
        was not sent, for example because of a spent budget.
        """
        others = await self._others(suspect)
        log.info("item_check_started", others=len(others))
        if not others:
            return False
        entry = min(others, key=lambda entry: entry[0].slice.lost_count)
        return await self._say(entry) and await self._flies(entry) and entry[0].answered_number == entry[1].number

    async def _others(self, suspect: LeasedSliceState) -> list[tuple[LeasedSliceState, Item]]:
        """Return the items that wait here besides the suspect.

        If there are none, lease one more slice: an innocent one, or after a while a suspect.
        """
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        try:
            while True:
                others = [entry for entry in self._leased_work.queued() if entry[0] is not suspect]
                waited_s = loop.time() - begin_s
                if others or suspect.dropped or waited_s >= _CHECK_WAIT_S:
                    return others
                self.wants_check, self._takes_suspect = True, waited_s >= _INNOCENT_WAIT_S
                self._lease_wake.notify()
                await asyncio.sleep(_POLL_S)
        finally:
            self.wants_check = self._takes_suspect = False

    async def _flies(self, entry: tuple[LeasedSliceState, Item]) -> bool:
        """Send this item alone and wait until its outcome is committed.

        Return False if it could not be sent soon.
        """
        state, _ = entry
        self._leased_work.admit(entry)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + SHORT_WAIT_MS / 1000
        while self._leased_work.admitted is entry:
            if state.dropped or loop.time() >= end_s:
                self._leased_work.admit(None)
                return False
            await asyncio.sleep(_POLL_S)
            self._leased_work.wake_one()
        leased = state.slice
        await _until(lambda: not self._leased_work.in_flight)
        self._recorder.hurry()
        await _until(lambda: not self._recorder.is_settling(leased.job_id, leased.first, leased.token))
        return True

    async def _say(self, entry: tuple[LeasedSliceState, Item] | None, *, is_checked: bool = False) -> bool:
        """Tell the store which item runs alone now. Return False if this incarnation is over."""
        item = (entry[0].slice.job_id, entry[1].number) if entry else None
        worker_id = self._me.id
        while worker_id == self._me.id:
            try:
                return await self._store.run_alone(worker_id, item, is_checked=is_checked)
            except StoreUnavailable as error:
                log.warning("item_alone_mark_failed", error=str(error))
                await asyncio.sleep(_RETRY_S)
        return False


def _alone_losses(state: LeasedSliceState) -> int:
    return max((attempts.alone_losses for attempts in state.slice.attempts.values()), default=0)


def _goes_alone(state: LeasedSliceState) -> bool:
    """Return whether this slice is one item that must run alone and is not given up."""
    leased = state.slice
    return leased.count == 1 and leased.lost_count >= ALONE_AFTER and _alone_losses(state) < ALONE_LOSSES_MAX


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - many events can make it true, and waits are rare
        await asyncio.sleep(_POLL_S)
