"""The listener for metrics: its own port, nothing else on it, and off unless asked for."""

from __future__ import annotations

import httpx2
import pytest

from tests.support.processes import free_port
from tests.web.server import settings_with
from tidegate.web.scrape import scraped

pytestmark = pytest.mark.anyio


async def test_metrics_have_a_port_of_their_own() -> None:
    async with scraped(settings_with(metrics={"port": free_port()})) as address:
        async with httpx2.AsyncClient(base_url=address, timeout=30) as client:
            shown = await client.get("/metrics", headers={"X-Forwarded-For": "9.9.9.9"})
            assert shown.status_code == 200
            assert "# TYPE tidegate_scheduler_picks_total counter" in shown.text
            assert (await client.get("/v1/batches")).status_code == 404
            assert (await client.post("/metrics")).status_code == 405


async def test_without_a_port_nobody_listens() -> None:
    async with scraped(settings_with()) as address:
        assert address == ""
