"""Headers with the rest of a caller's limits.

They are `RateLimit` and `RateLimit-Policy` of the IETF's draft 11, and OpenAI's `x-ratelimit-*`.

Of several limits of a kind the one with the least left is shown. An interactive call shows the
figures of the last time its limits were asked; other requests show those of the store.
"""

from collections.abc import Iterable

from tidegate.core.budgets.budget import NEVER_MS, BudgetKind, LimitRoom, Period, SideRoom

Headers = list[tuple[bytes, bytes]]
# The entry of a request's scope with the function that makes these headers, also for a refusal.
LIMIT_HEADERS = "tidegate.limit_headers"
# By kind: the names of a limit's two sides, and the unit of the second.
_NAMES = (
    (BudgetKind.CALLS, "requests", "tokens", "tokens"),
    (BudgetKind.CREATED, "batches", "input-bytes", "content-bytes"),
)
_DAY_S = 86_400
_WINDOW_S = {
    Period.MINUTE: 60,
    Period.HOUR: 3_600,
    Period.DAY: _DAY_S,
    Period.WEEK: 7 * _DAY_S,
    Period.MONTH: 30 * _DAY_S,
}


def limit_headers(rooms: Iterable[LimitRoom]) -> Headers:
    """Return the headers for these limits; none for limits that are not known yet."""
    by_kind: dict[BudgetKind, list[LimitRoom]] = {}
    for room in rooms:
        by_kind.setdefault(room.budget.kind, []).append(room)
    policies, states = [], []
    headers = []
    for kind, requests, tokens, unit in _NAMES:
        known = by_kind.get(kind, ())
        sides = (
            (requests, "", _tightest((room.requests, room.period) for room in known)),
            (tokens, f';qu="{unit}"', _tightest((room.tokens, room.period) for room in known)),
        )
        for name, quoted_unit, found in sides:
            if found is None:
                continue
            side, period = found
            window_s = _WINDOW_S.get(period)
            policies.append(f'"{name}";q={side.most}{"" if window_s is None else f";w={window_s}"}{quoted_unit}')
            returns = "" if side.resets_ms >= NEVER_MS else f";t={-(-side.resets_ms // 1000)}"
            states.append(f'"{name}";r={side.left}{returns}')
            if kind is BudgetKind.CALLS:
                headers += _openai_headers(name, side)
    if policies:
        headers += [("ratelimit-policy", ", ".join(policies)), ("ratelimit", ", ".join(states))]
    return [(name.encode(), value.encode()) for name, value in headers]


def _openai_headers(name: str, side: SideRoom) -> list[tuple[str, str]]:
    headers = [(f"x-ratelimit-limit-{name}", str(side.most)), (f"x-ratelimit-remaining-{name}", str(side.left))]
    if side.resets_ms < NEVER_MS:
        headers.append((f"x-ratelimit-reset-{name}", _duration(side.resets_ms)))
    return headers


def _tightest(sides: Iterable[tuple[SideRoom | None, Period]]) -> tuple[SideRoom, Period] | None:
    given = [(side, period) for side, period in sides if side is not None]
    return min(given, key=lambda one: (one[0].left, -one[0].resets_ms), default=None)


def _duration(ms: int) -> str:
    """Write a duration as OpenAI does: `20ms`, `7.66s`, `6m0s`, `1h0m0s`."""
    if ms < 1_000:
        return f"{ms}ms"
    minutes, rest_ms = divmod(ms, 60_000)
    seconds = f"{rest_ms / 1000:g}s"
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{seconds}"
    return f"{minutes}m{seconds}" if minutes else seconds
