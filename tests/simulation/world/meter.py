"""Counts at the witness, at every call: promise P15 by send time, slots over all processes, and rests that a deployment asked for.

What binds a call is worked out here once more, from what the seed says and not from what the engine believes. In no window of any alignment
may more be sent than a limit allows; it is enough to look back from each call. Tokens count as they were reserved, and less once an answer
reported so: an excess is a debt, which is the engine's to pay.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.simulation.world.customers import Order
from tests.simulation.world.estate import Estate
from tests.simulation.world.rules import Rules
from tests.simulation.world.settings import SPANS
from tests.simulation.world.witness import INVALID, Witnessed
from tidegate.core.budgets.budget import Limit
from tidegate.core.deployments import Deployment, Estimate
from tidegate.core.usage.prices import cost

_UNDONE = ("throttle", "refuse", "away")
_UNBILLED = ("throttle", "refuse", "error", "away")
# A deployment rests that refused this share of so many calls; so many more may be on their way to it.
LAST_CALLS, HEAVY_SHARE, UNSEEN_CALLS_MAX = 100, 0.05, 8

# How long a revoked key may still be believed.
REVOKED_S_MAX = 2.0


@dataclass(slots=True)
class _Window:
    """The calls of one limit that lie in the window that ends now."""

    limit: Limit
    calls: deque[Witnessed] = field(default_factory=deque)

    def add(self, call: Witnessed) -> None:
        begin_s = call.sent_s - SPANS[self.limit.period].period_ms / 1000
        while self.calls and self.calls[0].sent_s <= begin_s:
            self.calls.popleft()
        self.calls.append(call)


class Meter:
    def __init__(self, estate: Estate, orders: dict[str, Order], rules: Rules, broken: Callable[[str], None]) -> None:
        self._estate = estate
        self._orders = orders
        self._rules = rules
        self._broken = broken
        self._deployments = {deployment.name: deployment for deployment in estate.deployments}
        self._windows: dict[tuple[str, Limit], _Window] = {}
        self._out: dict[str, list[Witnessed]] = {}

    def check(self, call: Witnessed) -> None:
        """Look at a call, which may be for several items, from the moment it is sent."""
        for name, limit in self._binding(call):
            window = self._windows.setdefault((name, limit), _Window(limit))
            window.add(call)
            if limit.requests is not None and len(window.calls) > limit.requests:
                self._broken(
                    f"P15: call {call.serial} is one more than the {limit.requests} per {limit.period} of {name}:"
                    f" {[f'{one.sent_s:.3f}' for one in window.calls]}"
                )
            if limit.tokens is not None:
                self._check_tokens(call, name, limit.tokens, window)
            if limit.nano is not None:
                self._check_money(call, name, limit.nano, window)
        self._check_slots(call)

    def _binding(self, call: Witnessed) -> Iterator[tuple[str, Limit]]:
        user, deployment = call.user, self._deployments[call.deployment]
        order = None if user else self._orders[call.job_id]
        asks_for = user.asks_for if user else order.asked[call.tag] if order else ""
        resource = next((one for one in self._estate.resources if one.name == asks_for), None)
        replaced = {limit.period for limit in resource.limits} if resource else set()
        yield from ((f"deployment {call.deployment}", one) for one in deployment.limits if one.period not in replaced)
        yield from ((f"resource {resource.name}", one) for one in resource.limits) if resource else ()
        if user is not None:
            yield from self._binding_caller(user.tenant, user.name, user.key_id)
        if order is not None:
            yield from self._binding_caller(order.tenant, order.caller.user, order.caller.key_id)
            yield from ((f"job {order.name}", one) for one in order.limits)

    def _binding_caller(self, number: int, user: str | None, key_id: str | None) -> Iterator[tuple[str, Limit]]:
        tenant = self._estate.tenants[number]
        yield from ((f"tenant {number}", one) for one in tenant.limits)
        yield from ((f"user {number}/{user}", one) for one in tenant.user_limits)
        yield from ((f"key {key_id}", one) for one in tenant.key_limits)

    def _check_tokens(self, call: Witnessed, name: str, tokens: int, window: _Window) -> None:
        reserved = sum(_taken(one) for one in window.calls)
        if not call.reserved:
            self._broken(f"P15: call {call.serial} reserved nothing of the tokens of {name}")
        if reserved > tokens:
            self._broken(f"P15: with call {call.serial} {reserved} of {tokens} tokens of {name} are reserved at once")
        if self._is_bound(window):
            used = sum(_tokens(one) for one in window.calls if one.mood == "ok" and not one.left)
            if used > tokens:
                self._broken(f"P15: {used} of {tokens} tokens of {name} are really used by {call.serial}")

    def _check_money(self, call: Witnessed, name: str, nano: int, window: _Window) -> None:
        """Money is hard: what was billed, or may be billed for calls whose end is unknown, never exceeds the limit."""
        known = [one for one in window.calls if one is call or (one.mood not in _UNBILLED and not one.left)]
        spent = sum(self._cost_nano(one) for one in known)
        if spent > nano:
            self._broken(f"P16: with call {call.serial} {spent} of {nano} nano-units of {name} are spent")

    def _cost_nano(self, call: Witnessed) -> int:
        price = self._deployments[call.deployment].price
        return (
            cost(call.whole_usage, price, batch=call.user is None and not call.is_turned).total_nano
            if price is not None
            else 0
        )

    def _is_bound(self, window: _Window) -> bool:
        """Whether every call reserved as much as it could ever take."""
        return all(self._deployments[one.deployment].estimate is Estimate.BOUND for one in window.calls)

    def _check_slots(self, call: Witnessed) -> None:
        """Calls of those who are dead or were declared gone may still be out while others have their slots."""
        out = [one for one in self._out.get(call.deployment, []) if not one.ended and not one.process.dead] + [call]
        self._out[call.deployment] = out
        counted = [one for one in out if one.incarnation not in self._rules.gone_at_s]
        deployment: Deployment = self._deployments[call.deployment]
        background = [
            one for one in counted if (one.user is None and not one.is_turned) or (one.user and one.user.is_flex)
        ]
        for calls, most in ((counted, deployment.max_in_flight), (background, deployment.background_in_flight_max)):
            if len(calls) > most:
                self._broken(
                    f"P15: call {call.serial} is one more than the {most} that {call.deployment}"
                    f" may have in flight: {[(one.serial, one.process.name) for one in calls]}"
                )


class Revocations:
    """A key that is revoked stops working everywhere within two seconds: nothing is sent under it after that."""

    def __init__(self, broken: Callable[[str], None]) -> None:
        self._broken = broken
        self._revoked_s: dict[str, float] = {}

    def note(self, key_id: str, at_s: float) -> None:
        self._revoked_s[key_id] = at_s

    def check(self, call: Witnessed, key_id: str | None) -> None:
        revoked_s = self._revoked_s.get(key_id or "", math.inf)
        if call.sent_s > revoked_s + REVOKED_S_MAX:
            self._broken(
                f"keys: call {call.serial} was sent {call.sent_s - revoked_s:.1f} s after {key_id} was revoked"
            )


class Rests:
    """Promise P17: a call that was refused does not come back before its time, and nothing comes to a deployment that refuses many."""

    def __init__(self, broken: Callable[[str], None]) -> None:
        self._broken = broken
        self._sent: dict[tuple[str, str], list[Witnessed]] = {}

    def check(self, call: Witnessed) -> None:
        sent = self._sent.setdefault((call.process.name, call.deployment), [])
        for earlier in sent:
            if (
                earlier.wait_s
                and earlier.received_s is not None
                and call.sent_s < earlier.received_s + earlier.wait_s - 0.002
                and (earlier.key == call.key or _refuses_many(sent, earlier.received_s))
            ):
                self._broken(
                    f"P17: call {call.serial} goes to {call.deployment}, which asked call {earlier.serial} for a rest"
                    f" of {earlier.wait_s:.1f} s"
                )
        sent.append(call)


def _refuses_many(calls: list[Witnessed], at_s: float) -> bool:
    """Whether a deployment had refused 5 % or more of the last 100 calls that a process had sent it."""
    sent = [call for call in calls if call.sent_s <= at_s]
    ended = sorted((call for call in sent if call.received_s is not None and call.received_s <= at_s), key=_received_s)
    refused = sum(call.mood == "throttle" for call in ended[-LAST_CALLS:])
    # Some may be on their way that no server has seen yet.
    return refused >= HEAVY_SHARE * min(LAST_CALLS, len(sent) + UNSEEN_CALLS_MAX)


def _received_s(call: Witnessed) -> float:
    return call.received_s or 0.0


def _taken(call: Witnessed) -> int:
    """What a call counts for at the least: nothing that was not done, and no more than was used once that is known."""
    if call.left:
        # Who leaves pays for what came by then.
        return 0
    if call.received_s is None:
        return call.reserved
    if call.mood in _UNDONE:
        return 0
    if call.mood in ("ok", INVALID):
        return min(call.reserved, _tokens(call))
    return call.reserved


def _tokens(call: Witnessed) -> int:
    return call.whole_usage.input_tokens + call.whole_usage.output_tokens
