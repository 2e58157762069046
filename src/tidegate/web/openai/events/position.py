"""The position of a reader in a job's events, as one number that only grows.

Events are not stored: a job's result files are their log. A place in both files and the last status
together name every event before them. So any process can continue for another, and a job without a
reader costs nothing.
"""

import re
from typing import NamedTuple

_NUMBER = re.compile(r"[0-9]{1,40}", re.ASCII)
_STEP_BITS = 4
_PLACE_BITS = 48
_PLACE_MAX = (1 << _PLACE_BITS) - 1
# The statuses in the order in which a job can have them; all ends share the last step.
STEPS = ("validating", "in_progress", "cancelling", "finalizing", "ended")
NO_STATUS = -1
ENDED = len(STEPS) - 1


class EventPosition(NamedTuple):
    """The bytes of both files that were sent, the last status, and whether progress was sent since
    the last item.
    """

    output_at: int = 0
    error_at: int = 0
    step: int = NO_STATUS
    has_progress: bool = False

    def number(self) -> int:
        """Return the id of the event that ends here."""
        places = (self.output_at + self.error_at) << _PLACE_BITS | self.error_at
        return places << _STEP_BITS | (2 * self.step + self.has_progress)


def read_position(text: str) -> EventPosition | None:
    """Return the position for a number; None for a text that is no such number."""
    if not _NUMBER.fullmatch(text):
        return None
    places, step = divmod(int(text), 1 << _STEP_BITS)
    total, error_at = divmod(places, 1 << _PLACE_BITS)
    if step // 2 > ENDED or not error_at <= total <= _PLACE_MAX:
        return None
    return EventPosition(total - error_at, error_at, step // 2, bool(step % 2))
