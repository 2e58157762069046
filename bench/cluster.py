"""The same road over PostgreSQL, with the bytes on the local disk and on S3: CPU per item, SQL statements per item, and items a second.

CPU is that of this process, its ingest child and the database server. The S3 server's is shown apart: it is a simple one that stands in for
a service of others. What the bytes cost is what the two differ by.
"""

import contextlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import uvloop

from bench.inputs import chat_lines
from bench.machinery import cpu_seconds, median, simulated_engine, table
from bench.throughput import IN_FLIGHT, bare_loop, settings_for, submit, until_ended
from tests.support.postgres import PostgresServer
from tests.support.s3 import S3Server
from tidegate.service import working
from tidegate.store.database.postgres import PostgresTx

CPU_US_MAX = 170
DISK, S3 = "bytes on the local disk", "bytes on S3"


@contextlib.contextmanager
def counted_statements() -> Iterator[Counter[str]]:
    """How often each way of running a statement was used; a bulk statement is one, whatever its rows."""
    counts: Counter[str] = Counter()
    saved = {name: getattr(PostgresTx, name) for name in ("all", "one", "many", "many_returning", "copy")}

    def counting(name: str) -> Any:
        async def run(self: PostgresTx, *arguments: Any, **named: Any) -> Any:
            counts[str(arguments[0])] += 1
            return await saved[name](self, *arguments, **named)

        return run

    for name in saved:
        setattr(PostgresTx, name, counting(name))
    try:
        yield counts
    finally:
        for name, function in saved.items():
            setattr(PostgresTx, name, function)


@dataclass(slots=True)
class Took:
    """What one run took, for each item."""

    us: float
    s3_us: float
    statements: float
    per_second: float


class Cluster:
    """PostgreSQL, and an S3 server, while the bench runs."""

    def __init__(self, directory: Path) -> None:
        self._postgres, self._s3 = PostgresServer(directory / "postgres"), S3Server(directory / "s3")

    def __enter__(self) -> Self:
        (self._s3.directory).mkdir()
        self._postgres.start()
        self._s3.start()
        return self

    def __exit__(self, *wrong: object) -> None:
        self._s3.stop()
        self._postgres.stop()

    def _settings(self, kind: str) -> dict[str, Any]:
        store = {"store.url": self._postgres.create_database()}
        if kind == DISK:
            return store
        return {
            **store,
            "blobs.url": f"s3://{self._s3.create_bucket()}/bench",
            "blobs.endpoint": self._s3.endpoint,
            "blobs.access_key_id": self._s3.access_key,
            "blobs.secret_access_key": self._s3.secret_key,
            "blobs.allow_http": True,
        }

    async def road(self, kind: str, url: str, lines: list[bytes]) -> Took:
        with tempfile.TemporaryDirectory() as data, counted_statements() as counts:
            async with working(settings_for(url, Path(data), **self._settings(kind))) as process, process.running():
                job_id = await submit(process, lines)
                own, s3, began = self._own_cpu_s(), self._s3_cpu_s(), time.perf_counter()
                process.parts.wakes.inputs.notify()
                await until_ended(process, job_id)
                seconds = time.perf_counter() - began
                own, s3 = self._own_cpu_s() - own, self._s3_cpu_s() - s3
        count = len(lines)
        return Took(own / count * 1e6, s3 / count * 1e6, sum(counts.values()) / count, count / seconds)

    def _own_cpu_s(self) -> float:
        return cpu_seconds(self._postgres.pid())

    def _s3_cpu_s(self) -> float:
        return cpu_seconds(self._s3.pid()) - cpu_seconds()


def main(quick: bool = False) -> dict[str, float]:
    count, rounds = (3_000, 1) if quick else (20_000, 3)
    lines = list(chat_lines(count))
    bodies = [json.dumps(json.loads(line)["body"]).encode() for line in lines]
    bare_us: list[float] = []
    took: dict[str, list[Took]] = {DISK: [], S3: []}
    with tempfile.TemporaryDirectory() as name, simulated_engine("--mode", "instant") as url:
        Path(name).chmod(0o755)
        with Cluster(Path(name)) as cluster:
            for _ in range(rounds):
                _, bare_cpu_s = uvloop.run(bare_loop(url, bodies))
                bare_us.append(bare_cpu_s / count * 1e6)
                for kind, runs in took.items():
                    runs.append(uvloop.run(cluster.road(kind, url, lines)))
    rows = [("the bare loop: CPU per item", f"{median(bare_us):.0f} µs", "")]
    found: dict[str, float] = {}
    for kind, runs in took.items():
        us, statements = median([run.us for run in runs]), median([run.statements for run in runs])
        extra_us = median([run.us - bare for run, bare in zip(runs, bare_us, strict=True)])
        found |= {f"cpu_us_{kind}": us, f"extra_cpu_us_{kind}": extra_us, f"statements_per_item_{kind}": statements}
        rows += [
            (f"{kind}: CPU per item, everything but the engine and S3", f"{us:.0f} µs", f"at most {CPU_US_MAX} µs"),
            (f"{kind}: beyond the bare loop's", f"{extra_us:.0f} µs", ""),
            (f"{kind}: SQL statements per item", f"{statements:.3f}", "at most 0.2"),
            (f"{kind}: items a second", f"{median([run.per_second for run in runs]):,.0f}", ""),
        ]
    rows.append((f"{S3}: CPU of the S3 server per item", f"{median([run.s3_us for run in took[S3]]):.0f} µs", ""))
    title = f"PostgreSQL, instant upstream, {count:,} chat items of 1.5 kB, {IN_FLIGHT} in flight, {rounds} rounds (medians)"
    table(title, rows)
    return found


if __name__ == "__main__":
    main()
