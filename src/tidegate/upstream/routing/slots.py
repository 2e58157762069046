"""How many calls this process may have in flight: per deployment, per model and in all, over every process never above the cap.

With the embedded store there is one process and the caps are its own. With several, a small loop asks the Limits port for this process's
part: often while it needs more, twice a second otherwise. Before the first answer it has none. A part is kept while the store cannot be
reached; that no call begins when this process may be taken for dead is what a call's `begin_by_ms` is for.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from tidegate.core.errors import LimitsUnavailable
from tidegate.core.ports import DiscoveredLimitsStore, Fleet, Limits, Notices, Rests
from tidegate.upstream.routing.deployment_state import DeploymentState

log = structlog.get_logger(__name__)

PERIOD_S = 0.5
HURRY_S = 0.05
GLOBAL = "global"


@dataclass(frozen=True, slots=True)
class Capacity:
    """What is shared with other processes, and how much of it there is in all.

    `limits` keeps the budgets. With `worker_id` slots are shared too: it names this process, and is asked each time. Without it this is the
    only process. `rests` tells others who asked to be left alone, `fleet` what calls each has out, `notices` at once how many of them are
    interactive. 0 and no entry mean no cap; `in_flight_max` is this process's own. Without `runs_items` this process has no worker: its
    only batch calls are flex calls.
    """

    limits: Limits | None = None
    worker_id: Callable[[], str] | None = None
    discovered: DiscoveredLimitsStore | None = None
    rests: Rests | None = None
    fleet: Fleet | None = None
    notices: Notices | None = None
    model_in_flight_max: Mapping[str, int] = field(default_factory=dict)
    in_flight_max_global: int = 0
    in_flight_max: int = 0
    runs_items: bool = True


class ModelSlots:
    """Calls in flight per model and in all, for the names that have a cap. The model's is looked at before the one over all."""

    def __init__(self, model_max: Mapping[str, int], all_max: int) -> None:
        self._all_max = all_max
        self.caps: dict[str, int] = {}
        self.slots: dict[str, int] = {}
        # All that is out, also of models without a cap: they may get one while it is.
        self._out: dict[str, int] = {}
        self._out_in_all = 0
        self.is_shared = False
        self.lifted: set[str] = set()
        self._short: set[str] = set()
        self.allow(model_max)

    def allow(self, model_max: Mapping[str, int] | None) -> None:
        """These are the models' caps from now on; None leaves them. Where slots are shared, a new one gives some only when they were asked
        for."""
        if model_max is None:
            return
        caps = {f"model:{model}": count for model, count in model_max.items()}
        if self._all_max:
            caps[GLOBAL] = self._all_max
        self.lifted = (self.lifted | self.caps.keys()) - caps.keys()
        self.caps = caps
        self.slots = {name: min(self.slots.get(name, 0), cap) if self.is_shared else cap for name, cap in caps.items()}

    def room(self, model: str) -> float:
        room = math.inf
        for name in (f"model:{model}", GLOBAL):
            if name in self.slots:
                room = min(room, self.slots[name] - self.in_flight(name))
                if room < 1:
                    self._short.add(name)
                    break
        return room

    def wanted(self, name: str, *, is_wanted: bool) -> int:
        """How many are worth asking for: see a deployment's."""
        if name in self._short:
            self._short.discard(name)
            wanted = max(2 * self.slots[name], self.in_flight(name) + 4)
        elif in_flight := self.in_flight(name):
            wanted = in_flight + in_flight // 4 + 1
        else:
            wanted = int(is_wanted)
        return min(wanted, self.caps[name])

    def count(self, model: str, more: int) -> None:
        self._out_in_all += more
        count = self._out.get(model, 0) + more
        if count:
            self._out[model] = count
        else:
            # Callers choose the names of models: what is not needed must not pile up.
            del self._out[model]

    def in_flight(self, name: str) -> int:
        return self._out_in_all if name == GLOBAL else self._out.get(name.removeprefix("model:"), 0)

    def let_go(self, name: str, wanted: int) -> int:
        """Begin nothing that needs more than is wanted; says how many may be in flight until the next share."""
        in_flight = self.in_flight(name)
        self.slots[name] = min(self.slots[name], max(wanted, in_flight))
        return max(self.slots[name], in_flight)


