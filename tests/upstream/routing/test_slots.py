"""Slots that several processes share: routers over one real store, and a server that counts what is in the air at once."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.ports import HandClock
from tests.upstream.limits import MemoryLimits
from tests.upstream.raw_server import Peer, RawServer, Request, eventually
from tests.upstream.world import RouterWorld, deployment
from tidegate.core.budgets.budget import Budget, Limit, LimitBound, Period
from tidegate.core.deployments import Deployment, HttpLimits, Resource
from tidegate.core.errors import LimitsUnavailable, Throttled, Unavailable, Withheld
from tidegate.core.nouns import Call
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.limits import StoreLimits
from tidegate.store.store import Store
from tidegate.upstream.calls.router import Router
from tidegate.upstream.routing.deployment_state import DeploymentPolicy
from tidegate.upstream.routing.deployments import Deployments
from tidegate.upstream.routing.slots import (
    UNSEEN_ROUNDS_MAX,
    Capacity,
    ModelSlots,
    RoomSignal,
    SlotDemand,
    Slots,
    SlotSharing,
)
from tidegate.wait_line import WaitLine

pytestmark = pytest.mark.anyio

AT_ONCE = DeploymentPolicy(patience_ms=0)
PATIENT = HttpLimits(pool_timeout_s=20)


class Air:
    """A server's script that counts what is in the air, per model and in all. Calls stay until `let` allows them to land."""

    def __init__(self) -> None:
        self.flying: dict[bytes, int] = {}
        self.highest: dict[bytes, int] = {}
        self.landing = asyncio.Event()

    async def __call__(self, request: Request, peer: Peer) -> None:
        for name in (request.body, b"all"):
            self.flying[name] = self.flying.get(name, 0) + 1
            self.highest[name] = max(self.highest.get(name, 0), self.flying[name])
        await self.landing.wait()
        await asyncio.sleep(0.001)
        for name in (request.body, b"all"):
            self.flying[name] -= 1
        await peer.answer()


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    world = RouterWorld()
    store = Store(SqliteDriver(None, world.clock.now_ms))
    await store.migrate()
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def processes(
    store: Store, count: int, *places: Deployment, **caps: object
) -> AsyncIterator[list[tuple[RouterWorld, Router]]]:
    limits = StoreLimits(store, "here")
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for number in range(count):
            world, name = RouterWorld(), f"worker_{number}"
            await store.enlist_worker(name, "here", "1", 60_000)
            capacity = Capacity(limits, lambda name=name: name, **caps)  # type: ignore[misc, arg-type]
            router = await stack.enter_async_context(world.router(*places, limits=PATIENT, capacity=capacity))
            made.append((world, router))
        yield made


def calls(world: RouterWorld, count: int, model: str = "m") -> list[Call]:
    return [world.call(model, body=model.encode()) for _ in range(count)]


def test_a_lower_cap_holds_before_slots_are_shared_again() -> None:
    slots = Slots("d", 8, 6)
    slots.set_cap(4, is_alone=False)
    assert (slots.share, slots.free) == (4, 4)
    slots.set_cap(8, is_alone=False)
    assert slots.share == 4, "more come with the next share"


def test_slots_in_use_at_a_deployment_that_is_gone_are_kept_until_its_calls_have_ended() -> None:
    clients: Any = SimpleNamespace(client_for=lambda _: None, free_slots=lambda: 9)
    places = Deployments(clients, clients, DeploymentPolicy(), HandClock(), lambda *_: None, is_alone=False)
    places.serve([deployment("http://one/v1", max_in_flight=3)])
    state = places["one"]
    state.slots.grant(3)
    state.begin_background()
    places.serve([deployment("http://two/v1", "two")])
    for _ in range(2):
        assert {slots.name: slots.in_flight for slots in places.leaving_slots()}["one"] == 1
    state.end_background()
    assert {slots.in_flight for slots in places.leaving_slots()} == {0}, "they are given back once"
    assert not list(places.leaving_slots())


async def test_nothing_is_sent_before_the_first_share_and_never_more_than_the_cap(store: Store) -> None:
    air = Air()
    async with RawServer(air) as server:
        place = deployment(server.url, max_in_flight=8, batch_fraction=0.75)
        async with processes(store, 3, place) as made:
            assert [router.free_slots("m") for _, router in made] == [0, 0, 0]
            flying = [asyncio.create_task(router.send(call)) for world, router in made for call in calls(world, 20)]
            await eventually(lambda: air.flying.get(b"all") == 6, "all six slots to be in use", 10)
            air.landing.set()
            await asyncio.gather(*flying)
            assert air.highest[b"all"] == 6
            assert len(server.posts) == 60


