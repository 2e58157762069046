"""The tide over real workers and a modelled engine that tells of itself as vLLM does: batch sinks while users are there and rises after
them, whether they come through our gateway or past it; nothing is lost, and no item is taken back more than twice."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.engine import Engine
from tests.support.processes import Processes, wait_until
from tests.support.tidegate import END_S, Site, requests
from tidegate.cli.batches.explain import explain_inputs_of
from tidegate.core.schedule.explain import explain
from tidegate.upstream.tide.tides import HAND_BACKS_MAX

WORKERS = 2
CEILING = 32
# What each worker may have without users beside it, and with some.
QUIET_CALLS, BESIDE_CALLS = 8, 4
ITEMS = 120
PROMPT = "tide and time " * 400
USERS = 4
# Long enough that one of a few users nearly always waits for a first token.
USER_PROMPT = "wait for no one " * 4_000
POLL_S = 0.1
MORE_S = 2 * END_S
LATELY_S = 2.0
SETTINGS = {
    "TIDEGATE_WORKER_IN_FLIGHT_MAX": str(CEILING),
    "TIDEGATE_WORKER_LEASE_MS": "8000",
    "TIDEGATE_INGEST_SLICE_COUNT_MAX": "16",
}


class Shore:
    """An API and workers in front of one engine."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.batches: dict[str, list[str]] = {}
        self._numbers = itertools.count()

    def start(self) -> None:
        self.site.api()
        for place in range(WORKERS):
            self.site.worker(name=f"worker{place}")

    def batch(self) -> str:
        """One that still has to run: another one when all others ended meanwhile."""
        for batch_id in self.batches:
            if self.site.batch(batch_id)["status"] in ("validating", "in_progress"):
                return batch_id
        return self.submit()

    def submit(self) -> str:
        lines = requests(ITEMS, lambda number: f"{number} {next(self._numbers)} {PROMPT}")
        batch_id = self.site.submit(lines)
        self.batches[batch_id] = lines
        return batch_id

    def limits(self) -> list[int]:
        """How many calls each worker that has something to send lets itself have, by its reports of the last moments."""
        rows = self.site.rows("select why, workers, reported_at from fleet_reports")
        lately = [row for row in rows if row["workers"] and row["reported_at"] > (time.time() - LATELY_S) * 1000]
        return [int(str(row["why"]).partition(" ")[0]) for row in lately]

    def sinks(self) -> None:
        def sunk() -> bool:
            self.batch()
            limits = self.limits()
            return bool(limits) and max(limits) <= BESIDE_CALLS

        wait_until(sunk, MORE_S, "the limits to sink", poll_s=POLL_S)

    def rises(self) -> None:
        def risen() -> bool:
            self.batch()
            limits = self.limits()
            return bool(limits) and min(limits) >= QUIET_CALLS

        wait_until(risen, MORE_S, "the limits to rise", poll_s=POLL_S)

    def calls(self) -> Counter[str]:
        """How often each item was called."""
        keys = [str(call["idempotency_key"]) for call in self.site.calls()]
        return Counter(key for key in keys if key.startswith("batch_"))

    def explained(self, batch_id: str) -> str:
        job, explain_inputs = asyncio.run(explain_inputs_of(self.site.settings, None, batch_id))
        return "\n".join(explain(job, explain_inputs))


@contextmanager
def users(url: str) -> Iterator[None]:
    """Somebody who asks again and again, and reads every answer as it comes."""
    gone = threading.Event()
    wrong: list[str] = []

    def ask(who: int) -> None:
        with httpx2.Client(base_url=url, timeout=300, trust_env=False) as client:
            for turn in itertools.count():
                message = {"role": "user", "content": f"{who} {turn} {USER_PROMPT}"}
                body: dict[str, Any] = {"model": "m", "messages": [message], "max_tokens": 30, "stream": True}
                key = {"Idempotency-Key": f"user-{who}-{turn}"}
                with client.stream("POST", "/chat/completions", json=body, headers=key) as answer:
                    if answer.status_code != 200:
                        answer.read()
                        wrong.append(answer.text)
                        return
                    for _ in answer.iter_bytes():
                        if gone.is_set():
                            return

    threads = [threading.Thread(target=ask, args=(who,)) for who in range(USERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        gone.set()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[0]


@pytest.fixture
def shore(processes: Processes, tmp_path: Path, migrated_postgres_url: str) -> Iterator[Shore]:
    engine = Engine(processes, tmp_path / "engine", mode="modelled")
    place = {"url": engine.url, "engine": "vllm", "max_in_flight": CEILING}
    site = Site("cluster", processes, tmp_path, engine, {"TIDEGATE_STORE_URL": migrated_postgres_url, **SETTINGS})
    site.configure(models={"m": {"deployments": [place]}})
    yield Shore(site)
    # Before the database goes.
    processes.close()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("road", ["gateway", "engine"])
def test_batch_sinks_beside_users_and_rises_after_them(shore: Shore, road: str) -> None:
    shore.start()
    site = shore.site
    url = f"{site.url}/v1" if road == "gateway" else site.engine.url
    shore.rises()
    with users(url):
        shore.sinks()
        # One of which the workers hold nothing yet: what they hold of the first is not waiting for its turn.
        another = shore.submit()
        words = "interactive calls need all of it now (tide_closed)"
        wait_until(lambda: words in shore.explained(another), MORE_S, "the reason in words", poll_s=POLL_S)
    shore.rises()
    # The next users meet batch prompts that have no first token yet, sooner or later.
    while road == "gateway" and max(shore.calls().values()) == 1:
        shore.rises()
        with users(url):
            shore.sinks()
    for one, lines in shore.batches.items():
        site.judge(one, lines, repeats_max=HAND_BACKS_MAX * len(lines) * len(shore.batches))
    assert max(shore.calls().values()) <= 1 + HAND_BACKS_MAX
