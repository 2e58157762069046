"""Limits of a JSON text that are checked by its bytes alone, before any parser makes objects of
them: its encoding, its depth and its size.

A byte of JSON can become thirty of memory, and while a parser makes them nothing else runs. So a
text with more names, objects and lists than a request needs is turned away first. Marks inside
strings do not count. This module does not parse.
"""

from collections.abc import Iterator

# Objects, lists and names together: each takes about a hundred bytes and a microsecond.
NODES_MAX = 100_000
# The number of all values, most of which are numbers and short texts.
VALUES_MAX = 1_000_000
TOO_MANY = f"The body has more than {NODES_MAX:,} names, objects and lists, or more than {VALUES_MAX:,} values: split the request."

# Work on pieces of this size, because each quote costs many times its byte while a piece is looked
# at.
PIECE_BYTES = 1 << 16
_NODES = (b"[", b"{", b":")
_VALUE_END = b","
_ONE_BRACKET_KIND = bytes.maketrans(b"{}", b"[]")


def is_utf8(text: bytes) -> bool:
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def count_openers(text: bytes) -> int:
    """Return how many brackets open in `text`; depth cannot be more.

    (`replace` finds bytes many times faster than `count`.)
    """
    return 2 * len(text) - len(text.replace(b"{", b"")) - len(text.replace(b"[", b""))


def is_deeper_than(text: bytes, depth_max: int) -> bool:
    """Return whether a JSON text is nested deeper than so many levels.

    Only a text with many brackets pays for an exact answer.
    """
    if count_openers(text) <= depth_max:
        return False
    level = b"".join(outside_strings(text, b"{}[]")).translate(_ONE_BRACKET_KIND)
    # Each round removes the innermost brackets, so there are as many rounds as levels.
    for _ in range(depth_max):
        inner = level.replace(b"[]", b"")
        if len(inner) == len(level):
            return False
        level = inner
    return b"[]" in level


def has_too_many_values(text: bytes) -> bool:
    """Return whether a JSON text has more names, objects and lists, or more values, than may be
    parsed at once.
    """
    if len(text) <= NODES_MAX or not _are_above(_counted(text)):
        return False
    # Most large texts are long strings: only one with this many marks pays for leaving its strings
    # out.
    nodes = values = 0
    for piece in outside_strings(text, b"[{:,"):
        more = _counted(piece)
        nodes, values = nodes + more[0], values + more[1]
        if _are_above((nodes, values)):
            return True
    return False


def outside_strings(text: bytes, marks: bytes) -> Iterator[bytes]:
    """Yield these marks of a JSON text in their order, without those inside strings."""
    others = bytes(sorted(set(range(256)) - set(marks + b'"')))
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, others)
    is_inside = False
    for at in range(0, len(bare), PIECE_BYTES):
        parts = bare[at : at + PIECE_BYTES].split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0


def _counted(text: bytes) -> tuple[int, int]:
    return sum(map(text.count, _NODES)), text.count(_VALUE_END)


def _are_above(counts: tuple[int, int]) -> bool:
    return counts[0] > NODES_MAX or counts[1] > VALUES_MAX
