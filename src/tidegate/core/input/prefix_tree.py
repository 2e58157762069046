"""Beginnings that prompts share, found while an input is read.

A family is the items of one model with equal tools and instructions; it knows how far all its
prompts agree. A stem is a beginning that some of them share. Every item belongs to one stem, and
keeps the `KEY_BYTES` of its prompt after it. Stems branch: several prompts that go on alike after a
stem get a stem of their own, so that known bytes need not be read again. How far stems reach
depends on chance; the order of the items, which `prefix` makes, must never depend on it.

Every cut lies at the start of a string or inside one, never inside an escape. So JSON can be read
on from there after the stem's `opening`: the same brackets and an open string.
"""

from collections.abc import Sequence

KEY_BYTES = 24
REFERENCE_BYTES_MAX = 64 << 10
# A branch must spare its items at least this much.
BRANCH_BYTES_MIN = 2 * KEY_BYTES
# Shared beginnings are counted in steps of about an engine's cache block, so that neighbouring
# slices agree on the length.
SHARED_STEP_BYTES = 64


class PrefixFamily:
    """Prompts that may share a beginning. All of them begin with `reference` up to `cut`."""

    __slots__ = ("cut", "opening", "reference")

    def __init__(self, first: bytes) -> None:
        start = first[:REFERENCE_BYTES_MAX]
        self.cut, self.opening = resume(start, len(start))
        self.reference = start[: self.cut]

    def add_prompt(self, prompt: bytes) -> bool:
        """Shorten the shared beginning to fit one more prompt; return whether the cut moved."""
        if prompt.startswith(self.reference[: self.cut]):
            return False
        agreed = common_prefix(self.reference[: self.cut], prompt)
        self.cut, self.opening = resume(self.reference, agreed)
        return True


class PrefixStem:
    """A shared beginning: `reference` up to `cut`.

    `rest` is what it adds to its parent stem, and `path` what it adds to the root.
    """

    __slots__ = ("branches", "cut", "number", "opening", "path", "path_size", "reference", "rest")

    def __init__(
        self, number: int, reference: bytes, cut: int, opening: bytes, parent: "PrefixStem | None" = None
    ) -> None:
        self.number = number
        self.reference = reference
        self.cut = cut
        self.opening = opening
        self.rest = reference[parent.cut : cut] if parent else b""
        self.path: bytes = parent.path + self.rest if parent else b""
        self.path_size = len(self.path)
        # By the key after the cut; None marks a branch that would save too little.
        self.branches: dict[bytes, PrefixStem | None] = {}

    def climb(self, data: bytes, at: int) -> "tuple[PrefixStem, bool]":
        """Return the longest stem that matches a prompt which goes on at `at` after this root.

        Also return whether a branch had the prompt's key but did not match.
        """
        stem = self
        while branch := stem.branches.get(data[at : at + KEY_BYTES]):
            if not data.startswith(branch.rest, at):
                return stem, True
            stem = branch
            at += len(branch.rest)
        return stem, False


def branch_off(stem: PrefixStem, key: bytes, texts: Sequence[bytes], number: int) -> PrefixStem | None:
    """Make a branch for prompts that go on with `key` after the stem, or make the existing branch
    fit them too.

    `texts` are the bytes after the stem's cut. Return None, now and later, when they share too
    little.
    """
    old = stem.branches.get(key)
    shared = old.rest if old else texts[0][: REFERENCE_BYTES_MAX - stem.cut]
    agreed = min(common_prefix(shared, text) for text in texts)
    reference = old.reference if old else stem.reference[: stem.cut] + shared[:agreed]
    cut, opening = resume(reference, stem.cut + agreed)
    branch = PrefixStem(number, reference, cut, opening, stem) if cut - stem.cut >= BRANCH_BYTES_MIN else None
    stem.branches[key] = branch
    return branch


def resume(text: bytes, agreed: int) -> tuple[int, bytes]:
    """Return the last place up to `agreed` where reading the JSON in `text` can resume, and the
    shortest opening for it.

    Without any string there is no such place but the beginning.
    """
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
    # An escape has at most twelve bytes (a surrogate pair), so keep that distance from any
    # backslash.
    while (slash := text.rfind(b"\\", quote + 1, cut)) >= 0 and cut - slash < 12:
        cut = slash
    return cut, bytes(outside)


def _string_end(text: bytes, position: int, stop: int) -> int:
    """Return the place after the quote that closes the string; -1 when it is not closed before
    `stop`.
    """
    while (end := text.find(b'"', position, stop)) >= 0:
        slashes = end - len(text[position:end].rstrip(b"\\")) - position
        if slashes % 2 == 0:
            return end + 1
        position = end + 1
    return -1


def shared_beginnings(bodies: Sequence[bytes]) -> list[int]:
    """Return how many bytes of each request are the beginning of its branch; 0 for a request on no
    branch.

    The requests are neighbours in work order, a walk through the tree, so a branch is a run of
    them. Neighbours belong to one branch when they share at least half of the shorter one.
    """
    shared = [0] * len(bodies)
    branch, first = b"", 0
    for at in range(1, len(bodies)):
        one, other = bodies[at - 1], bodies[at]
        half = (min(len(one), len(other)) + 1) // 2
        if len(branch) < half or not other.startswith(branch):
            if one[:half] != other[:half]:
                branch, first = b"", at
                continue
            same = common_prefix(one, other)
            # Where the branch goes on with a shorter beginning, that one counts for all of it.
            branch = other[: same // SHARED_STEP_BYTES * SHARED_STEP_BYTES]
            shared[first:at] = [len(branch)] * (at - first)
        shared[at] = len(branch)
    return shared


def common_prefix(one: bytes, other: bytes) -> int:
    """Return how many leading bytes two texts share."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    at = 0
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
