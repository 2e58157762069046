"""Verbs about the outcomes of items: one flush is one transaction.

The job's row is locked first. Everything else (extents, counters, usage, offsets, charges) is
derived only from outcome rows that were new, so a replay adds and charges nothing.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate, groupby
from operator import add, attrgetter, itemgetter, mul

import msgspec
from msgspec.structs import replace

from tidegate.core.errors import LostRace
from tidegate.core.files import Placed
from tidegate.core.nouns import Finished, JobFlush, Recorded, Usage
from tidegate.core.states import JobState, Outcome
from tidegate.store.database.driver import Row, Tx
from tidegate.store.database.rows import tries_text
from tidegate.store.database.table import Table, reads, writes
from tidegate.store.jobs.canaries import SampleEnd, end_sample, let_go
from tidegate.store.jobs.job_controls import stop_job_over
from tidegate.store.jobs.job_events import record_lines

_OUTPUT_WEIGHT = 2
NO_COST = (0, 0, 0)
_BILLED = attrgetter("model", "deployment", "outcome", "tries")
# Input tokens and how many of them were cached, output tokens and how many of them were reasoning.
TokenCounts = tuple[int, int, int, int]


class Outcomes(Table):
    @writes
    async def record_outcomes(
        self,
        tx: Tx,
        flushes: list[JobFlush],
        finished_slices: list[tuple[str, int, str]],
        released_slices: list[tuple[str, int, str, int]],
    ) -> list[Recorded]:
        """Record outcomes of any number of jobs, finished slices, and slices that are given back.

        Slices are (job, first, token) and (job, first, token, delay in ms). A replay changes
        nothing.
        """
        logs, accounting = Logs(tx), FlowAccounting()
        books = _Books(tx, logs)
        for flush in sorted(flushes, key=lambda flush: flush.job_id):
            if books.has(flush.job_id):
                # The sums of a job give the places of its next lines, so write them first.
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

    @reads
    async def outcomes_page(
        self, tx: Tx, job_id: str, from_number: int, count_max: int
    ) -> list[tuple[int, str, int, int]]:
        """Return outcomes in order of number: (number, outcome, at, size in bytes)."""
        rows = await tx.all("outcomes_page", job_id=job_id, from_number=from_number, count_max=count_max)
        return [(row[0], row[1], row[2], row[3]) for row in rows]


class _Books:
    """The sums of jobs whose rows are locked, written together.

    Other flushes for them wait for the commit.
    """

    def __init__(self, tx: Tx, logs: "Logs") -> None:
        self._tx = tx
        self._logs = logs
        self._sums: dict[str, tuple[int, ...]] = {}
        self._open: list[Recorded] = []
        self.recorded: list[Recorded] = []

    def has(self, job_id: str) -> bool:
        return job_id in self._sums

    def add(self, recorded: Recorded, sums: tuple[int, ...]) -> None:
        """Note the sums that `job_add` adds to this job, in the order of its parameters."""
        self._sums[recorded.job_id] = sums
        self._open.append(recorded)

    def add_closed(self, recorded: Recorded) -> None:
        """Note a closed job, to which nothing is added."""
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
    tx: Tx, logs: "Logs", accounting: "FlowAccounting", books: _Books, flush: JobFlush, row: Row | None
) -> None:
    if row is None:
        unused = await _count_unused(logs, flush, [])
        if unused and flush.answers_placed:
            await tx.all("job_add_unused", id=flush.job_id, unused=unused)
            logs.look_through(flush.answers_placed, needed=False)
        books.add_closed(Recorded(flush.job_id, 0, unused, closed=True, complete=False))
        return
    output_file_id, error_file_id, output_bytes, error_bytes, share_owner, has_item_events = row
    leased = await _leased_ranges(tx, flush)
    output = ResultFile(flush.job_id, output_file_id, output_bytes)
    answers = await logs.add_lines(output, flush.answers, flush.answers_placed, lambda entry: True)
    errors = await logs.add_lines(
        ResultFile(flush.job_id, error_file_id, error_bytes),
        flush.errors,
        flush.errors_placed,
        lambda entry: _is_leased(leased, entry.token, entry.number),
    )
    allowed = [
        (flush.job_id, a.number, a.count, a.wait_ms, a.reason, a.hand_backs, tries_text(a.tries))
        for token, a in flush.attempts
        if _is_leased(leased, token, a.number)
    ]
    if allowed:
        await tx.many("attempt_put", sorted(allowed))
    unused = await _count_unused(logs, flush, answers.entries)
    tokens = _tokens([entry.usage for added in (answers, errors) for entry in added.entries])
    cost_nano = sum(sum(map(sum, [entry.cost_nano for entry in added.entries])) for added in (answers, errors))
    sizes = (answers.size_bytes, errors.size_bytes)
    new_count = len(answers.entries) + len(errors.entries)
    schema_invalid = sum(entry.is_schema_invalid for entry in errors.entries)
    # Lines that ingest found wrong have no model.
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


async def _count_unused(logs: "Logs", flush: JobFlush, new: list[Finished]) -> int:
    """Count the answers that were paid for in vain: repeated or late, but not replayed."""
    placed = flush.answers_placed
    if placed is None or len(new) == len(flush.answers):
        return 0
    recorded_to = await logs.recorded_to(placed.blob_id)
    ends = accumulate((entry.size_bytes for entry in flush.answers), initial=placed.at)
    next(ends)
    first = {id(entry) for entry in new}
    return sum(end > recorded_to and id(entry) not in first for entry, end in zip(flush.answers, ends, strict=True))


async def _leased_ranges(tx: Tx, flush: JobFlush) -> dict[str, list[tuple[int, int]]]:
    """Return the job's slices that these tokens still lease.

    Verdicts under other tokens are refused.
    """
    tokens = {entry.token for entry in flush.errors} | {token for token, _ in flush.attempts}
    leased = {}
    for token in sorted(tokens):
        rows = await tx.all("slice_tokens", job_id=flush.job_id, token=token)
        if rows:
            leased[token] = [(row[0], row[0] + row[1]) for row in rows]
    return leased


def _is_leased(leased: dict[str, list[tuple[int, int]]], token: str, number: int) -> bool:
    return any(low <= number < high for low, high in leased.get(token, ()))


# ---- the lines of a flush in the files of its jobs


class AddedLines(msgspec.Struct, frozen=True):
    """The lines that a flush added from one log to a file: the new entries and their bytes."""

    entries: list[Finished]
    size_bytes: int


class ResultFile(msgspec.Struct, frozen=True):
    """A result file of a job, with its present size."""

    job_id: str
    file_id: str
    size_bytes: int


def end_of(placed: Placed) -> int:
    return placed.at + placed.size_bytes


class Logs:
    """The logs from which one transaction takes lines.

    Their rows are written last, so that it never waits for a job while it has a log locked.
    """

    def __init__(self, tx: Tx) -> None:
        self._tx = tx
        self._recorded_to: dict[str, int] = {}
        self._uses: dict[str, int] = {}
        self._runs: list[tuple[str, int, int, str, int]] = []
        self._needed: set[str] = set()

    async def recorded_to(self, blob_id: str) -> int:
        """Return how far earlier transactions recorded a log.

        A log is recorded from its beginning, so lines that end there or earlier were committed
        before.
        """
        row = await self._tx.one("blob_recorded_to", id=blob_id)
        return 0 if row is None else int(row[0])

    def look_through(self, placed: Placed, *, needed: bool) -> None:
        """Note that a log is done up to the end of this range."""
        self._recorded_to[placed.blob_id] = max(end_of(placed), self._recorded_to.get(placed.blob_id, 0))
        if needed:
            self._needed.add(placed.blob_id)

    async def add_lines(
        self, file: ResultFile, entries: list[Finished], placed: Placed | None, allowed: Callable[[Finished], bool]
    ) -> AddedLines:
        """Insert the outcomes of one log's lines, and add the bytes of the new ones to the file."""
        lines = list(_wanted(entries, placed, allowed)) if placed is not None else []
        if not lines or placed is None:
            return AddedLines([], 0)
        rows, at = [], file.size_bytes
        for entry, _ in lines:
            rows.append((file.job_id, entry.number, entry.outcome.value, at, entry.size_bytes, entry.crc32))
            at += entry.size_bytes
        new = frozenset(row[0] for row in await self._tx.many_returning("outcome_put", rows))
        added = [line for line in lines if line[0].number in new]
        if len(added) < len(lines):
            await self._close_gaps(file, rows, new)
        at = file.size_bytes
        for blob_at, size_bytes in _runs(added):
            self._runs.append((file.file_id, at, size_bytes, placed.blob_id, blob_at))
            at += size_bytes
        self.look_through(placed, needed=bool(added))
        return AddedLines([entry for entry, _ in added], at - file.size_bytes)

    async def _close_gaps(
        self, file: ResultFile, rows: list[tuple[str, int, str, int, int, int | None]], new: frozenset[int]
    ) -> None:
        """Move lines forward in the file where lines before them were not new."""
        moved, at = [], file.size_bytes
        for _, number, _, thought_at, size_bytes, _ in rows:
            if number in new:
                if thought_at != at:
                    moved.append((at, file.job_id, number))
                at += size_bytes
        if moved:
            await self._tx.many("outcome_move", moved)

    async def settle_runs(self) -> None:
        """Write the extents of all files, many in one statement.

        A run that continues the file's last extent makes that longer; the others become extents.
        Only the first run of a file can do so, because neighbours were joined before.
        """
        runs, self._runs = self._runs, []
        if not runs:
            return
        firsts = list({run[0]: run for run in reversed(runs)}.values())
        places = [(size_bytes, file_id, at, blob_id, blob_at) for file_id, at, size_bytes, blob_id, blob_at in firsts]
        grown = {row[0] for row in await self._tx.many_returning("extent_grow", sorted(places, key=itemgetter(1)))}
        put = [run for run in runs if run[0] not in grown or run not in firsts]
        if put:
            await self._tx.many("extent_put", put)
        for _, _, _, blob_id, _ in put:
            self._uses[blob_id] = self._uses.get(blob_id, 0) + 1

    async def write_logs(self) -> dict[str, str]:
        """Write the rows of the logs. Return the owners of the logs."""
        owners = {}
        for blob_id, recorded_to in sorted(self._recorded_to.items()):
            uses = self._uses.get(blob_id, 0)
            found = await self._tx.one("blob_extend", id=blob_id, uses=uses, recorded_to=recorded_to)
            if found is None and blob_id in self._needed:
                raise LostRace(f"{blob_id} was condemned before its lines were recorded")
            if found is not None and found[0] is not None:
                owners[blob_id] = str(found[0])
        return owners


