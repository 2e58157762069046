"""Verbs about what became of items: recording outcomes while a job runs, and publishing it at its end.

The job's row is locked first. Everything else (extents, counters, usage, offsets, accounting) comes only from the rows that were new.
"""

from collections import Counter
from itertools import accumulate

from msgspec.structs import replace

from tidegate.core.errors import ApiProblem, LostRace
from tidegate.core.nouns import Finished, Job, JobEnd, JobFlush, LineError, Recorded, Rewrite, UnrunLines, Usage
from tidegate.core.states import JOB_ENDED, JobState, Outcome
from tidegate.store.database.driver import Row, Tx
from tidegate.store.database.rows import errors_text, job_from, tries_text
from tidegate.store.database.table import Table, reads, writes
from tidegate.store.jobs.canaries import SampleEnd, end_sample, let_go
from tidegate.store.jobs.job_controls import stop_job_over
from tidegate.store.jobs.job_events import record_lines
from tidegate.store.jobs.retry_files import show_merged
from tidegate.store.road.flow_accounting import FlowAccounting
from tidegate.store.road.log_lines import Logs, ResultFile
from tidegate.store.road.result_parts import cut_results
from tidegate.store.tenants.files import hold_blobs, release_extents
from tidegate.store.tenants.webhooks import put_events

ABANDONED = LineError(
    "abandoned",
    "An operator gave up publishing this batch: its files hold what was recorded, and what never ran is in neither.",
)
_OUTCOME_COLUMNS = ("job_id", "number", "outcome", "at", "size_bytes")


