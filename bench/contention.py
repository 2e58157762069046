"""Two, four and eight worker processes on one PostgreSQL and one hot model: slices a second, time spent waiting for locks, deadlocks.

Each process decides, leases and records, with no calls in between. Sixteen tenants have work on the model, and every process sees the same
look, so all of them want the same few jobs. First as fast as they can, with and without recording, which says what it costs to have more of
them than cores: in turns, several times, since the machine's moods change faster than that takes. Then at a real worker's pace, 16 answers
in a flush every 50 ms, and at four times that, which says whether they hold each other up: how many slices they take, and how long they
wait for locks. Where more workers do no more, the CPU that a slice takes, the cores that were used and those that were idle say whether the
machine is the bound.
"""

import asyncio
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import asyncpg
import psutil
import uvloop

from bench.backlog import ITEM_UNITS, SLICE_ITEMS, Backlog, fill
from bench.machinery import cpu_seconds, median, table
from tests.support.postgres import PostgresServer
from tidegate.backends.system import SystemClock
from tidegate.core.files import Placed
from tidegate.core.nouns import Finished, JobFlush, LeasedSlice, Usage
from tidegate.core.policies import Policies
from tidegate.core.states import Outcome
from tidegate.store.database.postgres import PostgresDriver
from tidegate.store.store import Store
from tidegate.worker.scheduler import Scheduler

COUNTS = (2, 4, 8)
ROUNDS = 5
TENANTS = 16
SLICES_EACH = 1_000
SLICES_MAX = 4
FLUSH_S = 0.05
# Instead of a number of answers in a flush: no pace, and nothing but leases.
FAST, LEASES_ONLY = 0, -1
# Answers in a flush: at a real worker's pace, and at four times that.
PACES = {"a real pace": 16, "four times that": 64}
# What workers that record must keep of the rate of two of them.
KEPT_MIN = 0.95
RECORDED = ("waited", "cpu_us", "cores", "idle")
LINE_BYTES = 100
LEASE_MS = 3_600_000
SAMPLE_S = 0.02
LOOK = """
select count(*) filter (where wait_event_type = 'Lock') as waiting, count(*) as backends
from pg_stat_activity where datname = current_database() and application_name = 'tidegate'
"""


def _store(url: str) -> Store:
    return Store(PostgresDriver(url, pool_size=4, statement_timeout_ms=60_000, pooler="none"))


# ---- a worker's process


class _Hand:
    """One process: it takes slices and says at once that all their items were answered."""

    def __init__(self, store: Store, worker_id: str) -> None:
        self._store, self._me = store, worker_id
        self._blob_id, self._written, self._turn = f"blob_{worker_id}", 0, 0
        self._scheduler = Scheduler(store, SystemClock(), Policies(), SLICE_ITEMS)

    async def open(self) -> None:
        await self._store.enlist_worker(self._me, "bench", "0", LEASE_MS)
        await self._store.begin_blob(self._blob_id, "answers", self._me)

    async def take(self, slices_max: int) -> list[LeasedSlice]:
        """Decide and lease."""
        choice = await self._scheduler.choose(self._me, lambda model: (slices_max * SLICE_ITEMS, None), slices_max)
        self._turn += 1
        picks = [(pick, f"{self._me}-{self._turn}-{number}") for number, pick in enumerate(choice.picks)]
        held = await self._store.lease_picks(self._me, picks)
        return sorted(held, key=lambda piece: (piece.job_id, piece.first))

    async def work(self, flush_items: int) -> int:
        if flush_items == LEASES_ONLY:
            return len(await self.take(SLICES_MAX))
        return await (self.work_fast() if flush_items == FAST else self.work_paced(flush_items))

    async def work_fast(self) -> int:
        """All items of some slices in one flush; says how many slices it was."""
        held = await self.take(SLICES_MAX)
        flushes = [
            self._answers([(piece, range(piece.first, piece.first + piece.count)) for piece in pieces])
            for _, pieces in groupby(held, key=lambda piece: piece.job_id)
        ]
        await self._store.record_outcomes(flushes, [(piece.job_id, piece.first, piece.token) for piece in held], [])
        return len(held)

    async def work_paced(self, flush_items: int) -> int:
        """One slice, so many items in each flush."""
        held = await self.take(1)
        for piece in held:
            end = piece.first + piece.count
            for first in range(piece.first, end, flush_items):
                began = time.perf_counter()
                flush = self._answers([(piece, range(first, min(end, first + flush_items)))])
                done = [(piece.job_id, piece.first, piece.token)] if first + flush_items >= end else []
                await self._store.record_outcomes([flush], done, [])
                await asyncio.sleep(max(0.0, began + FLUSH_S - time.perf_counter()))
        return len(held)

    def _answers(self, runs: list[tuple[LeasedSlice, range]]) -> JobFlush:
        """Answers to these items of one job."""
        usage = Usage(input_tokens=300, output_tokens=100)
        entries = [
            Finished(number, Outcome.ANSWERED, LINE_BYTES, piece.first, piece.token, usage, 0, piece.model, ITEM_UNITS)
            for piece, numbers in runs
            for number in numbers
        ]
        placed = Placed(self._blob_id, self._written, len(entries) * LINE_BYTES)
        self._written += placed.size_bytes
        return JobFlush(runs[0][0].job_id, entries, placed)


