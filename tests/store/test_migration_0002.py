"""A database of version 1 with jobs in flight goes on where it was after it is migrated."""

# ruff: noqa: S608 - rows are spelled out in words of our own

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.test_migrations import postgres, sqlite
from tidegate.core.schedule.snapshot import Why
from tidegate.store.driver import Migration
from tidegate.store.schema import migration_steps
from tidegate.store.store import SCHEMA_VERSION, Store

pytestmark = pytest.mark.anyio

NOW = 1_000_000
# (id, tenant, state, closing, items done): two models where the id says so.
JOBS = (
    ("batch_running", "t1", "in_progress", None, 3),
    ("batch_mixed", "t2", "in_progress", None, 0),
    ("batch_cancelled", "t1", "cancelling", "cancelled", 1),
    ("batch_ended", "t3", "completed", "completed", 4),
)
_ZEROS = (
    "ordered", "prefix_order", "failed_count", "expired_count", "cancelled_count", "unused_count", "input_tokens", "cached_tokens",
    "output_tokens", "reasoning_tokens", "output_bytes", "error_bytes", "work_bytes", "prompt_bytes", "shared_prefix_bytes",
    "step_not_before", "step_failures",
)  # fmt: skip


def job_row(job_id: str, tenant: str, state: str, closing: str | None, done: int) -> str:
    columns = "id, tenant_id, endpoint, input_file_id, window_text, state, closing, created_at, expires_at, begun_at, invalid_lines, errors"
    closes = f"'{closing}'" if closing else "null"
    values = (
        f"'{job_id}', '{tenant}', '/v1/chat/completions', 'f', '24h', '{state}', {closes}, 5, {10**15}, 7, 'fail', '[]'"
    )
    return (
        f"insert into jobs ({columns}, item_count, answered_count, {', '.join(_ZEROS)}) "
        f"values ({values}, 8, {done}, {', '.join('0' for _ in _ZEROS)});"
    )


def old_rows() -> str:
    """Slices of four items: one leased by a living worker, the others ready."""
    text = [
        f"insert into workers values ('w', 'h', '1', 'alive', 1, 1, {10**15});",
        *(f"insert into tenants values ('{tenant}', 'name of {tenant}', 1);" for tenant in ("t1", "t2", "t3")),
        *(job_row(*job) for job in JOBS),
    ]
    for job_id, _, state, _, _ in JOBS:
        models = ("a", "b") if job_id == "batch_mixed" else ("a", "a")
        for model in sorted(set(models)):
            count = models.count(model)
            text.append(f"insert into job_models values ('{job_id}', '{model}', {4 * count}, {count}, {100 * count});")
        if state == "completed":
            continue
        for number, model in enumerate(models):
            held = "'leased', 0, 'token', 'w', 1" if number == 0 else "'ready', 0, null, null, 0"
            place = f"'{job_id}', {4 * number}, 4, '{model}', {held}, 0, {4 * number}, 0, 10, 100"
            text.append(f"insert into slices values ({place});")
    return "\n".join(text)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_jobs_in_flight_go_on(kind: str, tmp_path: Path, postgres_url: str) -> None:
    driver = postgres(postgres_url) if kind == "postgresql" else sqlite(tmp_path / "store.db")
    store = Store(driver)
    first = migration_steps(driver.dialect)[0]
    assert await driver.migrate([Migration(1, f"{first.text}\n{old_rows()}")]) == [1]
    assert await store.migrate() == list(range(2, SCHEMA_VERSION + 1))

    assert await store.awake_models(10) == ["a", "b"]
    flows = await store.awake_flows(None, 10)
    assert {(flow.model, flow.share_owner, flow.tenant) for flow in flows} == {
        ("a", "tenant:t1", "name of t1"), ("a", "tenant:t2", "name of t2"), ("b", "tenant:t2", "name of t2"),
    }  # fmt: skip
    seen = await store.snapshot("w", {"a": 9, "b": 9}, slice_items=64, slices_max=9)
    assert {(job.job_id, job.model, job.share_owner) for job in seen.jobs} == {
        ("batch_running", "a", "tenant:t1"), ("batch_mixed", "b", "tenant:t2"),
    }  # fmt: skip
    [running] = [job for job in seen.jobs if job.job_id == "batch_running"]
    assert (running.total_units, running.left_units, running.queue) == (200, 125, "default")
    assert seen.models["a"].in_flight_by_why == {Why.FIFO: 300}, "what was out when it was migrated is out still"

    job = await store.any_job("batch_running")
    assert job is not None
    assert (job.share_owner, job.queue) == ("tenant:t1", "default")
    [held] = await store.lease_slices("w", "batch_running", "a", 9, "new", Why.FAIR)
    assert held.first == 4
    await store.close()
