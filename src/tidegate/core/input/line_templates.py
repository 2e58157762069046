"""Lines that differ only in their custom_id and in the end of their prompt.

Most inputs are written by a program, so nearly every line has the same bytes around an id and a
text. A shape is such a frame, taken from a line that passed every check. A line that fits it is
good when its id is plain and the rest of its prompt is valid JSON: a JSON reader that has seen the
same bytes is in the same state, and a string or an array ends by itself. Nothing is guessed: a line
that does not fit exactly goes through `lines`, as the first one did.
"""

from operator import sub

import msgspec
from msgspec import Raw

from tidegate.core.input.line_faults import LineFault, check_exactly
from tidegate.core.input.lines import InputLine, LineRules, check_depth, decode_request, endpoint_of
from tidegate.core.input.prefix_tree import KEY_BYTES, PrefixStem
from tidegate.core.json_limits import count_openers

# The bytes of ids that need no decoding: printable ASCII except the quote and the backslash.
PLAIN = bytes(sorted(set(range(0x20, 0x7F)) - set(b'"\\')))
# The brackets around a prompt: one of the line and one of its body.
LINE_DEPTH = 2
SHAPES_MAX = 8
# An input of lines that all differ must not pay for a shape with each of them.
SHAPES_MADE_MAX = 1000
SHAPE_RETRY_EVERY = 16
DEPTH_LINES = 16
OPENINGS = (b'{"custom_id":"', b'{"custom_id": "')

_decode_lines = msgspec.json.Decoder(Raw).decode_lines


class LineTemplate:
    """A frame: `opening`, an id, `head`, the rest of a prompt, `tail`.

    The head ends where the prompts of the family may differ.
    """

    def __init__(self, opening: bytes, between: bytes, tail: bytes, line: InputLine, family_number: int) -> None:
        self.opening = opening
        self._joint = tail + b"\n" + opening
        self._between = between
        self.tail = tail
        self.family_number = family_number
        self.output_tokens = line.output_tokens
        self.fixed_size = len(line.fixed)
        self.input_count = line.input_count
        self.head = between
        self.between_size = len(between)
        self.stem = PrefixStem(0, b"", 0, b"")

    def follow(self, stem: PrefixStem) -> None:
        """Move the head's end to where the family's prompts now begin to differ."""
        self.head = self._between + stem.reference[: stem.cut]
        self.stem = stem

    def fits(self, data: bytes, at: int) -> bool:
        """Return whether the line at `at` has this frame."""
        id_end = data.find(b'"', at + len(self.opening))
        text_end = data.find(b"\n", at) - len(self.tail)
        return (
            data.startswith(self.opening, at)
            and data.startswith(self.head, id_end)
            and id_end + len(self.head) <= text_end
            and data.startswith(self.tail, text_end)
        )

    def gather(self, data: bytes, at: int) -> "AlikeLine":
        """Return the neighbouring lines from `at` on that have this frame.

        Each line gets the longest known stem of its prompt.
        """
        find, startswith = data.find, data.startswith
        id_from, head, last, joint = len(self.opening), self.head, self.tail + b"\n", self._joint
        head_size, tail_size, key_size, root = len(head), len(self.tail), KEY_BYTES, self.stem
        alike = AlikeLine(self)
        add_start, add_id = alike.starts.append, alike.ids.append
        add_text, add_stem, add_id_size = alike.texts.append, alike.prefixes.append, alike.id_sizes.add
        branched = bool(root.branches)
        to_id_end = -1
        more = True
        while more:
            # Most ids are as long as the one before. When the guess is wrong, the id contains a
            # byte that is not plain, and `good` fails.
            if to_id_end < 0 or not startswith(head, at + to_id_end):
                to_id_end = find(b'"', at + id_from) - at
                if not startswith(head, at + to_id_end):
                    break
                add_id_size(to_id_end - id_from)
            id_end = at + to_id_end
            text_at = id_end + head_size
            if branched:
                stem, key_at, stray = root, text_at, False
                while branches := stem.branches:
                    branch = branches.get(data[key_at : key_at + key_size])
                    if branch is None:
                        break
                    stem = branch
                    key_at = text_at + stem.path_size
                if stem is not root and not startswith(stem.path, text_at):
                    stem, stray = root.climb(data, text_at)
                text_at += stem.path_size
            # Neither a head nor a stem contains a newline, but a line, with its tail, may end
            # before they do.
            stop = find(b"\n", text_at)
            text_end = stop - tail_size
            more = startswith(joint, text_end)
            if text_at > text_end or not (more or startswith(last, text_end)):
                break
            add_start(at)
            add_id(data[at + id_from : id_end])
            add_text(data[text_at:text_end])
            if branched:
                add_stem(stem)
                if stray:
                    alike.strays = True
            at = stop + 1
        add_start(at)
        if not branched:
            alike.prefixes = [root] * len(alike.ids)
        return alike

    def same_frame(self, other: "LineTemplate") -> bool:
        return (self.opening, self._between, self.tail, self.family_number) == (
            other.opening,
            other._between,
            other.tail,
            other.family_number,
        )


