"""Prefix order: items whose prompts begin with the same bytes become neighbours.

The order of work within one model is a walk through the tree of the prompts' beginnings: first what
an engine reads first (tools, instructions, a system text), then the prompt itself, byte by byte, so
every length of shared beginning is grouped at once and no tokenizer is needed. Branches come in the
order in which the input first takes them. Items that share less than `KEY_BYTES` after a fork are
not grouped: that is a fraction of a cache block, and work that stays close to the order of the
input is cheaper to rewrite.

Prompts are not kept. Items come in bundles that are known to begin alike, each item with the
`KEY_BYTES` after that beginning. An item is read again only when no more is known of it, and from
where its group is known to agree. The caller supplies the bytes. How the items were bundled changes
only the amount of work.
"""

from array import array
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter

from tidegate.core.input import prefix_tree
from tidegate.core.input.prefix_tree import KEY_BYTES, common_prefix

# Reads up to `count` bytes of item `number`'s prompt from `at` on: (number, at, count).
Read = Callable[[int, int, int], bytes]


class Bundle:
    """Items, in the order of the input, whose prompts agree with `reference` from `base` to `cut`,
    and their keys there.
    """

    __slots__ = ("_agreed", "base", "cut", "keys", "numbers", "reference")

    def __init__(
        self,
        numbers: "array[int]",
        keys: Sequence[bytes],
        reference: bytes,
        cut: int,
        base: int = 0,
        *,
        read: bool = False,
    ) -> None:
        self.numbers = numbers
        self.keys = keys
        self.reference = reference
        self.cut = cut
        self.base = base
        # A bundle that was just read ends where its prompts begin to differ.
        self._agreed = b"" if read else None

    def known(self, at: int) -> bytes:
        """Return the bytes that all prompts are known to share from `at` on."""
        return self.reference[at - self.base : self.cut - self.base] + self._agreed_key.rstrip(b"\0")

    @property
    def may_agree_further(self) -> bool:
        return len(self._agreed_key) == KEY_BYTES and not self._agreed_key.endswith(b"\0")

    @property
    def _agreed_key(self) -> bytes:
        if self._agreed is None:
            least = min(self.keys)
            self._agreed = least[: common_prefix(least, max(self.keys))]
        return self._agreed

    def keys_at(self, cut: int, read: Read) -> Sequence[bytes]:
        """Return the items' keys at a fork less than a key's length before the bundle's cut, or
        anywhere after it.
        """
        if cut == self.cut:
            return self.keys
        if cut > self.cut:
            return [read(number, cut, KEY_BYTES).ljust(KEY_BYTES, b"\0") for number in self.numbers]
        lacking = self.reference[cut - self.base : self.cut - self.base]
        room = KEY_BYTES - len(lacking)
        return [lacking + key[:room] for key in self.keys]


# Bundles and single items on one branch of the tree, and how far they are known to agree; None when
# they need no more sorting.
Branch = tuple[list[Bundle], "array[int]", int | None]


def order_family(cut: int, bundles: list[Bundle], read: Read) -> "tuple[array[int], int]":
    """Return the items of a family in prefix order, and the bytes that neighbours share, summed.

    The prompts of the family agree up to `cut`.
    """
    ordered = array("I")
    branches, shared = _fork(bundles, cut, read)
    # Go deep first: the parts of a branch take its place.
    branches.reverse()
    while branches:
        bundles, numbers, at = branches.pop()
        if at is None:
            ordered.extend(numbers)
            continue
        bundles, cut = _agree(bundles, numbers, at, read)
        inner, bytes_shared = _fork(bundles, cut, read)
        shared += bytes_shared
        branches.extend(reversed(inner))
    return ordered, shared


def _agree(bundles: list[Bundle], numbers: "array[int]", at: int, read: Read) -> tuple[list[Bundle], int]:
    """Return the items of one branch in bundles known from `at` on, and exactly how far all their
    prompts agree.
    """
    numbers = _with_items(numbers, [bundle for bundle in bundles if bundle.cut < at])
    bundles = [bundle for bundle in bundles if bundle.cut >= at]
    while True:
        if numbers:
            bundles.append(_read_bundle(numbers, at, read))
        known = [bundle.known(at) for bundle in bundles]
        agreed = min(common_prefix(known[0], text) for text in known)
        short = [
            bundle
            for bundle, text in zip(bundles, known, strict=True)
            if len(text) == agreed and bundle.may_agree_further
        ]
        if not short:
            return bundles, at + agreed
        numbers = _with_items(array("I"), short)
        bundles = [bundle for bundle in bundles if bundle not in short]


def _with_items(numbers: "array[int]", bundles: list[Bundle]) -> "array[int]":
    if not bundles:
        return numbers
    return array("I", sorted([*numbers, *(number for bundle in bundles for number in bundle.numbers)]))


