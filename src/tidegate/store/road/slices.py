"""Verbs about slices and leases."""

from collections.abc import Sequence
from operator import itemgetter

import msgspec

from tidegate.core.answer_terms import answers_from
from tidegate.core.errors import LostRace
from tidegate.core.job_shape import shape_from
from tidegate.core.nouns import Attempts, LeasedSlice
from tidegate.core.schedule.snapshot import Pick
from tidegate.store.database.driver import Row, Tx
from tidegate.store.database.rows import limits_from, tries_from
from tidegate.store.database.table import SLICE_COLUMNS, Table, reads, writes
from tidegate.store.jobs.job_events import record_running

# Slices that lost so many owners are suspected of having killed them. The statements say the same number, as their index must.
SUSPECT_AFTER = 2
ALL_SUSPECTS = 1 << 40
# So many of a job's slices that never lost an owner are left while a culprit is searched for in it: an item that is run alone needs others
# to be compared with. A culprit that is not found after so many losses keeps nothing waiting.
KEPT_FOR_CHECKS = 2
SEARCH_LOSSES_MAX = 16


class Slices(Table):
    @writes
    async def lease_picks(
        self,
        tx: Tx,
        worker_id: str,
        picks: Sequence[tuple[Pick, str]],
        suspects_max: int = ALL_SUSPECTS,
        *,
        keeps_rest: bool = False,
    ) -> list[LeasedSlice]:
        """Take what was picked, each pick under a token that the caller made; a replay gives the same slices. All in one transaction: the
        sooner a choice is a lease, the fewer others choose the same. The worker holds at most `suspects_max` suspect slices afterwards;
        with `keeps_rest` it leaves a few others for checks."""
        # Jobs first and in one order, what is written of their models last and in that order too: so transactions never wait in a circle.
        doors = await _open(tx, worker_id, sorted(picks, key=lambda one: one[0].job_id))
        fresh = [(pick, token) for pick, token in picks if (door := doors.get(token)) and not door.is_held]
        taken = await _lease(tx, worker_id, fresh, suspects_max, KEPT_FOR_CHECKS if keeps_rest else 0)
        held: list[LeasedSlice] = []
        stamps: set[tuple[str, str]] = set()
        begun: set[str] = set()
        first_time: dict[str, list[tuple[int, int]]] = {}
        for pick, token in picks:
            door = doors.get(token)
            if door is None or door.is_held:
                held += await _held(tx, worker_id, pick, token)
                continue
            rows = taken.get(token, [])
            held += [await _leased(tx, pick, door, row) for row in rows]
            if door.has_item_events:
                first_time.setdefault(pick.job_id, []).extend((row[2], row[3]) for row in rows if row[-1] == 1)
            if rows and door.is_old:
                stamps.add((pick.job_id, pick.model))
            if rows and not door.has_begun:
                begun.add(pick.job_id)
        for job_id, spans in sorted(first_time.items()):
            await record_running(tx, job_id, spans)
        for job_id in sorted(begun):
            await tx.all("job_begin", job_id=job_id)
            await tx.all("job_models_begun", job_id=job_id)
        for job_id, model in sorted(stamps):
            await tx.all("job_models_leased", job_id=job_id, model=model)
        return held

    @writes
    async def rest_job(self, tx: Tx, job_id: str, model: str, wait_ms: int) -> None:
        """Nothing of this job and model is worth a look for so long: its own budgets allow nothing."""
        await tx.all("job_models_rest", job_id=job_id, model=model, wait_ms=wait_ms)

    @writes
    async def release_slice(self, tx: Tx, job_id: str, first: int, token: str, delay_ms: int) -> bool:
        """Give a slice back; what of it is done stays done. False: it was no longer held under this token."""
        return await tx.one("slice_release", job_id=job_id, first=first, token=token, delay_ms=delay_ms) is not None

    @writes
    async def release_tail(self, tx: Tx, job_id: str, first: int, token: str, to_item: int) -> bool:
        """Give back the items of a slice from this number on, none of which was sent, and keep those before it. False: nothing of
        it was held under this token, or there is no such tail."""
        old = await tx.one("slice_get", job_id=job_id, first=first)
        if old is None:
            return False
        _, count, model, endpoint, read_first, work_at, work_bytes, work_units, lost_count, _, held_by = old
        if held_by == token and first + count == to_item:
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
        """Free the slices of a worker that is gone, and charge the loss to what it may have had in flight: the one item that it ran
        alone, or else every open item that it held. Says how many slices were freed."""
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
        """Say which item, by job and number, is about to be the only one in flight from this worker; None: several may be. `is_checked`:
        another item was run alone before it and survived. False: the worker is gone."""
        job_id, number = item or (None, None)
        row = await tx.one("worker_runs_alone", id=worker_id, job_id=job_id, number=number, is_checked=int(is_checked))
        return row is not None

    @reads
    async def stranded_workers(self, tx: Tx, count_max: int) -> list[str]:
        """Incarnations that are gone and still hold slices."""
        return [row[0] for row in await tx.all("slices_stranded", count_max=count_max)]

    @reads
    async def unfinished_slices(self, tx: Tx, job_id: str) -> list[tuple[int, int, int, int, int]]:
        """Slices that may hold items without an outcome: (first, count, read_first, work_at, work_bytes)."""
        return [(row[0], row[1], row[2], row[3], row[4]) for row in await tx.all("slices_unfinished", job_id=job_id)]


