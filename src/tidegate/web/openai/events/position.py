"""Where a reader of a job's events stands, as one number that only grows.

Nothing is written for events: a job's result files are their log, and a place in both files together with the last status that was sent
names every event before it. So any process can go on where another stopped, and a job that has no reader pays nothing.
"""

import re
from typing import NamedTuple

_NUMBER = re.compile(r"[0-9]{1,40}", re.ASCII)
_STEP_BITS = 4
_PLACE_BITS = 48
_PLACE_MAX = (1 << _PLACE_BITS) - 1
# The statuses in the order in which a job can have them; every end is the last.
STEPS = ("validating", "in_progress", "cancelling", "finalizing", "ended")
NO_STATUS = -1
ENDED = len(STEPS) - 1


class EventPosition(NamedTuple):
    """How many bytes of the output and the error file were sent, the last status, and whether progress was sent since the last item."""

    output_at: int = 0
    error_at: int = 0
    step: int = NO_STATUS
    has_progress: bool = False

    def number(self) -> int:
        """The id of the event that ends here."""
        places = (self.output_at + self.error_at) << _PLACE_BITS | self.error_at
        return places << _STEP_BITS | (2 * self.step + self.has_progress)


def read_position(text: str) -> EventPosition | None:
    """The position that a number stands for; None for a text that is no such number."""
    if not _NUMBER.fullmatch(text):
        return None
    places, step = divmod(int(text), 1 << _STEP_BITS)
    total, error_at = divmod(places, 1 << _PLACE_BITS)
    if step // 2 > ENDED or not error_at <= total <= _PLACE_MAX:
        return None
    return EventPosition(total - error_at, error_at, step // 2, bool(step % 2))
