"""What processes report to each other of their calls: each of the others by itself, forgotten when it is not reported again."""

from __future__ import annotations

import pytest

from tests.contracts.store_world import StoreWorld
from tests.contracts.test_store_budgets import rows
from tidegate.core.ports import Present
from tidegate.store.fleet import fleet

pytestmark = pytest.mark.anyio


async def test_each_process_reads_the_reports_of_the_others_and_their_age(world: StoreWorld) -> None:
    first, second, third = [world.id("worker") for _ in range(3)]
    assert await world.store.report_to_fleet(first, {"a": Present(1, 5, 0, 0), "b": Present(1, 1)}) == {}
    await world.clock.advance(400)
    reports = await world.store.report_to_fleet(second, {"a": Present(1, 2, 3, 1, True, "beside")})
    assert reports == {"a": {first: (Present(1, 5, 0, 0), 400)}, "b": {first: (Present(1, 1), 400)}}
    both = await world.store.report_to_fleet(third, {})
    assert both["a"] == {first: (Present(1, 5, 0, 0), 400), second: (Present(1, 2, 3, 1, True), 0)}
    assert (await world.store.report_to_fleet(first, {"a": Present()}))["a"] == {second: (Present(1, 2, 3, 1, True), 0)}


async def test_of_more_reports_than_one_look_takes_the_latest_are_read(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_OTHERS_MAX", 2)
    workers = [world.id("worker") for _ in range(3)]
    for worker in workers:
        await world.store.report_to_fleet(worker, {"a": Present(1, 1)})
        await world.clock.advance(1)
    assert set((await world.store.report_to_fleet(world.id("worker"), {}))["a"]) == set(workers[1:])


async def test_a_report_that_is_not_repeated_counts_for_nothing_and_is_forgotten(world: StoreWorld) -> None:
    first, second = world.id("worker"), world.id("worker")
    await world.store.report_to_fleet(first, {"a": Present(1, 5, why="quiet: for 2.0 s", tide=8)})
    await world.store.report_to_fleet(second, {"a": Present(1, 2, 3, tide=4), "b": Present(0, 0, 1, 1)})
    assert await world.store.tides() == [("a", "quiet: for 2.0 s")]
    await world.store.report_to_fleet(first, {"a": Present(1, 5, why="rising", tide=8)})
    await world.store.report_to_fleet(second, {"b": Present(0, 0, 1, 1, why="full")})
    assert await world.store.tides() == [("a", "rising"), ("b", "full")]
    assert await world.store.loads() == {"a": (12, 7, 3), "b": (0, 0, 1)}
    await world.clock.advance(3_000)
    assert await world.store.report_to_fleet(world.id("worker"), {}) == {}
    await world.clock.advance(3_700_000)
    await world.store.forget_fleet_reports()
    assert (await world.store.tides(), await world.store.loads()) == ([], {})


async def test_a_recent_report_is_not_forgotten(world: StoreWorld) -> None:
    first, second = world.id("worker"), world.id("worker")
    await world.store.report_to_fleet(first, {"a": Present(1, 5)})
    await world.clock.advance(fleet.KEEP_MS)
    await world.store.report_to_fleet(second, {"a": Present(1, 2)})
    await world.store.forget_fleet_reports()
    assert await rows(world, "select worker_id from fleet_reports order by reported_at") == [first, second]
    await world.clock.advance(1)
    await world.store.forget_fleet_reports()
    assert await rows(world, "select worker_id from fleet_reports") == [second]


async def test_a_process_finds_what_it_learned_itself_for_an_hour(world: StoreWorld) -> None:
    mine, other = world.id("worker"), world.id("worker")
    await world.store.report_to_fleet(mine, {"a": Present(1, 5, tide=40), "b": Present(1, 0, tide=3)})
    await world.store.report_to_fleet(other, {"a": Present(1, 5, tide=7)})
    assert await world.store.learned_calls(mine) == {"a": 40, "b": 3}
    await world.clock.advance(fleet.KEEP_MS)
    assert await world.store.learned_calls(mine) == {}
