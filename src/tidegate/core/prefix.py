"""Prefix order: items whose prompts begin with the same bytes stand next to one another.

The order of work within one model is a walk through the tree of the prompts' beginnings: first what an engine reads first
(tools, instructions, a system text), then the prompt itself, byte by byte, so every length of shared beginning is grouped
at once and no tokenizer is needed. Items that share nothing worth an engine's cache keep the order of the input: less
than `KEY_BYTES` behind the last fork is a fraction of a cache block, and an input that is read in its own order is
rewritten at a third of the cost.

Prompts are not kept. A family (items of one model with equal tools and instructions) remembers how far all its prompts
agree, and each item keeps the `KEY_BYTES` behind that point. Items with equal keys are kin; only they are read again, as
many at a time as fit `WINDOWS_BYTES`. Where the bytes come from is the caller's business.
"""

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from operator import itemgetter, xor

KEY_BYTES = 24
REFERENCE_BYTES_MAX = 64 << 10
WINDOWS_BYTES = 4 << 20
_WINDOW_BYTES_MIN = 16
_STRIDE_BYTES = 64 << 10

# Reads up to `count` bytes of item `number`'s prompt from `at` on: (number, at, count).
Read = Callable[[int, int, int], bytes]


class Family:
    """Prompts that may share a beginning, and how much of it all of them share.

    `cut` is where the prompts seen so far may begin to differ. It stands at the start of a string or inside one, never
    inside an escape, so that JSON can be read on from there behind `opening`: the same brackets and an open string.
    """

    __slots__ = ("cut", "cuts", "opening", "reference")

    def __init__(self, first: bytes, number: int) -> None:
        start = first[:REFERENCE_BYTES_MAX]
        self.cut, self.opening = resume(start, len(start))
        self.reference = start[: self.cut]
        # Since which item which cut was in force.
        self.cuts = [(number, self.cut)]

    def take(self, prompt: bytes, number: int) -> bool:
        """Make room for one more prompt; True when the cut had to move."""
        if prompt.startswith(self.reference[: self.cut]):
            return False
        agreed = common_prefix(self.reference[: self.cut], prompt)
        self.cut, self.opening = resume(self.reference, agreed)
        self.cuts.append((number, self.cut))
        return True

    def key_of(self, number: int, keys: bytes) -> bytes:
        """An item's key at the final cut. An item that was keyed before the cut moved agrees with the reference up to
        its own cut, so what its key lacks stands there."""
        key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
        own_cut = self.cuts[bisect_right(self.cuts, number, key=itemgetter(0)) - 1][1]
        return (self.reference[self.cut : own_cut] + key)[:KEY_BYTES]


def resume(text: bytes, agreed: int) -> tuple[int, bytes]:
    """The last place up to `agreed` from which the JSON in `text` can be read on, and the shortest opening that leads there.

    Without any string there is no such place but the beginning."""
    quote, position = -1, 0
    outside = bytearray()
    while (start := text.find(b'"', position, agreed)) >= 0:
        outside += text[position:start]
        outside += b'"'
        quote = start
        position = _string_end(text, start + 1, agreed)
        if position < 0:
            break
        outside += b'"'
    if quote < 0:
        return 0, b""
    if position >= 0:
        # The agreement ends outside of any string: go back to the start of the last one.
        return quote + 1, bytes(outside[:-1])
    cut = agreed
    # An escape is at most twelve bytes long (a surrogate pair), so stand clear of any backslash by as much.
    while (slash := text.rfind(b"\\", quote + 1, cut)) >= 0 and cut - slash < 12:
        cut = slash
    return cut, bytes(outside)


def _string_end(text: bytes, position: int, stop: int) -> int:
    """The place behind the quote that closes the string; -1 when it is not closed before `stop`."""
    while (end := text.find(b'"', position, stop)) >= 0:
        slashes = end - len(text[position:end].rstrip(b"\\")) - position
        if slashes % 2 == 0:
            return end + 1
        position = end + 1
    return -1


