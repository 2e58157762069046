"""Regular expressions that an operator writes, made safe to run on a stranger's text.

Nothing can stop a match that has begun, so what takes exponential time is refused before it is ever tried: a repeated group that repeats
something itself, like (a+)+, a repeated group of alternatives, and back references. What is left may still take the square or the cube of
the text's length, which is why whoever runs a pattern also bounds the text.

Most texts have nothing to find in them, and a search for a plain piece of text costs a hundredth of a pattern's: `needle_of` says which
piece every match of a pattern must contain.
"""

import importlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tidegate.core.errors import SettingsError

PATTERN_CHARS_MAX = 2000
# A group with an unbounded repeat in it may be repeated so often: each time raises the power of the text's length by one.
REPEATS_WITHIN_MAX = 3
LOOSE_FROM = 256

_UNBOUNDED = re.compile(r"[*+]|\{\d*,\}")
_REPEAT = re.compile(r"(?:[*+?]|\{\d*,?\d*\})([?+]?)")
_GROUP_HEAD = re.compile(r"\?(?:P<\w+>|[:=!>]|<[=!]|[aiLmsux]*(?:-[imsx]+)?:)")
_BACK_REFERENCE = re.compile(r"\\[1-9]|\(\?P=|\(\?\(")
# Letters that JSON writes in one way only, unless it writes them as \uXXXX.
_PLAIN = frozenset(chr(code) for code in range(32, 127)) - frozenset('"\\/')
# Most common first.
_COMMON = b" etaoinsrhldcumfpgwybvkxjqzETAOINSRHLDCUMFPGWYBVKXJQZ.,:;-_0123456789"
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def compile_pattern(text: str, where: str) -> re.Pattern[str]:
    """The pattern, or a SettingsError that says what is wrong with it and what to write instead."""
    if len(text) > PATTERN_CHARS_MAX:
        raise SettingsError(f"{where} is a pattern of {len(text)} characters: use at most {PATTERN_CHARS_MAX}")
    try:
        pattern = re.compile(text)
    except (re.error, RecursionError, OverflowError) as wrong:
        raise SettingsError(f"{where} is not a regular expression: {wrong}") from None
    if _BACK_REFERENCE.search(text):
        raise SettingsError(f"{where} refers back to a group or asks about one, which can take for ever: write it out")
    if _nests_repeats(text):
        raise SettingsError(
            f"{where} repeats a group that itself repeats or chooses, which can take for ever on some texts: "
            "make the inner repeat possessive (a++ for a+) or the group atomic, (?>...)"
        )
    return pattern


class Needle(NamedTuple):
    """Plain text that stands in every match; `folded` when its case does not matter, and then it is in lower case."""

    text: bytes
    folded: bool

    @property
    def rarest(self) -> int:
        """The letter of it that texts have least often: to look for one letter costs next to nothing."""
        return min(self.text, key=lambda letter: -_COMMON.find(letter) if letter in _COMMON else -1_000)


def needle_of(text: str) -> Needle | None:
    """The longest piece of plain text that every match of this pattern contains; None when none is sure."""
    parsed = importlib.import_module("re._parser").parse(text)
    found = max(_pieces(parsed), key=len, default="")
    folded = bool(parsed.state.flags & re.IGNORECASE)
    return Needle((found.lower() if folded else found).encode(), folded) if found else None


def loose_repeats(text: str) -> int:
    """How many repeats of this pattern have next to no bound: each raises the power of the text's length that a search may take by one."""
    return _count_loose(importlib.import_module("re._parser").parse(text))


def _count_loose(part: Any) -> int:
    if isinstance(part, str | bytes | int) or not isinstance(part, Iterable):
        return 0
    steps = list(part)
    is_loose = len(steps) == 2 and str(steps[0]) in _REPEATS and steps[1][1] - steps[1][0] >= LOOSE_FROM
    return int(is_loose) + sum(_count_loose(step) for step in steps)


def _pieces(steps: Iterable[tuple[Any, Any]]) -> Iterator[str]:
    """Runs of letters that cannot be left out. What is not understood ends a run."""
    run = ""
    for step, what in steps:
        name = str(step)
        if name == "LITERAL" and chr(what) in _PLAIN:
            run += chr(what)
            continue
        if run:
            yield run
            run = ""
        if name in _REPEATS and what[0] > 0:
            yield from _pieces(what[2])
        elif name == "SUBPATTERN" and not what[1] and not what[2]:
            yield from _pieces(what[3])
        elif name == "ATOMIC_GROUP":
            yield from _pieces(what)
    if run:
        yield run


@dataclass(slots=True)
class _Group:
    """An open group: whether it holds an unbounded repeat or a choice, and whether it never takes back what it matched."""

    atomic: bool = False
    repeats: bool = False
    chooses: bool = False


def _nests_repeats(text: str) -> bool:
    """Whether a repeat stands behind a group that can match the same text in several ways."""
    groups = [_Group()]
    at, in_class = 0, False
    while at < len(text):
        letter = text[at]
        if letter == "\\":
            at = _after_repeat(text, at + 2, groups[-1])
        elif in_class:
            at += 1
            if letter == "]":
                in_class = False
                at = _after_repeat(text, at, groups[-1])
        elif letter == "[":
            in_class = True
            # A bracket right at the start of a class is a letter of it.
            at += 1 + text.startswith("^", at + 1)
            at += text.startswith("]", at)
        elif letter == "(":
            head = _GROUP_HEAD.match(text, at + 1)
            groups.append(_Group(atomic=head is not None and head[0] == "?>"))
            at = head.end() if head else at + 1
        elif letter == ")":
            inner = groups.pop() if len(groups) > 1 else _Group()
            if not inner.atomic:
                if _multiplies(text, at + 1, inner):
                    return True
                groups[-1].repeats |= inner.repeats
                groups[-1].chooses |= inner.chooses
            at = _after_repeat(text, at + 1, groups[-1])
        else:
            # Alternatives at the top are tried once each; within a group that repeats they multiply.
            groups[-1].chooses |= letter == "|"
            at = _after_repeat(text, at + 1, groups[-1])
    return False


def _multiplies(text: str, at: int, inner: _Group) -> bool:
    """Whether the repeat at this place multiplies the ways in which the group before it can match."""
    found = _REPEAT.match(text, at)
    if found is None or found[1] == "+":
        return False
    if _UNBOUNDED.match(text, at):
        return inner.repeats or inner.chooses
    most = max((int(number) for number in re.findall(r"\d+", found[0])), default=1)
    return inner.repeats and most > REPEATS_WITHIN_MAX


def _after_repeat(text: str, at: int, group: _Group) -> int:
    """Past the repeat at this place, if there is one; the group around learns of it."""
    found = _REPEAT.match(text, at)
    if found is None:
        return at
    group.repeats |= found[1] != "+" and _UNBOUNDED.match(text, at) is not None
    return found.end()
