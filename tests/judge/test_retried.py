"""Which lines of an input a retry must run, by what it chose of the errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidegate.judge.lines import JudgedInputLine, ResultLine
from tidegate.judge.retried import retried_lines

LINES = [JudgedInputLine(number, name) for number, name in enumerate(["a", "b", None, "c", "a", "d"], start=1)]


def error(custom_id: str | None, **more: Any) -> ResultLine:
    return ResultLine("error", 1, 0, 0, 0, custom_id=custom_id, **more)


ERRORS = [
    error("a", status=500),
    error("b", code="batch_expired"),
    error("c", status=400, named_refusal="context_too_long"),
    error("d", code="duplicate_custom_id"),
    error(None, status=500),
]


@pytest.mark.parametrize(
    ("outcomes", "codes", "expected"),
    [
        (["failed", "expired"], [], [1, 2, 4]),
        (["failed"], [], [1, 4]),
        (["expired"], [], [2]),
        (["cancelled"], [], []),
        (["failed", "expired"], ["http_500"], [1]),
        (["failed", "expired"], ["context_too_long", "batch_expired"], [2, 4]),
    ],
)
def test_a_retry_runs_what_was_chosen_and_the_first_line_of_each_name(
    outcomes: list[str], codes: list[str], expected: list[int]
) -> None:
    job = {"retry_choice": json.dumps({"outcomes": outcomes, "codes": codes})}
    assert [line.line for line in retried_lines(job, LINES, ERRORS)] == expected
