"""Progress is a pure picture of a snapshot: rate, time left, tokens; nothing that the clock of the test could change."""

import sys
from io import StringIO

import pytest
from msgspec.structs import replace
from rich.console import Console

from docs.pictures import Screen
from tidegate.cli.terminal import terminal
from tidegate.cli.terminal.progress import ProgressPace, ProgressSnapshot, words
from tidegate.cli.terminal.progress_bar import BarDisplay, picture
from tidegate.cli.terminal.progress_display import LineDisplay, display
from tidegate.core.nouns import Usage
from tidegate.core.states import JobState


def at(
    at_s: float, answered: int, failed: int = 0, *, total: int = 1_000, state: JobState = JobState.IN_PROGRESS
) -> ProgressSnapshot:
    return ProgressSnapshot(
        at_s, state, total, answered, failed, Usage(input_tokens=answered * 120, output_tokens=answered * 30)
    )


def pace_of(*snapshots: ProgressSnapshot) -> ProgressPace:
    pace = ProgressPace()
    for one in snapshots:
        pace.add(one)
    return pace


def test_rate_and_time_left_come_from_the_last_moments() -> None:
    now = at(10, 300)
    assert (
        words(now, pace_of(at(0, 100), now)) == "300/1,000 · 30 % · 20 items/s · 35 s left · tokens 36.0k in, 9,000 out"
    )


def test_an_old_burst_does_not_make_a_stall_look_fast() -> None:
    pace = pace_of(at(0, 0), at(1, 900), at(30, 900), at(55, 900))
    assert pace.per_s == 0
    assert "0.0 items/s" in words(at(55, 900), pace)
    assert "left" not in words(at(55, 900), pace), "no time is promised while nothing is served"


def test_failures_are_shown_and_count_as_done() -> None:
    now = at(1, 490, 10)
    assert words(now, pace_of(now)).startswith("500/1,000 · 50 % · 10 failed")


@pytest.mark.parametrize("state", [JobState.CANCELLING, JobState.CANCELLED, JobState.EXPIRED])
def test_what_a_stop_left_unrun_is_not_called_failed(state: JobState) -> None:
    now = at(1, 490, 510, state=state)
    assert "510 without an answer" in words(now, pace_of(now))


def test_eighty_columns_show_what_is_done_what_failed_and_why_it_waits() -> None:
    now = replace(at(10, 290, 10), trouble="http://gpu-7:8000/v1: connection refused")
    shown = rendered(80, now)
    assert "300/1,000 · 30 % · 10 failed · waiting: http://gpu-7" in shown
    assert "left" not in words(now, pace_of(at(0, 100), now))
    console = Console(file=StringIO(), width=80, force_terminal=True, color_system="standard")
    console.print(picture(now, pace_of(now), 80))
    assert "\x1b[31m10 failed" in console.file.getvalue(), "failures are red"  # type: ignore[attr-defined]


class ATerminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("name", "kind"), [("dumb", LineDisplay), ("xterm", BarDisplay)])
def test_a_dumb_terminal_gets_lines(name: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", name)
    monkeypatch.setattr(sys, "stderr", ATerminal())
    shown = display()
    shown.close()
    assert isinstance(shown, kind)


def test_before_the_input_is_read_nothing_is_counted() -> None:
    now = ProgressSnapshot(1, JobState.VALIDATING, 0, 0, 0, Usage())
    assert words(now, pace_of(now)) == "reading the input"
    assert words(at(2, 5, state=JobState.FINALIZING), ProgressPace()).startswith("5/1,000 · 0 % · closing")


def test_never_a_hundred_percent_before_the_end() -> None:
    assert "· 99 % ·" in words(at(1, 999), ProgressPace())


def test_a_slow_pace_is_shown_by_the_minute() -> None:
    paces = [terminal.pace(per_s) for per_s in (1_234.5, 3.44, 0.1, 0.047, 0.0)]
    assert paces == ["1,234 items/s", "3.4 items/s", "0.1 items/s", "2.8 items/min", "0.0 items/s"]


def rendered(width: int, now: ProgressSnapshot) -> str:
    console = Console(file=StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(picture(now, pace_of(at(0, 0), now), width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_the_picture_is_one_line_at_any_width() -> None:
    for width in (20, 40, 80, 200):
        assert len(rendered(width, at(10, 300)).splitlines()) == 1
    assert "300/1,000" in rendered(120, at(10, 300))


def test_a_sentence_stands_alone_above_the_bar() -> None:
    console = Console(file=StringIO(), width=100, force_terminal=True)
    bar = BarDisplay(console)
    bar.show(at(1, 10))
    bar.say("The model server went away (refused).")
    bar.show(at(2, 20))
    screen = Screen(columns=100)
    screen.feed(console.file.getvalue().replace("\n", "\r\n"))  # type: ignore[attr-defined]
    first, second = screen.text().splitlines()
    assert first == "The model server went away (refused)."
    assert "20/1,000" in second
    bar.close()


def test_why_it_waits_is_whole_above_the_bar_and_once() -> None:
    console = Console(file=StringIO(), width=80, force_terminal=True)
    bar = BarDisplay(console)
    causes = [
        f"the budget of organization small is used up (3 requests a day); it allows more in {s}."
        for s in ("1m5s", "59s")
    ]
    for number, cause in enumerate(causes):
        bar.explain(cause)
        bar.show(replace(at(number, 3), trouble=cause))
    screen = Screen(columns=80)
    screen.feed(console.file.getvalue().replace("\n", "\r\n"))  # type: ignore[attr-defined]
    assert " ".join(screen.text().split()).count("(3 requests a day); it allows more in 1m5s.") == 1
    assert "59s" not in screen.text()
    bar.explain("No worker is alive.")
    assert "Waiting: No worker is alive." in console.file.getvalue()  # type: ignore[attr-defined]
    bar.close()


def test_the_bar_leaves_the_terminal_as_it_was() -> None:
    console = Console(file=StringIO(), width=100, force_terminal=True)
    bar = BarDisplay(console)
    bar.show(at(1, 10))
    bar.show(at(2, 1_000))
    bar.close()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1,000/1,000" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
