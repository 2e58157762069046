"""The calls that a process may have in flight under a name; over all processes they keep its cap.

- A name stands for a deployment, a model, a key, or all calls.
- With the embedded store there is one process, and it has all slots.
- With several processes, a loop asks the Limits port for this process's share of each name: often
  while it needs more, twice a second otherwise. Before the first answer it has none.
- While the store cannot be reached a share is kept, until other processes may take this one for
  dead; then its slots are theirs. A call that was admitted earlier checks this right before it is
  sent.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec
import structlog

from tidegate.core.errors import LimitsUnavailable
from tidegate.core.ports import DiscoveredLimitsStore, Fleet, Limits, Notices, Rests
from tidegate.wait_line import WaitLine

log = structlog.get_logger(__name__)

PERIOD_S = 0.5
HURRY_S = 0.05
STEP_MAX = 4
MODEL = "model:"
GLOBAL = "global"

# Slots that were asked for, and that no call has looked at since, are kept for this many rounds, at
# two a second.
UNSEEN_ROUNDS_MAX = 30


class Capacity(msgspec.Struct, frozen=True):
    """The limits and reports that processes share.

    - `limits` keeps the budgets.
    - `worker_id` returns the id of this process, and is called each time. With it slots are shared
      too; without it this is the only process.
    - `safe_until_ms` returns the monotonic moment until which the others surely count this process
      as alive.
    - `rests` shares rests that deployments asked for, and `fleet` each process's calls in flight.
    - `notices` reports changes of the interactive calls at once.
    - 0 or no entry means no cap; `in_flight_max` holds for this process alone.
    - Without `runs_items` this process has no worker: its only background calls are flex calls.
    """

    limits: Limits | None = None
    worker_id: Callable[[], str] | None = None
    discovered: DiscoveredLimitsStore | None = None
    rests: Rests | None = None
    fleet: Fleet | None = None
    notices: Notices | None = None
    model_in_flight_max: Mapping[str, int] = msgspec.field(default_factory=dict)
    in_flight_max_global: int = 0
    in_flight_max: int = 0
    runs_items: bool = True
    safe_until_ms: Callable[[], float] = lambda: math.inf


class Slots:
    """The slots of one name: the cap over all processes, our share, and our calls in flight."""

    __slots__ = (
        "_unseen_rounds",
        "cap",
        "highest",
        "in_flight",
        "is_asked",
        "is_seen",
        "is_short",
        "name",
        "share",
        "spare",
    )

    def __init__(self, name: str, cap: int, share: int) -> None:
        self.name = name
        self.cap = cap
        self.share = share
        self.in_flight = 0
        # The most in flight since the last share.
        self.highest = 0
        self.is_short = self.is_asked = self.is_seen = False
        self.spare = 0
        self._unseen_rounds = 0

    @property
    def free(self) -> int:
        return self.share - self.in_flight

    def set_cap(self, cap: int, *, is_alone: bool) -> None:
        """Change the cap; if there is no other process, this one has all slots."""
        self.cap = cap
        self.share = cap if is_alone else min(self.share, cap)

    def note_short(self) -> None:
        """Note that a call found no slot free."""
        self.is_short = True

    def note_asked(self) -> None:
        """Note that a worker would send if there were slots."""
        self.is_asked = True

    def note_seen(self) -> None:
        """Note that a caller saw free slots; a call that takes one has seen it."""
        self.is_seen = True

    def keep_spare(self, count: int) -> None:
        """Ask for this many slots beside those in use, for calls that may come at any moment."""
        self.spare = count

    def count(self, in_flight: int) -> None:
        """Set how many calls are in flight already."""
        self.in_flight = in_flight

    def take_slot(self) -> None:
        self.in_flight += 1
        self.is_seen = True
        if self.in_flight > self.highest:
            self.highest = self.in_flight

    def release_slot(self) -> None:
        self.in_flight -= 1

    def wanted(self) -> int:
        """Return how many slots to ask for: more after a lack, else a few more than were used."""
        if self.is_short:
            # Do not ask for all slots of a small cap at once, because another process may need some
            # soon.
            wanted = max(2 * self.share, self.in_flight + min(STEP_MAX, max(1, self.cap // 3)))
        elif self.highest:
            wanted = self.highest + self.highest // 4 + 1
        else:
            wanted = int(self.is_asked)
        return min(max(wanted, self.in_flight + self.spare if self.spare else 0), self.cap)

    def let_go(self, wanted: int) -> int:
        """Lower the share to `wanted`, but not below the calls in flight.

        Return how many calls may be in flight until the next share.
        """
        self.share = min(self.share, max(wanted, self.in_flight))
        return max(self.share, self.in_flight)

    def grant(self, share: int) -> None:
        """Set this process's share until the next answer."""
        self.share = min(share, self.cap)
        self.highest = self.in_flight
        self.is_short = False
        # A caller that asked looks again only at its next poll, so slots that came meanwhile are
        # kept until then.
        self._unseen_rounds = 0 if self.is_seen or not self.is_asked else self._unseen_rounds + 1
        if not 0 < self._unseen_rounds <= UNSEEN_ROUNDS_MAX:
            self.is_asked = False
            self._unseen_rounds = 0
        self.is_seen = False


