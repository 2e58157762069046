"""The counts of everything in the store, for gauges."""

import msgspec

from tidegate.store.database.driver import Tx
from tidegate.store.database.table import Table, reads


class QueuedPart(msgspec.Struct, frozen=True):
    """The open parts of jobs that are equal in all but the job.

    `scope` is the kind of their share owner.
    """

    status: str
    model: str
    scope: str
    tenant: str
    size_class: str
    jobs: int
    work_units: int
    items: int
    age_ms: int


class StoreCensus(msgspec.Struct, frozen=True):
    """The counts of jobs by state, of outcomes by kind, of leased items and of workers."""

    jobs: dict[str, int]
    outcomes: dict[str, int]
    queue: list[QueuedPart]
    leased_items: int
    leased_age_ms: int
    workers: int
    active_workers: int


_SCOPES = {"team": "team", "key:": "key", "user": "user"}


class Census(Table):
    @reads
    async def census(self, tx: Tx) -> StoreCensus:
        """Count jobs, items, the queue and the workers.

        This reads each job once, so call it seldom.
        """
        jobs = await tx.all("census_jobs")
        totals = [sum(row[column] for row in jobs) for column in range(2, 6)]
        parts = [
            QueuedPart(row[0], row[1], _SCOPES.get(row[2], "organization"), *row[3:])
            for row in await tx.all("census_queue")
        ]
        [leased] = await tx.all("census_leased")
        [(workers,)] = await tx.all("census_workers")
        outcomes = dict(zip(("completed", "failed", "expired", "cancelled"), totals, strict=True))
        return StoreCensus({row[0]: row[1] for row in jobs}, outcomes, parts, leased[0], leased[2], workers, leased[1])
