"""What one scheduling decision costs (which models have work, the look, the choice) with ten thousand and with ten million items queued.

A thousand tenants with work on each of ten models; workers hold slices of many of them. Both backlogs stand in stores of their own and are
asked turn by turn, so that the machine's moods hit them alike. Beside them runs a loop that only counts, for about as long as a decision
takes: what its slowest hundredth is above its median, the machine does to anything.
"""

import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import uvloop

from bench.backlog import SLICE_ITEMS, Backlog, fill, put_in_flight
from bench.machinery import median, table
from tests.support.postgres import PostgresServer
from tidegate.core.schedule import Policy, choose
from tidegate.store.postgres import PostgresDriver
from tidegate.store.sqlite import SqliteDriver
from tidegate.store.store import Store

WORKERS, SLICES_EACH = 8, 16
ROOM_ITEMS, SLICES_MAX = 100, 16
MODELS_MAX = 1_000


async def decide(store: Store, worker: str, paces: dict[str, object]) -> int:
    """One whole decision; says how many slices it would take."""
    models = await store.awake_models(MODELS_MAX)
    look = await store.snapshot(
        worker,
        dict.fromkeys(models, ROOM_ITEMS),
        slice_items=SLICE_ITEMS,
        slices_max=SLICES_MAX,
        paces=paces,  # type: ignore[arg-type]
    )
    return sum(pick.slice_count for pick in choose(look, Policy()).picks)


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


async def measure(small: Store, large: Store, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each decision, turn by turn."""
    found: dict[str, list[float]] = {"small": [], "large": [], "paces": [], "machine": []}
    # As many as take about five milliseconds.
    turns = int(5 * 100_000 / min(_count(100_000) for _ in range(20)))
    stores = {"small": small, "large": large}
    paces = {name: await store.paces(await store.awake_models(MODELS_MAX)) for name, store in stores.items()}
    for turn in range(rounds + 20):
        for name, store in stores.items():
            began = time.perf_counter()
            if not await decide(store, f"worker-{turn % WORKERS}", paces[name]):  # type: ignore[arg-type]
                raise RuntimeError("a decision found nothing to take")
            # The first ones open files and prepare statements.
            if turn >= 20:
                found[name].append((time.perf_counter() - began) * 1000)
        found["machine"].append(_count(turns))
        if turn % 20 == 0:
            began = time.perf_counter()
            await large.paces(await large.awake_models(MODELS_MAX))
            found["paces"].append((time.perf_counter() - began) * 1000)
    return found


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


async def on_sqlite(few: Backlog, many: Backlog, rounds: int) -> dict[str, list[float]]:
    def now_ms() -> int:
        return int(time.time() * 1000)

    with tempfile.TemporaryDirectory() as name:
        drivers = [SqliteDriver(Path(name) / f"{size}.db", now_ms) for size in ("small", "large")]
        async with filled(Store(drivers[0]), few) as small, filled(Store(drivers[1]), many) as large:
            return await measure(small, large, rounds)


async def on_postgres(server: PostgresServer, few: Backlog, many: Backlog, rounds: int) -> dict[str, list[float]]:
    urls = [server.create_database() for _ in range(2)]
    stores = [Store(PostgresDriver(url, pool_size=2, statement_timeout_ms=60_000, pooler="none")) for url in urls]
    async with filled(stores[0], few, urls[0]) as small, filled(stores[1], many, urls[1]) as large:
        return await measure(small, large, rounds)


def main(quick: bool = False) -> dict[str, float]:
    tenants, models, items, rounds = (200, 5, 1_000_000, 100) if quick else (1_000, 10, 10_000_000, 500)
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
    rows = []
    for store, times in runs.items():
        flat = median(times["large"]) / median(times["small"])
        found |= {f"{store}_p99_ms": p99(times["large"]), f"{store}_flat": flat}
        rows += [
            (f"{store}: p50", f"{median(times['large']):.2f} ms", ""),
            (f"{store}: p99", f"{p99(times['large']):.2f} ms", "under 10 ms"),
            (
                f"{store}: a loop that only counts, p50 and p99",
                f"{median(times['machine']):.2f} and {p99(times['machine']):.2f} ms",
                "",
            ),
            (f"{store}: p50 of that with one slice per job", f"{flat:.2f}", "at most 1.5"),
            (f"{store}: rates and weights, asked for every few seconds", f"{median(times['paces']):.2f} ms", ""),
        ]
    table(f"One decision, {tenants:,} tenants, {models} models, {items:,} items queued, {rounds} decisions", rows)
    return found


if __name__ == "__main__":
    main()
