"""The watch over jobs that requests wait for.

One statement reads all of them twice a second, and earlier at a notice about any job.

A lost notice costs half a second. While the store does not answer, the requests go on waiting.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from tidegate.core.errors import TidegateError
from tidegate.core.nouns import Job
from tidegate.store.database.driver import Row
from tidegate.web.context import WebContext

log = structlog.get_logger()

LOOK_S = 0.5
# Notices that come closer together share one look. The pause grows with the time of a look, so that
# looks take at most a fifth of the time.
PAUSE_S_MIN = 0.002
PAUSE_LOOKS = 4


class JobFollower:
    """One request that follows a job. `job` is the job at the last look; None when it is gone."""

    def __init__(self, job: Job) -> None:
        self.job: Job | None = job
        self.is_stopping = False
        self._news = asyncio.Event()

    def tell(self, job: Job | None) -> None:
        self.job = job
        self._news.set()

    def wake(self, *, is_stopping: bool = False) -> None:
        """End the wait although the job did not change."""
        self.is_stopping = self.is_stopping or is_stopping
        self._news.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for news, at most this long. Return whether there were news."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True


class JobWatch:
    def __init__(self, context: WebContext) -> None:
        self._store = context.store
        self._stop = context.stop
        self._news = context.wakes.jobs.listen()
        self._client_timeout_s = context.settings.http.client_timeout_s
        self._followers: dict[str, set[JobFollower]] = {}
        self._seen: dict[str, Row] = {}
        self._looking: asyncio.Task[None] | None = None

    @property
    def reader_patience_s(self) -> float:
        """Return how long a stream waits for its reader.

        This ends before the connection is cut, so that a late reader learns how to go on.
        """
        return self._client_timeout_s / 2

    @contextmanager
    def following(self, job: Job) -> Iterator[JobFollower]:
        """Follow a job that the caller may see, while the block runs."""
        follower = JobFollower(job)
        self._followers.setdefault(job.id, set()).add(follower)
        # The job may have changed since it was read, so the next look must reach this follower.
        self._seen.pop(job.id, None)
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look_while_followed())
        try:
            yield follower
        finally:
            self._followers[job.id].discard(follower)
            if not self._followers[job.id]:
                del self._followers[job.id]
                self._seen.pop(job.id, None)

    async def look(self) -> None:
        """Notify the followers of every job that changed since the last look."""
        asked = sorted(self._followers)
        marks = await self._store.job_marks(asked)
        for job_id in asked:
            mark = marks.get(job_id)
            if mark is not None and self._seen.get(job_id) == mark:
                continue
            job = await self._store.any_job(job_id) if mark is not None else None
            if mark is not None:
                self._seen[job_id] = mark
            for follower in self._followers.get(job_id, ()):
                follower.tell(job)

    async def _look_while_followed(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._followers:
                if self._stop is not None and self._stop.is_set():
                    for follower in [one for some in self._followers.values() for one in some]:
                        follower.wake(is_stopping=True)
                begun_s = loop.time()
                try:
                    await self.look()
                except TidegateError as error:
                    log.warning("job_watch_failed", error=str(error))
                await asyncio.sleep(max(PAUSE_S_MIN, PAUSE_LOOKS * (loop.time() - begun_s)))
                await self._news.wait(LOOK_S)
        finally:
            self._looking = None
