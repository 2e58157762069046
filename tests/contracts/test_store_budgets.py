"""What every store does with budgets, slots in flight and limits that upstreams reported."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import asyncpg
import pytest

from tests.contracts.limits_world import budget, minute
from tests.contracts.store_world import DAY_MS, LEASE_MS, START_MS, StoreWorld
from tests.support.processes import wait_until_async
from tests.support.store_verbs import granted, run_statement
from tidegate.core.budgets.budget import (
    NEVER_MS,
    Budget,
    BudgetKind,
    BudgetRequest,
    Grant,
    Limit,
    LimitBound,
    Period,
    Settlement,
    SideRoom,
)
from tidegate.store import limits
from tidegate.store.database.clock import move_along
from tidegate.store.database.driver import Tx
from tidegate.store.store import Store
from tidegate.store.tenants.budgets import DebitAttempt

pytestmark = pytest.mark.anyio


async def rows(world: StoreWorld, query: str) -> list[str]:
    """Ids of rows, in order."""

    async def body(tx: Tx) -> list[str]:
        connection = tx._connection  # type: ignore[attr-defined]
        if world.store.dialect == "sqlite":
            return [str(row[0]) for row in connection.execute(query)]
        return [str(row[0]) for row in await connection.fetch(query)]

    return await world.store._driver.read(body)


async def spoil(world: StoreWorld, ledger: bytes) -> None:
    async def body(tx: Tx) -> None:
        connection = tx._connection  # type: ignore[attr-defined]
        if world.store.dialect == "sqlite":
            connection.execute("update budgets set ledger = ?", (ledger,))
        else:
            await connection.execute("update budgets set ledger = $1", ledger)

    await world.store._driver.write(body)


async def test_looking_at_budgets_takes_nothing(world: StoreWorld) -> None:
    gpu, own = budget("gpu", minute(3)), budget("job", Limit(Period.LIFETIME, 1), bound=LimitBound.JOB)
    looks = [BudgetRequest((gpu,), 1, 1), BudgetRequest((gpu, own), 1, 1), BudgetRequest((), 1, 1)]
    for _ in range(5):
        assert [grant.requests for grant in await world.store.look_at_budgets(looks)] == [1, 1, 1]
    assert await rows(world, "select id from budgets") == []
    assert await granted(world.store, own, 1) == 1
    [free, spent, _] = await world.store.look_at_budgets(looks)
    assert (free.requests, spent.requests, spent.wait_ms, spent.spent) == (1, 0, NEVER_MS, own.id)
    assert await granted(world.store, gpu, 3) == 3
    await world.clock.advance(20_000)
    [spent, _, free] = await world.store.look_at_budgets(looks)
    assert (spent.requests, spent.spent, free.requests) == (0, gpu.id, 1)
    assert 40_000 <= spent.wait_ms <= 41_000
    assert await granted(world.store, gpu, 1) == 0
    off = budget("off", Limit(Period.DAY, 9, enabled=False))
    [minutes, lifetime] = await world.store.budget_rooms([gpu, off, own])
    assert (minutes.requests, lifetime.requests) == (SideRoom(3, 0, spent.wait_ms), SideRoom(1, 0, NEVER_MS))
    assert (minutes.budget, minutes.period, minutes.tokens) == (gpu, Period.MINUTE, None)


async def test_a_minute_slides_and_its_end_is_known(world: StoreWorld) -> None:
    one = budget("gpu", minute(10))
    assert await granted(world.store, one, 4) == 4
    await world.clock.advance(30_000)
    [grant] = await world.store.debit_budgets([BudgetRequest((one,), 9, 0)])
    assert (grant.requests, grant.spent) == (6, "deployment:gpu")
    assert grant.wait_ms == 30_500
    await world.clock.advance(30_499)
    assert await granted(world.store, one, 9) == 0
    await world.clock.advance(1)
    assert await granted(world.store, one, 9) == 4


async def test_nine_and_then_thirty_under_a_limit_of_ten(world: StoreWorld) -> None:
    one = budget("connection", minute(10))
    assert await granted(world.store, one, 9) == 9
    assert [await granted(world.store, one, 1) for _ in range(30)] == [1] + [0] * 29


async def test_one_budget_under_many_resources_is_one_budget(world: StoreWorld) -> None:
    shared = budget("connection", minute(10))
    resources = [budget(f"resource-{number}", minute(5), bound=LimitBound.RESOURCE) for number in range(11)]
    grants = await world.store.debit_budgets([BudgetRequest((one, shared), 3, 0) for one in resources])
    assert sum(grant.requests for grant in grants) == 10
    assert all(grant.spent == "deployment:connection" for grant in grants if grant.requests < 3)


async def test_all_budgets_give_or_none(world: StoreWorld) -> None:
    tenant, job = budget("acme", minute(100), bound=LimitBound.TENANT), budget("job", minute(2), bound=LimitBound.JOB)
    closed = budget("gpu", minute(0))
    [grant] = await world.store.debit_budgets([BudgetRequest((tenant, job, closed), 5, 0)])
    assert (grant.requests, grant.wait_ms) == (0, NEVER_MS)
    [grant] = await world.store.debit_budgets([BudgetRequest((tenant, job), 5, 0)])
    assert grant.requests == 2
    assert await granted(world.store, tenant, 200) == 98


async def test_more_budgets_than_one_statement_locks(world: StoreWorld) -> None:
    many = tuple(budget(f"b{number}", minute(number + 1)) for number in range(20))
    [grant] = await world.store.debit_budgets([BudgetRequest(many, 50, 0)])
    assert (grant.requests, grant.spent) == (1, "deployment:b0")
    assert await granted(world.store, many[19], 50) == 19


async def test_tokens_are_reserved_settled_and_owed(world: StoreWorld) -> None:
    one = budget("gpu", minute(None, 1_000))
    [grant] = await world.store.debit_budgets([BudgetRequest((one,), 2, 1_000)])
    assert (grant.requests, grant.tokens) == (2, 1_000)
    await world.clock.advance(5_000)
    await world.store.settle_budgets([Settlement(grant.id, (one,), 0, 1_000, 300)], "w", 1)
    assert await granted(world.store, one, 1, 701) == 0
    [second] = await world.store.debit_budgets([BudgetRequest((one,), 1, 700)])
    assert second.requests == 1
    await world.store.settle_budgets([Settlement(second.id, (one,), 0, 700, 1_900)], "w", 2)
    await world.clock.advance(56_000)
    [third] = await world.store.debit_budgets([BudgetRequest((one,), 1, 400)])
    assert third.requests == 0, "the room of the first goes to the debt of the second"
    await world.clock.advance(third.wait_ms - 1)
    assert await granted(world.store, one, 1, 400) == 0
    await world.clock.advance(1)
    assert await granted(world.store, one, 1, 400) == 1


async def test_a_ledger_that_cannot_be_read_is_full_for_one_period(world: StoreWorld) -> None:
    one = budget("gpu", minute(5))
    assert await granted(world.store, one, 1) == 1
    await spoil(world, b"not a ledger")
    [grant] = await world.store.debit_budgets([BudgetRequest((one,), 1, 0)])
    assert (grant.requests, grant.wait_ms) == (0, 60_500)
    await world.clock.advance(60_500)
    assert await granted(world.store, one, 9) == 5


async def test_idle_budgets_are_forgotten_and_others_are_not(world: StoreWorld) -> None:
    job = await world.job(await world.caller())
    lifetime = Limit(Period.LIFETIME, requests=10)
    kept = [
        budget("gone-by-then", minute(5)),
        budget("month", Limit(Period.MONTH, requests=5)),
        budget(job.id, lifetime, bound=LimitBound.JOB),
        budget("no-such-job", lifetime, bound=LimitBound.JOB),
        budget("key", lifetime, bound=LimitBound.KEY),
    ]
    for one in kept:
        assert await granted(world.store, one, 1) == 1
    await world.store.prune_budgets(3_600_000, 100)
    assert len(await rows(world, "select id from budgets")) == 5
    await world.clock.advance(3_700_000)
    await world.store.prune_budgets(3_600_000, 100)
    assert sorted(await rows(world, "select id from budgets")) == sorted(one.id for one in (kept[1], kept[2], kept[4]))
    assert await granted(world.store, kept[2], 99) == 9
    assert await granted(world.store, kept[0], 99) == 5


async def test_idle_budgets_are_forgotten_a_few_at_a_time_by_id(world: StoreWorld) -> None:
    some = [budget(name, minute(5)) for name in ("b", "c", "a")]
    for one in some:
        assert await granted(world.store, one, 1) == 1
    await world.clock.advance(3_700_000)
    await world.store.prune_budgets(3_600_000, 2)
    assert await rows(world, "select id from budgets") == [some[1].id]


async def test_many_processes_grant_no_more_than_the_limit(postgres_world: StoreWorld) -> None:
    """Rows that do not exist yet, three budgets in every order, four processes: no deadlock and not one too many."""
    stores = [await postgres_world.open_another() for _ in range(4)]
    names = [budget(name, minute(limit)) for name, limit in (("a", 50), ("b", 35), ("c", 1_000))]

    async def ask(number: int) -> int:
        order = tuple(names[(number + place) % 3] for place in range(1 + number % 3))
        [grant] = await stores[number % 4].debit_budgets([BudgetRequest(order, 1, 0)])
        return grant.requests if any(one.name == "b" for one in order) else 0

    taken = sum(await asyncio.gather(*(ask(number) for number in range(200))))
    assert taken == 35


async def test_a_grant_carries_the_time_at_which_its_row_was_free(
    postgres_world: StoreWorld, shared_database: str
) -> None:
    """Who waited for the row must not be counted at the moment when it began to wait: it sends later than that."""
    one = budget("gpu", minute(5))
    assert await granted(postgres_world.store, one, 1) == 1
    holder = await asyncpg.connect(shared_database)
    transaction = holder.transaction()
    await transaction.start()
    await holder.execute("select 1 from budgets for update")
    debit = asyncio.create_task(postgres_world.store.debit_budgets([BudgetRequest((one,), 1, 0)]))
    waits = "select count(*) from pg_locks where not granted and pid <> pg_backend_pid()"
    await wait_until_async(lambda: holder.fetchval(waits), 30, "the debit to wait for its row")
    await postgres_world.clock.advance(12_345)
    await transaction.rollback()
    [grant] = await debit
    assert int(grant.id) == START_MS + 12_345
    await holder.close()


async def share(
    world: StoreWorld,
    worker: str,
    cap: int,
    wanted: int,
    in_use: int = 0,
    name: str = "gpu",
    store: Store | None = None,
) -> int:
    answer: Mapping[str, int] = await (store or world.store).share_slots(
        worker, {name: wanted}, {name: in_use}, {name: cap}
    )
    return answer[name]


async def test_slots_are_shared_fairly_and_never_above_the_cap(world: StoreWorld) -> None:
    first, second, third = [await world.worker() for _ in range(3)]
    assert await share(world, first, 10, 10) == 10
    assert await share(world, second, 10, 8) == 0, "all are held: the holder has to give back first"
    assert await share(world, first, 10, 10, in_use=10) == 5
    assert await share(world, second, 10, 8) == 0, "asked to give back is not given back"
    assert await share(world, first, 10, 10, in_use=6) == 5
    assert await share(world, second, 10, 8) == 4
    assert await share(world, first, 10, 10, in_use=5) == 5
    assert await share(world, second, 10, 8, in_use=4) == 5
    assert await share(world, third, 10, 1) == 0
    assert await share(world, first, 10, 0) == 0
    assert await share(world, third, 10, 1) == 1


async def test_a_worker_that_is_gone_holds_nothing_and_gets_nothing(world: StoreWorld) -> None:
    lost, other = await world.worker(), await world.worker(lease_ms=10 * LEASE_MS)
    assert await share(world, lost, 4, 9) == 4
    await world.clock.advance(LEASE_MS + 1)
    assert await share(world, other, 4, 4) == 0, "merely late is not gone"
    assert await world.store.declare_gone(lost)
    assert await share(world, lost, 4, 9) == 0, "though all are free"
    assert await share(world, other, 4, 4) == 4
    assert await share(world, lost, 4, 9) == 0
    await world.store.prune_budgets(3_600_000, 100)
    assert await rows(world, "select worker_id from slots where worker_id <> ''") == [other]
    await world.clock.advance(3_600_001)
    await world.store.prune_budgets(3_600_000, 100)
    assert await rows(world, "select name from slots where worker_id = ''") == ["gpu"], "it is shared"
    assert await world.store.declare_gone(other)
    for left in (["gpu"], []):
        await world.store.prune_budgets(3_600_000, 100)
        assert await rows(world, "select name from slots") == left


async def test_idle_slots_and_those_of_the_gone_are_forgotten_a_few_at_a_time_by_name_and_worker(
    world: StoreWorld,
) -> None:
    living, *gone = [await world.worker() for _ in range(3)]

    async def put(name: str, worker: str = "") -> None:
        await run_statement(world.store, "slot_write", name=name, worker_id=worker, held=1, wanted=1)

    for name in "caeb":
        await put(name)
    await put("e", living)
    for worker in gone:
        await put("f", worker)
        assert await world.store.declare_gone(worker, leaving=True)
    await world.clock.advance(1)
    await put("d")
    await world.clock.advance(1_000)
    kept = ["d", "e", f"e{living}"]
    expected = [["c", *kept, *(f"f{worker}" for worker in sorted(gone))], [*kept, f"f{max(gone)}"], kept, kept]
    for left in expected:
        await world.store.prune_budgets(1_000, 2)
        assert await rows(world, "select name || worker_id from slots order by name, worker_id") == left


async def test_money_of_an_hour_stays_spent_though_the_clock_is_followed(world: StoreWorld) -> None:
    one = Budget(LimitBound.KEY, "k", (Limit(Period.HOUR, nano=1_000),), BudgetKind.MONEY)

    async def fits(nano: int) -> bool:
        [grant] = await world.store.debit_budgets([BudgetRequest((one,), 1, 0, nano)])
        return bool(grant.requests)

    assert await fits(700)
    await world.store._driver.write(lambda tx: move_along(tx, 2 * 3_600_000))
    await world.clock.advance(2 * 3_600_000)
    assert not await fits(301)
    assert await fits(300)


async def test_many_names_at_once_and_each_by_itself(world: StoreWorld) -> None:
    one, two = await world.worker(), await world.worker()
    caps = {f"d{number}": number for number in range(20)}
    wanted = dict.fromkeys(caps, 100)
    assert await world.store.share_slots(one, wanted, {}, caps) == caps
    assert await world.store.share_slots(two, wanted, {}, caps) == dict.fromkeys(caps, 0)
    assert await world.store.share_slots(one, {}, {}, caps) == dict.fromkeys(caps, 0)
    assert await world.store.share_slots(two, wanted, {}, caps) == caps


async def test_processes_that_share_at_once_stay_under_the_cap(postgres_world: StoreWorld) -> None:
    stores = [await postgres_world.open_another() for _ in range(4)]
    workers = [await postgres_world.worker() for _ in range(12)]

    async def ask(number: int) -> int:
        return await share(postgres_world, workers[number], 30, 7, store=stores[number % 4])

    assert sum(await asyncio.gather(*(ask(number) for number in range(12)))) <= 30
    held = await rows(postgres_world, "select cast(sum(held) as bigint) from slots")
    assert int(held[0]) <= 30


async def test_limits_that_a_deployment_reported_are_known_for_a_week(world: StoreWorld) -> None:
    await world.store.put_discovered("gpu", minute(600))
    await world.store.put_discovered("gpu", minute(None, 90_000))
    await world.store.put_discovered("other", minute(5, 6))
    assert await world.store.discovered() == {"gpu": minute(600, 90_000), "other": minute(5, 6)}
    await world.clock.advance(6 * DAY_MS)
    await world.store.put_discovered("gpu", minute(500))
    await world.clock.advance(DAY_MS - 1)
    assert set(await world.store.discovered()) == {"gpu", "other"}
    await world.clock.advance(1)
    assert await world.store.discovered() == {"gpu": minute(500, 90_000)}
    await world.store.prune_budgets(3_600_000, 100)
    assert await rows(world, "select deployment from discovered_limits") == ["gpu"]


async def test_a_store_keeps_the_name_it_was_given_first(world: StoreWorld) -> None:
    assert await world.store.store_name("first") == "first"
    assert await world.store.store_name("second") == "first"


async def test_what_is_asked_at_once_is_debited_in_pieces_and_an_ask_is_never_split(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_ASKS_PER_DEBIT_MAX", 4)
    pieces, debit = list[int](), world.store.debit_budgets

    async def counted(asks: Sequence[BudgetRequest], holder: str, attempt: DebitAttempt) -> list[Grant]:
        pieces.append(len(asks))
        return await debit(asks, holder, attempt)

    monkeypatch.setattr(world.store, "debit_budgets", counted)
    shared, ask = limits.StoreLimits(world.store, "here"), BudgetRequest((budget("gpu", minute(20)),), 1, 0)
    grants = await asyncio.gather(*(shared.debit([ask] * count) for count in (3, 2, 2, 5)))
    assert pieces == [3, 4, 5]
    assert [sum(grant.requests for grant in some) for some in grants] == [3, 2, 2, 5]


@pytest.mark.parametrize("was_committed", [True, False])
async def test_a_debit_is_released_once_and_never_entered_afterwards(world: StoreWorld, was_committed: bool) -> None:
    one = budget("key", Limit(Period.LIFETIME, tokens=10), bound=LimitBound.KEY)
    ask = BudgetRequest((one,), 1, 7)
    attempt = DebitAttempt([ask], "a process", 1, "holder")
    assert await granted(world.store, one, 1, 3) == 1
    if was_committed:
        await world.store.debit_budgets([ask], "holder", attempt)
        assert await granted(world.store, one, 1, 7) == 0
    else:
        attempt.note([Grant("lost", 1, 7, 0)])
    for _ in range(2):
        await world.store.release_debit(attempt)
    await world.store.debit_budgets([ask], "holder", attempt)
    assert await granted(world.store, one, 1, 7) == 1
    assert await granted(world.store, one, 1, 1) == 0
