"""The runners, which send leased items and pass their verdicts on to record."""

import asyncio

from tidegate import metrics
from tidegate.core.errors import Withheld
from tidegate.core.nouns import Attempts, Item, ItemVerdict
from tidegate.core.ports import Listener, Upstream
from tidegate.stages.perform import Again, Performer
from tidegate.stages.record import Recorder
from tidegate.worker.call_rules import LeasedCallRules
from tidegate.worker.leased_work import SHORT_WAIT_MS, LeasedSliceState, LeasedWork
from tidegate.worker.leasing import LeaseRoom, SliceSettler
from tidegate.worker.supervisor import Supervisor

_RUNNERS_MAX = 8_192
_HIRE_EVERY_S = 2.0


class Runners:
    """The service that starts a runner for each item that may be in flight.

    These are as many as calls, or more if several items share a call.
    """

    def __init__(self, runner: "Runner", supervisor: Supervisor, upstream: Upstream, in_flight_max: int) -> None:
        self._runner = runner
        self._supervisor = supervisor
        self._upstream = upstream
        self._in_flight_max = in_flight_max
        self._count = 0

    async def run(self) -> None:
        """Start as many runners as are needed, and look again now and then.

        A deployment that takes more items in a call may be added.
        """
        while True:
            calls = self._in_flight_max
            wanted = min(calls * self._upstream.items_per_call(), max(calls, _RUNNERS_MAX))
            while self._count < wanted:
                self._count += 1
                self._supervisor.start("runner", self._runner.run)
            await asyncio.sleep(_HIRE_EVERY_S)


class Runner:
    """A runner of one item after another; as many tasks run it as items may be in flight."""

    def __init__(
        self,
        leased_work: LeasedWork,
        rules: LeasedCallRules,
        performer: Performer,
        recorder: Recorder,
        settler: SliceSettler,
        room: LeaseRoom,
        lease_wake: Listener,
    ) -> None:
        self._leased_work = leased_work
        self._rules = rules
        self._performer = performer
        self._recorder = recorder
        self._settler = settler
        self._room = room
        self._lease_wake = lease_wake

    async def run(self) -> None:
        me = asyncio.current_task()
        assert me is not None
        while True:
            state, item = await self._leased_work.next()
            state.calls.add(me)
            verdict: ItemVerdict | Again | None = None
            try:
                self._rules.bind(state)
                verdict = await self._performer.perform(state, item)
            except asyncio.CancelledError:
                if not state.aborted:
                    raise
                me.uncancel()
            finally:
                state.calls.discard(me)
                self._leased_work.mark_done(state)
            self._note(state, item, verdict)

    def _note(self, state: LeasedSliceState, item: Item, verdict: ItemVerdict | Again | None) -> None:
        """Pass on the verdict on an item; None means that the call was aborted."""
        if isinstance(verdict, ItemVerdict):
            self._recorder.record(verdict)
            state.end_item(item.number, was_answered=bool(verdict.finished.deployment))
            if state.is_lost:
                self._recorder.commit_first()
        elif isinstance(verdict, Again):
            self._try_again(state, item, verdict)
        if state.dropped or state.left == state.deferred:
            self._settler.settle_slice(state)
        if self._leased_work.is_low(state.slice.model):
            self._lease_wake.notify()
        if self._leased_work.is_idle:
            # No other answer comes soon that could share a flush with this one.
            self._recorder.hurry()

    def _try_again(self, state: LeasedSliceState, item: Item, again: Again) -> None:
        """Keep an item that waits briefly; let one that waits for long go back with its slice."""
        was_sent = again.count > item.attempt_count or again.hand_backs > item.hand_backs or bool(again.tries)
        waits_for_budget = again.reason == Withheld.reason and not was_sent
        if was_sent or (again.wait_ms > SHORT_WAIT_MS and not waits_for_budget):
            tries = again.tries or item.tries
            note = Attempts(
                item.number, again.count, again.wait_ms, again.reason, again.hand_backs, item.alone_losses, tries
            )
            self._recorder.tried(state.slice.job_id, state.slice.token, note)
        item.count_attempts(again.count, again.hand_backs)
        if again.tries:
            item.note_answer(again.tries, again.rejected_text)
        if again.wait_ms <= SHORT_WAIT_MS:
            self._leased_work.put_back(state, item, again.wait_ms)
        elif waits_for_budget:
            self._leased_work.defer_for_budget(state, again.wait_ms)
        else:
            self._leased_work.defer(state, again.wait_ms)
            metrics.model_deferred_items.of(again.reason).inc()
        if state.budgets:
            self._room.give_back_spent(state.budgets)
