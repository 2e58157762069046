"""What one scheduling decision costs (a worker's whole chooser: the look and the choice) with ten thousand and ten million items queued.

A thousand tenants with work on each of ten models; workers hold slices of many of them. Both backlogs stand in stores of their own and are
asked turn by turn, so that the machine's moods hit them alike. Beside them runs a loop that only counts, for as long as a decision takes
at best: what its slowest hundredth is above its median, the machine does to anything. CPU time is this process's own, which other
processes lengthen less than they lengthen time.
"""

import contextlib
import importlib
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import uvloop

from bench.backlog import SLICE_ITEMS, Backlog, fill, put_in_flight
from bench.machinery import median, table
from tests.support.postgres import PostgresServer
from tidegate.backends.system import SystemClock
from tidegate.core.policies import Policies
from tidegate.store.database.postgres import PostgresDriver
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.store import Store
from tidegate.worker.scheduler import MODELS_MAX, Scheduler

WORKERS, SLICES_EACH = 8, 16
ROOM_ITEMS, SLICES_MAX = 100, 16
WARM_UP = 50


def _room(model: str) -> tuple[int, str | None]:
    return ROOM_ITEMS, None


@contextlib.asynccontextmanager
async def filled(store: Store, backlog: Backlog, url: str = "") -> AsyncIterator[Store]:
    await store.migrate()
    try:
        await fill(store, backlog)
        await put_in_flight(store, backlog, WORKERS, SLICES_EACH)
        if url:
            # What autovacuum does by itself within a minute.
            connection = await asyncpg.connect(url)
            await connection.execute("vacuum analyze")
            await connection.close()
        yield store
    finally:
        await store.close()


def _count(turns: int) -> float:
    """Milliseconds that counting so far takes."""
    began = time.perf_counter()
    for _ in range(turns):
        pass
    return (time.perf_counter() - began) * 1000


class Times:
    """Milliseconds of each decision, of the loop beside it, and of asking for all rates and weights at once."""

    def __init__(self) -> None:
        self.small: list[float] = []
        self.large: list[float] = []
        self.large_cpu: list[float] = []
        self.machine: list[float] = []
        self.paces: list[float] = []


async def _decide(scheduler: Scheduler, turn: int, times: list[float], cpu: list[float] | None = None) -> None:
    began, cpu_began = time.perf_counter(), time.process_time()
    choice = await scheduler.choose(f"worker-{turn % WORKERS}", _room, SLICES_MAX)
    times.append((time.perf_counter() - began) * 1000)
    if cpu is not None:
        cpu.append((time.process_time() - cpu_began) * 1000)
    if not choice.picks:
        raise RuntimeError("a decision found nothing to take")


async def measure(small: Store, large: Store, rounds: int) -> Times:
    schedulers = [Scheduler(store, SystemClock(), Policies(), SLICE_ITEMS) for store in (small, large)]
    warm_up: list[float] = []
    # The first ones open files, prepare statements and learn rates.
    for turn in range(WARM_UP):
        for scheduler in schedulers:
            await _decide(scheduler, turn, warm_up)
    turns = int(min(warm_up) * 100_000 / min(_count(100_000) for _ in range(20)))
    found = Times()
    for turn in range(rounds):
        await _decide(schedulers[0], turn, found.small)
        await _decide(schedulers[1], turn, found.large, found.large_cpu)
        found.machine.append(_count(turns))
        if turn % 100 == 0:
            began = time.perf_counter()
            await large.paces(await large.awake_models(MODELS_MAX))
            found.paces.append((time.perf_counter() - began) * 1000)
    return found


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


async def on_sqlite(few: Backlog, many: Backlog, rounds: int) -> Times:
    with tempfile.TemporaryDirectory() as name:
        drivers = [SqliteDriver(Path(name) / f"{size}.db", SystemClock().now_ms) for size in ("small", "large")]
        async with filled(Store(drivers[0]), few) as small, filled(Store(drivers[1]), many) as large:
            return await measure(small, large, rounds)


async def on_postgres(server: PostgresServer, few: Backlog, many: Backlog, rounds: int) -> Times:
    urls = [server.create_database() for _ in range(2)]
    stores = [Store(PostgresDriver(url, pool_size=2, statement_timeout_ms=60_000, pooler="none")) for url in urls]
    async with filled(stores[0], few, urls[0]) as small, filled(stores[1], many, urls[1]) as large:
        return await measure(small, large, rounds)


def _rows(store: str, times: Times) -> list[tuple[str, str, str]]:
    def both(values: list[float]) -> str:
        return f"{median(values):.2f} and {p99(values):.2f} ms"

    flat = median(times.large) / median(times.small)
    return [
        (f"{store}: p50 and p99", both(times.large), "p99 under 10 ms"),
        (f"{store}: CPU of the deciding process, p50 and p99", both(times.large_cpu), ""),
        (f"{store}: a loop that only counts, p50 and p99", both(times.machine), ""),
        (f"{store}: p50 of that with one slice per job", f"{flat:.2f}", "at most 1.5"),
        (f"{store}: all rates and weights, of which a decision asks for a few", f"{median(times.paces):.2f} ms", ""),
    ]


def main(quick: bool = False) -> dict[str, float]:
    # Every process of ours starts here, where the garbage collector's thresholds are set.
    importlib.import_module("tidegate.cli")
    tenants, models, items, rounds = (200, 5, 1_000_000, 200) if quick else (1_000, 10, 10_000_000, 2_000)
    few, many = Backlog(tenants, models, 10_000), Backlog(tenants, models, items)
    runs = {"embedded": uvloop.run(on_sqlite(few, many, rounds))}
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        server = PostgresServer(Path(name) / "postgres")
        server.start()
        try:
            runs["PostgreSQL"] = uvloop.run(on_postgres(server, few, many, rounds))
        finally:
            server.stop()
    found: dict[str, float] = {}
    for store, times in runs.items():
        found |= {
            f"{store}_p99_ms": p99(times.large),
            f"{store}_cpu_p99_ms": p99(times.large_cpu),
            f"{store}_flat": median(times.large) / median(times.small),
        }
    rows = [row for store, times in runs.items() for row in _rows(store, times)]
    table(f"One decision, {tenants:,} tenants, {models} models, {items:,} items queued, {rounds:,} decisions", rows)
    return found


if __name__ == "__main__":
    main()
