"""What a batch would take, in a few short lines for people."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tidegate.cli.terminal.estimates import ERRORS_SHOWN_MAX, for_people
from tidegate.cli.terminal.terminal import duration
from tidegate.core.nouns import LineError
from tidegate.web.jobs.limit_rooms import LimitSides
from tidegate.web.jobs.validation import (
    NO_TOKENS,
    BindingLimit,
    CostShown,
    EtaSeconds,
    JobEstimate,
    Refusal,
    TokenRange,
    Tokens,
)

TOKENS = Tokens(20, TokenRange(10, 20, 30), TokenRange(1, 2, 3))
ESTIMATE = JobEstimate([], 9, 0, [], 0, 0, TOKENS, CostShown("0", "0", "0"), None, None, [], [])


def lines(estimate: JobEstimate, *, is_valid: bool = True) -> list[str]:
    return for_people(estimate, is_valid=is_valid).splitlines()


def test_what_is_not_known_is_not_shown() -> None:
    shown_lines = lines(ESTIMATE)
    assert [line.split()[0] for line in shown_lines] == ["requests", "tokens", "time"]
    assert "unknown" in shown_lines[2]


def test_everything_that_is_known_is_shown() -> None:
    known = replace(
        ESTIMATE,
        deduplicated=2,
        reused=3,
        cost=CostShown("0.1", "0.2", "0.3"),
        eta=EtaSeconds(60, 120),
        shared_prefix_share=0.5,
        refused=[Refusal("budget_exceeded", "The budget is spent.", 2), Refusal("paused", "All waits.", None)],
    )
    text = "\n".join(lines(known))
    for words in (
        "run      4 of them",
        "kept     3 answers",
        "same     2 requests",
        "cost     about 0.2 (0.1 to 0.3)",
        f"about {duration(60)}, likely below {duration(120)}",
        "shared   50 %",
        "(2 requests)",
        "All waits.",
    ):
        assert words in text


@pytest.mark.parametrize(("binds", "count"), [(True, 1), (False, 0)])
def test_a_limit_that_has_enough_left_is_not_shown(binds: bool, count: int) -> None:
    limit = BindingLimit("key", "day", LimitSides(1, None, None), binds)
    limits = [line for line in lines(replace(ESTIMATE, limits=[limit])) if line.startswith("limit")]
    assert limits == ["limit    key per day has too little left"] * count


@pytest.mark.parametrize(("bad_count", "more"), [(ERRORS_SHOWN_MAX, 0), (ERRORS_SHOWN_MAX + 3, 3)])
def test_so_many_bad_lines_are_shown_and_the_others_counted(bad_count: int, more: int) -> None:
    bad = [LineError("bad", "no", line=number) for number in range(1, bad_count + 1)]
    shown_lines = lines(replace(ESTIMATE, item_count=50, bad_count=bad_count, bad_lines=bad))
    assert shown_lines[0] == f"requests 50, {bad_count} of them cannot be sent"
    shown = [line for line in shown_lines if line.startswith("error")]
    assert (len(shown), shown[0]) == (ERRORS_SHOWN_MAX, "error    line 1: no (bad)")
    assert [line for line in shown_lines if line.endswith(" more")] == [f"         and {more} more"][:more]


def test_nothing_to_send_is_one_line_unless_something_is_wrong() -> None:
    nothing = replace(ESTIMATE, item_count=0, tokens=NO_TOKENS)
    assert lines(nothing) == ["requests 0: nothing would be sent"]
    wrong = replace(nothing, errors=[LineError("empty", "no line")])
    assert lines(wrong, is_valid=False) == ["requests 0", "error    no line (empty)"]