class Outcomes(Table):
    @writes
    async def record_outcomes(
        self,
        tx: Tx,
        flushes: list[JobFlush],
        finished_slices: list[tuple[str, int, str]],
        released_slices: list[tuple[str, int, str, int]],
    ) -> list[Recorded]:
        """One flush, one transaction: outcomes of any number of jobs, the slices that are done with, the slices that are given back.

        Slices are (job, first, token) and (job, first, token, delay in ms). A replay finds nothing new and changes nothing.
        """
        logs, accounting = Logs(tx), FlowAccounting()
        books = _Books(tx, logs)
        for flush in sorted(flushes, key=lambda flush: flush.job_id):
            if books.has(flush.job_id):
                # What was added to a job says where the next lines of it stand.
                await books.write_sums()
            row = await tx.one("job_lock", id=flush.job_id)
            await _record_job(tx, logs, accounting, books, flush, row)
        await books.write_sums()
        if finished_slices:
            await tx.many("slice_finish", sorted(finished_slices))
        for job_id, first, token, delay_ms in sorted(released_slices):
            await tx.all("slice_release", job_id=job_id, first=first, token=token, delay_ms=delay_ms)
        await accounting.write_charges(tx, await logs.write_logs())
        for recorded in books.recorded:
            if recorded.let_go:
                await let_go(tx, recorded.job_id)
        return books.recorded

    @writes
    async def publish_job(
        self,
        tx: Tx,
        job: Job,
        token: str,
        *,
        added: tuple[UnrunLines | None, UnrunLines | None] = (None, None),
        rewrites: tuple[Rewrite | None, Rewrite | None] = (None, None),
        end: JobEnd,
    ) -> None:
        """The end of a job: lines of what was not run, rewritten files if order was asked for, visible files, the end state. Of both pairs
        the first is for the output file."""
        counts = Counter(outcome for one in added if one for outcome in one.outcomes)
        output_bytes, error_bytes = (
            rewrite.placed.size_bytes if rewrite else size_bytes + (one.placed.size_bytes if one else 0)
            for rewrite, one, size_bytes in zip(rewrites, added, (job.output_bytes, job.error_bytes), strict=True)
        )
        published = await tx.one(
            "job_publish",
            id=job.id,
            token=token,
            answered=counts[Outcome.ANSWERED],
            failed=counts[Outcome.FAILED],
            expired=counts[Outcome.EXPIRED],
            cancelled=counts[Outcome.CANCELLED],
            schema_invalid=sum(one.schema_invalid for one in added if one),
            output_bytes=output_bytes,
            error_bytes=error_bytes,
        )
        if published is None:
            rows = await tx.dicts("job_any", id=job.id)
            if rows and job_from(rows[0]).state in JOB_ENDED:
                return
            raise LostRace(f"{job.id} is published by someone else")
        if any(rewrites) or job.merged_file_id or job.shape.output_file_bytes_max:
            await _hold_results(tx, job)
        places = ((job.output_file_id, job.output_bytes), (job.error_file_id, job.error_bytes))
        for (file_id, at), one, rewrite in zip(places, added, rewrites, strict=True):
            if one:
                await _append_lines(tx, job, file_id, at, one)
            if rewrite and file_id:
                await _replace_file(tx, job.id, file_id, rewrite)
        if job.door is not None and (rest := added[1]):
            items = [
                (number, "item.cancelled" if outcome is Outcome.CANCELLED else "item.failed")
                for number, outcome, _ in rest.lines()
            ]
            place = (job.error_bytes, rest.placed.size_bytes)
            await record_lines(tx, job.id, (job.output_bytes, 0), place, items)
        await _show_files(tx, job, end.keep_ms)
        await show_merged(tx, job, end.keep_ms)
        await tx.all("slices_drop_job", job_id=job.id)
        await tx.all("blob_release", id=job.work_blob_id, uses=1)
        await put_events(tx, job.id, end.response_status)

    @writes
    async def abandon_job(self, tx: Tx, tenant_id: str, job_id: str, keep_ms: int | None) -> Job | None:
        """End a job that cannot be published, with what was recorded of it; None when there is none. Only `finalizing` can be given up."""
        rows = await tx.dicts("job_get", tenant_id=tenant_id, id=job_id)
        if not rows:
            return None
        job = job_from(rows[0])
        if any(error.code == ABANDONED.code for error in job.errors):
            return job
        if await tx.one("job_abandon", tenant_id=tenant_id, id=job_id, errors=errors_text([ABANDONED])) is None:
            raise ApiProblem(
                409,
                "batch_not_abandonable",
                f"This batch is {job.state}; only one that is finalizing can be abandoned. A running one can be cancelled.",
                param="batch_id",
            )
        await _hold_results(tx, job)
        await _show_files(tx, job, keep_ms)
        await show_merged(tx, job, keep_ms)
        await tx.all("slices_drop_job", job_id=job_id)
        await tx.all("blob_release", id=job.work_blob_id, uses=1)
        await put_events(tx, job.id)
        return job_from((await tx.dicts("job_any", id=job_id))[0])

    @reads
    async def outcomes_page(
        self, tx: Tx, job_id: str, from_number: int, count_max: int
    ) -> list[tuple[int, str, int, int]]:
        """Outcomes in order of number: (number, outcome, at, size in bytes)."""
        rows = await tx.all("outcomes_page", job_id=job_id, from_number=from_number, count_max=count_max)
        return [(row[0], row[1], row[2], row[3]) for row in rows]


async def _hold_results(tx: Tx, job: Job) -> None:
    """Hold the result files of a job that ends and the blobs behind them, in the order in which every transaction takes rows."""
    results = [one for one in (job.output_file_id, job.error_file_id) if one]
    await tx.many_returning("file_lock", sorted((one,) for one in results))
    await hold_blobs(tx, results)


async def _show_files(tx: Tx, job: Job, keep_ms: int | None) -> None:
    """A job ended: its result files become visible as they now stand, and empty ones never do. `job` is how it stood before.

    `output_expires_after` wins over `keep_ms`."""
    if job.output_expires_after_s is not None:
        keep_ms = job.output_expires_after_s * 1000
    ended = job_from((await tx.dicts("job_any", id=job.id))[0])
    failures = ended.failed_count + ended.expired_count + ended.cancelled_count
    for file_id, size_bytes, line_count in (
        (job.output_file_id, ended.output_bytes, ended.answered_count),
        (job.error_file_id, ended.error_bytes, failures),
    ):
        if line_count:
            await tx.all(
                "file_show", id=file_id, size_bytes=size_bytes, line_count=line_count, expires_after_ms=keep_ms
            )
        else:
            await tx.all("file_drop", id=file_id)
    await cut_results(tx, job, ended, keep_ms)


