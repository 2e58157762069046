"""Clocks that jump. A worker's own: the store's clock decides, so nothing changes but its stamps. The store's: its time goes on without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import asyncpg
import pytest

from tests.support.processes import wait_until
from tests.support.shims import Shims, preload_env
from tests.support.tidegate import ASK_S, END_S, IN_FLIGHT, Site, behaving, requests

HOUR_S = 3_600
MONTH_S = 30 * 24 * HOUR_S


@pytest.mark.parametrize("jump_s", [pytest.param(HOUR_S, marks=pytest.mark.soak), -HOUR_S])
def test_the_clock_of_a_worker_jumps(cluster: Site, shims: Shims, jump_s: int) -> None:
    began = time.time()
    clock = shims.clock()
    # The object store refuses a signature of another hour, from any client; the store of rows must not mind.
    env = {**preload_env(clock, base={}), "TIDEGATE_BLOBS_URL": f"file://{cluster.data}/blobs"}
    cluster.env["TIDEGATE_BLOBS_URL"] = env["TIDEGATE_BLOBS_URL"]
    cluster.begin(more=env)
    lines = requests(32, lambda number: behaving("latency=200"))
    batch_id = cluster.submit(lines)
    cluster.until_called(IN_FLIGHT + 1)
    clock.jump_to(jump_s)
    cluster.relieve()
    results = cluster.judge(batch_id, lines)
    assert began - 1 <= results.batch["in_progress_at"] <= results.batch["completed_at"] <= time.time() + 1
    assert results.batch["expires_at"] - results.batch["created_at"] == 24 * HOUR_S
    assert cluster.living() == 3


@pytest.mark.parametrize(
    "steps",
    [
        [-HOUR_S],
        pytest.param([HOUR_S, -HOUR_S], marks=pytest.mark.soak),
        pytest.param([MONTH_S, -MONTH_S], marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_the_clock_of_the_store_jumps(site: Site, shims: Shims, steps: list[int]) -> None:
    """Work that waits goes on after each step, and so does what comes later. Embedded, the store's clock is the process's own."""
    clock = shims.clock()
    worker = site.begin(more=preload_env(clock, base={}) if site.embedded else None)
    jump: Callable[[int], None] = clock.jump_to if site.embedded else lambda by_s: set_database(site, by_s)
    lines = requests(48, lambda number: behaving(f"latency={100 * len(steps)}"))
    waiting = site.submit(lines)
    by_s = 0
    for step_s in steps:
        called, noticed = len(site.calls()), steps_noticed(site)
        by_s += step_s
        jump(by_s)
        # A step that is taken back before anyone looked was none.
        until_noticed(site, noticed + 1)
        site.until_called(min(len(lines), called + IN_FLIGHT + 1))
    later = site.submit(lines[:4])
    for batch_id, count in ((waiting, 48), (later, 4)):
        batch = site.ended(batch_id).batch
        assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", count)
        assert batch["expires_at"] - batch["created_at"] == 24 * HOUR_S
        assert batch["created_at"] <= batch["in_progress_at"] <= batch["completed_at"]
        assert len(site.calls_of(batch_id)) == count, "no lease ended by a step"
    assert worker.running
    assert not any("worker_lost" in one.logs() for one in site.processes.started)


def until_noticed(site: Site, count: int) -> None:
    wait_until(lambda: steps_noticed(site) >= count, END_S, f"{count} steps to be noticed", poll_s=ASK_S)


def steps_noticed(site: Site) -> int:
    return sum((one.stdout() + one.stderr()).count("store_clock_stepped") for one in site.processes.started)


def set_database(site: Site, by_s: int) -> None:
    """Set the clock of the database, as it is seen from SQL."""

    async def replace() -> None:
        connection = await asyncpg.connect(site.env["TIDEGATE_STORE_URL"])
        await connection.execute(
            "create or replace function wall_ms() returns bigint language sql volatile parallel safe as "  # noqa: S608 - a number
            f"'select cast(extract(epoch from clock_timestamp()) * 1000 as bigint) + ({by_s * 1000})'"
        )
        await connection.close()

    asyncio.run(replace())
