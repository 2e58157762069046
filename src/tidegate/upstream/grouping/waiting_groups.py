"""The items that wait to share a call, and the number of items that a deployment's calls take.

This module does not build or send calls.
"""

import asyncio
from collections.abc import Iterable
from itertools import islice

from tidegate.core.errors import UpstreamError
from tidegate.core.grouping.chat import ChatPart
from tidegate.core.grouping.embeddings import GroupSize, Part
from tidegate.core.nouns import Answer, Call
from tidegate.upstream.grouping.group_kinds import KINDS, GroupKind
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.routes import NameRoute

GroupKey = tuple[object, bytes]


class GroupTrial:
    """A group whose call failed. If each of its items passes alone, the grouping was at fault."""

    __slots__ = ("epoch", "kind", "left", "state")

    def __init__(self, kind: GroupKind, state: DeploymentState, left: int, epoch: int) -> None:
        self.kind = kind
        self.state = state
        self.left = left
        self.epoch = epoch

    def passed(self) -> bool:
        """Count an item that passed alone; return True if it was the last."""
        self.left -= 1
        return not self.left


# The outcome of waiting: lead a group, go alone and report how that went, or an answer.
LEAD = "lead"
TurnOutcome = str | GroupTrial | Answer


class WaitingItem:
    __slots__ = ("call", "part", "turn")

    def __init__(self, call: Call, part: Part | ChatPart, turn: "asyncio.Future[TurnOutcome]") -> None:
        self.call = call
        self.part = part
        self.turn = turn

    def set_outcome(self, outcome: TurnOutcome | UpstreamError) -> None:
        if self.turn.done():
            return
        if isinstance(outcome, UpstreamError):
            self.turn.set_exception(outcome)
            # The item's caller may have left; an exception that is never retrieved would be logged.
            self.turn.exception()
        else:
            self.turn.set_result(outcome)


class WaitingGroup:
    """The items that may share a call, in the order in which they came. Leaders look for a slot."""

    __slots__ = ("leaders", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[WaitingItem, None] = {}
        self.leaders: set[WaitingItem] = set()

    def companions(self, leader: WaitingItem, count: int) -> list[WaitingItem]:
        """Return a leader and the items that go with it: the first ones that are not leaders."""
        others = (item for item in self.waiting if item not in self.leaders)
        return [leader, *islice(others, count - 1)]

    def remove(self, items: Iterable[WaitingItem], leaders: int = 1, items_each: int = 1) -> None:
        """Remove these items, and make as many of the others lead as are needed.

        That is one for each `items_each` items, and at most `leaders`.
        """
        for item in items:
            self.waiting.pop(item, None)
            self.leaders.discard(item)
        missing = min(leaders, -(-len(self.waiting) // items_each)) - len(self.leaders)
        if missing > 0:
            others = [item for item in self.waiting if item not in self.leaders]
            for item in others[::items_each][:missing]:
                self.leaders.add(item)
                item.set_outcome(LEAD)


class WaitingGroups:
    """The items that wait to share a call, by route, and the size of calls by deployment."""

    def __init__(self) -> None:
        self._by_route: dict[NameRoute, dict[GroupKey, WaitingGroup]] = {}
        self._sizes: dict[tuple[DeploymentState, str], GroupSize] = {}
        self._widths: dict[NameRoute, int] = {}
        self._singly: dict[tuple[NameRoute, str], bool] = {}

    def room(self, route: NameRoute, slots: int) -> int:
        """Return how many more items these free slots can take, beside the items that wait already.

        Items that fit together share a slot; others take one each.
        """
        width = self._widths.get(route) or self._width(route)
        groups = self._by_route.get(route)
        slack = 0
        for group in groups.values() if groups else ():
            calls = -(-len(group.waiting) // width)
            slots -= calls
            slack = max(slack, calls * width - len(group.waiting))
        return slots * width + slack if slots >= 0 else 0

    def _width(self, route: NameRoute) -> int:
        width = max(self.size(state, kind).inputs for state in route.states for kind in KINDS.values())
        self._widths[route] = width
        return width

    def refresh(self) -> None:
        """Forget what depends on the deployments, because they changed."""
        self._widths.clear()
        self._sizes.clear()
        self._singly.clear()

    def join(self, route: NameRoute, key: GroupKey, item: WaitingItem) -> WaitingGroup:
        """Add an item to the waiting group of its key."""
        group = self._by_route.setdefault(route, {}).setdefault(key, WaitingGroup())
        group.waiting[item] = None
        return group

    def remove_if_empty(self, route: NameRoute, key: GroupKey, group: WaitingGroup) -> None:
        groups = self._by_route.get(route)
        if group.waiting or groups is None or groups.get(key) is not group:
            return
        del groups[key]
        if not groups:
            del self._by_route[route]

    def is_single(self, route: NameRoute, kind: GroupKind) -> bool:
        """Return whether no deployment of the route takes several of this kind in one call."""
        singly = self._singly.get((route, kind.endpoint))
        if singly is None:
            singly = all(kind.items_max(state.deployment) < 2 for state in route.states)
            self._singly[route, kind.endpoint] = singly
        return singly

    def size(self, state: DeploymentState, kind: GroupKind) -> GroupSize:
        allowed = kind.items_max(state.deployment)
        size = self._sizes.get((state, kind.endpoint))
        if size is None or size.inputs_max != allowed:
            size = self._sizes[state, kind.endpoint] = GroupSize.fresh(allowed)
        return size

    def known_size(self, state: DeploymentState, endpoint: str) -> GroupSize | None:
        """Return the size of calls there; None before a group was sent there."""
        return self._sizes.get((state, endpoint))

    def learn(self, state: DeploymentState, endpoint: str, size: GroupSize) -> None:
        self._sizes[state, endpoint] = size
        self._widths.clear()
