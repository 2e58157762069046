"""Reads and writes the rows of tables: CSV, JSONL and Parquet, with one batch of rows
in memory at a time.

Parquet needs `pyarrow`, which comes with `tidegate[tables]` and is loaded only for
names that end in .parquet.
"""

import csv
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import msgspec

from tidegate.cli.run.template import InputRow, as_text
from tidegate.core.errors import SettingsError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet

# A Parquet row group has as many and is made in memory, so they must be few enough for
# long prompts.
ROWS_PER_BATCH = 4_096
CELL_CHARS_MAX = 64 << 20
FORMATS = (".csv", ".jsonl", ".parquet")
_NAMES = "CSV (.csv), JSONL (.jsonl) or Parquet (.parquet)"


class TableWriter(Protocol):
    """A writer of rows in order; `close` completes the file."""

    def write(self, rows: Sequence[InputRow]) -> None: ...

    def close(self) -> None: ...


def format_of(name: str, use: str) -> str:
    """Return the format that a file's name means."""
    suffix = Path(name).suffix.lower()
    if suffix == ".ndjson":
        return ".jsonl"
    if suffix not in FORMATS:
        raise SettingsError(f"{name} is no table that can be {use}: it must be {_NAMES}.")
    return suffix


def is_table(name: str) -> bool:
    """Return whether a file must be a table, by its name. JSONL may hold rows or requests."""
    return Path(name).suffix.lower() in (".csv", ".parquet")


