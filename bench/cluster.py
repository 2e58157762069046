"""The same road over PostgreSQL: CPU per item beyond a bare loop (this process, its ingest child and the database server), and SQL
statements per item. The bytes stay on the local disk, so that what is measured is the database.
"""

import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from bench.inputs import chat_lines
from bench.machinery import cpu_seconds, median, simulated_engine, table
from bench.throughput import IN_FLIGHT, bare_loop, settings_for, submit, until_ended
from tests.support.postgres import PostgresServer
from tidegate.service import working
from tidegate.store.postgres import PostgresTx


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


def _pid(server: PostgresServer) -> int:
    return int((server.data / "postmaster.pid").read_text().split()[0])


async def _road(url: str, store_url: str, server_pid: int, lines: list[bytes]) -> float:
    with tempfile.TemporaryDirectory() as data:
        async with working(settings_for(url, Path(data), **{"store.url": store_url})) as at_work:
            job_id = await submit(at_work, lines)
            began = cpu_seconds(server_pid)
            at_work.parts.wake.ring()
            await until_ended(at_work, job_id)
            return cpu_seconds(server_pid) - began


def main(quick: bool = False) -> dict[str, float]:
    count, rounds = (3_000, 1) if quick else (20_000, 3)
    lines = list(chat_lines(count))
    bodies = [json.dumps(json.loads(line)["body"]).encode() for line in lines]
    extra_us, statements = [], []
    with tempfile.TemporaryDirectory() as name, simulated_engine("--mode", "instant") as url:
        Path(name).chmod(0o755)
        server = PostgresServer(Path(name) / "postgres")
        server.start()
        try:
            for _ in range(rounds):
                _, bare_cpu = uvloop.run(bare_loop(url, bodies))
                with counted_statements() as counts:
                    road_cpu = uvloop.run(_road(url, server.create_database(), _pid(server), lines))
                extra_us.append((road_cpu - bare_cpu) / count * 1e6)
                statements.append(sum(counts.values()) / count)
        finally:
            server.stop()
    found = {"extra_cpu_us": median(extra_us), "statements_per_item": median(statements)}
    table(
        f"PostgreSQL, instant upstream, {count:,} chat items of 1.5 kB, {IN_FLIGHT} in flight, {rounds} rounds (medians)",
        [
            ("CPU beyond the bare loop, all processes, per item", f"{found['extra_cpu_us']:.0f} µs", "at most 150 µs"),
            ("SQL statements per item", f"{found['statements_per_item']:.3f}", "at most 0.2"),
        ],
    )
    return found


if __name__ == "__main__":
    main()
