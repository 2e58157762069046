"""The permit to send one call, checked once more right before the first byte."""

from collections.abc import Callable

import msgspec

from tidegate.core.budgets.budget import Budget
from tidegate.core.ports import Clock


class PermitExpired(Exception):
    """The permit ran out before the first byte was written: nothing was sent, and the call takes a new permit."""


class SendPermit(msgspec.Struct, eq=False):
    """The permit to send one call until a moment, and while the call is wanted. `begun` says that the call was sent under it."""

    _clock: Clock
    budgets: tuple[Budget, ...]
    grant_id: str
    tokens: int
    dies_ms: float
    nano: int = 0
    _may_begin: Callable[[], bool] | None = None
    begun: bool = False

    def expire_by(self, moment_ms: float, may_begin: Callable[[], bool] | None) -> None:
        """Run out at this moment, or earlier: as soon as the call may not begin any more."""
        self.dies_ms = min(self.dies_ms, moment_ms)
        self._may_begin = may_begin

    def begin_send(self) -> None:
        """The next thing that happens is the first byte on the wire."""
        if self._clock.monotonic_ms() >= self.dies_ms or not (self._may_begin is None or self._may_begin()):
            raise PermitExpired
        self.begun = True
