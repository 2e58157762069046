"""The listener for metrics: its own port, nothing else on it, and off unless asked for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import httpx2
import pytest

from tests.support.processes import free_port
from tests.web.server import WebServer, model_at, settings_with
from tidegate import metrics
from tidegate.core.errors import StoreUnavailable
from tidegate.store.fleet.census import QueuedPart, StoreCensus
from tidegate.web.gauges import Gauges
from tidegate.web.scrape import scraped

pytestmark = pytest.mark.anyio

VLLM = {"m": model_at(name="gpu", engine="vllm")}


async def test_metrics_have_a_port_of_their_own() -> None:
    async with scraped(settings_with(metrics={"port": free_port()})) as address:
        async with httpx2.AsyncClient(base_url=address, timeout=30) as client:
            shown = await client.get("/metrics", headers={"X-Forwarded-For": "9.9.9.9"})
            assert shown.status_code == 200
            assert "# TYPE tidegate_scheduler_picks_total counter" in shown.text
            assert (await client.get("/v1/batches")).status_code == 404
            assert (await client.post("/metrics")).status_code == 405


async def test_without_a_port_nothing_listens() -> None:
    async with scraped(settings_with()) as address:
        assert address == ""


def test_a_census_that_takes_long_is_taken_seldom(
    start_web: Callable[..., WebServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, taken = start_web(), 0
    census = server.store.census

    async def slow() -> StoreCensus:
        nonlocal taken
        taken += 1
        server.clock.ahead_ms += 2_000
        return await census()

    monkeypatch.setattr(server.store, "census", slow)
    gauges = Gauges(server.context)

    async def taken_after(wait_ms: int) -> int:
        server.clock.ahead_ms += wait_ms
        await gauges.refresh()
        while gauges._counting is not None:  # noqa: ASYNC110 - another task takes it
            await asyncio.sleep(0.001)
        return taken

    assert server.run(taken_after(0)) == 1
    assert server.run(taken_after(60_000)) == 1, "two seconds of work in every hundred are enough"
    assert server.run(taken_after(60_000)) == 2


def test_no_scrape_waits_long_for_a_census(
    start_web: Callable[..., WebServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_web()
    census = server.store.census

    async def scraped_meanwhile() -> bool:
        may_end = asyncio.Event()

        async def slow() -> StoreCensus:
            await may_end.wait()
            return await census()

        monkeypatch.setattr(server.store, "census", slow)
        gauges = Gauges(server.context)
        await gauges.refresh()
        counting = gauges._counting
        assert counting is not None
        await gauges.refresh()
        assert gauges._counting is counting, "one census at a time"
        may_end.set()
        await counting
        return gauges._counting is None

    assert server.run(scraped_meanwhile())


def test_of_models_without_a_name_of_their_own_the_oldest_job_is_shown(start_web: Callable[..., WebServer]) -> None:
    gauges = Gauges(start_web().context)
    parts = [
        QueuedPart("queued", f"gone-{number}", "organization", "ours", "xs", 1, 9, 1, age_ms)
        for number, age_ms in enumerate((1_000, 5_000, 2_000))
    ]
    gauges._show_census(StoreCensus({}, {}, parts, 0, 0, 1, 1))
    oldest = metrics.oldest_job_age_seconds.of("queued", "gone-0", "organization", "default", "xs")
    assert oldest._value.get() == 5.0


def test_a_scrape_shows_nothing_old_of_a_store_that_is_away(
    start_web: Callable[..., WebServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_web()
    census, is_away = server.store.census, False

    async def perhaps() -> StoreCensus:
        if is_away:
            raise StoreUnavailable("PostgreSQL cannot be used now")
        return await census()

    monkeypatch.setattr(server.store, "census", perhaps)

    gauges = Gauges(server.context)

    async def is_shown(after_ms: int) -> bool:
        server.clock.ahead_ms += after_ms
        await gauges.refresh()
        while gauges._counting is not None:  # noqa: ASYNC110 - another task takes it
            await asyncio.sleep(0.001)
        return bool(metrics.workers._children)

    assert server.run(is_shown(0))
    is_away = True
    assert server.run(is_shown(30_000)), "a store that was away for a moment has most likely not changed much"
    assert not server.run(is_shown(60_000))
    page = server.client().get("/metrics")
    assert page.status_code == 200
    assert "tidegate_process_cpu_seconds_total" in page.text
    assert "tidegate_workers{" not in page.text
    is_away = False
    assert server.run(is_shown(60_000))


def test_a_scrape_shows_the_tide_of_the_deployments_that_there_are(start_web: Callable[..., WebServer]) -> None:
    server = start_web(models=VLLM)
    metrics.pin(models=["m"], deployments=["gpu"])

    def shown() -> dict[str, float]:
        page = server.client().get("/metrics").text
        lines = [line for line in page.splitlines() if re.match(r"tidegate_tide_\w+_(limit|max){", line)]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    decision = server.router.tide_limits()["gpu"]
    assert shown() == {
        'tidegate_tide_calls_limit{deployment="gpu"}': decision.calls,
        'tidegate_tide_calls_max{deployment="gpu"}': server.router.status()[0].capacity,
        'tidegate_tide_prompt_tokens_limit{deployment="gpu"}': decision.prompt_tokens,
    }, "also of a tide that has not changed since it began"

    async def remove() -> None:
        server.router.serve([], [])

    server.run(remove())
    assert shown() == {}


def test_a_process_without_a_worker_adds_nothing_to_the_tide(start_web: Callable[..., WebServer]) -> None:
    server = start_web(models=VLLM)
    [tide] = server.router._states.tides()
    assert server.router.tide_limits()
    tide.runs_items = False
    assert server.router.tide_limits() == {}
