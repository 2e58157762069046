"""Which deployment of a route takes a call now: a pure function of what is known of them, for batch work and interactive calls alike.

It takes no slot, waits for nothing and changes nothing.
"""

from collections.abc import Collection

from tidegate.core.nouns import Call
from tidegate.upstream.calls.traffic import Traffic
from tidegate.upstream.calls.view import View
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.routes import NameRoute, stick


def choose(
    view: View,
    route: NameRoute,
    call: Call,
    traffic: Traffic | None,
    tried: Collection[DeploymentState],
    now_ms: float,
) -> DeploymentState | None:
    """The least loaded fit deployment, or the one that the call's prefix sticks to; None when none is fit.

    A deployment whose budget is spent for a moment is the last resort but one: the last is where this call was tried before, or all its
    tries could go to the one deployment that is unhealthy. Of batch work, a probe that is due goes first, or the circuit of a
    deployment beside a healthy one stays open; a user's call goes to one with an open circuit only if that has answered a probe
    meanwhile, or no other is there.
    """
    is_user = traffic is not None and not traffic.flex_wait_s
    if not is_user and not view.has_model_slots(route, call, now_ms):
        return None
    states = route.interactive_states if is_user else route.states
    best = spent = again = shut = None
    sticky: list[DeploymentState] | None = [] if call.prefix_salt and len(states) > 1 else None
    for state in states:
        if tried and state in tried:
            continue
        if is_user:
            assert traffic is not None
            if state.ready_at_ms() > now_ms or not view.has_slot_for_user(state, traffic.owner, now_ms):
                continue
        elif not view.takes_item(state, call, now_ms):
            continue
        if state.budgets or route.own_budgets:
            if not is_user and view.opens_at_ms(route, state) > now_ms:
                continue
            if view.budgets_spent_until_ms(route, state) > now_ms:
                spent = state
                continue
        if call.attempt_count and state.has_failed(call.idempotency_key):
            again = state
            continue
        if state.breaker.is_open:
            if not is_user or state.breaker.has_answered:
                return state
            shut = state
            continue
        if sticky is not None:
            sticky.append(state)
        if best is None or state.load() < best.load():
            best = state
    if sticky:
        return stick(sticky, call.prefix_group) or best
    if again is not None and best is None and spent is None and _is_full_elsewhere(view, route, call, tried, now_ms):
        return None
    return best or spent or again or shut


def shut_beside(route: NameRoute, chosen: DeploymentState, now_ms: float) -> DeploymentState | None:
    """Return a deployment with an open circuit that a user's call passed over and that is due for a probe."""
    for state in route.interactive_states:
        if state.breaker.is_open and state is not chosen and state.ready_at_ms() <= now_ms:
            return state
    return None


def _is_full_elsewhere(
    view: View, route: NameRoute, call: Call, tried: Collection[DeploymentState], now_ms: float
) -> bool:
    """Whether a deployment that has not failed this call is healthy and lacks only room for now: that is worth a wait."""
    return any(
        state.slots.share > 0
        and state not in tried
        and max(view.ready_at_ms(route, state), state.waits_until_ms(call)) <= now_ms
        and not state.has_failed(call.idempotency_key)
        for state in route.states
    )
