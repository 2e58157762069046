"""Windows of time one by one: when counts leave, what is owed, how long to wait, and what is written down."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tidegate.core.budgets.budget import GRANT_MS, NEVER_MS, TOKENS_MAX, Period
from tidegate.core.budgets.counting import (
    HOUR,
    MINUTE,
    Calendar,
    Sliding,
    Total,
    calendar_index,
    calendar_start,
    fresh,
    unpack,
)

DAY_MS = 86_400_000


def sliding(*counts: tuple[int, int], debt: int = 0) -> Sliding:
    """A minute's window with these counts in these buckets."""
    window = Sliding(MINUTE, debt)
    for bucket, count in counts:
        window.add(bucket * MINUTE.bucket_ms, count)
    return window


def test_a_count_stays_for_its_period_a_bucket_and_a_grant() -> None:
    assert MINUTE.leaves_at(4) == 250 * 5 + 60_000 + GRANT_MS
    window = sliding((4, 3), (4, 2), (6, 1))
    assert window.pack() == [0, 4, 5, 2, 1]
    window.roll(MINUTE.leaves_at(4) - 1, 10)
    assert (window.taken(), window.room(0, 10), window.room(0, 5)) == (6, 4, 0)
    window.roll(MINUTE.leaves_at(4), 10)
    assert (window.taken(), window.empty_at()) == (1, MINUTE.leaves_at(6))
    window.roll(MINUTE.leaves_at(6), 10)
    assert (window.taken(), window.empty_at(), window.pack()) == (0, 0, [0])
    window.add(5, 0)
    assert window.pack() == [0], "nothing was taken"


def test_a_clock_that_was_set_back_keeps_every_count_as_young_as_it_was() -> None:
    window = sliding((1, 1), (2, 2), (3, 4))
    window.roll(2 * MINUTE.bucket_ms, 10)
    assert window.pack() == [0, 1, 1, 1, 6], "the newest goes to the one before it"
    two = sliding((1, 2), (2, 4))
    two.roll(MINUTE.bucket_ms, 10)
    assert two.pack() == [0, 1, 6]
    far = sliding((100, 1), (110, 2))
    far.roll(50 * MINUTE.bucket_ms, 10)
    assert far.pack() == [0, 41, 1, 9, 2]
    alone = sliding((100, 1))
    alone.roll(50 * MINUTE.bucket_ms, 10)
    assert alone.pack() == [0, 50, 1]
    ahead = sliding((10, 1), (12, 2))
    ahead.move(251)
    assert ahead.pack() == [0, 12, 1, 2, 2]
    ahead.move(250)
    assert ahead.pack() == [0, 13, 1, 2, 2]


def test_what_is_owed_is_paid_as_soon_as_there_is_room_and_forgotten_without_a_limit() -> None:
    window = sliding((0, 6))
    window.owe(7)
    assert (window.taken(), window.empty_at()) == (13, NEVER_MS)
    window.roll(250, 10)
    assert window.pack() == [3, 0, 6, 1, 4]
    window.roll(500, 10)
    assert window.pack() == [3, 0, 6, 1, 4], "the window is full"
    window.roll(MINUTE.leaves_at(0), 10)
    assert window.taken() == 7
    assert window.pack()[0] == 0
    window.owe(5)
    window.roll(MINUTE.leaves_at(0), 0)
    assert window.pack()[0] == 5, "a limit of nothing pays nothing"
    nothing = sliding((0, 3), debt=5)
    nothing.roll(MINUTE.leaves_at(0), 0)
    assert nothing.pack() == [5]
    window.roll(MINUTE.leaves_at(0), None)
    assert window.taken() == 7
    window.owe(TOKENS_MAX + 5)
    assert window.pack()[0] == TOKENS_MAX


