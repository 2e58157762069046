"""Limits per minute over four worker processes on one PostgreSQL, dealt by the store and by Redis: how much of them is used in quiet
minutes, and how many windows of any alignment hold more, also while workers are killed and Redis is flushed and crashes.

Sends are counted at the moment at which a worker's kernel got them. A window is kept half a second longer than a minute, so that at most
99.2 % can be used.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.machinery import table
from tests.support import trial
from tests.support.crew import Crew
from tests.support.engine import Engine
from tests.support.postgres import PostgresServer
from tests.support.processes import Processes
from tests.support.redis import RedisServer
from tests.support.shims import Shims
from tests.support.tidegate import Site


@contextlib.contextmanager
def _servers(directory: Path) -> Iterator[tuple[PostgresServer, RedisServer]]:
    # The PostgreSQL server may run as an unprivileged user, who must be able to pass through.
    directory.chmod(0o755)
    postgres, redis = PostgresServer(directory / "postgres"), RedisServer(directory / "redis")
    try:
        postgres.start()
        redis.start()
        yield postgres, redis
    finally:
        redis.stop()
        postgres.stop()


def _run(
    directory: Path, postgres: PostgresServer, redis: RedisServer | None, minutes: tuple[float, float]
) -> list[trial.Finding]:
    directory.mkdir()
    with Processes(directory / "logs") as processes:
        engine = Engine(processes, directory / "engine")
        env = {"TIDEGATE_STORE_URL": postgres.create_database(), **trial.SETTINGS}
        if redis is not None:
            env["TIDEGATE_REDIS_URL"] = redis.url
        site = Site("cluster", processes, directory, engine, env)
        site.configure(**trial.config(engine.url))
        return trial.run(Crew(site, Shims(directory).sends()), redis, *minutes)


def main(quick: bool = False) -> dict[str, float]:
    minutes = (1.5, 0.5) if quick else (3.0, 2.0)
    with tempfile.TemporaryDirectory() as name, _servers(Path(name)) as (postgres, redis):
        runs = {
            "store": _run(Path(name) / "by-store", postgres, None, minutes),
            "Redis": _run(Path(name) / "by-redis", postgres, redis, minutes),
        }
    found: dict[str, float] = {}
    rows = []
    for place, findings in runs.items():
        for one in findings:
            what = f"{one.case.model}, {place}"
            stem = f"{place.lower()}_{one.case.model.replace('-', '_')}"
            found |= {f"{stem}_used": one.quiet_used, f"{stem}_exceeded": one.exceeded}
            rows += [
                (f"{what}: mean use of a quiet minute", f"{one.quiet_used:.1%}", "at least 98 %"),
                (f"{what}: used while workers are killed", f"{one.faulty_used:.1%}", ""),
                (f"{what}: fullest window", f"{one.fullest:,} of {one.case.limit:,}", ""),
                (f"{what}: windows exceeded, by sending", f"{one.exceeded}", "0"),
                (f"{what}: windows exceeded, by arrival", f"{one.exceeded_by_arrival}", ""),
            ]
    quiet, faulty = minutes
    table(
        f"Limits per minute, 4 workers, calls of 0.1 s and of 20 s, {quiet:g} quiet and {faulty:g} faulty minutes", rows
    )
    return found


if __name__ == "__main__":
    main()
