"""Verbs about the events of single items, for jobs whose door wants them.

No other job has rows here.

The events of a job are numbered without gaps. Its creation is event 1, and its end has the number
after the last row. A row is written in the transaction of its change, and stands for several
events.
"""

from collections.abc import Sequence

import msgspec

from tidegate.core import ids
from tidegate.core.nouns import Job
from tidegate.store.database.driver import Row, Tx
from tidegate.store.database.rows import job_from
from tidegate.store.database.table import Table, reads

RUNNING, RECORDED = "running", "recorded"
# The types of item events by their public names, in the order in which their events are numbered.
ITEM_EVENTS = ("item.running", "item.completed", "item.failed", "item.cancelled")


class JobEventRow(msgspec.Struct, frozen=True):
    """Events `number` to `number + count - 1` of a job.

    Items from `first` on began to run, or lines were added to both result files.
    """

    number: int
    count: int
    kind: str
    first: int
    output_at: int = 0
    output_bytes: int = 0
    error_at: int = 0
    error_bytes: int = 0
    happened_at: int = 0


class RecordedTo(msgspec.Struct, frozen=True):
    """The sizes of both result files after one flush, and its time."""

    output_to: int
    error_to: int
    happened_at: int


class ItemTries(msgspec.Struct, frozen=True):
    """The number of an item's repeated tries, and the wait until the next one."""

    number: int
    count: int
    wait_ms: int


class JobLook(msgspec.Struct, frozen=True):
    """A job and its open items at one moment.

    - `running`: how many items run.
    - `leased`: the ranges of items that workers have leased, each as the first item and the count.
    - `tries`: the items that were tried before.
    """

    job: Job
    running: int
    leased: list[tuple[int, int]]
    tries: list[ItemTries]


class WorkSpan(msgspec.Struct, frozen=True):
    """The place of a slice in the work file. `read_first` is the first item in the byte range."""

    first: int
    count: int
    read_first: int
    work_at: int
    work_bytes: int


class OutcomePlace(msgspec.Struct, frozen=True):
    """The place of an item's line: in the output file if answered, else in the error file."""

    number: int
    outcome: str
    at: int
    size_bytes: int


class JobEvents(Table):
    @reads
    async def job_events(self, tx: Tx, job_id: str, after: int, count_max: int) -> list[JobEventRow]:
        """Return rows with events after the one of this number, in order."""
        rows = await tx.all("job_events_page", job_id=job_id, after=after, count_max=count_max)
        return [JobEventRow(*row) for row in rows]

    @reads
    async def job_event_total(self, tx: Tx, job_id: str) -> int:
        """Return the number of a job's last event before its end."""
        row = await tx.one("job_events_total", job_id=job_id)
        return int(row[0]) if row else 0

    @reads
    async def recorded_moments(self, tx: Tx, job_id: str) -> list[RecordedTo]:
        """Return when the result files grew, in order."""
        return [RecordedTo(*row) for row in await tx.all("job_events_recorded", job_id=job_id)]

    @reads
    async def job_progress(self, tx: Tx, tenant_id: str, job_id: str) -> tuple[Job, int] | None:
        """Return a job and how many of its items run now; None if there is no such job."""
        rows = await tx.dicts("job_get", tenant_id=tenant_id, id=job_id)
        if not rows:
            return None
        [(running,)] = await tx.all("job_running_items", job_id=job_id)
        return job_from(rows[0]), int(running)

    @reads
    async def job_look(self, tx: Tx, tenant_id: str, job_id: str) -> JobLook | None:
        """Return a job and its open items; None if there is no such job."""
        rows = await tx.dicts("job_get", tenant_id=tenant_id, id=job_id)
        if not rows:
            return None
        job, running = job_from(rows[0]), await tx.one("job_running_items", job_id=job_id)
        leased = await tx.all("job_leased_spans", job_id=job_id)
        tries = await tx.all("job_attempts", job_id=job_id, first=0, count=job.item_count)
        return JobLook(
            job,
            int(running[0]) if running else 0,
            [(row[0], row[1]) for row in leased],
            [ItemTries(*row) for row in tries],
        )

    @reads
    async def leased_spans(self, tx: Tx, job_id: str) -> list[tuple[int, int]]:
        """Return the ranges of leased items, each as the first item and the count."""
        return [(row[0], row[1]) for row in await tx.all("job_leased_spans", job_id=job_id)]

    @reads
    async def item_tries(self, tx: Tx, job_id: str, first: int, count: int) -> list[ItemTries]:
        """Return the tries of those of these items that were tried before."""
        return [ItemTries(*row) for row in await tx.all("job_attempts", job_id=job_id, first=first, count=count)]

    @reads
    async def work_spans(self, tx: Tx, job_id: str, first: int, count: int) -> list[WorkSpan]:
        """Return where these items lie in the work file; nothing after the job's end."""
        return [WorkSpan(*row) for row in await tx.all("slices_of_span", job_id=job_id, first=first, count=count)]

    @reads
    async def item_places(self, tx: Tx, job_id: str, first: int, count: int) -> list[OutcomePlace]:
        """Return the places of the result lines of these items, as far as they are done."""
        return [OutcomePlace(*row) for row in await tx.all("outcomes_of_span", job_id=job_id, first=first, count=count)]

    @reads
    async def outcomes_within(
        self, tx: Tx, job_id: str, start: int, end: int, *, is_output: bool
    ) -> list[OutcomePlace]:
        """Return the items whose result lines begin between two places of a result file."""
        rows = await tx.all("outcomes_within", job_id=job_id, start=start, end_at=end, is_output=int(is_output))
        return [OutcomePlace(*row) for row in rows]


