"""Promises and conformance: every row is there, and every file and test that a row names exists."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import (
    PAGES,
    REPOSITORY,
    codes,
    missing_tests,
    name,
    named_tests,
    page,
    rows,
    section,
    soak_tests_of,
)

PROMISES = page("docs/promises.md")
CONFORMANCE = page("docs/conformance.md")
ROWS = {"A": 18, "B": 11, "C": 12, "D": 13, "E": 8, "F": 5, "G": 10, "H": 10}
PROMISE_COUNT = 30
# What this version is: these rows may not be `not yet`.
DONE = {
    *(f"A{number}" for number in (1, 2, 3, 4, 5, 6, 10, 11, 12, 13)),
    *("B1", "B2", "B7", "B11"),
    *(f"C{number}" for number in range(1, 13)),
    *(f"D{number}" for number in range(1, 14)),
    *("E1", "E8", "F1", "F5", "H6", "H9"),
}


def conformance() -> list[list[str]]:
    return [row for row in rows(CONFORMANCE) if re.fullmatch(r"[A-H]\d+", row[0])]


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_test_that_is_named_exists(path: object) -> None:
    assert missing_tests(page(name(path))) == []  # type: ignore[arg-type]


def test_every_promise_is_kept_with_a_proof() -> None:
    kept = {row[0]: row for row in rows(section(PROMISES, "## Kept"))}
    assert list(kept) == [f"P{number}" for number in range(1, PROMISE_COUNT + 1)]
    for row in kept.values():
        assert row[1].endswith("."), f"{row[0]} is not a sentence"
        quick = [(where, test) for where, test in named_tests(row[2]) if test not in soak_tests_of(where)]
        assert quick, f"{row[0]} names no test that `make test` runs"


def test_every_row_of_the_checklist_is_there_in_order() -> None:
    wanted = [f"{letter}{number}" for letter, count in ROWS.items() for number in range(1, count + 1)]
    assert [row[0] for row in conformance()] == wanted


@pytest.mark.parametrize("row", conformance(), ids=lambda row: row[0])
def test_a_row_is_done_with_place_and_proof_or_not_yet(row: list[str]) -> None:
    number, _, where, proof = row
    if where == "not yet":
        assert number not in DONE
        assert not proof
        return
    places = codes(where)
    assert places
    assert [place for place in places if not (REPOSITORY / place).is_file()] == []
    assert named_tests(proof)
