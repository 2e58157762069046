"""The shape of a job's work: what its caller asks of all lines at once, and the files that its
input is made of.

These are plain values that are stored with a job and sent to the process that reads its input. The
code that uses them explains them.
"""

from bisect import bisect_right
from functools import lru_cache
from typing import Any

import msgspec


class ParameterLevel(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters for the bodies of requests: a default fills in what a body leaves out, an override
    replaces its value.

    They hold for one endpoint or one model where either is named.
    """

    defaults: dict[str, Any] = msgspec.field(default_factory=dict)
    overrides: dict[str, Any] = msgspec.field(default_factory=dict)
    endpoint: str = ""
    model: str = ""


class InputPart(msgspec.Struct, frozen=True):
    """One of the files that an input is made of: where its bytes lie, and their hash at the upload
    (empty: unknown).
    """

    file_id: str
    path: str
    sha256: str = ""


class InputPlaces(msgspec.Struct, frozen=True, omit_defaults=True):
    """The places of an input's lines for its author, who sent it in another form than one file of
    lines.

    `names` are the files that it was joined from, and `starts` the lines before each. `rows_before`
    are the rows of a table before the input's first line; None: it is no table.
    """

    names: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()
    rows_before: int | None = None

    @property
    def unit(self) -> str:
        return "line" if self.rows_before is None else "row"

    def number(self, line: int) -> int:
        """Return the number of a line in its own file or table."""
        if self.rows_before is not None:
            return self.rows_before + line
        return line - self.starts[self._file(line)] if self.names else line

    def name(self, line: int) -> str:
        """Return the file that contains a line; empty where there is only one."""
        return self.names[self._file(line)] if self.names else ""

    def words(self, line: int) -> str:
        """Return a line's place in words for its author: `line 7`, `line 7 of b.jsonl`, `row 7`."""
        name = self.name(line)
        return f"{self.unit} {self.number(line)}" + (f" of {name}" if name else "")

    def _file(self, line: int) -> int:
        return bisect_right(self.starts, line - 1) - 1


AS_WRITTEN = InputPlaces()


class JobRetry(msgspec.Struct, frozen=True, omit_defaults=True):
    """How failed items of one job are tried again, where that differs from the operator's way.

    With `codes`, only failures with one of these codes or HTTP statuses are tried again, also some
    that would otherwise be final.
    """

    attempts_max: int | None = None
    backoff_ms: int | None = None
    backoff_ms_max: int | None = None
    codes: tuple[str, ...] | None = None


class JobShape(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fixed part of what a caller asks for when creating a job.

    `more_inputs` are the files after the first. Without `output_file_bytes_max` a result file has
    no limit. `betas` go with every call to an engine of Anthropic's. With `dedupe`, identical
    requests run once; with `reuse_from`, lines that this earlier job has answered do not run.
    `places` give the lines' places for an author who did not write them as one file.
    """

    defaults: dict[str, Any] = msgspec.field(default_factory=dict)
    overrides: dict[str, Any] = msgspec.field(default_factory=dict)
    retry: JobRetry | None = None
    more_inputs: tuple[str, ...] = ()
    output_file_bytes_max: int = 0
    betas: str = ""
    dedupe: bool = False
    reuse_from: str = ""
    places: InputPlaces | None = None

    def levels(self) -> tuple[ParameterLevel, ...]:
        """Return the job's own parameters, which count more than any of the operator's."""
        if not self.defaults and not self.overrides:
            return ()
        return (ParameterLevel(self.defaults, self.overrides),)


class CopiedItems(msgspec.Struct, frozen=True, omit_defaults=True):
    """How many items of a job are not run: copies of identical items, and items that an earlier job
    has answered.

    They come after all others; their lines in the work file begin at `work_at`.
    """

    deduplicated: int = 0
    reused: int = 0
    work_at: int = 0

    @property
    def count(self) -> int:
        return self.deduplicated + self.reused


class ResultParts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The files that the results of a job were cut into; none where they are one file."""

    output: tuple[str, ...] = ()
    error: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.output, *self.error)


PLAIN = JobShape()
WHOLE = ResultParts()
NO_COPIES = CopiedItems()
_decode = msgspec.json.Decoder(JobShape).decode
_decode_parts = msgspec.json.Decoder(ResultParts).decode
_SHAPES_KNOWN = 1_024


def shape_text(shape: JobShape) -> str | None:
    """Return a shape as the store keeps it; None where nothing was asked for."""
    return None if shape == PLAIN else msgspec.json.encode(shape).decode()


@lru_cache(maxsize=_SHAPES_KNOWN)
def shape_from(text: str | None) -> JobShape:
    return PLAIN if text is None else _decode(text)


def parts_from(text: str | None) -> ResultParts:
    return WHOLE if text is None else _decode_parts(text)
