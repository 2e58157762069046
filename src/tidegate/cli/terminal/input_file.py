"""The input of one `tidegate run`, where its results go, and the batch id by which the
same command finds it again.

The id is made from the input's bytes, the upstream and the options, so a second run with the same
three is the same batch, whatever happened to the first. Keys and speed are no part of it.
"""

import hashlib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec.structs import replace

from tidegate.cli.terminal import terminal
from tidegate.cli.terminal.results import is_stream
from tidegate.core import ids
from tidegate.core.answer_terms import AnswerTerms
from tidegate.core.errors import SettingsError
from tidegate.core.input.line_faults import LineFault, explain, strange_file
from tidegate.core.input.lines import MIXED
from tidegate.core.job_controls import Canary, JobControls
from tidegate.core.job_shape import AS_WRITTEN, InputPlaces, JobRetry
from tidegate.settings import Settings

PIECE_BYTES = 1 << 20
# A first line may hold pictures.
FIRST_LINE_BYTES_MAX = 64 << 20
STREAM = "-"
# Results are written as plain text, so these endings would be wrong.
COMPRESSED = frozenset((".gz", ".bz2", ".xz", ".zst", ".zip"))
NO_CONTROLS = JobControls()
# No input names more models on purpose: models beyond this are not checked beforehand.
MODELS_MAX = 1_000
SERIES_CHARS = 32
URL_CHARS_SHOWN = 80
BOM = b"\xef\xbb\xbf"
# This much of a chunk's end is searched again with the next chunk, for a url across their border.
PATH_BYTES_MAX = 256
_PATH = re.compile(rb'"url"\s{0,8}:\s{0,8}"(/[^"\\]{1,200})"')
_CUSTOM_ID = re.compile(rb'"custom_id"\s{0,8}:\s{0,8}"([\x20\x21\x23-\x5b\x5d-\x7e]{1,512})"')
# Most lines begin with their custom_id: then the rest of the line need not be searched.
_FIRST_ID = re.compile(rb'\{\s{0,8}"custom_id"\s{0,8}:\s{0,8}"([\x20\x21\x23-\x5b\x5d-\x7e]{1,512})"')
_MODEL = re.compile(rb'"model"\s{0,8}:\s{0,8}"([^"\\]{1,200})"')


class _Line(msgspec.Struct):
    url: str = ""


class _AskedBody(msgspec.Struct, frozen=True):
    model: str = ""


class _AskingLine(msgspec.Struct):
    custom_id: str = ""
    body: _AskedBody = _AskedBody()


_asking = msgspec.json.Decoder(_AskingLine)


class Input(msgspec.Struct, frozen=True):
    """An input on this disk: the caller's own file, or a copy of what came in on stdin.

    - `endpoint` is that of the first line, or MIXED if lines name different ones.
    - `is_blank`: it has no request.
    - `perhaps_models` are all texts that look like names of models, even inside a prompt."""

    path: Path
    name: str
    sha256: str
    size_bytes: int
    endpoint: str | None
    is_spooled: bool = False
    trouble: str = ""
    line_count: int = 0
    perhaps_models: frozenset[bytes] = frozenset()
    places: InputPlaces = AS_WRITTEN
    is_blank: bool = False


class RunOptions(msgspec.Struct, frozen=True):
    """The options that the caller gave. Only a change of the endpoint, the model, the parameters or
    the schema makes another run."""

    endpoint: str
    ordered: bool = False
    prefix_order: bool = True
    invalid_lines: str = "fail"
    model: str | None = None
    answers: AnswerTerms | None = None
    controls: JobControls = NO_CONTROLS
    canary: Canary | None = None
    dedupe: bool = False
    defaults: dict[str, Any] = msgspec.field(default_factory=dict)
    overrides: dict[str, Any] = msgspec.field(default_factory=dict)
    retry: JobRetry | None = None

    @property
    def meant(self) -> list[object]:
        """Return the options that make it another run, without the endpoint."""
        parameters = [self.defaults, self.overrides] if self.defaults or self.overrides else []
        # How often, and by which model, an unfit answer is asked again does not change
        # the other answers.
        schema = None if self.answers is None else AnswerTerms(self.answers.schema)
        return [self.model, schema, *parameters]


class Targets(msgspec.Struct, frozen=True):
    """The files of answers and of failed lines. Without `results` answers go to stdout; without
    `errors` failed lines go nowhere."""

    results: Path | None
    errors: Path | None
    remote: str | None = None

    @property
    def results_name(self) -> str | None:
        """Return the place of the answers as the caller knows it."""
        return self.remote or (terminal.as_text(str(self.results)) if self.results is not None else None)

    @property
    def errors_name(self) -> str | None:
        """Return the place of the failed lines as the caller knows it; in a bucket they
        are beside the answers."""
        if self.errors is None:
            return None
        return (
            f"{self.remote.rpartition('/')[0]}/{self.errors.name}"
            if self.remote
            else terminal.as_text(str(self.errors))
        )


