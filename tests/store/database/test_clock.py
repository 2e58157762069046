"""The store's time while the machine's clock is set back and forth under it: it goes on, in every process and over restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.contracts.store_world import StoreHandClock, StoreWorld, plan_of, tries
from tests.support.store_verbs import granted
from tidegate.core.budgets.budget import Budget, Limit, LimitBound, Period
from tidegate.core.job_controls import Canary
from tidegate.core.nouns import JobFlush
from tidegate.core.store_clock import FOLLOW_AFTER_MS, Look, Steady, going_on_from, step_between
from tidegate.stages.tend.lost_workers import LostWorkers
from tidegate.store.database.clock import Boot, read_clock, tick
from tidegate.store.database.postgres import PostgresDriver
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.database.sqlite_clock import EmbeddedClock
from tidegate.store.store import Store

pytestmark = pytest.mark.anyio

SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
START_MS = 1_800_000_000_000
STEPS = [[-HOUR], [HOUR, -HOUR], [30 * DAY, -30 * DAY], [-300 * SECOND], [120 * SECOND], [-HOUR, -HOUR, 2 * HOUR]]
LEASE_MS = 30_000


@dataclass
class Machine:
    """A machine whose clock shows START_MS, what truly passed and by how much it was set; and processes over one store."""

    place: str | Path
    connection: Any = None
    passed_ms: int = 0
    set_by_ms: int = 0
    boot: str = "first"
    is_shared: bool = False
    stores: list[Store] = field(default_factory=list)

    @property
    def wall_ms(self) -> int:
        return START_MS + self.passed_ms + self.set_by_ms

    async def open(self) -> Store:
        """One more process, which looks as every process does when it starts."""
        if isinstance(self.place, Path):
            clock = EmbeddedClock(lambda: self.wall_ms, lambda: self.passed_ms, self.boot)
            store = Store(SqliteDriver(self.place, clock, is_shared=self.is_shared))
        else:
            driver = PostgresDriver(
                self.place,
                pool_size=2,
                statement_timeout_ms=20_000,
                pooler="none",
                steady_ms=lambda: float(self.passed_ms),
            )
            store = Store(driver)
        await store.migrate()
        await self._show()
        await store.look_at_clock()
        self.stores.append(store)
        return store

    async def close(self, store: Store) -> None:
        self.stores.remove(store)
        await store.close()

    async def set_clock(self, by_ms: int) -> None:
        self.set_by_ms += by_ms
        await self._show()

    async def let_pass(self, ms: int, look_every_ms: int = SECOND) -> None:
        """Time passes, and every process looks as often as it does."""
        end_ms = self.passed_ms + ms
        while self.passed_ms < end_ms:
            self.passed_ms = min(end_ms, self.passed_ms + look_every_ms)
            await self._show()
            for store in self.stores:
                await store.look_at_clock()

    async def _show(self) -> None:
        if self.connection is not None:
            await self.connection.execute(
                "create table if not exists test_wall (now bigint);"  # noqa: S608 - a number of our own
                "delete from test_wall;"
                f"insert into test_wall values ({self.wall_ms});"
                "create or replace function wall_ms() returns bigint language sql volatile as 'select now from test_wall'"
            )


@pytest.fixture(params=["sqlite", "postgresql"])
async def machine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Machine]:
    made = Machine(tmp_path / "store.db")
    if request.param == "postgresql":
        url: str = request.getfixturevalue("postgres_url")
        made = Machine(url, await asyncpg.connect(url))
    yield made
    for store in list(made.stores):
        await made.close(store)
    if made.connection is not None:
        await made.connection.close()


def budget(requests: int) -> Budget:
    return Budget(LimitBound.DEPLOYMENT, "gpu", (Limit(Period.MINUTE, requests),))


@pytest.mark.parametrize("steps", STEPS, ids=str)
async def test_time_goes_on_as_if_the_clock_had_not_been_set(machine: Machine, steps: list[int]) -> None:
    store = await machine.open()
    await machine.let_pass(3 * SECOND)
    began = await store.now_ms()
    passed_ms = 0
    for step_ms in steps:
        await machine.set_clock(step_ms)
        await machine.let_pass(5 * SECOND)
        passed_ms += 5 * SECOND
        elapsed_ms = await store.now_ms() - began
        assert abs(elapsed_ms - passed_ms) <= passed_ms // 50, "it neither stands nor steps"


@pytest.mark.parametrize("steps", STEPS, ids=str)
async def test_no_rate_window_opens_early_or_stalls(machine: Machine, steps: list[int]) -> None:
    store, gpu = await machine.open(), budget(10)
    await machine.let_pass(3 * SECOND)
    assert await granted(store, gpu, 10) == 10
    for step_ms in steps:
        await machine.set_clock(step_ms)
        assert await granted(store, gpu, 1) == 0, "asked before anybody looked"
        await machine.let_pass(10 * SECOND)
        assert await granted(store, gpu, 1) == 0
    await machine.let_pass(59 * SECOND - 10 * SECOND * len(steps))
    assert await granted(store, gpu, 1) == 0
    await machine.let_pass(5 * SECOND)
    assert await granted(store, gpu, 10) == 10


@pytest.mark.parametrize("step_ms", [-HOUR, HOUR, 30 * DAY])
async def test_no_lease_ends_by_a_step_and_each_ends_in_its_time(machine: Machine, step_ms: int) -> None:
    store = await machine.open()
    await machine.let_pass(3 * SECOND)
    await store.enlist_worker("w", "host", "1", LEASE_MS)
    await machine.set_clock(step_ms)
    await LostWorkers(store, None).tend()  # type: ignore[arg-type]
    assert await store.beat("w", LEASE_MS) == []
    await machine.let_pass(LEASE_MS - 2 * SECOND)
    assert await store.overdue_workers(10) == {}
    await machine.let_pass(5 * SECOND)
    assert list(await store.overdue_workers(10)) == ["w"]


async def test_a_clock_that_stays_ahead_is_followed_and_nothing_opens_or_ends_by_that(machine: Machine) -> None:
    store, gpu = await machine.open(), budget(10)
    await machine.let_pass(3 * SECOND)
    await store.enlist_worker("w", "host", "1", LEASE_MS)
    await machine.set_clock(HOUR)
    await store.look_at_clock()
    await machine.let_pass(FOLLOW_AFTER_MS - 2 * SECOND, look_every_ms=20_000)
    assert machine.wall_ms - await store.now_ms() == pytest.approx(HOUR, abs=2 * SECOND)
    assert await granted(store, gpu, 10) == 10
    assert await store.beat("w", LEASE_MS) == []
    await machine.let_pass(6 * SECOND)
    assert machine.wall_ms - await store.now_ms() == pytest.approx(0, abs=100)
    assert await granted(store, gpu, 1) == 0
    assert await store.overdue_workers(10) == {}
    [report] = await store.worker_reports()
    assert report.silent_ms == pytest.approx(6 * SECOND, abs=100)
    await machine.let_pass(62 * SECOND)
    assert await granted(store, gpu, 10) == 10
    assert list(await store.overdue_workers(10)) == ["w"]


async def test_a_budget_that_cannot_be_read_is_not_renewed_by_a_clock_that_is_followed(machine: Machine) -> None:
    store, gpu = await machine.open(), budget(10)
    await machine.let_pass(3 * SECOND)
    await machine.set_clock(HOUR)
    await store.look_at_clock()
    await machine.let_pass(FOLLOW_AFTER_MS - 2 * SECOND, look_every_ms=20_000)
    assert await granted(store, gpu, 10) == 10
    if machine.connection is not None:
        await machine.connection.execute(r"update budgets set ledger = '\xff'")
    else:

        async def damage(tx: Any) -> None:
            tx._connection.execute("update budgets set ledger = x'ff'")

        await store._driver.write(damage)
    await machine.let_pass(6 * SECOND)
    assert machine.wall_ms - await store.now_ms() == pytest.approx(0, abs=100), "the store follows"
    assert await granted(store, gpu, 1) == 0, "it is unknown what was granted: it counts as full"


@pytest.mark.parametrize("step_ms", [-HOUR, HOUR])
async def test_processes_that_share_a_store_keep_one_time(tmp_path: Path, step_ms: int) -> None:
    machine = Machine(tmp_path / "shared.db", is_shared=True)
    one, other = await machine.open(), await machine.open()
    await machine.let_pass(3 * SECOND)
    await machine.set_clock(step_ms)
    for store in (one, other):
        await store.look_at_clock()
    clock = EmbeddedClock(lambda: machine.wall_ms, lambda: machine.passed_ms, machine.boot)
    reader = Store(SqliteDriver(tmp_path / "shared.db", clock, read_only=True))
    await reader.look_at_clock()
    assert await reader.now_ms() == pytest.approx(await one.now_ms(), abs=SECOND), "one that only reads too"
    await reader.close()
    await machine.let_pass(FOLLOW_AFTER_MS + 10 * SECOND, look_every_ms=20_000)
    assert await one.now_ms() == pytest.approx(await other.now_ms(), abs=100)
    passed = START_MS + machine.passed_ms
    expected = machine.wall_ms if step_ms > 0 else passed - (FOLLOW_AFTER_MS + 10 * SECOND) // 100
    assert await one.now_ms() == pytest.approx(expected, abs=SECOND)
    for store in (one, other):
        await machine.close(store)


async def test_a_retry_after_outlasts_a_clock_that_is_followed(machine: Machine) -> None:
    store, wait_ms = await machine.open(), 30 * MINUTE
    await machine.let_pass(3 * SECOND)
    world = StoreWorld(store, StoreHandClock(), machine.open)
    worker = await world.worker(DAY)
    job = await world.running(await world.caller(), 1)
    [held] = await world.lease(worker, job)
    await world.record(JobFlush(job.id, attempts=[(held.token, tries(0, 1, wait_ms))]))
    assert await store.release_slice(job.id, 0, held.token, wait_ms)
    await machine.set_clock(HOUR)
    await store.look_at_clock()
    await machine.let_pass(FOLLOW_AFTER_MS + 5 * SECOND, look_every_ms=20_000)
    assert machine.wall_ms - await store.now_ms() == pytest.approx(0, abs=100), "the store follows"
    assert await world.lease(worker, job) == [], "the item waits as long as it was asked to"
    await machine.let_pass(wait_ms - FOLLOW_AFTER_MS, look_every_ms=20_000)
    [again] = await world.lease(worker, job)
    assert -6 * SECOND <= again.attempts[0].wait_ms <= 0


async def test_what_a_canary_holds_back_is_let_go_after_a_clock_was_followed(machine: Machine) -> None:
    store = await machine.open()
    await machine.let_pass(3 * SECOND)
    world = StoreWorld(store, StoreHandClock(), machine.open)
    worker = await world.worker(DAY)
    job = await world.job(await world.caller(), canary=Canary(2, 500_000, "continue"))
    job = await world.ingested(job, replace(plan_of(2, 2), sample_count=2))
    [held] = await world.lease(worker, job)
    await machine.set_clock(HOUR)
    await store.look_at_clock()
    await machine.let_pass(FOLLOW_AFTER_MS + 5 * SECOND, look_every_ms=20_000)
    assert await world.lease(worker, job) == []
    await world.answer(await world.log(), job, 0, 1, token=held.token)
    assert [one.first for one in await world.lease(worker, job)] == [2]


@pytest.mark.parametrize("step_ms", [-HOUR, HOUR])
async def test_a_process_that_starts_after_a_step_goes_on_where_the_last_one_was(
    machine: Machine, step_ms: int
) -> None:
    store = await machine.open()
    await machine.let_pass(20 * SECOND)
    was = await store.now_ms()
    await machine.close(store)
    machine.passed_ms += 2 * SECOND
    await machine.set_clock(step_ms)
    store = await machine.open()
    if machine.connection is None:
        assert await store.now_ms() - was == pytest.approx(2 * SECOND, abs=50)
    else:
        # No process was there to measure how long it was: it may be later, and is not earlier.
        assert await store.now_ms() >= was - SECOND
    before = await store.now_ms()
    await machine.let_pass(5 * SECOND)
    assert await store.now_ms() - before == pytest.approx(5 * SECOND, abs=100)


async def test_a_machine_that_restarted_with_its_clock_behind_repeats_no_time(machine: Machine) -> None:
    store = await machine.open()
    await machine.let_pass(40 * SECOND)
    was = await store.now_ms()
    await machine.close(store)
    machine.boot, machine.passed_ms = "second", 5 * SECOND
    await machine.set_clock(-HOUR)
    store = await machine.open()
    assert await store.now_ms() >= was - 10 * SECOND
    before = await store.now_ms()
    await machine.let_pass(5 * SECOND)
    assert await store.now_ms() > before


@pytest.mark.parametrize("machine", ["postgresql"], indirect=True)
async def test_a_process_that_was_frozen_changes_nothing(machine: Machine) -> None:
    """Its own clock stood still with it, so to it the database seems to have leapt; the others looked meanwhile and know better."""
    frozen = await machine.open()
    frozen._driver._clock._steady_ms = lambda: 0.0  # type: ignore[attr-defined]
    await frozen.look_at_clock()
    machine.stores.clear()
    awake = await machine.open()
    began = await awake.now_ms()
    await machine.let_pass(MINUTE, look_every_ms=2_500)
    machine.stores.append(frozen)
    await frozen.look_at_clock()
    assert await awake.now_ms() - began == MINUTE


@pytest.mark.parametrize("machine", ["postgresql"], indirect=True)
async def test_a_function_that_was_replaced_is_put_right(machine: Machine) -> None:
    store = await machine.open()
    await machine.let_pass(3 * SECOND)
    before = await store.now_ms()
    await machine.connection.execute(
        "create or replace function now_ms() returns bigint language sql volatile as 'select wall_ms() - 300000'"
    )
    await machine.let_pass(2 * SECOND)
    assert await store.now_ms() - before == pytest.approx(2 * SECOND, abs=100)


@pytest.mark.parametrize("machine", ["postgresql"], indirect=True)
async def test_all_processes_agree_and_one_of_them_says_so(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    stores = [await machine.open() for _ in range(3)]
    await machine.let_pass(3 * SECOND)
    before = await stores[0].now_ms()
    await machine.set_clock(-HOUR)
    await machine.let_pass(2 * SECOND)
    assert len({await store.now_ms() for store in stores}) == 1
    assert await stores[0].now_ms() - before == pytest.approx(2 * SECOND, abs=1_100)
    assert capsys.readouterr().out.count("store_clock_stepped") == 1


@pytest.mark.parametrize("machine", ["postgresql"], indirect=True)
async def test_processes_that_see_a_step_in_the_same_moment_take_it_out_once(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    stores = [await machine.open() for _ in range(4)]
    await machine.let_pass(3 * SECOND)
    for step_ms in (-HOUR, HOUR, -MINUTE):
        before = await stores[0].now_ms()
        await machine.set_clock(step_ms)
        await asyncio.gather(*(store.look_at_clock() for store in stores))
        assert await stores[0].now_ms() - before == pytest.approx(0, abs=1_100)
        assert capsys.readouterr().out.count("store_clock_stepped") == 1


@pytest.mark.parametrize("machine", ["postgresql"], indirect=True)
async def test_a_database_that_did_not_answer_for_a_while_took_no_step(machine: Machine) -> None:
    store = await machine.open()
    await machine.let_pass(3 * SECOND)
    before = await store.now_ms()
    await machine.let_pass(HOUR, look_every_ms=HOUR)
    assert await store.now_ms() - before == HOUR


walls = st.integers(min_value=START_MS - 10**12, max_value=START_MS + 10**12)


@given(now=walls, wall=walls, passed=st.lists(st.integers(0, 10**9), min_size=1, max_size=9))
def test_readings_only_rise_and_never_faster_than_time(now: int, wall: int, passed: list[int]) -> None:
    steady = going_on_from(now, wall)
    assert steady.reading(wall) == now
    last = now
    for ms in passed:
        wall += ms
        reading = steady.reading(wall)
        assert ms * 99 // 100 - 1 <= reading - last <= ms or (reading == wall and reading - last <= ms + 1)
        last = reading


def test_a_store_that_is_ahead_comes_back_to_the_clock() -> None:
    steady = going_on_from(START_MS + HOUR, START_MS)
    assert steady.reading(START_MS + 100 * HOUR) == START_MS + 100 * HOUR
    assert Steady().reading(START_MS) == START_MS


async def test_of_two_that_look_at_once_the_later_note_stays(machine: Machine) -> None:
    store = await machine.open()

    async def note(tx: Any) -> int:
        noted = (await read_clock(tx)).ticked_at
        for later_ms in (5_000, 4_000):
            await tick(tx, noted + later_ms, Boot("first", 0))
        return (await read_clock(tx)).ticked_at - noted

    assert await store._driver.write(note) == 5_000


def test_a_step_leaves_the_longest_time_that_can_have_passed() -> None:
    """How long a look took is unknown: time that may have passed is not taken out with the step."""
    before, asked_ms, answered_ms = Look(START_MS, 0.0, 10.0), 1_000.0, 1_100.0
    for step_ms in (-HOUR, HOUR):
        after = Look(START_MS + step_ms, asked_ms, answered_ms)
        assert step_between(before, after) == step_ms - answered_ms
    assert step_between(before, Look(START_MS + 1_050, asked_ms, answered_ms)) == 0
    later_ms = 600_000.0
    slower = Look(START_MS + 594_000, later_ms, later_ms)
    assert step_between(before, slower) == 0, "a store that is ahead goes slower by a hundredth, which is no step"
