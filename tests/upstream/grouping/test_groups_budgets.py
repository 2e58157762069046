"""What shared calls take of budgets, and how many of them there are: one request and all their tokens, charged to whom they are for."""

import asyncio
import json
from collections.abc import Sequence

import msgspec
import pytest

from tests.upstream.budgets.test_money import PRICE, LedgerLimits, money
from tests.upstream.grouping.test_groups import Gate, embed, grouped, inputs_of, item, sizes, vectors
from tests.upstream.grouping.test_groups_chat import batching, chat, shapes
from tests.upstream.grouping.test_groups_chat import item as chat_item
from tests.upstream.limits import MemoryLimits, minute
from tests.upstream.raw_server import Peer, RawServer, Request, eventually
from tests.upstream.world import RouterWorld, deployment, together
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


def lines_of(found: Sequence[object]) -> int:
    """What the items are priced by together, in tokens."""
    priced = [one.priced for one in found if isinstance(one, Answer)]
    return sum(used.input_tokens + used.output_tokens for used in priced if used is not None)


@pytest.mark.parametrize("usage", [None, [], {"prompt_tokens": 0}, {"prompt_tokens": 3}, {"prompt_tokens": "many"}])
async def test_items_that_shared_a_call_cost_together_what_its_budget_paid(world: RouterWorld, usage: object) -> None:
    async def vague(request: Request, peer: Peer) -> None:
        body = json.loads(vectors(inputs_of(request)))
        await peer.answer(200, json.dumps({**body, "usage": usage}).encode())

    ledgers, budgets = LedgerLimits(world.clock), money(100_000)
    async with RawServer(vague) as server:
        place = grouped(server.url, price=PRICE)
        async with world.router(place, policy=AT_ONCE, capacity=Capacity(ledgers)) as router:
            found = await together(router, [item(world, "x" * (40 * at + 1), budgets=budgets) for at in range(8)])
    assert sizes(server) == [8]
    assert 0 < lines_of(found) == 100_000 - ledgers.left(budgets[0])
    prompts = [one.priced.input_tokens for one in found if isinstance(one, Answer) and one.priced is not None]
    assert prompts[0] < prompts[-1], "each pays by its length"


async def test_chats_that_shared_a_call_cost_together_what_its_budget_paid(world: RouterWorld) -> None:
    """Their server reports what each of them used, and no sum."""
    ledgers, budgets = LedgerLimits(world.clock), money(1_000_000)
    async with RawServer(chat) as server:
        place = deployment(server.url, price=PRICE, chat_batching=batching())
        async with world.router(place, policy=AT_ONCE, capacity=Capacity(ledgers)) as router:
            asked = [chat_item(world, "x" * (at + 1), max_tokens=9) for at in range(4)]
            found = await together(router, [msgspec.structs.replace(call, budgets=budgets) for call in asked])
    assert shapes(server) == [("/batch", 4)]
    assert lines_of(found) == 1 + 2 + 3 + 4 + 4 * 2 == 1_000_000 - ledgers.left(budgets[0])


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
