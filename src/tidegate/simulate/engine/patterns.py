"""A maker of texts that match a regular expression, for the patterns in schemas of answers.

Python's own parser reads the pattern, so it takes what `re` takes. Look-arounds are refused. The
text is checked with `re` before it is returned.
"""

import re
from importlib import import_module
from random import Random
from typing import Any

# Imported by name, because not all type checkers know these modules.
_constants: Any = import_module("re._constants")
_parser: Any = import_module("re._parser")

REPEAT_COUNT_MAX = 64
_PRINTABLE = [chr(code) for code in range(0x20, 0x7F)]
_CLASSES = {
    _constants.CATEGORY_DIGIT: "0123456789",
    _constants.CATEGORY_WORD: "abcdefghijklmnopqrstuvwxyz0123456789_",
    _constants.CATEGORY_SPACE: " ",
    _constants.CATEGORY_NOT_DIGIT: "abcxyz-. ",
    _constants.CATEGORY_NOT_WORD: "-. ",
    _constants.CATEGORY_NOT_SPACE: "abcxyz019_",
}


class Unmatchable(ValueError):
    """The pattern has a part that no text can be made for here."""


def text_matching(pattern: str, random: Random, chars_min: int = 0) -> str:
    """Return a text of at least `chars_min` letters in which the pattern is found.

    Raise Unmatchable if none was made.
    """
    tree = _parser.parse(pattern)
    for more in (0, chars_min):
        groups: dict[int, str] = {}
        text = _sequence(tree, random, groups, more)
        if len(text) >= chars_min and re.search(pattern, text):
            return text
    raise Unmatchable("no text was found")


def _sequence(tree: Any, random: Random, groups: dict[int, str], more: int) -> str:
    return "".join(_node(kind, value, random, groups, more) for kind, value in tree)


def _node(kind: Any, value: Any, random: Random, groups: dict[int, str], more: int) -> str:
    if kind is _constants.LITERAL:
        return chr(value)
    if kind is _constants.NOT_LITERAL:
        return "a" if value != ord("a") else "b"
    if kind is _constants.ANY:
        return random.choice("abcxyz019")
    if kind is _constants.IN:
        return random.choice(_members(value))
    if kind is _constants.AT:
        return ""
    if kind is _constants.BRANCH:
        return _sequence(random.choice(value[1]), random, groups, more)
    if kind is _constants.SUBPATTERN:
        made = _sequence(value[3], random, groups, more)
        groups[value[0]] = made
        return made
    if kind is _constants.GROUPREF:
        return groups.get(value, "")
    if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
        low, high, inner = value
        most = min(high, max(low, REPEAT_COUNT_MAX, more))
        count = random.randint(low, min(most, low + 4)) if not more else min(most, max(low, more))
        return "".join(_sequence(inner, random, groups, 0) for _ in range(count))
    raise Unmatchable(f"{kind} is not made")


def _members(items: Any) -> list[str]:
    negated = items[0][0] is _constants.NEGATE
    found: list[str] = []
    for kind, value in items:
        if kind is _constants.LITERAL:
            found.append(chr(value))
        elif kind is _constants.RANGE:
            found.extend(map(chr, range(value[0], min(value[1], value[0] + 255) + 1)))
        elif kind is _constants.CATEGORY:
            found.extend(_CLASSES[value])
    if negated:
        found = [letter for letter in _PRINTABLE if letter not in found]
    if not found:
        raise Unmatchable("a set of letters is empty")
    return found
