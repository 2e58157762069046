"""What `tidegate run` knows of the earlier batches of a run: what they leave of its bounds, and which of their lines run again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop
from msgspec.structs import fields

from tidegate.cli.run import run_again
from tidegate.cli.terminal import results
from tidegate.cli.terminal.input_file import RunOptions
from tidegate.core.job_controls import JobControls, MaxErrors, RetryChoice
from tidegate.core.nouns import Job, Usage
from tidegate.core.states import JobState


def batch(name: str = "batch_1", **known: Any) -> Job:
    """An ended batch of which nothing is known but this."""
    facts: dict[str, Any] = {field.name: None for field in fields(Job) if field.required}
    counts = ("item_count", "answered_count", "failed_count", "expired_count", "cancelled_count")
    facts |= dict.fromkeys((*counts, "output_bytes", "error_bytes", "created_at"), 0)
    return Job(**facts | {"id": name, "state": JobState.CANCELLED, "errors": (), "usage": Usage(0, 0, 0, 0)} | known)


@pytest.mark.parametrize(("retry_failed", "left"), [(False, 150), (True, 500)])
def test_a_cost_bounds_all_batches_of_a_run_and_of_lines_that_are_run_again_only_these(
    retry_failed: bool, left: int
) -> None:
    chain = [batch(cost_nano=250), batch("batch_2", cost_nano=100)]
    found = run_again.controls(chain, JobControls(max_cost_nano=500), retry_failed=retry_failed)
    assert found.max_cost_nano == left
    assert run_again.controls(chain, JobControls(), retry_failed=retry_failed) == JobControls()


def test_a_bound_that_is_spent_is_no_bound_of_nothing() -> None:
    found = run_again.controls([batch(cost_nano=700)], JobControls(max_cost_nano=500), retry_failed=False)
    assert found.max_cost_nano == 1


@pytest.mark.parametrize(
    ("stopped_by", "same", "larger"),
    [
        ("max_cost", JobControls(max_cost_nano=350), JobControls(max_cost_nano=351)),
        ("max_cost", JobControls(max_cost_nano=1), JobControls()),
        ("max_errors", JobControls(max_errors=MaxErrors(5)), JobControls(max_errors=MaxErrors(6))),
        (
            "max_errors",
            JobControls(max_errors=MaxErrors(share_ppm=50_000, after=100)),
            JobControls(max_errors=MaxErrors(share_ppm=50_001, after=100)),
        ),
    ],
)
def test_a_run_that_its_bound_stopped_goes_on_under_a_larger_one(
    stopped_by: str, same: JobControls, larger: JobControls
) -> None:
    first = batch(cost_nano=250)
    last = batch("batch_2", cost_nano=100, stopped_by=stopped_by, controls=same)
    unanswered = run_again.UnansweredLines(last, {("cancelled", "batch_cancelled"): True})
    history = run_again.History((first, last), (unanswered,))
    for asked, runs in ((same, False), (larger, True)):
        options = RunOptions("/v1/chat/completions", controls=asked)
        assert bool(run_again.retries(history, options, retry_failed=False)) == runs
        assert run_again.retries(history, options, retry_failed=True)


OPTIONS = RunOptions("/v1/chat/completions")
# Failures of lines, by what is written of them: a server that broke, one that was not there, and a refusal.
BROKE, AWAY, REFUSED = (500, "broken"), (0, "upstream_unavailable"), (400, "broken")


def failed_line(number: int, status: int, code: str) -> bytes:
    error = {"code": code, "message": "no"}
    response = {"status_code": status, "body": {"error": error}}
    line = {"id": f"i{number}", "custom_id": f"c{number}", "response": response if status else None}
    return json.dumps({**line, "error": None if status else error}).encode() + b"\n"


class Kept:
    """The batches of a run and their failed lines, as a store has them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._jobs: dict[str, Job] = {}
        self._lines: dict[str | None, bytes] = {}
        self.store = self

        async def content(parts: Kept, file_id: str | None, end: int) -> AsyncIterator[bytes]:
            yield parts._lines.get(file_id, b"")

        monkeypatch.setattr(results, "content", content)

    tenant_id = "tenant"

    async def get_job(self, tenant_id: str, job_id: str) -> Job | None:
        return self._jobs.get(job_id)

    def keep(self, name: str, *failures: tuple[int, str], item_count: int | None = None, **known: Any) -> None:
        """Keep an ended batch, the later one of those that there are, whose lines failed like this."""
        self._lines[f"errors of {name}"] = b"".join(failed_line(n, *one) for n, one in enumerate(failures))
        facts = {"item_count": len(failures) if item_count is None else item_count, "created_at": len(self._jobs)}
        known = {"state": JobState.COMPLETED, "error_file_id": f"errors of {name}", **facts, **known}
        self._jobs[name] = batch(name, **known)

    def history(self) -> run_again.History:
        parts: Any = self
        return uvloop.run(run_again.history_from(next(iter(self._jobs)), parts))

    def runs_again(self, *, retry_failed: bool = False) -> dict[str, RetryChoice]:
        found = run_again.retries(self.history(), OPTIONS, retry_failed=retry_failed)
        return {job.id: choice for job, choice in found}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(monkeypatch)


@pytest.mark.parametrize("failures", [(REFUSED, BROKE), (BROKE, REFUSED)])
def test_lines_of_one_code_run_again_by_themselves_only_if_none_of_them_was_refused(
    kept: Kept, failures: tuple[tuple[int, str], ...]
) -> None:
    kept.keep("a", *failures, AWAY)
    assert kept.runs_again() == {"a": RetryChoice(("failed",), ("upstream_unavailable",))}
    assert kept.runs_again(retry_failed=True) == {"a": run_again.NO_ANSWER}


def test_lines_that_two_later_batches_ran_again_are_those_of_the_latest(kept: Kept) -> None:
    everything, broken = RetryChoice(("failed",)), RetryChoice(("failed",), ("broken",))
    kept.keep("a", BROKE, AWAY, retried_by=("b", "c"))
    kept.keep("b", BROKE, AWAY, retry_choice=everything)
    kept.keep("c", BROKE, retry_choice=broken)
    assert [job.id for job in kept.history().jobs] == ["a", "c"]
    assert kept.runs_again() == {
        "a": RetryChoice(("failed",), ("upstream_unavailable",)),
        "c": RetryChoice(("failed",), ("broken",)),
    }


def test_a_batch_that_ended_before_it_ran_anything_answered_none_of_the_lines(kept: Kept) -> None:
    kept.keep("a", BROKE, retried_by=("b",))
    kept.keep("b", item_count=0, state=JobState.FAILED, retry_choice=run_again.NO_ANSWER)
    assert [job.id for job in kept.history().jobs] == ["a"]
    assert kept.runs_again() == {"a": RetryChoice(("failed",), ("broken",))}