def common_prefix(one: bytes, other: bytes, guess: int = 0) -> int:
    """How many leading bytes two texts share; a good guess saves most of the search."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    at = guess if one[:guess] == other[:guess] else 0
    step = 64
    while one[at : at + step] == other[at : at + step]:
        at += step
        step *= 2
    while step > 32:
        step //= 2
        if one[at : at + step] == other[at : at + step]:
            at += step
    return at + _leading_bytes(one[at : at + step], other[at : at + step], step)


def _leading_bytes(one: bytes, other: bytes, width: int) -> int:
    different = int.from_bytes(one.ljust(width, b"\0"), "big") ^ int.from_bytes(other.ljust(width, b"\0"), "big")
    return width - (different.bit_length() + 7) // 8


def order_family(
    family: Family, numbers: Sequence[int], keys: bytes, sizes: Sequence[int], read: Read
) -> "tuple[array[int], int]":
    """The family's items in prefix order, and the sum of what each shares with the one before it."""
    if len(family.cuts) == 1:
        own_keys: Iterable[bytes] = [keys[at : at + KEY_BYTES] for at in map(KEY_BYTES.__mul__, numbers)]
    else:
        own_keys = (family.key_of(number, keys) for number in numbers)
    leaders: dict[bytes, int] = {}
    kin: dict[int, array[int]] = {}
    for number, leader in zip(numbers, map(leaders.setdefault, own_keys, numbers), strict=True):
        if leader != number:
            kin.setdefault(leader, array("I", (leader,))).append(number)
    shared = _between(leaders, family.cut)
    if not kin:
        return array("I", leaders.values()), shared
    ordered = array("I")
    for leader in leaders.values():
        if leader in kin:
            settled, within = _settle(kin.pop(leader), family.cut, sizes, read)
            ordered += settled
            shared += within
        else:
            ordered.append(leader)
    return ordered, shared


def _between(keys: Iterable[bytes], cut: int) -> int:
    """What neighbours with different keys share, in all."""
    numbers = list(map(int.from_bytes, keys))
    different_bits = Counter(map(int.bit_length, map(xor, numbers, numbers[1:])))
    return sum((cut + KEY_BYTES - (bits + 7) // 8) * count for bits, count in different_bits.items())


def _settle(ordered: "array[int]", at: int, sizes: Sequence[int], read: Read) -> "tuple[array[int], int]":
    """Items that agree up to `at`, in the order of all their bytes; as many are read at a time as memory allows."""
    shared = 0
    groups = [(0, len(ordered), at)]
    while groups:
        start, stop, at = groups.pop()
        group = ordered[start:stop]
        width = max(map(sizes.__getitem__, group)) - at
        if width * len(group) > WINDOWS_BYTES:
            at = _skip(group, at, read)
            width = max(_WINDOW_BYTES_MIN, WINDOWS_BYTES // len(group))
        windows = sorted((read(number, at, width), number) for number in group)
        ordered[start:stop] = array("I", [number for _, number in windows])
        tied = 1
        guess = 0
        for place, ((one, _), (other, number)) in enumerate(pairwise(windows), start + 1):
            # A window that is not full ends its prompt: there is nothing behind it to tell equals apart.
            if one == other and len(one) == width and sizes[number] > at + width:
                tied += 1
                continue
            guess = common_prefix(one, other, guess)
            shared += at + guess
            if tied > 1:
                groups.append((place - tied, place, at + width))
            tied = 1
        if tied > 1:
            groups.append((stop - tied, stop, at + width))
    return ordered, shared


def _skip(group: Sequence[int], at: int, read: Read) -> int:
    """The place up to which a whole group agrees, found in strides by comparing each item with the first."""
    while True:
        first = read(group[0], at, _STRIDE_BYTES)
        agreed = len(first)
        for number in group:
            piece = read(number, at, agreed)
            if piece != first[:agreed]:
                agreed = common_prefix(first[:agreed], piece)
                if agreed < _WINDOW_BYTES_MIN:
                    return at
        at += agreed
        if agreed < _STRIDE_BYTES:
            return at
