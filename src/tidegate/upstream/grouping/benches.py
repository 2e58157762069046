"""Who waits to share a call, and how many items a deployment's calls hold: what is known of groups between two calls.

It forms no group and sends nothing.
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

BenchKey = tuple[object, bytes]


class GroupTrial:
    """A group that came to nothing: when each of its items passes alone, the group itself was at fault."""

    __slots__ = ("epoch", "kind", "left", "state")

    def __init__(self, kind: GroupKind, state: DeploymentState, left: int, epoch: int) -> None:
        self.kind = kind
        self.state = state
        self.left = left
        self.epoch = epoch

    def passed(self) -> bool:
        """One of its items passed alone. True when it was the last."""
        self.left -= 1
        return not self.left


# What one who sits on a bench is told: lead, go alone and say how it went, or here is your answer.
LEAD = "lead"
Told = str | GroupTrial | Answer


class Seat:
    __slots__ = ("call", "part", "turn")

    def __init__(self, call: Call, part: Part | ChatPart, turn: "asyncio.Future[Told]") -> None:
        self.call = call
        self.part = part
        self.turn = turn

    def tell(self, told: Told | UpstreamError) -> None:
        if self.turn.done():
            return
        if isinstance(told, UpstreamError):
            self.turn.set_exception(told)
            # Whoever sat here may have left: an error that nobody asks for any more is not worth a line in the log.
            self.turn.exception()
        else:
            self.turn.set_result(told)


class Bench:
    """Those who may share a call, in the order in which they came; leaders among them look for a slot."""

    __slots__ = ("leaders", "seats")

    def __init__(self) -> None:
        self.seats: dict[Seat, None] = {}
        self.leaders: set[Seat] = set()

    def company(self, leader: Seat, count: int) -> list[Seat]:
        """Return who goes with a leader: the first that came and lead no group."""
        others = (seat for seat in self.seats if seat not in self.leaders)
        return [leader, *islice(others, count - 1)]

    def permit(self, seats: Iterable[Seat], leaders: int = 1, items: int = 1) -> None:
        """These sit here no longer. Of the others as many lead as are needed with so many items each, and not more than there are slots."""
        for seat in seats:
            self.seats.pop(seat, None)
            self.leaders.discard(seat)
        missing = min(leaders, -(-len(self.seats) // items)) - len(self.leaders)
        if missing > 0:
            others = [seat for seat in self.seats if seat not in self.leaders]
            for seat in others[::items][:missing]:
                self.leaders.add(seat)
                seat.tell(LEAD)


class Benches:
    """Those who wait to share a call, by route, and the size of a call by deployment and kind."""

    def __init__(self) -> None:
        self._by_route: dict[NameRoute, dict[BenchKey, Bench]] = {}
        self._sizes: dict[tuple[DeploymentState, str], GroupSize] = {}
        self._widths: dict[NameRoute, int] = {}
        self._singly: dict[tuple[NameRoute, str], bool] = {}

    def room(self, route: NameRoute, slots: int) -> int:
        """How many more items so many free slots are worth, beside those who wait for one.

        Where these fit together, a slot is worth several; where they do not, each of them takes one."""
        width = self._widths.get(route) or self._width(route)
        benches = self._by_route.get(route)
        slack = 0
        for bench in benches.values() if benches else ():
            calls = -(-len(bench.seats) // width)
            slots -= calls
            slack = max(slack, calls * width - len(bench.seats))
        return slots * width + slack if slots >= 0 else 0

    def _width(self, route: NameRoute) -> int:
        width = max(self.size(state, kind).inputs for state in route.states for kind in KINDS.values())
        self._widths[route] = width
        return width

    def refresh(self) -> None:
        """Deployments came, changed or went."""
        self._widths.clear()
        self._sizes.clear()
        self._singly.clear()

    def seat(self, route: NameRoute, key: BenchKey, seat: Seat) -> Bench:
        """Let one sit with those of the same key."""
        bench = self._by_route.setdefault(route, {}).setdefault(key, Bench())
        bench.seats[seat] = None
        return bench

    def remove_if_empty(self, route: NameRoute, key: BenchKey, bench: Bench) -> None:
        benches = self._by_route.get(route)
        if bench.seats or benches is None or benches.get(key) is not bench:
            return
        del benches[key]
        if not benches:
            del self._by_route[route]

    def is_single(self, route: NameRoute, kind: GroupKind) -> bool:
        """Whether no deployment of the route takes several of this kind in one call."""
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
        """The size, where a group was sent there before."""
        return self._sizes.get((state, endpoint))

    def learn(self, state: DeploymentState, endpoint: str, size: GroupSize) -> None:
        self._sizes[state, endpoint] = size
        self._widths.clear()
