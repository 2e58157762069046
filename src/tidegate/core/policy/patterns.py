"""Run regular expressions in Python's syntax with RE2: no search takes more than linear time.

Python's own parser reads a pattern, and it is written again for RE2. Every class of characters is
spelled out as Python understands it: `\\d`, `\\w` and `\\s` mean all of Unicode, and a letter whose
case does not matter matches every letter that Python takes for it.

RE2's own `\\b` knows ASCII alone. So it is kept beside ASCII letters, digits and underscores, and
beside anything else it always holds; and a `$` with more of the pattern behind it holds at every
line end. So a pattern may find more than Python would, never less. What RE2 cannot run (references
back, looking around, `\\B`) is refused.
"""

import functools
import importlib
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import re2

from tidegate.core.errors import SettingsError

PATTERN_CHARS_MAX = 2000
# The most memory of compiled programs and RE2's caches, for all patterns of one guardrail.
MEMORY_BYTES_MAX = 64 << 20

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_ASCII_WORD = frozenset(map(ord, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"))
_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}
_TRAILED = "TRAILED"
# A text that JSON writes as it is.
_PLAIN_LITERAL = re.compile(rb"[ !#-\[\]-~]+")
# What may be read in another way than it is written: escapes but of line breaks, tabs and quotes.
_READ_OTHERWISE = re.compile(rb'\\[^nrt"]')
# As a number: the complement of Python's flags has no flags of our own.
_ALPHABETS = int(re.ASCII | re.UNICODE)
# A flag of our own beside Python's: the text has only ASCII.
_ASCII_TEXT = 1 << 30
# Another flag of our own: the text is a part of a longer one, so its beginning and end may be
# anywhere.
_WITHIN = 1 << 29
# And another: more of the pattern stands behind this part of it.
_FOLLOWED = 1 << 28
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
_REFUSED = {
    "GROUPREF": "refers back to a group: write the group out again",
    "GROUPREF_IGNORE": "refers back to a group: write the group out again",
    "GROUPREF_EXISTS": "asks whether a group matched: write two patterns",
    "ASSERT": "looks ahead or behind: write what stands there into the pattern itself",
    "ASSERT_NOT": "looks ahead or behind: write what stands there into the pattern itself",
    "AT_NON_BOUNDARY": r"uses \B: write which characters may stand there",
}

Ranges = tuple[tuple[int, int], ...]
RegexStep = tuple[Any, Any]


class Finder:
    """The patterns of one guardrail.

    `weight` is how many places a search may have to follow at once, per byte of text.
    """

    def __init__(self, texts: Sequence[str], where: str) -> None:
        places = [f"{where}, pattern {number + 1}" for number in range(len(texts))]
        parsed = [_parsed(text, place) for text, place in zip(texts, places, strict=True)]
        self.weight = sum(_weight(list(one)) for one in parsed)
        # A text that every match of the pattern contains; empty where none is known.
        self._literals = tuple(_literal(list(one), one.state.flags).encode() for one in parsed)
        self._have_literals = all(self._literals)
        # JSON writes such literals as they are.
        self._have_plain_literals = all(map(_PLAIN_LITERAL.fullmatch, self._literals))

        def written(flags: int) -> list[str]:
            return [_written(one, place, flags) for one, place in zip(parsed, places, strict=True)]

        # Most texts have only ASCII. There RE2's own classes and `\\b` mean what Python's do, and
        # its programs are small.
        self._each = {
            is_ascii: [_compiled(*one) for one in zip(written(flags), places, strict=True)]
            for is_ascii, flags in ((True, _ASCII_TEXT), (False, 0))
        }
        self._within = {
            is_ascii: _compiled("|".join(f"(?:{pattern})" for pattern in written(flags | _WITHIN)), where)
            for is_ascii, flags in ((True, _ASCII_TEXT), (False, 0))
        }

    def finds(self, text: str) -> bool:
        """Return whether one of the patterns is in this text."""
        encoded = text.encode("utf-8", "replace")
        return any(pattern.search(encoded) is not None for pattern in self._each[text.isascii()])

    def finds_nothing_in(self, body: bytes) -> bool:
        """Return True when the bytes of a JSON body show that no pattern matches in its strings,
        however they are read.
        """
        if not self._have_plain_literals or not body.isascii() or b"\x7f" in body:
            return False
        if b"\\" in body and _READ_OTHERWISE.search(body):
            return False
        return not any(map(body.__contains__, self._literals))

    def may_find_in(self, joined: str) -> bool:
        """Return False when none of the texts joined by line breaks into this one matches a
        pattern.
        """
        encoded = joined.encode("utf-8", "replace")
        if self._have_literals:
            for literal in self._literals:
                if literal in encoded:
                    break
            else:
                # RE2 takes many times as long. It lets other threads run, but that pays only for
                # long texts.
                return False
        return self._within[joined.isascii()].search(encoded) is not None

    def replaced(self, text: str, replacement: str) -> str:
        """Return the text with every match of each pattern replaced, one pattern after the
        other."""
        text = text.encode("utf-8", "replace").decode()
        for pattern in self._each[text.isascii()]:
            text = pattern.sub(lambda _: replacement, text)
        return text


def _compiled(pattern: str, where: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = MEMORY_BYTES_MAX
    try:
        return re2.compile(pattern, options)
    except re2.error as wrong:
        reason = wrong.args[0] if wrong.args else ""
        reason = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise SettingsError(
            f"{where} is too much for RE2, which runs it: {reason}. Bound its repeats by less"
        ) from None


def _parsed(text: str, where: str) -> Any:
    """Return a pattern as Python's parser reads it; a SettingsError says what is wrong with it."""
    if len(text) > PATTERN_CHARS_MAX:
        raise SettingsError(f"{where} has {len(text)} characters: use at most {PATTERN_CHARS_MAX}")
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(text)
            return importlib.import_module("re._parser").parse(text)
    except (re.error, RecursionError, OverflowError) as wrong:
        raise SettingsError(f"{where} is not a regular expression: {wrong}") from None


def _written(parsed: Any, where: str, flags: int) -> str:
    """Return a pattern in RE2's syntax, under these flags and its own; a SettingsError says what to
    write instead.
    """
    try:
        return _Writer(where).sequence(list(parsed), parsed.state.flags | flags)
    except RecursionError:
        raise SettingsError(f"{where} is nested too deeply: write it in another way") from None


class _Writer:
    """The writer of parsed patterns for RE2.

    `lead` and `trail` ask for a word boundary before or after the written part.
    """

    def __init__(self, where: str) -> None:
        self._where = where

    def sequence(self, steps: list[RegexStep], flags: int, *, lead: bool = False, trail: bool = False) -> str:
        """Write several steps that follow one another."""
        steps = _with_boundaries(_with_ends_last(steps), flags)
        while steps and _is_boundary(steps[0], flags):
            lead, steps = True, steps[1:]
        while steps and _is_boundary(steps[-1], flags):
            trail, steps = True, steps[:-1]
        if not steps or (len(steps) == 1 and (lead or trail) and _may_be_empty(steps[0])):
            if lead or trail:
                raise SettingsError(
                    rf"{self._where} has \b beside what may be nothing: write which characters stand there"
                )
            return ""
        # Beside `^` and `$`, the boundary belongs to the characters on their other side.
        if lead and str(steps[0][0]) == "AT":
            first = self._at(str(steps[0][1]), flags | _FOLLOWED)
            return first + self.sequence(steps[1:], flags, lead=True, trail=trail)
        if trail and str(steps[-1][0]) == "AT":
            before = self.sequence(steps[:-1], flags | _FOLLOWED, lead=lead, trail=True)
            return before + self._at(str(steps[-1][1]), flags)
        if lead:
            return self._led(steps, flags, trail=trail)
        if trail:
            return self._trailed(steps, flags)
        out = ""
        for number, step in enumerate(steps):
            if _is_boundary(step, flags):
                return out + self.sequence(steps[number:], flags)
            is_last = number == len(steps) - 1
            out += self._step(step, flags if is_last else flags | _FOLLOWED, lead=False, trail=False)
        return out

    def _led(self, steps: list[RegexStep], flags: int, *, trail: bool) -> str:
        """Write steps with a boundary before the first that is not empty."""
        first, rest = steps[0], steps[1:]
        if not rest:
            return self._step(first, flags, lead=True, trail=trail)
        if trail and all(map(_may_be_empty, rest)):
            with_last = self.sequence(steps[:-1], flags | _FOLLOWED, lead=True)
            with_last += self._step(_at_least_once(rest[-1]), flags, lead=False, trail=True)
            return f"(?:{with_last}|{self.sequence(steps[:-1], flags, lead=True, trail=True)})"
        behind = self.sequence(rest, flags, trail=trail)
        if not _may_be_empty(first):
            return self._step(first, flags | _FOLLOWED, lead=True, trail=False) + behind
        with_it = self._step(_at_least_once(first), flags | _FOLLOWED, lead=True, trail=False) + behind
        return f"(?:{with_it}|{self.sequence(rest, flags, lead=True, trail=trail)})"

    def _trailed(self, steps: list[RegexStep], flags: int) -> str:
        """Write steps with a boundary after the last that is not empty."""
        rest, last = steps[:-1], steps[-1]
        before = self.sequence(rest, flags | _FOLLOWED)
        if not _may_be_empty(last):
            return before + self._step(last, flags, lead=False, trail=True)
        with_it = before + self._step(_at_least_once(last), flags, lead=False, trail=True)
        return f"(?:{with_it}|{self.sequence(rest, flags, trail=True)})"

    def _step(self, step: RegexStep, flags: int, *, lead: bool, trail: bool) -> str:
        name, what = str(step[0]), step[1]
        if name in _REFUSED:
            raise SettingsError(f"{self._where} {_REFUSED[name]}; patterns are run by RE2")
        if name == _TRAILED:
            return self._step(what, flags, lead=lead, trail=True)
        if name == "AT":
            return self._at(str(what), flags)
        if name in ("LITERAL", "NOT_LITERAL", "IN", "ANY"):
            ranges = _ranges(step, flags)
            return _bounded(
                _without(ranges, ((128, _LAST),)) if flags & _ASCII_TEXT else ranges, lead=lead, trail=trail
            )
        if name == "BRANCH":
            ways = (self.sequence(list(way), flags, lead=lead, trail=trail) for way in what[1])
            return f"(?:{'|'.join(ways)})"
        if name == "SUBPATTERN":
            inner = (flags | what[1]) & ~what[2]
            if what[1] & _ALPHABETS:
                inner = inner & ~_ALPHABETS | what[1]
            return f"(?:{self.sequence(list(what[3]), inner, lead=lead, trail=trail)})"
        if name == "ATOMIC_GROUP":
            return f"(?:{self.sequence(list(what), flags, lead=lead, trail=trail)})"
        if name in _REPEATS:
            return self._repeat(name, what, flags, lead=lead, trail=trail)
        raise SettingsError(f"{self._where} has {name.lower()}, which RE2 cannot run: write it in another way")

    def _repeat(self, name: str, what: Any, flags: int, *, lead: bool, trail: bool) -> str:
        least, most, steps = what[0], what[1], list(what[2])
        if _is_endless(most) or int(most) > 1:
            flags |= _FOLLOWED
        lazy = "?" if name == "MIN_REPEAT" else ""

        def times(low: int, high: Any) -> str:
            if high <= 0:
                return ""
            return f"(?:{self.sequence(steps, flags)})" + _count(low, high) + lazy

        def more(by: int) -> Any:
            return most if _is_endless(most) else int(most) - by

        if not lead and not trail:
            return times(least, most)
        if lead and trail:
            both = self.sequence(steps, flags, lead=True, trail=True)
            if most == 1:
                return f"(?:{both})"
            ends = [self.sequence(steps, flags, lead=True), self.sequence(steps, flags, trail=True)]
            several = f"(?:{ends[0]}){times(max(least - 2, 0), more(2))}(?:{ends[1]})"
            return f"(?:{several}|{both})" if least < 2 else several
        if lead:
            return f"(?:{self.sequence(steps, flags, lead=True)}){times(least - 1, more(1))}"
        return f"{times(least - 1, more(1))}(?:{self.sequence(steps, flags, trail=True)})"

    def _at(self, place: str, flags: int) -> str:
        if place in _REFUSED and not flags & re.ASCII:
            raise SettingsError(f"{self._where} {_REFUSED[place]}; patterns are run by RE2")
        if flags & _WITHIN and place not in ("AT_BOUNDARY", "AT_NON_BOUNDARY"):
            return ""
        many = bool(flags & re.MULTILINE)
        # Python's `$` also matches before a line end that is the text's last character, and what
        # follows it may match that line end. RE2 cannot say so: there it matches before any.
        at_end = "(?m:$)" if many or flags & _FOLLOWED else r"(?:\n?\z)"
        return {
            "AT_BEGINNING": "(?m:^)" if many else r"\A",
            "AT_BEGINNING_STRING": r"\A",
            "AT_END": at_end,
            "AT_END_STRING": r"\z",
            "AT_BOUNDARY": r"\b",
            "AT_NON_BOUNDARY": r"\B",
        }[place]


def _is_boundary(step: RegexStep, flags: int) -> bool:
    return str(step[0]) == "AT" and str(step[1]) == "AT_BOUNDARY" and not flags & (re.ASCII | _ASCII_TEXT)


def _with_ends_last(steps: list[RegexStep]) -> list[RegexStep]:
    """Put each `$` behind what else is asked of the same place."""
    out: list[RegexStep] = []
    for step in steps:
        if str(step[0]) == "AT" and str(step[1]) != "AT_END":
            place = len(out)
            while place and str(out[place - 1][1]) == "AT_END":
                place -= 1
            out.insert(place, step)
        else:
            out.append(step)
    return out


def _with_boundaries(steps: list[RegexStep], flags: int) -> list[RegexStep]:
    """Move each boundary into the step before it, where that step is never empty."""
    out: list[RegexStep] = []
    for step in steps:
        if out and str(step[0]) == "AT" and _is_boundary(out[-1], flags):
            out.insert(len(out) - 1, step)
        elif out and _is_boundary(step, flags) and str(out[-1][0]) == _TRAILED:
            continue
        elif out and _is_boundary(step, flags) and str(out[-1][0]) != "AT" and not _may_be_empty(out[-1]):
            out[-1] = (_TRAILED, out[-1])
        else:
            out.append(step)
    return out


def _may_be_empty(step: RegexStep) -> bool:
    return str(step[0]) in _REPEATS and step[1][0] == 0


def _at_least_once(step: RegexStep) -> RegexStep:
    least, most, steps = step[1]
    return step[0], (max(int(least), 1), most, steps)


def _is_endless(most: Any) -> bool:
    return str(most) == "MAXREPEAT"


def _count(low: int, high: Any) -> str:
    if _is_endless(high):
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    if (low, high) == (0, 1):
        return "?"
    return "" if (low, high) == (1, 1) else f"{{{low},{high}}}"


def _weight(steps: Iterable[RegexStep]) -> int:
    total = 0
    for step, what in steps:
        name = str(step)
        if name in _REPEATS:
            total += _weight(what[2]) * max(1, what[0] + 1 if _is_endless(what[1]) else what[1])
        elif name == "BRANCH":
            total += sum(_weight(way) for way in what[1])
        elif name == "SUBPATTERN":
            total += _weight(what[3])
        elif name == "ATOMIC_GROUP":
            total += _weight(what)
        else:
            total += 1
    return total


def _literal(steps: Iterable[RegexStep], flags: int) -> str:
    """Return the longest text that every match of these steps contains; empty where none is
    known."""
    found = [""]
    run = ""
    for step, what in steps:
        name = str(step)
        if name == "LITERAL" and not flags & re.IGNORECASE and not _SURROGATES[0] <= what <= _SURROGATES[1]:
            run += chr(what)
            continue
        found.append(run)
        run = ""
        if name in _REPEATS and what[0]:
            found.append(_literal(what[2], flags))
        elif name == "SUBPATTERN":
            found.append(_literal(what[3], (flags | what[1]) & ~what[2]))
        elif name == "ATOMIC_GROUP":
            found.append(_literal(what, flags))
    return max(*found, run, key=len)


# Sets of characters, as ordered ranges of code points.


def _bounded(ranges: Ranges, *, lead: bool, trail: bool) -> str:
    """Write one character of these, with the wanted word boundaries; beside anything but ASCII a
    boundary always holds.
    """
    if not lead and not trail:
        return _class(ranges)
    words = tuple(
        (code, code) for low, high in ranges for code in range(low, min(high, 127) + 1) if code in _ASCII_WORD
    )
    others = _without(ranges, words)
    ways = [r"\b" * lead + _class(words) + r"\b" * trail] if words else []
    return f"(?:{'|'.join([*ways, _class(others)] if others else ways)})"


def _class(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return f"\\x{{{ranges[0][0]:x}}}"
    if not ranges:
        return rf"[^\x{{0}}-\x{{{_LAST:x}}}]"
    return "[" + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in ranges) + "]"


def _ranges(step: RegexStep, flags: int) -> Ranges:
    """Return every character that Python takes for this step under these flags."""
    name, what = str(step[0]), step[1]
    if name == "ANY":
        return _joined([(0, _LAST)]) if flags & re.DOTALL else _without(_joined([(0, _LAST)]), ((10, 10),))
    members = what if name == "IN" else [("LITERAL", what)]
    is_negated = name == "NOT_LITERAL" or str(members[0][0]) == "NEGATE"
    found: list[tuple[int, int]] = []
    source = ""
    for kind, value in members:
        match str(kind):
            case "LITERAL":
                found.append((value, value))
                source += _escaped(value)
            case "RANGE":
                found.append((value[0], value[1]))
                source += f"{_escaped(value[0])}-{_escaped(value[1])}"
            case "CATEGORY":
                found += _category(_CATEGORIES[str(value)], bool(flags & re.ASCII))
                source += _CATEGORIES[str(value)]
    if flags & re.IGNORECASE:
        python = re.compile(f"[{source}]", re.IGNORECASE | (flags & re.ASCII))
        found += [(ord(letter), ord(letter)) for letter in _cased() if python.match(letter)]
    positive = _joined(found)
    return _without(_joined([(0, _LAST)]), positive) if is_negated else positive


def _escaped(code: int) -> str:
    return f"\\U{code:08x}"


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return these ranges in order, merged where they touch, without surrogates, which no text
    has."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return _without(tuple(out), (_SURROGATES,))


def _without(ranges: Ranges, taken: Ranges) -> Ranges:
    out: list[tuple[int, int]] = []
    for low, high in ranges:
        for first, last in taken:
            if first > high or low > high:
                break
            if last >= low:
                if first > low:
                    out.append((low, first - 1))
                low = last + 1
        if low <= high:
            out.append((low, high))
    return tuple(out)


@functools.cache
def _category(name: str, is_ascii: bool) -> Ranges:
    flags = re.ASCII if is_ascii else 0
    return tuple((found.start(), found.end() - 1) for found in re.finditer(f"{name}+", _everything(), flags))


def _everything() -> str:
    return "".join(map(chr, range(_LAST + 1)))


@functools.cache
def _cased() -> tuple[str, ...]:
    """Return every letter with another case. The blocks left out, most of Unicode, have none."""
    return tuple(
        letter
        for letter in map(chr, (*range(0x3000), *range(0xA640, 0xAC00), *range(0xF900, 0x1F000)))
        if letter.lower() != letter or letter.upper() != letter or letter.casefold() != letter
    )
