"""The route of a name: its deployments, their budgets, and the deployment that a prefix sticks to.

- A name is a model's or a resource's.
- A resource's limit replaces the deployment's limit of the same period, and is one budget over all
  of the resource's deployments. Limits of other periods bind all callers of a deployment together.
- Limits that a deployment reports bind all callers.
- Deployments of a later `order`, and a resource's fallbacks, are separate routes. The fallbacks
  have their own budgets.

This module sends nothing and asks no other part.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from hashlib import blake2b

from tidegate.core.budgets.budget import Budget, LimitBound
from tidegate.core.deployments import EngineKind, Resource, fallbacks
from tidegate.core.nouns import Call
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.priority_hints import renamed

# A prefix stays at a deployment with up to this multiple of its part: a warm cache is worth a short
# queue.
STICKY_LOAD_MAX = 1.25

# A fallback's name (empty for the route's own), and the `order` of its deployments.
RouteStep = tuple[str, int]


class NameRoute:
    """The deployments of a name, and its `fallbacks` after them.

    - They may change while calls are in flight, and a waiting call sees the current ones.
    - `model` is the model that a resource's name leads to; empty if the name is a model's own.
    - `total_timeout_s` is how long a whole call for this name may take; None if the deployment
      decides that.
    """

    def __init__(self, states: Sequence[DeploymentState] = (), resource: Resource | None = None) -> None:
        self.states: list[DeploymentState] = []
        self.queued_states: list[DeploymentState] = []
        self.flex_states: list[DeploymentState] = []
        self.interactive_states: list[DeploymentState] = []
        self.own_budgets: tuple[Budget, ...] = ()
        self.fallbacks: tuple[NameRoute, ...] = ()
        self.is_plain = self.is_direct = self.has_one_shape = True
        self.takes_background = self.takes_flex = self.takes_interactive = False
        self.total_timeout_s: float | None = None
        self.model = ""
        self._replaced: frozenset[str] = frozenset()
        self._made: dict[str, tuple[tuple[Budget, ...], tuple[Budget, ...]]] = {}
        self._by_step: dict[RouteStep, NameRoute] = {}
        self.assign(states, resource)

    def assign(
        self, states: Sequence[DeploymentState], resource: Resource | None = None, *, is_fallback: bool = False
    ) -> None:
        """Lead to these deployments from now on.

        A call to a resource is sent under the model's own name.
        """
        self.states = [state for state in states if state.deployment.takes_background]
        self.interactive_states = [state for state in states if state.deployment.takes_interactive]
        self.queued_states = [state for state in self.states if state.queue_client is not None]
        # The caller of a flex call waits for its answer, so the call may not be queued.
        self.flex_states = [state for state in self.states if state.queue_client is None]
        self.items_per_call = max((state.deployment.items_per_call_max for state in self.states), default=1)
        self.own_budgets = ()
        self.total_timeout_s = None if resource is None else resource.total_timeout_s
        self.model = ""
        self._replaced = frozenset()
        self._made = {}
        if resource is not None:
            limits = tuple(limit for limit in resource.limits if limit.enabled)
            self._replaced = frozenset(limit.period for limit in limits)
            self.model = resource.model if is_fallback or resource.model != resource.name else ""
            if limits:
                self.own_budgets = (Budget(LimitBound.RESOURCE, resource.name, limits),)
        self.is_plain = not self.model and not self.own_budgets
        self._sum_up()

    def narrowed(self, states: list[DeploymentState]) -> "NameRoute":
        """Return this route with only these deployments, for one call."""
        narrow = copy(self)
        narrow.states = states
        return narrow

    def fall_back_to(self, found: Mapping[RouteStep, tuple[Sequence[DeploymentState], Resource | None]]) -> None:
        """Set the fallbacks in order: first the later deployments of the name itself."""
        for step, route in self._by_step.items():
            if step not in found:
                route.assign(())
        self._by_step = {step: self._by_step.get(step) or NameRoute() for step in found}
        for step, (states, resource) in found.items():
            self._by_step[step].assign(states, resource, is_fallback=bool(step[0]))
        self.fallbacks = tuple(self._by_step.values())
        self._sum_up()

    def _sum_up(self) -> None:
        """Compute the flags that every call reads.

        - Background, flex and interactive calls may each have a deployment, fallbacks included.
        - A call is direct if the route has no fallbacks and the call can wait in at most one queue.
        - All engines may take the same shape. Otherwise a failover needs another translation.
        """
        ways = (self, *self.fallbacks)
        engines = {state.deployment.engine for one in ways for state in (*one.states, *one.interactive_states)}
        for one in ways:
            one.has_one_shape = len(engines) == 1 or EngineKind.ANTHROPIC not in engines
        self.takes_background = any(one.states for one in ways)
        self.takes_flex = any(one.flex_states for one in ways)
        self.takes_interactive = any(one.interactive_states for one in ways)
        self.is_direct = not self.fallbacks and not (self.queued_states and len(self.states) > 1)

    def ways(self, models: frozenset[str]) -> "tuple[NameRoute, ...]":
        """Return this route and its fallbacks.

        If models are given, other models' fallbacks are left out.
        """
        if not models:
            return (self, *self.fallbacks)
        return (self, *(one for one in self.fallbacks if not one.model or one.model in models))

    def has_failed(self, call: Call) -> bool:
        """Return whether all deployments of this route failed this call before."""
        return bool(self.states) and all(state.has_failed(call.idempotency_key) for state in self.states)

    def body(self, state: DeploymentState, body: bytes) -> bytes:
        """Return the request with the name by which the deployment knows the model."""
        model = state.deployment.upstream_model or self.model
        return renamed(body, model) if model else body

    def budgets(self, state: DeploymentState) -> tuple[Budget, ...]:
        """Return the budgets of a call for this name on this deployment, beside the call's own."""
        if not self.own_budgets:
            return state.budgets
        made = self._made.get(state.deployment.name)
        if made is None or made[0] is not state.budgets:
            made = (state.budgets, tuple(self._make(state)))
            self._made[state.deployment.name] = made
        return made[1]

    def _make(self, state: DeploymentState) -> Iterable[Budget]:
        for budget in state.budgets:
            limits = budget.limits
            if budget.name == state.deployment.name:
                limits = tuple(limit for limit in limits if limit.period not in self._replaced)
            if limits:
                yield Budget(budget.bound, budget.name, limits)
        yield from self.own_budgets


