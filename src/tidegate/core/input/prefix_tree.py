"""Beginnings that prompts share, as they are found while an input is read.

A family is the items of one model with equal tools and instructions; it knows how far all its prompts agree. A stem is a
beginning that some of them share: every item stands on one, and keeps the `KEY_BYTES` of its prompt behind it. Stems
branch: where several prompts go on alike behind a stem, they get one of their own, so that what is known of them need not be
read again. How far stems reach is luck; the order of the items, which is `prefix`'s business, must never depend on it.

Every cut stands at the start of a string or inside one, never inside an escape, so that JSON can be read on from there behind
the stem's `opening`: the same brackets and an open string.
"""

from collections.abc import Sequence

KEY_BYTES = 24
REFERENCE_BYTES_MAX = 64 << 10
# A branch must spare its items at least this much.
BRANCH_BYTES_MIN = 2 * KEY_BYTES
# A shared beginning counts in such steps, about an engine's cache block, so that neighbouring slices of one branch agree on its length.
SHARED_STEP_BYTES = 64


class PrefixFamily:
    """Prompts that may share a beginning, and how much of it all of them share: up to `cut`, `reference` is theirs."""

    __slots__ = ("cut", "opening", "reference")

    def __init__(self, first: bytes) -> None:
        start = first[:REFERENCE_BYTES_MAX]
        self.cut, self.opening = resume(start, len(start))
        self.reference = start[: self.cut]

    def add_prompt(self, prompt: bytes) -> bool:
        """Make room for one more prompt; True when the cut had to move."""
        if prompt.startswith(self.reference[: self.cut]):
            return False
        agreed = common_prefix(self.reference[: self.cut], prompt)
        self.cut, self.opening = resume(self.reference, agreed)
        return True


class PrefixStem:
    """One beginning: `reference` up to `cut`; `rest` is what it adds to the stem that it branches off, and `path` to the one at the
    bottom."""

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
        # By the key behind the cut; None stands where a branch would spare too little.
        self.branches: dict[bytes, PrefixStem | None] = {}

    def climb(self, data: bytes, at: int) -> "tuple[PrefixStem, bool]":
        """The longest stem that a prompt stands on which goes on at `at` behind this one, at the bottom; and whether a branch seemed
        to be its own but was not."""
        stem = self
        while branch := stem.branches.get(data[at : at + KEY_BYTES]):
            if not data.startswith(branch.rest, at):
                return stem, True
            stem = branch
            at += len(branch.rest)
        return stem, False


def branch_off(stem: PrefixStem, key: bytes, texts: Sequence[bytes], number: int) -> PrefixStem | None:
    """Let prompts that go on with `key` behind the stem have a branch of it, or a branch that is there fit them too.

    `texts` are what stands behind the stem's cut. None, for good, when there is too little to share."""
    old = stem.branches.get(key)
    shared = old.rest if old else texts[0][: REFERENCE_BYTES_MAX - stem.cut]
    agreed = min(common_prefix(shared, text) for text in texts)
    reference = old.reference if old else stem.reference[: stem.cut] + shared[:agreed]
    cut, opening = resume(reference, stem.cut + agreed)
    branch = PrefixStem(number, reference, cut, opening, stem) if cut - stem.cut >= BRANCH_BYTES_MIN else None
    stem.branches[key] = branch
    return branch


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


def shared_beginnings(bodies: Sequence[bytes]) -> list[int]:
    """How much of each of these requests is the beginning of its branch; 0 for one that stands alone.

    They are neighbours in work order, which is a walk through the tree, so a branch is a run of them. Neighbours are kin when they share at
    least half of the shorter one.
    """
    shared = [0] * len(bodies)
    branch, first = b"", 0
    for at in range(1, len(bodies)):
        one, other = bodies[at - 1], bodies[at]
        half = min(len(one), len(other)) / 2
        if not branch or len(branch) < half or not other.startswith(branch):
            same = common_prefix(one, other)
            if same < half:
                branch, first = b"", at
                continue
            # Where a branch goes on with less than before, less is the beginning of all of it.
            branch = other[: same // SHARED_STEP_BYTES * SHARED_STEP_BYTES]
            shared[first:at] = [len(branch)] * (at - first)
        shared[at] = len(branch)
    return shared


def common_prefix(one: bytes, other: bytes) -> int:
    """How many leading bytes two texts share."""
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
