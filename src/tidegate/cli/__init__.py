"""The commands: parse, call, print. What a command does is done elsewhere."""

import gc

# Modules make many objects that stay. Looking through all of them again after every few hundred would take a tenth of a start.
gc.set_threshold(20_000)

from tidegate.cli.app import main  # noqa: E402

__all__ = ["main"]
