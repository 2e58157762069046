"""Put an input together before it is read: several files become one, and lines get the parameters that they are to have.

An input that is one file and has no such parameters is read where it lies, and nothing here runs.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from tidegate.core.input.line_faults import strange_file
from tidegate.core.input.lines import LineRules
from tidegate.core.input.parameters import BodyShaper, named
from tidegate.core.input.scan import BOM
from tidegate.core.job_shape import InputPart
from tidegate.core.nouns import LineError

READ_BYTES = 256 << 10


class LinePlaces:
    """Where a line of the whole input stands. `starts` are the lines before each file, where there are several."""

    def __init__(self, file_ids: list[str], starts: list[int], parameters: frozenset[str]) -> None:
        self._file_ids = file_ids
        self._starts = starts
        self._parameters = parameters

    def line(self, line: int) -> int:
        """The number of a line in its own file."""
        return line - self._starts[self._part(line)] if self._several else line

    def words(self, line: int) -> str:
        return f"Line {self.line(line)}" + (f" of {self._file_ids[self._part(line)]}" if self._several else "")

    def message(self, message: str, param: str | None, line: int) -> str:
        """What is wrong with a line, with its file where there are several, and whether its author wrote what is wrong."""
        if param is not None and param.removeprefix("body.") in self._parameters:
            message += " The batch's or the operator's defaults and overrides may have set it."
        return f"{self._file_ids[self._part(line)]}: {message}" if self._several else message

    def error(self, error: LineError) -> LineError:
        if error.line is None:
            return error
        message = self.message(error.message, error.param, error.line)
        return LineError(error.code, message, error.param, self.line(error.line))

    @property
    def _several(self) -> bool:
        return len(self._starts) > 1

    def _part(self, line: int) -> int:
        return bisect_right(self._starts, line - 1) - 1


ONE_FILE = LinePlaces([], [], frozenset())


def join_input(target: Path, rules: LineRules) -> tuple[LinePlaces, LineError | None]:
    """Write the input that `rules.parts` make to `target`; return where its lines stand, or what is wrong with one of the files."""
    shaper = BodyShaper(rules.levels, rules) if rules.levels else None
    starts: list[int] = []
    file_ids = [part.file_id for part in rules.parts]
    line_count = 0
    with target.open("wb") as joined:
        for part in rules.parts:
            starts.append(line_count)
            reader = _PartReader(part, rules.line_bytes_max)
            for lines in reader.read():
                if shaper is not None:
                    lines = b"\n".join([shaper.shaped(line) for line in lines.split(b"\n")])
                line_count += lines.count(b"\n")
                joined.write(lines)
            if reader.error is not None:
                several = LinePlaces(file_ids, [0] * len(file_ids), frozenset())
                return ONE_FILE, several.error(reader.error)
    return LinePlaces(file_ids, starts, named(rules.levels)), None


class _PartReader:
    """Reads one file as whole lines, each with its newline. A line that is too long to be taken comes in pieces."""

    def __init__(self, part: InputPart, line_bytes_max: int) -> None:
        self._part = part
        self._line_bytes_max = line_bytes_max
        self.error: LineError | None = None

    def read(self) -> Iterator[bytes]:
        digest = sha256()
        source = os.open(self._part.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            rest, is_first, last = b"", True, b""
            while data := os.read(source, READ_BYTES):
                digest.update(data)
                if is_first:
                    if fault := strange_file(data):
                        self.error = fault.at(1)
                        return
                    data = data.removeprefix(BOM)
                    is_first = False
                data = rest + data
                end = data.rfind(b"\n") + 1
                rest = data[end:]
                if len(rest) > self._line_bytes_max + 2:
                    end, rest = len(data), b""
                if end:
                    last = data[end - 1 : end]
                    yield data[:end]
            if rest or last not in (b"", b"\n"):
                yield rest + b"\n"
        finally:
            os.close(source)
        if self._part.sha256 not in ("", digest.hexdigest()):
            self.error = changed_input(self._part.file_id)


def changed_input(file_id: str = "") -> LineError:
    """An input whose bytes are not those that were uploaded."""
    which = f" {file_id}" if file_id else ""
    message = f"The input's bytes{which} are not those that were uploaded: its storage changed them. Upload it again; nothing was run."
    return LineError("input_changed", message, "input_file_id")