class _Books:
    """Sums of jobs whose rows are locked, written together: everyone else who records for them waits until this commits."""

    def __init__(self, tx: Tx, logs: Logs) -> None:
        self._tx = tx
        self._logs = logs
        self._sums: dict[str, tuple[int, ...]] = {}
        self._open: list[Recorded] = []
        self.recorded: list[Recorded] = []

    def has(self, job_id: str) -> bool:
        return job_id in self._sums

    def add(self, recorded: Recorded, sums: tuple[int, ...]) -> None:
        """What `job_add` adds to this job, in the order of its parameters."""
        self._sums[recorded.job_id] = sums
        self._open.append(recorded)

    def add_closed(self, recorded: Recorded) -> None:
        """Nothing is added to this one."""
        self._open.append(recorded)

    async def write_sums(self) -> None:
        await self._logs.settle_runs()
        rows = [(*sums, job_id) for job_id, sums in self._sums.items()]
        added = {row[0]: row for row in await self._tx.many_returning("job_add", rows)} if rows else {}
        for recorded in self._open:
            _, state, is_over, is_sampled = added.get(recorded.job_id, (recorded.job_id, None, False, False))
            complete = state == JobState.FINALIZING
            is_stopped = bool(is_over) and await stop_job_over(self._tx, recorded.job_id)
            verdict = await end_sample(self._tx, recorded.job_id) if is_sampled and not is_stopped else None
            is_stopped |= verdict is SampleEnd.STOPPED
            if complete or is_stopped:
                await self._tx.all("job_models_close", job_id=recorded.job_id)
            goes_on = verdict is SampleEnd.LET_GO
            self.recorded.append(replace(recorded, complete=complete, stopped=is_stopped, let_go=goes_on))
        self._sums, self._open = {}, []


async def _record_job(
    tx: Tx, logs: Logs, accounting: FlowAccounting, books: _Books, flush: JobFlush, row: Row | None
) -> None:
    if row is None:
        unused = await _count_unused(logs, flush, [])
        if unused and flush.answers_placed:
            await tx.all("job_add_unused", id=flush.job_id, unused=unused)
            logs.look_through(flush.answers_placed, needed=False)
        books.add_closed(Recorded(flush.job_id, 0, unused, closed=True, complete=False))
        return
    output_file_id, error_file_id, output_bytes, error_bytes, share_owner, has_item_events = row
    held = await _held_tokens(tx, flush)
    output = ResultFile(flush.job_id, output_file_id, output_bytes)
    answers = await logs.add_lines(output, flush.answers, flush.answers_placed, lambda entry: True)
    errors = await logs.add_lines(
        ResultFile(flush.job_id, error_file_id, error_bytes),
        flush.errors,
        flush.errors_placed,
        lambda entry: _holds(held, entry.token, entry.number),
    )
    allowed = [
        (flush.job_id, a.number, a.count, a.wait_ms, a.reason, a.hand_backs, tries_text(a.tries))
        for token, a in flush.attempts
        if _holds(held, token, a.number)
    ]
    if allowed:
        await tx.many("attempt_put", sorted(allowed))
    unused = await _count_unused(logs, flush, answers.entries)
    usage = Usage.total((answers.usage, errors.usage))
    cost_nano = sum(sum(entry.cost_nano) for entry in (*answers.entries, *errors.entries))
    tokens = (usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.reasoning_tokens)
    sizes = (answers.size_bytes, errors.size_bytes)
    new_count = len(answers.entries) + len(errors.entries)
    schema_invalid = sum(entry.is_schema_invalid for entry in errors.entries)
    # Lines that ingest found bad have no model.
    unsent = sum(entry.model == "" for entry in errors.entries)
    books.add(
        Recorded(flush.job_id, new_count, unused, closed=False, complete=False),
        (len(answers.entries), len(errors.entries), *tokens, *sizes, unused, cost_nano, schema_invalid, unsent),
    )
    if has_item_events:
        items = [
            *((one.number, "item.completed") for one in answers.entries),
            *((one.number, "item.failed") for one in errors.entries),
        ]
        await record_lines(
            tx, flush.job_id, (output_bytes, answers.size_bytes), (error_bytes, errors.size_bytes), items
        )
    for added, placed in ((answers, flush.answers_placed), (errors, flush.errors_placed)):
        if added.entries and placed:
            await accounting.add(tx, flush.job_id, share_owner, placed.blob_id, added.entries)