def check_source(path: Path) -> None:
    """Refuse a path that cannot be uploaded, before a server is asked."""
    if path.is_dir():
        raise SettingsError(f"{path} is a directory; name a JSONL file.")
    if not path.exists():
        raise SettingsError(
            f"There is no file {path}; name a JSONL file, or see what is uploaded with `tidegate files list`."
        )


def is_passing(file: str) -> bool:
    """Return whether an input can be read only once: stdin, a pipe or another stream."""
    path = Path(file)
    return file == STREAM or (path.exists() and not path.is_file() and not path.is_dir())


def read_input(file: str, spool_dir: Path, bytes_max: int) -> Input:
    """Read and hash the input. A stream is spooled to a file, because it cannot be read twice."""
    path = Path(file)
    try:
        if file == STREAM:
            if sys.stdin.isatty():
                raise SettingsError("stdin is a terminal: pipe the requests in, or name a file.")
            return _spooled(sys.stdin.buffer, "stdin.jsonl", spool_dir, bytes_max)
        if path.is_dir():
            raise SettingsError(
                f"{path} is a directory; name a JSONL file, or several with a pattern in quotes, such as '{path}/*.jsonl'."
            )
        with path.open("rb") as stream:
            if not path.is_file():
                return _spooled(stream, terminal.as_text(path.name), spool_dir, bytes_max)
            return _hashed(stream, path, terminal.as_text(path.name), bytes_max, None)
    except FileNotFoundError:
        if file.startswith(("http://", "https://")):
            raise SettingsError(
                f"{file} is an address, and only files are read, s3:// and az:// too. Pass it on: curl -sSf {shlex.quote(file)} | tidegate "
                "run - -o FILE …"
            ) from None
        raise SettingsError(f"There is no file {file}; name a JSONL file, or - for stdin.") from None
    except OSError as error:
        raise SettingsError(f"{file} cannot be read: {error.strerror or error}.") from None


def _spooled(stream: IO[bytes], name: str, spool_dir: Path, bytes_max: int) -> Input:
    path = spool_dir / "stdin.jsonl"
    with path.open("xb") as spool:
        return _hashed(stream, path, name, bytes_max, spool)


def _hashed(stream: IO[bytes], path: Path, name: str, bytes_max: int, spool: IO[bytes] | None) -> Input:
    digest = hashlib.sha256()
    size_bytes = line_count = 0
    head, tail, has_first_line = bytearray(), b"", False
    paths: set[bytes] = set()
    models: set[bytes] = set()
    is_blank = True
    while chunk := stream.read(PIECE_BYTES):
        digest.update(chunk)
        is_blank = is_blank and not (chunk if size_bytes else chunk.removeprefix(BOM)).strip()
        size_bytes += len(chunk)
        line_count += chunk.count(b"\n")
        if size_bytes > bytes_max:
            raise SettingsError(f"{name} is larger than {bytes_max:,} bytes; split it, or raise limits.file_bytes_max.")
        if not has_first_line and len(head) < FIRST_LINE_BYTES_MAX:
            piece = chunk if head else chunk.lstrip()
            head += piece
            has_first_line = b"\n" in piece
        if spool is not None:
            _keep(chunk, spool)
        seen = tail + chunk
        paths.update(_PATH.findall(seen))
        if len(models) < MODELS_MAX:
            models.update(_MODEL.findall(seen))
        tail = seen[-PATH_BYTES_MAX:]
    endpoint, trouble = _endpoint_of(bytes(head))
    # A body may hold text that looks like a line's url, so the lines are decoded.
    if endpoint is not None and len(paths) > 1 and _names_several(path):
        endpoint = MIXED
    sha256 = digest.hexdigest()
    found = Input(path, name, sha256, size_bytes, endpoint, spool is not None, trouble, line_count, frozenset(models))
    return replace(found, is_blank=is_blank)


def _keep(chunk: bytes, spool: IO[bytes]) -> None:
    """Write what came in. A full disk gets its own message, so that it does not read
    like a broken input."""
    try:
        spool.write(chunk)
        spool.flush()
    except OSError as error:
        raise SettingsError(
            f"{spool.name} cannot be written: {error.strerror or error}. Make room, or choose another place with --data."
        ) from None


def _names_several(path: Path) -> bool:
    """Return whether the lines of this file name different endpoints. Ingest reports
    lines that cannot be read."""
    found: set[str] = set()
    with path.open("rb") as lines:
        for line in lines:
            try:
                url = msgspec.json.decode(line, type=_Line).url
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            if url.startswith("/"):
                found.add(url)
            if len(found) > 1:
                return True
    return False


def models_of(path: Path) -> dict[str, int]:
    """Return the models that the lines of an input ask for, each with the number of its
    first line."""
    found: dict[str, int] = {}
    for number, line in _asking_lines(path):
        if line.body.model and len(found) < MODELS_MAX:
            found.setdefault(line.body.model, number)
    return found


def order_of(path: Path) -> dict[str, int]:
    """Return the line number of each custom_id in the input."""
    order: dict[str, int] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            found = _FIRST_ID.match(line)
            if found is None and line.count(b'"custom_id"') == 1:
                found = _CUSTOM_ID.search(line)
            if found is not None:
                order[found[1].decode()] = number
                continue
            # A prompt may hold text that looks like a custom_id, so the line is decoded.
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                order[_asking.decode(line).custom_id] = number
    return order


