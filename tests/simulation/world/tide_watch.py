"""What must hold of the tide, at the witness: background work stands back while a user waits for a first token, and comes back after.

Only what happens at deployments that share an engine is watched. In the process that sends the user's call background work stands back at
once; the others learn of it through the store. A call that the tide took back may be sent again, twice at most.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping

from tests.simulation.world.customers import Order
from tests.simulation.world.plan import Plan
from tests.simulation.world.process import Process
from tests.simulation.world.witness import Visit, Witnessed
from tidegate.upstream.tide.tides import HAND_BACKS_MAX, shares_engine

# An answer that is not streamed is taken to have its first token by then.
_UNSEEN_S = 1.0
# How long another process may not know: a report each half second, and the look at it.
_REPORTED_S = 1.6
# A call may wait for a budget or a connection after it was let in.
_LET_IN_S = 2.5
_HOLDS_UP = frozenset({"pause", "kill", "border_kill", "stop", "power", "poison", "clock"})


class TideWatch:
    def __init__(
        self,
        plan: Plan,
        users: list[Witnessed],
        visits: list[Visit],
        orders: Mapping[str, Order],
        closed_at_s: Mapping[str, float],
        broken: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._users = users
        self._visits = visits
        self._orders = orders
        self._closed_at_s = closed_at_s
        self._broken = broken
        self._shared = {one.name: one for one in plan.estate.deployments if shares_engine(one)}
        store_troubles = any(kind.startswith(("store_", "redis_", "connect_")) for kind in plan.kinds)
        self._others_know = not store_troubles and not _HOLDS_UP & set(plan.kinds)
        self._is_held_up = bool(plan.strength("connect_slow")) or _is_budgeted(plan)
        self._taken_back: Counter[tuple[str, int]] = Counter()

    def _waited_for(self) -> list[Witnessed]:
        """The calls for which background work and flex calls stand back."""
        return [one for one in self._users if one.user is not None and not one.user.is_flex]

    def check(self, call: Witnessed) -> None:
        """Neither background work nor a flex call begins a prompt in the way of a user."""
        if call.deployment not in self._shared:
            return
        now_s, slack_s = call.sent_s, _LET_IN_S if self._is_held_up else 0.0
        for user in self._waited_for():
            if user.deployment != call.deployment or not _awaits_at(user, now_s):
                continue
            is_own = user.process is call.process and user.incarnation == call.incarnation
            known_s = user.sent_s + slack_s + (0.0 if is_own else _REPORTED_S)
            if now_s > known_s and (is_own or self._others_know):
                self._broken(
                    f"tide: call {call.serial} went to {call.deployment} although call {user.serial} of a user"
                    f" waits for its first token there since {user.sent_s:.2f}"
                )

    def was_taken_back(self, call: Witnessed) -> bool:
        """Whether a user's need explains that this call was ended; counted, for it may happen to an item twice at most."""
        if not call.aborted or call.deployment not in self._shared:
            return False
        if not self._is_needed(call.deployment, call.ended_s):
            return False
        item = (call.job_id, call.number)
        self._taken_back[item] += 1
        if self._taken_back[item] > HAND_BACKS_MAX:
            self._broken(f"P5: item {call.number} of {call.job_id} was taken back {self._taken_back[item]} times")
        return True

    def _is_needed(self, deployment: str, at_s: float) -> bool:
        """Whether a user's call may have waited for a slot at this deployment: it stands in line at all that serve its model.

        So does a response that goes like a user's call once it has waited, whether or not it came to be sent."""
        since_s = at_s - _REPORTED_S
        users = (
            visit.user.asks_for
            for visit in self._visits
            if not visit.user.is_flex and visit.came_s <= at_s and since_s <= visit.ended_s
        )
        turned = (
            json.loads(order.bodies[0])["body"]["model"]
            for order in self._orders.values()
            if order.interactive_after_ms is not None
            and order.asked_s <= at_s
            and since_s <= self._closed_at_s.get(order.job_id, at_s)
        )
        models = {*users, *turned}
        return any(one.name == deployment for model in models for one in self._plan.estate.serving(model))

    def check_end(self, processes: list[Process], calls: list[Witnessed]) -> None:
        """Nothing of a call is left when all have ended: no slot, and no user who is not there. A job may close before its calls end, also
        before one that goes like a user's."""
        still_out = {
            (call.process.name, call.deployment, call.serial, call.is_turned) for call in calls if not call.ended
        }
        out = Counter((process, deployment) for process, deployment, _, _ in still_out)
        turned_out = Counter((process, deployment) for process, deployment, _, is_turned in still_out if is_turned)
        for process in processes:
            if process.dead or process.ended or process.router is None:
                continue
            for one in process.router.status():
                place = (process.name, one.name)
                interactive = (max(0, count - turned_out[place]) for count in process.router.interactive(one.name))
                left = (max(0, one.in_flight - out[place]), *interactive)
                if any(left):
                    self._broken(f"slots: {process.name} still counts calls at {one.name}: {left}")


def _awaits_at(user: Witnessed, at_s: float) -> bool:
    if user.ended or user.first_s is not None or user.sent_s >= at_s:
        return False
    # A user who would like a stream gets none of an endpoint that has none in this world.
    return user.is_streamed or at_s - user.sent_s < _UNSEEN_S


def _is_budgeted(plan: Plan) -> bool:
    estate = plan.estate
    bound = [*(one.limits for one in estate.deployments), *(one.limits for one in estate.resources), *estate.job_limits]
    bound += [limits for one in estate.tenants for limits in (one.limits, one.user_limits, one.key_limits)]
    return any(bound) or any(one.tokens_in_flight_max for one in estate.deployments)