async def _count_unused(logs: Logs, flush: JobFlush, new: list[Finished]) -> int:
    """Answers that came second or too late were paid for in vain, unless they are a replay of those that were first."""
    placed = flush.answers_placed
    if placed is None or len(new) == len(flush.answers):
        return 0
    recorded_to = await logs.recorded_to(placed.blob_id)
    ends = accumulate((entry.size_bytes for entry in flush.answers), initial=placed.at)
    next(ends)
    first = {id(entry) for entry in new}
    return sum(end > recorded_to and id(entry) not in first for entry, end in zip(flush.answers, ends, strict=True))


async def _held_tokens(tx: Tx, flush: JobFlush) -> dict[str, list[tuple[int, int]]]:
    """Which tokens still hold which of the job's slices: the verdicts of anyone else are refused."""
    tokens = {entry.token for entry in flush.errors} | {token for token, _ in flush.attempts}
    held = {}
    for token in sorted(tokens):
        rows = await tx.all("slice_tokens", job_id=flush.job_id, token=token)
        if rows:
            held[token] = [(row[0], row[0] + row[1]) for row in rows]
    return held


def _holds(held: dict[str, list[tuple[int, int]]], token: str, number: int) -> bool:
    return any(low <= number < high for low, high in held.get(token, ()))


async def _append_lines(tx: Tx, job: Job, file_id: str | None, at: int, added: UnrunLines) -> None:
    """Add lines behind a result file, and the outcomes that they are."""
    places = accumulate(added.sizes, initial=at)
    rows = (
        (job.id, number, outcome.value, line_at, size_bytes)
        for (number, outcome, size_bytes), line_at in zip(added.lines(), places, strict=False)
    )
    await tx.copy("outcomes", _OUTCOME_COLUMNS, rows)
    placed = added.placed
    if await tx.one("blob_keep", id=placed.blob_id, size_bytes=placed.size_bytes, uses=1) is None:
        raise LostRace(f"{placed.blob_id} was collected before {job.id} was published")
    await tx.all(
        "extent_put", file_id=file_id, at=at, size_bytes=placed.size_bytes, blob_id=placed.blob_id, blob_at=placed.at
    )


async def _replace_file(tx: Tx, job_id: str, file_id: str, rewrite: Rewrite) -> None:
    await tx.one("file_lock", id=file_id)
    await release_extents(tx, file_id)
    if await tx.one("blob_keep", id=rewrite.placed.blob_id, size_bytes=rewrite.placed.size_bytes, uses=1) is None:
        raise LostRace(f"{rewrite.placed.blob_id} was collected before {job_id} was published")
    await tx.all(
        "extent_put",
        file_id=file_id,
        at=0,
        size_bytes=rewrite.placed.size_bytes,
        blob_id=rewrite.placed.blob_id,
        blob_at=rewrite.placed.at,
    )
    await tx.many(
        "outcome_move", ((at, job_id, number) for number, at in zip(rewrite.numbers, rewrite.places, strict=True))
    )
