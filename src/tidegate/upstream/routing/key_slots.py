"""The calls that a key, a user or a tenant may have at once, under a cap over all processes.

- A call takes a slot right before a deployment is looked for, and always gives it back at its end.
- A few calls wait here, so that no slot stays idle. The others are put off, because a waiting call
  takes the place of one that could go.

This module knows no deployment and no budget.
"""

import asyncio
from collections.abc import Iterable

from tidegate.core.errors import Withheld
from tidegate.core.ports import Clock
from tidegate.upstream.routing.slots import SlotDemand, Slots
from tidegate.wait_line import WaitLine

# Prefix that keeps these names apart from those of deployments and models.
PREFIX = "parallel:"
WAIT_S = 2.0
WAITING_CALLS_MAX = 16
AGAIN_MS = 250

Wanted = tuple[tuple[str, int], ...]


class _NamedSlots(Slots):
    """The slots of one name, with the calls that wait for one."""

    __slots__ = ("line",)

    def __init__(self, name: str, cap: int, share: int) -> None:
        super().__init__(PREFIX + name, cap, share)
        self.line = WaitLine()

    def wanted(self) -> int:
        """Return how many slots are needed now. A key without calls needs none."""
        return min(self.in_flight + len(self.line), self.cap)

    def call_waiting(self) -> None:
        """Give turns for the free slots to the calls that have waited longest."""
        for _ in range(self.free):
            if not self.line.call_first():
                return


class KeySlots:
    def __init__(self, demand: SlotDemand, clock: Clock) -> None:
        self._demand = demand
        self._clock = clock
        self._names: dict[str, _NamedSlots] = {}

    async def take_slots(self, wanted: Wanted) -> "TakenKeySlots":
        """Take a slot of each of these names; raise Withheld if one of them has none in time."""
        end_s = asyncio.get_running_loop().time() + WAIT_S
        try:
            while (lacking := self._lacking(wanted)) is not None:
                self._demand.hurry(is_urgent=True)
                await self._wait(lacking, end_s)
        except BaseException:
            self._forget_unused(wanted)
            raise
        for name, _ in wanted:
            self._names[name].take_slot()
        return TakenKeySlots(self, wanted, self._demand.own_until_ms())

    def release_slots(self, wanted: Wanted) -> None:
        for name, _ in wanted:
            slots = self._names[name]
            slots.release_slot()
            slots.call_waiting()
        self._forget_unused(wanted)

    def _forget_unused(self, wanted: Wanted) -> None:
        """Forget those of these names that have no call in flight or waiting.

        Callers choose the names of users and could fill the table. Shared slots are forgotten when
        their share is gone.
        """
        if not self._demand.is_alone:
            return
        for name, _ in wanted:
            slots = self._names.get(name)
            if slots is not None and not slots.in_flight and not slots.line:
                del self._names[name]

    def _lacking(self, wanted: Wanted) -> _NamedSlots | None:
        """Return the first of these names that has no free slot."""
        is_alone = self._demand.is_alone
        is_ours = self._demand.own_until_ms() > self._clock.monotonic_ms()
        for name, cap in wanted:
            slots = self._names.get(name)
            if slots is None:
                slots = self._names[name] = _NamedSlots(name, cap, cap if is_alone else 0)
            elif slots.cap != cap:
                slots.set_cap(cap, is_alone=is_alone)
            if slots.free < 1 or not is_ours:
                return slots
        return None

    async def _wait(self, slots: _NamedSlots, end_s: float) -> None:
        if len(slots.line) < WAITING_CALLS_MAX:
            turn = slots.line.join()
            try:
                async with asyncio.timeout_at(end_s):
                    await turn
                return
            except BaseException as stopped:
                if slots.line.give_up(turn):
                    # The call leaves although its turn came, so the next call gets the turn.
                    slots.call_waiting()
                if not isinstance(stopped, TimeoutError):
                    raise
        raise Withheld(
            "all parallel calls that its key, user or organization may have are in use",
            until_ms=self._clock.monotonic_ms() + AGAIN_MS,
            retry_after_ms=AGAIN_MS,
            code="max_parallel_requests_exceeded",
        )

    # The owner of slots that are shared with other processes.

    def slots(self) -> Iterable[Slots]:
        return list(self._names.values())

    def leaving_slots(self) -> Iterable[Slots]:
        return ()

    def has_shares(self) -> None:
        for name, slots in list(self._names.items()):
            slots.call_waiting()
            if not slots.share and not slots.in_flight and not slots.line:
                del self._names[name]


class TakenKeySlots:
    """The slots that one call took, to be given back once.

    From `until_ms` on they may belong to another process, and no call begins on them.
    """

    __slots__ = ("_slots", "_wanted", "until_ms")

    def __init__(self, slots: KeySlots, wanted: Wanted, until_ms: float) -> None:
        self.until_ms = until_ms
        self._slots = slots
        self._wanted = wanted

    def release_key_slots(self) -> None:
        self._slots.release_slots(self._wanted)
