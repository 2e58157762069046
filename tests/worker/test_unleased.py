"""Work that is ready and that no worker leases is shown by a metric, and by the readiness of a worker that could take it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.ports import HandClock
from tidegate import metrics
from tidegate.core.errors import StoreUnavailable
from tidegate.worker.unleased import LONG_MS, Unleased

pytestmark = pytest.mark.anyio


class Waiting:
    """A store in which these models have work that no worker leases."""

    def __init__(self, *models: str) -> None:
        self.models = list(models)

    async def unleased_models(self, count_max: int) -> list[str]:
        return self.models[:count_max]


def shown() -> float:
    return float(metrics.ready_unleased_seconds._value.get())


@pytest.mark.parametrize(("number", "is_seen"), [(99, True), (100, False)])
async def test_a_look_asks_for_a_hundred_models_at_the_most(number: int, is_seen: bool) -> None:
    store = Waiting(*(f"model-{one:03}" for one in range(200)))
    clock: Any = HandClock(0.0)
    unleased = Unleased(store, clock, lambda model: model == f"model-{number:03}")  # type: ignore[arg-type]
    await unleased.look()
    clock.monotonic = LONG_MS
    assert (unleased.trouble() is not None) is is_seen


async def test_the_metric_tells_the_longest_wait_and_forgets_what_was_leased() -> None:
    store, clock = Waiting("a"), HandClock(0.0)
    unleased = Unleased(store, clock, None)  # type: ignore[arg-type]
    await unleased.look()
    assert shown() == 0
    clock.monotonic, store.models = 7_000, ["a", "b"]
    await unleased.look()
    assert shown() == 7
    clock.monotonic, store.models = 9_000, ["b"]
    await unleased.look()
    assert shown() == 2
    store.models = []
    await unleased.look()
    assert shown() == 0
    assert unleased.trouble() is None, "a process without a worker is fit to answer"


@pytest.mark.parametrize(("takes", "is_trouble"), [("a", True), ("b", False)])
async def test_only_a_worker_that_could_take_it_is_not_ready(takes: str, is_trouble: bool) -> None:
    clock: Any = HandClock(0.0)
    unleased = Unleased(Waiting("a"), clock, lambda model: model == takes)  # type: ignore[arg-type]
    await unleased.look()
    clock.monotonic = LONG_MS - 1
    await unleased.look()
    assert unleased.trouble() is None
    clock.monotonic = LONG_MS
    await unleased.look()
    assert (unleased.trouble() is not None) is is_trouble
    if is_trouble:
        assert "has not been leased for 60 s" in str(unleased.trouble())


async def test_it_looks_every_five_seconds_also_after_the_store_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    class Away(Waiting):
        async def unleased_models(self, count_max: int) -> list[str]:
            steps.append("look")
            if len(steps) == 1:
                raise StoreUnavailable("gone")
            if len(steps) > 4:
                raise asyncio.CancelledError
            return await super().unleased_models(count_max)

    async def sleep(seconds: float) -> None:
        steps.append(f"{seconds:g} s")
        if len(steps) == 4:
            raise asyncio.CancelledError

    monkeypatch.setattr("tidegate.worker.unleased.asyncio.sleep", sleep)
    unleased = Unleased(Away("a"), HandClock(0.0), lambda _: True)  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        await unleased.watch()
    assert steps == ["look", "5 s", "look", "5 s"]
