"""The ledger of one budget in money: what each period has spent or set aside, and what is in
flight.

A budget in money is hard: no call goes that could pass the limit, and none goes alone with a debt.
A call's permit sets aside the most that it can cost; settling replaces that by the real cost. An
amount that was never settled counts as spent for good. It counts as in flight until its process is
known to be gone, or for an hour: meanwhile a call that does not fit waits instead of failing.
Amounts are nano-units; this module does not know their currency.
"""

from collections.abc import Collection
from typing import Self

from tidegate.core.budgets import counting
from tidegate.core.budgets.budget import TOKENS_MAX, Limit, Period
from tidegate.core.budgets.counting import Window
from tidegate.core.budgets.flights import NO_HOLDER, Flights
from tidegate.core.budgets.ledger import Ledger

# How soon to ask again while calls in flight have the rest of a budget set aside.
RESERVED_MS = 250


class MoneyLedger(Ledger):
    """The counts of one budget in money, where reserving and settling are done for `holder`.

    The first window of a pair is what is in flight, the second what counts against the limit.
    """

    __slots__ = ("holder",)

    def __init__(self, holder: int = NO_HOLDER) -> None:
        super().__init__()
        self.holder = holder

    def for_holder(self, holder: int) -> Self:
        """Set the holder for whom later changes are made, and return this ledger."""
        self.holder = holder
        return self

    def fits(self, limit: Limit, now: int, requests: int, each: int) -> int:
        if limit.nano is None or each <= 0:
            return requests
        return min(requests, self._rolled(limit, now)[1].room(now, limit.nano) // each)

    def reserve(self, limit: Limit, now: int, requests: int, tokens: int) -> None:
        in_flight, taken = self._both(limit, now)
        in_flight.begin_flights(now, tokens, self.holder)
        taken.add(now, tokens)

    def left(self, limit: Limit, now: int) -> int:
        """Return the money that is left if all calls in flight cost nothing."""
        if limit.nano is None:
            return TOKENS_MAX
        in_flight, taken = self._rolled(limit, now)
        return min(limit.nano, max(0, limit.nano - taken.taken() + in_flight.taken()))

    def wait(self, limit: Limit, now: int, each: int) -> int:
        if limit.nano is None or self.fits(limit, now, 1, each):
            return 0
        if self.left(limit, now) >= each:
            return RESERVED_MS
        return self.renews(limit, now, each)

    def renews(self, limit: Limit, now: int, each: int) -> int:
        """Return how long until the calendar alone gives the limit room for this much."""
        if limit.nano is None:
            return 0
        return self._rolled(limit, now)[1].wait(now, limit.nano, each)

    def settle_usage(self, limit: Limit, now: int, granted_at: int, unsent: int, reserved: int, used: int) -> None:
        in_flight, taken = self._both(limit, now)
        in_flight.end_flights(granted_at, reserved, self.holder)
        if used > reserved:
            taken.owe(min(used - reserved, TOKENS_MAX))
        elif used < reserved:
            taken.undo_taken(granted_at, reserved - used, owed=False)
        taken.roll(now, limit.nano)

    def forget_flights(self, living: Collection[int]) -> bool:
        """Count as spent what holders outside `living` have in flight; return whether there was
        any.
        """
        forgot = [pair[0].forget(living) for pair in self._pairs.values() if isinstance(pair[0], Flights)]
        return any(forgot)

    def _both(self, limit: Limit, now: int) -> tuple[Flights, Window]:
        in_flight, taken = self._rolled(limit, now)
        assert isinstance(in_flight, Flights)
        return in_flight, taken

    @staticmethod
    def _fresh(period: Period) -> tuple[Window, Window]:
        return Flights(), counting.fresh(period)

    @staticmethod
    def _unpack(period: Period, first: list[int], second: list[int]) -> tuple[Window, Window]:
        return Flights.restored(first), counting.unpack(period, second)

    @staticmethod
    def _roll(windows: tuple[Window, Window], limit: Limit, now: int) -> None:
        windows[0].roll(now, None)
        windows[1].roll(now, limit.nano)

    @staticmethod
    def _fill(windows: tuple[Window, Window], limit: Limit, now: int) -> None:
        windows[1].add(now, limit.nano or 0)
