"""Spending by caller, model and day: entries, sums over any of their dimensions, and the rows of an
export.

Sums are of whole numbers, so the totals do not depend on how the entries are grouped. In CSV, a
text that a spreadsheet would run as a formula is made harmless. This module does not read the
entries from anywhere.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from tidegate.core.usage.prices import Spend, units_text

DIMENSIONS = ("day", "organization", "team", "user", "key", "job", "model", "deployment")
MEASURES = (
    "calls",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "reasoning_tokens",
    "input_cost",
    "cached_cost",
    "output_cost",
    "cost",
)
# Characters that a spreadsheet takes for the start of a formula.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


class SpendEntry(msgspec.Struct, frozen=True, gc=False):
    """The spending of one caller on one model on one UTC day; an empty text is none, or not grouped
    by.
    """

    spend: Spend
    day: str = ""
    organization: str = ""
    team: str = ""
    user: str = ""
    key: str = ""
    job: str = ""
    model: str = ""
    deployment: str = ""


def sum_by(entries: Iterable[SpendEntry], by: Sequence[str]) -> list[SpendEntry]:
    """Return one entry for each combination of these dimensions, in order; the others are summed
    over and left empty.
    """
    unknown = [name for name in by if name not in DIMENSIONS]
    if unknown:
        raise ValueError(f"spending is not kept by {unknown[0]!r}; it is by: {', '.join(DIMENSIONS)}")
    found: dict[tuple[str, ...], list[Spend]] = {}
    for entry in entries:
        found.setdefault(tuple(getattr(entry, name) for name in by), []).append(entry.spend)
    return [
        SpendEntry(Spend.total(spends), **dict(zip(by, names, strict=True))) for names, spends in sorted(found.items())
    ]


def row(entry: SpendEntry, by: Sequence[str] = DIMENSIONS) -> dict[str, Any]:
    """Return one line of an export: the dimensions, then tokens as numbers and money as exact
    decimal text.
    """
    usage, paid = entry.spend.usage, entry.spend.cost
    return {
        **{name: getattr(entry, name) for name in by},
        "calls": entry.spend.calls,
        "input_tokens": usage.input_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "input_cost": units_text(paid.input_nano),
        "cached_cost": units_text(paid.cached_nano),
        "output_cost": units_text(paid.output_nano),
        "cost": units_text(paid.total_nano),
    }


def json_lines(entries: Iterable[SpendEntry], by: Sequence[str] = DIMENSIONS) -> Iterator[bytes]:
    """Return the export as JSON Lines, a line at a time."""
    for entry in entries:
        yield msgspec.json.encode(row(entry, by)) + b"\n"


def csv_lines(entries: Iterable[SpendEntry], by: Sequence[str] = DIMENSIONS) -> Iterator[bytes]:
    """Return the export as CSV (RFC 4180), a line at a time, the header first."""
    names = [*by, *MEASURES]
    yield _csv_line(names)
    for entry in entries:
        cells = row(entry, by)
        yield _csv_line([_harmless(cells[name]) if name in by else cells[name] for name in names])


def _csv_line(cells: Sequence[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerow(cells)
    return text.getvalue().encode()


def _harmless(text: str) -> str:
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text
