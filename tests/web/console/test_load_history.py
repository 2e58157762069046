"""The figures behind the overview's charts, and what all scripts and styles weigh."""

from __future__ import annotations

import gzip
import hashlib
from importlib.resources import files
from typing import Any

import pytest

from tidegate.web.console.load_history import SAMPLE_MS_MIN, LoadHistory, rates_between
from tidegate.web.http.pages import STATIC

MINUTE = 60_000
SIZE_BYTES_MAX = 60_000


def test_rates_are_what_was_answered_since_the_last_look() -> None:
    before, now = {9: (30, 300), 10: (6, 60)}, {9: (33, 330), 10: (60, 600), 11: (3, 30)}
    assert rates_between(11 * MINUTE - 10_000, before, 11 * MINUTE + 2_000, now) == (60 / 12, 600 / 12)
    assert rates_between(11 * MINUTE, now, 11 * MINUTE + 3_000, now) == (0.0, 0.0)
    # A worker's row that is gone is no negative rate.
    assert rates_between(11 * MINUTE, now, 11 * MINUTE + 3_000, {11: (1, 1)}) == (0.0, 0.0)


@pytest.mark.parametrize("before_ms", [0, 5 * MINUTE, 12 * MINUTE])
def test_after_a_pause_this_minute_counts_or_with_the_one_before(before_ms: int) -> None:
    """Also when the store's clock was set back."""
    counts = {10: (120, 6_000), 11: (6, 600)}
    assert rates_between(before_ms, {}, 11 * MINUTE + 3_000, counts) == (2.0, 6_600 / 63)
    assert rates_between(before_ms, {}, 11 * MINUTE + 20_000, counts) == (0.3, 30.0)


class Minutes:
    """A store that has counted so much."""

    def __init__(self) -> None:
        self.now_ms = 600 * MINUTE
        self.counts = {598: (60, 600), 599: (120, 1_200), 600: (0, 0)}

    async def minute_counts(self) -> tuple[int, dict[int, tuple[int, int]]]:
        return self.now_ms, dict(self.counts)


@pytest.mark.anyio
async def test_a_page_begins_with_minutes_and_goes_on_with_looks() -> None:
    store: Any = Minutes()
    history = LoadHistory(store)
    first = await history.look([])
    assert (first.at, first.requests, first.tokens) == (36_000, 2.0, 20.0)
    store.now_ms += SAMPLE_MS_MIN - 1
    assert await history.look([]) is first, "two pages share a look"
    store.now_ms += 3_001 - SAMPLE_MS_MIN
    store.counts[600] = (9, 90)
    assert (await history.look([])).requests == 3.0
    assert [(one.at, one.requests) for one in history.points()] == [(35_940.0, 1.0), (36_000, 2.0), (36_003.0, 3.0)]


def test_all_scripts_and_styles_are_small_and_what_others_wrote_is_whole() -> None:
    folder = files("tidegate.web") / "static"
    data = {name: (folder / name).read_bytes() for name in STATIC}
    assert sum(len(gzip.compress(one, 9)) for one in data.values()) < SIZE_BYTES_MAX
    for name, licence in {
        "htmx": ["htmx.min.js"],
        "htmx-sse": ["htmx-sse.min.js"],
        "uplot": ["uplot.min.js", "uplot.min.css"],
    }.items():
        text = (folder / f"{name}.LICENSE").read_text()
        assert "https://github.com/" in text
        for one in licence:
            assert hashlib.sha256(data[one]).hexdigest() in text