async def test_busy_processes_share_evenly_and_an_idle_one_gives_its_part_back(store: Store) -> None:
    air = Air()
    async with RawServer(air) as server:
        place = deployment(server.url, max_in_flight=12)
        async with processes(store, 2, place) as made:
            (one, first), (two, second) = made
            flying = [asyncio.create_task(first.send(call)) for call in calls(one, 30)]
            await eventually(lambda: len(server.posts) == 12, "one busy process to have all slots", 10)
            others = [asyncio.create_task(second.send(call)) for call in calls(two, 30)]
            # Nothing lands, so nothing can be handed over: what is in use stays held.
            await eventually(lambda: first.status()[0].max_in_flight == 8, "the first to get its part", 10)
            assert second.status()[0].max_in_flight == 0
            air.landing.set()
            await asyncio.gather(*flying, *others)
            assert air.highest[b"all"] == 12
            await eventually(lambda: first.status()[0].max_in_flight == 0, "an idle process to hold nothing", 10)


async def test_caps_per_model_and_over_all_hold_across_processes(store: Store) -> None:
    air = Air()
    async with RawServer(air) as server:
        places = (
            deployment(server.url, "a", models=("a",), max_in_flight=50),
            deployment(server.url, "b", models=("b",), max_in_flight=50),
        )
        caps = {"model_in_flight_max": {"a": 3}, "in_flight_max_global": 7}
        async with processes(store, 2, *places, **caps) as made:
            flying = [
                asyncio.create_task(router.send(call))
                for world, router in made
                for model in "ab"
                for call in calls(world, 15, model)
            ]
            await eventually(lambda: air.flying.get(b"all", 0) >= 4, "slots to be in use", 10)
            air.landing.set()
            await asyncio.gather(*flying)
    assert air.highest[b"a"] <= 3
    assert air.highest[b"all"] <= 7


async def test_one_process_holds_the_caps_by_itself() -> None:
    world, air = RouterWorld(), Air()
    air.landing.set()
    async with RawServer(air) as server:
        places = (
            deployment(server.url, "a", models=("a",), max_in_flight=50),
            deployment(server.url, "b", models=("b",), max_in_flight=50),
        )
        capacity = Capacity(model_in_flight_max={"a": 2}, in_flight_max_global=5)
        async with world.router(*places, resources=[Resource("ra", "a")], capacity=capacity) as router:
            assert [router.free_slots(model) for model in ("a", "ra", "b")] == [2, 2, 5]
            asks = calls(world, 20, "a") + calls(world, 20, "b") + calls(world, 20, "ra")
            await asyncio.gather(*(router.send(call) for call in asks))
            assert [router.free_slots(model) for model in ("a", "ra", "b")] == [2, 2, 5]
    assert air.highest[b"all"] <= 5
    assert air.highest[b"a"] <= 2


async def test_a_share_outlives_a_store_that_is_away_but_not_the_lease() -> None:
    world = RouterWorld()
    limits = MemoryLimits(world.clock)
    async with RawServer() as server:
        capacity = Capacity(limits, lambda: "worker_0")
        async with world.router(deployment(server.url, max_in_flight=4), capacity=capacity) as router:
            await router.send(world.call())
            limits.away = True
            await router.send(world.call())
            over = msgspec.structs.replace(world.call(), begin_by_ms=world.clock.monotonic)
            with pytest.raises(Unavailable) as refused:
                await router.send(over)
            assert refused.value.code == "lease_over"
    assert len(server.posts) == 2


async def test_a_call_whose_job_was_paused_while_it_waited_for_a_slot_is_not_sent() -> None:
    world, air, paused = RouterWorld(), Air(), asyncio.Event()
    async with RawServer(air) as server:
        async with world.router(deployment(server.url, max_in_flight=1), limits=PATIENT) as router:
            first = asyncio.create_task(router.send(world.call()))
            await eventually(lambda: air.flying.get(b"all") == 1, "the slot to be taken")
            waiting = asyncio.create_task(
                router.send(msgspec.structs.replace(world.call(), may_begin=lambda: not paused.is_set()))
            )
            await asyncio.sleep(0.01)
            paused.set()
            air.landing.set()
            await first
            with pytest.raises(Withheld) as withheld:
                await waiting
            assert withheld.value.code == "lease_over"
            assert router.free_slots("m") == 1
    assert len(server.posts) == 1


