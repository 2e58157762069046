"""Count one side of one limit: how much of a period's requests, or of its tokens, is taken.

    Sliding    minutes and hours, as counts per small bucket of time
    Calendar   UTC days, weeks (from Monday) and months
    Total      a lifetime

A grant made at the database's moment g is sent in [g, g + GRANT_MS]. Calls sent within one period
were therefore granted within period + GRANT_MS of each other. A bucket counts until its youngest
grant is older than that, so at no moment do more grants than the limit lie in any period +
GRANT_MS, and by send time no period of any alignment holds more than the limit. Near the end of a
calendar period nothing is granted that could be sent in the next one.

Use beyond what was reserved is a debt. Room that comes free pays it at that very moment, so the
result does not depend on when someone looks. This module knows numbers only. Call `roll` before any
other method that is given a moment.
"""

from bisect import bisect_left
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import accumulate
from operator import sub
from typing import Protocol

import msgspec

from tidegate.core.budgets.budget import GRANT_MS, NEVER_MS, TOKENS_MAX, Period

_DAY_MS = 24 * 3600 * 1000
_MONTHS_PER_YEAR = 12
# 1 January 1970 was a Thursday: weeks are counted from the Monday before.
_EPOCH_WEEKDAY = 3
# A moment that no clock of ours ever shows: in the year 9000.
_NOW_MAX = 221_845_392_000_000


class Window(Protocol):
    """A count of how much of one side of one limit is taken."""

    def roll(self, now: int, limit: int | None) -> None:
        """Drop what has left the window by now, and pay debts with the free room."""

    def room(self, now: int, limit: int) -> int:
        """Return how much more may be taken now."""

    def taken(self) -> int:
        """Return how much counts against the limit, debts included."""

    def add(self, now: int, count: int) -> None:
        """Take this much now."""

    def owe(self, count: int) -> None:
        """Note a debt: this much was used without having been taken.

        Room that comes free pays it.
        """

    def undo_taken(self, granted_at: int, count: int, *, owed: bool) -> None:
        """Undo part of what was taken at a moment, as far as it still counts.

        With `owed`, the rest also comes off the debt.
        """

    def wait(self, now: int, limit: int, need: int) -> int:
        """Return how long until `need`, at most the limit, fits if nothing else changes."""

    def empty_at(self) -> int:
        """Return the moment from which on nothing in this window counts."""

    def pack(self) -> list[int]:
        """Return the window as plain numbers."""


class Span(msgspec.Struct, frozen=True):
    """A sliding period in buckets.

    Wide buckets are few. They keep a count up to one bucket too long, which costs use but stays
    exact.
    """

    period_ms: int
    bucket_ms: int

    def leaves_at(self, bucket: int) -> int:
        """Return the moment when a bucket's youngest grant shares no period with a call granted
        then.
        """
        return self.bucket_ms * (bucket + 1) + self.period_ms + GRANT_MS

    @property
    def cycle(self) -> int:
        """Return the number of buckets of time until a bucket leaves the window."""
        return self.leaves_at(0) // self.bucket_ms


MINUTE = Span(60_000, 250)
HOUR = Span(3_600_000, 15_000)
_SPANS = {Period.MINUTE: MINUTE, Period.HOUR: HOUR}


def stepped_back(at: int, ahead: int, bucket: int) -> int:
    """Return where a bucket goes when the newest one is so many buckets ahead of the present."""
    return min(at - ahead + 1, bucket)


