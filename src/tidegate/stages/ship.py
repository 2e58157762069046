"""ship: end a job in three steps.

1. Drain: wait until none of its items is with a worker.
2. Close: from then on record refuses its lines.
3. Publish: its result files appear and its end state is set.

Finished lines are never copied, except once if the caller asked for the order of the input.
"""

import logging
from array import array
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import structlog

from tidegate import metrics, tracing
from tidegate.core.answers.outcome_lines import COMPLETED, response_status
from tidegate.core.answers.results import never_ran_line
from tidegate.core.errors import BlobError, BlobMissing, LostRace
from tidegate.core.files import Placed
from tidegate.core.nouns import Job, JobEnd, KeepTimes, PublishTurns, Rewrite, UnrunLines
from tidegate.core.ports import Blobs, Entropy
from tidegate.core.states import JobKind, JobState, Outcome
from tidegate.core.usage.prices import units_text
from tidegate.failpoints import hit
from tidegate.stages.publish_lines import (
    OUTCOME_OF,
    WRITE_BYTES,
    CopyWriter,
    LineWriter,
    PlacesByItem,
    PublishBlobs,
    ResultCopy,
    RunLines,
)
from tidegate.stages.stage_leases import StageLeases
from tidegate.store.file_bytes import file_bytes
from tidegate.store.store import Store

log = structlog.get_logger()

_PAGE = 10_000
_POSTPONED_MAX = 10_000
_RETRY_MS = 2_000
_NO_CUSTOM_ID = b"null"
# A job with at most this many bytes to write is published within a moment, and never waits for a
# larger one. Larger jobs take turns: each tenant publishes one before any tenant publishes a
# second.
_QUICK_BYTES_MAX = 4 << 20
QUICK = PublishTurns(bytes_max=_QUICK_BYTES_MAX, count_max=200)
LONG = PublishTurns(bytes_min=_QUICK_BYTES_MAX + 1, tenant_max=1, count_max=1_000)
AddedUnrunLines = tuple[UnrunLines | None, UnrunLines | None]


class _CustomId(msgspec.Struct):
    custom_id: msgspec.Raw


_custom_id = msgspec.json.Decoder(_CustomId)


