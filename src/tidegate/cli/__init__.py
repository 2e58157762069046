"""The commands: parse, call, print. What a command does is done elsewhere."""

import gc
from functools import cache

OBJECTS_PER_COLLECTION = 20_000

# Modules make many objects that stay. Looking through them again and again while more are loaded would take a tenth of a start.
gc.set_threshold(10 * OBJECTS_PER_COLLECTION)

from tidegate.cli.app import main  # noqa: E402

__all__ = ["main", "settle_memory"]


@cache
def settle_memory() -> None:
    """Leave what was loaded out of every later collection of garbage: it stays as long as the process does. Once, for a later call would
    keep what an ended part of a run left behind."""
    gc.freeze()
    gc.set_threshold(OBJECTS_PER_COLLECTION)