def _fork(bundles: list[Bundle], at: int, read: Read) -> tuple[list[Branch], int]:
    """Split items that agree up to `at` by their keys there, in the order in which the keys appear.

    Also return the bytes shared by neighbours on different branches and by equal prompts on one.
    """
    whole: dict[bytes, list[Bundle]] = {}
    split: list[Bundle] = []
    for bundle in bundles:
        if bundle.cut - at >= KEY_BYTES:
            start = at - bundle.base
            whole.setdefault(bundle.reference[start : start + KEY_BYTES], []).append(bundle)
        else:
            split.append(bundle)
    leaders, kin = _kin(*_keyed(split, at, read))
    single = leaders
    if whole:
        firsts = {key: min(bundle.numbers[0] for bundle in group) for key, group in whole.items()}
        for key in firsts.keys() & leaders.keys():
            firsts[key] = min(firsts[key], leaders[key])
        leaders = dict(sorted((leaders | firsts).items(), key=itemgetter(1)))
    shared = _between(leaders, at)
    if not kin and not whole:
        return [([], array("I", leaders.values()), None)], shared
    branches: list[Branch] = []
    alone = array("I")
    for key, leader in leaders.items():
        group = whole.get(key, [])
        members = kin.get(key) or (array("I", (single[key],)) if key in single else array("I"))
        count = len(members) + sum(len(bundle.numbers) for bundle in group)
        if count == 1:
            alone.append(leader)
        elif key.endswith(b"\0"):
            # The prompts of these items end within the key, so they are equal.
            alone += members
            shared += (count - 1) * (at + len(key.rstrip(b"\0")))
        else:
            branches += [([], alone, None), (group, members, at + KEY_BYTES)]
            alone = array("I")
    branches.append(([], alone, None))
    return branches, shared


def _keyed(bundles: list[Bundle], at: int, read: Read) -> tuple[Sequence[int], Sequence[bytes]]:
    """Return the items of several bundles in the order of the input, and their keys."""
    if len(bundles) == 1:
        return bundles[0].numbers, bundles[0].keys_at(at, read)
    numbers = array("I")
    keys: list[bytes] = []
    ordered = True
    for bundle in bundles:
        ordered = ordered and (not numbers or numbers[-1] < bundle.numbers[0])
        numbers += bundle.numbers
        keys += bundle.keys_at(at, read)
    if ordered:
        return numbers, keys
    pairs = sorted(zip(numbers, keys, strict=True))
    return [number for number, _ in pairs], [key for _, key in pairs]


def _kin(numbers: Sequence[int], keys: Sequence[bytes]) -> "tuple[dict[bytes, int], dict[bytes, array[int]]]":
    """Return the first item of each key, in order, and for keys with several items all of these."""
    leaders = dict(zip(keys, numbers, strict=True))
    kin: dict[bytes, array[int]] = {}
    if len(leaders) < len(keys):
        leaders = {}
        leading = list(map(leaders.setdefault, keys, numbers))
        for number, key, leader in zip(numbers, keys, leading, strict=True):
            if leader != number:
                kin.setdefault(key, array("I", (leader,))).append(number)
    return leaders, kin


def _between(keys: Collection[bytes], at: int) -> int:
    """Return the bytes that neighbours with different keys share, summed."""
    shared = max(0, len(keys) - 1) * at
    packed = b"".join(keys)
    different = 0
    # Compare all neighbours at once: a column of the keys' bytes against the same column moved by
    # one key.
    for column in range(KEY_BYTES):
        own = int.from_bytes(packed[column::KEY_BYTES])
        different |= own ^ (own >> 8)
        alike = different.to_bytes(len(keys)).count(0, 1)
        if not alike:
            break
        shared += alike
    return shared


def _read_bundle(numbers: "array[int]", at: int, read: Read) -> Bundle:
    """Return a bundle of items that agree up to `at`, read as far as they agree."""
    longest = reference = read(numbers[0], at, prefix_tree.REFERENCE_BYTES_MAX)
    cut = len(reference)
    keys: list[bytes] = []
    moved: list[tuple[int, int]] = []
    for number in numbers:
        chunk = read(number, at, cut + KEY_BYTES)
        if not chunk.startswith(reference):
            moved.append((len(keys), cut))
            cut = common_prefix(reference, chunk)
            reference = longest[:cut]
        keys.append(chunk[cut : cut + KEY_BYTES].ljust(KEY_BYTES, b"\0"))
    # Items that got their key before the cut moved agree with the reference up to the old cut.
    start = 0
    for stop, own_cut in moved:
        lacking = longest[cut:own_cut]
        keys[start:stop] = [(lacking + key)[:KEY_BYTES] for key in keys[start:stop]]
        start = stop
    return Bundle(numbers, keys, reference, at + cut, at, read=True)
