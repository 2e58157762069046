"""Where the calls for one name go: its deployments, the budgets that bind them there, and which of them a prefix sticks to.

A name is a model's or a resource's. A resource's limit takes the place of the deployment's for the period that it names, and is then one
budget of the resource's own over all of its deployments; what a resource leaves open it shares with everyone on the deployment. What a
deployment said about itself binds everyone. Deployments of a later `order` and a resource's fallbacks are routes of their own, the latter
under their own budgets. This module sends nothing and asks nobody.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

from tidegate.core.budgets.budget import Budget, LimitBound
from tidegate.core.deployments import Resource, fallbacks
from tidegate.core.nouns import Call
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.priority_hints import renamed

# A deployment may have this much more than its part before a prefix is served elsewhere: a warm cache is worth a short queue.
STICKY_LOAD_MAX = 1.25

# A fallback's name, empty for the route's own, and which of its deployments in the order of failover.
Place = tuple[str, int]


class NameRoute:
    """Its lanes change while calls are out: whoever waits along a route sees those that it has now. After them come its `fallbacks`."""

    def __init__(self, lanes: Sequence[DeploymentState] = (), resource: Resource | None = None) -> None:
        self.lanes: list[DeploymentState] = []
        self.queued_lanes: list[DeploymentState] = []
        self.interactive_lanes: list[DeploymentState] = []
        self.own_budgets: tuple[Budget, ...] = ()
        self.fallbacks: tuple[NameRoute, ...] = ()
        self.is_plain = self.is_direct = True
        self._total_s: float | None = None
        self._model = ""
        self._replaced: frozenset[str] = frozenset()
        self._made: dict[str, tuple[tuple[Budget, ...], tuple[Budget, ...]]] = {}
        self._by_place: dict[Place, NameRoute] = {}
        self.lead(lanes, resource)

    def lead(
        self, lanes: Sequence[DeploymentState], resource: Resource | None = None, *, is_fallback: bool = False
    ) -> None:
        """Lead to these from now on. A call that comes here by another name is told the model's own."""
        self.lanes = [lane for lane in lanes if lane.deployment.takes_batch]
        self.interactive_lanes = [lane for lane in lanes if lane.deployment.takes_interactive]
        self.queued_lanes = [lane for lane in self.lanes if lane.queued_line is not None]
        self.items_per_call = max((lane.deployment.items_per_call_max for lane in self.lanes), default=1)
        self.own_budgets = ()
        self._total_s = None if resource is None else resource.total_timeout_s
        self._model = ""
        self._replaced = frozenset()
        self._made = {}
        if resource is not None:
            limits = tuple(limit for limit in resource.limits if limit.enabled)
            self._replaced = frozenset(limit.period for limit in limits)
            self._model = resource.model if is_fallback or resource.model != resource.name else ""
            if limits:
                self.own_budgets = (Budget(LimitBound.RESOURCE, resource.name, limits),)
        self.is_plain = not self._model and not self.own_budgets
        self._look_whether_direct()

    def fall_back_to(self, found: Mapping[Place, tuple[Sequence[DeploymentState], Resource | None]]) -> None:
        """After its own deployments come these, in order: what is left of its own name, and then other names."""
        for place, route in self._by_place.items():
            if place not in found:
                route.lead(())
        self._by_place = {place: self._by_place.get(place) or NameRoute() for place in found}
        for place, (lanes, resource) in found.items():
            self._by_place[place].lead(lanes, resource, is_fallback=bool(place[0]))
        self.fallbacks = tuple(self._by_place.values())
        self._look_whether_direct()

    def _look_whether_direct(self) -> None:
        """Whether a call goes straight to one of its lanes: nothing comes after them, and it can lie in no queue but one."""
        self.is_direct = not self.fallbacks and not (self.queued_lanes and len(self.lanes) > 1)

    def ways(self, models: frozenset[str]) -> "tuple[NameRoute, ...]":
        """This route and then its fallbacks, without those that lead to a model which is not among these; none named: all."""
        if not models:
            return (self, *self.fallbacks)
        return (self, *(one for one in self.fallbacks if not one._model or one._model in models))

    def has_failed(self, call: Call) -> bool:
        """Whether every deployment of this route failed this call before."""
        return bool(self.lanes) and all(lane.has_failed(call.idempotency_key) for lane in self.lanes)

    def model_of(self, model: str) -> str:
        """The model itself, when this name is a resource's."""
        return self._model or model

    def total_s(self, lane: DeploymentState, endpoint: str) -> float:
        """How long a whole call for this name may take on this deployment."""
        return lane.total_s(endpoint) if self._total_s is None else self._total_s

    def body(self, lane: DeploymentState, body: bytes) -> bytes:
        """The request with the name by which the deployment knows the model."""
        model = lane.deployment.upstream_model or self._model
        return renamed(body, model) if model else body

    def budgets(self, lane: DeploymentState) -> tuple[Budget, ...]:
        """What binds a call for this name on this deployment, beside its own."""
        if not self.own_budgets:
            return lane.budgets
        made = self._made.get(lane.deployment.name)
        if made is None or made[0] is not lane.budgets:
            made = (lane.budgets, tuple(self._make(lane)))
            self._made[lane.deployment.name] = made
        return made[1]

    def _make(self, lane: DeploymentState) -> Iterable[Budget]:
        for budget in lane.budgets:
            limits = budget.limits
            if budget.name == lane.deployment.name:
                limits = tuple(limit for limit in limits if limit.period not in self._replaced)
            if limits:
                yield Budget(budget.bound, budget.name, limits)
        yield from self.own_budgets


