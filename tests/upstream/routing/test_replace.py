"""Deployments that come, change and go under a router with calls in flight, and resources with fallbacks; over real sockets."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tests.upstream.calls.test_router import FAST, Gate, always, failure
from tests.upstream.limits import MemoryLimits
from tests.upstream.raw_server import Peer, RawServer, Request, Script, eventually
from tests.upstream.world import RouterWorld, deployment
from tidegate.core.budgets.budget import Limit, Period
from tidegate.core.deployments import EngineKind, Resource, Tls
from tidegate.core.errors import Ambiguous, Refused, SettingsError, Throttled, Unavailable
from tidegate.core.usage.prices import Price
from tidegate.upstream.http.transport import HttpReply
from tidegate.upstream.routing.deployment_state import DeploymentPolicy
from tidegate.upstream.routing.slots import Capacity

pytestmark = pytest.mark.anyio


async def test_calls_in_flight_end_where_they_are_and_new_ones_go_elsewhere(world: RouterWorld) -> None:
    gate = Gate()
    async with RawServer(gate) as old, RawServer() as new:
        async with world.router(deployment(old.url, "old", models=("m",))) as router:
            flying = [asyncio.create_task(router.send(world.call())) for _ in range(3)]
            await eventually(lambda: len(old.posts) == 3, "3 calls there")
            assert router.replace([deployment(new.url, "new", models=("m",))], ()) == {}
            assert (await router.send(world.call())).deployment == "new"
            assert [one.name for one in router.status()] == ["new"]
            gate.opened.set()
            assert {one.deployment for one in await asyncio.gather(*flying)} == {"old"}
    assert len(old.posts) == 3


async def test_nothing_is_kept_of_deployments_that_are_gone(world: RouterWorld) -> None:
    async with world.router(deployment("http://one.test/v1", "one", models=("m",))) as router:
        gone = weakref.ref(router._states["one"])
        router.replace([deployment("http://two.test/v1", "two", models=("m",))], (), model_in_flight_max={"m": 2})
        router.replace([deployment("http://two.test/v1", "two", models=("m",))], (), model_in_flight_max={})
        gc.collect()
        assert gone() is None
        assert list(router._model_slots.leaving_slots()) == []


async def test_the_price_of_one_that_is_gone_stays_for_its_last_calls(world: RouterWorld) -> None:
    price = Price.of(input=1)
    async with world.router(deployment("http://127.0.0.1:1/v1", price=price)) as router:
        router.replace([], ())
        assert router.price_of("one") == price
        router.replace([deployment("http://127.0.0.1:1/v1")], ())
        assert router.price_of("one") is None


async def test_who_waits_for_a_slot_of_one_that_is_gone_gets_one_of_its_successor(world: RouterWorld) -> None:
    gate = Gate()
    async with RawServer(gate) as old, RawServer() as new:
        async with world.router(deployment(old.url, "old", models=("m",), max_in_flight=1)) as router:
            flying = asyncio.create_task(router.send(world.call()))
            await eventually(lambda: len(old.posts) == 1, "1 calls there")
            waiting = asyncio.create_task(router.send(world.call()))
            await asyncio.sleep(0)
            router.replace([deployment(new.url, "new", models=("m",))], ())
            assert (await waiting).deployment == "new"
            gate.opened.set()
            await flying
    assert len(old.posts) == 1


async def test_a_call_that_waits_for_a_model_that_is_removed_fails(world: RouterWorld) -> None:
    gate = Gate()
    async with RawServer(gate) as old:
        async with world.router(deployment(old.url, "old", models=("m",), max_in_flight=1)) as router:
            flying = asyncio.create_task(router.send(world.call()))
            await eventually(lambda: len(old.posts) == 1, "1 calls there")
            waiting = asyncio.create_task(router.send(world.call()))
            await asyncio.sleep(0)
            router.replace((), ())
            with pytest.raises(Unavailable, match="no deployment serves model 'm'"):
                await waiting
            assert (router.knows("m"), router.free_slots("m"), router.names()) == (False, 0, [])
            gate.opened.set()
            await flying


async def test_a_call_that_fails_at_one_that_is_gone_goes_on_to_its_successor(world: RouterWorld) -> None:
    gate = asyncio.Event()

    async def refuse(request: Request, peer: Peer) -> None:
        await gate.wait()
        await peer.answer(429, b"{}")

    async with RawServer(refuse) as old, RawServer() as new:
        async with world.router(deployment(old.url, "old", models=("m",))) as router:
            flying = asyncio.create_task(router.send(world.call()))
            await eventually(lambda: len(old.posts) == 1, "1 calls there")
            router.replace([deployment(new.url, "new", models=("m",))], ())
            gate.set()
            assert (await flying).deployment == "new"


async def test_other_terms_keep_calls_health_and_what_was_learned(world: RouterWorld) -> None:
    gate = Gate()
    async with RawServer(gate) as server:
        before = deployment(server.url, models=("m",), max_in_flight=4)
        async with world.router(before, limits=FAST) as router:
            flying = [asyncio.create_task(router.send(world.call())) for _ in range(3)]
            await eventually(lambda: len(server.posts) == 3, "3 calls there")
            router.replace([replace(before, max_in_flight=3, weight=2.0)], ())
            (status,) = router.status()
            assert (status.in_flight, status.max_in_flight, router.free_slots("m")) == (3, 3, 0)
            router.replace([replace(before, max_in_flight=5)], ())
            assert router.free_slots("m") == 2
            gate.opened.set()
            await asyncio.gather(*flying)
            assert (router.status()[0].in_flight, router.status()[0].answered, router.free_slots("m")) == (0, 3, 5)


async def test_an_open_circuit_stays_open_under_other_terms_and_another_server_begins_with_a_closed_one(
    world: RouterWorld,
) -> None:
    async with RawServer(always(503)) as ill, RawServer() as well:
        before = deployment(ill.url, models=("m",))
        async with world.router(before) as router:
            for _ in range(5):
                await failure(router, world)
            assert router.rests_until_ms("m") > 0
            router.replace([replace(before, weight=3.0)], ())
            assert router.rests_until_ms("m") > 0
            router.replace([replace(before, url=well.url)], ())
            assert router.rests_until_ms("m") == 0
            await router.send(world.call())


async def test_another_tide_counts_only_its_own_calls(world: RouterWorld) -> None:
    """The engine's own deployments have a tide; with another capacity they get another one, and calls of the first end in peace."""
    gate = Gate()
    async with RawServer(gate) as server:
        before = deployment(server.url, models=("m",), engine=EngineKind.VLLM, is_capacity_known=False, max_in_flight=8)
        async with world.router(before) as router:
            flying = [asyncio.create_task(router.send(world.call())) for _ in range(2)]
            await eventually(lambda: len(server.posts) == 2, "2 calls there")
            router.replace([replace(before, max_in_flight=4)], ())
            gate.opened.set()
            await asyncio.gather(*flying)
            assert router.status()[0].in_flight == 0
            await asyncio.gather(*(router.send(world.call()) for _ in range(6)))