class RowTable:
    """One or several files of one format that are read as one table, any number of times."""

    def __init__(self, paths: Sequence[Path]) -> None:
        formats = {format_of(path.name, "read") for path in paths}
        if len(formats) > 1:
            raise SettingsError(f"The input mixes {' and '.join(sorted(formats))} files; name files of one format.")
        self.paths = paths
        self.format = formats.pop()
        self.columns = self._known_columns()

    def _known_columns(self) -> list[str] | None:
        """Return the columns, equal in all files; None for JSONL, whose columns are unknown before
        its rows are read."""
        if self.format == ".jsonl":
            return None
        found = [_columns(path, self.format) for path in self.paths]
        for path, columns in zip(self.paths, found, strict=True):
            if columns != found[0]:
                raise SettingsError(f"{path.name} has other columns than {self.paths[0].name}; name files that agree.")
        return found[0]

    def rows(self) -> Iterator[InputRow]:
        readers = {".csv": _csv_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
        for path in self.paths:
            yield from readers[self.format](path)

    def schema(self) -> "pa.Schema | None":
        """Return the types of a Parquet table's columns; None for other formats."""
        if self.format != ".parquet":
            return None
        return _parquet_file(self.paths[0]).schema_arrow


def open_writer(path: Path, suffix: str, source: RowTable, results: dict[str, str]) -> TableWriter:
    """Open a writer of the source's columns and the result columns (name and type:
    text, count or vector)."""
    if suffix == ".parquet":
        return _ParquetWriter(path, source.schema(), results)
    if suffix == ".csv":
        return _CsvWriter(path, source.columns, list(results))
    return _JsonlWriter(path)


def _columns(path: Path, suffix: str) -> list[str]:
    if suffix == ".parquet":
        return list(_parquet_file(path).schema_arrow.names)
    with path.open(newline="", encoding="utf-8-sig") as stream:
        header = next(_csv_reader(stream, path), None)
    if not header:
        raise SettingsError(f"{path.name} is empty: a CSV file begins with a line of column names.")
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise SettingsError(f"{path.name} has the column {twice[0]} twice; give each column its own name.")
    return header


def _likely_encoding(path: Path) -> str:
    """Return the encoding that a file without UTF-8 most likely has."""
    with path.open("rb") as stream:
        return "UTF-16" if stream.read(2) in (BOM_UTF16_LE, BOM_UTF16_BE) else "WINDOWS-1252"


def _csv_reader(stream: IO[str], path: Path) -> Iterator[list[str]]:
    csv.field_size_limit(CELL_CHARS_MAX)
    reader = csv.reader(stream, strict=True)
    begun = 1
    try:
        for cells in reader:
            yield cells
            begun = reader.line_num + 1
    except UnicodeDecodeError:
        raise SettingsError(
            f"{path.name}, line {_line_not_utf8(path):,} is not UTF-8: save the table as UTF-8, "
            f"or convert it, such as with iconv -f {_likely_encoding(path)} -t UTF-8."
        ) from None
    except csv.Error as error:
        raise SettingsError(f"{path.name}, the row that begins at line {begun:,}: {_csv_trouble(error)}") from None


def _csv_trouble(error: csv.Error) -> str:
    """Return what is wrong with a row, and what to do."""
    if "field limit" in str(error):
        return f"a cell has more than {CELL_CHARS_MAX:,} characters: shorten it, or check that its quotes are closed."
    if "end of data" in str(error):
        return 'a cell begins with " and the file ends before it does: close the quote.'
    return f'{error}: write a cell that has commas, quotes or lines in it in quotes, and a quote in it twice ("").'


def _line_not_utf8(path: Path) -> int:
    """Return the number of the first line that is not UTF-8: the CSV reader reads
    ahead, so it does not know."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def _csv_rows(path: Path) -> Iterator[InputRow]:
    with path.open(newline="", encoding="utf-8-sig") as stream:
        reader = _csv_reader(stream, path)
        header = next(reader, [])
        for number, cells in enumerate(reader, 1):
            if not cells:
                continue
            if len(cells) != len(header):
                raise SettingsError(
                    f"{path.name}, row {number:,} has {len(cells):,} cells where the header has {len(header):,} columns: "
                    "add what is missing, or put a cell with commas in it in quotes."
                )
            yield dict(zip(header, cells, strict=True))


def _jsonl_rows(path: Path) -> Iterator[InputRow]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                try:
                    yield decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise SettingsError(
                        f"{path.name}, line {number} is no JSON object: {error}. A row is one object a line."
                    ) from None


def _parquet_rows(path: Path) -> Iterator[InputRow]:
    with _parquet_file(path) as file:
        for batch in file.iter_batches(ROWS_PER_BATCH, use_threads=False):
            yield from batch.to_pylist()


def _parquet_file(path: Path) -> "parquet.ParquetFile":
    arrow, parquet = _arrow()
    try:
        return parquet.ParquetFile(path, pre_buffer=False)
    except (arrow.ArrowException, OSError) as error:
        raise SettingsError(f"{path.name} cannot be read as Parquet: {str(error).rstrip('. ')}.") from None


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise SettingsError(
            "Parquet needs pyarrow, which is not installed: pip install 'tidegate[tables]', or use CSV or JSONL."
        ) from None
    return pyarrow, parquet


class _JsonlWriter:
    def __init__(self, path: Path) -> None:
        self._stream = path.open("xb")

    def write(self, rows: Sequence[InputRow]) -> None:
        self._stream.writelines(msgspec.json.encode(row, enc_hook=str) + b"\n" for row in rows)

    def close(self) -> None:
        self._stream.close()


class _CsvWriter:
    """A writer that keeps text as it is, leaves absent values empty, and writes
    everything else as JSON."""

    def __init__(self, path: Path, columns: list[str] | None, results: list[str]) -> None:
        self._stream = path.open("x", newline="", encoding="utf-8")
        self._csv = csv.writer(self._stream)
        self._columns = columns
        self._results = results
        self._is_begun = False

    def write(self, rows: Sequence[InputRow]) -> None:
        if not rows:
            return
        if self._columns is None:
            self._columns = [name for name in rows[0] if name not in self._results]
        names = [*self._columns, *self._results]
        if not self._is_begun:
            self._csv.writerow(names)
            self._is_begun = True
        known = set(names)
        for row in rows:
            if not known >= row.keys():
                raise SettingsError(
                    f"A row has the column {min(row.keys() - known)}, which the first row lacks; write JSONL instead of CSV."
                )
            self._csv.writerow([as_text(row.get(name)) for name in names])

    def close(self) -> None:
        if not self._is_begun and self._columns is not None:
            self._csv.writerow([*self._columns, *self._results])
        self._stream.close()


class _ParquetWriter:
    """A writer that keeps the types of a Parquet source; for other sources the first
    rows decide the types."""

    def __init__(self, path: Path, schema: "pa.Schema | None", results: dict[str, str]) -> None:
        self._arrow, self._parquet = _arrow()
        self._path = path
        types = {
            "text": self._arrow.string(),
            "count": self._arrow.int64(),
            "vector": self._arrow.list_(self._arrow.float64()),
        }
        self._results = [self._arrow.field(name, types[kind]) for name, kind in results.items()]
        self._schema = None if schema is None else self._with_results(schema)
        self._file: Any = None

    def write(self, rows: Sequence[InputRow]) -> None:
        if not rows:
            return
        try:
            if self._schema is None:
                names = {field.name for field in self._results}
                plain = [{name: cell for name, cell in row.items() if name not in names} for row in rows]
                self._schema = self._with_results(self._arrow.Table.from_pylist(plain).schema)
            table = self._arrow.Table.from_pylist(list(rows), schema=self._schema)
            self._open().write_table(table)
        except (self._arrow.ArrowException, TypeError, ValueError) as error:
            raise SettingsError(
                f"A row does not fit the types of the first rows: {error}. Write JSONL instead."
            ) from None

    def close(self) -> None:
        if self._schema is None:
            self._schema = self._with_results(self._arrow.schema([]))
        self._open().close()

    def _open(self) -> Any:
        if self._file is None:
            self._file = self._parquet.ParquetWriter(self._path, self._schema, compression="zstd")
        return self._file

    def _with_results(self, schema: "pa.Schema") -> "pa.Schema":
        for field in self._results:
            schema = schema.append(field)
        return schema.remove_metadata()
