"""Verbs about process incarnations and their heartbeats."""

from tidegate.core.nouns import Holding
from tidegate.core.states import JobState
from tidegate.store.driver import Tx
from tidegate.store.table import Table, beats, reads, writes


class Workers(Table):
    @beats
    async def enlist_worker(self, tx: Tx, worker_id: str, host: str, version: str, lease_ms: int) -> None:
        """A new incarnation introduces itself."""
        await tx.all("worker_put", id=worker_id, host=host, version=version, lease_ms=lease_ms)

    @beats
    async def beat(self, tx: Tx, worker_id: str, lease_ms: int) -> list[Holding] | None:
        """Stay alive, and return what this worker holds by the store. None: it was declared gone and must register again."""
        if await tx.one("worker_beat", id=worker_id, lease_ms=lease_ms) is None:
            return None
        rows = await tx.all("worker_leases", id=worker_id)
        return [
            Holding(
                job_id, first, token, JobState(state), JobState(closing) if closing else None, ms, bool(held), left_ms
            )
            for job_id, first, token, state, closing, ms, held, left_ms in rows
        ]

    @reads
    async def overdue_workers(self, tx: Tx, count_max: int) -> dict[str, str]:
        """Return the incarnations whose heartbeats ran out, and the host of each."""
        return {row[0]: row[1] for row in await tx.all("workers_overdue", count_max=count_max)}

    @writes
    async def declare_gone(self, tx: Tx, worker_id: str, *, leaving: bool = False) -> bool:
        """End an incarnation: because its heartbeat ran out, or because it leaves by itself."""
        return await tx.one("worker_gone", id=worker_id, leaving=int(leaving)) is not None

    @writes
    async def prune_workers(self, tx: Tx, keep_ms: int) -> None:
        await tx.all("workers_prune", keep_ms=keep_ms)

    @reads
    async def list_workers(self, tx: Tx, count_max: int) -> list[dict[str, object]]:
        return await tx.dicts("workers_list", count_max=count_max)