class Routes:
    """The route of every name, and the one of all other names."""

    def __init__(self) -> None:
        self._by_name: dict[str, NameRoute] = {}
        self._any = NameRoute()

    def of(self, name: str) -> NameRoute:
        return self._by_name.get(name) or self._any

    def is_retry(self, lane: DeploymentState, call: Call, now_ms: float) -> bool:
        """Whether this deployment failed this call before. A failover from another deployment is a first attempt here.

        A call whose failures another process saw counts as a retry where it has no other deployment, or where calls failed lately.
        """
        if not call.attempt_count:
            return False
        if lane.has_failed(call.idempotency_key):
            return True
        route = self.of(call.model)
        others = [one for way in (route, *route.fallbacks) for one in way.lanes if one is not lane]
        if any(one.has_failed(call.idempotency_key) for one in others):
            return False
        return not others or lane.has_failed_lately(now_ms)

    def may_try(self, lane: DeploymentState, call: Call, now_ms: float) -> bool:
        """Whether the retry budget of this deployment allows this call now."""
        return lane.budget.allows_retry(now_ms) or not self.is_retry(lane, call, now_ms)

    def all(self) -> Iterable[NameRoute]:
        return (*self._by_name.values(), self._any)

    def names(self) -> list[str]:
        """Every name that leads somewhere."""
        return [name for name, route in self._by_name.items() if route.lanes or route.interactive_lanes]

    def lead(self, lanes: Iterable[DeploymentState], resources: Iterable[Resource]) -> dict[str, str]:
        """From now on every name leads to these; a name that is gone leads nowhere. Says which resources do not, and why."""
        by_model: dict[str, list[DeploymentState]] = {}
        for_any: list[DeploymentState] = []
        for lane in lanes:
            for model in lane.deployment.models:
                by_model.setdefault(model, []).append(lane)
            if not lane.deployment.models:
                for_any.append(lane)
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
        for name in self._by_name.keys() - wanted.keys():
            gone = self._by_name.pop(name)
            gone.lead(())
            gone.fall_back_to({})
        for name, (found, own) in wanted.items():
            aims = {} if own is None else fallbacks(own, by_resource)
            later = {one: (by_model.get(aim.model) or for_any, aim) for one, aim in aims.items()}
            _lead_in_order(self._by_name.setdefault(name, NameRoute()), found, own, later)
        _lead_in_order(self._any, for_any, None, {})
        return lost


def _lead_in_order(
    route: NameRoute,
    lanes: Sequence[DeploymentState],
    own: Resource | None,
    later: Mapping[str, tuple[Sequence[DeploymentState], Resource]],
) -> None:
    """Lead to the deployments that come first, and fall back to those that come later, by their own order."""
    places: dict[Place, tuple[Sequence[DeploymentState], Resource | None]] = {}
    for name, (some, resource) in {"": (lanes, own), **later}.items():
        for order in sorted({lane.deployment.order for lane in some}):
            places[name, order] = ([lane for lane in some if lane.deployment.order == order], resource)
    first = next((place for place in places if not place[0]), None)
    route.lead(*places.pop(first) if first is not None else ((), own))
    route.fall_back_to(places)


def stick(fit: Sequence[DeploymentState], group: str) -> DeploymentState | None:
    """The deployment among these that a prefix's calls go to, in every process the same one, unless it has too much already."""
    weights = sum(lane.weight for lane in fit)
    calls = sum(lane.in_flight for lane in fit) + 1
    ranked = sorted(fit, key=lambda lane: _rank(lane, group))
    for lane in ranked:
        if lane.in_flight + 1 <= math.ceil(STICKY_LOAD_MAX * calls * lane.weight / weights):
            return lane
    return None


def _rank(lane: DeploymentState, group: str) -> float:
    """Rendezvous hashing by weight: a deployment that comes or goes moves only what is its own part."""
    digest = blake2b(f"{lane.deployment.name}\0{group}".encode("utf-8", "replace"), digest_size=8).digest()
    return -math.log((int.from_bytes(digest) + 1) / 2**64) / lane.weight
