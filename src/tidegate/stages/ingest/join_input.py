"""Put an input together before it is read: join its files, and apply parameters to its lines.

An input of one file without such parameters is read in place, without this module.
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
    """The places of the whole input's lines, and the parameters that their author did not write."""

    def __init__(self, places: InputPlaces, parameters: frozenset[str] = frozenset()) -> None:
        self._places = places
        self._parameters = parameters

    def line(self, line: int) -> int:
        """Return the number of a line in its own file or table."""
        return self._places.number(line)

    def name(self, line: int) -> str:
        """Return the file of a line; empty if there is only one file."""
        return self._places.name(line)

    def words(self, line: int) -> str:
        return self._places.words(line)

    def message(self, message: str, param: str | None) -> str:
        """Return a message about a line.

        Say so if its author may not have written the parameter.
        """
        if param is not None and param.removeprefix("body.") in self._parameters:
            message += " The batch's or the operator's defaults and overrides may have set it."
        return message

    def error(self, error: LineError) -> LineError:
        """Return the error of a line, with its file if there are several."""
        if error.line is None:
            return error
        message = in_file(self.name(error.line), self.message(error.message, error.param))
        return LineError(error.code, message, error.param, self.line(error.line))


def in_file(name: str, message: str) -> str:
    """Return a message with the name of the file, if it has one."""
    return f"{name}: {message}" if name else message


def join_input(target: Path, rules: LineRules) -> tuple[LinePlaces, LineError | None]:
    """Write the parts in `rules.parts` to `target` as one input.

    Return the places of its lines, and the error of a file that cannot be used.
    """
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
    """A reader of one file as whole lines, each with its newline.

    A line above the limit comes in pieces.
    """

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
    """Return the error of an input whose bytes are not those that were uploaded."""
    which = f" {file_id}" if file_id else ""
    message = f"The input's bytes{which} are not those that were uploaded: its storage changed them. Upload it again; nothing was run."
    return LineError("input_changed", message, "input_file_id")
