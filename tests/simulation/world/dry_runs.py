"""Callers who ask what would become of a job before they make it: nothing is kept of the question, and its answer comes true."""

from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from tests.simulation.world.disk import Disk
from tests.simulation.world.plan import Plan
from tidegate.core.budgets.budget import Budget
from tidegate.core.nouns import Caller, JobRequest
from tidegate.core.usage.prices import Price
from tidegate.settings import Settings
from tidegate.store.store import Store
from tidegate.web.context import WebContext
from tidegate.web.jobs.creation import JobCreation
from tidegate.web.jobs.validation import JobEstimate, JobValidation


class _Reader:
    """Reads inputs as a process would whose disk has no faults."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    async def stream(self, blob_id: str, at: int, count: int) -> AsyncGenerator[bytes, None]:
        yield self._disk.read(blob_id, at, count)


class _Names:
    """What a router knows of names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def knows(self, model: str) -> bool:
        return model in self._names

    def prices(self, model: str) -> list[Price | None]:
        return []

    def budgets(self, model: str) -> list[tuple[Budget, ...]]:
        return []


class DryRuns:
    def __init__(
        self, plan: Plan, store: Store, disk: Disk, scratch: Path, connection: Any, breaks: Callable[[str], None]
    ) -> None:
        self._connection = connection
        self._scratch = scratch
        self._breaks = breaks
        self._estimates: dict[str, JobEstimate] = {}
        estate = plan.estate
        settings = Settings()
        settings = msgspec.structs.replace(
            settings, scheduler=msgspec.structs.replace(settings.scheduler, scope_preference=estate.scope_preference)
        )
        parts = SimpleNamespace(
            store=store,
            blobs=_Reader(disk),
            settings=settings,
            router=_Names((*estate.names, estate.stronger or "")),
            scratch=scratch,
            servers="",
            wakes=None,
            model_of=dict,
            tenants=lambda: WebContext.tenants(cast(WebContext, SimpleNamespace(live_config=None, settings=settings))),
        )
        context = cast(WebContext, parts)
        self._validation = JobValidation(context, JobCreation(context, cast(Any, None)))

    async def ask(self, caller: Caller, job_id: str, request: JobRequest) -> None:
        before = self._kept()
        self._estimates[job_id] = await self._validation.validate(caller, request)
        if self._kept() != before:
            self._breaks(f"a dry run of {job_id} kept something: {before} became {self._kept()}")

    def _kept(self) -> tuple[int, list[str]]:
        """How often a row was written, and what lies in the directory for passing files."""
        return self._connection.total_changes(), sorted(path.name for path in self._scratch.iterdir())

    def judge(self) -> None:
        """Every job whose input was read came out as its dry run forecast."""
        sql = "select item_count, errors from jobs where id = ? and (begun_at is not null or errors <> '[]')"
        for job_id, estimate in self._estimates.items():
            for item_count, errors in self._connection.execute(sql, (job_id,)):
                was_refused = not item_count and errors != "[]"
                if was_refused != bool(estimate.errors) or (item_count and estimate.item_count != item_count):
                    self._breaks(
                        f"a dry run counted {estimate.item_count} items and {len(estimate.errors)} errors of {job_id}, "
                        f"which has {item_count} items and {errors}"
                    )
