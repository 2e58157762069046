"""Jobs that kept every promise: the judge finds nothing, and looks at what there is to look at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.judge.damage import add_call, attempt, calls_of, later
from tests.judge.world import (
    MIXED,
    JudgedWorld,
    create,
    has_ended,
    line,
    on_postgres_and_s3,
    run_to_end,
    settings,
    until,
)
from tests.support.engine import Engine
from tests.support.s3 import S3Server
from tidegate import failpoints, judge, service, storage
from tidegate.core import ids
from tidegate.judge.report import Verdict

JOBS = (
    "plain",
    "mixed",
    "ordered",
    "lenient",
    "refused",
    "expired",
    "guarded",
    "deduplicated",
    "reused",
    "cancelled",
    "running",
    "early",
)
STATES = {
    "plain": "completed",
    "mixed": "completed",
    "ordered": "completed",
    "lenient": "completed",
    "refused": "failed",
    "expired": "expired",
    "guarded": "completed",
    "cancelled": "cancelled",
    "running": "in_progress",
}


def applied(report: judge.Report) -> set[str]:
    return {check.id for check in report.checks if check.verdict is not Verdict.NOT_APPLICABLE}


@pytest.mark.parametrize("name", JOBS)
def test_a_healthy_job_is_all_ok(judged_world: JudgedWorld, name: str) -> None:
    report = judged_world.judged_now(name, witness=True)
    assert report.ok, report.to_text()
    assert report.state == STATES.get(name, report.state)


def test_without_faults_every_rule_but_those_of_special_jobs_is_applied(judged_world: JudgedWorld) -> None:
    report = judged_world.judged_now("plain", witness=True, expect_no_repeats=True)
    assert report.ok, report.to_text()
    special = {"canary", "item_order", "merged", "parameters", "parts", "refusal"}
    assert {rule.id for rule in judge.RULES} - applied(report) == special


def test_a_call_that_the_tide_handed_back_is_a_reason_for_one_more(judged_world: JudgedWorld, tmp_path: Path) -> None:
    world = judged_world.copy(tmp_path / "copy")
    job_id = world.jobs["plain"]
    first = calls_of(world, job_id)[0]
    add_call(later(0.01), lambda call: call == first)(world, job_id)
    assert not world.judged_now("plain", witness=True).ok
    number = next(n for n in range(25) if first["idempotency_key"].startswith(ids.item_id(job_id, n)))
    attempt(number, 0, reason="handed_back", hand_backs=1)(world, job_id)
    report = world.judged_now("plain", witness=True)
    assert report.ok, report.to_text()


def test_identical_requests_are_run_once_and_paid_once(judged_world: JudgedWorld) -> None:
    job_id = judged_world.jobs["deduplicated"]
    [row] = judged_world.sql(
        "select item_count, answered_count, failed_count, deduplicated_count, output_tokens from jobs where id = ?",
        (job_id,),
    )
    assert row == (8, 6, 2, 3, 4 * 5), "a, b and twice c are run and answered, and one refusal is run"
    assert len(calls_of(judged_world, job_id)) == 5


def test_only_changed_lines_of_a_file_are_run_again(judged_world: JudgedWorld) -> None:
    job_id = judged_world.jobs["reused"]
    sql = "select item_count, answered_count, reused_count, output_tokens from jobs where id = ?"
    assert judged_world.sql(sql, (job_id,)) == [(22, 22, 20, 2 * 5)]
    assert len(calls_of(judged_world, job_id)) == 2


def test_an_answer_that_was_not_let_through_was_paid_for_and_is_no_loss(judged_world: JudgedWorld) -> None:
    job_id = judged_world.jobs["guarded"]
    [(answered, failed, tokens)] = judged_world.sql(
        "select answered_count, failed_count, output_tokens from jobs where id = ?", (job_id,)
    )
    assert (answered, failed, tokens) == (1, 2, 10), "five tokens for each answer, kept or not"
    assert len(calls_of(judged_world, job_id)) == 2


def test_rules_of_special_jobs_are_applied_to_those(judged_world: JudgedWorld) -> None:
    assert {"item_order", "parameters", "parts"} <= applied(judged_world.judged_now("ordered"))
    assert "refusal" in applied(judged_world.judged_now("refused"))
    assert "answers_kept" not in applied(judged_world.judged_now("running", witness=True))


def test_a_report_is_text_for_people_and_json_for_programs(judged_world: JudgedWorld) -> None:
    report = judged_world.judged_now("mixed")
    lines = report.to_text().splitlines()
    assert len(lines) == len(report.checks) + 1
    assert lines[-1].startswith(f"{report.job_id} (completed): ")
    assert all(text.startswith(("ok ", "n-a ")) for text in lines[:-1])
    body = json.loads(json.dumps(report.to_json()))
    assert body["ok"] is True
    assert body["counts"]["violated"] == 0
    assert {check["id"] for check in body["checks"]} == {rule.id for rule in judge.RULES}


@pytest.mark.anyio
async def test_a_sweep_judges_every_job(judged_world: JudgedWorld) -> None:
    async with judged_world.opened() as (records, blobs):
        reports = [report async for report in judge.sweep(records, blobs)]
    judged = [report.job_id for report in reports]
    assert set(judged) >= set(judged_world.jobs.values())
    assert judged == sorted(set(judged))
    assert all(report.ok for report in reports)


@pytest.mark.anyio
async def test_a_job_is_judged_while_it_runs(engine: Engine, tmp_path: Path) -> None:
    async with service.working(settings(tmp_path / "data", engine)) as working, working.running():
        parts = working.parts
        job = await create(working, b"".join(line(f"s{n}", "latency=30") for n in range(60)))
        await until(working, job, lambda job: job.answered_count >= 3)
        seen = set()
        async with judge.sqlite_records(tmp_path / "data" / "tidegate.db") as records:
            while not has_ended(job):
                report = await judge.judge(records, parts.blobs, job.id, engine.calls_log)
                assert report.ok, report.to_text()
                seen.add(report.state)
                found = await parts.store.any_job(job.id)
                assert found is not None
                job = found
    assert "in_progress" in seen


@pytest.mark.anyio
@pytest.mark.parametrize("ordered", [False, True])
async def test_a_job_that_an_operator_gave_up_lacks_lines_and_breaks_no_promise(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    monkeypatch.setattr(failpoints, "ARMED", {})
    world = JudgedWorld(tmp_path / "data", engine.calls_log)
    stands_still = {"worker.cancel_grace_ms": 0, "failpoints": "publish_rest_durable=sleep:3600"}
    chosen = settings(tmp_path / "data", engine, **stands_still)
    async with service.working(chosen) as working, working.running():
        store, tenant_id = working.parts.store, working.parts.tenant_id
        lines = [line(f"s{n}", "hang" if n % 2 else "") for n in range(12)]
        job = await create(working, b"".join(lines), ordered=ordered)
        await until(working, job, lambda job: job.answered_count == 6)
        await store.cancel_job(tenant_id, job.id)
        await until(working, job, lambda job: job.state == "finalizing")
        ended = await store.abandon_job(tenant_id, job.id, None)
    assert ended is not None
    assert ended.answered_count == 6
    world.jobs["abandoned"] = job.id
    report = await world.judged("abandoned", witness=True)
    assert report.ok, report.to_text()
    assert "an operator gave up publishing it" in report.to_text()
    world.sql("delete from outcomes where job_id = ? and number = (select min(number) from outcomes)", (job.id,))
    assert {"counts", "outcome_places"} <= set((await world.judged("abandoned")).violated), (
        "what was recorded must be there"
    )


@pytest.mark.anyio
async def test_a_healthy_job_on_postgresql_and_s3(
    engine: Engine, postgres_url: str, s3_server: S3Server, s3_bucket: str, tmp_path: Path
) -> None:
    chosen = on_postgres_and_s3(tmp_path / "data", engine, postgres_url, s3_server, s3_bucket)
    async with (
        service.working(chosen) as working,
        working.running(),
        judge.postgres_records(postgres_url) as records,
    ):
        parts = working.parts
        job = await run_to_end(working, b"".join(MIXED))
        report = await judge.judge(records, parts.blobs, job.id, engine.calls_log)
        assert report.ok, report.to_text()
        assert report.state == "completed"
        # It is the same judge: what is broken here is seen here.
        stored = await records.rows("select blob_id from extents where file_id = $1", (job.output_file_id,))
        await parts.blobs.delete(stored[0]["blob_id"])
        # One who only looks believes at once that an object is gone.
        async with storage.opened(chosen, read_only=True) as looking:
            report = await judge.judge(records, looking.blobs, job.id)
        assert "bytes_kept" in report.violated
        assert "items_once" in report.violated