async def test_a_process_that_was_declared_gone_has_no_slots(store: Store) -> None:
    async with RawServer() as server:
        async with processes(store, 1, deployment(server.url, max_in_flight=4)) as made:
            world, router = made[0]
            await router.send(world.call())
            await store.declare_gone("worker_0", leaving=True)
            await eventually(lambda: not router.free_slots("m"), "its slots to be gone", 10)


async def test_calls_of_a_life_that_was_declared_gone_count_in_the_next_one_until_they_land(store: Store) -> None:
    """They go on, for their answers may still be of use: until the process speaks again the others do not know of them, then they do."""
    air, me = Air(), ["worker_before"]
    async with RawServer(air) as server:
        place, limits = deployment(server.url, max_in_flight=8), StoreLimits(store, "here")
        await store.enlist_worker("worker_before", "here", "1", 60_000)
        world = RouterWorld()
        async with (
            world.router(place, limits=PATIENT, capacity=Capacity(limits, lambda: me[0])) as router,
            processes(store, 1, place) as others,
        ):
            old = [asyncio.create_task(router.send(call)) for call in calls(world, 5)]
            await eventually(lambda: air.flying.get(b"all") == 5, "five calls to be in the air", 10)
            await store.declare_gone("worker_before", leaving=True)
            await store.enlist_worker("worker_after", "here", "1", 60_000)
            me[0] = "worker_after"
            new = [asyncio.create_task(router.send(call)) for call in calls(world, 5)]
            await eventually(lambda: air.flying[b"all"] == 8, "only what is left of them to be used", 10)
            other_world, other = others[0]
            more = [asyncio.create_task(other.send(call)) for call in calls(other_world, 10)]
            await eventually(lambda: router.status()[0].max_in_flight < 8, "the other to get its part", 10)
            assert (len(server.posts), other.status()[0].max_in_flight) == (8, 0)
            air.landing.set()
            await asyncio.gather(*old, *new, *more)
    assert air.highest[b"all"] == 8


class Board:
    """The Rests port, as several processes see it."""

    def __init__(self, world: RouterWorld) -> None:
        self._world = world
        self.until: dict[str, float] = {}

    def publish(self, deployment: str, rest_ms: int) -> None:
        until = self._world.clock.monotonic + rest_ms
        self.until[deployment] = max(until, self.until.get(deployment, 0.0))

    def current(self) -> dict[str, float]:
        return self.until


async def test_a_rest_is_published_to_other_processes_and_a_longer_one_wins() -> None:
    world = RouterWorld()
    limits, board = MemoryLimits(world.clock), Board(world)

    async def script(request: Request, peer: Peer) -> None:
        await peer.answer(429, b"{}", Retry_After="30")

    async with RawServer(script) as server:
        place = deployment(server.url, max_in_flight=4)
        async with (
            world.router(place, capacity=Capacity(limits, lambda: "one", rests=board)) as first,
            world.router(place, capacity=Capacity(limits, lambda: "two", rests=board)) as second,
        ):
            with pytest.raises(Throttled):
                await first.send(world.call())
            assert board.until == {"one": world.clock.monotonic + 30_000}
            await eventually(
                lambda: second.rests_until_ms("m") == world.clock.monotonic + 30_000, "the rest to reach the other", 30
            )
            board.until["one"] = world.clock.monotonic + 1_000
            world.clock.advance(500)
            assert second.rests_until_ms("m") == first.rests_until_ms("m") == world.clock.monotonic + 29_500
    assert len(server.posts) == 1