async def _child(url: str, worker_id: str, seconds: float, flush_items: int) -> None:
    # Every process of ours starts here, where the garbage collector's thresholds are set.
    importlib.import_module("tidegate.cli")
    store = _store(url)
    leased_work = _Hand(store, worker_id)
    await leased_work.open()
    await leased_work.work_fast()
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    slices, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        slices += await leased_work.work(flush_items)
    print(json.dumps({"slices": slices, "seconds": time.perf_counter() - began}), flush=True)
    await store.close()


# ---- the one who starts and watches them


async def _watch(url: str, server: PostgresServer, processes: list[subprocess.Popen[str]]) -> dict[str, float]:
    """Watch until all have ended. `waited` is the share of samples in which a backend waited for a lock; `cpu_us` is what a slice took of
    the workers and the server, `cores` how many cores they had, and `idle` the share of the machine that was not used."""
    connection: Any = await asyncpg.connect(url)
    waiting = samples = 0
    pids = [server.pid(), *[process.pid for process in processes]]
    idle_s, cpu_s, began = psutil.cpu_times().idle, cpu_seconds(*pids) - cpu_seconds(), time.perf_counter()
    lines = asyncio.gather(*[asyncio.to_thread(process.stdout.readline) for process in processes if process.stdout])
    while not lines.done():
        row = await connection.fetchrow(LOOK)
        waiting, samples = waiting + row["waiting"], samples + len(processes)
        await asyncio.sleep(SAMPLE_S)
    seconds = time.perf_counter() - began
    cpu_s = cpu_seconds(*pids) - cpu_seconds() - cpu_s
    idle = (psutil.cpu_times().idle - idle_s) / seconds / (os.cpu_count() or 1)
    await connection.close()
    ended = [json.loads(line) for line in await lines]
    rate = sum(one["slices"] / one["seconds"] for one in ended)
    cpu_us = cpu_s / max(1, sum(one["slices"] for one in ended)) * 1e6
    return {
        "rate": rate,
        "waited": waiting / samples,
        "cpu_us": cpu_us,
        "cores": cpu_s / seconds,
        "idle": max(0.0, idle),
    }


async def _deadlocks(url: str) -> int:
    connection: Any = await asyncpg.connect(url)
    found = await connection.fetchval("select deadlocks from pg_stat_database where datname = current_database()")
    await connection.close()
    return int(found)


