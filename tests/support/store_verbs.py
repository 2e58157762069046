"""Verbs over a store that only tests need: one where the store takes several, and what no part of the program asks."""

from __future__ import annotations

from typing import Any

from tidegate.core.budgets.budget import Budget, BudgetRequest
from tidegate.core.errors import LostRace
from tidegate.core.files import File
from tidegate.core.nouns import JobStart, LeasedSlice
from tidegate.core.schedule.snapshot import Pick, Why
from tidegate.store.database.driver import Tx
from tidegate.store.database.postgres import PostgresDriver
from tidegate.store.database.rows import file_from
from tidegate.store.store import Store


def postgres_driver(url: str, *, pool_size: int = 2, timeout_ms: int = 20_000, pooler: str = "none") -> PostgresDriver:
    return PostgresDriver(url, pool_size=pool_size, statement_timeout_ms=timeout_ms, pooler=pooler)


async def granted(store: Store, one: Budget, requests: int, tokens: int = 0) -> int:
    """How many requests a budget lets pass now."""
    [grant] = await store.debit_budgets([BudgetRequest((one,), requests, tokens)])
    return grant.requests


async def start_job(store: Store, start: JobStart) -> None:
    """Start one job; LostRace when it was closed or taken over meanwhile."""
    if await store.start_jobs([start]):
        raise LostRace(f"{start.job_id} was closed or taken over while it was ingested")


async def any_file(store: Store, file_id: str) -> File | None:
    """Return a file whatever its state and owner."""

    async def read(tx: Tx) -> File | None:
        rows = await tx.dicts("file_any", id=file_id)
        return file_from(rows[0]) if rows else None

    return await store._driver.read(read)


async def lease_slices(
    store: Store, worker_id: str, job_id: str, model: str, count_max: int, token: str, why: Why = Why.FIFO
) -> list[LeasedSlice]:
    """Take up to this many ready slices of one job and model."""
    return await store.lease_picks(worker_id, [(Pick(job_id, model, count_max, why), token)])


async def slice_counts(store: Store, job_id: str) -> dict[str, int]:
    """Return how many slices of a job are in which state."""

    async def read(tx: Tx) -> dict[str, int]:
        connection: Any = tx._connection  # type: ignore[attr-defined]
        select = "select state, count(*) from slices where job_id = {} group by state"
        if store._driver.dialect == "sqlite":
            rows = list(connection.execute(select.format("?"), (job_id,)))
        else:
            rows = await connection.fetch(select.format("$1"), job_id)
        return {row[0]: row[1] for row in rows}

    return await store._driver.read(read)


async def run_statement(store: Store, statement: str, **parameters: Any) -> list[tuple[Any, ...]]:
    """Run one statement of the store in a transaction of its own and return its rows."""

    async def write(tx: Tx) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in await tx.all(statement, **parameters)]

    return await store._driver.write(write)
