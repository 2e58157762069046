"""The parts of a table: where one is cut off, what the bounds of the whole leave to the next, and what becomes of the rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.run.test_run_history import batch
from tests.support.syncs import noted_syncs
from tidegate.cli.run import run_job, run_table, template
from tidegate.cli.run.tables import RowTable
from tidegate.cli.terminal import input_file, summary
from tidegate.core.job_controls import JobControls, MaxErrors
from tidegate.core.nouns import Usage
from tidegate.core.states import JobState
from tidegate.settings import load

ASKED = JobControls(max_cost_nano=25, max_errors=MaxErrors(count=2))


class Parts:
    """A table of four rows, each a part of its own. What its runs answer is here."""

    def __init__(self, directory: Path, *, retry_failed: bool = False) -> None:
        self.directory = directory
        (directory / "in.csv").write_text("text\none\ntwo\nthree\nfour\n")
        (directory / "t.json").write_text('{"messages": [{"role": "user", "content": "{{text}}"}]}')
        settings = load(None, directory / "data", {"upstream.url": "http://127.0.0.1:9/v1"}, {}).settings
        options = input_file.RunOptions("/v1/chat/completions", ordered=True, controls=ASKED)
        begin = run_job.Begin(fresh=False, retry_failed=retry_failed, wait=False, is_checked=False)
        table, asked = RowTable([directory / "in.csv"]), template.read(directory / "t.json", None)
        self.target = directory / "out.csv"
        self.errand = run_table.TableErrand(table, asked, self.target, settings, options, begin, "", ("in", "out"))
        self.exit_codes = [1, 0, 0, 0]
        self.controls: list[JobControls] = []

    async def perform(self, errand: run_job.Errand) -> tuple[summary.Ending, int]:
        number = len(self.controls) + 1
        self.controls.append(errand.run_options.controls)
        code = self.exit_codes[number - 1]
        assert not any(path and path.exists() for path in (errand.targets.results, errand.targets.errors))
        body = {"choices": [{"message": {"content": f"answer {number}"}}]}
        response = {"status_code": 500, "body": {"error": {"message": "no"}}} if code else {"body": body}
        path = errand.targets.errors if code else errand.targets.results
        assert path is not None
        path.write_text(json.dumps({"id": "i", "custom_id": f"row-{number}", "response": response}) + "\n")
        counts = {"item_count": 1, "answered_count": 0 if code else 1, "failed_count": 1 if code else 0}
        usage = Usage(number, 0, 1, 0)
        job = batch(f"batch_{number}", state=JobState.COMPLETED, cost_nano=10, usage=usage, **counts)
        ending = summary.Ending(job, errand.targets, 1.0, 0, "", unit="rows", has_cost_bound=True)
        return ending, code

    def run(self, monkeypatch: pytest.MonkeyPatch) -> tuple[run_table.TableEnding | None, int]:
        monkeypatch.setattr(run_job, "perform", self.perform)
        scratch = self.directory / "scratch"
        scratch.mkdir()
        return run_table.perform(self.errand, scratch)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_table, "PART_BYTES_MAX", 1)


@pytest.mark.usefixtures("small_parts")
def test_each_part_gets_what_those_before_left_of_the_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, synced = Parts(tmp_path), noted_syncs(monkeypatch)
    ending, code = parts.run(monkeypatch)
    assert [path.name[:9] for path in synced] == [".out.csv.", tmp_path.name[:9]], "the table, and then its name"
    assert ending is not None
    assert [one.max_cost_nano for one in parts.controls] == [25, 15, 5, 1], "a bound that is spent is not left out"
    assert [one.max_errors for one in parts.controls] == [MaxErrors(2), MaxErrors(1), MaxErrors(1), MaxErrors(1)]
    assert (code, ending.exit_code, ending.row_count, ending.answered_count, ending.input_tokens) == (1, 1, 4, 3, 10)
    assert ending.batches == ["batch_1", "batch_2", "batch_3", "batch_4"]
    rows = parts.target.read_text().splitlines()
    assert [row.split(",")[:3] for row in rows[1:3]] == [["one", "", "no"], ["two", "answer 2", ""]]


def test_no_failure_is_left_when_all_that_may_fail_have_failed() -> None:
    ending = run_table.TableEnding(row_count=9, answered_count=6, cost_nano=30)
    assert ending.bounds_left(ASKED) == JobControls(max_cost_nano=1, max_errors=MaxErrors(count=0))


@pytest.mark.usefixtures("small_parts")
def test_rows_that_are_run_again_have_the_bounds_for_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(tmp_path, retry_failed=True)
    parts.run(monkeypatch)
    assert parts.controls == [ASKED] * 4


@pytest.mark.usefixtures("small_parts")
def test_a_part_that_cannot_be_run_ends_the_table_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(tmp_path)
    parts.exit_codes[1] = summary.UNUSABLE
    assert parts.run(monkeypatch) == (None, summary.UNUSABLE)
    assert len(parts.controls) == 2
    assert not parts.target.exists()
    assert not list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*.part"))
