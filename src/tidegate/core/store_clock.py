"""The store's own time: a clock that never runs backwards, never stands still and takes no step.

The machine's clock under the store may be set back or forth while leases, waits and rate windows
depend on it. The store's time leaves that step out, and goes on as if nothing had happened.
Afterwards it finds its way back to the machine's clock:

    set back     the store is ahead: it runs one percent slower until the machine's clock has caught up
    set forward  the store is behind: after ten minutes it jumps, and rate windows, leases and waits are moved along

So a clock that is set forth and back again within minutes, as on a resumed machine, moves no
deadline at all, and no other step moves one by more than the step. This module only counts; the
drivers read clocks and write down what is decided here.
"""

import msgspec

# A smaller difference comes from the network, or from a normal correction of the machine's clock:
# by running a little faster or slower.
STEP_MS_MIN = 1_000
# One process notes every second that it looked. A much older note means a clock step, or that no
# process ran.
TICK_MS = 900
TICK_AGE_MS_MAX = 3_000
FOLLOW_AFTER_MS = 600_000
_SLOWER_PERCENT = 99


class Steady(msgspec.Struct, frozen=True):
    """How the store's time is read from the machine's clock:

    `behind_ms` is never positive; from `since_ms` on it counts `from_ms` up.
    """

    behind_ms: int = 0
    from_ms: int = 0
    since_ms: int = 0

    def reading(self, wall_ms: int) -> int:
        """Return the store's time while the machine's clock shows this."""
        slower = self.from_ms + (wall_ms - self.since_ms) * _SLOWER_PERCENT // 100
        return max(wall_ms + self.behind_ms, slower)


# The state of a machine's clock that was never set: the store's time is the clock's.
NEVER_SET = Steady()


def going_on_from(now_ms: int, wall_ms: int) -> Steady:
    """Return the reading that shows this moment of the store at this moment of the machine's clock,
    and goes on from there.
    """
    return Steady(min(0, now_ms - wall_ms), now_ms, wall_ms)


class Look(msgspec.Struct, frozen=True):
    """The store's time, and the two moments of a clock that never steps between which it was
    read."""

    now_ms: int
    asked_ms: float
    answered_ms: float


def step_between(before: Look, after: Look) -> int:
    """Return by how much the store's time moved otherwise than real time between two looks; 0 when
    it did not.
    """
    moved = after.now_ms - before.now_ms
    least = (after.asked_ms - before.answered_ms) * _SLOWER_PERCENT / 100
    most = after.answered_ms - before.asked_ms
    if moved < least - STEP_MS_MIN:
        return int(moved - most)
    if moved > most + STEP_MS_MIN:
        return int(moved - most)
    return 0


def is_doubtful(now_ms: int, ticked_at_ms: int) -> bool:
    """Return whether the store's time, as read now, does not follow the last moment that was
    noted."""
    return not 0 <= now_ms - ticked_at_ms <= TICK_AGE_MS_MAX


def is_to_follow(steady: Steady, now_ms: int, stepped_at_ms: int) -> bool:
    """Return whether the machine's clock was set forward and has stayed there."""
    return steady.behind_ms < 0 and now_ms - stepped_at_ms >= FOLLOW_AFTER_MS
