"""The store's own time: a clock that never runs backwards, never stands still and takes no step.

The machine's clock under the store may be set back or forth while leases, waits and rate windows stand on it. By how much it was set is
taken out of the store's time, which goes on as if nothing had happened. Afterwards it finds its way back to the machine's clock:

    set back     the store is ahead: it runs one percent slower until the machine's clock has caught up
    set forward  the store is behind: once that has stood for ten minutes it jumps, and rate windows, leases and waits are moved along

So a clock that is set forth and back again within minutes, as a resumed machine does, moves no deadline at all, and no other step moves
one by more than itself. This module only counts; the drivers read clocks and write down what is decided here.
"""

import msgspec

# A smaller difference is the network's, or the machine's clock being corrected as it should be: by running a little faster or slower.
STEP_MS_MIN = 1_000
# One process notes every second that it looked. A much older note: a clock step, or no process.
TICK_MS = 900
TICK_AGE_MS_MAX = 3_000
FOLLOW_AFTER_MS = 600_000
_SLOWER_PERCENT = 99


class Steady(msgspec.Struct, frozen=True):
    """How the store's time is read from the machine's clock: `behind_ms` is never positive; from `since_ms` on it counts `from_ms` up."""

    behind_ms: int = 0
    from_ms: int = 0
    since_ms: int = 0

    def reading(self, wall_ms: int) -> int:
        """The store's time while the machine's clock shows this."""
        slower = self.from_ms + (wall_ms - self.since_ms) * _SLOWER_PERCENT // 100
        return max(wall_ms + self.behind_ms, slower)


# The machine's clock was never set: the store's time is what it shows.
NEVER_SET = Steady()


def going_on_from(now_ms: int, wall_ms: int) -> Steady:
    """Read this moment of the store from this of the machine's clock, and go on from there."""
    return Steady(min(0, now_ms - wall_ms), now_ms, wall_ms)


class Look(msgspec.Struct, frozen=True):
    """The store's time, and between which moments of a clock that never steps it was read."""

    now_ms: int
    asked_ms: float
    answered_ms: float


def step_between(before: Look, after: Look) -> int:
    """By how much the store's time went another way than time did between two looks; 0 when it did not."""
    moved = after.now_ms - before.now_ms
    least = (after.asked_ms - before.answered_ms) * _SLOWER_PERCENT / 100
    most = after.answered_ms - before.asked_ms
    if moved < least - STEP_MS_MIN:
        return int(moved - most)
    if moved > most + STEP_MS_MIN:
        return int(moved - most)
    return 0


def is_doubtful(now_ms: int, ticked_at_ms: int) -> bool:
    """Whether the store's time, as it is read now, is not the next moment after the last that was noted."""
    return not 0 <= now_ms - ticked_at_ms <= TICK_AGE_MS_MAX


def is_to_follow(steady: Steady, now_ms: int, stepped_at_ms: int) -> bool:
    """Whether the machine's clock was set forward and has stayed there."""
    return steady.behind_ms < 0 and now_ms - stepped_at_ms >= FOLLOW_AFTER_MS
