"""ship: closing a job. Drain (nothing is out any more), close (record refuses), publish (files appear, the end state is set).

Finished lines are never copied, except once when the caller asked for input order.
"""

import logging
import os
from array import array
from pathlib import Path

import msgspec
import structlog

from tidegate import metrics
from tidegate.core import ids
from tidegate.core.answers.results import never_ran_line
from tidegate.core.errors import BlobError, BlobMissing, LostRace
from tidegate.core.nouns import Job, KeepTimes, Placed, Rest, Rewrite
from tidegate.core.ports import Blobs, BlobWriter, Entropy
from tidegate.core.states import JobKind, JobState, Outcome
from tidegate.core.usage.prices import units_text
from tidegate.failpoints import hit
from tidegate.stages.stage_leases import StageLeases
from tidegate.store.store import Store

log = structlog.get_logger()

_PAGE = 10_000
_WRITE_BYTES = 1 << 20
_POSTPONED_MAX = 10_000
_RETRY_MS = 2_000
_NO_CUSTOM_ID = b"null"
_OUTCOME_OF = {
    JobState.EXPIRED: Outcome.EXPIRED,
    JobState.CANCELLED: Outcome.CANCELLED,
    JobState.FAILED: Outcome.FAILED,
}


class _CustomId(msgspec.Struct):
    custom_id: msgspec.Raw


_custom_id = msgspec.json.Decoder(_CustomId)


class Ship:
    def __init__(self, store: Store, blobs: Blobs, entropy: Entropy, scratch: Path, keep: KeepTimes) -> None:
        self._store = store
        self._blobs = blobs
        self._entropy = entropy
        self._steps = StageLeases(store, entropy)
        self._scratch = scratch
        self._keep = keep
        self._begun_blob_ids: list[str] = []
        self._postponed: set[str] = set()

    async def close_drained(self, grace_ms: int, count_max: int = 50) -> int:
        """Close the jobs of which nothing is out any more, or whose grace has passed."""
        closed = 0
        for job_id in await self._store.draining_jobs(grace_ms, count_max):
            closed += await self._store.close_job(job_id, grace_ms)
            await hit("job_closed")
        return closed

    async def publish_all(self, worker_id: str, count_max: int = 50) -> int:
        """Publish every closed job that no process publishes now."""
        published = 0
        await self._steps.give_back_leftovers()
        for job_id in await self._store.jobs_to_publish(count_max):
            token = await self._steps.take(job_id, JobState.FINALIZING, worker_id)
            if token is not None:
                published += await self._publish(job_id, worker_id, token)
        return published

    async def _publish(self, job_id: str, worker_id: str, token: str) -> bool:
        job = await self._store.any_job(job_id)
        if job is None:
            return False
        self._begun_blob_ids = []
        try:
            rest = await self._write_rest(job, worker_id) if job.done_count < job.item_count else None
            output, errors = await self._ordered(job, worker_id, rest) if job.ordered else (None, None)
            await self._store.publish_job(
                job, token, rest=rest, output=output, errors=errors, keep_ms=self._keep.results_ms(job)
            )
            self._steps.end(token)
            await hit("publish_committed")
            _log_end(job)
            metrics.count_job_end(await self._store.any_job(job_id))
            if job_id in self._postponed:
                self._postponed.discard(job_id)
                metrics.finalization_retries.of("recovered").inc()
            return True
        except LostRace as error:
            log.info("publish_lease_lost", job=job_id, error=str(error))
        except (BlobError, OSError) as error:
            await self._store.drop_step(job_id, token, _RETRY_MS)
            self._steps.end(token)
            log.warning("publish_postponed", job=job_id, error=str(error))
            metrics.finalization_retries.of("postponed").inc()
            if len(self._postponed) < _POSTPONED_MAX:
                self._postponed.add(job_id)
        for blob_id in self._begun_blob_ids:
            await self._store.give_up_blob(blob_id)
        return False

    async def _begin(self, kind: str, worker_id: str) -> tuple[str, BlobWriter]:
        blob_id = ids.make("blob", self._entropy.token_bytes(16))
        await self._store.begin_blob(blob_id, kind, worker_id)
        self._begun_blob_ids.append(blob_id)
        return blob_id, await self._blobs.create(blob_id)

    async def _write_rest(self, job: Job, worker_id: str) -> Rest:
        """The lines of the items that never ran, in order of number, in a fresh blob."""
        assert job.closing is not None
        assert job.work_blob_id is not None
        outcome = _OUTCOME_OF[job.closing]
        done = await self._done(job)
        blob_id, writer = await self._begin("rest", worker_id)
        lines: list[tuple[int, int]] = []
        buffer, size_bytes = bytearray(), 0
        try:
            for first, count, read_first, work_at, work_bytes in await self._store.unfinished_slices(job.id):
                numbers = [number for number in range(first, first + count) if not done[number]]
                if not numbers:
                    continue
                work = await self._work_lines(job.work_blob_id, work_at, work_bytes)
                for number in numbers:
                    custom_id = _custom_id_of(work, number - read_first)
                    line = never_ran_line(job.id, number, custom_id, outcome)
                    lines.append((number, len(line)))
                    buffer += line
                    size_bytes += len(line)
                if len(buffer) >= _WRITE_BYTES:
                    await writer.write(bytes(buffer))
                    buffer.clear()
            await writer.write(bytes(buffer))
            await writer.finish()
        except BaseException:
            await writer.abort()
            raise
        await hit("publish_rest_durable")
        return Rest(outcome, Placed(blob_id, 0, size_bytes), lines)

    async def _work_lines(self, work_blob_id: str, at: int, size_bytes: int) -> list[bytes]:
        """Lines of the work file; none when they are lost, for a job whose requests are gone must come to its end all the same."""
        try:
            return (await self._blobs.read(work_blob_id, at, size_bytes)).split(b"\n")
        except BlobMissing as error:
            log.error("work_file_gone", error=str(error))
            return []

    async def _ordered(self, job: Job, worker_id: str, rest: Rest | None) -> tuple[Rewrite | None, Rewrite | None]:
        """Both result files in the order of the input; as they are when what the order needs is lost and no wait brings it back."""
        try:
            output = await self._rewrite(job, worker_id, answered=True, rest=None)
            return output, await self._rewrite(job, worker_id, answered=False, rest=rest)
        except BlobMissing as error:
            log.error("ordered_output_failed", job=job.id, error=str(error))
            for blob_id in self._begun_blob_ids:
                if rest is None or blob_id != rest.placed.blob_id:
                    await self._store.give_up_blob(blob_id)
            return None, None

    async def _done(self, job: Job) -> bytearray:
        """One byte per item: whether it has an outcome."""
        done = bytearray(job.item_count)
        number = 0
        while page := await self._store.outcomes_page(job.id, number, _PAGE):
            for row in page:
                done[row[0]] = 1
            number = page[-1][0] + 1
        return done

    async def _rewrite(self, job: Job, worker_id: str, *, answered: bool, rest: Rest | None) -> Rewrite | None:
        """Rewrite one result file in the order of the input's lines."""
        file_id = job.output_file_id if answered else job.error_file_id
        places = await self._places(job, answered=answered)
        extents = await self._all_extents(file_id) if file_id else []
        if rest is not None:
            at = job.error_bytes
            extents.append((at, rest.placed.size_bytes, rest.placed.blob_id, rest.placed.at))
            for number, size_bytes in rest.lines:
                places.append((number, at, size_bytes))
                at += size_bytes
        if not places:
            return None
        order = await self._input_order(job)
        places.sort(key=lambda place: order[place[0]])
        blob_id, writer = await self._begin("rest", worker_id)
        source = await _Source.open(self._blobs, self._scratch / f"{blob_id}-ordered", extents)
        moved, at = [], 0
        try:
            buffer = bytearray()
            for number, old_at, size_bytes in places:
                buffer += source.read(old_at, size_bytes)
                moved.append((number, at))
                at += size_bytes
                if len(buffer) >= _WRITE_BYTES:
                    await writer.write(bytes(buffer))
                    buffer.clear()
            await writer.write(bytes(buffer))
            await writer.finish()
        except BaseException:
            await writer.abort()
            raise
        finally:
            source.close()
        return Rewrite(Placed(blob_id, 0, at), moved)

    async def _places(self, job: Job, *, answered: bool) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        number = 0
        while page := await self._store.outcomes_page(job.id, number, _PAGE):
            found.extend((row[0], row[2], row[3]) for row in page if (row[1] == Outcome.ANSWERED) == answered)
            number = page[-1][0] + 1
        return found

    async def _all_extents(self, file_id: str) -> list[tuple[int, int, str, int]]:
        found: list[tuple[int, int, str, int]] = []
        while page := await self._store.list_extents(file_id, found[-1][0] + found[-1][1] if found else 0, 1000):
            found.extend((extent.at, extent.size_bytes, extent.blob_id, extent.blob_at) for extent in page)
        return found

    async def _input_order(self, job: Job) -> "array[int]":
        """Each item's 1-based line in the input: the trailer of the work file."""
        assert job.work_blob_id is not None
        order = array("I")
        order.frombytes(await self._blobs.read(job.work_blob_id, job.work_bytes, 4 * job.item_count))
        return order


