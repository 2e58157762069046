"""Thirty kills of `serve` in a row, as a machine that keeps dying would do: no item fails for it, and the rate is back at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine import Engine
from tests.support.processes import Proc, Processes, wait_until
from tests.support.tidegate import Site, behaving, requests

pytestmark = pytest.mark.soak

KILLS = 30
LATENCY_MS = 300
# The worker as it is shipped.
SHIPPED = {
    "TIDEGATE_WORKER_LEASE_MS": "30000",
    "TIDEGATE_WORKER_HEARTBEAT_MS": "2000",
    "TIDEGATE_WORKER_SWEEP_MS": "5000",
    "TIDEGATE_WORKER_POLL_MS": "1000",
    "TIDEGATE_WORKER_RECORD_FLUSH_MS": "50",
    "TIDEGATE_INGEST_SLICE_COUNT_MAX": "64",
}
RATE_SHARE_MIN, BACK_S_MAX = 0.9, 5.0
# A window holds several rounds of calls.
WINDOW_S, POLL_S = 2.0, 0.1
LIFE_S_MAX = 30.0
END_S = 600.0


MakeShipped = Callable[[int], Site]


@pytest.fixture
def make_shipped(processes: Processes, tmp_path: Path) -> MakeShipped:
    """Make an embedded site with a server whose number of slots is stated in the settings."""
    engine = Engine(processes, tmp_path / "engine", latency_ms=LATENCY_MS)

    def make(calls: int) -> Site:
        capacity = {"TIDEGATE_WORKER_IN_FLIGHT_MAX": str(calls), "TIDEGATE_UPSTREAM_MAX_IN_FLIGHT": str(calls)}
        return Site("embedded", processes, tmp_path, engine, {**SHIPPED, **capacity})

    return make


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1, 64])
def test_kills_while_everything_is_in_flight(make_shipped: MakeShipped, count: int) -> None:
    """Nothing tells such a kill from an item that kills its worker. Afterwards the batch ends within two rounds of calls."""
    shipped = make_shipped(count)
    lines = requests(count)
    # Until the last kill no call ends, however long a busy machine takes to kill.
    shipped.engine.set_faults({"hang": 1.0})
    proc = shipped.begin()
    batch_id = shipped.submit(lines)
    for kills_left in reversed(range(KILLS)):
        shipped.until_called(len(shipped.calls()) + 1)
        _kill(proc)
        if kills_left == 0:
            shipped.engine.set_faults()
        began_s = time.monotonic()
        proc = shipped.relieve()
    shipped.until_status(batch_id, "completed")
    took_s = time.monotonic() - began_s
    results = shipped.judge(batch_id, lines, repeats_max=KILLS * count)
    print(f"{count} items, {KILLS} kills: {len(results.errors)} failed; ended {took_s:.1f} s after the last restart")
    assert results.errors == []
    assert took_s <= BACK_S_MAX + 2 * LATENCY_MS / 1000


@pytest.mark.timeout(1_800)
def test_kills_in_the_middle_of_a_large_batch(make_shipped: MakeShipped) -> None:
    """Of 20,000 items none fails, and after each restart the rate is back within 5 s.

    Calls are short here. An item that lost many workers is run alone, which takes about three calls' time: with calls of 1 s the rate was
    back after 0.7 s in the median, but after 5.1 and 5.9 s in two of thirty restarts.
    """
    calls = 24
    shipped = make_shipped(calls)
    lines = requests(20_000)
    proc = shipped.begin()
    batch_id = shipped.submit(lines)
    shipped.until_called(1)
    time.sleep(WINDOW_S)
    before = _done(shipped, batch_id)
    time.sleep(3 * WINDOW_S)
    rate = (_done(shipped, batch_id) - before) / (3 * WINDOW_S)
    backs_s = []
    for _ in range(KILLS):
        _kill(proc)
        began_s = time.monotonic()
        proc = shipped.relieve()
        listened_s = time.monotonic() - began_s
        back_s = _back_s(shipped, batch_id, RATE_SHARE_MIN * rate, began_s)
        print(f"listening after {listened_s:.1f} s, at {RATE_SHARE_MIN:.0%} of {rate:.0f}/s after {back_s:.1f} s")
        backs_s.append(back_s)
    shipped.until_status(batch_id, "completed", timeout_s=END_S)
    results = shipped.judge(batch_id, lines, repeats_max=KILLS * 4 * calls)
    backs_s.sort()
    print(
        f"20,000 items, {KILLS} kills: {len(results.errors)} failed; back after {backs_s[len(backs_s) // 2]:.1f} s in the median, "
        f"{backs_s[-1]:.1f} s at worst"
    )
    assert results.errors == []
    assert backs_s[-1] <= BACK_S_MAX


@pytest.mark.timeout(900)
def test_kills_under_long_calls(make_shipped: MakeShipped) -> None:
    """Items of 4 to 6 s, of which some lost several workers in the end: none runs alone soon after a restart, which would stop all others
    for the time of three calls. There are more items than the lives of all processes take, so that some never lost a worker."""
    calls, kills, life_s = 64, 9, 15.0
    shipped = make_shipped(calls)
    lines = requests(2_000, lambda number: behaving(f"latency={4_000 + number * 37 % 2_000}") + f" {number}")
    proc = shipped.begin()
    batch_id = shipped.submit(lines)
    shipped.until_done(batch_id, 2 * calls)
    rate = _rate(shipped, batch_id, life_s - BACK_S_MAX)
    shares = []
    for _ in range(kills):
        _kill(proc)
        began_s = time.monotonic()
        proc = shipped.relieve()
        time.sleep(max(0.0, began_s + BACK_S_MAX - time.monotonic()))
        shares.append(_rate(shipped, batch_id, life_s - BACK_S_MAX) / rate)
        print(f"from {BACK_S_MAX:g} s to {life_s:g} s after a restart: {shares[-1]:.2f} of {rate:.1f}/s")
    shipped.until_status(batch_id, "completed", timeout_s=END_S)
    results = shipped.judge(batch_id, lines, repeats_max=kills * 4 * calls)
    assert results.errors == []
    assert min(shares) >= RATE_SHARE_MIN


def _rate(site: Site, batch_id: str, seconds: float) -> float:
    before, began_s = _done(site, batch_id), time.monotonic()
    time.sleep(seconds)
    return (_done(site, batch_id) - before) / (time.monotonic() - began_s)


def _kill(proc: Proc) -> None:
    proc.kill()
    proc.wait()


def _done(site: Site, batch_id: str) -> int:
    counts = site.batch(batch_id)["request_counts"]
    return int(counts["completed"] + counts["failed"])


def _back_s(site: Site, batch_id: str, rate_min: float, began_s: float) -> float:
    """How long after the restart the first window began in which results came at this rate."""
    seen: list[tuple[float, int]] = []

    def there() -> float | None:
        now_s = time.monotonic()
        seen.append((now_s, _done(site, batch_id)))
        while len(seen) > 1 and seen[1][0] <= now_s - WINDOW_S:
            del seen[0]
        first_s, first_count = seen[0]
        width_s = now_s - first_s
        return first_s if width_s >= WINDOW_S and seen[-1][1] - first_count >= rate_min * width_s else None

    found = wait_until(there, LIFE_S_MAX, "the rate to be back", poll_s=POLL_S)
    assert found is not None
    return found - began_s
