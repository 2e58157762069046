"""What shared calls take of budgets, and how many of them there are: one request and all their tokens, charged to whom they are for."""

import asyncio

import pytest

from tests.upstream.grouping.test_groups import Gate, embed, grouped, item, sizes
from tests.upstream.limits import MemoryLimits, minute
from tests.upstream.raw_server import RawServer, eventually
from tests.upstream.world import RouterWorld, together
from tidegate.core.budgets.budget import Budget, LimitBound
from tidegate.core.deployments import Estimate
from tidegate.core.errors import Withheld
from tidegate.core.nouns import Answer
from tidegate.upstream.routing.deployment_state import DeploymentPolicy
from tidegate.upstream.routing.slots import Capacity

pytestmark = pytest.mark.anyio

AT_ONCE = DeploymentPolicy(patience_ms=0)


async def test_a_shared_call_is_one_request_of_its_deployment(world: RouterWorld, limits: MemoryLimits) -> None:
    async with RawServer(embed) as server:
        place = grouped(server.url, limits=(minute(3),))
        async with world.router(place, policy=AT_ONCE, capacity=Capacity(limits)) as router:
            found = await together(router, [item(world, "x") for _ in range(40)])
            assert sum(isinstance(one, Answer) for one in found) == 24
            assert sum(isinstance(one, Withheld) for one in found) == 16
            assert (len(server.posts), limits.used("one")[0]) == (3, 3)


async def test_tokens_are_settled_with_what_all_items_used(world: RouterWorld, limits: MemoryLimits) -> None:
    mine, other = (Budget(LimitBound.JOB, name, (minute(tokens=10_000),)) for name in ("mine", "other"))
    async with RawServer(embed) as server:
        async with world.router(grouped(server.url), policy=AT_ONCE, capacity=Capacity(limits)) as router:
            calls = [item(world, "x" * 10, budgets=(mine,)) for _ in range(8)]
            calls += [item(world, "x" * 5, budgets=(other,)) for _ in range(8)]
            found = await together(router, calls)
            used = [one.usage.input_tokens for one in found if isinstance(one, Answer)]
            assert (sum(used[:8]), sum(used[8:])) == (80, 40)
        # Settled at the latest when the router closes.
        assert (limits.used(mine), limits.used(other)) == ((1, 80), (1, 40))
    assert sizes(server) == [8, 8]


@pytest.mark.parametrize("estimate", Estimate)
async def test_a_group_is_no_larger_than_its_budget_allows(
    world: RouterWorld, limits: MemoryLimits, estimate: Estimate
) -> None:
    """Eight together would be more than a minute has, and four are not."""
    text = "x" * 400
    allowed = {Estimate.BOUND: 2_400, Estimate.LIKELY: 600}[estimate]
    async with RawServer(embed) as server:
        place = grouped(server.url, limits=(minute(tokens=allowed),), estimate=estimate)
        async with world.router(place, policy=AT_ONCE, capacity=Capacity(limits)) as router:
            found = await together(router, [item(world, text) for _ in range(8)])
            assert any(isinstance(one, Answer) for one in found)
            assert all(isinstance(one, Answer | Withheld) for one in found)
    assert max(sizes(server)) == 4


async def test_a_process_has_no_more_calls_out_than_its_own_limit(world: RouterWorld) -> None:
    gate = Gate(embed)
    async with (
        RawServer(gate) as server,
        world.router(grouped(server.url, max_in_flight=64), capacity=Capacity(in_flight_max=2)) as router,
    ):
        assert router.free_slots("m") == 16
        tasks = [asyncio.create_task(router.send(item(world, ["a", "b"]))) for _ in range(2)]
        await eventually(lambda: len(server.posts) == 2, "two calls that cannot be shared")
        assert router.free_slots("m") == 0
        gate.opened.set()
        await asyncio.gather(*tasks)
        assert router.free_slots("m") == 16