class AlikeLine:
    """Neighbouring lines of one shape.

    `starts` has the start of each line and the end of the last. `prefixes` are the stems of the
    prompts, and `texts` are the bytes after the stem. `strays` means that some prompt seemed to
    match a branch of its stem but did not.
    """

    def __init__(self, shape: LineTemplate) -> None:
        self.shape = shape
        self.starts: list[int] = []
        self.ids: list[bytes] = []
        self.id_sizes: set[int] = set()
        self.texts: list[bytes] = []
        self.prefixes: list[PrefixStem] = []
        self.strays = False

    def good(self, rules: LineRules) -> bool:
        """Return whether all lines are good: sizes within bounds, ids plain, prompts shallow and
        valid JSON.
        """
        starts, texts = self.starts, self.texts
        if 0 in self.id_sizes or max(self.id_sizes) > rules.custom_id_bytes_max:
            return False
        if b"".join(self.ids).translate(None, PLAIN):
            return False
        # All of them together are rarely longer than one line may be.
        if starts[-1] - starts[0] > rules.line_bytes_max and max(map(sub, starts[1:], starts)) > rules.line_bytes_max:
            return False
        bridges = {stem.opening for stem in set(self.prefixes)}
        if len(bridges) == 1:
            bridge = next(iter(bridges))
            lines = (b"\n" + bridge).join([b"", *texts])
            bridge_size = len(bridge)
            sizes = [bridge_size + len(text) for text in texts]
        else:
            each = [stem.opening + text for stem, text in zip(self.prefixes, texts, strict=True)]
            lines = b"\n".join(each)
            sizes = [*map(len, each)]
        try:
            self._check_depth(rules.depth_max - LINE_DEPTH, max(map(count_openers, bridges)))
            prompts = _decode_lines(lines)
        except (ValueError, LineFault):
            return False
        # The first value begins with the first line. If each value is as long as its line, each
        # ends with its line.
        return [*map(len, prompts)] == sizes

    def _check_depth(self, depth_max: int, opened: int) -> None:
        """Refuse deep nesting.

        Count brackets for many lines at once, and exactly only where there are many.
        """
        texts, room = self.texts, depth_max - opened
        if count_openers(b"".join(texts)) <= room:
            return
        for at in range(0, len(texts), DEPTH_LINES):
            some = texts[at : at + DEPTH_LINES]
            if count_openers(b"".join(some)) > room:
                for stem, text in zip(self.prefixes[at : at + DEPTH_LINES], some, strict=True):
                    check_depth(stem.opening + text, depth_max)


def shape_of(line: bytes, checked: InputLine, family_number: int, rules: LineRules) -> LineTemplate | None:
    """Return the frame of a good line; None when other lines cannot be compared with it."""
    opening = next((opening for opening in OPENINGS if line.startswith(opening)), None)
    end = checked.prompt_at + checked.prompt_size
    first = line[checked.prompt_at : checked.prompt_at + 1]
    if opening is None or first not in (b'"', b"[") or (first == b"[" and endpoint_of(checked.endpoint).counts_inputs):
        return None
    id_end = line.find(b'"', len(opening))
    plain = line[len(opening) : id_end]
    if plain != checked.custom_id.encode() or plain.translate(None, PLAIN) or id_end >= checked.prompt_at:
        return None
    # The prompt was found by its content: make sure that the part cut out is the value of its key.
    without = line[: checked.prompt_at] + b"null" + line[end:]
    try:
        check_exactly(without, rules.body_keys_max)
        request = decode_request(without)
    except (LineFault, ValueError):
        return None
    if bytes(getattr(request.body, checked.prompt_key)) != b"null" or request.custom_id != checked.custom_id:
        return None
    return LineTemplate(opening, line[id_end : checked.prompt_at], line[end:], checked, family_number)