class Routes(dict[str, NameRoute]):
    """The route of each name.

    `other` is the route of all names without one: `routes.get(name, routes.other)`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.other = NameRoute()

    def is_retry(self, state: DeploymentState, call: Call, now_ms: float) -> bool:
        """Return whether this deployment failed this call before.

        A failover from another deployment is a first attempt here.

        If only another process saw this call fail, it counts as a retry if it has no other
        deployment, or if calls failed here lately.
        """
        if not call.attempt_count:
            return False
        if state.has_failed(call.idempotency_key):
            return True
        route = self.get(call.model, self.other)
        others = [one for way in (route, *route.fallbacks) for one in way.states if one is not state]
        if any(one.has_failed(call.idempotency_key) for one in others):
            return False
        return not others or state.has_failed_lately(now_ms)

    def may_try(self, state: DeploymentState, call: Call, now_ms: float) -> bool:
        """Return whether the retry budget of this deployment allows this call now."""
        return state.budget.allows_retry(now_ms) or not self.is_retry(state, call, now_ms)

    def all(self) -> Iterable[NameRoute]:
        return (*self.values(), self.other)

    def names(self) -> list[str]:
        """Return all names that lead to a deployment."""
        return [name for name, route in self.items() if route.states or route.interactive_states]

    def assign(self, states: Iterable[DeploymentState], resources: Iterable[Resource]) -> dict[str, str]:
        """Assign deployments to all names from now on. A name that is gone leads nowhere.

        Return the resources that lead nowhere, each with the reason.
        """
        by_model: dict[str, list[DeploymentState]] = {}
        for_any: list[DeploymentState] = []
        for state in states:
            for model in state.deployment.models:
                by_model.setdefault(model, []).append(state)
            if not state.deployment.models:
                for_any.append(state)
        by_resource = {one.name: one for one in resources}
        wanted: dict[str, tuple[list[DeploymentState], Resource | None]] = {
            name: (found, None) for name, found in by_model.items()
        }
        lost: dict[str, str] = {}
        for resource in by_resource.values():
            found = by_model.get(resource.model) or for_any
            if found:
                wanted[resource.name] = (found, resource)
            else:
                lost[resource.name] = (
                    f"resource {resource.name!r} routes to model {resource.model!r}, which no deployment serves: "
                    "add it under models, or correct the resource's model"
                )
        for name in self.keys() - wanted.keys():
            gone = self.pop(name)
            gone.assign(())
            gone.fall_back_to({})
        for name, (found, own) in wanted.items():
            aims = {} if own is None else fallbacks(own, by_resource)
            later = {one: (by_model.get(aim.model) or for_any, aim) for one, aim in aims.items()}
            _lead_in_order(self.setdefault(name, NameRoute()), found, own, later)
        _lead_in_order(self.other, for_any, None, {})
        return lost


def _lead_in_order(
    route: NameRoute,
    states: Sequence[DeploymentState],
    own: Resource | None,
    later: Mapping[str, tuple[Sequence[DeploymentState], Resource]],
) -> None:
    """Lead to the deployments with the lowest `order`, and fall back to the later ones."""
    steps: dict[RouteStep, tuple[Sequence[DeploymentState], Resource | None]] = {}
    for name, (some, resource) in {"": (states, own), **later}.items():
        for order in sorted({state.deployment.order for state in some}):
            steps[name, order] = ([state for state in some if state.deployment.order == order], resource)
    first = next((step for step in steps if not step[0]), None)
    route.assign(*steps.pop(first) if first is not None else ((), own))
    route.fall_back_to(steps)


def stick(fit: Sequence[DeploymentState], group: str) -> DeploymentState | None:
    """Return the deployment for a prefix's calls, one in all processes, or the next if busy."""
    weights = sum(state.weight for state in fit)
    calls = sum(state.in_flight for state in fit) + 1
    ranked = sorted(fit, key=lambda state: _rank(state, group))
    for state in ranked:
        if state.in_flight + 1 <= math.ceil(STICKY_LOAD_MAX * calls * state.weight / weights):
            return state
    return None


def _rank(state: DeploymentState, group: str) -> float:
    """Return a rank by weighted rendezvous hashing.

    A deployment that comes or goes moves only its own part of the prefixes.
    """
    digest = blake2b(f"{state.deployment.name}\0{group}".encode("utf-8", "replace"), digest_size=8).digest()
    return -math.log((int.from_bytes(digest) + 1) / 2**64) / state.weight