class SlotOwner(Protocol):
    """An owner of slots that are shared with other processes."""

    def slots(self) -> Iterable[Slots]:
        """Return the slots for which a share is asked now."""

    def leaving_slots(self) -> Iterable[Slots]:
        """Return the slots on which no call begins any more.

        Those in use are kept, the others given back.
        """

    def has_shares(self) -> None:
        """Use the new shares, which all of `slots` have now."""


class ModelSlots:
    """Background calls in flight, by model and in all, under their caps.

    The model's cap is checked first.
    """

    def __init__(self, model_max: Mapping[str, int], all_max: int, *, is_alone: bool) -> None:
        self._is_alone = is_alone
        self._all = Slots(GLOBAL, all_max, all_max if is_alone else 0) if all_max else None
        self._by_model: dict[str, Slots] = {}
        self._lifted: list[Slots] = []
        self.allow(model_max, {})

    def allow(self, model_max: Mapping[str, int] | None, in_flight: Mapping[str, int]) -> None:
        """Set the models' caps; None leaves them. `in_flight` are the calls in flight by model.

        If slots are shared, a new cap has slots only after an answer.
        """
        if model_max is None:
            return
        if not self._is_alone:
            self._lifted += [one for model, one in self._by_model.items() if model not in model_max]
        before, self._by_model = self._by_model, {}
        for model, cap in model_max.items():
            one = self._by_model[model] = before.get(model) or Slots(MODEL + model, cap, 0)
            one.set_cap(cap, is_alone=self._is_alone)
            one.count(in_flight.get(model, 0))
        self.has_caps = self._all is not None or bool(self._by_model)

    def room(self, model: str) -> float:
        """Return how many more calls for this model may go out."""
        room = math.inf
        for one in (self._by_model.get(model), self._all):
            if one is not None:
                room = min(room, one.free)
        return room

    def note_short(self, model: str) -> None:
        """Note the cap that leaves no room for calls of this model, if one does."""
        for one in (self._by_model.get(model), self._all):
            if one is not None and one.free < 1:
                one.note_short()
                break

    def ask_for(self, model: str) -> None:
        """Note that calls for this model would go out if there were slots."""
        for one in (self._by_model.get(model), self._all):
            if one is not None:
                one.note_asked()

    def take_model_slot(self, model: str) -> None:
        if (one := self._by_model.get(model)) is not None:
            one.take_slot()
        if self._all is not None:
            self._all.take_slot()

    def release_model_slot(self, model: str) -> None:
        if (one := self._by_model.get(model)) is not None:
            one.release_slot()
        if self._all is not None:
            self._all.release_slot()

    def slots(self) -> Iterable[Slots]:
        return [*self._by_model.values(), *(() if self._all is None else (self._all,))]

    def leaving_slots(self) -> Iterable[Slots]:
        # No call counts under a cap that is gone, so its slots are given back.
        lifted, self._lifted = self._lifted, []
        return [Slots(one.name, one.cap, 0) for one in lifted]

    def has_shares(self) -> None:
        pass


class RoomSignal:
    """The signal that more calls may go.

    It wakes waiting calls and listeners; `line` is for reading.
    """

    def __init__(self, line: WaitLine) -> None:
        self.line = line
        self._listeners: list[Callable[[], None]] = []

    def listen(self, tell: Callable[[], None]) -> None:
        self._listeners.append(tell)

    def wake(self) -> None:
        """Let all waiting calls look again, because the first may wait for a model without room."""
        if self.line.turns:
            self.line.call_all()

    def announce(self) -> None:
        self.wake()
        for tell in self._listeners:
            tell()


class ReportedRests(Protocol):
    """The rests that other processes report."""

    def obey(self) -> None:
        """Rest where another process was asked to."""


class SlotSeeker(Protocol):
    """A deployment at which calls look for slots."""

    def ask_for_slots(self) -> None: ...

    def note_demand(self, now_ms: float) -> None: ...

    def note_interactive_demand(self, owner: str) -> None: ...


