"""Put an input together before it is read: several files become one, and lines get the parameters that they are to have.

An input that is one file and has no such parameters is read where it lies, and nothing here runs.
"""

import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from tidegate.core.input.line_faults import strange_file
from tidegate.core.input.lines import LineRules
from tidegate.core.input.parameters import BodyShaper, named
from tidegate.core.input.scan import BOM
from tidegate.core.job_shape import AS_WRITTEN, InputPart, InputPlaces
from tidegate.core.nouns import LineError

READ_BYTES = 256 << 10


class LinePlaces:
    """Where a line of the whole input stands, and which parameters its author did not write there."""

    def __init__(self, places: InputPlaces, parameters: frozenset[str] = frozenset()) -> None:
        self._places = places
        self._parameters = parameters

    def line(self, line: int) -> int:
        """The number of a line in its own file or table."""
        return self._places.number(line)

    def name(self, line: int) -> str:
        """The file of a line; empty where there is only one."""
        return self._places.name(line)

    def words(self, line: int) -> str:
        return self._places.words(line)

    def message(self, message: str, param: str | None) -> str:
        """What is wrong with a line, and whether its author wrote what is wrong."""
        if param is not None and param.removeprefix("body.") in self._parameters:
            message += " The batch's or the operator's defaults and overrides may have set it."
        return message

    def error(self, error: LineError) -> LineError:
        """What is wrong with a line, with its file where there are several."""
        if error.line is None:
            return error
        message = in_file(self.name(error.line), self.message(error.message, error.param))
        return LineError(error.code, message, error.param, self.line(error.line))


def in_file(name: str, message: str) -> str:
    """What is wrong with a line, with its file where there are several."""
    return f"{name}: {message}" if name else message


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
                alone = InputPlaces((part.file_id,), (0,)) if len(file_ids) > 1 else rules.places
                return LinePlaces(AS_WRITTEN), LinePlaces(alone).error(reader.error)
    places = InputPlaces(tuple(file_ids), tuple(starts)) if len(file_ids) > 1 else rules.places
    return LinePlaces(places, named(rules.levels)), None


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
