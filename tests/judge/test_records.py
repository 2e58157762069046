"""The store's time, as the judge reads it of the machine's clock."""

from __future__ import annotations

import pytest

from tidegate.judge.records import _store_time

WALL_MS = 1_800_000_000_000


@pytest.mark.parametrize(
    ("behind_ms", "start_ms", "since_ms", "expected_ms"),
    [
        (None, None, None, WALL_MS),
        (0, WALL_MS - 9_000, WALL_MS - 9_000, WALL_MS),
        # The clock was set back by a minute, and no step of it counts.
        (60_000, WALL_MS, WALL_MS - 60_000, WALL_MS + 60_000),
        # The store's time is an hour ahead, and runs one part in a hundred slower until the clock has caught up.
        (0, WALL_MS + 3_600_000, WALL_MS, WALL_MS + 3_600_000),
        (0, WALL_MS + 3_600_000, WALL_MS - 100_000, WALL_MS + 3_699_000),
    ],
)
def test_steps_of_the_machines_clock_are_taken_out(
    behind_ms: int | None, start_ms: int | None, since_ms: int | None, expected_ms: int
) -> None:
    assert _store_time(WALL_MS, {"behind": behind_ms, "start": start_ms, "since": since_ms}) == expected_ms
