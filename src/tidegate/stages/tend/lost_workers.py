"""Recovery from lost workers: adopt their durable answers, then free their slices.

A worker is lost when its heartbeat ran out. The order matters: an adopted answer is an outcome, so
its item is not run again. If a worker's log cannot be read now, its slices stay leased until it can
be, or until a time limit; no other worker's slices wait for that.

The end of a log may lie in the spool of the host that wrote it. A process that starts there
delivers it before it leases anything. Other processes leave such a log alone until the lease and
one sweep are over.
"""

from zlib import crc32

import msgspec
import structlog

from tidegate import metrics
from tidegate.core.answers import answer
from tidegate.core.errors import BlobError, BlobMissing, LostRace
from tidegate.core.files import AbandonedBlob, Placed
from tidegate.core.ids import split_item_id
from tidegate.core.nouns import Finished, JobFlush, Usage
from tidegate.core.ports import Blobs
from tidegate.core.states import Outcome
from tidegate.core.usage.prices import nano_of
from tidegate.store.store import Store

log = structlog.get_logger()

ADOPT_FOR_MS = 600_000
_PASS_MAX = 20
_STRANDED_MAX = 1_000
_READ_BYTES = 4 << 20


class _LoggedResponse(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _LoggedMembers(msgspec.Struct):
    """The costs of a line's answers, and the usage of each if the first did not fit."""

    input_cost: str = "0"
    cached_cost: str = "0"
    output_cost: str = "0"
    tries: list[Usage] | None = None


class _LogLine(msgspec.Struct):
    id: str
    response: _LoggedResponse
    tidegate: _LoggedMembers | None = None


_line = msgspec.json.Decoder(_LogLine)


class LostWorkers:
    def __init__(self, store: Store, blobs: Blobs) -> None:
        self._store = store
        self._blobs = blobs

    async def tend(self, spool_wait_ms: int = 0) -> int:
        """Declare overdue workers gone, adopt their logs, and free their slices.

        Return how many slices were freed.

        For `spool_wait_ms` after its lease, a log is left to the processes that can read its end.
        """
        for worker_id, host in (await self._store.overdue_workers(_PASS_MAX)).items():
            if await self._store.declare_gone(worker_id):
                log.warning("worker_lost", worker=worker_id, host=host)
        # Asked before the logs are adopted: another process may declare a worker gone meanwhile,
        # and its logs must be adopted before its slices are freed.
        stranded = await self._store.stranded_workers(_STRANDED_MAX)
        unread = await self.adopt_logs(spool_wait_ms)
        freed = 0
        for worker_id in stranded:
            if worker_id not in unread:
                freed += await self._store.reclaim_slices(worker_id)
        metrics.sweep_rows.of("skipped").inc(len(unread))
        metrics.slice_reclaims.inc(freed)
        metrics.startup_recovery.of("in_progress", "re_enqueued").inc(freed)
        return freed

    async def is_waiting(self) -> bool:
        """Return whether a lost worker has slices that are not free yet."""
        return bool(await self._store.stranded_workers(1))

    async def deliver_spool(self) -> int:
        """Record the answers that dead processes left in this host's spool.

        Return how many were new.

        That is done even if other processes gave the log up: items without an outcome get these.
        """
        delivered = 0
        for blob_id in await self._blobs.left_logs():
            recorded_to = await self._store.answers_recorded_to(blob_id)
            if recorded_to is None:
                continue
            try:
                delivered += await self._adopt(blob_id, recorded_to)
                await self._store.settle_blob(blob_id)
            except LostRace as error:
                log.info("log_already_collected", blob=blob_id, error=str(error))
        return delivered

    async def adopt_logs(self, spool_wait_ms: int = 0) -> set[str]:
        """Record the durable but uncommitted ends of lost workers' answer logs.

        Give up their other blobs.

        Return the workers whose logs could not be read and are to be tried again.
        """
        unread: dict[str, str] = {}
        while True:
            count_max = _PASS_MAX + len(unread)
            abandoned = await self._store.abandoned_blobs(count_max)
            for blob in abandoned:
                if blob.id in unread:
                    continue
                if blob.kind == "answers" and not await self._adopt_or_wait(blob, spool_wait_ms):
                    unread[blob.id] = blob.worker_id
                elif blob.kind in ("answers", "errors"):
                    await self._store.settle_blob(blob.id)
                else:
                    await self._store.give_up_blob(blob.id)
                    metrics.startup_recovery.of("unknown", "cleaned_up").inc()
                    metrics.sweep_rows.of("released").inc()
            if len(abandoned) < count_max:
                return set(unread.values())

    async def _adopt_or_wait(self, blob: AbandonedBlob, spool_wait_ms: int) -> bool:
        """Adopt a log; False if its lines cannot be read now and are worth a wait."""
        try:
            if blob.gone_for_ms < spool_wait_ms and not await self._blobs.holds_end(blob.id):
                return False
            await self._adopt(blob.id, blob.recorded_to)
        except BlobError as error:
            waits = blob.gone_for_ms < ADOPT_FOR_MS and not isinstance(error, BlobMissing)
            log.warning("log_unreadable", blob=blob.id, worker=blob.worker_id, given_up=not waits, error=str(error))
            return not waits
        except LostRace as error:
            log.info("log_already_collected", blob=blob.id, error=str(error))
        return True

    async def _adopt(self, blob_id: str, recorded_to: int) -> int:
        size_bytes = await self._blobs.recover(blob_id)
        adopted, at, read_bytes = 0, recorded_to, _READ_BYTES
        while size_bytes is not None and at < size_bytes:
            data = await self._blobs.read(blob_id, at, min(read_bytes, size_bytes - at))
            whole = data.rfind(b"\n") + 1
            if whole:
                adopted += await _record_lines(self._store, blob_id, at, data[:whole])
                at += whole
            elif len(data) == read_bytes:
                read_bytes *= 2
            else:
                break
        if adopted:
            log.info("answers_adopted", blob=blob_id, answers=adopted)
            metrics.startup_recovery.of("in_progress", "finalized").inc(adopted)
        return adopted


async def _record_lines(store: Store, blob_id: str, at: int, data: bytes) -> int:
    """Record lines, with one flush for each run of neighbouring lines of a job.

    Return how many were new.
    """
    flushes: list[JobFlush] = []
    jobs: dict[str, str | None] = {}
    for line in _lines(data):
        found = await _owner(store, jobs, line)
        if found is not None:
            job_id, finished = found
            last = flushes[-1] if flushes else None
            if last and last.job_id == job_id and last.answers_placed and _end(last.answers_placed) == at:
                last.answers.append(finished)
                placed = Placed(blob_id, last.answers_placed.at, last.answers_placed.size_bytes + len(line))
                flushes[-1] = JobFlush(job_id, last.answers, placed)
            else:
                flushes.append(JobFlush(job_id, [finished], Placed(blob_id, at, len(line))))
        at += len(line)
    if not flushes:
        return 0
    return sum(recorded.new_count for recorded in await store.record_outcomes(flushes, [], []))


def _lines(data: bytes) -> list[bytes]:
    return [line + b"\n" for line in data.split(b"\n")[:-1]]


def _end(placed: Placed) -> int:
    return placed.at + placed.size_bytes


async def _owner(store: Store, jobs: dict[str, str | None], line: bytes) -> tuple[str, Finished] | None:
    """Return the job and the outcome of a line; None for a torn line or a forgotten job."""
    try:
        decoded = _line.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    split = split_item_id(decoded.id)
    if split is None:
        return None
    part, number = split
    if part not in jobs:
        jobs[part] = await store.job_of_item(part)
    job_id = jobs[part]
    if job_id is None:
        return None
    try:
        _, usage = answer.read("", bytes(decoded.response.body))
    except answer.NotAnAnswer:
        return None
    paid = decoded.tidegate
    if paid and paid.tries:
        usage = Usage.total(paid.tries)
    cost_nano = (nano_of(paid.input_cost), nano_of(paid.cached_cost), nano_of(paid.output_cost)) if paid else (0, 0, 0)
    finished = Finished(number, Outcome.ANSWERED, len(line), number, "", usage, cost_nano=cost_nano, crc32=crc32(line))
    return job_id, finished
