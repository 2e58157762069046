"""A store full of waiting work, made in bulk: so many tenants with a job on each of so many models. No blobs: nothing of it is run."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.store_verbs import lease_slices
from tidegate.core.schedule import Why
from tidegate.core.schedule.share_owner import tenant_owner
from tidegate.core.states import JobKind
from tidegate.store.database.driver import Tx
from tidegate.store.database.table import SLICE_COLUMNS
from tidegate.store.store import Store

SLICE_ITEMS = 64
ITEM_UNITS = 500
_DAY_MS = 24 * 3600 * 1000
JOB_ZEROS = (
    "answered_count", "failed_count", "expired_count", "cancelled_count", "unused_count", "input_tokens", "cached_tokens",
    "output_tokens", "reasoning_tokens", "output_bytes", "error_bytes", "work_bytes", "prompt_bytes", "shared_prefix_bytes",
    "step_not_before", "step_failures", "ordered", "prefix_order", "ingest_bytes",
)  # fmt: skip
_JOB = (
    "id", "tenant_id", "endpoint", "input_file_id", "window_text", "state", "created_at", "expires_at", "begun_at", "invalid_lines",
    "errors", "item_count", "work_blob_id", "output_file_id", "error_file_id", "share_owner", "queue", "kind",
)  # fmt: skip
_JOB_MODEL = (
    "job_id", "model", "item_count", "slice_count", "work_units", "share_owner", "created_at", "expires_at", "due_at", "begun_at",
    "queue",
)  # fmt: skip
_FLOW = ("model", "share_owner", "tenant_id", "state", "weight_milli", "served", "served_tokens", "changed_at")
_RATE = ("model", "minute", "worker_id", "units", "tokens", "items")


@dataclass(frozen=True, slots=True)
class Backlog:
    """`item_count` items in all, spread evenly; a job has at least one slice."""

    tenant_count: int
    model_count: int
    item_count: int

    def models(self) -> list[str]:
        return [f"model-{number:02}" for number in range(self.model_count)]

    def job_ids(self, model: str) -> list[str]:
        return [_id(tenant, model) for tenant in range(self.tenant_count)]

    @property
    def job_count(self) -> int:
        return self.tenant_count * self.model_count

    @property
    def slices_per_job(self) -> int:
        return max(1, self.item_count // self.job_count // SLICE_ITEMS)


async def fill(store: Store, backlog: Backlog) -> None:
    """Everything in a few bulk inserts."""
    now = await store.now_ms()

    async def body(tx: Tx) -> None:
        jobs = [(tenant, model) for model in backlog.models() for tenant in range(backlog.tenant_count)]
        slices = backlog.slices_per_job
        await tx.copy("jobs", (*_JOB, *JOB_ZEROS), [_job(*one, slices, now) for one in jobs])
        await tx.copy("job_models", _JOB_MODEL, [_job_model(*one, slices, now) for one in jobs])
        await tx.copy("flows", _FLOW, [_flow(*one, now) for one in jobs])
        await tx.copy("slices", SLICE_COLUMNS, _slices(jobs, slices, now))
        rates = [
            (model, now // 60_000 - minute, f"w{worker}", 100_000, 90_000, 200)
            for model in backlog.models()
            for minute in range(15)
            for worker in range(8)
        ]
        await tx.copy("rates", _RATE, rates)

    await store._driver.write(body)


async def put_in_flight(store: Store, backlog: Backlog, worker_count: int, slices_each: int) -> list[str]:
    """Workers that hold slices of many flows, as they would while everything runs."""
    workers = [f"worker-{number}" for number in range(worker_count)]
    for number, worker in enumerate(workers):
        await store.enlist_worker(worker, "bench", "0", _DAY_MS)
        for turn in range(slices_each):
            models = backlog.models()
            model = models[turn % len(models)]
            job_id = backlog.job_ids(model)[(number * slices_each + turn) % backlog.tenant_count]
            await lease_slices(store, worker, job_id, model, 1, f"{worker}-{turn}", Why.FAIR)
    return workers


def _id(tenant: int, model: str) -> str:
    return f"batch_{tenant:05}{model}"


def _job(tenant: int, model: str, slices: int, now: int) -> tuple[Any, ...]:
    owner = f"tenant-{tenant:05}"
    plain = (
        _id(tenant, model),
        owner,
        "/v1/chat/completions",
        "file_x",
        "24h",
        "in_progress",
        now - tenant,
        now + _DAY_MS,
        now,
    )
    return (
        *plain,
        "fail",
        "[]",
        slices * SLICE_ITEMS,
        "blob_x",
        f"out_{_id(tenant, model)}",
        f"err_{_id(tenant, model)}",
        tenant_owner(owner),
        "default",
        JobKind.BATCH,
        *[0] * len(JOB_ZEROS),
    )


def _job_model(tenant: int, model: str, slices: int, now: int) -> tuple[Any, ...]:
    items = slices * SLICE_ITEMS
    share_owner, due = tenant_owner(f"tenant-{tenant:05}"), now + _DAY_MS
    return (
        _id(tenant, model),
        model,
        items,
        slices,
        items * ITEM_UNITS,
        share_owner,
        now - tenant,
        due,
        due,
        now,
        "default",
    )


def _flow(tenant: int, model: str, now: int) -> tuple[Any, ...]:
    owner = f"tenant-{tenant:05}"
    return (model, tenant_owner(owner), owner, "awake", 1000, tenant * 7_919 % 1_000_003, 0, now)


def _slices(jobs: list[tuple[int, str]], slices: int, now: int) -> Iterator[tuple[Any, ...]]:
    units = SLICE_ITEMS * ITEM_UNITS
    for tenant, model in jobs:
        job_id = _id(tenant, model)
        for number in range(slices):
            first = number * SLICE_ITEMS
            place = (first, first * 100, SLICE_ITEMS * 100, units)
            yield (job_id, first, SLICE_ITEMS, model, "/v1/chat/completions", "ready", now, 0, 0, *place)
