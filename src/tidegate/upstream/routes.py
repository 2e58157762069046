"""Where the calls for one name go: its deployments, the budgets that bind them there, and which of them a prefix sticks to.

A name is a model's or a resource's. A resource's limit takes the place of the deployment's for the period that it names, and is then one
budget of the resource's own over all of its deployments; what a resource leaves open it shares with everyone on the deployment. What a
deployment said about itself binds everyone. This module sends nothing and asks nobody.
"""

import math
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from tidegate.core.budgets import Bound, Budget
from tidegate.core.deployments import Resource
from tidegate.core.errors import SettingsError
from tidegate.upstream.hints import renamed
from tidegate.upstream.lane import Lane

# A deployment may have this much more than its part before a prefix is served elsewhere: a warm cache is worth a short queue.
STICKY_LOAD_MAX = 1.25


class Route:
    def __init__(self, lanes: list[Lane], resource: Resource | None = None) -> None:
        self.lanes = [lane for lane in lanes if lane.deployment.takes_batch]
        self.interactive_lanes = [lane for lane in lanes if lane.deployment.takes_interactive]
        self.own_budgets: tuple[Budget, ...] = ()
        self._model = ""
        self._replaced: frozenset[str] = frozenset()
        self._made: dict[str, tuple[tuple[Budget, ...], tuple[Budget, ...]]] = {}
        if resource is not None:
            limits = tuple(limit for limit in resource.limits if limit.enabled)
            self._replaced = frozenset(limit.period for limit in limits)
            self._model = resource.model if resource.model != resource.name else ""
            if limits:
                self.own_budgets = (Budget(Bound.RESOURCE, resource.name, limits),)
        self.is_plain = not self._model and not self.own_budgets

    def model_of(self, model: str) -> str:
        """The model itself, when this name is a resource's."""
        return self._model or model

    def body(self, body: bytes) -> bytes:
        """The request as the deployment must see it."""
        return renamed(body, self._model) if self._model else body

    def budgets(self, lane: Lane) -> tuple[Budget, ...]:
        """What binds a call for this name on this deployment, beside its own."""
        if not self.own_budgets:
            return lane.budgets
        made = self._made.get(lane.deployment.name)
        if made is None or made[0] is not lane.budgets:
            made = (lane.budgets, tuple(self._make(lane)))
            self._made[lane.deployment.name] = made
        return made[1]

    def _make(self, lane: Lane) -> Iterable[Budget]:
        for budget in lane.budgets:
            limits = budget.limits
            if budget.name == lane.deployment.name:
                limits = tuple(limit for limit in limits if limit.period not in self._replaced)
            if limits:
                yield Budget(budget.bound, budget.name, limits)
        yield from self.own_budgets


def routes(lanes: Iterable[Lane], resources: Iterable[Resource]) -> tuple[dict[str, Route], Route]:
    """The route of every name, and the one of all other names."""
    by_model: dict[str, list[Lane]] = {}
    for_any: list[Lane] = []
    for lane in lanes:
        for model in lane.deployment.models:
            by_model.setdefault(model, []).append(lane)
        if not lane.deployment.models:
            for_any.append(lane)
    by_name = {model: Route(found) for model, found in by_model.items()}
    for resource in resources:
        found = by_model.get(resource.model) or for_any
        if not found:
            raise SettingsError(
                f"resource {resource.name!r} routes to model {resource.model!r}, which no deployment serves: "
                "add it under models, or correct the resource's model"
            )
        by_name[resource.name] = Route(found, resource)
    return by_name, Route(for_any)


def stick(fit: Sequence[Lane], group: str) -> Lane | None:
    """The deployment among these that a prefix's calls go to, in every process the same one, unless it has too much already."""
    weights = sum(lane.weight for lane in fit)
    calls = sum(lane.in_flight for lane in fit) + 1
    ranked = sorted(fit, key=lambda lane: _rank(lane, group))
    for lane in ranked:
        if lane.in_flight + 1 <= math.ceil(STICKY_LOAD_MAX * calls * lane.weight / weights):
            return lane
    return None


def _rank(lane: Lane, group: str) -> float:
    """Rendezvous hashing by weight: a deployment that comes or goes moves only what is its own part."""
    digest = blake2b(f"{lane.deployment.name}\0{group}".encode("utf-8", "replace"), digest_size=8).digest()
    return -math.log((int.from_bytes(digest) + 1) / 2**64) / lane.weight
