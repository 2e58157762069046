"""Verbs over a store that only tests need: one job where the store starts several, and a file whatever its owner and state."""

from __future__ import annotations

from tidegate.core.errors import LostRace
from tidegate.core.nouns import File, JobStart
from tidegate.store.driver import Tx
from tidegate.store.rows import file_from
from tidegate.store.store import Store


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