def test_a_large_debt_is_paid_cycle_by_cycle() -> None:
    window = sliding((0, 4), (100, 6))
    window.owe(35)
    cycle_ms = MINUTE.cycle * MINUTE.bucket_ms
    late = sliding((0, 4), (100, 6))
    late.owe(35)
    late.roll(2 * cycle_ms + MINUTE.leaves_at(0), 10)
    step = 100 * MINUTE.bucket_ms
    while step <= 2 * cycle_ms + MINUTE.leaves_at(0):
        window.roll(step, 10)
        step += MINUTE.bucket_ms
    window.roll(2 * cycle_ms + MINUTE.leaves_at(0), 10)
    assert late.pack() == window.pack(), "one look or many make no difference"
    assert late.taken() == 10 + 35 - 24
    once = sliding((0, 4), (100, 6), debt=3)
    once.roll(MINUTE.leaves_at(100) + 10_000, 10)
    assert once.pack() == [0, MINUTE.cycle, 3], "what was owed was paid when the first four left"
    endless = sliding((0, 10))
    endless.owe(10**10)
    endless.roll(10**9 * cycle_ms, 10)
    assert endless.taken() == 10**10 - 10 * (10**9 - 1), "and one look takes no longer than another"


@pytest.mark.parametrize(
    ("owed", "count", "left"),
    [(False, 2, [9, 4, 3, 2, 1]), (False, 5, [9, 6, 1]), (False, 8, [9, 6, 1]), (True, 8, [6, 6, 1]), (True, 99, [0, 6, 1]),
     (True, 5, [9, 6, 1])],
)  # fmt: skip
def test_what_is_given_back_leaves_its_own_bucket_and_then_the_debt(owed: bool, count: int, left: list[int]) -> None:
    window = sliding((4, 5), (6, 1), debt=9)
    window.undo_taken(4 * 250 + 249, count, owed=owed)
    assert window.pack() == left
    assert window.taken() == sum(left[2::2]) + left[0]
    for elsewhere in (3, 5, 7):
        window.undo_taken(elsewhere * 250, 5, owed=owed)
    assert window.pack() == left, "a grant that has left gives nothing back"


def test_how_long_to_wait_is_exact() -> None:
    window = sliding((0, 4), (10, 6))
    now = 10 * MINUTE.bucket_ms
    assert window.wait(now, 12, 2) == 0
    assert window.wait(now, 12, 3) == window.wait(now, 12, 6) == MINUTE.leaves_at(0) - now
    assert window.wait(now, 12, 7) == window.wait(now, 12, 12) == MINUTE.leaves_at(10) - now
    assert window.wait(now, 12, 13) == NEVER_MS
    window.owe(5)
    assert window.wait(now, 10, 1) == MINUTE.leaves_at(10) - now, "the four that leave first pay a part of five"
    assert window.wait(now, 20, 0) > 0, "who owes waits"
    assert window.wait(now, 0, 0) == NEVER_MS
    deep = sliding((0, 10))
    deep.owe(100)
    assert deep.wait(0, 10, 10) == 11 * MINUTE.cycle * MINUTE.bucket_ms
    assert window.pack() == [5, 0, 4, 10, 6], "asking changes nothing"


def test_a_day_counts_until_it_ends_and_a_debt_takes_days() -> None:
    window = Calendar(Period.DAY, index=5)
    now = 5 * DAY_MS
    window.add(now, 3)
    assert (window.room(now, 10), window.room(now, 2), window.taken()) == (7, 0, 3)
    last = 6 * DAY_MS - GRANT_MS
    assert (window.room(last - 1, 10), window.room(last, 10)) == (7, 0), "a grant must not reach into the next day"
    assert (window.wait(now, 10, 7), window.wait(now, 10, 8)) == (0, DAY_MS)
    assert window.wait(now, 10, 11) == NEVER_MS
    assert (window.empty_at(), Calendar(Period.DAY).empty_at()) == (6 * DAY_MS, 0)
    window.owe(17)
    assert (window.taken(), window.empty_at(), window.wait(now, 0, 0)) == (20, NEVER_MS, NEVER_MS)
    assert [window.wait(now, 10, need) for need in (0, 3, 4)] == [2 * DAY_MS, 2 * DAY_MS, 3 * DAY_MS]
    window.roll(now, 10)
    assert window.pack() == [10, 5, 10]
    window.roll(now - DAY_MS, 10)
    assert window.pack() == [10, 4, 10], "a clock that went back keeps what was taken"
    window.roll(now, 4)
    assert window.pack() == [6, 5, 4]
    window.roll(now + 2 * DAY_MS, 4)
    assert window.pack() == [0, 7, 2], "the day that was skipped has paid too"
    window.owe(TOKENS_MAX + 1)
    assert window.pack()[0] == TOKENS_MAX
    window.roll(now + 2 * DAY_MS, None)
    assert window.pack() == [0, 7, 2]


