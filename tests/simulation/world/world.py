"""One run: a database, a disk, a model server, customers, and processes that live and die as the seed says.

First trouble for a while, then clear weather in which every job must end, then everybody leaves, a janitor sweeps, and the judge looks.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.simulation.world.background import BackgroundCallers, TurnWatch
from tests.simulation.world.control_watch import ControlWatch
from tests.simulation.world.customers import Customers, Order
from tests.simulation.world.disk import Disk, ProcessBlobs
from tests.simulation.world.driver import ProcessDriver, now
from tests.simulation.world.dry_runs import DryRuns
from tests.simulation.world.engine import build_road, build_worker
from tests.simulation.world.fairness import Fairness
from tests.simulation.world.judge import Judge
from tests.simulation.world.loop import Stuck, VirtualLoop
from tests.simulation.world.meter import Meter, Rests, Revocations
from tests.simulation.world.plan import Plan
from tests.simulation.world.process import Process, outside
from tests.simulation.world.provider import Provider
from tests.simulation.world.receiver import Receiver
from tests.simulation.world.redis_server import RedisServer
from tests.simulation.world.rules import Rules
from tests.simulation.world.search import Search
from tests.simulation.world.settings import PIECES_MAX, overheard, tiny_settings
from tests.simulation.world.store_time import StoreTime
from tests.simulation.world.tables import Tables
from tests.simulation.world.tide_watch import TideWatch
from tests.simulation.world.trace import Trace
from tests.simulation.world.users import Users
from tests.simulation.world.weather import Weather
from tests.simulation.world.witness import Witnessed
from tests.simulation.world.work_files import WorkFiles
from tidegate.core.errors import StoreUnavailable
from tidegate.core.job_controls import NO_CONTROLS
from tidegate.core.states import JOB_ENDED
from tidegate.interactive_usage import InteractiveUsageBook
from tidegate.stages.deliver import WebhookDeliveries
from tidegate.stages.tend import clock
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.store import Store
from tidegate.worker.registration import Registration

CHAOS_S = 0.3
# After this no job waits any more for a worker that was lost, nor for a store that was slow.
SETTLED_S = 15.0
LEAVE_S = 60.0
CLOCK_STEPS_MS = (-600_000, -60_000, -1_500, 900, 1_500, 5_000, 60_000, 600_000, 600_000)
JANITOR_S = 90.0


class Broken(Exception):
    """A promise was broken."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run ended. `broken` says which promise was not kept; None when all were."""

    plan: Plan
    broken: str | None
    digest: str
    last: list[str]
    virtual_s: float
    call_count: int
    loss_count: int
    step_count: int
    runnable_count: int
    states: frozenset[str]