class _Door(msgspec.Struct, frozen=True):
    """A job that is open for a lease. `is_old`: its last one was over a second ago. `is_held`: this very lease was made before. `job` is
    what its slices say of it."""

    has_begun: bool
    is_old: bool
    is_held: bool
    job: Row

    @property
    def has_item_events(self) -> bool:
        """Whether what becomes of each item is recorded as an event."""
        return bool(self.job[-1])


async def _open(tx: Tx, worker_id: str, picks: Sequence[tuple[Pick, str]]) -> dict[str, _Door]:
    """The jobs of these picks that are open, by token."""
    asked = [(token, pick.model, pick.job_id, worker_id) for pick, token in picks]
    rows = await tx.many_returning("job_open_for_lease", asked)
    doors = {row[0]: _Door(True, bool(row[1]), bool(row[2]), row[3:]) for row in rows}
    for pick, token in picks:
        if token not in doors:
            row = await tx.one("job_open_to_begin", job_id=pick.job_id)
            if row is not None:
                doors[token] = _Door(False, True, False, row[1:])
    return doors


async def _lease(
    tx: Tx, worker_id: str, picks: Sequence[tuple[Pick, str]], suspects_max: int, kept: int
) -> dict[str, list[Row]]:
    """What was taken, by token, in order of number."""
    asked = [
        (
            pick.job_id,
            pick.model,
            suspects_max,
            worker_id,
            kept,
            SEARCH_LOSSES_MAX,
            pick.slice_count,
            token,
            pick.why.value,
        )
        for pick, token in picks
    ]
    taken: dict[str, list[Row]] = {}
    for row in sorted(await tx.many_returning("slices_lease", asked), key=itemgetter(2)):
        taken.setdefault(row[0], []).append(row)
    return taken


async def _held(tx: Tx, worker_id: str, pick: Pick, token: str) -> list[LeasedSlice]:
    """What a lease that was made before holds still, whatever became of its job."""
    rows = await tx.all("slices_of_token", job_id=pick.job_id, token=token, worker_id=worker_id)
    if not rows:
        return []
    job = await tx.one("job_of_lease", job_id=pick.job_id)
    assert job is not None, "a slice has a job"
    door = _Door(True, False, True, job[1:])
    return [await _leased(tx, pick, door, row) for row in rows]


async def _leased(tx: Tx, pick: Pick, door: _Door, row: Row) -> LeasedSlice:
    token, endpoint, first, count, read_first, work_at, work_bytes, work_units, lost_count, lease_count = row
    (
        tenant_id,
        work_blob_id,
        expires_in_ms,
        tenant,
        share_owner,
        key_id,
        user,
        team,
        limits,
        answers,
        shape,
        trace,
        interactive_in_ms,
        _,
    ) = door.job
    span = {"job_id": pick.job_id, "first": first, "count": count}
    done: frozenset[int] = frozenset()
    attempts: dict[int, Attempts] = {}
    if lease_count > 1:
        done = frozenset(found[0] for found in await tx.all("slice_outcomes", **span))
        for found in await tx.all("slice_attempts", **span):
            number, tried, wait_ms, reason, hand_backs, alone_losses, tries = found
            attempts[number] = Attempts(number, tried, wait_ms, reason, hand_backs, alone_losses, tries_from(tries))
    return LeasedSlice(
        pick.job_id,
        tenant_id,
        endpoint,
        pick.model,
        first,
        count,
        read_first,
        work_blob_id,
        work_at,
        work_bytes,
        work_units,
        lost_count,
        token,
        expires_in_ms,
        tenant,
        share_owner,
        key_id,
        user,
        team,
        limits_from(limits),
        done,
        attempts,
        answers_from(answers),
        shape_from(shape).retry,
        shape_from(shape).betas,
        trace,
        interactive_in_ms,
    )


class _Freed(msgspec.Struct, frozen=True):
    """A slice that lost its owner; `lost_count` does not count that owner yet."""

    job_id: str
    first: int
    count: int
    lost_count: int


async def _blame_all(tx: Tx, freed: list[_Freed]) -> None:
    """Nothing says which of the worker's items were in flight, so all of its open items may have been. Suspects that were lost together
    lost the same number of owners from then on, so that the next worker sees them as one group. A suspect that was lost without other
    suspects of its level is cut in two."""
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
    """The worker ran this item alone: nothing else was in flight."""
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
    """The numbers of its items that have no outcome."""
    rows = await tx.all("slice_outcomes", job_id=one.job_id, first=one.first, count=one.count)
    done = {row[0] for row in rows}
    return [number for number in range(one.first, one.first + one.count) if number not in done]


async def _remember_loss(tx: Tx, one: _Freed) -> list[int]:
    """Each open item of a slice that lost its owner may have been called: that is the reason of a repeat. Returns these items."""
    open_items = await _open_items(tx, one)
    await tx.many("attempt_lost", [(one.job_id, number) for number in open_items])
    return open_items


async def _cut(tx: Tx, one: _Freed, parts: list[list[int]]) -> None:
    """Replace a slice by one slice per part of its open items; all of them read the old byte range."""
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
    """Parts of a slice that was leased before: (first, count, lost_count, read_first, work_at, work_bytes, work_units)."""
    [(now,)] = await tx.all("now")
    await tx.copy(
        "slices",
        SLICE_COLUMNS,
        [(job_id, first, count, model, endpoint, "ready", now, 1, *place) for first, count, *place in chunks],
    )