async def begin_events(tx: Tx, job_id: str) -> None:
    """Record events of each item of this job from now on."""
    await tx.all("job_events_begin", job_id=job_id)


async def record_running(tx: Tx, job_id: str, spans: Sequence[tuple[int, int]]) -> None:
    """Record that the items of these spans (first, count) were leased for the first time."""
    for first, count in spans:
        if (number := await _next_number(tx, job_id, count)) is None:
            return
        await _put(tx, job_id, JobEventRow(number, count, RUNNING, first))
        await notify_callback(tx, job_id, [(item, ITEM_EVENTS[0]) for item in range(first, first + count)])


async def record_lines(
    tx: Tx, job_id: str, output: tuple[int, int], errors: tuple[int, int], items: Sequence[tuple[int, str]]
) -> None:
    """Record that lines were added to both files, each given as (at, size).

    `items` are their numbers and events, answers first.
    """
    if not items or (number := await _next_number(tx, job_id, len(items))) is None:
        return
    await _put(tx, job_id, JobEventRow(number, len(items), RECORDED, 0, *output, *errors))
    await notify_callback(tx, job_id, items)


async def notify_callback(tx: Tx, job_id: str, items: Sequence[tuple[int, str]]) -> None:
    """Write deliveries of these items' events into the outbox, if the job's callback wants them."""
    wanted: Row | None = await tx.one("webhook_wanted_of_job", job_id=job_id)
    if wanted is None:
        return
    types = set(str(wanted[0]).split(","))
    rows = [(_event_id(job_id, item, kind), kind, item, job_id) for item, kind in items if kind in types]
    if rows:
        await tx.many("webhook_item_event_put", rows)


def _event_id(job_id: str, item: int, kind: str) -> str:
    name = ids.item_id(job_id, item * len(ITEM_EVENTS) + ITEM_EVENTS.index(kind))
    return "evt_" + name.removeprefix("batch_req_")


async def _next_number(tx: Tx, job_id: str, count: int) -> int | None:
    """Count more events and return the number of the first; None if the job's items have none."""
    row = await tx.one("job_events_count", job_id=job_id, count=count)
    return int(row[0]) - count + 1 if row else None


async def _put(tx: Tx, job_id: str, row: JobEventRow) -> None:
    await tx.all(
        "job_event_put",
        job_id=job_id,
        number=row.number,
        count=row.count,
        kind=row.kind,
        first=row.first,
        output_at=row.output_at,
        output_bytes=row.output_bytes,
        error_at=row.error_at,
        error_bytes=row.error_bytes,
    )
