"""Lines that differ only in their custom_id and in the end of their prompt.

Most inputs are written by a program, so nearly every line is the same bytes around an id and a text. A shape is such a
frame, taken from a line that passed every check. A line that fits it is known to be good once its id is plain and the rest
of its prompt is valid JSON: a JSON reader that has seen the same bytes is in the same state, and a string or an array ends
by itself. Nothing is guessed: whatever does not fit exactly goes through `lines` like the first line did.
"""

from tidegate.core.line_faults import LineFault, check_exactly
from tidegate.core.lines import Line, LineRules, count_openers, decode_request, endpoint_of
from tidegate.core.prefix import Family

# The bytes that an id may have without being decoded: printable ASCII but for the quote and the backslash.
PLAIN = bytes(sorted(set(range(0x20, 0x7F)) - set(b'"\\')))
SHAPES_MAX = 8
# An input whose lines are all different must not pay for a shape with each of them.
SHAPES_MADE_MAX = 1000
SHAPE_RETRY_EVERY = 16
OPENINGS = (b'{"custom_id":"', b'{"custom_id": "')


class Shape:
    """One frame: `opening`, an id, `head`, the rest of a prompt, `tail`. The head ends where the family's prompts may differ."""

    def __init__(self, opening: bytes, between: bytes, tail: bytes, line: Line, family_number: int) -> None:
        self.opening = opening
        self.id_at = len(opening)
        self._between = between
        self.tail = tail
        self.tail_size = len(tail)
        self.family_number = family_number
        self.output_tokens = line.output_tokens
        self.fixed_size = len(line.fixed)
        self.head = between
        self.head_size = len(between)
        self.between_size = len(between)
        self.bridge = b""
        self.openers_max = 0

    def follow(self, family: Family, depth_max: int) -> None:
        """Let the head end where the family's prompts now begin to differ."""
        self.head = self._between + family.reference[: family.cut]
        self.head_size = len(self.head)
        self.bridge = family.opening
        # The line's own two brackets and those of the shared part are open already.
        self.openers_max = depth_max - 2 - count_openers(family.opening)

    def same_frame(self, other: "Shape") -> bool:
        return (self.opening, self._between, self.tail, self.family_number) == (
            other.opening,
            other._between,
            other.tail,
            other.family_number,
        )


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
