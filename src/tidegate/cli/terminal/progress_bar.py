"""The progress of one batch as a bar: one line of a terminal that redraws itself."""

import re

from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tidegate.cli.terminal import terminal
from tidegate.cli.terminal.progress import ProgressPace, ProgressSnapshot, facts
from tidegate.core.states import JobState

BAR_WIDTH = 32
CTRL_C_CELLS = len("^C")
_TIMES = re.compile(r"(?:[0-9]+[dhms])+")


def picture(now: ProgressSnapshot, pace: ProgressPace, width: int = 200) -> RenderableType:
    """Return the bar and the words behind it; a narrow terminal has a short bar."""
    grid = Table.grid(padding=(0, 1))
    total = now.item_count if now.item_count and now.state is not JobState.VALIDATING else None
    bar = ProgressBar(
        total=total,
        completed=now.done_count,
        width=max(8, min(BAR_WIDTH, width // 6)),
        pulse=total is None,
        animation_time=now.at_s,
    )
    text = Text(" · ", overflow="ellipsis", no_wrap=True).join(Text(*fact) for fact in facts(now, pace))
    text.overflow, text.no_wrap = "ellipsis", True
    grid.add_row(bar, text)
    return grid


class BarDisplay:
    """A display of one terminal line that redraws itself and is removed at the end."""

    def __init__(self, console: Console) -> None:
        self._pace = ProgressPace()
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()
        self._explained = ""

    def show(self, now: ProgressSnapshot) -> None:
        self._pace.add(now)
        # A terminal prints ^C behind the bar: without room for it the bar could not be cleared.
        width = self._live.console.width - CTRL_C_CELLS
        self._live.update(Constrain(picture(now, self._pace, width), width), refresh=True)

    def say(self, text: str) -> None:
        self._live.console.print(Text(terminal.clean(text)))

    def explain(self, cause: str) -> None:
        # The times in a cause change with every look, though the cause is the same.
        without_times = _TIMES.sub("#", cause)
        if without_times != self._explained:
            self._explained = without_times
            self.say(f"Waiting: {cause}")

    def close(self) -> None:
        self._live.stop()
