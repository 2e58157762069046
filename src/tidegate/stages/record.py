"""record: make finished lines durable, commit them, and then drop them from memory.

- Lines go to this incarnation's two logs: answers and errors.
- A log that fails once is abandoned. Its lines are still in memory and go to a fresh log.
- While older lines wait for a store that is away, newer ones are made durable all the same. The
  next blob of each log is begun ahead, so this needs no store.
- Lines that the store refuses because the job closed count as paid but unused.
- The content of a line is never read here.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import structlog

from tidegate import failpoints, metrics
from tidegate.core.errors import BlobError, BlobUnavailable, LostRace, StoreUnavailable
from tidegate.core.files import Placed
from tidegate.core.nouns import Attempts, ItemVerdict, JobFlush, Recorded
from tidegate.core.ports import Blobs, ResultLog, Upstream, Wake
from tidegate.core.states import Outcome
from tidegate.store.store import Store

log = structlog.get_logger()

_RETRY_S = 0.5
_RETRY_S_MAX = 5.0
_KINDS = ("answers", "errors")
# The blobs of each kind that are begun ahead. While a store is away, one may be sealed and wait for
# its commit while another grows.
SPARE_COUNT = 2


T = TypeVar("T")

_JOB = attrgetter("job_id")
_PLACE = attrgetter("job_id", "number")


class _FlushPart(msgspec.Struct, eq=False):
    """The results of the time between two flushes. Lines are kept until they are committed."""

    lines: dict[str, list[ItemVerdict]] = msgspec.field(default_factory=lambda: {kind: [] for kind in _KINDS})
    attempts: list[tuple[str, str, Attempts]] = msgspec.field(default_factory=list)
    finished_slices: list[tuple[str, int, str]] = msgspec.field(default_factory=list)
    released_slices: list[tuple[str, int, str, int]] = msgspec.field(default_factory=list)
    size_bytes: int = 0
    line_count: int = 0
    logs: dict[str, ResultLog] = msgspec.field(default_factory=dict)

    def is_empty(self) -> bool:
        return not (self.line_count or self.attempts or self.finished_slices or self.released_slices)


class FlushLimits(msgspec.Struct, frozen=True):
    """The limits that make a flush due, and how much may wait while none succeeds."""

    after_ms: int
    line_count_max: int
    size_bytes_max: int
    unflushed_bytes_max: int


class Recorder:
    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        upstream: Upstream,
        limits: FlushLimits,
        new_blob: Callable[[str], Coroutine[Any, Any, str]],
        publish_due: asyncio.Event,
        news: Wake,
    ) -> None:
        """Create a recorder.

        `new_blob` begins a log's blob of this kind. `publish_due` is set when a job has its last
        outcome. `news` is notified of every commit.
        """
        self._store = store
        self._blobs = blobs
        self._upstream = upstream
        self._limits = limits
        self._new_blob = new_blob
        self._publish_due = publish_due
        self._committed = news
        # Set when a commit stopped a job: its calls should end before the next heartbeat.
        self.job_stopped = asyncio.Event()
        self._part = _FlushPart()
        self._unwritten: deque[_FlushPart] = deque()
        self._appended: list[_FlushPart] = []
        self._logs: dict[str, ResultLog] = {}
        self._blob_ids: dict[str, str] = {}
        self._spare_blob_ids: dict[str, list[str]] = {kind: [] for kind in _KINDS}
        self._left_blob_ids: list[str] = []
        self._news = asyncio.Event()
        self._due = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._settling: set[tuple[str, int, str]] = set()
        self._unflushed_bytes = 0
        self._taken_count = self._committed_count = self._awaited_count = 0
        self._appended_s = 0.0
        self._retry_s = _RETRY_S
        self._is_expecting = False
        self._hurried = False
        self._renewed = False
        self._life_number = 0
        self._draining = False
        self.failing = False

    @property
    def full(self) -> bool:
        """Return whether no new work should be leased or sent.

        That is so while a store or a disk is away and too much waits for it, or while slices whose
        results wait here may be leased again.
        """
        return (
            self.failing
            or self._unflushed_bytes > self._limits.unflushed_bytes_max
            or self._committed_count < self._awaited_count
        )

    def expect(self) -> None:
        """Begin logs for the results that will come, while the store is there."""
        if not self._is_expecting:
            self._is_expecting = True
            self._news.set()

    def record(self, verdict: ItemVerdict) -> None:
        """Take an item's finished line. The next flush makes it durable and commits it."""
        part, size_bytes = self._part, len(verdict.line)
        part.lines["answers" if verdict.finished.outcome is Outcome.ANSWERED else "errors"].append(verdict)
        part.size_bytes += size_bytes
        part.line_count += 1
        self._taken_count += 1
        self._unflushed_bytes += size_bytes
        if part.line_count >= self._limits.line_count_max or part.size_bytes >= self._limits.size_bytes_max:
            self._due.set()
        if part.line_count == 1:
            self._announce()

    def tried(self, job_id: str, token: str, attempts: Attempts) -> None:
        """Note the attempts of an item that failed and will be tried again."""
        self._part.attempts.append((job_id, token, attempts))
        self._announce()

    def finish_slice(self, job_id: str, first: int, token: str) -> None:
        self._part.finished_slices.append((job_id, first, token))
        self._settling.add((job_id, first, token))
        self._announce()

    def release_slice(self, job_id: str, first: int, token: str, wait_ms: int) -> None:
        self._part.released_slices.append((job_id, first, token, wait_ms))
        self._settling.add((job_id, first, token))
        self._announce()

    def _announce(self) -> None:
        self._idle.clear()
        self._news.set()

    def is_settling(self, job_id: str, first: int, token: str) -> bool:
        """Return whether this slice has ended here and its end is not committed yet."""
        return (job_id, first, token) in self._settling

    def hurry(self) -> None:
        """Flush now, without a wait for more lines or for a larger object."""
        self._hurried = True
        self._due.set()

    def renew(self) -> None:
        """Begin new logs for a new incarnation, once the lines in the old ones are committed."""
        self._renewed = True
        self._life_number += 1
        for spares in self._spare_blob_ids.values():
            self._left_blob_ids += spares
            spares.clear()
        self.commit_first()

    def commit_first(self) -> None:
        """Take no new work before the lines recorded so far are committed.

        Their slices are lost. If they were leased again before that, their items would be sent
        twice.
        """
        self._awaited_count = self._taken_count
        self.hurry()

    async def drain(self) -> None:
        """Wait until everything finished so far is committed.

        From now on no flush waits for more lines.
        """
        self._draining = True
        self.hurry()
        await self._idle.wait()

    async def run(self) -> None:
        """Flush until cancelled. A flush that fails is tried again."""
        while True:
            if self._is_expecting:
                await self._begin_spares()
            if self._is_done():
                await self._news.wait()
            self._news.clear()
            await self._wait_until_due()
            part = self._next_part()
            try:
                await self._flush(part)
            except Exception:
                self._put_back(part)
                raise
            if self._is_done():
                self._idle.set()

    def _is_done(self) -> bool:
        return self._part.is_empty() and not self._unwritten and not self._appended

    def _next_part(self) -> _FlushPart:
        """Return the part to write next. It may be empty."""
        if self._unwritten:
            return self._unwritten.popleft()
        part, self._part = self._part, _FlushPart()
        return part

    async def _flush(self, part: _FlushPart) -> None:
        if self._renewed and not self._appended:
            self._release_logs()
            self._renewed = False
        if not part.is_empty():
            if self._appended and self._seal_is_due(part.size_bytes):
                # A log has a limit for bytes that are not sealed, and refuses the same part each
                # time.
                await self._until_done(self._seal_and_commit)
            await self._until_done(lambda: self._append(part))
            self._appended.append(part)
        if self._appended and self._seal_is_due():
            await self._until_done(self._seal_and_commit)

    def _put_back(self, part: _FlushPart) -> None:
        """Keep all uncommitted lines after an unexpected error.

        They go to new logs when this runs again.
        """
        whole = _FlushPart()
        taken = self._appended if part in self._appended else [*self._appended, part]
        for one in [*taken, *self._unwritten, self._part]:
            for kind in _KINDS:
                whole.lines[kind] += one.lines[kind]
            whole.attempts += one.attempts
            whole.finished_slices += one.finished_slices
            whole.released_slices += one.released_slices
            whole.size_bytes += one.size_bytes
            whole.line_count += one.line_count
        self._part, self._appended = whole, []
        self._unwritten.clear()
        self._release_logs()

    def _seal_is_due(self, more_bytes: int = 0) -> bool:
        """Return whether to seal now.

        Sealing costs an object in an object store, so the log says how long to wait.
        """
        waits = [(ready.seal_after_ms, ready.seal_after_bytes) for ready in self._logs.values()]
        if self._hurried or self._renewed or self._draining or not waits:
            self._hurried = False
            return True
        after_ms, after_bytes = min(waits)
        size_bytes = more_bytes + sum(part.size_bytes for part in self._appended)
        if after_ms <= self._limits.after_ms or size_bytes >= after_bytes:
            return True
        return (asyncio.get_running_loop().time() - self._appended_s) * 1000 >= after_ms

    async def _wait_until_due(self) -> None:
        try:
            async with asyncio.timeout(self._limits.after_ms / 1000):
                await self._due.wait()
        except TimeoutError:
            pass
        self._due.clear()

    async def _until_done(self, step: Callable[[], Awaitable[None]]) -> None:
        """Repeat a step until it succeeds. No answer is dropped while a disk or a store is away."""
        while True:
            try:
                await step()
            except BlobError as error:
                self._complain("results cannot be written", error, "blobs")
                await self._rewrite_later()
            except LostRace as error:
                self._complain("a log was collected before its lines were recorded", error, "log_collected")
                await self._rewrite_later()
            except StoreUnavailable as error:
                self._complain("results cannot be committed", error, "store")
                await asyncio.sleep(_RETRY_S)
            else:
                self.failing = False
                self._retry_s = _RETRY_S
                return

    def _complain(self, what: str, error: Exception, reason: str) -> None:
        metrics.record_failures.of(reason).inc()
        if not self.failing:
            log.warning("record_postponed", what=what, error=str(error), unflushed_bytes=self._unflushed_bytes)
        self.failing = True

    async def _rewrite_later(self) -> None:
        """Abandon the logs and write everything that is not committed to new ones, from memory."""
        self._release_logs()
        # Each try leaves rows and names of its logs behind: on a disk that stays full they must not
        # pile up.
        await asyncio.sleep(self._retry_s)
        self._retry_s = min(2 * self._retry_s, _RETRY_S_MAX)
        again, self._appended = self._appended, []
        for part in again:
            await self._until_done(lambda part=part: self._append(part))  # type: ignore[misc]
            self._appended.append(part)

    async def _append(self, part: _FlushPart) -> None:
        """Make a part's lines durable on this host, ordered by job and number.

        A second try goes on where the first failed: the same lines twice in one log would shift all
        lines after them.
        """
        if not self._appended:
            self._appended_s = asyncio.get_running_loop().time()
        for kind in _KINDS:
            lines = part.lines[kind]
            if not lines:
                continue
            lines.sort(key=_PLACE)
            ready = await self._log(kind)
            if part.logs.get(kind) is not ready:
                await ready.append(b"".join([one.line for one in lines]))
                part.logs[kind] = ready
        if failpoints.ARMED:
            await failpoints.hit("record_durable")

    async def _append_more(self) -> None:
        """Make newer lines durable while older ones wait for their commit.

        If that fails, they wait in memory.
        """
        while not (part := self._next_part()).is_empty():
            try:
                await self._append(part)
            except BaseException as error:
                # Also after an unexpected error: these lines are nowhere else.
                self._unwritten.appendleft(part)
                if isinstance(error, BlobError | StoreUnavailable):
                    return
                raise
            self._appended.append(part)

    async def _log(self, kind: str) -> ResultLog:
        if kind not in self._logs:
            self._logs[kind] = await self._blobs.open_log(lambda: self._next_blob(kind))
        return self._logs[kind]

    async def _next_blob(self, kind: str) -> str:
        """Return the next blob of a log.

        The one before it is sealed, and is settled with the next commit.
        """
        spares = self._spare_blob_ids[kind]
        fresh = spares.pop() if spares else await self._new_blob(kind)
        self._release_blob(kind)
        self._blob_ids[kind] = fresh
        return fresh

    async def _begin_spares(self) -> None:
        """Begin the next blobs of each log, while the store is there."""
        try:
            for kind, spares in self._spare_blob_ids.items():
                while len(spares) < SPARE_COUNT:
                    life_number = self._life_number
                    fresh = await self._beside_appends(self._new_blob(kind))
                    # A blob of an incarnation that ended meanwhile would be collected: the next one
                    # must not use it.
                    (spares if life_number == self._life_number else self._left_blob_ids).append(fresh)
        except StoreUnavailable as error:
            log.info("log_not_begun", error=str(error), meanwhile="the next results ask for it again")

    def _release_blob(self, kind: str) -> None:
        if old := self._blob_ids.pop(kind, None):
            self._left_blob_ids.append(old)

    def _release_logs(self) -> None:
        for kind in _KINDS:
            self._release_blob(kind)
        self._logs.clear()

    async def _settle_left(self) -> None:
        """Settle the blobs that get no more lines and hold nothing uncommitted.

        From then on only their uses keep them. Otherwise they would count as being written as long
        as this process lives, and none of their bytes could be removed.
        """
        while self._left_blob_ids:
            try:
                await self._store.settle_blob(self._left_blob_ids[-1])
            except StoreUnavailable:
                return
            self._left_blob_ids.pop()

    async def _seal_and_commit(self) -> None:
        parts, placed = await self._seal()
        flushes = _flushes(parts, placed)
        finished = [key for part in parts for key in part.finished_slices]
        released = [key for part in parts for key in part.released_slices]
        for recorded in await self._commit(flushes, finished, released):
            if recorded.complete:
                self._publish_due.set()
            if recorded.stopped:
                self.job_stopped.set()
        self._committed.notify()
        # Also items that the store refused as late or repeated: their answers are not needed any
        # more.
        self._upstream.recorded(_items(parts))
        self._settling.difference_update(finished, [key[:3] for key in released])
        self._unflushed_bytes -= sum(part.size_bytes for part in parts)
        self._committed_count += sum(part.line_count for part in parts)
        # More parts may have been appended meanwhile.
        del self._appended[: len(parts)]
        await self._settle_left()

    async def _seal(self) -> tuple[list[_FlushPart], dict[str, Placed | None]]:
        """Seal the appended parts; return them and where their lines lie.

        While an object store is away, the parts stay durable on this host. More may join them until
        the first of the logs is sealed.
        """
        placed: dict[str, Placed | None] = {}
        while True:
            parts = list(self._appended)
            try:
                for kind in _KINDS:
                    if kind not in placed and any(part.lines[kind] for part in parts):
                        placed[kind] = await self._logs[kind].seal()
            except BlobUnavailable as error:
                self._complain("results cannot be stored", error, "blobs")
                if not placed:
                    await self._append_more()
                await asyncio.sleep(_RETRY_S)
            else:
                return parts, placed

    async def _commit(
        self,
        flushes: list[JobFlush],
        finished: list[tuple[str, int, str]],
        released: list[tuple[str, int, str, int]],
    ) -> list[Recorded]:
        """Commit flushes. Wait here while the store is away, since sealing must not be repeated."""
        while True:
            try:
                recorded = await self._beside_appends(self._store.record_outcomes(flushes, finished, released))
            except StoreUnavailable as error:
                self._complain("results cannot be committed", error, "store")
                await self._append_more()
                await asyncio.sleep(_RETRY_S)
            else:
                if failpoints.ARMED:
                    await failpoints.hit("record_committed")
                return recorded

    async def _beside_appends(self, question: Coroutine[Any, Any, T]) -> T:
        """Await an answer of the store, and go on appending while it takes long."""
        task = asyncio.create_task(question)
        try:
            while not (await asyncio.wait({task}, timeout=_RETRY_S))[0]:
                await self._append_more()
            return task.result()
        finally:
            task.cancel()

    async def close(self) -> None:
        for ready in self._logs.values():
            try:
                await ready.close()
            except BlobError as error:
                log.warning("log_close_failed", error=str(error))
        self._logs.clear()


