"""The order of work of a scanned input: items with a common beginning stand together.

Prompts are read again as far as the order needs. Nothing is checked or written here.
"""

import os
from array import array
from collections.abc import Collection
from struct import iter_unpack

from tidegate.core.input.prefix import Bundle, Read, order_family
from tidegate.core.input.prefix_tree import KEY_BYTES, common_prefix
from tidegate.core.input.scan import Scan
from tidegate.core.input.slices import WorkRun

READ_BYTES = 256 << 10
NEAR_BYTES = 4 << 10
ROW_MIN = 8


def order_items(source: int, scan: Scan, left_out: Collection[int]) -> tuple[list[WorkRun], int]:
    """Return the good items in work order, and the prompt bytes they share with the one before.

    There is one run for each endpoint and model, without the items in `left_out`.
    """
    bundles = _bundles(scan, left_out)
    read = _Prompts(source, scan).read
    numbers_of = {target: array("I") for target in scan.family_targets}
    shared = 0
    for family, bundled in enumerate(bundles):
        if scan.rules.prefix_order:
            numbers, bytes_shared = order_family(scan.families[family].cut, bundled, read)
            shared += bytes_shared + scan.family_fixed_size[family] * max(0, len(numbers) - 1)
        else:
            numbers = array("I", [number for bundle in bundled for number in bundle.numbers])
        numbers_of[scan.family_targets[family]].extend(numbers)
    if scan.rules.prefix_order:
        return [WorkRun(*target, numbers) for target, numbers in numbers_of.items()], shared
    runs = [WorkRun(*target, array("I", sorted(numbers))) for target, numbers in numbers_of.items()]
    return runs, sum(_shared(scan, run.numbers, read) for run in runs)


def _bundles(scan: Scan, left_out: Collection[int]) -> list[list[Bundle]]:
    """Return the good items of each family, with those on one stem together."""
    members = [array("I") for _ in scan.stem_cut]
    if len(members) == 1 and not left_out:
        members[0].extend(range(len(scan.at)))
    else:
        adds = [numbers.append for numbers in members]
        for number, stem in enumerate(scan.stem):
            adds[stem](number)
    keys = [key for (key,) in iter_unpack(f"{KEY_BYTES}s", scan.keys)]
    bundles: list[list[Bundle]] = [[] for _ in scan.families]
    for stem, numbers in enumerate(members):
        if left_out:
            numbers = array("I", [number for number in numbers if number not in left_out])
        if numbers:
            own_keys = [*map(keys.__getitem__, numbers)] if len(numbers) < len(keys) else keys
            bundle = Bundle(numbers, own_keys, scan.stem_reference[stem], scan.stem_cut[stem])
            bundles[scan.stem_family[stem]].append(bundle)
    return bundles


class _Prompts:
    """A reader of parts of prompts.

    Neighbours that are asked for in order come out of one larger read.
    """

    def __init__(self, source: int, scan: Scan) -> None:
        self._source = source
        self._at = scan.at
        self._prompt_at = scan.prompt_at
        self._prompt_size = scan.prompt_size
        self._buffer = b""
        self._buffer_at = 0
        self._last = 0
        self._row = 0

    def read(self, number: int, at: int, count: int) -> bytes:
        place = self._at[number] + self._prompt_at[number] + at
        rest = self._prompt_size[number] - at
        if rest < count:
            count = rest
        start = place - self._buffer_at
        if start < 0 or start + count > len(self._buffer):
            # A larger read pays only after some neighbours in a row.
            self._row = self._row + 1 if abs(place - self._last) <= NEAR_BYTES else 0
            self._last = place
            if self._row < ROW_MIN or count > READ_BYTES:
                return os.pread(self._source, count, place)
            self._buffer = os.pread(self._source, READ_BYTES, place)
            self._buffer_at = place
            self._last = place + READ_BYTES
            start = 0
        return self._buffer[start : start + count]


def _shared(scan: Scan, numbers: "array[int]", read: Read) -> int:
    """Return how many prompt bytes neighbours in the order of the input share."""
    shared = 0
    before, family = b"", -1
    for number in numbers:
        prompt = read(number, 0, scan.prompt_size[number])
        if scan.stem_family[scan.stem[number]] == family:
            shared += common_prefix(before, prompt) + scan.family_fixed_size[family]
        before, family = prompt, scan.stem_family[scan.stem[number]]
    return shared
