"""The worker: the loops that keep the road moving in one process.

    beat      stay alive, hear which jobs close, hand back what we did not know we had
    lease     keep enough items in hand
    keys      hear how the keys stand whose items we hold
    runners   send, and pass every verdict on to record
    record    make results durable and commit them
    trial     run alone what may kill its worker
    ingest    small inputs some at a time, large ones a few at once
    close     let jobs expire, and close those of which nothing is out any more
    ship      publish closed jobs
    tend      what lost workers left
    upkeep    everything else, in small bounded passes

It holds nothing that another process could not find in the store.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from tidegate import metrics
from tidegate.core.answers.results import with_cost
from tidegate.core.body_rules.caller_fields import rules_for
from tidegate.core.budgets.budget import Budget, LimitBound, with_limits
from tidegate.core.errors import BlobError, LostRace, StoreError, StoreUnavailable, Withheld, WorkerBroken
from tidegate.core.input.lines import LineRules
from tidegate.core.nouns import Attempts, Holding, Item, Job, LeasedSlice, Recorded
from tidegate.core.ports import Blobs, Clock, Entropy, Upstream, Wake
from tidegate.core.usage.prices import cost
from tidegate.failpoints import hit
from tidegate.guards.guard import Guards
from tidegate.stages.ingest.ingest import IngestStage, RunPass
from tidegate.stages.perform import Again, Answered, Failed, perform
from tidegate.stages.record import Recorder
from tidegate.stages.ship import Ship
from tidegate.stages.tend import compact_extents, deadlines, lost_workers, retention
from tidegate.stages.tend.flows import FlowUpkeep
from tidegate.stages.tend.garbage import Garbage
from tidegate.store.store import Store
from tidegate.worker.kept_worker import until_any
from tidegate.worker.key_states import ASKED_EVERY_MS, KeyStates
from tidegate.worker.leased_work import SHORT_WAIT_MS, LeasedSliceState, LeasedWork
from tidegate.worker.leaser import FillLimits, Leaser
from tidegate.worker.options import WorkerOptions
from tidegate.worker.registration import Registration
from tidegate.worker.scheduler import Scheduler
from tidegate.worker.trial import Trial

log = structlog.get_logger()

_UPKEEP_EVERY = 12
_RETRY_S = 0.5
NOTHING = (0, 0, 0)
_RUNNERS_MAX = 8_192
# While the files of one set of small inputs are made durable, the next set is read.
_SMALL_INGESTS = 3


class Worker:
    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        upstream: Upstream,
        clock: Clock,
        entropy: Entropy,
        wake: Wake,
        incarnation: Registration,
        options: WorkerOptions,
        rules_for: Callable[[Job], LineRules],
        run_pass: RunPass,
        new_blob: Callable[[str, str], Awaitable[str]],
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._upstream = upstream
        self._clock = clock
        self._entropy = entropy
        self._wake = wake
        self._me = incarnation
        self._options = options

        async def new_log_blob(kind: str) -> str:
            return await new_blob(kind, self._me.id)

        self._recorder = Recorder(store, blobs, options.flush, new_log_blob, self._recorded, upstream.recorded)
        self._leased_work = LeasedWork(upstream, clock, lambda: not self._stopping and not self._recorder.full)
        self._lease_wake = wake.listen()
        self._trial = Trial(store, self._leased_work, self._recorder, incarnation, self._lease_wake.notify)
        self._keys = KeyStates(store, clock, options.model_of)
        self._guards = Guards(options.rules, options.reached_by)
        reading = (options.scratch, rules_for, run_pass, options.weight_of, options.model_of, options.ingest)
        self._ingest = IngestStage(store, blobs, entropy, *reading)
        self._ship = Ship(store, blobs, entropy, options.scratch, options.result_expires_after_ms)
        self._garbage = Garbage(store, blobs, clock, options.garbage_safety_ms)
        self._flows = FlowUpkeep(store, options.weight_of)
        chooser = Scheduler(store, clock, options.policy_of, options.slice_items, options.in_flight_caps)
        self._leaser = Leaser(
            store,
            blobs,
            upstream,
            clock,
            entropy,
            self._leased_work,
            chooser,
            incarnation,
            FillLimits(options.in_flight_max, options.slice_count_max),
            options.budgets_of,
            self._keys,
            lambda: not self._stopping and not self._recorder.full,
            self._settle,
            self._trial,
        )
        upstream.on_room(self._room_came)
        self._ship_news, self._broke = asyncio.Event(), asyncio.Event()
        self._stopping = self._left = False
        self._tasks: list[asyncio.Task[None]] = []
        self._runner_count = 0
        self.broken: str | None = None
        self.recorded_count = self.unused_count = 0

    @property
    def in_flight(self) -> int:
        return self._leased_work.in_flight

    def is_idle_with_room(self, model: str) -> bool:
        """Whether nothing is held here though items of this model could be."""
        return self._leased_work.slice_count == 0 and self._leaser.has_room(model)

    def trouble(self) -> str | None:
        """Why this worker takes no new work, in words; None while all is well."""
        if self.broken:
            return f"ends after an internal error: {self.broken}"
        if self._recorder.failing:
            return "finished results cannot be stored now; they are kept and tried again"
        if self._clock.monotonic_ms() >= self._me.safe_until_ms:
            return "the store does not answer heartbeats"
        return None

    async def run(self, stop: asyncio.Event) -> None:
        """Work until told to stop or until an internal error, then hand back what was not sent and finish what was. Raises WorkerBroken
        after an internal error."""
        metrics.worker_broken.set(0)
        self._leased_work.extend_lease(self._me.safe_until_ms)
        loops = [
            self._beat_loop,
            self._lease_loop,
            self._key_loop,
            self._recorder.run,
            self._trial.run,
            *[self._small_ingest_loop] * _SMALL_INGESTS,
            *[self._large_ingest_loop] * self._options.ingest.passes_max,
            self._close_loop,
            self._ship_loop,
            self._tend_loop,
            self._upkeep_loop,
        ]
        self._tasks = [asyncio.create_task(self._guarded(loop)) for loop in loops]
        self._hire()
        try:
            await until_any(stop, self._broke)
            await self._hand_back()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._guards.close()
        if self.broken:
            raise WorkerBroken(self.broken)

    def _hire(self) -> None:
        """One runner for each item that may be out: as many as calls, or more where several items share one."""
        calls = self._options.in_flight_max
        wanted = min(calls * self._upstream.items_per_call(), max(calls, _RUNNERS_MAX))
        while self._runner_count < wanted:
            self._runner_count += 1
            self._tasks.append(asyncio.create_task(self._guarded(self._runner)))

    async def _guarded(self, loop: Callable[[], Awaitable[None]]) -> None:
        """A loop that fails in a way nobody foresaw ends this worker, loudly; what runs goes on to its end."""
        while True:
            try:
                await loop()
                return
            except (StoreUnavailable, BlobError, LostRace) as error:
                log.warning("worker_loop_postponed", loop=loop.__name__, error=str(error))
            except Exception as error:
                if not self.broken:
                    metrics.worker_broken.set(1)
                    self.broken = f"{type(error).__name__} in {loop.__name__}"
                    self._broke.set()
                    for state in self._leased_work.state():
                        self._leased_work.drop(state)
                log.exception("worker_broken", loop=loop.__name__)
            await asyncio.sleep(_RETRY_S)

    # ---- beat

    async def _beat_loop(self) -> None:
        while not self._left:
            try:
                await self._beat()
            except StoreUnavailable as error:
                log.warning("heartbeat_failed", error=str(error))
                await asyncio.sleep(min(_RETRY_S, self._options.heartbeat_ms / 1000))
                continue
            await asyncio.sleep(self._options.heartbeat_ms / 1000)

    async def _beat(self) -> None:
        known, pending = self._leased_work.keys(), set(self._leaser.pending)
        holdings = await self._me.beat()
        if self._left:
            return
        if holdings is None:
            self._leased_work.lose_lease()
            self._settle_all()
            self._trial.begin_anew()
            self._recorder.renew()
            await self._me.begin()
            # What came into our hands while we began was leased to the life that ended.
            self._leased_work.lose_lease()
            self._settle_all()
            self._leased_work.extend_lease(self._me.safe_until_ms)
            return
        self._leased_work.extend_lease(self._me.safe_until_ms)
        # Before anything that the store could fail at: a job that closes must not wait for the next heartbeat.
        for holding in holdings:
            if holding.closing is not None:
                self._close(holding)
        pending |= self._leaser.pending
        unknown = [
            one
            for one in self._leased_work.compare(known, holdings)
            if one.token not in pending and not self._recorder.is_settling(one.job_id, one.first, one.token)
        ]
        self._settle_all()
        self._hire()
        await self._leaser.follow()
        for one in unknown:
            await self._store.release_slice(one.job_id, one.first, one.token, 0)

    def _close(self, holding: Holding) -> None:
        """The job closes: nothing more of it is sent; what is out gets the grace and is then aborted."""
        for state in self._leased_work.close_job(holding.job_id):
            if holding.closing_for_ms >= self._options.grace_ms:
                state.abort()

    # ---- lease

    async def _lease_loop(self) -> None:
        # What this host's spool holds is paid for: it is recorded before any of it could be leased and sent again.
        await lost_workers.deliver_spool(self._store, self._blobs)
        while True:
            if self._stopping or self.broken or not await self._leaser.fill():
                if not self._leased_work.in_flight:
                    self._recorder.hurry()
                await self._lease_wake.wait(self._options.poll_ms / 1000)

    # ---- keys

    async def _key_loop(self) -> None:
        while True:
            if self._leased_work.has_keys():
                await self._keys.ask(self._me.id)
            await asyncio.sleep(ASKED_EVERY_MS / 1000)

    # ---- runners

    async def _runner(self) -> None:
        me = asyncio.current_task()
        assert me is not None
        options, leased_work = self._options, self._leased_work
        while True:
            state, item = await leased_work.next()
            state.calls.add(me)
            verdict: Answered | Failed | Again | None = None
            begun_ms = self._clock.monotonic_ms()
            try:
                verdict = await perform(
                    self._upstream,
                    self._clock,
                    self._entropy,
                    options.retry_of.get(state.slice.model, options.retry),
                    state.slice,
                    state.deadline_ms,
                    item,
                    options.grace_ms,
                    self._begin_by_ms,
                    self._budgets(state),
                    self._keys.denial,
                    self._guards.of(state.slice.tenant, state.slice.key_id, state.slice.model),
                    options.parallel_of(state.slice, self._keys.parallel_max(state.slice)),
                    self._keys.models(state.slice),
                    rules_for(options.fields_of, state.slice.model),
                )
            except asyncio.CancelledError:
                if not state.aborted:
                    raise
                me.uncancel()
            finally:
                state.calls.discard(me)
                leased_work.mark_done(state)
            self._note(state, item, verdict, int(self._clock.monotonic_ms() - begun_ms))

    def _begin_by_ms(self, leased: LeasedSlice) -> float:
        """Until when a call of this slice may begin without anybody being asked again."""
        return min(self._leased_work.lease_until_ms, self._keys.believed_until_ms(leased))

    def _budgets(self, state: LeasedSliceState) -> tuple[Budget, ...]:
        """What binds a call of this slice, with the limits that its key bears now."""
        limits = self._keys.limits(state.slice)
        if limits != state.key_limits:
            state.key_limits = limits
            state.budgets = with_limits(
                self._options.budgets_of(state.slice), LimitBound.KEY, state.slice.key_id or "", limits
            )
        return state.budgets

    def _note(
        self, state: LeasedSliceState, item: Item, verdict: Answered | Failed | Again | None, took_ms: int
    ) -> None:
        leased = state.slice
        if isinstance(verdict, (Answered, Failed)):
            paid = self._cost_nano(verdict)
            record = self._recorder.answered if isinstance(verdict, Answered) else self._recorder.failed
            record(
                leased.job_id,
                item.number,
                verdict.line if paid is None else with_cost(verdict.line, paid),
                verdict.usage,
                leased.first,
                leased.token,
                leased.model,
                leased.item_units,
                verdict.deployment,
                paid or NOTHING,
                took_ms,
            )
            state.end_item(item.number, was_answered=bool(verdict.deployment))
        elif isinstance(verdict, Again):
            was_sent = verdict.count > item.attempt_count or verdict.hand_backs > item.hand_backs
            waits_for_budget = verdict.reason == Withheld.reason and not was_sent
            if was_sent or (verdict.wait_ms > SHORT_WAIT_MS and not waits_for_budget):
                note = Attempts(item.number, verdict.count, verdict.wait_ms, verdict.reason, verdict.hand_backs)
                self._recorder.tried(leased.job_id, leased.token, note)
            item.attempt_count, item.hand_backs = verdict.count, verdict.hand_backs
            if verdict.wait_ms <= SHORT_WAIT_MS:
                self._leased_work.put_back(state, item, verdict.wait_ms)
            elif waits_for_budget:
                self._leased_work.defer_for_budget(state, verdict.wait_ms)
            else:
                self._leased_work.defer(state, verdict.wait_ms)
            if state.budgets:
                self._leaser.give_back_spent(state.budgets)
        if state.dropped or state.left == state.deferred:
            self._settle(state)
        if self._leased_work.is_low(leased.model):
            self._lease_wake.notify()

    def _room_came(self) -> None:
        """An upstream takes more than before: whoever waits looks again."""
        self._leased_work.wake()
        self._lease_wake.notify()

    def _cost_nano(self, answered: Answered | Failed) -> tuple[int, int, int] | None:
        """What its input, cached and output tokens cost; None where nothing costs anything."""
        price = self._options.price_of(answered.deployment) if answered.deployment else None
        if price is None:
            return None
        paid = cost(answered.usage, price, batch=True)
        return paid.input_nano, paid.cached_nano, paid.output_nano

    def _settle(self, state: LeasedSliceState) -> None:
        """Say so when a slice has nothing more to do here: it is done, or it goes back."""
        if not self._leased_work.settle(state):
            return
        if self._trial.end_slice(state):
            self._lease_wake.notify()
        leased = state.slice
        if state.left == 0:
            self._recorder.finish_slice(leased.job_id, leased.first, leased.token)
        else:
            self._recorder.release_slice(
                leased.job_id, leased.first, leased.token, self._leased_work.release_wait_ms(state)
            )

    def _settle_all(self) -> None:
        for state in self._leased_work.state():
            self._settle(state)

    def _recorded(self, recorded: Recorded) -> None:
        self.recorded_count += recorded.new_count
        self.unused_count += recorded.unused_count
        if recorded.complete:
            self._ship_news.set()

    # ---- ingest, ship, tend

    async def _small_ingest_loop(self) -> None:
        await self._ingest_with(self._ingest.next_small)

    async def _large_ingest_loop(self) -> None:
        await self._ingest_with(self._ingest.next_large)

    async def _ingest_with(self, ingest_next: Callable[[str], Awaitable[bool]]) -> None:
        ear = self._wake.listen()
        while True:
            worked = False
            if not self._stopping and not self.broken:
                worked = await ingest_next(self._me.id)
            if worked:
                self._wake.notify()
            else:
                await ear.wait(self._options.poll_ms / 1000)

    async def _close_loop(self) -> None:
        """Apart from publishing: a blob store that is away must not keep other jobs from being closed."""
        while True:
            await deadlines.tend(self._store)
            if await self._ship.close_drained(self._options.grace_ms + 2 * self._options.heartbeat_ms):
                self._ship_news.set()
            await asyncio.sleep(self._options.poll_ms / 1000)

    async def _ship_loop(self) -> None:
        while True:
            self._ship_news.clear()
            await self._ship.publish_all(self._me.id)
            try:
                async with asyncio.timeout(self._options.poll_ms / 1000):
                    await self._ship_news.wait()
            except TimeoutError:
                pass

    async def _tend_loop(self) -> None:
        while True:
            reclaimed = await lost_workers.tend(self._store, self._blobs, self._options.sweep_ms)
            woken = await self._flows.tend()
            if reclaimed or woken:
                self._lease_wake.notify()
            # A log that another host may still deliver is left alone for one sweep, and not for two.
            is_waiting = bool(await self._store.stranded_workers(1))
            await asyncio.sleep(self._options.sweep_ms / (10_000 if is_waiting else 1_000))

    async def _upkeep_loop(self) -> None:
        """Apart from lost workers: nobody's slices wait for a blob store that takes its time to delete."""
        while True:
            await retention.tend(self._store, self._options.job_keep_ms)
            await compact_extents.tend(self._store, self._blobs, self._entropy, self._me.id)
            await self._garbage.tend()
            await self._flows.prune()
            await asyncio.sleep(_UPKEEP_EVERY * self._options.sweep_ms / 1000)

    # ---- stop

    async def _hand_back(self) -> None:
        """Unsent items go back at once; calls in flight get the grace; what they answered is committed before we leave."""
        self._stopping = True
        self._drop_all()
        self._recorder.hurry()
        await self._release_tails()
        await hit("stop_released")
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._options.grace_ms / 1000
        # A lease that was under way comes into the hand after all; left there, its slices would count as a lost worker's.
        while (self._leased_work.in_flight or self._leaser.busy) and loop.time() < end_s:
            self._drop_all()
            self._recorder.hurry()
            await asyncio.sleep(0.05)
        self._drop_all()
        for state in self._leased_work.state():
            state.abort()
        while self._leased_work.in_flight:  # noqa: ASYNC110 - the aborted calls end within this very loop's next turns
            await asyncio.sleep(0)
        self._settle_all()
        try:
            async with asyncio.timeout(max(5.0, end_s - loop.time())):
                await self._recorder.drain()
            for left in await self._me.beat() or []:
                # An internal error may have lost a slice on its way into the hand.
                await self._store.release_slice(left.job_id, left.first, left.token, 0)
            await self._recorder.close()
            self._left = True
            await self._me.leave()
            await lost_workers.adopt_logs(self._store, self._blobs)
        except (TimeoutError, StoreError, BlobError) as error:
            log.warning(
                "worker_stop_timed_out", error=str(error), advice="another worker takes over when the lease runs out"
            )

    async def _release_tails(self) -> None:
        """A slice whose calls are still out keeps only what was sent of it: others run the rest meanwhile."""
        for state in self._leased_work.state():
            leased, open_count = state.slice, self._leased_work.cut(state)
            if not state.in_flight or not open_count:
                continue
            try:
                if await self._store.release_tail(leased.job_id, leased.first, leased.token, state.sent_to):
                    state.left -= open_count
            except StoreUnavailable as error:
                log.warning("slice_release_failed", job=leased.job_id, error=str(error))

    def _drop_all(self) -> None:
        for state in self._leased_work.state():
            self._leased_work.drop(state)
        self._settle_all()
