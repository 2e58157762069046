"""How many calls at once those behind them may have: a key, a user, a tenant; over every process never above the cap.

A place is taken per call, right before a deployment is looked for, and given back when the call ends, however it ends. With the embedded
store there is one process, and the caps are its own. With several, this process's part of a cap is asked of the Limits port when somebody
is short of it, and given up when nobody wants it. A few calls wait here for a place, so that one is never idle; the others are put off,
for a call that waits takes the place of one that could go. It knows no deployment and no budget.
"""

import asyncio
from collections import deque
from collections.abc import Callable

import structlog

from tidegate.core.errors import LimitsUnavailable, Withheld
from tidegate.core.ports import Clock, Limits

log = structlog.get_logger(__name__)

# The names of these places lie beside those of deployments and models.
PREFIX = "parallel:"
WAIT_S = 2.0
WAITERS_MAX = 16
AGAIN_MS = 250
PERIOD_S = 0.5
HURRY_S = 0.05

Wanted = tuple[tuple[str, int], ...]


class _Places:
    """Those of one name: the cap over all processes, this one's part of it, and who waits."""

    __slots__ = ("cap", "in_flight", "share", "waiting")

    def __init__(self, cap: int, share: int) -> None:
        self.cap = cap
        self.share = share
        self.in_flight = 0
        self.waiting: deque[asyncio.Future[None]] = deque()

    @property
    def wanted(self) -> int:
        return min(self.in_flight + len(self.waiting), self.cap)

    def wake(self) -> None:
        """As many as there are places for, the longest waiting first."""
        free = self.share - self.in_flight
        while free > 0 and self.waiting:
            one = self.waiting.popleft()
            if not one.done():
                one.set_result(None)
                free -= 1


class KeySlots:
    def __init__(self, limits: Limits | None, worker_id: Callable[[], str] | None, clock: Clock) -> None:
        self._limits = limits
        self._worker_id = worker_id if limits is not None else None
        self._clock = clock
        self._names: dict[str, _Places] = {}
        self._given_to = ""
        self._sharing: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    async def take(self, wanted: Wanted) -> None:
        """A place of each of these names; Withheld when one of them has none in time."""
        end_s = asyncio.get_running_loop().time() + WAIT_S
        while (lacking := self._lacking(wanted)) is not None:
            await self._wait(lacking, end_s)
        for name, _ in wanted:
            self._names[name].in_flight += 1

    def give_back(self, wanted: Wanted) -> None:
        for name, _ in wanted:
            places = self._names[name]
            places.in_flight -= 1
            if places.waiting:
                places.wake()
            elif self._worker_id is None and not places.in_flight:
                # Callers choose the names of users: what is not needed must not pile up.
                del self._names[name]

    def _lacking(self, wanted: Wanted) -> _Places | None:
        """The first of these names without a free place."""
        is_current = self._worker_id is None or self._given_to == self._worker_id()
        for name, cap in wanted:
            places = self._names.get(name)
            if places is None:
                places = self._names[name] = _Places(cap, cap if self._worker_id is None else 0)
            elif places.cap != cap:
                places.cap = cap
                places.share = cap if self._worker_id is None else min(places.share, cap)
            if places.in_flight >= places.share or not is_current:
                return places
        return None

    async def _wait(self, places: _Places, end_s: float) -> None:
        self._ask_for_more()
        if len(places.waiting) < WAITERS_MAX:
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            places.waiting.append(place)
            try:
                async with asyncio.timeout_at(end_s):
                    await place
                return
            except TimeoutError:
                pass
            except BaseException:
                if place.done() and not place.cancelled():
                    # It was this one's turn, and it goes away: the next has it.
                    places.wake()
                raise
            finally:
                if place in places.waiting:
                    places.waiting.remove(place)
        raise Withheld(
            "all parallel calls that its key, user or organization may have are in use",
            until_ms=self._clock.monotonic_ms() + AGAIN_MS,
            retry_after_ms=AGAIN_MS,
            code="max_parallel_requests_exceeded",
        )

    # This process's part.

    def _ask_for_more(self) -> None:
        if self._worker_id is None:
            return
        self._hurry.set()
        if self._sharing is None:
            self._sharing = asyncio.create_task(self._share_while_any_is_wanted())

    async def _share_while_any_is_wanted(self) -> None:
        reached = True
        try:
            while self._names:
                self._hurry.clear()
                try:
                    await self._share()
                    reached = True
                except LimitsUnavailable as error:
                    if reached:
                        log.warning("key_slots_unshared", why=str(error))
                    reached = False
                is_short = any(places.waiting for places in self._names.values())
                await asyncio.sleep(HURRY_S if is_short and reached else 0)
                if not is_short or not reached:
                    await self._wait_for_hurry()
        finally:
            self._sharing = None

    async def _wait_for_hurry(self) -> None:
        try:
            async with asyncio.timeout(PERIOD_S):
                await self._hurry.wait()
        except TimeoutError:
            pass

    async def _share(self) -> None:
        assert self._limits is not None
        assert self._worker_id is not None
        asked = dict(self._names)
        for places in asked.values():
            # Until the answer is heard nothing begins that needs more than is asked for.
            places.share = min(places.share, max(places.wanted, places.in_flight))
        me = self._worker_id()
        shares = await self._limits.share_slots(
            me,
            {PREFIX + name: places.wanted for name, places in asked.items()},
            {PREFIX + name: max(places.share, places.in_flight) for name, places in asked.items()},
            {PREFIX + name: places.cap for name, places in asked.items()},
        )
        self._given_to = me
        for name, places in asked.items():
            places.share = shares.get(PREFIX + name, 0)
            places.wake()
            if not places.share and not places.in_flight and not places.waiting:
                del self._names[name]

    async def close(self) -> None:
        if self._sharing is not None:
            self._sharing.cancel()
            await asyncio.gather(self._sharing, return_exceptions=True)