def _items(parts: list[_FlushPart]) -> Iterator[tuple[str, int]]:
    for part in parts:
        for kind in _KINDS:
            yield from map(_PLACE, part.lines[kind])
        for job_id, _, attempts in part.attempts:
            yield job_id, attempts.number


def _flushes(parts: list[_FlushPart], placed: dict[str, Placed | None]) -> list[JobFlush]:
    """Return the flushes for the store, one for each part and job.

    A job's lines are one range of the sealed bytes.
    """
    found: list[JobFlush] = []
    at = {kind: place.at if place else 0 for kind, place in placed.items()}
    for part in parts:
        jobs: dict[str, JobFlush] = {}
        for kind in _KINDS:
            place = placed.get(kind)
            for job_id, group in groupby(part.lines[kind], key=_JOB):
                assert place is not None
                entries = [one.finished for one in group]
                size_bytes = sum(entry.size_bytes for entry in entries)
                where = Placed(place.blob_id, at[kind], size_bytes)
                at[kind] += size_bytes
                old = jobs.get(job_id) or JobFlush(job_id)
                jobs[job_id] = (
                    JobFlush(job_id, entries, where, old.errors, old.errors_placed, old.attempts)
                    if kind == "answers"
                    else JobFlush(job_id, old.answers, old.answers_placed, entries, where, old.attempts)
                )
        for job_id, token, attempts in part.attempts:
            jobs.setdefault(job_id, JobFlush(job_id)).attempts.append((token, attempts))
        found.extend(jobs.values())
    return found
