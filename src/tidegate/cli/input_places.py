"""Where a line of an input stands for its author: in one of several files that were joined, or as a row of a table."""

import re
from bisect import bisect_right
from collections.abc import AsyncIterator

import msgspec
from msgspec.structs import replace

from tidegate.core.answers.failed_place import line_in, split_place, with_place
from tidegate.core.answers.line_breaks import escape_line_breaks
from tidegate.core.answers.outcome_lines import OutcomeLine, read_line
from tidegate.core.input.line_faults import BODY_FAULTS
from tidegate.core.nouns import LineError

# How messages of ingest name another line.
_LINE = re.compile(r"\bLine ([0-9]+)\b")


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
        if not self.names and self.rows_before is None:
            return message
        text, place = split_place(message)
        text, line = _LINE.sub(self._found, text), line_in(place)
        place = place if line is None else self.words(line)
        return with_place(text, place) if place else text

    async def renumbered(self, failed: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield lines of an error file, one at a time, with the places at which their author finds them."""
        async for line in failed:
            if self == AS_WRITTEN or b"(line " not in line:
                yield line
                continue
            message = _own_message(read_line(line))
            old, new = (escape_line_breaks(msgspec.json.encode(text)) for text in (message, self.message(message)))
            yield line.replace(old, new, 1) if message else line

    def _found(self, found: re.Match[str]) -> str:
        words = self.words(int(found[1]))
        return f"{words[0].upper()}{words[1:]}"

    def _file(self, line: int) -> int:
        return bisect_right(self.starts, line - 1) - 1


AS_WRITTEN = InputPlaces()


def _own_message(failed: OutcomeLine) -> str:
    """Return our message about a line that cannot be run; empty where the words are a model server's."""
    failure = failed.failure()
    is_ours = failure is not None and (failed.error is not None or failure.code in BODY_FAULTS)
    return failure.message if failure is not None and is_ours else ""
