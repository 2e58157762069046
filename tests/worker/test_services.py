"""The loops of a worker around their stages: how often each goes round, and which other loop it tells at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.store_verbs import lease_slices
from tests.worker.world import WorkerWorld, chat_lines, options
from tidegate import metrics
from tidegate.backends.system import LocalWake
from tidegate.core.errors import StoreUnavailable
from tidegate.core.nouns import KeepTimes
from tidegate.core.states import JobState
from tidegate.stages.ship import Ship
from tidegate.stages.tend import compact_extents, retention
from tidegate.worker import runners, shipping, upkeep
from tidegate.worker.runners import Runners
from tidegate.worker.shipping import Closing
from tidegate.worker.upkeep import Sweeping, Upkeep

pytestmark = pytest.mark.anyio


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long loops pause. The second pause ends a loop."""
    seen: list[float] = []

    async def sleep(seconds: float) -> None:
        seen.append(seconds)
        if len(seen) == 2:
            raise asyncio.CancelledError

    for module in (runners, shipping, upkeep):
        monkeypatch.setattr(module, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
    return seen


def metric(name: str, **labels: str) -> float:
    return metrics.REGISTRY.get_sample_value(f"tidegate_{name}", labels) or 0.0


async def go_round(service: Any) -> None:
    with pytest.raises(asyncio.CancelledError):
        await service.run()


class Found:
    """What sweeps find: slices of lost workers, flows that wake, and logs that another host may still deliver."""

    def __init__(self, reclaimed: int = 0, woken: int = 0, *, is_waiting: bool = False) -> None:
        self._is_waiting = is_waiting
        self.lost_workers: Any = SimpleNamespace(tend=self._reclaims, is_waiting=self._waits)
        self.flows: Any = SimpleNamespace(tend=self._wakes)
        self.reclaimed, self._woken = reclaimed, woken
        self.is_away = False

    async def _reclaims(self, sweep_ms: int) -> int:
        if self.reclaimed < 0:
            raise StoreUnavailable("away")
        return self.reclaimed

    async def _wakes(self) -> int:
        return self._woken

    async def _waits(self) -> bool:
        if self.is_away:
            raise StoreUnavailable("still away")
        return self._is_waiting


@pytest.mark.parametrize(("reclaimed", "woken"), [(0, 0), (2, 0), (0, 3)])
async def test_what_a_sweep_frees_or_wakes_is_leased_at_once(pauses: list[float], reclaimed: int, woken: int) -> None:
    found, rung = Found(reclaimed, woken), asyncio.Event()
    wake: Any = SimpleNamespace(notify=rung.set)
    kinds = {"reclaimed": reclaimed, "refreshed": woken}
    before = {kind: metric("sweep_rows_total", kind=kind) for kind in kinds}
    runs = metric("sweep_runs_total", status="success")
    await go_round(Sweeping(found.lost_workers, found.flows, wake, 5_000, 6_000))
    assert rung.is_set() is bool(reclaimed or woken)
    assert {kind: metric("sweep_rows_total", kind=kind) - before[kind] for kind in kinds} == {
        kind: 2 * count for kind, count in kinds.items()
    }
    assert metric("sweep_runs_total", status="success") == runs + 2
    assert pauses == [5.0, 5.0]


async def test_a_log_that_may_still_be_delivered_is_looked_for_ten_times_as_often(pauses: list[float]) -> None:
    found = Found(is_waiting=True)
    await go_round(Sweeping(found.lost_workers, found.flows, LocalWake().listen(), 5_000, 6_000))
    assert pauses == [0.5, 0.5]


async def test_a_sweep_that_fails_is_counted_and_left_to_the_supervisor() -> None:
    found, before = Found(-1), metric("sweep_runs_total", status="error")
    with pytest.raises(StoreUnavailable):
        await Sweeping(found.lost_workers, found.flows, LocalWake().listen(), 5_000, 6_000).run()
    assert metric("sweep_runs_total", status="error") == before + 1


async def test_workers_may_beat_before_a_sweep_when_the_store_is_back(pauses: list[float]) -> None:
    """All of them look lost then. Declared gone, they would lose slices of which they hold the answers."""
    found = Found(-1)
    sweeping = Sweeping(found.lost_workers, found.flows, LocalWake().listen(), 5_000, 6_000)
    runs = metric("sweep_runs_total", status="success")
    with pytest.raises(StoreUnavailable):
        await sweeping.run()
    found.is_away = True
    with pytest.raises(StoreUnavailable):
        await sweeping.run()
    assert pauses == [], "it is not back yet"
    found.is_away, found.reclaimed = False, 0
    await go_round(sweeping)
    assert pauses == [6.0, 5.0]
    assert metric("sweep_runs_total", status="success") == runs + 1


async def test_everything_is_kept_up_once_in_twelve_sweeps(
    world: WorkerWorld, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noted(name: str) -> Any:
        async def tend(*_: Any) -> None:
            done.append(name)

        return tend

    monkeypatch.setattr(retention, "tend", noted("retention"))
    monkeypatch.setattr(compact_extents, "tend", noted("extents"))
    garbage: Any = SimpleNamespace(tend=noted("garbage"))
    flows: Any = SimpleNamespace(prune=noted("flows"))
    me: Any = SimpleNamespace(id=await world.worker())
    every = options(world, sweep_ms=5_000)
    await go_round(Upkeep(world.store, world.blobs, world.entropy, me, garbage, flows, every))
    assert done == 2 * ["retention", "extents", "garbage", "flows"]
    assert pauses == [60.0, 60.0]


@pytest.mark.parametrize("closed", [0, 1])
async def test_a_job_that_is_closed_is_published_at_once(world: WorkerWorld, pauses: list[float], closed: int) -> None:
    async def close_drained(grace_ms: int) -> int:
        return closed

    due, ship = asyncio.Event(), SimpleNamespace(close_drained=close_drained)
    await go_round(Closing(world.store, ship, due, 34_000, 250))  # type: ignore[arg-type]
    assert due.is_set() is bool(closed)
    assert pauses == [0.25, 0.25]


async def test_a_job_is_closed_under_its_workers_only_when_the_store_answered_for_the_whole_grace(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the store was away no worker could bring it the answers that it holds."""
    job = await world.started(chat_lines(1))
    assert await lease_slices(world.store, await world.worker(), job.id, "m", 1, "t")
    await world.store.cancel_job(job.tenant_id, job.id)
    world.clock.advance(3_600_000)
    now_s, looks = 0.0, list[JobState]()

    async def sleep(_: float) -> None:
        nonlocal now_s
        looks.append((await world.look(job)).state)
        now_s += 17.0
        if len(looks) == 3:
            raise asyncio.CancelledError

    loop = SimpleNamespace(time=lambda: now_s)
    patched = {"sleep": sleep, "get_running_loop": lambda: loop}
    monkeypatch.setattr(shipping, "asyncio", SimpleNamespace(**vars(asyncio) | patched))
    ship = Ship(world.store, world.blobs, world.entropy, world.scratch, KeepTimes())
    await go_round(Closing(world.store, ship, asyncio.Event(), 34_000, 250))
    assert looks == [JobState.CANCELLING, JobState.CANCELLING, JobState.FINALIZING]


@pytest.mark.parametrize(
    ("in_flight_max", "items_per_call", "hired"),
    [(4, 1, 4), (4, 3, 12), (64, 127, 8_128), (64, 256, 8_192), (10_000, 2, 10_000)],
)
async def test_there_is_a_runner_for_each_item_in_flight_up_to_a_bound(
    pauses: list[float], in_flight_max: int, items_per_call: int, hired: int
) -> None:
    started: list[str] = []
    supervisor: Any = SimpleNamespace(start=lambda name, run: started.append(name))
    upstream: Any = SimpleNamespace(items_per_call=lambda: items_per_call)
    await go_round(Runners(SimpleNamespace(run=None), supervisor, upstream, in_flight_max))  # type: ignore[arg-type]
    assert len(started) == hired
    assert pauses == [2.0, 2.0]