class Sliding:
    """Counts per bucket of time, oldest first."""

    __slots__ = ("_at", "_counts", "_span", "debt", "total")

    def __init__(self, span: Span, debt: int = 0) -> None:
        self._span = span
        self._at: list[int] = []
        self._counts: list[int] = []
        self.total = 0
        self.debt = debt

    def roll(self, now: int, limit: int | None) -> None:
        span = self._span
        bucket = now // span.bucket_ms
        if self._at and self._at[-1] > bucket:
            self._step_back(bucket)
        if limit is None:
            self.debt = 0
        gone = 0
        while gone < len(self._at) and (leaves_at := span.leaves_at(self._at[gone])) <= now:
            if self.debt and limit:
                gone = self._skip_cycles(gone, limit, (now - leaves_at) // (span.cycle * span.bucket_ms))
                leaves_at = span.leaves_at(self._at[gone])
                if leaves_at > now:
                    break
            self.total -= self._counts[gone]
            gone += 1
            self._pay(leaves_at // span.bucket_ms, limit)
        del self._at[:gone], self._counts[:gone]
        self._pay(bucket, limit)

    def _step_back(self, bucket: int) -> None:
        """Follow the database's clock back: keep each count as young as it was, which is never too
        old.

        The newest bucket alone makes the last step. After a clock jumped, `move` may have put it
        one bucket ahead of its time. If all buckets stepped back that far, the oldest would leave
        too early.
        """
        ahead = self._at[-1] - bucket
        self._at = [stepped_back(at, ahead, bucket) for at in self._at]
        if len(self._at) > 1 and self._at[-2] == bucket:
            self._at.pop()
            self._counts[-2:] = [sum(self._counts[-2:])]

    def move(self, ms: int) -> None:
        """Follow a clock that jumps ahead by this much: all counts stay as young as they are, or
        get a little younger.
        """
        buckets = -(-ms // self._span.bucket_ms)
        self._at = [at + buckets for at in self._at]

    def _skip_cycles(self, gone: int, limit: int, cycles_max: int) -> int:
        """Count the cycles at once in which a large debt fills a full window again and again."""
        del self._at[:gone], self._counts[:gone]
        turns = min(cycles_max, self.debt // limit)
        if self.total == limit and turns > 0:
            self._at = [at + turns * self._span.cycle for at in self._at]
            self.debt -= turns * limit
        return 0

    def _pay(self, bucket: int, limit: int | None) -> None:
        if self.debt and limit is not None and (paid := min(self.debt, limit - self.total)) > 0:
            self._put(bucket, paid)
            self.debt -= paid

    def _put(self, bucket: int, count: int) -> None:
        if self._at and self._at[-1] >= bucket:
            self._counts[-1] += count
        else:
            self._at.append(bucket)
            self._counts.append(count)
        self.total += count

    def room(self, now: int, limit: int) -> int:
        return max(0, limit - self.total)

    def taken(self) -> int:
        return self.total + self.debt

    def add(self, now: int, count: int) -> None:
        if count:
            self._put(now // self._span.bucket_ms, count)

    def owe(self, count: int) -> None:
        self.debt = min(self.debt + count, TOKENS_MAX)

    def undo_taken(self, granted_at: int, count: int, *, owed: bool) -> None:
        bucket = granted_at // self._span.bucket_ms
        place = bisect_left(self._at, bucket)
        if place == len(self._at) or self._at[place] != bucket:
            return
        back = min(count, self._counts[place])
        self._counts[place] -= back
        self.total -= back
        if self._counts[place] == 0:
            del self._at[place], self._counts[place]
        if owed:
            self.debt -= min(self.debt, count - back)

    def wait(self, now: int, limit: int, need: int) -> int:
        if self.debt == 0 and self.room(now, limit) >= need:
            return 0
        if limit < need or limit <= 0:
            return NEVER_MS
        ahead = self._copy()
        while True:
            if ahead.total == limit and ahead.debt >= limit:
                ahead._skip_cycles(0, limit, ahead.debt)
            moment = self._span.leaves_at(ahead._at[0])
            ahead.roll(moment, limit)
            if ahead.debt == 0 and ahead.room(moment, limit) >= need:
                return moment - now

    def _copy(self) -> "Sliding":
        other = Sliding(self._span, self.debt)
        other._at, other._counts, other.total = self._at[:], self._counts[:], self.total
        return other

    def empty_at(self) -> int:
        if self.debt:
            return NEVER_MS
        return self._span.leaves_at(self._at[-1]) if self._at else 0

    def pack(self) -> list[int]:
        numbers = [self.debt] * (1 + 2 * len(self._at))
        numbers[1::2] = map(sub, self._at, [0, *self._at])
        numbers[2::2] = self._counts
        return numbers

    @classmethod
    def unpack(cls, span: Span, numbers: Sequence[int]) -> "Sliding":
        window = cls(span, numbers[0])
        gaps = numbers[1::2]
        window._at = list(accumulate(gaps))
        window._counts = list(numbers[2::2])
        window.total = sum(window._counts)
        if window._at:
            if window._at[-1] * span.bucket_ms > _NOW_MAX or (len(gaps) > 1 and min(gaps[1:]) < 1):
                raise ValueError("buckets out of order or out of time")
            # The newest bucket may have been written under a later clock, but all of them lie
            # within one window of it.
            if window._at[-1] - window._at[0] > span.cycle:
                raise ValueError("more buckets than a window holds")
        return window


class Calendar:
    """One count for the UTC day, week or month of the present moment."""

    __slots__ = ("_index", "_period", "debt", "used")

    def __init__(self, period: Period, index: int = 0, used: int = 0, debt: int = 0) -> None:
        self._period = period
        self._index = index
        self.used = used
        self.debt = debt

    def roll(self, now: int, limit: int | None) -> None:
        index = calendar_index(self._period, now)
        if limit is None:
            self.debt = 0
        if index > self._index:
            skipped = index - self._index - 1
            self.debt = max(0, self.debt - skipped * (limit or 0))
            self.used = 0
        # After a clock went back a day the count stays: to grant too little is better than too
        # much.
        self._index = index
        if self.debt and limit is not None and (paid := min(self.debt, limit - self.used)) > 0:
            self.used += paid
            self.debt -= paid

    def room(self, now: int, limit: int) -> int:
        if now + GRANT_MS >= calendar_start(self._period, self._index + 1):
            return 0
        return max(0, limit - self.used)

    def taken(self) -> int:
        return self.used + self.debt

    def add(self, now: int, count: int) -> None:
        self.used += count

    def owe(self, count: int) -> None:
        self.debt = min(self.debt + count, TOKENS_MAX)

    def undo_taken(self, granted_at: int, count: int, *, owed: bool) -> None:
        if calendar_index(self._period, granted_at) != self._index:
            return
        back = min(count, self.used)
        self.used -= back
        if owed:
            self.debt -= min(self.debt, count - back)

    def wait(self, now: int, limit: int, need: int) -> int:
        if self.debt == 0 and self.room(now, limit) >= need:
            return 0
        if limit < need or limit <= 0:
            return NEVER_MS
        # Each coming period pays its limit towards the debt: find the first that has `need` left
        # after that.
        periods = max(1, -(-(self.debt + need) // limit))
        return calendar_start(self._period, self._index + periods) - now

    def empty_at(self) -> int:
        if self.debt:
            return NEVER_MS
        return calendar_start(self._period, self._index + 1) if self.used else 0

    def pack(self) -> list[int]:
        return [self.debt, self._index, self.used]

    @classmethod
    def unpack(cls, period: Period, numbers: Sequence[int]) -> "Calendar":
        debt, index, used = numbers
        if index > calendar_index(period, _NOW_MAX):
            raise ValueError("a calendar period out of time")
        return cls(period, index, used, debt)


class Total:
    """A count for a lifetime: nothing leaves it, and use beyond the limit simply counts."""

    __slots__ = ("used",)

    def __init__(self, used: int = 0) -> None:
        self.used = used

    def roll(self, now: int, limit: int | None) -> None:
        """Do nothing: no count leaves a lifetime."""

    def room(self, now: int, limit: int) -> int:
        return max(0, limit - self.used)

    def taken(self) -> int:
        return self.used

    def add(self, now: int, count: int) -> None:
        self.used += count

    def owe(self, count: int) -> None:
        self.used = min(self.used + count, TOKENS_MAX)

    def undo_taken(self, granted_at: int, count: int, *, owed: bool) -> None:
        self.used -= min(count, self.used)

    def wait(self, now: int, limit: int, need: int) -> int:
        return 0 if self.room(now, limit) >= need else NEVER_MS

    def empty_at(self) -> int:
        return NEVER_MS if self.used else 0

    def pack(self) -> list[int]:
        return [self.used]

    @classmethod
    def unpack(cls, numbers: Sequence[int]) -> "Total":
        (used,) = numbers
        return cls(used)


def fresh(period: Period) -> Window:
    """Return a window from which nothing is taken."""
    if period in _SPANS:
        return Sliding(_SPANS[period])
    return Total() if period is Period.LIFETIME else Calendar(period)


def unpack(period: Period, numbers: Sequence[int]) -> Window:
    """Return the window that `pack` wrote; ValueError for anything else."""
    if not numbers or min(numbers) < 0 or max(numbers) > TOKENS_MAX * 4:
        raise ValueError("a count that cannot be")
    if period in _SPANS:
        if len(numbers) % 2 == 0:
            raise ValueError("a bucket without a count")
        return Sliding.unpack(_SPANS[period], numbers)
    return Total.unpack(numbers) if period is Period.LIFETIME else Calendar.unpack(period, numbers)


def calendar_index(period: Period, now: int) -> int:
    """Return the number of the day, week or month that contains a moment."""
    days = now // _DAY_MS
    if period is Period.DAY:
        return days
    if period is Period.WEEK:
        return (days + _EPOCH_WEEKDAY) // 7
    date = datetime.fromtimestamp(now / 1000, UTC)
    return date.year * _MONTHS_PER_YEAR + date.month - 1


def calendar_start(period: Period, index: int) -> int:
    """Return the first moment of a day, week or month."""
    if period is Period.DAY:
        return index * _DAY_MS
    if period is Period.WEEK:
        return (index * 7 - _EPOCH_WEEKDAY) * _DAY_MS
    year, month = divmod(index, _MONTHS_PER_YEAR)
    if year > 9998:
        return NEVER_MS
    return int(datetime(year, month + 1, 1, tzinfo=UTC).timestamp()) * 1000
