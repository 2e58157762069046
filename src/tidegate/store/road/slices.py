"""Verbs about slices that are not done: they are given back, or reclaimed from a lost worker.

A slice that was reclaimed several times becomes a suspect.
"""

import msgspec

from tidegate.core.errors import LostRace
from tidegate.store.database.driver import Tx
from tidegate.store.database.table import SLICE_COLUMNS, Table, reads, writes
from tidegate.store.road.leases import SUSPECT_AFTER


class Slices(Table):
    @writes
    async def release_slice(self, tx: Tx, job_id: str, first: int, token: str, delay_ms: int) -> bool:
        """Give a slice back; False if it is not leased under this token. Its outcomes remain."""
        return await tx.one("slice_release", job_id=job_id, first=first, token=token, delay_ms=delay_ms) is not None

    @writes
    async def release_tail(self, tx: Tx, job_id: str, first: int, token: str, to_item: int) -> bool:
        """Give back the items of a slice from this number on, none of which was sent.

        Keep those before it.

        Return False if nothing of it is leased under this token, or there is no such tail.
        """
        old = await tx.one("slice_get", job_id=job_id, first=first)
        if old is None:
            return False
        _, count, model, endpoint, read_first, work_at, work_bytes, work_units, lost_count, _, old_token = old
        if old_token == token and first + count == to_item:
            return True
        tail_units = max(1, work_units * (first + count - to_item) // count)
        shortened = await tx.one(
            "slice_shorten",
            job_id=job_id,
            first=first,
            token=token,
            to_item=to_item,
            work_units=max(1, work_units - tail_units),
        )
        if shortened is None:
            return False
        tail = (to_item, first + count - to_item, lost_count, read_first, work_at, work_bytes, tail_units)
        await _put_ready(tx, job_id, model, endpoint, [tail])
        return True

    @writes
    async def reclaim_slices(self, tx: Tx, worker_id: str) -> int:
        """Free the slices of a lost worker, and return how many there were.

        The loss counts against the items that it may have had in flight: the one item that it ran
        alone, or else all open items of its slices.
        """
        alone = await tx.one("worker_ran_alone", id=worker_id)
        freed = [_Freed(*row) for row in await tx.all("slices_reclaim", worker_id=worker_id)]
        if alone is not None:
            await _blame_one(tx, freed, *alone)
        else:
            await _blame_all(tx, freed)
        return len(freed)

    @writes
    async def run_alone(
        self, tx: Tx, worker_id: str, item: tuple[str, int] | None, *, is_checked: bool = False
    ) -> bool:
        """Note the one item, by job and number, that will be in flight from this worker.

        Return False if it is gone.

        Without an item, several may be in flight. `is_checked`: another item ran alone before it
        and survived.
        """
        job_id, number = item or (None, None)
        row = await tx.one("worker_runs_alone", id=worker_id, job_id=job_id, number=number, is_checked=int(is_checked))
        return row is not None

    @reads
    async def stranded_workers(self, tx: Tx, count_max: int) -> list[str]:
        """Return lost incarnations that still have slices."""
        return [row[0] for row in await tx.all("slices_stranded", count_max=count_max)]

    @reads
    async def unfinished_slices(self, tx: Tx, job_id: str) -> list[tuple[int, int, int, int, int]]:
        """Return slices that may have items without an outcome.

        Each is (first, count, read_first, work_at, work_bytes).
        """
        return [(row[0], row[1], row[2], row[3], row[4]) for row in await tx.all("slices_unfinished", job_id=job_id)]


class _Freed(msgspec.Struct, frozen=True):
    """A slice that lost its owner. `lost_count` does not include that owner yet."""

    job_id: str
    first: int
    count: int
    lost_count: int


async def _blame_all(tx: Tx, freed: list[_Freed]) -> None:
    """Count the loss against all open items of the worker: any may have been in flight.

    Suspects that were lost together get the same number of lost owners, so that the next worker
    sees them as one group. A suspect that was lost without others of its level is cut in two.
    """
    worst = max((one.lost_count for one in freed), default=0)
    levels = [worst + 1 if one.lost_count >= SUSPECT_AFTER else one.lost_count + 1 for one in freed]
    top = max(levels, default=0)
    for one, level in zip(freed, levels, strict=True):
        open_items = await _remember_loss(tx, one)
        await tx.all("slice_blame", job_id=one.job_id, first=one.first, lost_count=level)
        if level == top >= SUSPECT_AFTER:
            half = len(open_items) // 2
            is_single = levels.count(top) == 1
            parts = [open_items[:half], open_items[half:]] if is_single else [open_items]
            await _cut(tx, one, [part for part in parts if part])


async def _blame_one(tx: Tx, freed: list[_Freed], job_id: str, number: int, is_checked: int) -> None:
    """Count the loss against the one item that the worker ran alone."""
    for one in freed:
        if one.job_id != job_id or not one.first <= number < one.first + one.count:
            continue
        open_items = await _open_items(tx, one)
        if number in open_items:
            await tx.many("attempt_lost", [(job_id, number)])
            await tx.all("attempt_lost_alone", job_id=job_id, number=number, is_checked=is_checked)
            at = open_items.index(number)
            parts = [open_items[:at], [number], open_items[at + 1 :]]
            await _cut(tx, one, [part for part in parts if part])
            lost_count = max(SUSPECT_AFTER, one.lost_count + 1)
            await tx.all("slice_blame", job_id=job_id, first=number, lost_count=lost_count)


async def _open_items(tx: Tx, one: _Freed) -> list[int]:
    """Return the numbers of the slice's items without an outcome."""
    rows = await tx.all("slice_outcomes", job_id=one.job_id, first=one.first, count=one.count)
    done = {row[0] for row in rows}
    return [number for number in range(one.first, one.first + one.count) if number not in done]


async def _remember_loss(tx: Tx, one: _Freed) -> list[int]:
    """Count an attempt for each open item of a lost slice, since it may have been sent.

    Return these items.
    """
    open_items = await _open_items(tx, one)
    await tx.many("attempt_lost", [(one.job_id, number) for number in open_items])
    return open_items


async def _cut(tx: Tx, one: _Freed, parts: list[list[int]]) -> None:
    """Replace a slice by one slice for each part of its open items.

    All of them read the old byte range.
    """
    spans = [(part[0], part[-1] - part[0] + 1) for part in parts]
    if spans == [(one.first, one.count)]:
        return
    old = await tx.one("slice_get", job_id=one.job_id, first=one.first)
    if old is None or await tx.one("slice_drop", job_id=one.job_id, first=one.first) is None:
        raise LostRace(f"slice {one.first} of {one.job_id} moved while it was cut")
    _, _, model, endpoint, read_first, work_at, work_bytes, work_units, lost_count, _, _ = old
    share = max(1, work_units // one.count)
    chunks = [(first, count, lost_count, read_first, work_at, work_bytes, share * count) for first, count in spans]
    await _put_ready(tx, one.job_id, model, endpoint, chunks)


async def _put_ready(
    tx: Tx, job_id: str, model: str, endpoint: str, chunks: list[tuple[int, int, int, int, int, int, int]]
) -> None:
    """Write parts of a slice that was leased before as ready slices.

    Each is (first, count, lost_count, read_first, work_at, work_bytes, work_units).
    """
    [(now,)] = await tx.all("now")
    await tx.copy(
        "slices",
        SLICE_COLUMNS,
        [(job_id, first, count, model, endpoint, "ready", now, 1, *place) for first, count, *place in chunks],
    )