def _wanted(
    entries: list[Finished], placed: Placed, allowed: Callable[[Finished], bool]
) -> Iterator[tuple[Finished, int]]:
    """Yield the allowed lines with their places in the log.

    Of an item that comes twice, yield the first.
    """
    seen: set[int] = set()
    at = placed.at
    for entry in entries:
        if entry.number not in seen and allowed(entry):
            seen.add(entry.number)
            yield entry, at
        at += entry.size_bytes


def _runs(added: list[tuple[Finished, int]]) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of the log with these lines, with neighbours joined."""
    start, size_bytes = 0, 0
    for entry, at in added:
        if size_bytes and at != start + size_bytes:
            yield start, size_bytes
            size_bytes = 0
        if not size_bytes:
            start = at
        size_bytes += entry.size_bytes
    if size_bytes:
        yield start, size_bytes


# ---- the charges of a flush


def real_cost(usage: Usage) -> int:
    """Return the tokens that are charged: an output token costs two."""
    return usage.input_tokens + _OUTPUT_WEIGHT * usage.output_tokens


def _tokens(usages: list[Usage]) -> TokenCounts:
    """Return the tokens of these answers, in the order of their columns."""
    return (
        sum([one.input_tokens for one in usages]),
        sum([one.cached_tokens for one in usages]),
        sum([one.output_tokens for one in usages]),
        sum([one.reasoning_tokens for one in usages]),
    )


class FlowAccounting(msgspec.Struct):
    """The charges of one transaction.

    Their rows are locked last and in one order, so two flushes wait for each other only for a
    moment.
    """

    _flows: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)
    _jobs: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)
    _rates: dict[tuple[str, str], list[float]] = msgspec.field(default_factory=dict)
    _usage: dict[tuple[str, str, str], list[int]] = msgspec.field(default_factory=dict)

    async def add(self, tx: Tx, job_id: str, share_owner: str, blob_id: str, entries: list[Finished]) -> None:
        """Add the charges of items that are done, whose lines are in this log.

        Failed items are charged too, or failing would be free. But they do not count for the rate
        of a model.
        """
        entries = await _with_models(tx, job_id, entries)
        # Most lines of a flush come from one server, so sum them in runs.
        for (name, deployment, outcome, tries), group in groupby(entries, _BILLED):
            run, model = list(group), name or ""
            tokens = _tokens([one.usage for one in run])
            costs = [real_cost(one.usage) or one.units for one in run]
            cost = sum(costs)
            self._flows[model, share_owner] = self._flows.get((model, share_owner), 0) + cost
            self._jobs[job_id, model] = self._jobs.get((job_id, model), 0) + len(run)
            if outcome is Outcome.ANSWERED:
                took_ms, units = [one.took_ms for one in run], [one.units for one in run]
                sums = self._rates.setdefault((model, blob_id), [0] * 9)
                sums[0] += sum(units)
                sums[1] += cost
                sums[2] += len(run)
                sums[3] = max(sums[3], *took_ms)
                sums[4] += sum(took_ms)
                sums[5] += tokens[0]
                # Products of long requests exceed a database's integers.
                sums[6] += float(sum(map(mul, units, units)))
                sums[7] += float(sum(map(mul, units, took_ms)))
                sums[8] += float(sum(map(mul, units, costs)))
            if tries:
                for one in tries * len(run):
                    self._use((job_id, one.model, one.deployment), 1, _tokens([one.usage]), [one.cost_nano])
            elif outcome is Outcome.ANSWERED or deployment:
                # An answer that policy rejected was paid for all the same.
                self._use((job_id, model, deployment), len(run), tokens, [one.cost_nano for one in run])

    def _use(
        self, name: tuple[str, str, str], count: int, tokens: TokenCounts, costs_nano: list[tuple[int, int, int]]
    ) -> None:
        """Add the usage and the exact cost of answers.

        `name` is their job, model and deployment.
        """
        sums = self._usage.setdefault(name, [0] * 8)
        sums[:5] = map(add, sums, (count, *tokens))
        for cost_nano in costs_nano:
            if cost_nano != NO_COST:
                sums[5:] = [sums[5] + cost_nano[0], sums[6] + cost_nano[1], sums[7] + cost_nano[2]]

    async def write_charges(self, tx: Tx, owners: dict[str, str]) -> None:
        """Write all charges.

        A rate belongs to the worker that owns the log, so no other writes its row.
        """
        if not self._jobs:
            return
        jobs = [(done_count, job_id, model) for (job_id, model), done_count in sorted(self._jobs.items())]
        await tx.many("job_models_done", jobs)
        flows = [(cost, model, share_owner) for (model, share_owner), cost in sorted(self._flows.items())]
        await tx.many("flow_charge", flows)
        rates = [
            (model, owners[blob_id], *sums)
            for (model, blob_id), sums in sorted(self._rates.items())
            if blob_id in owners
        ]
        if rates:
            await tx.many("rate_add", rates)
        if self._usage:
            await tx.many(
                "usage_add",
                [
                    (model, deployment, *sums, job_id)
                    for (job_id, model, deployment), sums in sorted(self._usage.items())
                ],
            )


async def _with_models(tx: Tx, job_id: str, entries: list[Finished]) -> list[Finished]:
    """Return the entries with model and units.

    Those of adopted lines are looked up, once for each slice.
    """
    if all(entry.model is not None for entry in entries):
        return entries
    known: list[Finished] = []
    low, high, model, units = 0, 0, "", 0
    for entry in sorted(entries, key=lambda one: one.number):
        if entry.model is not None:
            known.append(entry)
            continue
        if not low <= entry.number < high:
            row = await tx.one("slice_of_item", job_id=job_id, number=entry.number)
            if row is None:
                continue
            low, high, model, units = row[0], row[0] + row[1], row[2], row[3] // max(1, row[1])
        known.append(
            Finished(
                entry.number, entry.outcome, entry.size_bytes, entry.slice_first, entry.token, entry.usage,
                entry.attempt_count, model, units, entry.deployment, entry.cost_nano,
            )
        )  # fmt: skip
    return known
