"""Lines that need not run, because the same request runs or ran already: found only where the caller asked for it.

Two lines are the same request when their endpoints and bodies are equal, but for white space between the tokens of the body. The order of
keys counts: engines render tools and schemas into the prompt as they stand. Bodies are compared by SHA-256.
"""

import os
from collections.abc import Container
from dataclasses import dataclass, field
from hashlib import sha256

import msgspec
from msgspec import Raw

from tidegate.core.input.lines import LineRules, endpoint_of, path_of
from tidegate.core.input.scan import Scan

_NO_TEMPERATURE = Raw(b"")


class KeyedLine(msgspec.Struct, gc=False):
    """What makes a line the same request as another. `custom_id` is the caller's own JSON text."""

    custom_id: Raw
    body: Raw
    url: str | None = None


class _BodyTemperature(msgspec.Struct, gc=False):
    temperature: Raw = _NO_TEMPERATURE


read_keyed = msgspec.json.Decoder(KeyedLine).decode
_read_sampling = msgspec.json.Decoder(_BodyTemperature).decode


@dataclass(frozen=True, slots=True)
class SameLines:
    """Items of a scan that are not run: which item's line each of them takes."""

    leaders: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.leaders)

    @property
    def numbers(self) -> set[int]:
        return set(self.leaders)


NONE_SAME = SameLines()


def find_same(source: int, scan: Scan, left_out: Container[int]) -> SameLines:
    """Find the items that take the line of another one; `left_out` never run."""
    if not scan.rules.dedupe:
        return NONE_SAME
    first: dict[bytes, int] = {}
    leaders: dict[int, int] = {}
    for number, (at, size) in enumerate(zip(scan.at, scan.size, strict=True)):
        if number in left_out:
            continue
        line = read_keyed(os.pread(source, size, at))
        if not is_deterministic(line, scan.rules):
            continue
        leader = first.setdefault(request_key(line, scan.rules), number)
        if leader != number:
            leaders[number] = leader
    return SameLines(leaders)


def is_deterministic(line: KeyedLine, rules: LineRules) -> bool:
    """Whether a request has one answer: nothing is generated, or with temperature 0."""
    if not endpoint_of(path_of(line.url, rules)).generates:
        return True
    try:
        return float(bytes(_read_sampling(line.body).temperature)) == 0
    except ValueError:
        return False


def request_key(line: KeyedLine, rules: LineRules) -> bytes:
    """The same for two lines that are the same request."""
    body = msgspec.json.format(bytes(line.body), indent=-1)
    return sha256(b"%b\n%b" % (path_of(line.url, rules).encode(), body)).digest()
