"""Planted bugs: each breaks one rule of the engine in one place, and the simulation must notice. One that it does not notice is a check
that is missing.

Most change one statement of queries/*.sql; the others replace one function for as long as they are planted.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from msgspec.structs import replace

from tests.simulation.world.disk import Disk
from tests.simulation.world.mutants_capacity import CAPACITY
from tests.simulation.world.mutants_controls import CONTROLS
from tests.simulation.world.mutants_doors import DOORS
from tests.simulation.world.mutants_lines import LINES
from tests.simulation.world.mutants_shape import SHAPE
from tests.simulation.world.planting import Mutant, both, patch, sql
from tests.simulation.world.witness import MARK
from tidegate.core import retry
from tidegate.core.budgets.ledger import Ledger
from tidegate.core.errors import StoreUnavailable, Throttled
from tidegate.core.store_clock import Steady
from tidegate.stages import lease, record
from tidegate.stages.stage_leases import StageLeases
from tidegate.stages.tend.lost_workers import LostWorkers
from tidegate.store.database import sqlite_clock
from tidegate.store.road import leases
from tidegate.upstream.routing.slots import SlotDemand
from tidegate.worker import leased_work
from tidegate.worker.call_rules import KeyStates
from tidegate.worker.leasing import SliceReader

_TOKEN = "and lease_token = :token"
_OPEN = "and state in ('in_progress', 'cancelling')"
_LEASED = "or not exists (select 1 from slices s where s.job_id = {}.id and s.state = 'leased')"


async def _forget_unknown(self: record.Recorder, flushes: Any, finished: Any, released: Any) -> Any:
    try:
        return await self._store.record_outcomes(flushes, finished, released)
    except StoreUnavailable:
        return []


_lease_picks = leases.Leases.lease_picks


async def _lease_and_forget(self: Any, worker_id: str, picks: Any, *bounds: Any, **more: Any) -> Any:
    taken = await _lease_picks(self, worker_id, picks, *bounds, **more)
    for piece in taken:
        await self.release_slice(piece.job_id, piece.first, piece.token, 0)
    return taken


async def _reclaim_first(self: LostWorkers, spool_wait_ms: int) -> int:
    for worker_id in await self._store.overdue_workers(20):
        await self._store.declare_gone(worker_id)
    freed = 0
    for worker_id in await self._store.stranded_workers(20):
        freed += await self._store.reclaim_slices(worker_id)
    await self.adopt_logs(spool_wait_ms)
    return freed


def _lose_tails(self: Disk) -> None:
    for blob in self.blobs.values():
        if MARK.search(blob.data):
            del blob.data[blob.data.rstrip(b"\n").rfind(b"\n") + 1 :]


_extend_lease = leased_work.LeasedWork.extend_lease
_take = lease.LeaseStage.lease_slices
_decide = retry.decide
_read_items = lease.read_items


async def _take_without_deadline(*arguments: Any) -> Any:
    return [(piece, 1e12) for piece, _ in await _take(*arguments)]


def _decide_harshly(error: Any, *arguments: Any) -> Any:
    verdict = _decide(error, *arguments)
    if isinstance(error, Throttled) and isinstance(verdict, retry.RetryAt):
        if arguments[0] + 1 >= arguments[3].attempts_max:
            return retry.GiveUp(error.code, error.message)
        return replace(verdict, counts=True)
    return verdict


async def _read_without_waits(blobs: Any, leased: Any) -> Any:
    items = await _read_items(blobs, leased)
    for item in items:
        item.wait_ms = 0
    return items


async def _begin_whatever_happened(self: SliceReader, state: Any) -> bool:
    self._leased_work.forget(state)
    items = await self._stage.read(state.slice)
    self._leased_work.add(state, items or ())
    self._settler.settle_slice(state)
    return True


async def _keep_leftovers(self: StageLeases) -> None:
    await asyncio.sleep(0)


# What each stands for, and how it is planted.
MUTANTS: dict[str, Mutant] = {
    "lines_unsynced": Mutant(
        "power",
        "the last lines of a log are not on the disk when they are recorded",
        patch(Disk, "lose_unsynced", _lose_tails),
    ),
    "finish_any_lease": Mutant(
        "late_returns",
        "slice_finish does not ask for the token",
        sql("slice_finish", _TOKEN, "and (lease_token = :token or 1 = 1)"),
    ),
    "release_any_lease": Mutant(
        "late_returns", "slice_release does not ask for the token", sql("slice_release", _TOKEN, "")
    ),
    "last_result_wins": Mutant(
        "late_returns",
        "a second result replaces the first",
        sql("outcome_put", "do nothing", "do update set at = excluded.at, size_bytes = excluded.size_bytes"),
    ),
    "lease_unrecorded": Mutant(
        "quiet",
        "slices are handed out without being held",
        patch(leases.Leases, "lease_picks", _lease_and_forget),
    ),
    "forget_before_commit": Mutant(
        "lost_answers",
        "what the store did not acknowledge is forgotten",
        patch(record.Recorder, "_commit", _forget_unknown),
    ),
    "record_after_close": Mutant(
        "late_records",
        "record does not ask whether the job is open",
        both(sql("job_lock", _OPEN, ""), sql("job_add", _OPEN, "")),
    ),
    "publish_without_step": Mutant(
        "late_steps",
        "publishing does not ask for the step",
        sql("job_publish", "and step_token = :token", ""),
    ),
    "shorter_wait_wins": Mutant(
        "clock_back",
        "a shorter deferral overwrites a longer one",
        sql("attempt_put", "attempts.not_before > excluded.not_before", "attempts.not_before < excluded.not_before"),
    ),
    "waits_forgotten": Mutant(
        "rests", "a deferral does not outlive its worker", patch(lease, "read_items", _read_without_waits)
    ),
    "clock_steps_taken": Mutant(
        "clock_set",
        "a step of the machine's clock is not taken out of the store's time",
        patch(sqlite_clock, "going_on_from", lambda now_ms, wall_ms: Steady()),
    ),
    "windows_left_behind": Mutant(
        "clock_set",
        "the store's time jumps, and rate windows do not move along",
        patch(Ledger, "move", lambda self, ms: None),
    ),
    "leases_left_behind": Mutant(
        "clock_set",
        "the store's time jumps, and the leases of living workers end by that",
        sql("clock_move_workers", "alive_until + :jump_ms", "alive_until + 0 * :jump_ms"),
    ),
    "losses_uncounted": Mutant(
        "poison",
        "a lost owner is not counted",
        sql("slice_blame", "lost_count = :lost_count", "lost_count = 0 * :lost_count"),
    ),
    "reclaim_before_adopt": Mutant(
        "deaths", "slices are freed before logs are adopted", patch(LostWorkers, "tend", _reclaim_first)
    ),
    "heartbeat_ignored": Mutant(
        "late_beats",
        "calls go on after the lease ran out",
        both(
            patch(leased_work.LeasedWork, "extend_lease", lambda self, until_ms: _extend_lease(self, float("inf"))),
            patch(SlotDemand, "own_until_ms", lambda self: float("inf")),
        ),
    ),
    "close_at_once": Mutant(
        "closings",
        "a job closes while its calls are out",
        both(
            sql("jobs_draining", _LEASED.format("j"), "or 1 = 1"),
            sql("job_close", _LEASED.format("jobs"), "or 1 = 1"),
        ),
    ),
    "garbage_ignores_uses": Mutant(
        "quiet", "blobs in use are collected", sql("blobs_condemn_unused", "and uses = 0", "")
    ),
    "deadline_ignored": Mutant(
        "closings", "calls go on after the window", patch(lease.LeaseStage, "lease_slices", _take_without_deadline)
    ),
    "throttling_counts": Mutant("throttled", "a 429 uses up an attempt", patch(retry, "decide", _decide_harshly)),
    "lost_while_read": Mutant(
        "late_beats",
        "what is lost or closed while it is read is sent anyway",
        patch(SliceReader, "_begin_slice", _begin_whatever_happened),
    ),
    "steps_left_behind": Mutant(
        "lost_answers",
        "a step whose end is unknown is kept",
        patch(StageLeases, "give_back_leftovers", _keep_leftovers),
    ),
    "done_slice_handed_back": Mutant(
        "slow_records",
        "a slice that is done but not committed is handed back",
        patch(record.Recorder, "is_settling", lambda self, *key: False),
    ),
    "suspects_together": Mutant(
        "poison",
        "suspects are leased together",
        sql("slices_lease", "s.lost_count < 3 or s.first in", "1 = 1 or s.first in"),
    ),
    "alone_in_company": Mutant(
        "poison",
        "an item is called alone while others are in flight",
        patch(leased_work.LeasedWork, leased_work.LeasedWork.send_one_at_a_time.__name__, lambda self: None),
    ),
    "losses_unchecked": Mutant(
        "lonely_poison",
        "three losses of an item alone are enough, whatever became of others",
        sql(
            "attempt_lost_alone",
            "(alone_losses = 0 or cast(:is_checked as bigint) = 1)",
            "cast(:is_checked as bigint) >= 0",
        ),
    ),
    "start_twice": Mutant(
        "late_steps",
        "ingest does not ask for its step",
        sql("job_start", "state = 'validating' and step_token = :token", "(step_token = :token or 1 = 1)"),
    ),
    "revocation_ignored": Mutant(
        "revoked", "a key that was revoked goes on", patch(KeyStates, "denial", lambda self, leased: None)
    ),
    **CAPACITY,
    **DOORS,
    **SHAPE,
    **CONTROLS,
    **LINES,
}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Run with one bug; with none when there is no name."""
    with ExitStack() as stack:
        if name is not None:
            MUTANTS[name].plant(stack)
        yield
