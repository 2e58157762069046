"""Search for lines that need not run, because the same request runs or ran already.

It runs only if the caller asked for it. Two lines are the same request if their endpoints and
bodies are equal, except for white space between the tokens of the body. The order of keys counts:
engines render tools and schemas into the prompt as they stand. Bodies are compared by SHA-256.
"""

import os
from collections.abc import Container, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from tidegate.core.answers.copied_lines import read_source
from tidegate.core.answers.outcome_lines import DAMAGE
from tidegate.core.input.lines import EarlierJob, LineRules, endpoint_of, path_of
from tidegate.core.input.scan import Scan
from tidegate.stages.ingest.chosen_lines import bounded_lines
from tidegate.stages.ingest.join_input import join_input

_NO_TEMPERATURE = Raw(b"")


class KeyedLine(msgspec.Struct, gc=False):
    """The parts of a line that identify its request. `custom_id` is the caller's own JSON text."""

    custom_id: Raw
    body: Raw
    url: str | None = None


class _BodyTemperature(msgspec.Struct, gc=False):
    temperature: Raw = _NO_TEMPERATURE


read_keyed = msgspec.json.Decoder(KeyedLine).decode
_decode_text = msgspec.json.Decoder(str).decode
_read_sampling = msgspec.json.Decoder(_BodyTemperature).decode


class SameLines(msgspec.Struct, frozen=True):
    """The items of a scan that are not run.

    - `leaders`: the item whose line each of them takes.
    - `answers`: where its answer lies in the file of the earlier job's answers.
    """

    leaders: dict[int, int] = msgspec.field(default_factory=dict)
    answers: dict[int, tuple[int, int]] = msgspec.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.leaders) + len(self.answers)

    @property
    def numbers(self) -> set[int]:
        return {*self.leaders, *self.answers}


NONE_SAME = SameLines()


def find_same(source: int, scan: Scan, left_out: Container[int]) -> SameLines:
    """Find the items that take the line of another one. Items in `left_out` never run."""
    rules = scan.rules
    answers = _answered(source, scan, left_out, rules.earlier) if rules.earlier is not None else {}
    if not rules.dedupe:
        return SameLines({}, answers) if answers else NONE_SAME
    first: dict[bytes, int] = {}
    leaders: dict[int, int] = {}
    for number, (at, size) in enumerate(zip(scan.at, scan.size, strict=True)):
        if number in left_out or number in answers:
            continue
        line = read_keyed(os.pread(source, size, at))
        if not is_deterministic(line, rules):
            continue
        leader = first.setdefault(request_key(line, rules), number)
        if leader != number:
            leaders[number] = leader
    return SameLines(leaders, answers)


def _answered(source: int, scan: Scan, left_out: Container[int], earlier: EarlierJob) -> dict[int, tuple[int, int]]:
    """Return the items that the earlier job answered under the same custom_id, with the places.

    A request need not be deterministic here: the caller asks for this very answer.
    """
    wanted: dict[tuple[str, bytes], int] = {}
    for number, (at, size) in enumerate(zip(scan.at, scan.size, strict=True)):
        if number not in left_out:
            line = read_keyed(os.pread(source, size, at))
            wanted[_decode_text(line.custom_id), request_key(line, scan.rules)] = number
    numbers: dict[str, int] = {}
    seen: set[str] = set()
    for custom_id, key in _earlier_keys(scan.rules, earlier):
        # A later line with the same custom_id was refused as a duplicate.
        if custom_id not in seen and (custom_id, key) in wanted:
            numbers[custom_id] = wanted[custom_id, key]
        seen.add(custom_id)
    places: dict[int, tuple[int, int]] = {}
    at = 0
    with Path(earlier.answers_path).open("rb") as answers:
        for text in answers:
            with suppress(*DAMAGE):
                # A request whose earlier answer is damaged runs again.
                if (named := numbers.get(read_source(text).custom_id or "")) is not None:
                    places[named] = (at, len(text))
            at += len(text)
    return places


def _earlier_keys(rules: LineRules, earlier: EarlierJob) -> Iterator[tuple[str, bytes]]:
    """Yield the custom_id and the key of each request of the earlier job, as it was sent."""
    rules = replace(rules, endpoint=earlier.endpoint, parts=earlier.parts, levels=earlier.levels)
    joined = Path(earlier.joined_path)
    _, unusable = join_input(joined, rules)
    if unusable is not None:
        raise OSError(unusable.message)
    with joined.open("rb") as lines:
        for text in bounded_lines(lines, rules.line_bytes_max, lambda data: None):
            try:
                line = read_keyed(text)
                yield _decode_text(line.custom_id), request_key(line, rules)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue


def is_deterministic(line: KeyedLine, rules: LineRules) -> bool:
    """Return whether a request has one answer: it generates nothing, or at temperature 0."""
    if not endpoint_of(path_of(line.url, rules)).generates:
        return True
    try:
        return float(bytes(_read_sampling(line.body).temperature)) == 0
    except ValueError:
        return False


def request_key(line: KeyedLine, rules: LineRules) -> bytes:
    """Return a key that is equal for two lines with the same request."""
    body = msgspec.json.format(bytes(line.body), indent=-1)
    return sha256(b"%b\n%b" % (path_of(line.url, rules).encode(), body)).digest()