def _custom_id_of(work: list[bytes], index: int) -> bytes:
    try:
        return bytes(_custom_id.decode(work[index]).custom_id)
    except (IndexError, msgspec.DecodeError):
        return _NO_CUSTOM_ID


class _Source:
    """A result file as one plain local file, for reads all over it."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path

    @classmethod
    async def open(cls, blobs: Blobs, path: Path, extents: list[tuple[int, int, str, int]]) -> "_Source":
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        source = cls(descriptor, path)
        try:
            for _, size_bytes, blob_id, blob_at in extents:
                async for leased in blobs.stream(blob_id, blob_at, size_bytes):
                    # A disk that is nearly full takes a part of what it is given and says so only by the count.
                    left = memoryview(leased)
                    while left:
                        left = left[os.write(descriptor, left) :]
        except BaseException:
            source.close()
            raise
        return source

    def read(self, at: int, size_bytes: int) -> bytes:
        data = os.pread(self._descriptor, size_bytes, at)
        if len(data) != size_bytes:
            raise OSError(f"{self._path} ends before byte {at + size_bytes}")
        return data

    def close(self) -> None:
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)


def _log_end(job: Job) -> None:
    """Note how a batch ended; background responses are too many and too small for a line each."""
    if job.kind is not JobKind.BATCH:
        return
    why = {"why": job.errors[0].message} if job.errors else {}
    log.log(
        logging.WARNING if job.closing is JobState.FAILED else logging.INFO,
        f"job_{job.closing}",
        job=job.id,
        completed=job.answered_count,
        failed=job.item_count - job.answered_count,
        cost=units_text(job.cost_nano),
        **why,
    )
