"""The Upstream port, and the entry of interactive calls: each call goes to a fit deployment.

The router knows which deployments a name leads to, and puts the parts together. It does not wait
for the end of a rest or for a retry: it returns the moment, and the engine decides what to do until
then. It waits only for a budget that frees within a moment.
"""

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial

from tidegate.core.budgets.budget import Budget, LimitRoom
from tidegate.core.deployments import Deployment, Resource
from tidegate.core.errors import SettingsError
from tidegate.core.ports import Clock, Entropy
from tidegate.core.usage.prices import Price
from tidegate.upstream.budgets.budget_client import BudgetClient
from tidegate.upstream.budgets.token_estimator import TokenEstimator
from tidegate.upstream.calls.admission import Admissions, Feedback, View
from tidegate.upstream.calls.availability import Availability
from tidegate.upstream.calls.call_path import CallPath, NamedCalls
from tidegate.upstream.calls.exchange import Exchange
from tidegate.upstream.calls.limit_notes import LimitNotes
from tidegate.upstream.calls.slot_queue import SlotQueue
from tidegate.upstream.grouping.groups import Groups
from tidegate.upstream.grouping.waiting_groups import WaitingGroups
from tidegate.upstream.http.transport import Transport
from tidegate.upstream.routing.backpressure import Backpressure
from tidegate.upstream.routing.deployment_state import DeploymentPolicy
from tidegate.upstream.routing.deployment_status import DeploymentStatus
from tidegate.upstream.routing.deployments import Deployments
from tidegate.upstream.routing.discovered_limits import DiscoveredLimits
from tidegate.upstream.routing.key_slots import KeySlots
from tidegate.upstream.routing.probe import PROBE_TIMEOUT_S, Probe, ask_models, knows_model
from tidegate.upstream.routing.routes import Routes
from tidegate.upstream.routing.slots import Capacity, ModelSlots, RoomSignal, SlotDemand, SlotSharing
from tidegate.upstream.tide.tide_loop import TideLoop
from tidegate.upstream.tide.tides import TideLimit, tide_of
from tidegate.wait_line import WaitLine