def test_a_day_takes_back_only_what_was_granted_in_it() -> None:
    window = Calendar(Period.DAY, index=5, used=6, debt=9)
    window.undo_taken(4 * DAY_MS, 5, owed=True)
    assert window.pack() == [9, 5, 6]
    window.undo_taken(5 * DAY_MS, 2, owed=False)
    assert window.pack() == [9, 5, 4]
    window.undo_taken(6 * DAY_MS - 1, 6, owed=False)
    assert window.pack() == [9, 5, 0]
    window.undo_taken(5 * DAY_MS, 7, owed=True)
    assert window.pack() == [2, 5, 0]
    window.undo_taken(5 * DAY_MS, 7, owed=True)
    assert window.pack() == [0, 5, 0]


def test_a_lifetime_never_ends() -> None:
    window = Total()
    assert (window.empty_at(), window.wait(0, 10, 10), window.wait(0, 10, 11)) == (0, 0, NEVER_MS)
    window.add(0, 4)
    window.owe(3)
    window.roll(10**13, 10)
    assert (window.taken(), window.room(0, 10), window.room(0, 5), window.empty_at()) == (7, 3, 0, NEVER_MS)
    window.undo_taken(0, 2, owed=False)
    assert window.pack() == [5]
    window.undo_taken(0, 9, owed=True)
    assert window.pack() == [0]
    window.owe(TOKENS_MAX + 9)
    assert window.pack() == [TOKENS_MAX]


@pytest.mark.parametrize("period", list(Period))
def test_periods_begin_where_the_calendar_says(period: Period) -> None:
    window = fresh(period)
    assert type(window) is {Period.MINUTE: Sliding, Period.HOUR: Sliding, Period.LIFETIME: Total}.get(period, Calendar)
    window.add(0, 5)
    assert unpack(period, window.pack()).pack() == window.pack()
    if type(window) is Calendar:
        for year, month, day in ((1970, 1, 1), (2024, 2, 29), (2024, 12, 31), (2025, 1, 1), (2026, 11, 17)):
            moment = int(datetime(year, month, day, 13, tzinfo=UTC).timestamp()) * 1000
            index = calendar_index(period, moment)
            start, end = calendar_start(period, index), calendar_start(period, index + 1)
            assert start <= moment < end
            assert (calendar_index(period, start), calendar_index(period, end)) == (index, index + 1)
            assert period is not Period.WEEK or start < 0 or datetime.fromtimestamp(start / 1000, UTC).weekday() == 0
            assert period is not Period.MONTH or datetime.fromtimestamp(start / 1000, UTC).day == 1


def test_a_month_after_all_calendars_never_begins() -> None:
    assert calendar_start(Period.MONTH, 9_998 * 12 + 11) < NEVER_MS
    assert calendar_start(Period.MONTH, 9_999 * 12) == NEVER_MS


@pytest.mark.parametrize(
    ("period", "numbers"),
    [
        (Period.MINUTE, []),
        (Period.MINUTE, [0, 5]),
        (Period.MINUTE, [0, 5, -1]),
        (Period.MINUTE, [-1]),
        (Period.MINUTE, [TOKENS_MAX * 4 + 1]),
        (Period.MINUTE, [0, 5, 1, 0, 1]),
        (Period.MINUTE, [0, 5, 1, MINUTE.cycle + 1, 1]),
        (Period.HOUR, [0, TOKENS_MAX, 1]),
        (Period.DAY, [0, TOKENS_MAX, 1]),
        (Period.DAY, [0, 1]),
        (Period.LIFETIME, [0, 1]),
    ],
)
def test_what_was_never_written_is_not_read(period: Period, numbers: list[int]) -> None:
    with pytest.raises(ValueError):
        unpack(period, numbers)


def test_what_may_have_been_written_is_read() -> None:
    for numbers in ([0, 0, 1], [TOKENS_MAX * 4], [0, 5, 1, MINUTE.cycle, 1], [0, 5, 1, 1, 0]):
        assert unpack(Period.MINUTE, numbers).pack() == numbers
    assert unpack(Period.HOUR, [3, HOUR.cycle, 4, 1, 1]).taken() == 8
