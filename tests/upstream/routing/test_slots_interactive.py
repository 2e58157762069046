"""A deployment's `max_in_flight` holds over batch work and interactive calls together, in one process and over several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest

from tests.upstream.limits import MemoryLimits
from tests.upstream.raw_server import RawServer, eventually
from tests.upstream.routing.test_slots import PATIENT, Air, calls, processes
from tests.upstream.world import CHAT_ENDPOINT, RouterWorld, deployment
from tidegate.core.budgets.budget import Budget, BudgetRequest, Grant, Limit, LimitBound, Period
from tidegate.core.deployments import HttpLimits
from tidegate.core.errors import PoolExhausted
from tidegate.core.nouns import Answer
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.store import Store
from tidegate.upstream.calls.exchange import UpstreamResponse
from tidegate.upstream.calls.router import Router
from tidegate.upstream.calls.traffic import Traffic
from tidegate.upstream.calls.translation import Shaped
from tidegate.upstream.routing import slots
from tidegate.upstream.routing.slots import Capacity

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    store = Store(SqliteDriver(None, RouterWorld().clock.now_ms))
    await store.migrate()
    try:
        yield store
    finally:
        await store.close()


def ask(
    world: RouterWorld, router: Router, body: bytes = b"user", owner: str = ""
) -> asyncio.Task[Answer | UpstreamResponse]:
    traffic = Traffic(lambda engine: Shaped(CHAT_ENDPOINT, body), False, owner=owner)
    return asyncio.ensure_future(router.open(world.call(body=body), traffic))


async def test_all_calls_of_one_process_stay_within_the_cap_and_users_go_first() -> None:
    world, air = RouterWorld(), Air()
    async with RawServer(air) as server:
        async with world.router(deployment(server.url, max_in_flight=4), limits=PATIENT) as router:
            items = [asyncio.create_task(router.send(call)) for call in calls(world, 12)]
            await eventually(lambda: air.flying.get(b"m") == 4, "all slots to be in use")
            users = [ask(world, router) for _ in range(3)]
            await asyncio.sleep(0.05)
            assert air.flying[b"all"] == 4, "a full deployment gets no more, from any caller"
            assert router.free_slots("m") == 0
            air.landing.set()
            await asyncio.gather(*users)
            assert sum(not item.done() for item in items) >= 4, "users went before the items that waited longer"
            await asyncio.gather(*items)
    assert air.highest[b"all"] == 4


async def test_items_leave_a_slot_free_while_users_come() -> None:
    world, air = RouterWorld(), Air()
    air.landing.set()
    async with RawServer(air) as server:
        async with world.router(deployment(server.url, max_in_flight=16), limits=PATIENT) as router:
            assert router.free_slots("m") == 16
            await ask(world, router)
            assert router.free_slots("m") == 14
            world.clock.advance(60_000)
            assert router.free_slots("m") == 16


async def test_all_calls_of_all_processes_stay_within_the_cap(store: Store) -> None:
    """Two API processes and a worker, and a server that counts."""
    air = Air()
    async with RawServer(air) as server:
        async with processes(store, 3, deployment(server.url, max_in_flight=4)) as made:
            (one, worker), *doors = made
            items = [asyncio.create_task(worker.send(call)) for call in calls(one, 12)]
            await eventually(lambda: air.flying.get(b"m") == 4, "the worker to have all slots", 10)
            users = [ask(world, door) for world, door in doors for _ in range(8)]
            await asyncio.sleep(0.3)
            assert air.flying[b"all"] == 4
            # Only the worker's four land: what follows them stays in the air.
            air.landing.set()
            air.landing.clear()
            await eventually(lambda: air.flying.get(b"user", 0) > 1, "users to have slots of the worker's", 10)
            air.landing.set()
            await asyncio.gather(*users, *items)
    assert air.highest[b"all"] == 4


@pytest.mark.parametrize("batch_fraction", [1.0, 0.5])
async def test_processes_that_keep_slots_for_users_leave_one_to_batch(store: Store, batch_fraction: float) -> None:
    """Users come at both processes, and the deployment has as many slots as they would keep free together."""
    air = Air()
    air.landing.set()
    async with RawServer(air) as server:
        place = deployment(server.url, max_in_flight=2, batch_fraction=batch_fraction)
        async with processes(store, 2, place) as made:
            for world, door in made:
                await ask(world, door)
            air.landing.clear()
            items = [asyncio.create_task(router.send(call)) for world, router in made for call in calls(world, 3)]
            await eventually(lambda: air.flying.get(b"m") == 1, "an item to be sent", 10)
            await asyncio.sleep(1.5)
            assert air.highest[b"m"] == 1, "one slot stays free for users"
            air.landing.set()
            async with asyncio.timeout(60):
                await asyncio.gather(*items)
    assert air.highest[b"all"] <= 2


async def test_a_process_without_a_slot_sends_no_item_while_users_come() -> None:
    """It has a part of what batch may use, but another process has all slots of the deployment."""
    world, air = RouterWorld(), Air()
    air.landing.set()
    limits = MemoryLimits(world.clock)
    async with RawServer(air) as server:
        place = deployment(server.url, max_in_flight=2)
        async with world.router(place, limits=PATIENT, capacity=Capacity(limits, lambda: "me")) as router:
            await ask(world, router)
            limits.shares["another"] = {"one": 2}
            limits.shares.pop("me", None)
            item = asyncio.create_task(router.send(world.call()))
            await eventually(lambda: limits.shares.get("me", {}).get("background:one", 0) > 0, "its part of batch", 10)
            await asyncio.sleep(0.3)
            assert (len(server.posts), router.free_slots("m")) == (1, 0)
            limits.shares["another"] = {}
            await item
    assert len(server.posts) == 2


async def test_an_idle_process_serves_its_first_user_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # Slots come at the next round, or because a user waits: without that it would take a minute.
    monkeypatch.setattr(slots, "PERIOD_S", 60.0)
    air = Air()
    air.landing.set()
    async with RawServer(air) as server:
        async with processes(store, 2, deployment(server.url, max_in_flight=4)) as made:
            await asyncio.sleep(0.2)
            for world, door in made:
                async with asyncio.timeout(20):
                    await ask(world, door)


async def test_slow_calls_of_one_tenant_do_not_block_others() -> None:
    world, air = RouterWorld(), Air()
    async with RawServer(air) as server:
        async with world.router(deployment(server.url, max_in_flight=64), limits=PATIENT) as router:
            slow = [ask(world, router, b"slow", "a") for _ in range(64)]
            await eventually(lambda: air.flying.get(b"slow") == 60, "what one tenant may have")
            others = [ask(world, router, b"others", name) for name in ("b", "c")]
            await eventually(lambda: air.flying.get(b"others") == 2, "the others to be served beside them")
            air.landing.set()
            await asyncio.gather(*slow, *others)
    assert air.highest[b"all"] <= 64


async def test_the_tenant_with_fewer_calls_is_served_first() -> None:
    world, air = RouterWorld(), Air()
    async with RawServer(air) as server:
        async with world.router(deployment(server.url, max_in_flight=2), limits=PATIENT) as router:
            first = [ask(world, router, b"many", "a") for _ in range(6)]
            await eventually(lambda: air.flying.get(b"many") == 2, "one tenant to have all there is")
            late = ask(world, router, b"few", "b")
            await asyncio.sleep(0.01)
            air.landing.set()
            await late
            assert sum(not one.done() for one in first) >= 2, "the late one did not wait for all that came before it"
            await asyncio.gather(*first)


async def test_one_who_waits_too_long_or_leaves_takes_no_slot_along() -> None:
    world, air = RouterWorld(), Air()
    async with RawServer(air) as server:
        limits = PATIENT.__class__(pool_timeout_s=0.1)
        async with world.router(deployment(server.url, max_in_flight=1), limits=limits) as router:
            item = asyncio.create_task(router.send(world.call(body=b"m")))
            await eventually(lambda: air.flying.get(b"all") == 1, "the slot to be taken")
            with pytest.raises(PoolExhausted):
                await ask(world, router)
            leaves = ask(world, router)
            await asyncio.sleep(0)
            leaves.cancel()
            await asyncio.gather(leaves, return_exceptions=True)
            air.landing.set()
            await item
            assert router.free_slots("m") == 1
            await ask(world, router)
            assert router.interactive("one") == (0, 0)


async def test_a_learned_number_does_not_bind_users() -> None:
    world, air = RouterWorld(), Air()
    async with RawServer(air) as server:
        place = deployment(server.url, max_in_flight=4, is_capacity_known=False)
        async with world.router(place, limits=PATIENT) as router:
            items = [asyncio.create_task(router.send(call)) for call in calls(world, 8)]
            await eventually(lambda: air.flying.get(b"m", 0) >= 1, "what was learned to be in use")
            users = [ask(world, router) for _ in range(4)]
            await eventually(lambda: air.flying.get(b"user") == 4, "users to be served beside it")
            air.landing.set()
            await asyncio.gather(*users, *items)


async def test_users_of_a_learned_number_need_no_slot_that_could_be_anothers() -> None:
    """They are not counted with the others' calls: a process that may be taken for dead serves them all the same."""
    world = RouterWorld()
    capacity = Capacity(MemoryLimits(world.clock), lambda: "me", safe_until_ms=lambda: world.clock.monotonic - 1)
    async with RawServer() as server:
        place = deployment(server.url, max_in_flight=4, is_capacity_known=False)
        async with world.router(place, capacity=capacity) as router:
            assert (await ask(world, router)).status == 200


