"""What every store does with deployments and resources that are added at run time."""

from __future__ import annotations

import asyncio

import pytest

from tests.contracts.store_world import MODEL, StoreWorld
from tidegate.core.errors import LostRace
from tidegate.core.job_controls import JobControls
from tidegate.store.fleet import routing
from tidegate.store.fleet.routing import RoutingFull

pytestmark = pytest.mark.anyio

ONE, TWO = '{"url": "http://one"}', '{"url": "http://two"}'


async def test_every_process_sees_each_change_by_its_number(world: StoreWorld) -> None:
    other = await world.open_another()
    before = await other.routing_number()
    first = await world.store.put_routing("deployment", "a/1", ONE, 0)
    assert await other.routing_number() == first > before
    second = await world.store.put_routing("deployment", "a/1", TWO, first)
    number, entries = await other.routing()
    assert number == second > first
    assert [(one.kind, one.name, one.document, one.revision) for one in entries] == [("deployment", "a/1", TWO, second)]
    assert await world.store.drop_routing("deployment", "a/1", second)
    number, entries = await other.routing()
    assert number > second
    assert entries == []
    assert not await world.store.drop_routing("deployment", "a/1", second)


async def test_a_deployment_and_a_resource_may_have_one_name(world: StoreWorld) -> None:
    await world.store.put_routing("deployment", "chat", ONE, 0)
    await world.store.put_routing("resource", "chat", "{}", 0)
    _, entries = await world.store.routing()
    assert [(one.kind, one.name) for one in entries] == [("deployment", "chat"), ("resource", "chat")]


async def test_a_drain_lasts_until_its_deployment_is_removed(world: StoreWorld) -> None:
    seen = await world.store.put_routing("deployment", "a", ONE, 0)
    for name in ("a", "of the settings"):
        await world.store.put_routing("drain_state", name, '{"is_drained": true}', 0)
    await world.store.put_routing("resource", "a", "{}", 0)
    await world.store.drop_routing("deployment", "a", seen)
    _, entries = await world.store.routing()
    assert [(one.kind, one.name) for one in entries] == [("drain_state", "of the settings"), ("resource", "a")]


async def test_of_two_operators_the_second_gets_an_error(world: StoreWorld) -> None:
    other = await world.open_another()
    seen = await world.store.put_routing("deployment", "a", ONE, 0)
    with pytest.raises(LostRace):
        await other.put_routing("deployment", "a", TWO, 0)
    await world.store.put_routing("deployment", "a", TWO, seen)
    with pytest.raises(LostRace):
        await other.put_routing("deployment", "a", '{"url": "http://three"}', seen)
    with pytest.raises(LostRace):
        await other.drop_routing("deployment", "a", seen)
    _, entries = await world.store.routing()
    assert [one.document for one in entries] == [TWO]


async def test_of_many_at_once_exactly_one_is_first(world: StoreWorld) -> None:
    stores = [world.store, await world.open_another()]
    tries = [
        store.put_routing("deployment", "a", f'{{"url": "http://{index}-{turn}"}}', 0)
        for turn in range(4)
        for index, store in enumerate(stores)
    ]
    ends = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(end, int) for end in ends) == 1
    assert sum(isinstance(end, LostRace) for end in ends) == len(tries) - 1


async def test_a_repeat_changes_nothing(world: StoreWorld) -> None:
    first = await world.store.put_routing("resource", "chat", ONE, 0)
    assert await world.store.put_routing("resource", "chat", ONE, 0) == first
    assert await world.store.put_routing("resource", "chat", ONE, 12345) == first


async def test_there_are_only_so_many(world: StoreWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "ENTRIES_MAX", 2)
    await world.store.put_routing("deployment", "a", ONE, 0)
    await world.store.put_routing("resource", "b", ONE, 0)
    with pytest.raises(RoutingFull, match="remove some first"):
        await world.store.put_routing("deployment", "c", ONE, 0)


async def test_a_model_is_wanted_while_a_job_has_items_for_it(world: StoreWorld) -> None:
    assert not await world.store.is_wanted(MODEL)
    await world.running(await world.caller(), 2)
    assert await world.store.is_wanted(MODEL)
    assert not await world.store.is_wanted("another")


async def test_what_rests_is_looked_at_again_under_other_terms(world: StoreWorld) -> None:
    """Whatever put it off; a job that must not begin yet still waits."""
    hour_ms, worker = 3_600_000, await world.worker(10**9)
    job = await world.running(await world.caller("one"), 1)
    later = await world.running(
        await world.caller("two"), 1, controls=JobControls(not_before=world.clock.now + 2 * hour_ms)
    )
    [piece] = await world.lease(worker, job)
    await world.store.rest_job(job.id, MODEL, hour_ms)
    assert await world.store.release_slice(job.id, 0, piece.token, hour_ms)
    for one in (job, later):
        assert await world.store.rest_flow(MODEL, one.share_owner)
    assert (await world.store.terms(), await world.store.wake_rested(10)) == ("", 0)
    for _ in range(2):
        await world.store.wake_under("raised")
    assert await world.store.terms() == "raised"
    assert await world.store.wake_rested(10) == 2
    assert len(await world.lease(worker, job)) == 1
    assert await world.lease(worker, later) == []