async def test_what_cannot_be_used_is_left_out_with_the_reason(world: RouterWorld) -> None:
    async with RawServer() as server:
        good = deployment(server.url, "good", models=("m",))
        bad = deployment("https://h/v1", "bad", models=("b",), tls=Tls(ca_file="/no/such/file"))
        async with world.router(good) as router:
            refused = router.replace([good, bad, good], [Resource("r", "nowhere")])
            assert sorted(refused) == ["bad", "good", "r"]
            assert "check that each exists" in refused["bad"]
            assert "two deployments are named 'good'" in refused["good"]
            assert "which no deployment serves" in refused["r"]
            assert router.names() == ["m"]
            await router.send(world.call())


async def test_resources_come_and_go(world: RouterWorld) -> None:
    seen: list[str] = []

    async def script(request: Request, peer: Peer) -> None:
        seen.append(json.loads(request.body)["model"])
        await peer.answer()

    async with RawServer(script) as server:
        place = deployment(server.url, models=("m",))
        async with world.router(place) as router:
            assert not router.knows("chat")
            router.replace([place], [Resource("chat", "m")])
            await router.send(world.call("chat", body=b'{"model":"chat"}'))
            router.replace([place], ())
            assert not router.knows("chat")
    assert seen == ["m"]


# Fallbacks.


async def test_a_fallback_takes_what_the_first_refused_under_its_own_name_and_limits(world: RouterWorld) -> None:
    seen: list[str] = []

    async def script(request: Request, peer: Peer) -> None:
        seen.append(json.loads(request.body)["model"])
        await peer.answer()

    async with RawServer(always(429, Retry_After="7")) as first, RawServer(script) as second:
        places = deployment(first.url, "one", models=("a",)), deployment(second.url, "two", models=("b",))
        async with world.router(*places, resources=[Resource("chat", "a", fallbacks=("b",))]) as router:
            answer = await router.send(world.call("chat", body=b'{"model":"chat"}'))
            assert (answer.deployment, seen) == ("two", ["b"])
            # The first rests now, and the name is open all the same.
            assert (router.free_slots("chat") > 0, router.closed("chat"), router.rests_until_ms("chat")) == (
                True,
                "",
                0,
            )
            await router.send(world.call("chat", body=b'{"model":"chat"}'))
            assert router.free_slots("a") == 0
    assert (len(first.posts), len(second.posts)) == (1, 2)