def _started(url: str, count: int, seconds: float, flush_items: int) -> list[subprocess.Popen[str]]:
    """Workers that wait for a word."""
    command = [sys.executable, "-m", "bench.contention", url]
    return [
        subprocess.Popen(
            [*command, f"worker{number}", str(seconds), str(flush_items)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]


def _begin(processes: list[subprocess.Popen[str]]) -> None:
    """Let all begin in the same moment, once all are there."""
    for process in processes:
        assert process.stdout
        if not process.stdout.readline().startswith("ready"):
            raise RuntimeError("a worker did not start")
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()


async def _run(server: PostgresServer, count: int, seconds: float, flush_items: int = FAST) -> dict[str, float]:
    """So many processes for so long, with so many answers in a flush every 50 ms, or without a pace."""
    url = server.create_database()
    backlog = Backlog(TENANTS, 1, TENANTS * SLICES_EACH * SLICE_ITEMS)
    store = _store(url)
    await store.migrate()
    await fill(store, backlog)
    connection: Any = await asyncpg.connect(url)
    await connection.execute("vacuum analyze")
    await connection.close()
    processes = _started(url, count, seconds, flush_items)
    try:
        _begin(processes)
        found = await _watch(url, server, processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    await store.close()
    return {**found, "deadlocks": await _deadlocks(url)}


def main(quick: bool = False) -> dict[str, float]:
    rounds, seconds, paced_seconds = (1, 2.0, 2.0) if quick else (ROUNDS, 4.0, 10.0)
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        server = PostgresServer(Path(name) / "postgres")
        server.start()
        try:
            runs = [{count: uvloop.run(_run(server, count, seconds)) for count in COUNTS} for _ in range(rounds)]
            leasing = [
                {count: uvloop.run(_run(server, count, seconds, LEASES_ONLY)) for count in COUNTS}
                for _ in range(rounds)
            ]
            paced = {
                pace: {count: uvloop.run(_run(server, count, paced_seconds, items)) for count in COUNTS}
                for pace, items in PACES.items()
            }
        finally:
            server.stop()
    found: dict[str, float] = {}
    rows = []
    for count in COUNTS:
        rate = median([run[count]["rate"] for run in runs])
        # Each round's against its own: what slows the machine for longer than a round slows both.
        kept = median([run[count]["rate"] / run[COUNTS[0]]["rate"] for run in runs])
        leases = median([run[count]["rate"] for run in leasing])
        leases_kept = median([run[count]["rate"] / run[COUNTS[0]]["rate"] for run in leasing])
        leases_waited = median([run[count]["waited"] for run in leasing])
        deadlocks = sum(run[count]["deadlocks"] for run in (*runs, *leasing, *paced.values()))
        found |= {f"leases_{count}": leases, f"leases_kept_{count}": leases_kept}
        found |= {f"rate_{count}": rate, f"kept_{count}": kept, f"deadlocks_{count}": deadlocks}
        waited, cpu_us, cores, idle = (median([run[count][what] for run in runs]) for what in RECORDED)
        found |= {f"waited_{count}": waited, f"cpu_us_{count}": cpu_us, f"cores_{count}": cores, f"idle_{count}": idle}
        bound = f"{cpu_us:,.0f} µs of CPU a slice, {cores:.2f} cores used, {idle:.0%} of the machine idle"
        for pace, run in paced.items():
            fewest, paced_waited = run[COUNTS[0]]["rate"], run[count]["waited"]
            found |= {f"rate_{count}_at_{pace}": run[count]["rate"], f"waited_{count}_at_{pace}": paced_waited}
            rows += [
                (
                    f"{count} workers at {pace}: slices leased and recorded a second",
                    f"{run[count]['rate']:,.0f}",
                    f"at least {fewest:,.0f}" if count > COUNTS[0] else "",
                ),
                (f"{count} workers at {pace}: time spent waiting for locks", f"{paced_waited:.1%}", "under 5 %"),
            ]
        rows += [
            (f"{count} workers, as fast as they can: leases a second, nothing recorded", f"{leases:,.0f}", ""),
            (f"{count} workers, as fast as they can: of the leases of {COUNTS[0]}", f"{leases_kept:.2f}", "at least 1"),
            (f"{count} workers, as fast as they can: waiting for locks", f"{leases_waited:.1%}", "under 5 %"),
            (f"{count} workers, as fast as they can: slices leased and recorded a second", f"{rate:,.0f}", ""),
            (
                f"{count} workers, as fast as they can: of what {COUNTS[0]} did",
                f"{kept:.2f}",
                f"at least {KEPT_MIN}" if count > COUNTS[0] else "",
            ),
            (f"{count} workers, as fast as they can, recording: waiting for locks", f"{waited:.1%}", "under 5 %"),
            (f"{count} workers, as fast as they can, recording", bound, ""),
            (f"{count} workers: deadlocks", f"{deadlocks:.0f}", "0"),
        ]
    title = f"One hot model on one PostgreSQL, {TENANTS} tenants, slices of {SLICE_ITEMS}, {rounds} times {seconds:.0f} s each"
    table(title, rows)
    return found


if __name__ == "__main__":
    if len(sys.argv) == 5:
        uvloop.run(_child(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])))
    else:
        main()
