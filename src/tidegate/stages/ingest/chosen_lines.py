"""The lines of an input that run again: their custom_id is on a chosen line of an error file.

They are copied, so that the other lines are not checked again. A custom_id names the first line
that has it: a later one was refused as a duplicate, and would be again.
"""

from array import array
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import msgspec

from tidegate.core.answers.outcome_lines import readable_line
from tidegate.core.input.lines import ChosenLines, LineRules

_BOM = b"\xef\xbb\xbf"
_DUPLICATE = "duplicate_custom_id"


class _LineName(msgspec.Struct):
    custom_id: str


_decode_name = msgspec.json.Decoder(_LineName).decode


def copy_chosen(input_path: Path, target_path: Path, rules: LineRules, chosen: ChosenLines) -> "tuple[array[int], str]":
    """Copy the chosen lines to a new file.

    Return their 1-based numbers in the input, and its SHA-256.
    """
    wanted = _wanted(chosen)
    lines, digest = array("I"), sha256()
    with input_path.open("rb") as source, target_path.open("wb") as target:
        for number, line in enumerate(bounded_lines(source, rules.line_bytes_max, digest.update), 1):
            custom_id = _custom_id(line.removeprefix(_BOM) if number == 1 else line)
            if custom_id in wanted:
                wanted.discard(custom_id)
                target.write(line if line.endswith(b"\n") else line + b"\n")
                lines.append(number)
    return lines, digest.hexdigest()


def _wanted(chosen: ChosenLines) -> set[str | None]:
    found: set[str | None] = set()
    with Path(chosen.errors_path).open("rb") as errors:
        for text in errors:
            # A damaged line still chooses its request if its custom_id can be read.
            line = readable_line(text)
            code = line.failure_code()
            if code == _DUPLICATE or line.failure_outcome() not in chosen.outcomes:
                continue
            if (not chosen.codes or code in chosen.codes) and (
                not chosen.kinds or line.failure_kind().id in chosen.kinds
            ):
                found.add(line.custom_id)
    found.discard(None)
    return found


def bounded_lines(source: BinaryIO, bytes_max: int, seen: Callable[[bytes], None]) -> Iterator[bytes]:
    """Yield the lines of an input with their newlines.

    Of a line that is too long, yield only the beginning.
    """
    while line := source.readline(bytes_max + 2):
        seen(line)
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = source.readline(bytes_max)
            seen(rest)
        yield line


def _custom_id(line: bytes) -> str | None:
    try:
        return _decode_name(line).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