async def test_a_key_that_does_not_allow_the_fallbacks_model_waits_for_the_first(world: RouterWorld) -> None:
    """Also a second deployment of the first's own model counts as its own, and a key without an allowlist may go everywhere."""
    async with RawServer(always(429, Retry_After="7")) as first, RawServer() as second, RawServer() as third:
        places = (
            deployment(first.url, "one", models=("a",)),
            deployment(second.url, "two", models=("b",)),
            deployment(third.url, "three", models=("c",)),
        )
        chat = Resource("chat", "a", fallbacks=("aside", "c"))
        async with world.router(*places, resources=[chat, Resource("aside", "b")]) as router:
            for _ in range(2):
                refused = await failure(router, world, model="chat", models=frozenset({"a"}))
                assert type(refused) is Throttled
                assert refused.retry_after_ms is not None, "the fallbacks' free slots are nothing to this key"
                assert 6_000 < refused.retry_after_ms <= 7_000
            only_c = await router.send(world.call("chat", models=frozenset({"a", "c"})))
            any_model = await router.send(world.call("chat"))
    assert (only_c.deployment, any_model.deployment) == ("three", "two")
    assert (len(second.posts), len(third.posts)) == (1, 1)


async def test_a_later_order_of_an_allowed_model_is_no_other_model(world: RouterWorld) -> None:
    async with RawServer(always(429, Retry_After="7")) as first, RawServer() as later:
        places = (
            deployment(first.url, "one", models=("a",)),
            deployment(later.url, "later", models=("a",), order=2),
        )
        async with world.router(*places, resources=[Resource("chat", "a")]) as router:
            for name in ("a", "chat"):
                assert (await router.send(world.call(name, models=frozenset({"a"})))).deployment == "later"


@pytest.mark.parametrize(("status", "kind"), [(500, Ambiguous), (400, Refused)])
async def test_what_may_be_billed_or_is_wrong_everywhere_takes_no_fallback(
    world: RouterWorld, status: int, kind: type[Exception]
) -> None:
    async with RawServer(always(status)) as first, RawServer() as second:
        places = deployment(first.url, "one", models=("a",)), deployment(second.url, "two", models=("b",))
        async with world.router(*places, resources=[Resource("chat", "a", fallbacks=("b",))]) as router:
            assert type(await failure(router, world, model="chat")) is kind
    assert len(second.posts) == 0


async def test_a_deployment_that_is_merely_full_is_waited_for(world: RouterWorld) -> None:
    gate = Gate()
    async with RawServer(gate) as first, RawServer() as second:
        places = (
            deployment(first.url, "one", models=("a",), max_in_flight=1),
            deployment(second.url, "two", models=("b",)),
        )
        async with world.router(*places, resources=[Resource("chat", "a", fallbacks=("b",))]) as router:
            flying = asyncio.create_task(router.send(world.call("chat")))
            await eventually(lambda: len(first.posts) == 1, "1 calls there")
            assert router.free_slots("chat") == 0
            gate.opened.set()
            await flying
            await router.send(world.call("chat"))
    assert (len(first.posts), len(second.posts)) == (2, 0)


async def test_deployments_of_a_later_order_are_there_for_when_the_earlier_ones_are_not(world: RouterWorld) -> None:
    gate = Gate()
    async with RawServer(gate) as first, RawServer() as spare, RawServer() as last:
        places = [
            deployment(last.url, "last", models=("m",), order=3),
            deployment(spare.url, "spare", models=("m",), order=2),
            deployment(first.url, "first", models=("m",), max_in_flight=2),
        ]
        async with world.router(*places) as router:
            assert router.free_slots("m") == 2
            flying = [asyncio.create_task(router.send(world.call())) for _ in range(3)]
            await eventually(lambda: len(first.posts) == 2, "2 calls there")
            assert (router.free_slots("m"), len(spare.posts)) == (0, 0), "who is merely full is waited for"
            gate.opened.set()
            assert {(await one).deployment for one in flying} == {"first"}
            first.script = always(429, Retry_After="100")
            assert {(await router.send(world.call())).deployment for _ in range(3)} == {"spare"}
            assert len(first.posts) == 4, "a rest is kept"
            spare.script = always(429, Retry_After="100")
            assert (await router.send(world.call())).deployment == "last"
            assert router.rests_until_ms("m") == 0


