"""The output of commands: results on stdout, everything else on stderr, without
characters that control a terminal.

The module knows no command and no engine, only words, numbers and the two streams.
"""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tidegate.core.errors import SettingsError

# Loading rich takes a while, and servers and most commands of a script do not need it.
if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

VALUE_CHARS_MAX = 2_000
GAP = "  "
# No column is cut below this width.
CELL_MIN = 10
# The longest id, that of a delivery, fits; a name may be longer.
FIRST_MAX = 56
_THOUSANDS = ((1_000_000_000, "G"), (1_000_000, "M"), (10_000, "k"))


def clean(text: object) -> str:
    """Return the text with escapes in place of control characters, because names and
    messages may be hostile."""
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(text)[:VALUE_CHARS_MAX])
    return shown if len(str(text)) <= VALUE_CHARS_MAX else f"{shown}…"


def as_text(name: str) -> str:
    """Return a file's name as text that can be stored and sent: on Linux it may have
    bytes that are no UTF-8."""
    return os.fsencode(name).decode(errors="backslashreplace")


def stderr() -> "Console":
    """Return the console on stderr, with colours only on a terminal."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Print a message to stderr."""
    _say("", "", *text.splitlines())


def warn(text: str) -> None:
    _say("warning: ", "yellow", text)


def fail(text: str) -> None:
    """Print an error to stderr: one clean line for each problem."""
    _say("tidegate: ", "bold red", *(text.splitlines() or [""]))


def agree(question: str) -> None:
    """Ask before something that cannot be undone; a no ends the command. Commands with
    --yes ask this way."""
    import typer

    try:
        typer.confirm(question, abort=True, err=True)
    except typer.Abort as ended:
        if not isinstance(ended.__context__, EOFError):
            raise
        sys.stderr.write("\n")
        raise SettingsError("There is no terminal to ask at, so this did nothing: give --yes.") from None


def _say(head: str, style: str, *lines: str) -> None:
    """Write these lines to stderr, each with its head."""
    if not sys.stderr.isatty():
        sys.stderr.write("".join(f"{head}{clean(line)}\n" for line in lines))
        sys.stderr.flush()
        return
    from rich.text import Text

    console = stderr()
    for line in lines:
        console.print(Text.assemble((head, style), clean(line)))


def show_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print aligned columns to stdout. A narrow terminal gets shorter texts and only
    the first columns.

    Nothing is cut if stdout is no terminal; scripts use --json."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.text import Text

    cells = [list(headings), *([clean(value) for value in row] for row in rows)]
    console = Console(highlight=False, soft_wrap=True)
    widths = [max(cell_len(row[column]) for row in cells) for column in range(len(headings))]
    if console.is_terminal:
        widths = fitted(widths, console.width)
    for index, row in enumerate(cells):
        cut = [_cut(text, width) for text, width in zip(row, widths, strict=False)]
        padded = [text + " " * (width - cell_len(text)) for text, width in zip(cut, widths, strict=True)]
        console.print(Text(GAP.join(padded).rstrip(), style="bold" if index == 0 else ""))


def show_facts(facts: Sequence[tuple[str, object]]) -> None:
    """Print names and values to stdout, one pair a line. On a terminal a long value
    continues below itself."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    names = [clean(name) for name, _ in facts]
    first = max((cell_len(name) for name in names), default=0)
    space = max(CELL_MIN, console.width - first - len(GAP))
    for name, (_, value) in zip(names, facts, strict=True):
        text = Text(clean(value))
        lines = text.wrap(console, space, overflow="fold") if console.is_terminal else [text]
        for index, line in enumerate(lines or [Text()]):
            head = name if index == 0 else ""
            console.print(Text(head + " " * (first - cell_len(head)) + GAP + line.plain.rstrip()))


def fitted(widths: Sequence[int], space: int) -> list[int]:
    """Return the widths of the columns that fit a line of this width.

    The widest columns are cut first, then the last ones are left out. The first is cut last,
    because people copy it."""
    shown = list(widths)
    if _line(shown) > space:
        shown[0] = min(shown[0], FIRST_MAX)
    while len(shown) > 1 and _line(shown) > space:
        widest = max(range(1, len(shown)), key=lambda column: shown[column])
        if shown[widest] > CELL_MIN:
            shown[widest] -= 1
        else:
            shown.pop()
    shown[0] = min(shown[0], max(1, space))
    return shown


def _line(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _cut(text: str, width: int) -> str:
    """Return the text, cut to this number of terminal cells."""
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)).rstrip() + "…"


def first(found: list[T], count: int) -> list[T]:
    """Return the first `count` of what was found; print a hint if that leaves some out."""
    if len(found) > count:
        say(f"Only the first {count:,} are shown; --limit N shows more.")
    return found[:count]


def show_json(value: object) -> None:
    """Print one JSON document to stdout."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
    sys.stdout.flush()


def show_json_line(value: object) -> None:
    """Print one JSON document on one line of stdout, for a stream of documents."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def short(count: int) -> str:
    """Return a number of tokens in a few characters: 9,999, 12.3k, 4.5M."""
    for size, letter in _THOUSANDS:
        if count >= size:
            return f"{count / (1_000 if letter == 'k' else size):.1f}{letter}"
    return f"{count:,}"


def pace(per_s: float) -> str:
    """Return a pace in words: 1,234 items/s, 3.4 items/s, or 2.8 items/min if it is very slow."""
    if per_s >= 10:
        return f"{per_s:,.0f} items/s"
    return f"{per_s:.1f} items/s" if per_s >= 0.1 or not per_s else f"{per_s * 60:.1f} items/min"


def duration(seconds: float) -> str:
    """Return a duration that people read at a glance: 0.8 s, 12 s, 3:07, 1:02:03, 2 d 03:00:00."""
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
