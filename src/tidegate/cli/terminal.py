"""How the commands speak: results on stdout, everything else on stderr, nothing that could upset a terminal.

It knows no command and no engine: only words, numbers and the two streams.
"""

import sys
from collections.abc import Sequence

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

VALUE_CHARS_MAX = 2_000
_THOUSANDS = ((1_000_000_000, "G"), (1_000_000, "M"), (10_000, "k"))


def clean(text: object) -> str:
    """The text with everything that a terminal would obey made visible: names and messages may be hostile."""
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(text)[:VALUE_CHARS_MAX])
    return shown if len(str(text)) <= VALUE_CHARS_MAX else f"{shown}…"


def stderr() -> Console:
    """The console for people; colours only on a terminal."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """A sentence for the person at the terminal."""
    stderr().print(Text("\n".join(clean(line) for line in text.splitlines())))


def warn(text: str) -> None:
    stderr().print(Text.assemble(("warning: ", "yellow"), clean(text)))


def fail(text: str) -> None:
    """The one clean line (or one per problem) that an error becomes."""
    console = stderr()
    for line in text.splitlines() or [""]:
        console.print(Text.assemble(("tidegate: ", "bold red"), clean(line)))


def show_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Aligned columns on stdout, never cut short; scripts ask for --json."""
    cells = [list(headings), *([clean(value) for value in row] for row in rows)]
    widths = [max(cell_len(row[column]) for row in cells) for column in range(len(headings))]
    console = Console(highlight=False, soft_wrap=True)
    for index, row in enumerate(cells):
        padded = [text + " " * (width - cell_len(text)) for text, width in zip(row, widths, strict=True)]
        console.print(Text("  ".join(padded).rstrip(), style="bold" if index == 0 else ""))


def show_json(value: object) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
    sys.stdout.flush()


def show_json_line(value: object) -> None:
    """One JSON document on one line of stdout, for a stream of them."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def in_words(count: int, noun: str, plural: str = "") -> str:
    """`1 item`, `2,000 items`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def short(count: int) -> str:
    """A number of tokens in a few letters: 9,999, 12.3k, 4.5M."""
    for size, letter in _THOUSANDS:
        if count >= size:
            return f"{count / (1_000 if letter == 'k' else size):.1f}{letter}"
    return f"{count:,}"


def duration(seconds: float) -> str:
    """A time that people read at a glance: 0.8 s, 12 s, 3:07, 1:02:03, 2 d 03:00:00."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    if not hours:
        return f"{minute}:{second:02}"
    days, hour = divmod(hours, 24)
    return f"{days} d {hour:02}:{minute:02}:{second:02}" if days else f"{hour}:{minute:02}:{second:02}"
