"""`tidegate run --template`: turns a table into the same rows with their answers.

Rows become requests in parts of bounded size, each a batch of its own under `run_job`. A part's
batch is found by its bytes, so the same command finds finished parts done. Results come in the
order of the rows, so rows and results are read side by side, and neither is ever whole in memory.
"""

import filecmp
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from difflib import get_close_matches
from itertools import count, islice
from pathlib import Path

import msgspec
import uvloop
from msgspec.structs import replace

from tidegate.cli.run import run_job
from tidegate.cli.run.answer_columns import AnswerColumns
from tidegate.cli.run.tables import ROWS_PER_BATCH, RowTable, TableWriter, format_of, open_writer
from tidegate.cli.run.template import InputRow, Template
from tidegate.cli.terminal import input_file, results, summary, terminal
from tidegate.cli.terminal.failures import Cause, merged
from tidegate.core.errors import SettingsError
from tidegate.core.job_controls import JobControls
from tidegate.core.job_shape import InputPlaces
from tidegate.core.states import JOB_ENDED
from tidegate.core.usage.prices import units_text
from tidegate.core.wording import in_words
from tidegate.settings import Settings

PART_ROWS_MAX = 500_000
PART_BYTES_MAX = 256 << 20
COLUMNS_SHOWN_MAX = 20
# Other marks than commas that programs write between the cells of a table.
OTHER_MARKS = {";": "semicolons", "\t": "tabs", "|": "bars"}


class TableErrand(msgspec.Struct, frozen=True):
    """A table, how its rows become requests, and where the rows with answers go; `names` are the
    caller's for table and results."""

    table: RowTable
    template: Template
    target: Path
    settings: Settings
    run_options: input_file.RunOptions
    begin: run_job.Begin
    where: str
    names: tuple[str, str]


class TableEnding(msgspec.Struct):
    """The result of a table: its batches and the sums over them."""

    batches: list[str] = msgspec.field(default_factory=list)
    row_count: int = 0
    answered_count: int = 0
    found_done_count: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_nano: int = 0
    took_s: float = 0.0
    exit_code: int = summary.ALL_SUCCEEDED
    stopped: str = ""
    causes: list[Cause] = msgspec.field(default_factory=list)

    def add(self, part: summary.Ending) -> None:
        job = part.job
        self.batches.append(job.id)
        self.row_count += job.item_count
        self.answered_count += job.answered_count
        self.found_done_count += part.found_done_count
        self.input_tokens += job.usage.input_tokens
        self.output_tokens += job.usage.output_tokens
        self.cost_nano += job.cost_nano
        self.took_s += part.took_s
        self.exit_code = max(self.exit_code, part.exit_code)
        self.causes = merged((self.causes, part.causes))

    def bounds_left(self, asked: JobControls) -> JobControls:
        """Return what the bounds of the whole table leave to its next part."""
        cost_nano, errors = asked.max_cost_nano, asked.max_errors
        if cost_nano is not None:
            cost_nano = max(1, cost_nano - self.cost_nano)
        if errors is not None and errors.count is not None:
            errors = replace(errors, count=max(0, errors.count - (self.row_count - self.answered_count)))
        return replace(asked, max_cost_nano=cost_nano, max_errors=errors)

    def for_scripts(self, target: str) -> dict[str, object]:
        return {
            "batches": self.batches,
            "total": self.row_count,
            "succeeded": self.answered_count,
            "failed": self.row_count - self.answered_count,
            "found_done": self.found_done_count,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "cost": units_text(self.cost_nano),
            "seconds": round(self.took_s, 3),
            "results": target,
            "failures": summary.causes_for_scripts(self.causes),
            "exit_code": self.exit_code,
        }

    def for_people(self, target: str, where: str, *, has_bound: bool) -> str:
        failed = self.row_count - self.answered_count
        counts = f"{self.answered_count:,} of {in_words(self.row_count, 'row')} answered"
        failures = f", {failed:,} failed (why stands in their error column)" if failed else ""
        tokens = f"{terminal.short(self.input_tokens)} in, {terminal.short(self.output_tokens)} out"
        lines = [
            f"done     {counts}{failures}, in {terminal.duration(self.took_s)}",
            f"tokens   {tokens}",
            *summary.cost_lines(self.cost_nano, has_bound=has_bound),
            f"results  {target}",
            *summary.cause_lines(self.causes),
            *([f"stopped  {self.stopped}"] if self.stopped else []),
            *(f"batch    {one}" for one in self.batches),
        ]
        if self.batches:
            lines.append(f"next     tidegate verify {self.batches[-1]}{where}   checks it against every promise")
        return "\n".join(lines)


def check_columns(table: RowTable, template: Template) -> None:
    """Refuse a template that names a column which the table lacks, before anything is sent."""
    if table.columns is None:
        return
    unknown = sorted(template.columns - set(table.columns))
    if unknown:
        raise SettingsError(
            f"The template names the column {unknown[0]}, which the table lacks; {_instead(unknown[0], table)}"
        )


def _instead(name: str, table: RowTable) -> str:
    """Return a hint for a template that names a column which the table lacks."""
    columns = table.columns or []
    if len(columns) == 1 and (found := next((mark for mark in OTHER_MARKS if mark in columns[0]), None)):
        return f"its columns seem to be parted by {OTHER_MARKS[found]}: save it with commas."
    if near := get_close_matches(name, columns, n=3):
        return f"did you mean {' or '.join(near)}?"
    more = f" and {len(columns) - COLUMNS_SHOWN_MAX:,} more" if len(columns) > COLUMNS_SHOWN_MAX else ""
    return f"it has {', '.join(columns[:COLUMNS_SHOWN_MAX])}{more}."


