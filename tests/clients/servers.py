"""Installations of Tidegate that clients may use, and what kills a process of one again and again."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.engine import Engine
from tests.support.postgres import PostgresServer
from tests.support.processes import Processes, free_port
from tests.support.run_directory import RunDirectory
from tests.support.s3 import S3Server
from tests.support.tidegate import Site, s3_env

STORES = {"embedded": "embedded", "PostgreSQL": "cluster"}
KILLS = 6
KILL_EVERY_S = 6.0
# Slow enough that batches of a few lines still run when the last process is killed.
SLOW_CALL_MS = 2_500

# So many clients at once may keep a small machine busy for seconds; a worker that is only slow must not be taken for lost. Their batches
# run side by side: with the four slots of other tests they waited for each other until their time was over.
ROOMY = {
    "TIDEGATE_WORKER_LEASE_MS": "15s",
    "TIDEGATE_WORKER_HEARTBEAT_MS": "2s",
    "TIDEGATE_WORKER_IN_FLIGHT_MAX": "64",
}


@contextmanager
def started(store: str, call_ms: int = 0, port: int = 0) -> Iterator[Site]:
    """Start Tidegate over this store: `serve`, or an API and a worker. Each call to the simulated model server behind it takes so long."""
    run_directory = RunDirectory.create()
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        processes = Processes(directory / "logs", run_directory.process_registry())
        try:
            engine = Engine(processes, directory / "engine", latency_ms=call_ms)
            # Clients go on at the address that they were given.
            env = {"TIDEGATE_SERVER_PORT": str(port or free_port()), **ROOMY}
            if store == "PostgreSQL":
                env["TIDEGATE_STORE_URL"] = run_directory.shared(PostgresServer).create_database()
                bucket = (s3 := run_directory.shared(S3Server)).create_bucket()
                env |= s3_env(s3, bucket)
            site = Site(STORES[store], processes, directory, engine, env)
            if store == "PostgreSQL":
                subprocess.run(
                    [sys.executable, "-m", "tidegate", "migrate"], env=site.environment(), cwd=directory, check=True
                )
            site.begin()
            yield site
        finally:
            processes.close()
            run_directory.close()


class Killer(threading.Thread):
    """Kills the process that runs items, `serve` or the worker, and starts it again: six times, 6 s apart."""

    def __init__(self, site: Site) -> None:
        super().__init__(daemon=True)
        self._site = site
        self._over = threading.Event()
        self.kills = 0

    @property
    def is_done(self) -> bool:
        """Whether the last process was killed."""
        return self.kills == KILLS

    def run(self) -> None:
        while self.kills < KILLS and not self._over.wait(KILL_EVERY_S):
            self._site.workers[-1].kill()
            self.kills += 1
            self._site.relieve()

    def stop(self) -> None:
        self._over.set()
        self.join()
