"""Lines that differ only in their custom_id and in the end of their prompt.

Most inputs are written by a program, so nearly every line is the same bytes around an id and a text. A shape is such a
frame, taken from a line that passed every check. A line that fits it is known to be good once its id is plain and the rest
of its prompt is valid JSON: a JSON reader that has seen the same bytes is in the same state, and a string or an array ends
by itself. Nothing is guessed: whatever does not fit exactly goes through `lines` like the first line did.
"""

import msgspec
from msgspec import Raw

from tidegate.core.line_faults import LineFault, check_exactly
from tidegate.core.lines import Line, LineRules, check_depth, count_openers, decode_request, endpoint_of
from tidegate.core.prefix import Family

# The bytes that an id may have without being decoded: printable ASCII but for the quote and the backslash.
PLAIN = bytes(sorted(set(range(0x20, 0x7F)) - set(b'"\\')))
# The brackets around a prompt: the line's own and its body's.
LINE_DEPTH = 2
SHAPES_MAX = 8
# An input whose lines are all different must not pay for a shape with each of them.
SHAPES_MADE_MAX = 1000
SHAPE_RETRY_EVERY = 16
OPENINGS = (b'{"custom_id":"', b'{"custom_id": "')

_decode_lines = msgspec.json.Decoder(Raw).decode_lines


class Shape:
    """One frame: `opening`, an id, `head`, the rest of a prompt, `tail`. The head ends where the family's prompts may differ."""

    def __init__(self, opening: bytes, between: bytes, tail: bytes, line: Line, family_number: int) -> None:
        self.opening = opening
        self._joint = tail + b"\n" + opening
        self._between = between
        self.tail = tail
        self.family_number = family_number
        self.output_tokens = line.output_tokens
        self.fixed_size = len(line.fixed)
        self.head = between
        self.between_size = len(between)
        self.shared_size = 0
        self.bridge = b""

    def follow(self, family: Family) -> None:
        """Let the head end where the family's prompts now begin to differ."""
        self.head = self._between + family.reference[: family.cut]
        self.shared_size = family.cut
        self.bridge = family.opening

    def fits(self, data: bytes, at: int) -> bool:
        """Whether the line at `at` is this frame around anything."""
        id_end = data.find(b'"', at + len(self.opening))
        text_end = data.find(b"\n", at) - len(self.tail)
        return (
            data.startswith(self.opening, at)
            and data.startswith(self.head, id_end)
            and id_end + len(self.head) <= text_end
            and data.startswith(self.tail, text_end)
        )

    def gather(self, data: bytes, at: int) -> "Alike":
        """Neighbouring lines that are this frame around an id and a text, from `at` on, where the shape fits."""
        find, startswith = data.find, data.startswith
        id_from, head, last, joint = len(self.opening), self.head, self.tail + b"\n", self._joint
        head_size, tail_size = len(head), len(self.tail)
        starts: list[int] = []
        ids: list[bytes] = []
        texts: list[bytes] = []
        while True:
            stop = find(b"\n", at)
            id_end = find(b'"', at + id_from)
            head_end = id_end + head_size
            text_end = stop - tail_size
            if head_end > text_end or not startswith(head, id_end):
                break
            more = startswith(joint, text_end)
            if not (more or startswith(last, text_end)):
                break
            starts.append(at)
            ids.append(data[at + id_from : id_end])
            texts.append(data[head_end:text_end])
            at = stop + 1
            if not more:
                break
        starts.append(at)
        return Alike(self, starts, ids, texts)

    def same_frame(self, other: "Shape") -> bool:
        return (self.opening, self._between, self.tail, self.family_number) == (
            other.opening,
            other._between,
            other.tail,
            other.family_number,
        )


class Alike:
    """Neighbouring lines of one shape: where they start (and the last one ends), their ids, the rests of their prompts."""

    def __init__(self, shape: Shape, starts: list[int], ids: list[bytes], texts: list[bytes]) -> None:
        self.shape = shape
        self.starts = starts
        self.ids = ids
        self.texts = texts

    def good(self, rules: LineRules) -> bool:
        """Whether all sizes are within bounds, all ids plain, all prompts shallow and valid JSON; judged together."""
        ids, texts, bridge = self.ids, self.texts, self.shape.bridge
        if not all(ids) or max(map(len, ids)) > rules.custom_id_bytes_max or b"".join(ids).translate(None, PLAIN):
            return False
        frame_size = len(self.shape.opening) + len(self.shape.head) + len(self.shape.tail)
        if max(map(len, texts)) + rules.custom_id_bytes_max + frame_size > rules.line_bytes_max:
            return False
        room = rules.depth_max - LINE_DEPTH - count_openers(bridge)
        try:
            if count_openers(b"".join(texts)) > room:
                for text in texts:
                    check_depth(bridge + text, rules.depth_max - LINE_DEPTH)
            prompts = _decode_lines((b"\n" + bridge).join([b"", *texts]))
        except (ValueError, LineFault):
            return False
        # No string reaches over a newline, and whatever else began or ended elsewhere would change the sizes.
        bridge_size = len(bridge)
        return [len(prompt) - bridge_size for prompt in prompts] == list(map(len, texts))


def shape_of(line: bytes, checked: Line, family_number: int, rules: LineRules) -> Shape | None:
    """The frame of a good line, or None when it is not of the kind that others can be held against."""
    opening = next((opening for opening in OPENINGS if line.startswith(opening)), None)
    end = checked.prompt_at + checked.prompt_size
    first = line[checked.prompt_at : checked.prompt_at + 1]
    if opening is None or first not in (b'"', b"[") or (first == b"[" and endpoint_of(rules).counts_inputs):
        return None
    id_end = line.find(b'"', len(opening))
    plain = line[len(opening) : id_end]
    if plain != checked.custom_id.encode() or plain.translate(None, PLAIN) or id_end >= checked.prompt_at:
        return None
    # The prompt was found by its content: make sure that it is the value of its key that is cut out here.
    without = line[: checked.prompt_at] + b"null" + line[end:]
    try:
        check_exactly(without, rules.body_keys_max)
        request = decode_request(without)
    except (LineFault, ValueError):
        return None
    if bytes(getattr(request.body, checked.prompt_key)) != b"null" or request.custom_id != checked.custom_id:
        return None
    return Shape(opening, line[id_end : checked.prompt_at], line[end:], checked, family_number)