def perform(asked: TableErrand, scratch: Path) -> tuple[TableEnding | None, int]:
    """Run every part, write the table and return the exit code; without an ending the run was
    stopped or refused before."""
    # The first row is read only if nothing else names the columns: a cell may be long.
    columns = AnswerColumns(asked.template.endpoint, asked.table.columns or list(next(asked.table.rows(), {})))
    ending = TableEnding()
    # For a link, the file that it leads to is written.
    target = asked.target.resolve()
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    to_join = enumerate(asked.table.rows(), 1)
    try:
        with _writing(asked.target):
            writer = open_writer(temporary, format_of(asked.target.name, "written"), asked.table, columns.kinds)
        for errand, row_count in parts(asked, scratch):
            terminal.say(f"Rows {ending.row_count + 1:,} to {ending.row_count + row_count:,}:")
            if not asked.begin.retry_failed:
                left = ending.bounds_left(asked.run_options.controls)
                errand = replace(errand, run_options=replace(errand.run_options, controls=left))
            done, exit_code = uvloop.run(run_job.perform(errand))
            if done.job.state not in JOB_ENDED:
                return None, exit_code
            if exit_code == summary.UNUSABLE:
                terminal.say(summary.for_people(done))
                return None, exit_code
            ending.add(done)
            with _writing(asked.target):
                join_rows(islice(to_join, row_count), errand.targets, columns, writer)
            if done.job.stopped_by is not None:
                no_more = f"{done.job.errors[0].message} No row after these was sent."
                ending.stopped = summary.FUTILE if done.is_futile else no_more
                break
        with _writing(asked.target):
            writer.close()
            _take_name(temporary, target)
    finally:
        with suppress(OSError):
            temporary.unlink()
    return ending, ending.exit_code


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Raise a system error of the block as one that names the file and says that
    nothing is lost."""
    try:
        yield
    except OSError as error:
        raise results.cannot_be_written(str(target), error) from error


def parts(asked: TableErrand, scratch: Path) -> Iterator[tuple[run_job.Errand, int]]:
    """Yield each part of the table as an errand of its own, with its number of rows. Its files are
    removed before the next part."""
    rows = enumerate(asked.table.rows(), 1)
    answers, failures = scratch / "results.jsonl", scratch / "errors.jsonl"
    targets = input_file.Targets(answers, failures)
    for number in count():
        part = write_part(rows, asked.template, scratch, asked.settings.limits.file_bytes_max)
        if part is None:
            return
        source, row_count = part
        series = input_file.series(asked.settings, asked.run_options, *asked.names, f"part {number}")
        yield (
            run_job.Errand(asked.settings, source, targets, asked.run_options, asked.begin, asked.where, series),
            row_count,
        )
        for path in (answers, failures):
            results.remove(path)


def write_part(
    rows: Iterator[tuple[int, InputRow]], template: Template, scratch: Path, bytes_max: int
) -> tuple[input_file.Input, int] | None:
    """Write the next rows as a batch's input; return None if no rows are left."""
    path = scratch / "requests.jsonl"
    row_count = size_bytes = 0
    with path.open("wb") as stream:
        for number, row in rows:
            line = template.line(f"row-{number}", row)
            stream.write(line)
            row_count, size_bytes = row_count + 1, size_bytes + len(line)
            if row_count == PART_ROWS_MAX or size_bytes >= PART_BYTES_MAX:
                break
    if not row_count:
        return None
    source = input_file.read_input(str(path), scratch, bytes_max)
    places = InputPlaces(rows_before=number - row_count)
    return replace(source, name=f"rows {number - row_count + 1:,} to {number:,}", places=places), row_count


def join_rows(
    rows: Iterator[tuple[int, InputRow]], targets: input_file.Targets, columns: AnswerColumns, writer: TableWriter
) -> None:
    """Write each row with its result. Each row is in one of the two result files, and both are in
    the order of the rows."""
    done: list[InputRow] = []
    with ExitStack() as files:
        answers, failures = (_Lines(path, files) for path in (targets.results, targets.errors))
        for number, row in rows:
            custom_id = f"row-{number}"
            line = answers.take_line(custom_id) or failures.take_line(custom_id)
            if line is None:
                raise SettingsError(f"The results hold no line for row {number}; run the same command again.")
            done.append(columns.add(row, line))
            if len(done) == ROWS_PER_BATCH:
                writer.write(done)
                done = []
    writer.write(done)


class _ResultId(msgspec.Struct):
    custom_id: str


class _Lines:
    """The lines of a result file, taken by custom_id in the order of the file."""

    def __init__(self, path: Path | None, files: ExitStack) -> None:
        found = path if path is not None and path.exists() else None
        self._lines = iter(files.enter_context(found.open("rb"))) if found is not None else iter(())
        self._decoder = msgspec.json.Decoder(_ResultId)
        self._next: tuple[str, bytes] | None = None

    def take_line(self, custom_id: str) -> bytes | None:
        """Return the next line if it has this id, else None."""
        if self._next is None:
            line = next(self._lines, None)
            if line is None:
                return None
            self._next = (self._decoder.decode(line).custom_id, line)
        if self._next[0] != custom_id:
            return None
        line, self._next = self._next[1], None
        return line


def _take_name(temporary: Path, target: Path) -> None:
    descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if target.exists() and not filecmp.cmp(temporary, target, shallow=False):
        results.set_aside(target)
    os.replace(temporary, target)
    results.sync_directory(target.parent)