async def test_no_sliding_minute_holds_more_than_the_limit_and_none_is_left_unused(store: Store) -> None:
    """Four routers over the store's own ledger, all waking at the moment that it named; counted at the server, by the clock."""
    clock_world = RouterWorld()
    driver = SqliteDriver(None, clock_world.clock.now_ms)
    kept = Store(driver)
    await kept.migrate()
    seen: list[float] = []

    async def script(request: Request, peer: Peer) -> None:
        seen.append(clock_world.clock.monotonic)
        await peer.answer()

    tenant = Budget(LimitBound.TENANT, "t", (Limit(Period.HOUR, 100),))
    try:
        async with RawServer(script) as server, contextlib.AsyncExitStack() as stack:
            place = deployment(server.url, limits=(Limit(Period.MINUTE, 20),))
            routers = []
            for number in range(4):
                world = RouterWorld()
                world.clock = clock_world.clock
                capacity = Capacity(StoreLimits(kept, f"process {number}"))
                routers.append(
                    (world, await stack.enter_async_context(world.router(place, policy=AT_ONCE, capacity=capacity)))
                )
            await _work(routers, clock_world, (tenant,), until=lambda: len(seen) >= 100)
    finally:
        await kept.close()
    for at in seen:
        assert sum(at <= other < at + 60_000 for other in seen) <= 20
    # A window is kept half a second longer than a minute: five of them take no more than this.
    assert seen[-1] - seen[0] <= 4 * 61_500


async def _work(
    routers: list[tuple[RouterWorld, Router]], world: RouterWorld, budgets: tuple[Budget, ...], until: object
) -> None:
    """Send until it holds. No time goes by while a call is out, however long a busy machine takes for it."""
    out = 0

    async def drive(mine: RouterWorld, router: Router) -> None:
        nonlocal out
        while not until():  # type: ignore[operator]
            if router.rests_until_ms("m") > world.clock.monotonic:
                await asyncio.sleep(0)
                continue
            out += 1
            with contextlib.suppress(Withheld):
                await router.send(mine.call(budgets=budgets, left_ms=10**9))
            out -= 1
            await asyncio.sleep(0)

    async def time() -> None:
        while not until():  # type: ignore[operator]
            await asyncio.sleep(0.001)
            if not out:
                world.clock.advance(200)

    await asyncio.gather(time(), *(drive(*each) for each in routers for _ in range(3)))


async def test_a_cap_that_comes_and_goes_counts_what_is_out_already() -> None:
    """Also of calls under a resource that leads to another model by the time they end."""
    world, air = RouterWorld(), Air()
    async with RawServer(air) as server:
        places = [deployment(server.url, name, models=(name,), max_in_flight=50) for name in ("a", "b")]
        async with world.router(*places, resources=[Resource("ra", "a")]) as router:
            asks = calls(world, 3, "a") + calls(world, 1, "ra")
            flying = [asyncio.create_task(router.send(call)) for call in asks]
            await eventually(lambda: len(server.posts) == 4, "four calls there")
            router.replace(places, [Resource("ra", "b")], {"a": 6, "b": 2})
            assert [router.free_slots(model) for model in ("a", "ra", "b")] == [2, 2, 2]
            router.replace(places, [Resource("ra", "b")], {"a": 3})
            assert [router.free_slots(model) for model in ("a", "b")] == [0, 50]
            air.landing.set()
            await asyncio.gather(*flying)
            assert [router.free_slots(model) for model in ("a", "b")] == [3, 50]
            router.replace(places, ())
            assert router.free_slots("a") == 3, "who says nothing of caps leaves them"
            router.replace(places, (), {})
            assert router.free_slots("a") == 50


async def test_a_cap_that_comes_and_goes_holds_across_processes(store: Store) -> None:
    air = Air()
    async with RawServer(air) as server:
        place = deployment(server.url, "a", models=("a",), max_in_flight=50)
        async with processes(store, 2, place) as made:
            for _, router in made:
                router.replace([place], (), {"a": 3})
            flying = [
                asyncio.create_task(router.send(call)) for world, router in made for call in calls(world, 10, "a")
            ]
            await eventually(lambda: air.flying.get(b"a") == 3, "three calls there")
            air.landing.set()
            await asyncio.gather(*flying)
            assert air.highest[b"a"] == 3
            air.landing.clear()
            for _, router in made:
                router.replace([place], (), {})
            again = [asyncio.create_task(router.send(call)) for world, router in made for call in calls(world, 10, "a")]
            await eventually(lambda: air.flying.get(b"a") == 20, "all of them there")
            air.landing.set()
            await asyncio.gather(*again)
            # No process holds any of the cap that is gone: when it is set again, all of it is free.
            air.landing.clear()
            air.highest.clear()
            first_world, first = made[0]
            first.replace([place], (), {"a": 3})
            last = [asyncio.create_task(first.send(call)) for call in calls(first_world, 9, "a")]
            await eventually(lambda: air.flying.get(b"a") == 3, "all three to be given to one")
            air.landing.set()
            await asyncio.gather(*last)
            assert air.highest[b"a"] == 3


