"""The displays of one batch's progress: a line that redraws itself on a terminal
(`progress_bar.py`), elsewhere a plain line at intervals.

Both write to stderr, so that stdout stays free for the caller.
"""

import sys
from typing import Protocol

from tidegate.cli.terminal import terminal
from tidegate.cli.terminal.progress import ProgressPace, ProgressSnapshot, words
from tidegate.core.states import JobState

LINE_EVERY_S = 5.0


class Display(Protocol):
    def show(self, now: ProgressSnapshot) -> None:
        """Show this moment, or skip it."""

    def say(self, text: str) -> None:
        """Write a sentence that stays, above the line that is redrawn."""

    def explain(self, cause: str) -> None:
        """Write the whole reason of a wait, once for each cause, unless the display
        already shows it whole."""

    def close(self) -> None:
        """Restore the terminal."""


class LineDisplay:
    """A display that writes a plain line when the state changes or trouble comes or
    goes, and every few seconds."""

    def __init__(self) -> None:
        self._pace = ProgressPace()
        self._shown: tuple[JobState, bool] | None = None
        self._shown_s = 0.0

    def show(self, now: ProgressSnapshot) -> None:
        self._pace.add(now)
        # A trouble's text has its duration in it, so another text alone is no news.
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
    """Return the display that fits stderr."""
    if not sys.stderr.isatty():
        return LineDisplay()
    # Loading rich takes a while.
    from tidegate.cli.terminal.progress_bar import BarDisplay

    console = terminal.stderr()
    return LineDisplay() if console.is_dumb_terminal else BarDisplay(console)