async def test_fallbacks_of_fallbacks_come_in_order_and_each_once(world: RouterWorld) -> None:
    order: list[str] = []

    def refusing(name: str) -> Script:
        async def script(request: Request, peer: Peer) -> None:
            order.append(name)
            await peer.answer(429, b"{}")

        return script

    async with RawServer(refusing("a")) as a, RawServer(refusing("b")) as b, RawServer(refusing("c")) as c:
        places = [deployment(one.url, name, models=(name,)) for name, one in (("a", a), ("b", b), ("c", c))]
        named = [Resource("chat", "a", fallbacks=("spare", "c")), Resource("spare", "b", fallbacks=("c",))]
        async with world.router(*places, resources=named) as router:
            error = await failure(router, world, model="chat")
            assert isinstance(error, Throttled)
            assert error.retry_after_ms
            assert router.rests_until_ms("chat") > 0
    assert order == ["a", "b", "c"]


async def test_a_fallbacks_own_limit_binds_what_falls_back_to_it(world: RouterWorld) -> None:
    async with RawServer(always(429, Retry_After="100")) as first, RawServer() as second:
        places = deployment(first.url, "one", models=("a",)), deployment(second.url, "two", models=("b",))
        named = [
            Resource("chat", "a", fallbacks=("spare",)),
            Resource("spare", "b", (Limit(Period.HOUR, 2, None),)),
        ]
        capacity = Capacity(limits=MemoryLimits(world.clock))
        async with world.router(*places, resources=named, capacity=capacity) as router:
            for _ in range(2):
                assert (await router.send(world.call("chat"))).deployment == "two"
            await failure(router, world, model="chat")
    assert len(second.posts) == 2


async def test_a_policy_of_deployments_holds_for_those_that_come_later(world: RouterWorld) -> None:
    async with RawServer(always(429, Retry_After="3600")) as server:
        async with world.router(policy=DeploymentPolicy(retry_after_ms_max=5_000)) as router:
            router.replace([deployment(server.url, models=("m",))], ())
            error = await failure(router, world)
            assert error.retry_after_ms is not None
            assert error.retry_after_ms <= 5_000


async def test_a_beginning_with_what_cannot_be_used_is_refused(world: RouterWorld) -> None:
    with pytest.raises(SettingsError, match="check that each exists"):
        async with world.router(deployment("https://h/v1", tls=Tls(ca_file="/no/such/file"))):
            pass


# How long a call may take.


@pytest.mark.parametrize(
    ("place", "named", "reason"),
    [
        ({"endpoint_timeouts_s": {"/v1/chat/completions": 0.2}}, None, "its deadline passed"),
        ({"endpoint_timeouts_s": {"/v1/embeddings": 1000.0}, "total_timeout_s": 0.2}, None, "its deadline passed"),
        ({"endpoint_timeouts_s": {"/v1/chat/completions": 1000.0}}, 0.2, "its deadline passed"),
    ],
)
async def test_a_whole_call_may_take_what_its_route_endpoint_or_deployment_says(
    world: RouterWorld, place: dict[str, Any], named: float | None, reason: str
) -> None:
    async with RawServer(Gate()) as server:
        resource = [] if named is None else [Resource("chat", "m", total_timeout_s=named)]
        async with world.router(deployment(server.url, models=("m",), **place), resources=resource) as router:
            error = await failure(router, world, model="m" if named is None else "chat")
            assert reason in error.message


@pytest.mark.parametrize(("total_timeout_s", "total_s"), [(600.0, 90.0), (70.0, 70.0)])
async def test_a_call_that_begins_before_its_deadline_may_end_within_its_grace(
    world: RouterWorld, total_timeout_s: float, total_s: float
) -> None:
    totals_s = list[float]()
    async with RawServer() as server:
        async with world.router(deployment(server.url, total_timeout_s=total_timeout_s)) as router:
            state = router._states["one"]
            post = state.client.post

            async def noted(request: Any, total_s: float, permit: Any) -> HttpReply:
                totals_s.append(total_s)
                return await post(request, total_s, permit)

            state.client = SimpleNamespace(post=noted)
            await router.send(world.call(left_ms=60_000, grace_ms=30_000))
    assert totals_s == [total_s]
