"""Verbs about process incarnations and their heartbeats."""

import msgspec

from tidegate.core.nouns import EVERY_JOB, Holding, WorkerDuty
from tidegate.core.ports import ReportedWorker, WorkerReport
from tidegate.core.states import JobState
from tidegate.store.database.driver import Tx
from tidegate.store.database.table import Table, beats, frees, reads, writes

ENDED_LATELY_MS = 600_000
REPORTS_MAX = 1_000


class Workers(Table):
    @beats
    async def enlist_worker(
        self,
        tx: Tx,
        worker_id: str,
        host: str,
        version: str,
        lease_ms: int,
        duty: WorkerDuty = EVERY_JOB,
    ) -> None:
        """Add a new incarnation of a process."""
        row = {"id": worker_id, "host": host, "version": version, "lease_ms": lease_ms}
        does = {"runs_items": int(duty.runs_items), "share_owner": duty.share_owner, "servers": duty.servers}
        await tx.all("worker_put", **row, **does)

    @beats
    async def beat(self, tx: Tx, worker_id: str, lease_ms: int) -> list[Holding] | None:
        """Keep an incarnation alive, and return the slices that it has leased by the store.

        None if it was declared gone: then it must register again.
        """
        if await tx.one("worker_beat", id=worker_id, lease_ms=lease_ms) is None:
            return None
        rows = await tx.all("worker_leases", id=worker_id)
        return [
            Holding(
                job_id,
                first,
                token,
                JobState(state),
                JobState(closing) if closing else None,
                ms,
                bool(must_wait),
                left_ms,
            )
            for job_id, first, token, state, closing, ms, must_wait, left_ms in rows
        ]

    @reads
    async def overdue_workers(self, tx: Tx, count_max: int) -> dict[str, str]:
        """Return the incarnations whose heartbeats ran out, with their hosts."""
        return {row[0]: row[1] for row in await tx.all("workers_overdue", count_max=count_max)}

    @frees
    async def declare_gone(self, tx: Tx, worker_id: str, *, leaving: bool = False) -> bool:
        """End an incarnation because its heartbeat ran out, or because it leaves."""
        return await tx.one("worker_gone", id=worker_id, leaving=int(leaving)) is not None

    @frees
    async def prune_workers(self, tx: Tx, keep_ms: int) -> None:
        await tx.all("workers_prune", keep_ms=keep_ms)

    @writes
    async def report_worker(self, tx: Tx, worker_id: str, report: WorkerReport) -> None:
        """Store the report of a process on what keeps it from working."""
        text = "" if report == WorkerReport() else msgspec.json.encode(report).decode()
        await tx.all("worker_report", id=worker_id, report=text)

    @reads
    async def worker_reports(self, tx: Tx) -> list[ReportedWorker]:
        """Return the processes that run items or ended lately, each with its last report."""
        rows = await tx.all("worker_reports", lately_ms=ENDED_LATELY_MS, count_max=REPORTS_MAX)
        return [
            ReportedWorker(host, bool(is_alive), max(0, silent_ms), report_from(text))
            for host, is_alive, silent_ms, text in rows
        ]

    @reads
    async def list_workers(self, tx: Tx, count_max: int) -> list[dict[str, object]]:
        return await tx.dicts("workers_list", count_max=count_max)


def report_from(text: str) -> WorkerReport:
    """Return the report of a process; an empty one if it is unreadable."""
    try:
        return msgspec.json.decode(text, type=WorkerReport) if text else WorkerReport()
    except msgspec.MsgspecError:
        # Another version of this program wrote it.
        return WorkerReport()