class DeploymentSlots:
    """The loop that keeps this process's part; `worker_id` is asked each time, for a process may begin a new life."""

    def __init__(
        self,
        limits: Limits,
        worker_id: Callable[[], str],
        states: Sequence[DeploymentState],
        caps: ModelSlots,
        rests: Rests | None,
        on_more: Callable[[], None],
    ) -> None:
        self._limits = limits
        self._worker_id = worker_id
        self._states: list[DeploymentState] = []
        self._leaving: list[DeploymentState] = []
        self._caps = caps
        self._rests = rests
        self._on_more = on_more
        self._hurry = asyncio.Event()
        self._reached = True
        self._holds = False
        self._given_to = ""
        self.serve(states)
        caps.slots = dict.fromkeys(caps.caps, 0)
        caps.is_shared = True
        self._task = asyncio.create_task(self._run())

    @property
    def is_current(self) -> bool:
        """Whether the slots at hand were given to the life that this process leads now: those of one that was declared gone are others'."""
        return self._given_to == self._worker_id()

    def serve(self, states: Sequence[DeploymentState]) -> None:
        """Ask for slots of these from now on; those of one that is gone are held until its calls have ended."""
        self._leaving += [state for state in self._states if state not in states]
        for state in states:
            if state not in self._states:
                state.share(0)
        self._states = list(states)

    def hurry(self) -> None:
        """Somebody was short of a slot."""
        self._hurry.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._hurry.clear()
            self._obey_rests()
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
            # Whoever is short asks again soon, as long as that brings more; a deployment that is full is asked at an easy pace.
            await asyncio.sleep(HURRY_S if grew else PERIOD_S)
            if not self._hurry.is_set():
                await self._wait()

    def _obey_rests(self) -> None:
        if self._rests is not None:
            resting = self._rests.current()
            for state in self._states:
                state.rest_until(resting.get(state.deployment.name, 0.0))

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(PERIOD_S):
                await self._hurry.wait()
        except TimeoutError:
            pass

    async def _ask(self) -> bool:
        """True when this brought more slots."""
        wanted: dict[str, int] = {}
        in_use: dict[str, int] = {}
        caps: dict[str, int] = {}
        for state in self._states:
            name = state.deployment.name
            caps[name] = state.deployment.background_in_flight_max
            wanted[name] = state.wanted_slots()
            in_use[name] = state.let_go(wanted[name])
        for state in self._leaving:
            name = state.deployment.name
            caps.setdefault(name, state.deployment.background_in_flight_max)
            wanted.setdefault(name, 0)
            in_use[name] = in_use.get(name, 0) + state.in_flight
        self._leaving = [state for state in self._leaving if state.in_flight]
        for name, cap in self._caps.caps.items():
            caps[name] = cap
            served = (state for state in self._states if name == GLOBAL or _serves(state, name.removeprefix("model:")))
            is_wanted = any(wanted[state.deployment.name] for state in served)
            wanted[name] = self._caps.wanted(name, is_wanted=is_wanted)
            in_use[name] = self._caps.let_go(name, wanted[name])
        lifted, self._caps.lifted = self._caps.lifted, set()
        for name in lifted:
            # Nobody counts these any more: what was held of them is given back.
            caps[name], wanted[name], in_use[name] = 1, 0, 0
        if not self._holds and not any(wanted.values()) and not any(in_use.values()):
            # Nothing is wanted and nothing is held: an idle process asks nobody, and the first who is short is heard at once.
            return True
        held = self._held()
        self._holds = True
        me = self._worker_id()
        shares = await self._limits.share_slots(me, wanted, in_use, caps)
        self._given_to = me
        self._holds = any(shares.values()) or any(in_use.values())
        for state in self._states:
            state.share(shares.get(state.deployment.name, 0))
        self._caps.slots = {name: min(shares.get(name, 0), cap) for name, cap in self._caps.caps.items()}
        self._on_more()
        return self._held() > held

    def _held(self) -> int:
        return sum(state.slots for state in self._states) + sum(self._caps.slots.values())


def _serves(state: DeploymentState, model: str) -> bool:
    return not state.deployment.models or model in state.deployment.models