def _asking_lines(path: Path) -> Iterator[tuple[int, _AskingLine]]:
    """Yield the lines that can be read, with their numbers. Ingest reports the others."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                yield number, _asking.decode(line)


def _endpoint_of(head: bytes) -> tuple[str | None, str]:
    """Return the `url` of the first line and an empty text, or None and why there is none."""
    line = head.removeprefix(BOM).lstrip().partition(b"\n")[0]
    try:
        url = msgspec.json.decode(line, type=_Line).url
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None, _trouble_with(head, line)
    if url.startswith("/"):
        return url, ""
    if url:
        shown = url if len(url) <= URL_CHARS_SHOWN else f"{url[:URL_CHARS_SHOWN]}…"
        return None, f'the url of its first line, "{shown}", is no path: write it like "/v1/chat/completions".'
    return None, 'its first line needs "url": "/v1/chat/completions" or another one, or say --endpoint.'


def _trouble_with(head: bytes, line: bytes) -> str:
    if not line:
        return "it has no requests: write one JSON object a line."
    if len(line) >= FIRST_LINE_BYTES_MAX:
        return f"its first line is longer than {FIRST_LINE_BYTES_MAX:,} bytes."
    strange = strange_file(head)
    if strange is not None:
        return strange.message
    try:
        explain(line)
    except LineFault as fault:
        return f"its first line cannot be read. {fault.message}"


def targets(output: str | None, errors: str | None, source: Input) -> Targets:
    """Return where the results go; refuse a wrong place before any work is done."""
    if output is None:
        output = STREAM if source.is_spooled else f"{source.path.stem}.results.jsonl"
    results = None if output == STREAM else Path(output)
    if results is not None:
        _check_result_file(results, source, "-o")
    if errors is None and results is not None and not is_stream(results):
        error_path: Path | None = results.with_name(f"{results.stem}.errors{results.suffix or '.jsonl'}")
    else:
        error_path = Path(errors) if errors is not None else None
    if error_path is not None:
        _check_result_file(error_path, source, "-o" if errors is None else "--errors")
    if (
        results is not None
        and error_path is not None
        and results.resolve() == error_path.resolve()
        and not is_stream(results)
    ):
        raise SettingsError("Answers and failed lines cannot go to the same file; change -o or --errors.")
    return Targets(results, error_path)


def _check_result_file(path: Path, source: Input, option: str) -> None:
    if path.suffix.lower() in COMPRESSED:
        raise SettingsError(
            f"{path} names a compressed file, and results are written as plain text: "
            f"leave {path.suffix} out, or send them through a program with -o -."
        )
    check_target(path, [source.path], option)


def check_target(path: Path, inputs: Sequence[Path], option: str) -> None:
    """Refuse a place where results cannot go, before any work is done."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        # The path is a link to itself, or too long.
        raise SettingsError(
            f"{path} cannot be written: {error.strerror}. Choose another place with {option}."
        ) from None
    if path.is_dir():
        raise SettingsError(f"{path} is a directory; name a file with {option}.")
    if is_stream(path):
        return
    if not path.parent.is_dir():
        raise SettingsError(f"There is no directory {path.parent}; create it, or choose another place with {option}.")
    if path.exists() and any(one.exists() and path.samefile(one) for one in inputs):
        raise SettingsError(f"{path} is the input itself; choose another place with {option}.")
    if not os.access(path.resolve().parent, os.W_OK):
        raise SettingsError(f"Nothing can be written in {path.resolve().parent}; choose another place with {option}.")


def job_id(source: Input, settings: Settings, run_options: RunOptions, turn: int) -> str:
    """Return the id of the batch for this input, upstream and options; `turn` counts earlier ones
    that ended early or were restarted."""
    upstream = _one_spelling(settings.upstream.url)
    meant = [run_options.endpoint, *run_options.meant]
    encoded = msgspec.json.encode([1, source.sha256, upstream, _routes(settings), meant, turn])
    return ids.make("batch", hashlib.sha256(encoded).digest()[: ids.RANDOM_BYTES])


def series(settings: Settings, run_options: RunOptions, *names: str) -> str:
    """Return the common name of all runs with these input and output names, this upstream and these
    options, whatever the input holds."""
    upstream = _one_spelling(settings.upstream.url)
    encoded = msgspec.json.encode(
        [[terminal.as_text(name) for name in names], upstream, _routes(settings), *run_options.meant]
    )
    return hashlib.sha256(encoded).hexdigest()[:SERIES_CHARS]


def _routes(settings: Settings) -> dict[str, list[str]]:
    return {
        model: [
            _one_spelling(one.url) + (f"#{one.upstream_model}" if one.upstream_model else "")
            for one in entry.deployments
        ]
        for model, entry in sorted(settings.models.items())
    }


def _one_spelling(url: str) -> str:
    """Return an upstream's address in its usual form: with one slash more or without `/v1` it is
    the same server, and paid for once."""
    base = url.rstrip("/")
    return base if not base or base.endswith("/v1") else f"{base}/v1"