class _Asked(MemoryLimits):
    """Gives nothing, and notes what is reported to be in use; the call in flight ends while it is asked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.in_use: list[dict[str, int]] = []
        self.one = Slots("one", 4, 0)
        self.leaving: list[Slots] = []

    async def share_slots(
        self, worker_id: str, wanted: Mapping[str, int], in_use: Mapping[str, int], caps: Mapping[str, int]
    ) -> dict[str, int]:
        self.in_use.append(dict(in_use))
        if self.away:
            raise LimitsUnavailable("the store is away")
        self.one.count(0)
        return {}

    def slots(self) -> list[Slots]:
        return [self.one]

    def leaving_slots(self) -> list[Slots]:
        leaving, self.leaving = self.leaving, []
        return leaving

    def has_shares(self) -> None:
        pass


async def test_calls_of_a_deployment_that_was_replaced_count_with_those_of_the_new_one() -> None:
    limits = _Asked(RouterWorld().clock)
    limits.one.count(1)
    limits.leaving.append(Slots("one", 4, 0))
    limits.leaving[0].count(2)
    demand = SlotDemand(lambda: "me", ModelSlots({}, 0, is_alone=False))
    sharing = SlotSharing(limits, demand, [limits], RoomSignal(WaitLine()), None)
    await eventually(lambda: bool(limits.in_use), "the question", 10)
    await sharing.close()
    assert limits.in_use[0] == {"one": 3}


async def test_slots_of_the_last_life_are_not_those_of_the_next() -> None:
    world, me = RouterWorld(), ["before"]
    limits = MemoryLimits(world.clock)
    async with RawServer() as server:
        capacity = Capacity(limits, lambda: me[0])
        async with world.router(deployment(server.url, max_in_flight=4), capacity=capacity) as router:
            await router.send(world.call())
            limits.away = True
            await eventually(lambda: router.free_slots("m") > 0, "slots of its own", 10)
            me[0] = "after"
            assert router.free_slots("m") == 0


async def test_slots_that_a_life_asked_for_which_ended_meanwhile_are_not_those_of_the_next() -> None:
    me, own_until_ms = ["before"], list[float]()

    class Asked(_Asked):
        async def share_slots(self, *question: Any) -> dict[str, int]:
            me[0] = "after"
            return await super().share_slots(*question)

        def has_shares(self) -> None:
            own_until_ms.append(demand.own_until_ms())

    limits = Asked(RouterWorld().clock)
    limits.one.count(1)
    demand = SlotDemand(lambda: me[0], ModelSlots({}, 0, is_alone=False))
    sharing = SlotSharing(limits, demand, [limits], RoomSignal(WaitLine()), None)
    await eventually(lambda: bool(own_until_ms), "the answer", 10)
    await sharing.close()
    assert own_until_ms[0] == -math.inf


async def test_a_process_says_once_more_that_nothing_is_in_use() -> None:
    """Others count its last report as in use for as long as it lives."""
    limits = _Asked(RouterWorld().clock)
    limits.one.count(1)
    demand = SlotDemand(lambda: "me", ModelSlots({}, 0, is_alone=False))
    sharing = SlotSharing(limits, demand, [limits], RoomSignal(WaitLine()), None)
    await eventually(lambda: limits.in_use == [{"one": 1}, {"one": 0}], "its last word", 10)
    await sharing.close()


def test_slots_that_are_not_wanted_are_not_used_while_the_question_is_out() -> None:
    one = Slots("one", 8, 5)
    one.count(1)
    assert (one.let_go(2), one.share) == (2, 2)
    one.count(3)
    assert (one.let_go(0), one.share) == (3, 2)
    one.set_cap(4, is_alone=False)
    one.grant(8)
    assert one.share == 4, "an answer to an older question"


def test_a_process_keeps_a_little_more_than_it_uses() -> None:
    """Also of calls that have been out for longer than one answer."""
    one = Slots("one", 16, 16)
    for _ in range(4):
        one.take_slot()
    for _ in range(2):
        one.grant(16)
        assert one.wanted() == 6
    one.release_slot()
    one.grant(16)
    assert one.wanted() == 4


@pytest.mark.parametrize(
    ("share", "in_flight", "is_short", "spare", "wanted"),
    [
        (2, 0, False, 0, 0),
        (2, 0, True, 0, 4),
        (5, 5, True, 0, 10),
        (0, 3, True, 0, 7),
        (8, 8, True, 0, 12),
        (4, 4, False, 0, 6),
        (4, 4, False, 3, 7),
        (4, 0, False, 3, 3),
        (12, 11, False, 9, 12),
    ],
)
def test_as_many_slots_are_asked_for_as_are_likely_to_be_needed(
    share: int, in_flight: int, is_short: bool, spare: int, wanted: int
) -> None:
    one = Slots("one", 12, share)
    for _ in range(in_flight):
        one.take_slot()
    if is_short:
        one.note_short()
    one.keep_spare(spare)
    assert one.wanted() == wanted


def test_slots_that_came_for_one_who_asked_are_kept_until_it_looks_again_and_not_for_ever() -> None:
    one = Slots("one", 12, 0)
    wanted = []
    one.note_asked()
    for _ in range(UNSEEN_ROUNDS_MAX + 2):
        wanted.append(one.wanted())
        one.grant(1)
    assert wanted == [1] * (UNSEEN_ROUNDS_MAX + 1) + [0]
    one.note_asked()
    one.grant(1)
    one.note_seen()
    one.grant(1)
    assert one.wanted() == 0, "it has looked"


def test_a_cap_that_is_lifted_is_given_back_once_and_calls_of_a_model_count_before_it_has_one() -> None:
    slots = ModelSlots({"a": 2}, 5, is_alone=True)
    for model in ("a", "b", "b"):
        slots.take_model_slot(model)
    assert (slots.room("a"), slots.room("b"), slots.room("c")) == (1, 2, 2)
    slots.allow(None, {})
    assert [one.name for one in slots.slots()] == ["model:a", "global"]
    slots.allow({"b": 2}, {"a": 1, "b": 2})
    assert (slots.room("a"), slots.room("b")) == (2, 0)
    assert list(slots.leaving_slots()) == [], "what is not shared is not given back"
    shared = ModelSlots({"a": 2}, 5, is_alone=False)
    shared.allow({"b": 2}, {"a": 1, "b": 2})
    assert [(one.name, one.cap, one.in_flight) for one in shared.leaving_slots()] == [("model:a", 2, 0)]
    assert list(shared.leaving_slots()) == []
    slots.note_short("b")
    assert {one.name: one.is_short for one in slots.slots()} == {"model:b": True, "global": False}
    for model in ("a", "a"):
        slots.take_model_slot(model)
    slots.note_short("a")
    assert {one.name: one.is_short for one in slots.slots()} == {"model:b": True, "global": True}
    for model in ("a", "a", "a", "b", "b"):
        slots.release_model_slot(model)
    assert (slots.room("b"), slots.room("a")) == (2, 5)
    free = ModelSlots({}, 0, is_alone=True)
    assert (free.has_caps, free.room("a")) == (False, float("inf"))


async def test_what_was_asked_for_without_an_answer_may_be_held_and_is_given_back() -> None:
    """A share that the store gave, and whose grant never reached this process, would be lost to all."""
    limits = _Asked(RouterWorld().clock)
    demand = SlotDemand(lambda: "me", ModelSlots({}, 0, is_alone=False))
    sharing = SlotSharing(limits, demand, [limits], RoomSignal(WaitLine()), None)
    await sharing.close()
    limits.in_use.clear()
    assert await sharing._ask(), "an idle process asks nothing, and looks again at once"
    assert limits.in_use == []
    limits.one.note_short()
    limits.away = True
    with pytest.raises(LimitsUnavailable):
        await sharing._ask()
    limits.away = False
    limits.one.grant(0)
    await sharing._ask()
    assert len(limits.in_use) == 2


async def test_slots_are_asked_for_until_a_caller_has_seen_them_and_not_for_ever() -> None:
    """A worker looks again only at its next poll: slots that were given up before that would never be found."""
    slots = Slots("m", cap=10, share=0)
    slots.note_asked()
    for _ in range(3):
        assert slots.wanted() == 1
        slots.grant(1)
    slots.note_seen()
    slots.grant(1)
    assert slots.wanted() == 0
    slots.note_asked()
    for _ in range(31):
        assert slots.wanted() == 1
        slots.grant(1)
    assert slots.wanted() == 0, "no caller came within fifteen seconds"
