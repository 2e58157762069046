"""What every store says of a job that is not there yet."""

from __future__ import annotations

import pytest

from tests.contracts.store_world import MODEL, World
from tidegate.core.nouns import Idempotency
from tidegate.core.scope import tenant_scope

pytestmark = pytest.mark.anyio


async def test_a_newcomer_stands_behind_nobody(world: World) -> None:
    found = await world.store.prospect(MODEL, tenant_scope("nobody"), 500)
    assert (found.model, found.left_units, found.ahead_units) == (MODEL, 500, 0)
    assert (found.weight, found.weights, found.flow_count, found.minutes) == (1.0, 1.0, 1, ())


async def test_what_a_flow_has_is_ahead_of_what_it_gets(world: World) -> None:
    caller, other = await world.caller("one"), await world.caller("other")
    job = await world.running(caller, 4)
    outlook = await world.store.outlook(job.id)
    assert outlook is not None
    mine = await world.store.prospect(MODEL, job.scope, 500)
    assert mine.ahead_units == outlook.models[0].left_units
    assert (mine.flow_count, mine.weights) == (1, 1.0)
    theirs = await world.store.prospect(MODEL, tenant_scope(other.tenant_id), 500)
    assert theirs.ahead_units == 0
    assert (theirs.flow_count, theirs.weights) == (2, 2.0)


async def test_a_key_stands_for_what_it_made_for_a_day(world: World) -> None:
    caller = await world.caller()
    assert not await world.store.was_made(caller.tenant_id, "batches", "k")
    await world.job(caller, idempotency=Idempotency("k", "hash"))
    assert await world.store.was_made(caller.tenant_id, "batches", "k")
    assert not await world.store.was_made(caller.tenant_id, "files", "k")
    await world.clock.advance(24 * 3600 * 1000 + 1)
    assert not await world.store.was_made(caller.tenant_id, "batches", "k")
