"""What a report of the judge says, to a reader and to a program."""

from __future__ import annotations

import pytest

from tidegate.judge.report import EVIDENCE_COUNT_MAX, Finding, Report, Verdict, rule, shown


@rule("kept", "nothing lost", "every line is there")
def kept(case: int, found: Finding) -> None:
    found.looked(f"{case} lines")
    for number in range(case - 3):
        found.wrong(f"line {number} is not there")


@rule("merged", "nothing twice", "retries are merged")
def merged(case: int, found: Finding) -> None:
    found.skip("it is no retry")


def report_of(case: int) -> Report:
    return Report("batch_1", "completed", tuple(one.judge(case) for one in (kept, merged)))


def test_a_job_without_a_fault_says_so_and_what_was_looked_at() -> None:
    report = report_of(3)
    assert report.ok
    assert report.summary() == ("batch_1 (completed): every promise holds (1 ok, 0 violated, 1 not applicable)")
    assert [check.detail for check in report.checks] == ["3 lines", "it is no retry"]
    assert report.to_text(is_short=True) == report.summary()
    assert [line.split("  ")[0].strip() for line in report.to_text().splitlines()[:-1]] == ["ok", "n-a"]


def test_what_is_wrong_is_counted_whole_and_shown_in_part() -> None:
    report = report_of(EVIDENCE_COUNT_MAX + 5)
    assert not report.ok
    assert report.summary() == ("batch_1 (completed): PROMISES ARE BROKEN (0 ok, 1 violated, 1 not applicable)")
    lines = report.to_text(is_short=True).splitlines()
    assert lines[0].startswith("VIOLATED")
    assert (len(lines), lines[-2].strip()) == (EVIDENCE_COUNT_MAX + 3, "- and 2 more")
    assert report.to_json()["counts"] == {Verdict.OK: 0, Verdict.VIOLATED: 1, Verdict.NOT_APPLICABLE: 1}


@pytest.mark.parametrize(("text", "expected"), [(None, "null"), ("a\x1b", r"'a\x1b'"), ("x" * 1_000, "…")])
def test_a_callers_text_cannot_steer_a_terminal(text: str | None, expected: str) -> None:
    assert shown(text).endswith(expected)
    assert len(shown(text)) < 1_000