class Ship:
    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        entropy: Entropy,
        scratch: Path,
        keep: KeepTimes,
        turns: PublishTurns = PublishTurns(),  # noqa: B008 - a constant
    ) -> None:
        """Create the stage.

        `turns` says which closed jobs it publishes, and how many of a tenant at a time.
        """
        self._turns = turns
        self._store = store
        self._blobs = blobs
        self._entropy = entropy
        self._steps = StageLeases(store, entropy)
        self._scratch = scratch
        self._keep = keep
        self._postponed: set[str] = set()

    async def close_drained(self, grace_ms: int, count_max: int = 50) -> int:
        """Close the jobs that have no items with workers any more, or whose grace has passed."""
        closed = 0
        for job_id in await self._store.draining_jobs(grace_ms, count_max):
            closed += await self._store.close_job(job_id, grace_ms)
            await hit("job_closed")
        return closed

    async def publish_all(self, worker_id: str) -> int:
        """Publish closed jobs that no process publishes now."""
        published = 0
        await self._steps.give_back_leftovers()
        for job_id in await self._store.jobs_to_publish(self._turns):
            token = await self._steps.take_step(job_id, JobState.FINALIZING, worker_id)
            if token is not None:
                published += await self._publish(job_id, worker_id, token)
        return published

    async def _publish(self, job_id: str, worker_id: str, token: str) -> bool:
        job = await self._store.any_job(job_id)
        if job is None:
            return False
        fresh = PublishBlobs(self._store, self._blobs, self._entropy, worker_id)
        try:
            with tracing.step_of(job):
                added: AddedUnrunLines = (
                    await self._added(job, fresh) if job.done_count < job.item_count else (None, None)
                )
                rewrites = await self._ordered(job, fresh, added) if job.ordered else (None, None)
                end = JobEnd(self._keep.results_ms(job), await self._response_status(job))
            await self._store.publish_job(job, token, added=added, rewrites=rewrites, end=end)
            self._steps.end_step(token)
            await hit("publish_committed")
            ended = await self._store.any_job(job_id)
            report_end(ended)
            if job_id in self._postponed:
                self._postponed.discard(job_id)
                metrics.finalization_retries.of("recovered").inc()
            return True
        except LostRace as error:
            log.info("publish_lease_lost", job=job_id, error=str(error))
            metrics.jobs_processed.of("skipped", "not_runnable_state").inc()
        except (BlobError, OSError) as error:
            await self._store.drop_step(job_id, token, _RETRY_MS)
            self._steps.end_step(token)
            log.warning("publish_postponed", job=job_id, error=str(error))
            tracing.postpone(job, error)
            metrics.finalization_retries.of("postponed").inc()
            metrics.jobs_processed.of("re_enqueued", "system_error").inc()
            if len(self._postponed) < _POSTPONED_MAX:
                self._postponed.add(job_id)
        await fresh.give_up()
        return False

    async def _response_status(self, job: Job) -> str:
        """Return the status in the answer of a background response.

        It is read only if a webhook reports it.
        """
        if job.kind is not JobKind.RESPONSE or not job.answered_count or job.output_file_id is None:
            return COMPLETED
        if not await self._store.wants_response_events(job.tenant_id):
            return COMPLETED
        reading = file_bytes(self._store, self._blobs, job.output_file_id, 0, job.output_bytes)
        line = b"".join([chunk async for chunk in reading])
        return response_status(line)

    async def _added(self, job: Job, fresh: PublishBlobs) -> tuple[UnrunLines | None, UnrunLines | None]:
        """Write the lines of items that were not run, for the output file and the error file."""
        answers, errors = LineWriter(fresh), LineWriter(fresh)
        try:
            if job.done_count < job.run_count:
                await self._write_rest(job, errors)
            if job.copied.count:
                await self._write_copies(job, answers, errors)
            added = await answers.finish(), await errors.finish()
        except BaseException:
            await answers.abort()
            await errors.abort()
            raise
        await hit("publish_rest_durable")
        return added

    async def _write_rest(self, job: Job, errors: LineWriter) -> None:
        """Write the lines of the items that never ran, in order of number."""
        assert job.closing is not None
        assert job.work_blob_id is not None
        outcome = OUTCOME_OF[job.closing]
        done = await self._done(job)
        for first, count, read_first, work_at, work_bytes in await self._store.unfinished_slices(job.id):
            numbers = [number for number in range(first, first + count) if not done[number]]
            if not numbers:
                continue
            work = await self._work_lines(job.work_blob_id, work_at, work_bytes)
            for number in numbers:
                custom_id = _custom_id_of(work, number - read_first)
                await errors.add(number, outcome, never_ran_line(job.id, number, custom_id, outcome))

    async def _write_copies(self, job: Job, answers: LineWriter, errors: LineWriter) -> None:
        """Write the lines of the items that take another item's line."""
        assert job.work_blob_id is not None
        at, size_bytes = job.copied.work_at, job.work_bytes - job.copied.work_at
        copies = CopyWriter(job, answers, errors)
        with ExitStack() as opened:
            try:
                sources: list[RunLines] = []
                results = ((job.output_file_id, True), (job.error_file_id, False)) if job.copied.deduplicated else ()
                for file_id, is_answered in results:
                    path = self._scratch / f"{file_id}-{self._entropy.token_bytes(8).hex()}"
                    extents = await self._all_extents(file_id) if file_id else []
                    lines = opened.enter_context(closing(await ResultCopy.open(self._blobs, path, extents)))
                    sources.append(RunLines(lines, await self._places(job, answered=is_answered), is_answered))
                await copies.write(self._blobs.stream(job.work_blob_id, at, size_bytes), sources)
            except BlobMissing as error:
                log.error("copied_lines_lost", job=job.id, error=str(error))
                await copies.write_lost()

    async def _work_lines(self, work_blob_id: str, at: int, size_bytes: int) -> list[bytes]:
        """Return lines of the work file; none if they are lost, since the job must end anyway."""
        try:
            return (await self._blobs.read(work_blob_id, at, size_bytes)).split(b"\n")
        except BlobMissing as error:
            log.error("work_file_gone", error=str(error))
            return []

    async def _ordered(
        self, job: Job, fresh: PublishBlobs, added: AddedUnrunLines
    ) -> tuple[Rewrite | None, Rewrite | None]:
        """Rewrite both result files in the order of the input.

        Keep them as they are if bytes of them are lost.
        """
        try:
            output = await self._rewrite(job, fresh, added[0], answered=True)
            return output, await self._rewrite(job, fresh, added[1], answered=False)
        except BlobMissing as error:
            log.error("ordered_output_failed", job=job.id, error=str(error))
            await fresh.give_up(kept=frozenset(one.placed.blob_id for one in added if one is not None))
            return None, None

    async def _done(self, job: Job) -> bytearray:
        """Return one byte for each item: 1 if it has an outcome."""
        done = bytearray(job.item_count)
        number = 0
        while page := await self._store.outcomes_page(job.id, number, _PAGE):
            for row in page:
                done[row[0]] = 1
            number = page[-1][0] + 1
        return done

    async def _rewrite(
        self, job: Job, fresh: PublishBlobs, added: UnrunLines | None, *, answered: bool
    ) -> Rewrite | None:
        """Rewrite one result file and its added lines in the order of the input."""
        file_id, at = (job.output_file_id, job.output_bytes) if answered else (job.error_file_id, job.error_bytes)
        places = await self._places(job, answered=answered)
        extents = await self._all_extents(file_id) if file_id else []
        if added is not None:
            extents.append((at, added.placed.size_bytes, added.placed.blob_id, added.placed.at))
            for number, _, size_bytes in added.lines():
                places.put(number, at, size_bytes)
                at += size_bytes
        if not places:
            return None
        numbers, moved, at = places.in_order(await self._input_lines(job)), array("q"), 0
        blob_id, writer = await fresh.begin_blob()
        source = await ResultCopy.open(self._blobs, self._scratch / f"{blob_id}-ordered", extents)
        try:
            buffer = bytearray()
            for number in numbers:
                old_at, size_bytes = places.get(number)
                buffer += source.read(old_at, size_bytes)
                moved.append(at)
                at += size_bytes
                if len(buffer) >= WRITE_BYTES:
                    await writer.write(bytes(buffer))
                    buffer.clear()
            await writer.write(bytes(buffer))
            await writer.finish()
        except BaseException:
            await writer.abort()
            raise
        finally:
            source.close()
        return Rewrite(Placed(blob_id, 0, at), numbers, moved)

    async def _places(self, job: Job, *, answered: bool) -> PlacesByItem:
        found = PlacesByItem(job.item_count)
        number = 0
        while page := await self._store.outcomes_page(job.id, number, _PAGE):
            for number, outcome, at, size_bytes in page:
                if (outcome == Outcome.ANSWERED) == answered:
                    found.put(number, at, size_bytes)
            number += 1
        return found

    async def _all_extents(self, file_id: str) -> list[tuple[int, int, str, int]]:
        found: list[tuple[int, int, str, int]] = []
        while page := await self._store.list_extents(file_id, found[-1][0] + found[-1][1] if found else 0, 1000):
            found.extend((extent.at, extent.size_bytes, extent.blob_id, extent.blob_at) for extent in page)
        return found

    async def _input_lines(self, job: Job) -> "array[int]":
        """Return each item's 1-based line in the input, from the trailer of the work file."""
        assert job.work_blob_id is not None
        lines = array("I")
        lines.frombytes(await self._blobs.read(job.work_blob_id, job.work_bytes, 4 * job.item_count))
        return lines


def _custom_id_of(work: list[bytes], index: int) -> bytes:
    try:
        return bytes(_custom_id.decode(work[index]).custom_id)
    except (IndexError, msgspec.DecodeError):
        return _NO_CUSTOM_ID


def report_end(job: Job | None) -> None:
    """Log, count and trace a job that has just ended."""
    _log_end(job)
    metrics.count_job_end(job)
    tracing.end_job(job)


def _log_end(job: Job | None) -> None:
    """Log the end of a batch, unless it was deleted at once.

    Background responses are too many to log.
    """
    if job is None or job.kind is not JobKind.BATCH:
        return
    why = {"why": job.errors[0].message} if job.errors else {}
    log.log(
        logging.WARNING if job.state is JobState.FAILED else logging.INFO,
        f"job_{job.state}",
        job=job.id,
        completed=job.answered_count,
        failed=job.item_count - job.answered_count,
        cost=units_text(job.cost_nano),
        **why,
    )
