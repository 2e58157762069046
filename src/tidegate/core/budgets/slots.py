"""Share slots among the processes that want some: max-min fair, in whole slots, none above what
it asked for.

The slots that are left over go round by turns: when three processes want one slot, each has it for
a third of the time.
"""

from collections.abc import Mapping


def fair_shares(cap: int, wants: Mapping[str, int], turn: int) -> dict[str, int]:
    """Return how many of `cap` slots each one gets; the remainder begins with number `turn`."""
    shares = dict.fromkeys(wants, 0)
    left = max(0, cap)
    hungry = sorted(name for name, want in wants.items() if want > 0)
    while hungry and left >= len(hungry):
        level = min(left // len(hungry), *(wants[name] - shares[name] for name in hungry))
        for name in hungry:
            shares[name] += level
        left -= level * len(hungry)
        hungry = [name for name in hungry if shares[name] < wants[name]]
    for place in range(min(left, len(hungry))):
        shares[hungry[(turn + place) % len(hungry)]] += 1
    return shares


def next_holding(cap: int, others_share: int, fair: int, in_use: int) -> tuple[int, int]:
    """Return how many calls a process may have in flight from now on, and how many to record for
    it.

    The recorded number is never less than what it has in flight already.
    """
    may = max(0, min(fair, cap - others_share))
    return may, max(may, in_use)
