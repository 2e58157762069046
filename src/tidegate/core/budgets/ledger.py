"""The ledger of one budget: a pair of windows, requests and tokens, for each of its periods.

A ledger outlives its limits: a changed limit is compared with what was counted before. The packed
form has a version and at most a few kilobytes. A ledger that cannot be read counts as full for one
period, because it is unknown what was granted. This module does not know where ledgers are kept.
"""

from typing import Self

import msgspec

from tidegate.core.budgets import counting
from tidegate.core.budgets.budget import NEVER_MS, TOKENS_MAX, Budget, Limit, LimitRoom, Period, SideRoom
from tidegate.core.budgets.counting import Window

_VERSION = 1
_PERIODS = tuple(Period)
_Packed = tuple[int, list[tuple[int, list[int], list[int]]]]
_decoder = msgspec.msgpack.Decoder(_Packed)


class Ledger:
    """The counts of one budget. `is_damaged` means that the packed form could not be read."""

    __slots__ = ("_pairs", "is_damaged")

    def __init__(self) -> None:
        self._pairs: dict[Period, tuple[Window, Window]] = {}
        self.is_damaged = False

    def fits(self, limit: Limit, now: int, requests: int, each: int) -> int:
        """Return how many of these requests, with so many tokens each, the limit allows now."""
        windows = self._rolled(limit, now)
        if limit.requests is not None:
            requests = min(requests, windows[0].room(now, limit.requests))
        if limit.tokens is not None and each > 0:
            room = windows[1].room(now, limit.tokens)
            if each > limit.tokens and limit.period is not Period.LIFETIME:
                # It never fits whole, so it goes alone: it takes the room there is, and the rest
                # becomes a debt.
                requests = min(requests, 1 if room > 0 else 0)
            else:
                requests = min(requests, room // each)
        return requests

    def reserve(self, limit: Limit, now: int, requests: int, tokens: int) -> None:
        """Count these requests and tokens; call `fits` first."""
        windows = self._rolled(limit, now)
        windows[0].add(now, requests)
        reserved = tokens if limit.tokens is None else min(tokens, windows[1].room(now, limit.tokens))
        windows[1].add(now, reserved)
        windows[1].owe(tokens - reserved)

    def wait(self, limit: Limit, now: int, each: int) -> int:
        """Return how long until one more request with so many tokens fits without a settlement."""
        windows = self._rolled(limit, now)
        wait_ms = 0
        if limit.requests is not None:
            wait_ms = windows[0].wait(now, limit.requests, 1)
        if limit.tokens is not None and each > 0:
            need = 1 if each > limit.tokens and limit.period is not Period.LIFETIME else each
            wait_ms = max(wait_ms, windows[1].wait(now, limit.tokens, need))
        return wait_ms

    def room(self, budget: Budget, limit: Limit, now: int) -> LimitRoom:
        """Return what this limit has left now."""
        windows = self._rolled(limit, now)
        return LimitRoom(
            budget, limit.period, _side(windows[0], limit.requests, now), _side(windows[1], limit.tokens, now)
        )

    def settle_usage(self, limit: Limit, now: int, granted_at: int, unsent: int, reserved: int, used: int) -> None:
        """Replace what was reserved at a moment by what was used, and take back what was never
        sent.
        """
        windows = self._rolled(limit, now)
        windows[0].undo_taken(granted_at, unsent, owed=False)
        if used > reserved:
            windows[1].owe(min(used - reserved, TOKENS_MAX))
        elif used < reserved:
            windows[1].undo_taken(
                granted_at, reserved - used, owed=limit.tokens is not None and reserved > limit.tokens
            )
        windows[1].roll(now, limit.tokens)

    def _rolled(self, limit: Limit, now: int) -> tuple[Window, Window]:
        windows = self._pairs.get(limit.period)
        if windows is None:
            windows = self._pairs[limit.period] = self._fresh(limit.period)
            self._roll(windows, limit, now)
            if self.is_damaged:
                self._fill(windows, limit, now)
            return windows
        self._roll(windows, limit, now)
        return windows

    # A ledger of money overrides these.

    @staticmethod
    def _fresh(period: Period) -> tuple[Window, Window]:
        return counting.fresh(period), counting.fresh(period)

    @staticmethod
    def _unpack(period: Period, first: list[int], second: list[int]) -> tuple[Window, Window]:
        return counting.unpack(period, first), counting.unpack(period, second)

    @staticmethod
    def _roll(windows: tuple[Window, Window], limit: Limit, now: int) -> None:
        windows[0].roll(now, limit.requests)
        windows[1].roll(now, limit.tokens)

    @staticmethod
    def _fill(windows: tuple[Window, Window], limit: Limit, now: int) -> None:
        windows[0].add(now, limit.requests or 0)
        windows[1].add(now, limit.tokens or 0)

    def move(self, ms: int) -> None:
        """Follow a clock that jumps ahead by this much, so that the jump ends no minute or hour
        under way.
        """
        for pair in self._pairs.values():
            for side in pair:
                if isinstance(side, counting.Sliding):
                    side.move(ms)

    def empty_at(self) -> int:
        """Return the moment from which on nothing in this ledger counts; NEVER_MS when time alone
        does not bring it.
        """
        return max((side.empty_at() for pair in self._pairs.values() for side in pair), default=0)

    def pack(self) -> bytes:
        pairs = [
            (_PERIODS.index(period), pair[0].pack(), pair[1].pack())
            for period, pair in self._pairs.items()
            if max(pair[0].empty_at(), pair[1].empty_at()) > 0
        ]
        return msgspec.msgpack.encode((_VERSION, pairs))

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Return the ledger that `pack` wrote: a fresh one for no bytes, a damaged and full one for
        unreadable bytes.
        """
        ledger = cls()
        if not packed:
            return ledger
        try:
            version, pairs = _decoder.decode(packed)
            if version != _VERSION:
                raise ValueError("written by another version")
            for number, first, second in pairs:
                period = _PERIODS[number]
                ledger._pairs[period] = cls._unpack(period, first, second)
        except (msgspec.DecodeError, ValueError, IndexError):
            ledger = cls()
            ledger.is_damaged = True
        return ledger


def _side(window: Window, most: int | None, now: int) -> SideRoom | None:
    if most is None:
        return None
    empty_at = window.empty_at()
    # A debt must be paid before the limit has all of its room again.
    resets_ms = window.wait(now, most, most) if empty_at >= NEVER_MS else max(0, empty_at - now)
    return SideRoom(most, window.room(now, most), resets_ms)