class SlotDemand:
    """The notes of calls for the loop that shares slots, and the incarnation that owns the slots.

    `worker_id` is called each time, because a process may begin a new incarnation. Without it this
    is the only process, and it has all slots. `safe_until_ms` returns the moment until which this
    incarnation surely lasts.
    """

    def __init__(
        self,
        worker_id: Callable[[], str] | None,
        model_slots: ModelSlots,
        safe_until_ms: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.is_alone = worker_id is None
        self._worker_id = worker_id
        self._safe_until_ms = safe_until_ms
        self._model_slots = model_slots
        self._given_to = ""
        self._hurry = asyncio.Event()
        self._urgent = asyncio.Event()

    def own_until_ms(self) -> float:
        """Return the moment until which the slots are ours; a past one if they are not."""
        if self._worker_id is None:
            return math.inf
        return self._safe_until_ms() if self._given_to == self._worker_id() else -math.inf

    def worker_id(self) -> str:
        assert self._worker_id is not None
        return self._worker_id()

    def given_to(self, worker_id: str) -> None:
        self._given_to = worker_id

    def note_background(self, states: Iterable[SlotSeeker], model: str, now_ms: float) -> None:
        """Note whether background calls for this model find slots at these deployments."""
        if self.is_alone:
            return
        if self.own_until_ms() <= now_ms or self._model_slots.room(model) < 1:
            self.ask(states, model)
            self._model_slots.note_short(model)
            return
        for state in states:
            state.note_demand(now_ms)

    def ask(self, states: Iterable[SlotSeeker], model: str) -> None:
        """Note that background calls for this model would go to these deployments with slots."""
        for state in states:
            state.ask_for_slots()
        self._model_slots.ask_for(model)

    def note_interactive(self, states: Iterable[SlotSeeker], owner: str) -> None:
        """Note which of these deployments have no slot for an interactive call of this owner."""
        if not self.is_alone:
            for state in states:
                state.note_interactive_demand(owner)

    def hurry(self, *, is_urgent: bool = False) -> None:
        """Note that a call lacks a slot; `is_urgent` if a user waits for its answer."""
        self._hurry.set()
        if is_urgent:
            self._urgent.set()

    def clear(self) -> None:
        self._hurry.clear()
        self._urgent.clear()

    async def wait(self, timeout_s: float, *, is_urgent: bool) -> None:
        """Wait until a call lacks a slot, but at most `timeout_s`."""
        event = self._urgent if is_urgent else self._hurry
        if event.is_set():
            return
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            pass


class SlotSharing:
    """The loop that keeps this process's shares up to date.

    In each round it obeys the rests that other processes report (`reported`).
    """

    def __init__(
        self,
        limits: Limits,
        demand: SlotDemand,
        owners: Sequence[SlotOwner],
        room: RoomSignal,
        reported: ReportedRests | None,
    ) -> None:
        self._limits = limits
        self._demand = demand
        self._owners = owners
        self._room = room
        self._reported = reported
        self._reached = True
        self._holds = False
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._demand.clear()
            if self._reported is not None:
                self._reported.obey()
            grew = False
            try:
                grew = await self._ask()
                self._reached = True
            except LimitsUnavailable as error:
                if self._reached:
                    log.warning("slots_unshared", why=str(error))
                self._reached = False
            except Exception as error:
                log.error("slots_crashed", kind=type(error).__name__)
            # A process that lacks slots asks again soon, as long as that brings more; otherwise it
            # asks slowly.
            await asyncio.sleep(HURRY_S)
            if not grew:
                await self._demand.wait(PERIOD_S - HURRY_S, is_urgent=True)
            await self._demand.wait(PERIOD_S, is_urgent=False)

    async def _ask(self) -> bool:
        """Ask for shares. Return True if this brought more slots."""
        wanted: dict[str, int] = {}
        in_use: dict[str, int] = {}
        caps: dict[str, int] = {}
        asked = [one for owner in self._owners for one in owner.slots()]
        for one in asked:
            caps[one.name] = one.cap
            wanted[one.name] = one.wanted()
            in_use[one.name] = one.let_go(wanted[one.name])
        for one in [one for owner in self._owners for one in owner.leaving_slots()]:
            caps.setdefault(one.name, one.cap)
            wanted.setdefault(one.name, 0)
            in_use[one.name] = in_use.get(one.name, 0) + one.in_flight
        if not self._holds and not any(wanted.values()) and not any(in_use.values()):
            # An idle process, without slots and without need of any, does not ask, so that its
            # first call is served at once.
            return True
        before = sum(one.share for one in asked)
        self._holds = True
        me = self._demand.worker_id()
        shares = await self._limits.share_slots(me, wanted, in_use, caps)
        self._demand.given_to(me)
        self._holds = any(shares.values()) or any(in_use.values())
        for one in asked:
            one.grant(shares.get(one.name, 0))
        for owner in self._owners:
            owner.has_shares()
        self._room.announce()
        return sum(one.share for one in asked) > before
