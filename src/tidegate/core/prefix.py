"""Prefix order: items whose prompts begin with the same bytes stand next to one another.

The order of work within one model is a walk through the tree of the prompts' beginnings: first what an engine reads first
(tools, instructions, a system text), then the prompt itself, byte by byte, so every length of shared beginning is grouped
at once and no tokenizer is needed. Branches come in the order in which the input first takes them, and items that share
less than `KEY_BYTES` behind a fork are not kin: that is a fraction of a cache block, and the nearer the work stays to the
order of the input, the cheaper it is to rewrite.

Prompts are not kept. A family (items of one model with equal tools and instructions) remembers how far all its prompts
agree, and each item keeps the `KEY_BYTES` behind that point. Only kin are read again, from where they are known to agree.
Where the bytes come from is the caller's business.
"""

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter, xor

KEY_BYTES = 24
REFERENCE_BYTES_MAX = 64 << 10

# Reads up to `count` bytes of item `number`'s prompt from `at` on: (number, at, count).
Read = Callable[[int, int, int], bytes]
# Items on one branch of the tree and how far they are known to agree; None when they need no further order.
Branch = tuple["array[int]", int | None]


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


def order_family(family: Family, numbers: Sequence[int], keys: bytes, read: Read) -> "tuple[array[int], int]":
    """The family's items in prefix order, and the sum of what each shares with the one before it."""
    if len(family.cuts) == 1:
        own_keys = [keys[at : at + KEY_BYTES] for at in map(KEY_BYTES.__mul__, numbers)]
    else:
        own_keys = [family.key_of(number, keys) for number in numbers]
    ordered = array("I")
    branches, shared = _fork(numbers, own_keys, family.cut)
    # The walk goes deep before it goes on: what a branch splits into is put in its place.
    branches.reverse()
    while branches:
        members, at = branches.pop()
        if at is None:
            ordered.extend(members)
            continue
        cut, own_keys = _keys_behind(members, at, read)
        inner, bytes_shared = _fork(members, own_keys, at + cut)
        shared += bytes_shared
        branches.extend(reversed(inner))
    return ordered, shared


def _fork(numbers: Sequence[int], keys: Sequence[bytes], at: int) -> tuple[list[Branch], int]:
    """Split items that agree up to `at` by their keys there, in the order in which the keys appear; and what neighbours on
    different branches, and equals on one, share."""
    leaders: dict[bytes, int] = {}
    kin: dict[int, array[int]] = {}
    for number, leader in zip(numbers, map(leaders.setdefault, keys, numbers), strict=True):
        if leader != number:
            kin.setdefault(leader, array("I", (leader,))).append(number)
    shared = _between(leaders, at)
    if not kin:
        return [(array("I", leaders.values()), None)], shared
    branches: list[Branch] = []
    alone = array("I")
    for key, leader in leaders.items():
        members = kin.pop(leader, None)
        if members is None:
            alone.append(leader)
        elif key.endswith(b"\0"):
            # Their prompts end within the key, so they are the same.
            alone += members
            shared += (len(members) - 1) * (at + len(key.rstrip(b"\0")))
        else:
            branches.append((alone, None))
            branches.append((members, at + KEY_BYTES))
            alone = array("I")
    branches.append((alone, None))
    return branches, shared


def _between(keys: Iterable[bytes], at: int) -> int:
    """What neighbours with different keys share, in all."""
    numbers = list(map(int.from_bytes, keys))
    different_bits = Counter(map(int.bit_length, map(xor, numbers, numbers[1:])))
    return sum((at + KEY_BYTES - (bits + 7) // 8) * count for bits, count in different_bits.items())


def _keys_behind(numbers: Sequence[int], at: int, read: Read) -> tuple[int, list[bytes]]:
    """How much further items agree that agree up to `at`, and their keys there."""
    longest = reference = read(numbers[0], at, REFERENCE_BYTES_MAX)
    cut = len(reference)
    keys: list[bytes] = []
    moved: list[tuple[int, int]] = []
    for number in numbers:
        piece = read(number, at, cut + KEY_BYTES)
        if not piece.startswith(reference):
            moved.append((len(keys), cut))
            cut = common_prefix(reference, piece)
            reference = longest[:cut]
        keys.append(piece[cut : cut + KEY_BYTES].ljust(KEY_BYTES, b"\0"))
    # Items that were keyed before the cut moved agree with the reference up to where it stood.
    start = 0
    for stop, own_cut in moved:
        lacking = longest[cut:own_cut]
        keys[start:stop] = [(lacking + key)[:KEY_BYTES] for key in keys[start:stop]]
        start = stop
    return cut, keys