@dataclass
class PausedLimits(MemoryLimits):
    """The first question about a budget takes so long that the others take this process for dead and use all that is `taken`."""

    taken: str = "one"

    async def debit(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
        if not self.questions:
            self.clock.advance(30_000)
            self.shares["another"] = {self.taken: 4}
            self.shares.pop("me", None)
        return await super().debit(asks)


@pytest.mark.parametrize(("flex_wait_s", "is_known"), [(0.0, True), (30.0, True), (30.0, False)])
async def test_a_call_that_was_admitted_before_a_pause_asks_for_a_slot_again(
    flex_wait_s: float, is_known: bool
) -> None:
    """Where the number of calls is learned, it binds flex calls as it does items."""
    world, air = RouterWorld(), Air()
    air.landing.set()
    limits, safe_until_ms = PausedLimits(world.clock), [world.clock.monotonic + 25_000]
    lives = ["me"]
    capacity = Capacity(limits, lambda: lives[-1], safe_until_ms=lambda: safe_until_ms[0])
    many = Budget(LimitBound.TENANT, "t", (Limit(Period.MINUTE, 100),))
    async with RawServer(air) as server:
        place = deployment(server.url, max_in_flight=4, is_capacity_known=is_known)
        async with world.router(place, limits=PATIENT, capacity=capacity) as router:
            traffic = Traffic(lambda engine: Shaped(CHAT_ENDPOINT, b"user"), False, flex_wait_s)
            call = asyncio.ensure_future(router.open(world.call(budgets=(many,), left_ms=600_000), traffic))
            await eventually(lambda: bool(limits.questions), "the pause", 10)
            # The next life has what is left, and that is nothing.
            lives.append("next")
            safe_until_ms[0] = world.clock.monotonic + 25_000
            await eventually(lambda: "next" in limits.shares, "the next question about slots", 10)
            assert (len(server.posts), call.done()) == (0, False)
            limits.shares["another"] = {"one": 3}
            await call
    assert len(server.posts) == 1


async def test_a_call_that_had_its_keys_place_before_a_pause_asks_for_one_again() -> None:
    """The deployment has no cap, but the key has one, and another process uses it up meanwhile."""
    world, air = RouterWorld(), Air()
    air.landing.set()
    limits, safe_until_ms = PausedLimits(world.clock, taken="parallel:key:k"), [world.clock.monotonic + 25_000]
    lives = ["me"]
    capacity = Capacity(limits, lambda: lives[-1], safe_until_ms=lambda: safe_until_ms[0])
    many = Budget(LimitBound.TENANT, "t", (Limit(Period.MINUTE, 100),))
    async with RawServer(air) as server:
        place = deployment(server.url, max_in_flight=4, is_capacity_known=False)
        async with world.router(place, limits=PATIENT, capacity=capacity) as router:
            traffic = Traffic(lambda engine: Shaped(CHAT_ENDPOINT, b"user"), False)
            asked = world.call(budgets=(many,), left_ms=600_000, parallel=(("key:k", 4),))
            call = asyncio.ensure_future(router.open(asked, traffic))
            await eventually(lambda: bool(limits.questions), "the pause", 10)
            lives.append("next")
            safe_until_ms[0] = world.clock.monotonic + 25_000
            await eventually(lambda: "next" in limits.shares, "the next question about places", 10)
            assert (len(server.posts), call.done()) == (0, False)
            limits.shares["another"] = {"parallel:key:k": 3}
            await call
    assert len(server.posts) == 1


@pytest.mark.parametrize("is_user", [True, False])
async def test_nothing_is_let_in_under_slots_that_may_be_anothers(is_user: bool) -> None:
    """The store is away for longer than the lease: it may have declared this process gone."""
    world, air = RouterWorld(), Air()
    air.landing.set()
    limits, safe_until_ms = MemoryLimits(world.clock), [world.clock.monotonic + 25_000]
    capacity = Capacity(limits, lambda: "me", safe_until_ms=lambda: safe_until_ms[0])

    async def go(router: Router) -> None:
        await (ask(world, router) if is_user else router.send(world.call()))

    async with RawServer(air) as server:
        place = deployment(server.url, max_in_flight=4)
        async with world.router(place, limits=HttpLimits(pool_timeout_s=0.2), capacity=capacity) as router:
            await go(router)
            limits.away = True
            await go(router)
            world.clock.advance(25_000)
            with pytest.raises(PoolExhausted):
                await go(router)
            limits.away, safe_until_ms[0] = False, world.clock.monotonic + 25_000
            await go(router)
    assert len(server.posts) == 3