class Router:
    """The Upstream port, made of its parts' methods: `NamedCalls` sends, `Availability` answers."""

    def __init__(
        self,
        transport: Transport,
        control: Transport,
        clock: Clock,
        entropy: Entropy,
        policy: DeploymentPolicy | None = None,
        capacity: Capacity | None = None,
    ) -> None:
        self._transport, self._control, self._clock = transport, control, clock
        capacity, policy = capacity or Capacity(), policy or DeploymentPolicy()
        limits, rests, patience_ms = capacity.limits, capacity.rests, policy.patience_ms
        # The state: routes, deployments, slots and budgets.
        worker_id = capacity.worker_id if limits is not None else None
        line = WaitLine()
        self._room = RoomSignal(line)
        self._routes = Routes()
        self._budgets = BudgetClient(limits, clock)
        estimator = TokenEstimator()
        self._model_slots = ModelSlots(
            capacity.model_in_flight_max, capacity.in_flight_max_global, is_alone=worker_id is None
        )
        demand = SlotDemand(worker_id, self._model_slots, capacity.safe_until_ms)
        tide_for = partial(tide_of, clock=clock, room=self._room, runs_items=capacity.runs_items)
        self._states = Deployments(transport, control, policy, clock, tide_for, is_alone=demand.is_alone)
        self._tides = TideLoop((), clock, capacity.fleet, capacity.worker_id, capacity.notices)
        self._waiting_groups = WaitingGroups()
        key_slots = KeySlots(demand, clock)
        view = View(self._routes, self._model_slots, demand, self._budgets, estimator, patience_ms)
        self._available = Availability(
            view, self._states, self._model_slots, demand, self._waiting_groups, clock, capacity.in_flight_max
        )
        self._backpressure = Backpressure(rests, clock, policy, self._states.values())
        self._discovered = None if capacity.discovered is None else DiscoveredLimits(capacity.discovered, self._states)
        # The parts that a call passes.
        notes = LimitNotes(self._budgets, estimator, clock, self._discovered, rests)
        feedback = Feedback(clock, entropy, view, self._routes, rests, self._backpressure, notes)
        tide_notices = self._tides if capacity.notices is not None else None
        self._admissions = Admissions(self._routes, self._model_slots, demand, feedback, tide_notices, self._room)
        exchange = Exchange(self._budgets, estimator, self._admissions, feedback, clock, patience_ms)
        slot_queue = SlotQueue(view, demand, line, self._admissions, clock, transport.pool_timeout_s)
        self._path = CallPath(view, slot_queue, self._admissions, feedback, exchange, clock, patience_ms)
        groups = Groups(self._path, self._waiting_groups, clock, policy.attempts_grouped)
        calls = NamedCalls(self._path, groups, key_slots, view, clock)
        # Methods of the parts, used for each call and each item.
        self.open = calls.open
        self.takes_interactive, self.takes_flex = calls.takes_interactive, calls.takes_flex
        self.send, self.send_interactive = calls.send, calls.send_interactive
        self.knows, self.items_per_call = self._available.knows, self._available.items_per_call
        self.free_slots, self.closed = self._available.free_slots, self._available.closed
        self.rests_until_ms, self.spent_until_ms = self._available.rests_until_ms, self._available.spent_until_ms
        self.budgets = self._available.budgets
        self.price_of = self._states.prices.get
        self.recorded = transport.recorded
        self.on_room = self._room.listen
        self._sharing = None
        if limits is not None and not demand.is_alone:
            owners = (self._states, self._model_slots, key_slots)
            self._sharing = SlotSharing(limits, demand, owners, self._room, self._backpressure)

    # Where calls may go.

    def serve(self, deployments: Iterable[Deployment], resources: Iterable[Resource] = ()) -> None:
        """Serve these deployments from now on.

        Raise SettingsError if one of them cannot be used.
        """
        for why in self.replace(deployments, resources).values():
            raise SettingsError(why)

    def replace(
        self,
        deployments: Iterable[Deployment],
        resources: Iterable[Resource],
        model_in_flight_max: Mapping[str, int] | None = None,
    ) -> dict[str, str]:
        """Serve these deployments from now on.

        Return the reasons for unusable ones, which are left out.

        - Without `model_in_flight_max` the caps of models stay.
        - Calls in flight at a deployment that is gone, or is another server now, end there, and
          calls that wait look again.
        - A deployment of which only other terms changed keeps its calls, its health and its
          lessons.
        """
        self._model_slots.allow(model_in_flight_max, self._admissions.out)
        refused = self._states.serve(deployments)
        refused |= self._routes.assign(self._states.values(), resources)
        self._waiting_groups.refresh()
        self._tides.serve(self._states.tides())
        self._backpressure.obey()
        self._room.announce()
        return refused

    def names(self) -> list[str]:
        """Return all models and resources that lead to a deployment.

        A deployment that serves any model adds no name.
        """
        return self._routes.names()

    def model_of(self, name: str) -> str:
        """Return the model that a resource leads to; any other name is a model's own."""
        return self._routes.get(name, self._routes.other).model or name

    # What operators and callers ask.

    def interactive(self, deployment: str) -> tuple[int, int]:
        """Return the interactive calls here at a deployment, and those without a first token."""
        state = self._states[deployment]
        return state.interactive_in_flight, state.interactive_awaiting

    def status(self) -> list[DeploymentStatus]:
        now_ms = self._clock.monotonic_ms()
        states = self._states.values()
        return [state.status(now_ms, self._budgets.spent_until_ms(state.budgets)) for state in states]

    def tide_limits(self) -> dict[str, TideLimit]:
        """Return how many background calls the tide allows this process, by deployment.

        The result is empty in a process that runs no items.
        """
        return {tide.deployment.name: tide.limit for tide in self._states.tides() if tide.runs_items}

    def rooms(self, budgets: tuple[Budget, ...]) -> list[LimitRoom]:
        """Return the last known remainders of these budgets' limits of requests and tokens."""
        return self._budgets.rooms(budgets)

    def spent(self) -> dict[str, float]:
        """Return the ids of spent budgets, each with the known monotonic moment of its end."""
        return self._budgets.spent()

    def prices(self, model: str) -> list[Price | None]:
        """Return the tokens' price at each deployment of this name; None if they are free."""
        return [state.deployment.price for state in self._routes.get(model, self._routes.other).states]

    async def probe(self, name: str, timeout_s: float = PROBE_TIMEOUT_S) -> Probe:
        """Ask one deployment over the control client whether it is there, and for its models."""
        return await ask_models(self._states[name], self._clock, timeout_s)

    async def knows_by_name(self, model: str) -> bool:
        """Ask every deployment whether it knows a model that it does not list."""
        return any([await knows_model(state, model) for state in self._states.values()])

    async def takes_by_name(self, model: str, timeout_s: float) -> bool:
        """Ask all deployments that take any name whether they know a model that is not listed."""
        asked = [one for one in self._states.values() if not one.deployment.models and one.deployment.queue is None]
        return any(await asyncio.gather(*(knows_model(state, model, timeout_s) for state in asked)))

    async def close(self) -> None:
        await self._tides.close()
        await self._path.close()
        if self._sharing is not None:
            await self._sharing.close()
        if self._discovered is not None:
            await self._discovered.close()
        await self._budgets.close()
        await self._transport.close()
        await self._control.close()