class SimulatedWorld:
    def __init__(self, plan: Plan, scratch: Path) -> None:
        self.plan = plan
        self.loop = VirtualLoop()
        self.trace = Trace(self.loop.time)
        self.weather = Weather(plan)
        self.disk = Disk(self.weather, self.loop.time)
        self.processes: list[Process] = []
        self.leaving = False
        self.broken: str | None = None
        self._scratch = scratch
        self.time = StoreTime(self.loop, self.breaks)
        self.redis = RedisServer(self.loop, self.weather, self.breaks)
        self._inner = SqliteDriver(None, self.time.clock)
        self._store = Store(self._inner)
        now(self._store.migrate())
        self.connection = self._inner._writer
        self.rules = Rules(self.connection, self.breaks, plan.grace_ms, self.time)
        self.rules.on_ended = self._job_ended
        self.work_files = WorkFiles(self.connection, self.disk)
        self.provider = Provider(self.loop, self.weather, self.trace, self._check_call, self.work_files.number_of)
        self.dry_runs = DryRuns(plan, self._store, self.disk, scratch, self.connection, self.breaks)
        self.customers = Customers(plan, self._store, self.disk, self.trace, self.dry_runs)
        self.tables = Tables(plan, scratch.with_name("tables"), self.breaks)
        self.background = BackgroundCallers(plan, self.customers, self.trace)
        self.users = Users(plan, self.customers, self.provider, self.trace, self.breaks)
        self.controls = ControlWatch(plan, self.connection, self.customers.by_job, self.loop.time, self.breaks)
        self.turns = TurnWatch(plan, self.customers.by_job, self.breaks)
        self.tides = TideWatch(
            plan,
            self.provider.user_calls,
            self.users.visits,
            self.customers.by_job,
            self.rules.closed_at_s,
            self.breaks,
        )
        self.receiver = Receiver(plan, self.customers, self.trace, self.breaks)
        self.judge: Judge | None = None
        self.meter: Meter | None = None
        self.fairness: Fairness | None = None
        self._poison_until_s = 0.0
        self.search: Search | None = None
        self.rests = Rests(self.breaks)
        self.revocations = Revocations(self.breaks)
        self._visits: list[asyncio.Task[None]] = []
        self._published: dict[str, str] = {}

    def breaks(self, what: str) -> None:
        """Note the first broken promise and end the run."""
        self.broken = self.broken or what
        self.loop.halt(Broken(what))

    # ---- the run

    async def run(self) -> None:
        await self.customers.prepare(self.tables.parts_of)
        self.provider.poison = self.customers.poison
        for order in self.customers.orders:
            self._expect(order)
        calls, poison = self.provider.calls, self.customers.poison
        self.search = Search(self.plan, self.connection, calls, self.breaks)
        self.judge = Judge(
            self.plan,
            self.connection,
            self.disk,
            self.rules,
            calls,
            poison,
            self.search,
            self.tides,
            self.customers.revocations,
            self.breaks,
        )
        self.fairness = Fairness(self.plan, self.connection, self.disk, self.customers.by_job, self.breaks)
        self.rules.on_commit = self._after_commit
        self.meter = Meter(self.plan.estate, self.customers.by_job, self.rules, self.breaks)
        for order in self.customers.orders:
            self._visits.append(self.loop.create_task(self._serve(order)))
            for act in self._acts(order):
                self._visits.append(self.loop.create_task(act))
        for key_id, at_s in self.customers.revocations.items():
            self._visits.append(self.loop.create_task(self._revoke(key_id, at_s)))
        for order in self.background.orders():
            self._visits.append(self.loop.create_task(self._accept(order)))
        if self.plan.estate.override_mode is not None:
            self._visits.append(self.loop.create_task(self._override(self.plan.estate.override_mode)))
        for _ in range(self.plan.process_count):
            self._spawn()
        coming = self.loop.create_task(self.users.come(lambda: self.processes)) if self.plan.strength("users") else None
        while self.loop.time() < self.plan.trouble_s:
            await asyncio.sleep(CHAOS_S)
            self._chaos()
            if self._all_done():
                break
        if coming is not None:
            coming.cancel()
        self._heal()
        await self._until_all_ended()
        await asyncio.sleep(self.plan.lease_ms / 1000)
        await self._until_all_answered()
        self.tides.check_end(self.processes, self.provider.calls)
        await self._all_leave()
        await self._sweep()
        for order in self.customers.orders:
            if order.job_id not in self.judge.gone:
                self._check_published(order.job_id)
        self.judge.judge(self.customers.orders)
        self.controls.judge(self.judge, self.provider.calls)
        self.dry_runs.judge()
        self.tables.judge(self.judge)
        self.receiver.judge(self.connection, self.judge.gone)
        self.users.judge(self.connection)

    def _after_commit(self, verb: str) -> None:
        assert self.fairness is not None
        assert self.search is not None
        self.time.check()
        self.fairness.after_commit(verb)
        self.search.after_commit()
        self.controls.after_commit()

    def _check_call(self, seen: list[Witnessed]) -> None:
        assert self.meter is not None
        call = seen[0]
        self.meter.check(call)
        if call.user is not None:
            self.users.check(call)
            if call.user.is_flex:
                self.tides.check(call)
        else:
            for one in seen:
                self.rules.check_call(one)
                self.controls.check_call(one)
            self.turns.check(call)
            if not call.is_turned:
                self.tides.check(call)
            self.revocations.check(call, self.customers.key_of(call.job_id))
        if not self.plan.strength("connect_slow"):
            # A connection that is being made does not see the answer that another one gets.
            self.rests.check(call)

    def _all_done(self) -> bool:
        """Whether every customer has come and every job has ended: what follows would be idle."""
        return not self._open_jobs() and all(task.done() for task in self._visits)

    async def _serve(self, order: Order) -> None:
        await asyncio.sleep(order.begin_s)
        await self.customers.create(order)
        if order.cancel_s is not None:
            await asyncio.sleep(order.cancel_s - order.begin_s)
            await self.customers.cancel(order)

    async def _accept(self, order: Order) -> None:
        await self.background.call(order, lambda: self.processes, self._may_become)
        if order.cancel_s is not None:
            await asyncio.sleep(max(0.0, order.cancel_s - self.loop.time()))
            await self.customers.cancel(order)

    def _may_become(self, order: Order, job_id: str) -> None:
        """A process may make this job of the order; whether it did is not known yet."""
        self.customers.by_job[job_id] = order
        self.provider.job_ids.setdefault(order.name, []).append(job_id)

    def _acts(self, order: Order) -> Iterator[Coroutine[Any, Any, None]]:
        """What the caller of an order does beside creating and cancelling it."""
        actions, customers = order.actions, self.customers
        for paused_s, resumed_s in actions.pauses:
            yield self._later(order, paused_s, customers.pause)
            if resumed_s is not None:
                yield self._later(order, resumed_s, customers.resume)
        if actions.moved_s is not None:
            yield self._later(order, actions.moved_s, customers.move)
        if actions.window_s is not None:
            yield self._later(order, actions.window_s, customers.set_window)
        if actions.ranked_s:
            yield self._later(order, actions.ranked_s, customers.rank)
        if actions.thresholds is not NO_CONTROLS:
            yield self._bind(order)
        if actions.word:
            yield self._say(order)
        if actions.retries:
            yield self._retry(order)
        if actions.is_edited:
            yield self._edit(order)
        for at_s in actions.deletes_s:
            yield self._later(order, at_s, self._delete)
        if actions.deleted_after_s is not None:
            yield self._delete_ended(order, actions.deleted_after_s)

    async def _later(self, order: Order, after_s: float, act: Callable[[Order], Awaitable[Any]]) -> None:
        await asyncio.sleep(order.begin_s + after_s)
        await act(order)

    async def _bind(self, order: Order) -> None:
        if order.actions.changed_s is not None:
            await self._later(order, order.actions.changed_s, self.customers.set_thresholds)
        self.controls.bound.add(order.job_id)

    async def _say(self, order: Order) -> None:
        """Until it is taken, or the job has ended: a canary that has not begun cannot be stopped."""
        await asyncio.sleep(order.begin_s + order.actions.word_s)
        while not self._has_ended(order):
            before, self.controls.words[order.job_id] = self.controls.words.get(order.job_id, ""), order.actions.word
            if await self.customers.say(order):
                return
            self.controls.words[order.job_id] = before
            await asyncio.sleep(1)

    async def _retry(self, order: Order) -> None:
        """Run what has no answer again, and then what has none still."""
        assert self.judge is not None
        for choice in order.actions.retries:
            await self._until(lambda order=order: self._has_ended(order))  # type: ignore[misc]
            is_gone = order.job_id in self.judge.gone
            custom_ids = [] if is_gone else self.judge.retried_ids(order.job_id, choice)
            job_id, same = [await self.customers.retry(order, choice) for _ in range(2)]
            if job_id is None:
                return
            if is_gone:
                self.breaks(f"delete: {order.name} is gone, and {job_id} runs lines of it again")
            if same != job_id:
                self.breaks(f"retry: {order.name} was asked for twice and is both {job_id} and {same}")
            order = self.customers.add_retry(order, job_id, custom_ids)
            self._expect_again(order)

    async def _edit(self, order: Order) -> None:
        """Send an edited input when its first version has ended; what was answered is not run again."""
        await self._until(lambda: self._has_ended(order))
        edited = await self.customers.send_edited(order, self.customers.new_job_id())
        if edited is not None:
            self._expect_again(edited)

    async def _delete_ended(self, order: Order, after_s: float) -> None:
        """Delete a job so long after its end."""
        await self._until(lambda: self._has_ended(order))
        await asyncio.sleep(after_s)
        await self._delete(order)

    async def _delete(self, order: Order) -> None:
        """Ask for the deletion of a job: only one that has ended goes, and it goes at once."""
        assert self.judge is not None
        goes = self._has_ended(order) and order.job_id not in self.judge.gone
        if goes:
            if order.job_id in self._published:
                self._check_published(order.job_id)
            self.work_files.remember(order.job_id)
            self.controls.judge_job(order, self.judge)
            self.judge.judge_deletion(order)
        await self.customers.delete(order)
        if goes and order.job_id not in self.rules.deleted:
            self.breaks(f"delete: {order.name} had ended, and is still there")

    def _expect_again(self, order: Order) -> None:
        """Expect an order with lines that ran before."""
        self._expect(order)
        if order.actions.deleted_after_s is not None:
            self._visits.append(self.loop.create_task(self._delete_ended(order, order.actions.deleted_after_s)))
        if self.customers.poison.intersection(order.tags):
            # With nothing to be compared with, poison runs until its deadline.
            self._poison_until_s = self.loop.time() + order.window_ms / 1000 + SETTLED_S

    def _expect(self, order: Order) -> None:
        """Let the model servers know whose calls come."""
        self.provider.job_ids.setdefault(order.name.partition("p")[0].rstrip("re"), []).append(order.job_id)
        if order.actions.answers is not None:
            self.provider.held_to_schema.add(order.job_id)

    def _has_ended(self, order: Order) -> bool:
        return order.job_id in self.rules.deleted or any(
            row[0] in JOB_ENDED
            for row in self.connection.execute("select state from jobs where id = ?", (order.job_id,))
        )

    async def _revoke(self, key_id: str, at_s: float) -> None:
        await asyncio.sleep(at_s)
        await self.customers.revoke(key_id)
        self.revocations.note(key_id, self.loop.time())

    async def _override(self, mode: str) -> None:
        await asyncio.sleep(self.plan.arrival_s)
        self.trace.note("operator", "switched to", mode)
        await self._store.override_mode(mode)

    def _chaos(self) -> None:
        weather, dice = self.weather, self.weather.dice
        if weather.strikes("power"):
            self._cut_power()
        for process in [process for process in self.processes if not process.dead and not process.ended]:
            if weather.strikes("kill"):
                self.trace.note(process.name, "KILLED")
                process.kill()
            elif weather.strikes("pause"):
                seconds = dice.uniform(0.5, 3 * self.plan.lease_ms / 1000)
                self.trace.note(process.name, "STOPPED", f"{seconds:.1f}")
                process.stop_for(seconds)
            elif weather.strikes("stop"):
                self.trace.note(process.name, "ASKED TO END")
                process.is_ended_in_trouble = True
                process.ending.set()
            if weather.strikes("clock"):
                process.skew_ms = dice.choice((-3_600_000, 3_600_000, 30 * 86_400_000, 0))
        if weather.strikes("store_away"):
            weather.store_away = True
            outside(self.loop, dice.uniform(0.5, 1.5 * self.plan.lease_ms / 1000), self._store_back)
        if weather.strikes("disk_full"):
            weather.disk_full = True
            outside(self.loop, dice.uniform(0.5, 5), self._disk_free)
        if weather.strikes("database_clock"):
            self.time.fall_behind(dice.choice((3, 200, 1_500)))
        if weather.strikes("machine_clock"):
            self.time.set_machine(dice.choice(CLOCK_STEPS_MS))
        if self.plan.estate.uses_redis:
            self._redis_chaos()

    def _cut_power(self) -> None:
        """All processes end at once, and with them what neither the store nor the disk has carried out."""
        self.trace.note("world", "THE POWER IS CUT")
        self.weather.power_cuts += 1
        for process in self.processes:
            if not process.ended:
                process.kill()
        self.disk.lose_unsynced()

    def _redis_chaos(self) -> None:
        weather, redis = self.weather, self.redis
        if weather.strikes("redis_flush"):
            redis.flush()
        if weather.strikes("redis_away"):
            redis.away = True
            outside(self.loop, weather.dice.uniform(0.2, 4), self._redis_back)

    def _redis_back(self) -> None:
        self.redis.away = False

    def _store_back(self) -> None:
        self.weather.store_away = False

    def _disk_free(self) -> None:
        self.weather.disk_full = False

    def _heal(self) -> None:
        self.trace.note("world", "the weather clears")
        self.weather.clear = True
        self.weather.store_away = self.weather.disk_full = self.redis.away = False
        for process in self.processes:
            process.resume()

    async def _until_all_ended(self) -> None:
        assert self.fairness is not None
        deadline_s = self.loop.time() + self.plan.lively_s
        settled_s = self.loop.time() + SETTLED_S
        while (open_jobs := self._open_jobs()) or not self._all_done():
            if self.loop.time() > settled_s:
                lost_s = max((at_s for process in self.processes for at_s in process.lost_at_s), default=0.0)
                self.fairness.tick(self.loop.time(), lost_s)
            if self.loop.time() > max(deadline_s, self._poison_until_s):
                self.breaks(f"P7: {self.plan.lively_s:.0f} s after all faults ended these are still open: {open_jobs}")
            await asyncio.sleep(1)

    def _open_jobs(self) -> list[Any]:
        rows = self.connection.execute("select id, state, closing from jobs").fetchall()
        missing = len(self.customers.orders) - len(rows) - len(self.rules.deleted)
        return [row for row in rows if row[1] not in JOB_ENDED] + ["not created yet"] * missing

    async def _until_all_answered(self) -> None:
        """Users have their answers, and receivers of webhooks what they wait for."""
        deadline_s = self.loop.time() + LEAVE_S
        await self._until(
            lambda: (not self.users.waiting and self.receiver.is_done(self.connection)) or self.loop.time() > deadline_s
        )

    async def _all_leave(self) -> None:
        deadline_s = self.loop.time() + LEAVE_S
        self.leaving = True
        for process in self.processes:
            process.ending.set()
        while any(not process.dead and not process.ended for process in self.processes):
            if self.loop.time() > deadline_s:
                self.breaks("stop: a worker that was asked to end is still there")
            await asyncio.sleep(0.5)

    async def _sweep(self) -> None:
        """One last worker, with nothing to do but to clean up."""
        janitor = self._spawn(replace(self.plan, garbage_safety_ms=0, sweep_ms=300, poll_ms=10_000))
        deadline_s = self.loop.time() + JANITOR_S
        await self._until(lambda: self._is_clean() or self.loop.time() > deadline_s)
        janitor.ending.set()
        await self._until(lambda: janitor.ended)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - looking costs nothing in virtual time
            await asyncio.sleep(0.5)

    def _is_clean(self) -> bool:
        """Whether nothing is left to collect or to join."""
        kept = {row[0] for row in self.connection.execute("select id from blobs where state = 'kept' and uses > 0")}
        rows = {row[0] for row in self.connection.execute("select id from blobs")}
        crowded = "select 1 from extents group by file_id having count(*) > ?"
        return kept == rows == set(self.disk.blobs) and not self.connection.execute(crowded, (PIECES_MAX,)).fetchall()

    # ---- what was shown once never changes

    def _job_ended(self, job_id: str) -> None:
        if job_id not in self._published:
            self._published[job_id] = self._digest(job_id)

    def _check_published(self, job_id: str) -> None:
        if self._digest(job_id) != self._published[job_id]:
            self.breaks(f"P3: the files of {job_id} changed after they were shown")

    def _digest(self, job_id: str) -> str:
        assert self.judge is not None
        files = self.connection.execute(
            "select output_file_id, error_file_id, merged_file_id from jobs where id = ?", (job_id,)
        ).fetchall()[0]
        return sha256(b"|".join(self.judge.file_bytes(str(file)) for file in files)).hexdigest()

    # ---- processes

    def _spawn(self, plan: Plan | None = None) -> Process:
        process = Process(f"p{len(self.processes)}", self.loop, self.weather, str(self.plan.seed))

        def died() -> None:
            self.trace.note(process.name, "DEAD")
            outside(self.loop, self.weather.dice.uniform(0.1, 2.0), self._replace)

        process.on_death = died
        self.processes.append(process)
        process.begin(lambda process: self._live(process, plan or self.plan))
        return process

    def process_named(self, name: str) -> Process:
        return next(process for process in self.processes if process.name == name)

    def _replace(self) -> None:
        if not self.leaving:
            self._spawn()

    async def _live(self, process: Process, plan: Plan) -> None:
        """What `service.py` does for a worker process; one that cannot begin or was asked to end is followed by another."""
        store = Store(ProcessDriver(process, self._inner, self.rules, self.trace))
        try:
            me = process.me = Registration(
                store, process, process, host=process.name, version="0", lease_ms=plan.lease_ms
            )
            await me.enlist()
            road = build_road(process, store, me, plan, self.provider)
            process.router, process.book = road.router, InteractiveUsageBook(store, process)
            process.store, process.blobs = store, ProcessBlobs(process, self.disk)
            callbacks = self.receiver.line_of(process)
            deliveries = WebhookDeliveries(store, callbacks, process, process, lambda: me.id)
            worker = process.worker = build_worker(process, store, me, plan, self._scratch, self.disk, road.router)
            beside = [asyncio.create_task(clock.watch(store)), asyncio.create_task(deliveries.run())]
            await worker.run(process.ending)
            await process.book.close()
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await road.close()
        except StoreUnavailable:
            self.trace.note(process.name, "could not begin")
        process.lost_at_s.append(self.loop.time())
        process.ended = True
        if not self.leaving:
            outside(self.loop, self.weather.dice.uniform(0.1, 2.0), self._replace)

    def close(self) -> None:
        for process in self.processes:
            process.over = True
        self.loop.dismantle(list(self.processes))
        now(self._inner.close())


def simulate(plan: Plan, *, keep: list[str] | None = None) -> Verdict:
    """Run one plan to its end."""
    directory = Path(tempfile.mkdtemp(prefix="tidegate-world-"))
    (scratch := directory / "scratch").mkdir()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        stack.enter_context(tiny_settings())
        world = SimulatedWorld(plan, scratch)
        stack.enter_context(overheard(world.breaks))
        stack.enter_context(world.redis.serving(world.process_named))
        stack.callback(world.close)
        world.trace.keep = keep
        broken = None
        try:
            world.loop.run_until_complete(world.run())
        except (Broken, Stuck) as reason:
            broken = world.broken or str(reason)
        return Verdict(
            plan,
            broken,
            world.trace.digest(),
            world.trace.last(),
            world.loop.time(),
            len(world.provider.calls),
            sum(len(process.lost_at_s) for process in world.processes),
            world.loop.steps,
            world.customers.runnable_count,
            frozenset(str(row[0]) for row in world.connection.execute("select state from jobs")),
        )
