"""Where the progress of one batch is shown: on a terminal as one line that redraws itself (`progress_bar.py`), elsewhere as a plain line
now and then.

Both go to stderr, so that stdout stays the caller's.
"""

import sys
from typing import Protocol

from tidegate.cli.terminal import terminal
from tidegate.cli.terminal.progress import ProgressPace, ProgressSnapshot, words
from tidegate.core.states import JobState

LINE_EVERY_S = 5.0


class Display(Protocol):
    def show(self, now: ProgressSnapshot) -> None:
        """Draw this moment, or leave it."""

    def say(self, text: str) -> None:
        """Write a sentence that stays, above what is drawn."""

    def explain(self, cause: str) -> None:
        """Write why it waits, whole, where it is not shown so anyway; once for each cause."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class LineDisplay:
    """A plain line whenever the state changes, and when trouble comes and goes; now and then between."""

    def __init__(self) -> None:
        self._pace = ProgressPace()
        self._shown: tuple[JobState, bool] | None = None
        self._shown_s = 0.0

    def show(self, now: ProgressSnapshot) -> None:
        self._pace.add(now)
        # How long it has lasted is part of a trouble's sentence, so its text alone is no news.
        state = (now.state, bool(now.trouble))
        if state == self._shown and now.at_s - self._shown_s < LINE_EVERY_S:
            return
        self._shown, self._shown_s = state, now.at_s
        terminal.say(words(now, self._pace))

    def say(self, text: str) -> None:
        terminal.say(text)

    def explain(self, cause: str) -> None:
        pass

    def close(self) -> None:
        pass


def display() -> Display:
    """The display that fits where stderr leads."""
    if not sys.stderr.isatty():
        return LineDisplay()
    # What draws takes a while to load.
    from tidegate.cli.terminal.progress_bar import BarDisplay

    console = terminal.stderr()
    return LineDisplay() if console.is_dumb_terminal else BarDisplay(console)
