"""What `tidegate run` knows of the earlier batches of a run: what they leave of its bounds, and which of their lines run again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from msgspec.structs import fields

from tidegate.cli.run import run_again, run_changed, run_job
from tidegate.cli.terminal import results
from tidegate.cli.terminal.input_file import RunOptions
from tidegate.cli.terminal.signals import Stopping
from tidegate.core.errors import ApiProblem
from tidegate.core.job_controls import JobControls, MaxErrors, RetryChoice
from tidegate.core.nouns import Job, LineError, Usage
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

    def error_lines(self) -> list[bytes]:
        """The failed lines of the run, as they are delivered."""
        parts: Any = self
        history = self.history()

        async def read() -> list[bytes]:
            return [line async for line in history.error_lines(parts)]

        return uvloop.run(read())

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


def test_a_line_without_an_id_of_its_own_stays_failed_and_does_not_run_again(kept: Kept) -> None:
    kept.keep("a", AWAY, (0, "duplicate_custom_id"))
    assert kept.runs_again(retry_failed=True) == {"a": run_again.NO_ANSWER}
    kept.keep("b", retry_choice=RetryChoice(("failed",), ("upstream_unavailable",)), answered_count=1, item_count=1)
    kept.keep("a", AWAY, (0, "duplicate_custom_id"), retried_by=("b",))
    assert kept.runs_again(retry_failed=True) == {}
    assert [b"duplicate_custom_id" in line for line in kept.error_lines()] == [True]


def test_a_run_of_several_batches_has_the_answers_tokens_and_bytes_of_all(kept: Kept) -> None:
    one: dict[str, Any] = {
        "output_bytes": 10,
        "error_bytes": 20,
        "cost_nano": 5,
        "answered_count": 1,
        "usage": Usage(1, 2, 3, 4),
    }
    found = run_again.whole([batch("a", item_count=7, **one), batch("b", item_count=2, ordered=True, **one)])
    assert (found.id, found.item_count, found.answered_count, found.cost_nano) == ("b", 7, 2, 10)
    assert (found.output_bytes, found.error_bytes, found.usage) == (20, 40, Usage(2, 4, 6, 8))
    assert not found.ordered, "the answers of one batch come after those of another"


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


class Series:
    """The batches of a series, newest first, as a store finds them."""

    tenant_id = "tenant"
    settings = SimpleNamespace(store=SimpleNamespace(is_postgresql=False))

    def __init__(self, *found: Job) -> None:
        self._found = found
        self.store = self
        self.cancelled: list[str] = []
        self.notified = 0
        self.wakes = SimpleNamespace(jobs=self)

    async def search_jobs(self, *_: object, **__: object) -> list[Job]:
        return list(self._found)

    async def cancel_job(self, tenant_id: str, job_id: str) -> None:
        self.cancelled.append(job_id)
        if job_id == "ends":
            raise ApiProblem(409, "batch_not_cancellable", "It ends already.")

    def notify(self) -> None:
        self.notified += 1


def test_of_the_last_version_with_answers_the_batch_that_has_most_of_them_is_kept() -> None:
    retry: dict[str, Any] = {"input_file_id": "second", "retry_of": "b"}
    series: Any = Series(
        batch("f", input_file_id="third", state=JobState.FAILED),
        batch("e", answered_count=0, **retry),
        batch("d", answered_count=3, **retry),
        batch("c", answered_count=1, **retry),
        batch("b", answered_count=5, input_file_id="second"),
        batch("a", answered_count=9, input_file_id="first"),
    )
    found = uvloop.run(run_changed.find_answered(series, "series"))
    assert found is not None
    assert found.id == "d"


def test_every_open_batch_of_another_version_is_ended_though_one_ends_already() -> None:
    series: Any = Series(
        *(batch(name, state=JobState.IN_PROGRESS, input_file_id=name) for name in ("ends", "runs")), batch("ended")
    )
    outdated = uvloop.run(run_changed.end_outdated(series, "series", None))
    assert [job.id for job in outdated] == series.cancelled == ["ends", "runs"]
    assert series.notified == 1, "their workers learn it at once"
    assert uvloop.run(run_changed.end_outdated(Series(), "series", None)) == []  # type: ignore[arg-type]


def test_a_batch_of_chosen_lines_that_was_refused_leaves_the_run_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = batch("a", state=JobState.COMPLETED, item_count=3, answered_count=1, failed_count=2)
    why = (LineError("input_file_gone", "The input file is gone."),)
    refused = batch("b", state=JobState.FAILED, errors=why)
    history = run_again.History((first,), ())

    async def known(*_: object) -> run_again.History:
        return history

    async def nothing(*_: object) -> None:
        return None

    async def begun(*_: object) -> Job:
        return refused

    monkeypatch.setattr(run_job, "_known_history", known)
    monkeypatch.setattr(run_job, "_retries", lambda *_: [(first, run_again.NO_ANSWER)])
    monkeypatch.setattr(run_job, "_check_and_say", nothing)
    monkeypatch.setattr(run_job, "_retry", begun)
    monkeypatch.setattr(run_job, "_watch", begun)
    anything: Any = SimpleNamespace(router=None)
    assert uvloop.run(run_job._run(anything, [], anything, Stopping())) == ([first], 1)
    assert "The input file is gone." in capsys.readouterr().err
