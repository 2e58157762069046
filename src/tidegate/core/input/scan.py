"""One pass over an input: every line is checked, and a few dozen packed bytes are kept of each.

Bytes come in pieces of any size and are split on 0x0A only. Lines of white space are skipped; they
count as lines but not as items. Over-long lines are dropped while they come in. This module knows
neither files nor the order of the items.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from operator import itemgetter, sub
from struct import pack

from msgspec.structs import replace

from tidegate.core.input.line_faults import BodyFault, LineFault, custom_id_of, strange_file
from tidegate.core.input.line_templates import (
    SHAPE_RETRY_EVERY,
    SHAPES_MADE_MAX,
    SHAPES_MAX,
    AlikeLine,
    LineTemplate,
    shape_of,
)
from tidegate.core.input.lines import InputLine, LineRules, check_line, too_long
from tidegate.core.input.prefix_tree import KEY_BYTES, REFERENCE_BYTES_MAX, PrefixFamily, PrefixStem, branch_off
from tidegate.core.json_limits import is_utf8
from tidegate.core.nouns import LineError
from tidegate.core.usage.inline_files import TEXT_BYTES_MAX, unread_bytes

BOM = b"\xef\xbb\xbf"
# Marks an id that cannot be read; `hash` never returns it.
NO_ID = -1
REFERENCES_BYTES_MAX = 4 << 20
MODELS_MAX = 1000
FAMILIES_MAX = 4096
# Branches are made up to these bounds, where they save much for little memory.
BRANCHES_MADE_MAX = 2000
BRANCHES_BYTES_MAX = 4 << 20

_key = itemgetter(slice(KEY_BYTES))


class Scan:
    """The state of a scan: what is kept of the input so far.

    Good items are numbered from 0 in the input's order.
    """

    def __init__(self, rules: LineRules) -> None:
        self.rules = rules
        self.errors: list[LineError] = []
        self.stopped = False
        self.line_count = 0
        self.input_count = 0
        # Columns of the good items: the line's offset, size (with the newline) and number, a hash
        # of the id, the stem of the prompt, the tokens that the answer may have, the size of what
        # an engine reads before the prompt, the prompt's offset in the line and its size, how many
        # of its bytes are letters of files, and the `KEY_BYTES` of the prompt after the stem.
        self.at = array("Q")
        self.size = array("I")
        self.line = array("I")
        self.id_hash = array("q")
        self.stem = array("I")
        self.output_tokens = array("I")
        self.fixed_size = array("I")
        self.prompt_at = array("I")
        self.prompt_size = array("I")
        self.unread_size = array("I")
        self.keys = bytearray()
        # Columns of the bad lines that become items. The hash is NO_ID where no id can be read.
        self.bad_id_hash = array("q")
        self.bad_at = array("Q")
        self.bad_size = array("I")
        self.bad_line = array("I")
        self.models: list[str] = []
        # Columns of the families: endpoint and model, and the size of what the items share before
        # their prompts.
        self.families: list[PrefixFamily] = []
        self.family_targets: list[tuple[str, str]] = []
        self.family_fixed_size = array("I")
        # Columns of the stems: the family, the bytes and where they end.
        self.stem_family = array("I")
        self.stem_reference: list[bytes] = []
        self.stem_cut = array("I")
        self._references_size = 0
        self._model_names: set[str] = set()
        # By endpoint, model and a hash of what a family's items share before their prompts.
        self._family_numbers: dict[tuple[str, str, bytes], int] = {}
        self._roots: list[PrefixStem] = []
        self._branches_made = 0
        self._branches_size = 0
        self._shapes: list[LineTemplate] = []
        self._shapes_made = 0
        self._rest = b""
        self._rest_at = 0
        self._dropping = False

    @property
    def item_count(self) -> int:
        return len(self.at) + len(self.bad_at)

    def read_first(self, data: bytes) -> None:
        """Take the first bytes of the input and check what kind of file they begin."""
        if fault := strange_file(data):
            self._stop(fault.at(1))
            return
        text = data.removeprefix(BOM)
        self._rest_at = len(data) - len(text)
        self.feed(text)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the input. Once `stopped` is true, no more are needed."""
        if self._dropping:
            end = data.find(b"\n") + 1
            self._rest_at += end or len(data)
            if not end:
                return
            self._dropping = False
            data = data[end:]
        data = self._rest + data if self._rest else data
        end = data.rfind(b"\n") + 1
        if end:
            self._take(data, end)
        self._rest_at += end
        self._rest = data[end:]
        # The byte above the limit may be the carriage return of a line's end.
        if len(self._rest) > self.rules.line_bytes_max + 1 and not self.stopped:
            self.line_count += 1
            if self._has_room():
                self._refuse(too_long(self.rules.line_bytes_max), self._rest_at, self._rest)
            self._rest_at += len(self._rest)
            self._rest = b""
            self._dropping = True

    def renumber(self, lines: Sequence[int]) -> None:
        """Number the lines as in the input that they were taken from.

        This must be the last call.
        """
        self.line = array("I", [lines[line - 1] for line in self.line])
        self.bad_line = array("I", [lines[line - 1] for line in self.bad_line])
        self.errors = [replace(error, line=lines[error.line - 1]) if error.line else error for error in self.errors]

    def finish(self) -> None:
        """Take the last line if no newline ended it, and check the limits of the whole input.

        This must be the last call.
        """
        if self._rest and not self.stopped:
            self._take(self._rest + b"\n", len(self._rest) + 1)
        self._rest = b""
        # Only the reading needs these.
        self._shapes, self._roots = [], []
        if not self.item_count and not self.errors:
            self._stop(LineError("empty_file", "The file has no requests: write one JSON object a line."))
        if self.input_count > self.rules.inputs_max and not self.stopped:
            message = f"The file has more than {self.rules.inputs_max} inputs: split it into several batches."
            self._stop(LineError("too_many_tasks", message, "body.input"))

    def _take(self, data: bytes, end: int) -> None:
        """Check the whole lines in `data[:end]`."""
        utf8 = data.isascii() or is_utf8(data[:end])
        at = 0
        while at < end and not self.stopped:
            if utf8 and self._shapes:
                at = self._take_alike(data, at, end)
                if at >= end:
                    return
            at = self._take_next(data, at, utf8)

    def _take_next(self, data: bytes, at: int, utf8: bool) -> int:
        """Check the line at `at` by itself; return the place after it."""
        stop = data.index(b"\n", at)
        self._take_line(data[at:stop], self._rest_at + at, utf8)
        return stop + 1

    def _take_alike(self, data: bytes, at: int, end: int) -> int:
        """Take lines as long as each fits a shape; return the place of the first that does not."""
        while at < end:
            shape = next((shape for shape in self._shapes if shape.fits(data, at)), None)
            if shape is None:
                break
            if shape is not self._shapes[0]:
                self._shapes.remove(shape)
                self._shapes.insert(0, shape)
            alike = shape.gather(data, at)
            if not alike.ids:
                break
            room = self.rules.item_count_max - self.item_count - len(self.errors)
            if len(alike.ids) <= room and alike.good(self.rules):
                self._keep_alike(alike, data)
            else:
                # One of them is bad, or they are too many: find out which, one by one.
                while at < alike.starts[-1]:
                    at = self._take_next(data, at, True)
            at = alike.starts[-1]
        return at

    def _keep_alike(self, alike: AlikeLine, data: bytes) -> None:
        shape, starts, texts, prefixes, count = alike.shape, alike.starts, alike.texts, alike.prefixes, len(alike.ids)
        base, to_prompt = self._rest_at, len(shape.opening) + shape.between_size
        around = to_prompt + len(shape.tail) + 1
        sizes = [*map(sub, starts[1:], starts)]
        self.at.fromlist([base + start for start in starts[:-1]])
        self.size.fromlist(sizes)
        self.line.fromlist([*range(self.line_count + 1, self.line_count + 1 + count)])
        self.id_hash.frombytes(pack(f"{count}q", *map(hash, alike.ids)))
        if len(alike.id_sizes) == 1:
            id_size = len(alike.ids[0])
            self.prompt_at.extend(array("I", (to_prompt + id_size,)) * count)
            self.prompt_size.fromlist([size - around - id_size for size in sizes])
        else:
            id_sizes = [*map(len, alike.ids)]
            self.prompt_at.fromlist([to_prompt + id_size for id_size in id_sizes])
            self.prompt_size.fromlist([size - around - id_size for size, id_size in zip(sizes, id_sizes, strict=True)])
        places = zip(starts, self.prompt_at[-count:], self.prompt_size[-count:], strict=False)
        self.unread_size.fromlist(
            [
                unread_bytes(data[start + at : start + at + size]) if size > TEXT_BYTES_MAX else 0
                for start, at, size in places
            ]
        )
        if not shape.stem.branches:
            self.stem.extend(array("I", (shape.stem.number,)) * count)
        else:
            self.stem.fromlist([stem.number for stem in prefixes])
        self.output_tokens.extend(array("I", (shape.output_tokens,)) * count)
        self.fixed_size.extend(array("I", (shape.fixed_size,)) * count)
        keys = [*map(_key, texts)]
        packed = b"".join(keys)
        if len(packed) != count * KEY_BYTES:
            packed = b"".join([key.ljust(KEY_BYTES, b"\0") for key in keys])
        self.keys += packed
        self.line_count += count
        self.input_count += shape.input_count * count
        if alike.strays or len(set(keys)) < count:
            self._branch_off(alike, keys)

    def _branch_off(self, alike: AlikeLine, keys: list[bytes]) -> None:
        """Make branches for prompts that went on alike, and shorten branches to fit prompts that
        almost matched.
        """
        texts_of: dict[tuple[PrefixStem, bytes], list[bytes]] = {}
        for stem, key, text in zip(alike.prefixes, keys, alike.texts, strict=True):
            texts_of.setdefault((stem, key), []).append(text)
        for (stem, key), texts in texts_of.items():
            known = key in stem.branches
            if (len(texts) == 1 and not known) or (known and stem.branches[key] is None) or len(key) < KEY_BYTES:
                continue
            if self._branches_made >= BRANCHES_MADE_MAX or self._branches_size >= BRANCHES_BYTES_MAX:
                return
            self._branches_made += 1
            branch = branch_off(stem, key, texts, len(self.stem_cut))
            if branch is not None:
                self._branches_size += 0 if known else len(branch.reference)
                self._add_stem(branch, alike.shape.family_number)

    def _add_stem(self, stem: PrefixStem, family_number: int) -> PrefixStem:
        self.stem_family.append(family_number)
        self.stem_reference.append(stem.reference)
        self.stem_cut.append(stem.cut)
        return stem

    def _take_line(self, line: bytes, at: int, utf8: bool) -> None:
        """Check one line by itself."""
        if self.stopped:
            return
        self.line_count += 1
        if not line.strip(b" \t\r"):
            return
        if not self._has_room():
            return
        try:
            checked = self.check(line, utf8_known=utf8)
        except LineFault as fault:
            self._refuse(fault, at, line)
            return
        self.input_count += checked.input_count
        self._keep(line, at, checked)

    def _has_room(self) -> bool:
        """Return whether the input may have one more request; stop where it may not."""
        if self.item_count + len(self.errors) < self.rules.item_count_max:
            return True
        message = f"The file has more than {self.rules.item_count_max} requests: split it into several batches."
        self._stop(LineError("too_many_tasks", message, None, self.line_count))
        return False

    def check(self, line: bytes, *, utf8_known: bool = False) -> InputLine:
        """Check a line by itself and against the models of the other lines."""
        try:
            checked = check_line(line, self.rules, utf8_known=utf8_known)
        except BodyFault as fault:
            self._check_model(fault.model)
            raise
        self._check_model(checked.model)
        return checked

    def _check_model(self, model: str) -> None:
        if self.rules.single_model and self.models and model != self.models[0]:
            message = "All lines of a batch must name the same model here: put each model in a batch of its own."
            raise LineFault("model_mismatch", message, "body.model")
        if len(self.models) >= MODELS_MAX and model not in self._model_names:
            message = f"A batch may name at most {MODELS_MAX} models: split it into several batches."
            raise LineFault("invalid_request", message, "body.model")

    def _keep(self, line: bytes, at: int, checked: InputLine) -> None:
        number = len(self.at)
        prompt = line[checked.prompt_at : checked.prompt_at + checked.prompt_size]
        family_number = self._family_of(checked, prompt)
        family = self.families[family_number]
        if family.add_prompt(prompt):
            self._follow(family_number)
        self.at.append(at)
        self.size.append(len(line) + 1)
        self.line.append(self.line_count)
        self.id_hash.append(hash(checked.custom_id.encode()))
        self.stem.append(self._roots[family_number].number)
        self.output_tokens.append(checked.output_tokens)
        self.fixed_size.append(len(checked.fixed))
        self.prompt_at.append(checked.prompt_at)
        self.prompt_size.append(checked.prompt_size)
        self.unread_size.append(unread_bytes(prompt))
        self.keys += prompt[family.cut : family.cut + KEY_BYTES].ljust(KEY_BYTES, b"\0")
        if family.opening and (self._shapes_made < SHAPES_MADE_MAX or number % SHAPE_RETRY_EVERY == 0):
            self._make_shape(line, checked, family_number)

    def _family_of(self, checked: InputLine, prompt: bytes) -> int:
        fixed = blake2b(checked.fixed, digest_size=16).digest() if checked.fixed else b""
        known = self._family_numbers.get((checked.endpoint, checked.model, fixed))
        if known is not None:
            return known
        if len(self.families) >= FAMILIES_MAX:
            # So many different tools and instructions share little: order such items by their
            # prompts alone.
            fixed = b"any"
            known = self._family_numbers.get((checked.endpoint, checked.model, fixed))
            if known is not None:
                return known
        self._add_model(checked.model)
        # Once all references together are too large, families begin without one, and their items
        # are read again to sort them.
        room = REFERENCES_BYTES_MAX - self._references_size
        family = PrefixFamily(prompt[: min(room, REFERENCE_BYTES_MAX)])
        number = len(self.families)
        self.families.append(family)
        self.family_targets.append((checked.endpoint, checked.model))
        self.family_fixed_size.append(0 if fixed == b"any" else len(checked.fixed))
        self._references_size += len(family.reference)
        self._family_numbers[(checked.endpoint, checked.model, fixed)] = number
        self._roots.append(self._add_stem(self._root_of(family), number))
        return number

    def _add_model(self, model: str) -> None:
        if model not in self._model_names:
            self._model_names.add(model)
            self.models.append(model)

    def _root_of(self, family: PrefixFamily) -> PrefixStem:
        return PrefixStem(len(self.stem_cut), family.reference, family.cut, family.opening)

    def _follow(self, family_number: int) -> None:
        """Give a family whose cut moved a new root, and let its shapes end there."""
        family = self.families[family_number]
        root = self._root_of(family)
        self._roots[family_number] = self._add_stem(root, family_number)
        for shape in self._shapes:
            if shape.family_number == family_number:
                shape.follow(root)
        self._shapes = [shape for shape in self._shapes if shape.stem.opening]

    def _make_shape(self, line: bytes, checked: InputLine, family_number: int) -> None:
        shape = shape_of(line, checked, family_number, self.rules)
        self._shapes_made += 1
        if shape is None or any(shape.same_frame(other) for other in self._shapes):
            return
        shape.follow(self._roots[family_number])
        self._shapes.insert(0, shape)
        del self._shapes[SHAPES_MAX:]

    def _refuse(self, fault: LineFault, at: int, line: bytes) -> None:
        lenient = self.rules.invalid_lines == "error_file"
        if lenient or isinstance(fault, BodyFault):
            self.bad_at.append(at)
            kept = line[: self.rules.line_bytes_max + 2]
            self.bad_size.append(len(kept))
            self.bad_line.append(self.line_count)
            custom_id = custom_id_of(kept, self.rules.custom_id_bytes_max)
            if isinstance(fault, BodyFault):
                self._add_model(fault.model)
            self.bad_id_hash.append(hash(custom_id.encode()) if custom_id else NO_ID)
            return
        self.errors.append(fault.at(self.line_count))
        self.stopped = len(self.errors) >= self.rules.errors_max

    def _stop(self, error: LineError) -> None:
        self.errors.append(error)
        self.stopped = True
