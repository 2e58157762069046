"""One pass over an input: every line checked, a few dozen packed bytes kept for each, none of the lines themselves.

Bytes come in pieces of any size and are split on 0x0A only. Lines of nothing but white space are passed over wherever they
stand; they count as lines but not as items. Over-long lines are dropped while they come in. Files, and the order of the
items, are somebody else's business.
"""

from array import array
from hashlib import blake2b
from itertools import pairwise
from operator import sub

from tidegate.core.line_faults import LineFault, strange_file
from tidegate.core.lines import Line, LineRules, check_line, endpoint_of, is_utf8, too_long
from tidegate.core.nouns import LineError
from tidegate.core.prefix import KEY_BYTES, REFERENCE_BYTES_MAX, Family
from tidegate.core.shapes import SHAPE_RETRY_EVERY, SHAPES_MADE_MAX, SHAPES_MAX, Alike, Shape, shape_of

BOM = b"\xef\xbb\xbf"
REFERENCES_BYTES_MAX = 4 << 20
MODELS_MAX = 1000
FAMILIES_MAX = 4096


class Scan:
    """What is known of an input so far. Good items are numbered from 0 in the order of the input."""

    def __init__(self, rules: LineRules) -> None:
        self.rules = rules
        self.errors: list[LineError] = []
        self.stopped = False
        self.line_count = 0
        # Of every good item: its line's place, size (with the newline) and number, a hash of its id, its family, the
        # tokens that its answer may have, the size of what an engine reads before its prompt, the prompt's place in the
        # line and its size, and the prompt's first bytes that may be its own.
        self.at = array("Q")
        self.size = array("I")
        self.line = array("I")
        self.id_hash = array("q")
        self.family = array("I")
        self.output_tokens = array("I")
        self.fixed_size = array("I")
        self.prompt_at = array("I")
        self.prompt_size = array("I")
        self.keys = bytearray()
        # Of every bad line, where bad lines become items.
        self.bad_at = array("Q")
        self.bad_size = array("I")
        self.bad_line = array("I")
        self.models: list[str] = []
        self.families: list[Family] = []
        self.family_model = array("I")
        # What an item of a family shares with any other of it, before its prompt.
        self.family_fixed_size = array("I")
        self._model_numbers: dict[str, int] = {}
        self._family_numbers: dict[tuple[str, bytes], int] = {}
        self._references_size = 0
        self._input_count = 0
        self._shapes: list[Shape] = []
        self._shapes_made = 0
        self._rest = b""
        self._rest_at = 0
        self._dropping = False

    @property
    def item_count(self) -> int:
        return len(self.at) + len(self.bad_at)

    def begin(self, data: bytes) -> None:
        """Take the first bytes of the input, which say what kind of file it is."""
        if fault := strange_file(data):
            self._stop(fault.at(1))
            return
        text = data.removeprefix(BOM)
        self._rest_at = len(data) - len(text)
        self.feed(text)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the input; `stopped` says that no more are wanted."""
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
        # One byte more than the limit may be the first half of a line's end.
        if len(self._rest) > self.rules.line_bytes_max + 1 and not self.stopped:
            self.line_count += 1
            self._refuse(too_long(self.rules.line_bytes_max), self._rest_at, len(self._rest))
            self._rest_at += len(self._rest)
            self._rest = b""
            self._dropping = True

    def finish(self) -> None:
        """Take the last line, if no newline ended it, and hold the whole against the limits."""
        if self._rest and not self.stopped:
            self._take(self._rest + b"\n", len(self._rest) + 1)
        if not self.item_count and not self.errors:
            self._stop(LineError("empty_file", "The file has no requests: write one JSON object a line."))
        if self._input_count > self.rules.inputs_max and endpoint_of(self.rules).counts_inputs and not self.stopped:
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
            stop = data.index(b"\n", at)
            self._take_line(data[at:stop], self._rest_at + at, utf8)
            at = stop + 1

    def _take_alike(self, data: bytes, at: int, end: int) -> int:
        """Take lines for as long as each fits a shape; the place of the first that does not."""
        while at < end:
            shape = next((shape for shape in self._shapes if shape.fits(data, at)), None)
            if shape is None:
                break
            if shape is not self._shapes[0]:
                self._shapes.remove(shape)
                self._shapes.insert(0, shape)
            alike = shape.gather(data, at)
            room = self.rules.item_count_max - self.item_count - len(self.errors)
            if len(alike.ids) <= room and alike.good(self.rules):
                self._keep_alike(alike)
            else:
                # Something is wrong with one of them, or they are too many: find out which, one by one.
                for start, stop in pairwise(alike.starts):
                    self._take_line(data[start : stop - 1], self._rest_at + start, True)
            at = alike.starts[-1]
        return at

    def _keep_alike(self, alike: Alike) -> None:
        shape, starts, texts, count = alike.shape, alike.starts, alike.texts, len(alike.ids)
        base = self._rest_at
        to_prompt = len(shape.opening) + shape.between_size
        self.at.fromlist([base + start for start in starts[:-1]])
        self.size.fromlist([*map(sub, starts[1:], starts)])
        self.line.extend(range(self.line_count + 1, self.line_count + 1 + count))
        self.id_hash.fromlist([*map(hash, alike.ids)])
        self.prompt_at.fromlist([to_prompt + len(custom_id) for custom_id in alike.ids])
        self.prompt_size.fromlist([shape.shared_size + len(text) for text in texts])
        self.family.extend(array("I", (shape.family_number,)) * count)
        self.output_tokens.extend(array("I", (shape.output_tokens,)) * count)
        self.fixed_size.extend(array("I", (shape.fixed_size,)) * count)
        keys = b"".join([text[:KEY_BYTES] for text in texts])
        if len(keys) != count * KEY_BYTES:
            keys = b"".join([text[:KEY_BYTES].ljust(KEY_BYTES, b"\0") for text in texts])
        self.keys += keys
        self.line_count += count
        self._input_count += count

    def _take_line(self, line: bytes, at: int, utf8: bool) -> None:
        """Check one line by itself."""
        if self.stopped:
            return
        self.line_count += 1
        if not line.strip(b" \t\r"):
            return
        rules = self.rules
        if self.item_count + len(self.errors) >= rules.item_count_max:
            message = f"The file has more than {rules.item_count_max} requests: split it into several batches."
            self._stop(LineError("too_many_tasks", message, None, self.line_count))
            return
        try:
            checked = self.check(line, utf8_known=utf8)
        except LineFault as fault:
            self._refuse(fault, at, len(line))
            return
        self._input_count += checked.input_count
        self._keep(line, at, checked)

    def check(self, line: bytes, *, utf8_known: bool = False) -> Line:
        """What a line must be, by itself and beside the others."""
        checked = check_line(line, self.rules, utf8_known=utf8_known)
        if self.rules.single_model and self.models and checked.model != self.models[0]:
            message = "All lines of a batch must name the same model here: put each model in a batch of its own."
            raise LineFault("model_mismatch", message, "body.model")
        if len(self.models) >= MODELS_MAX and checked.model not in self._model_numbers:
            message = f"A batch may name at most {MODELS_MAX} models: split it into several batches."
            raise LineFault("invalid_request", message, "body.model")
        return checked

    def _keep(self, line: bytes, at: int, checked: Line) -> None:
        number = len(self.at)
        prompt = line[checked.prompt_at : checked.prompt_at + checked.prompt_size]
        family_number = self._family_of(checked, prompt, number)
        family = self.families[family_number]
        if family.take(prompt, number):
            for shape in self._shapes:
                if shape.family_number == family_number:
                    shape.follow(family)
            self._shapes = [shape for shape in self._shapes if shape.bridge]
        self.at.append(at)
        self.size.append(len(line) + 1)
        self.line.append(self.line_count)
        self.id_hash.append(hash(checked.custom_id.encode()))
        self.family.append(family_number)
        self.output_tokens.append(checked.output_tokens)
        self.fixed_size.append(len(checked.fixed))
        self.prompt_at.append(checked.prompt_at)
        self.prompt_size.append(checked.prompt_size)
        self.keys += prompt[family.cut : family.cut + KEY_BYTES].ljust(KEY_BYTES, b"\0")
        if family.opening and (self._shapes_made < SHAPES_MADE_MAX or number % SHAPE_RETRY_EVERY == 0):
            self._make_shape(line, checked, family_number)

    def _family_of(self, checked: Line, prompt: bytes, number: int) -> int:
        fixed = blake2b(checked.fixed, digest_size=16).digest() if checked.fixed else b""
        known = self._family_numbers.get((checked.model, fixed))
        if known is not None:
            return known
        if len(self.families) >= FAMILIES_MAX:
            # So many different tools and instructions share little: such items are ordered by their prompts alone.
            fixed = b"any"
            known = self._family_numbers.get((checked.model, fixed))
            if known is not None:
                return known
        model = self._model_numbers.setdefault(checked.model, len(self.models))
        if model == len(self.models):
            self.models.append(checked.model)
        # Past their common bound, families begin without a reference: their items are told apart by reading them again.
        room = REFERENCES_BYTES_MAX - self._references_size
        family = Family(prompt[: min(room, REFERENCE_BYTES_MAX)], number)
        self._references_size += len(family.reference)
        self._family_numbers[checked.model, fixed] = len(self.families)
        self.families.append(family)
        self.family_model.append(model)
        self.family_fixed_size.append(0 if fixed == b"any" else len(checked.fixed))
        return len(self.families) - 1

    def _make_shape(self, line: bytes, checked: Line, family_number: int) -> None:
        shape = shape_of(line, checked, family_number, self.rules)
        self._shapes_made += 1
        if shape is None or any(shape.same_frame(other) for other in self._shapes):
            return
        shape.follow(self.families[family_number])
        self._shapes.insert(0, shape)
        del self._shapes[SHAPES_MAX:]

    def _refuse(self, fault: LineFault, at: int, size: int) -> None:
        if self.rules.invalid_lines == "error_file":
            self.bad_at.append(at)
            self.bad_size.append(min(size, self.rules.line_bytes_max + 2))
            self.bad_line.append(self.line_count)
            return
        self.errors.append(fault.at(self.line_count))
        self.stopped = len(self.errors) >= self.rules.errors_max

    def _stop(self, error: LineError) -> None:
        self.errors.append(error)
        self.stopped = True
