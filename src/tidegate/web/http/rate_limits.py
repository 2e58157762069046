"""What a caller's limits have left, as headers: `RateLimit` and `RateLimit-Policy` of the IETF's draft 11, and OpenAI's `x-ratelimit-*`.

Of several limits of a kind the one that has least left is shown. The figures are those of the last time that the limits were asked.
"""

from collections.abc import Iterable

from tidegate.core.budgets.budget import NEVER_MS, LimitRoom, Period, SideRoom

# Where a request's scope holds the function that makes these headers, for the answer whatever it is.
LIMIT_HEADERS = "tidegate.limit_headers"
_DAY_S = 86_400
_WINDOW_S = {
    Period.MINUTE: 60,
    Period.HOUR: 3_600,
    Period.DAY: _DAY_S,
    Period.WEEK: 7 * _DAY_S,
    Period.MONTH: 30 * _DAY_S,
}


def limit_headers(rooms: Iterable[LimitRoom]) -> list[tuple[bytes, bytes]]:
    """Return the headers for these limits; none where nothing is known of them."""
    known = list(rooms)
    shown = [
        ("requests", "", _tightest((room.requests, room.period) for room in known)),
        ("tokens", ';qu="tokens"', _tightest((room.tokens, room.period) for room in known)),
    ]
    policies, states = [], []
    headers = []
    for name, unit, found in shown:
        if found is None:
            continue
        side, period = found
        window_s = _WINDOW_S.get(period)
        policies.append(f'"{name}";q={side.most}{"" if window_s is None else f";w={window_s}"}{unit}')
        state = f'"{name}";r={side.left}'
        headers.append((f"x-ratelimit-limit-{name}", str(side.most)))
        headers.append((f"x-ratelimit-remaining-{name}", str(side.left)))
        if side.resets_ms < NEVER_MS:
            state += f";t={-(-side.resets_ms // 1000)}"
            headers.append((f"x-ratelimit-reset-{name}", _duration(side.resets_ms)))
        states.append(state)
    if policies:
        headers += [("ratelimit-policy", ", ".join(policies)), ("ratelimit", ", ".join(states))]
    return [(name.encode(), value.encode()) for name, value in headers]


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
