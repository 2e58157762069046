"""Where a line of an input stands for its author: in one of several files that were joined, or as a row of a table."""

import re
from bisect import bisect_right

import msgspec
from msgspec.structs import replace

from tidegate.core.nouns import LineError

# How messages of ingest name another line, and those of failed items their own.
_LINE = re.compile(r"\bLine ([0-9]+)\b|\(line ([0-9]+)\)$")


class InputPlaces(msgspec.Struct, frozen=True):
    """`names` are the files that an input was joined from, and `starts` the lines before each. `rows_before` are the rows of a table that
    stand before the input's first line; None: it is no table."""

    names: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()
    rows_before: int | None = None

    @property
    def unit(self) -> str:
        return "line" if self.rows_before is None else "row"

    def number(self, line: int) -> int:
        """The number of a line in its own file or table."""
        if self.rows_before is not None:
            return self.rows_before + line
        return line - self.starts[self._file(line)] if self.names else line

    def words(self, line: int) -> str:
        """A line as its author finds it: `line 7`, `line 7 of b.jsonl`, `row 7`."""
        name = f" of {self.names[self._file(line)]}" if self.names else ""
        return f"{self.unit} {self.number(line)}{name}"

    def error(self, error: LineError) -> LineError:
        """What is wrong with a line, at the place where its author finds it."""
        if error.line is None:
            return error
        name = f"{self.names[self._file(error.line)]}: " if self.names else ""
        return replace(error, message=f"{name}{self.message(error.message)}", line=self.number(error.line))

    def message(self, message: str) -> str:
        """A message whose line numbers are those that its reader finds."""
        return _LINE.sub(self._found, message) if self.names or self.rows_before is not None else message

    def _found(self, found: re.Match[str]) -> str:
        if found[1]:
            words = self.words(int(found[1]))
            return f"{words[0].upper()}{words[1:]}"
        return f"({self.words(int(found[2]))})"

    def _file(self, line: int) -> int:
        return bisect_right(self.starts, line - 1) - 1


AS_WRITTEN = InputPlaces()
