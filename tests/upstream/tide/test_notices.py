"""API and worker as two processes: the worker's tide learns of a user at once by a notice, polls make up for notices that are lost, and a
killed API process keeps the tide closed for a moment only."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import httpx2
import pytest

from tests.support.engine import Engine
from tests.support.processes import Processes, free_port, wait_until
from tests.support.tidegate import END_S, Site, requests
from tidegate.upstream.tide.peers import REPORT_VALID_MS

POLL_S = 0.05
LISTENING = (
    "select count(*) from pg_stat_activity where application_name = 'tidegate notices' and datname = current_database()"
    # A connection sends notices of its own once it listens, so its last statement may be one of those.
    " and (query ilike 'listen%' or query ilike '%pg_notify%') and state = 'idle'"
)
ITEMS = 400
# Half a million tokens: their first token takes the modelled engine longer than this test.
USER_PROMPT = "wait " * 400_000


class Split:
    """One API and one worker in front of a modelled engine."""

    def __init__(self, site: Site, notices: bool) -> None:
        self.site = site
        port = free_port()
        self._page = f"http://127.0.0.1:{port}/metrics"
        # A pooler in between would hide who listens: such a process sends and receives no notices.
        pooler = {} if notices else {"TIDEGATE_STORE_POOLER": "transaction"}
        self.api = site.api(more=pooler)
        site.worker(more={"TIDEGATE_METRICS_PORT": str(port), **pooler})
        site.submit(requests(ITEMS, lambda number: f"{number} " + "tide and time " * 200))
        self.opens()

    def prompt_tokens(self) -> float | None:
        """How many prompt tokens the worker's tide lets wait for their first token."""
        page = httpx2.get(self._page, trust_env=False).text
        found = re.search(r'^tidegate_tide_prompt_tokens_limit\{deployment="[^"]+"\} (\S+)$', page, re.MULTILINE)
        return float(found.group(1)) if found else None

    def opens(self) -> None:
        wait_until(lambda: (self.prompt_tokens() or 0) > 0, END_S, "the worker's tide to open", poll_s=POLL_S)

    def closes(self) -> None:
        wait_until(lambda: self.prompt_tokens() == 0, END_S, "the worker's tide to close", poll_s=POLL_S)

    @contextlib.contextmanager
    def user(self) -> Iterator[None]:
        """Somebody waits for a first token."""
        body = {"model": "m", "messages": [{"role": "user", "content": USER_PROMPT}], "max_tokens": 4, "stream": True}
        client = httpx2.Client(base_url=self.site.url, timeout=300, trust_env=False)

        def ask() -> None:
            with contextlib.suppress(httpx2.HTTPError):
                client.post("/v1/chat/completions", json=body)

        asks = threading.Thread(target=ask)
        asks.start()
        try:
            yield
        finally:
            self.api.kill()
            asks.join()
            client.close()


@pytest.fixture
def site(processes: Processes, tmp_path: Path, migrated_postgres_url: str) -> Iterator[Site]:
    engine = Engine(processes, tmp_path / "engine", mode="modelled")
    # The engine shows nothing of itself: only another process can tell of a user.
    hidden = f"http://127.0.0.1:{free_port()}/metrics"
    place = {"url": engine.url, "engine": "vllm", "max_in_flight": 8, "metrics_url": hidden}
    made = Site("cluster", processes, tmp_path, engine, {"TIDEGATE_STORE_URL": migrated_postgres_url})
    made.configure(models={"m": {"deployments": [place]}})
    yield made
    # Before the database goes.
    processes.close()


@pytest.mark.timeout(300)
def test_a_notice_closes_the_workers_tide_while_the_store_says_nothing(site: Site, migrated_postgres_url: str) -> None:
    split = Split(site, notices=True)

    async def alone_with_notices() -> None:
        admin = await asyncpg.connect(migrated_postgres_url)
        # A notice that is sent before both listen is lost, and here no poll makes up for it.
        while await admin.fetchval(LISTENING) < 2:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        # An API process that read the store before the worker was in it thinks for so long that no process wants its notices.
        await asyncio.sleep(REPORT_VALID_MS / 1000)
        async with admin.transaction():
            # No process can write or read the reports of the others.
            await admin.execute("lock table fleet_reports in access exclusive mode")
            with split.user():
                await asyncio.to_thread(split.closes)
        await admin.close()

    asyncio.run(alone_with_notices())
    # The user's process was killed at that moment: its last notice holds for a few seconds, not for ever.
    split.opens()


@pytest.mark.timeout(300)
def test_polls_close_the_workers_tide_where_every_notice_is_lost(site: Site) -> None:
    split = Split(site, notices=False)
    with split.user():
        split.closes()
    split.opens()
