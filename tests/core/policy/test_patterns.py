"""Patterns run by RE2 find what Python's would: never less, and on ASCII texts exactly that. No text takes long."""

from __future__ import annotations

import json
import re
import sys
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidegate.core.errors import SettingsError
from tidegate.core.policy.body_texts import readings
from tidegate.core.policy.patterns import Finder

PATTERNS = [
    r"\bSSN\b", r"\b\d{3}-\d{2}\b", r"\b\d*x\b", r"(?:\b\w+\b-?)+é", r"\b(foo|bar)\b", r"\b\w+\b$", r"^\b\w", r"x\b", r"\bé\b",
    r"\b\S+@\S+\b", r"\b(?:a|\d+)?z", r"a$", r"(?m)^a$", r"(?x) a b # c", r"a{,3}b", r"(?a)\w\b-", r"(?s)a.b", "[^]a-z]+",
    r"(?:\d[ -]?){3,5}", "(?i)[^s]x", "(?i)[a-z]+ı", r"\b[A-Z]{2}\d{2}[A-Z]?\b", r"a\b\b", r"(?i)\bß", r"x(?:\b)-", r"(?i)secret",
    r"(?i)i", r"(?i)k", r"\w+\d?\b", r"\b\w+\d?\b", r"\s\b", r"-\b\d", r"\W\b\w", r"(?i:k)S", r"[\W\d]x", r"(?i)[^\W\d]z", r"\D\S",
    r"(?:ab|\d)\b", r"\b(?:-|a)b", r"a.c", r"(a|aa){3}b", r"a??b", r"\b(?:\w|-)+\b", "[[:alpha:]]", "(a|b)*c", r"\u0041KIA", r"\x41",
    r"(?u:\w)(?a:\w)", "foo|bar", "(?P<n>a+)+b", "(?:a{0,9}){2}b", r"\b^\w", r"\wx$\b",
]  # fmt: skip
GREEDY = ["a++b", "(?>a+)b", "(?>ab?)b"]
ASCII = "abxzfoobarSSN0123-_ @.\nkKsSiIKIA"
LETTERS = ASCII + "éßẞſıİ\u212a字٣０－\u00a0\u2003\u0345\u01c5\u01c4ﬀ𝒜"


@cache
def finders() -> dict[str, Finder]:
    return {pattern: Finder([pattern], "p") for pattern in [*PATTERNS, *GREEDY]}


@given(st.text(LETTERS, max_size=10))
def test_nothing_is_found_less_than_python_would(text: str) -> None:
    for pattern, finder in finders().items():
        if re.search(pattern, text):
            assert finder.finds(text), pattern


def groups(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    opened = st.sampled_from(["(", "(?:", "(?>", "(?i:", "(?m:", "(?s:", "(?a:"])
    repeats = st.sampled_from(["", "", "", "?", "*", "+", "{2}", "{0,2}", "*?", "++"])
    joined = st.builds("".join, st.lists(inner, min_size=1, max_size=4)) | st.builds("{}|{}".format, inner, inner)
    return st.builds("{}{}){}".format, opened, joined, repeats)


STEPS = [
    "a",
    "b",
    "1",
    "_",
    "-",
    r"\n",
    r"\s",
    r"\w",
    r"\d",
    ".",
    r"\b",
    "$",
    "^",
    r"\Z",
    r"\A",
    "é",
    "ß",
    r"\W",
    "[a-c]",
    "[^a]",
    "akia",
]
DRAWN_PATTERNS = st.builds(
    "".join, st.lists(st.recursive(st.sampled_from(STEPS), groups, max_leaves=8), min_size=1, max_size=4)
)
SHORT_TEXTS = st.builds("{}{}".format, st.text("ab1_- \nKßé", max_size=5), st.sampled_from(["", "\n", "akia"]))


@given(DRAWN_PATTERNS, st.lists(SHORT_TEXTS, min_size=20, max_size=20))
@example(r"\S(?a:$){1,3}\D", ["K\n"])
@example(r"x$\s", ["x\n"])
@example("(?:a$|\n){2}", ["a\n"])
@example(r"(?:\s|$)(?a:\b)", ["a\n"])
@example(r"\b($\W)", ["é\n"])
@example(r"\b(?:é|x$)\s", ["ß x\n"])
@example(r"(?a:\A\d)", ["1"])
@example(r"[a-c](?a:\Z)", ["b"])
def test_no_pattern_finds_less_than_python_would(pattern: str, texts: list[str]) -> None:
    """What RE2 cannot search for is refused; what it can, it finds in every text, also among others."""
    try:
        finder = Finder([pattern], "p")
    except SettingsError:
        return
    for text in filter(re.compile(pattern).search, texts):
        assert finder.finds(text), text
        assert finder.may_find_in(f"x\0{text}\0x"), text
        assert not finder.finds_nothing_in(json.dumps([text]).encode()), text


@given(st.lists(st.text([*LETTERS, "\ud800", "?"], max_size=10), max_size=3))
def test_the_look_through_all_texts_at_once_misses_nothing(texts: list[str]) -> None:
    for pattern, finder in finders().items():
        if any(map(finder.finds, texts)):
            assert finder.may_find_in("\0".join(texts)), pattern


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("AKIA[0-9]", "AKIA7"), ("(?i)akia", "AKIA"), ("(?:(?i:ak)ia)", "AKia"), ("foo|bar", "bar"), ("(?:ab)?c", "c"),
        ("(?:ab){0,2}c", "c"),
        ("(?:ab){1,2}", "ab"), ("(?>ab)+c", "abc"), (r"a\?", "a\ud800"), ("\\?", "\ud800"), ("(?x) a b", "ab"), ("[a]b", "ab"),
        ("a|ab", "a"),
    ],
)  # fmt: skip
def test_a_text_without_what_every_match_has_is_ruled_out(pattern: str, text: str) -> None:
    finder = Finder([pattern, "never@once"], "p")
    assert finder.finds(text)
    assert finder.may_find_in(f"x\0{text}")
    assert not finder.may_find_in("x\0y")


@given(st.lists(st.text([*LETTERS, *'\\\\ntu"\x01\x7f\x0bAKIA'], max_size=12), max_size=3), st.booleans())
def test_a_body_that_rules_all_patterns_out_has_none_in_a_string_however_it_is_read(
    texts: list[str], is_ascii: bool
) -> None:
    body = json.dumps(texts, ensure_ascii=is_ascii).encode("utf-8", "replace")
    for pattern, finder in finders().items():
        if finder.finds_nothing_in(body):
            assert not any(finder.finds(reading) for text in texts for reading in readings(text)), pattern


@pytest.mark.parametrize(
    ("pattern", "text", "is_ruled_out"),
    [
        ("AKIA[0-9]", "Describe a tide.\n\t\r\"", True), ("AKIA[0-9]", "an AKIA", False), ("AKIA[0-9]", "\\u0041KIA7", False),
        ("AKIA[0-9]", "\x01", False), ("AKIA[0-9]", "\x7f", False), ("AKIA[0-9]", "é", False), ("a\nb", "x", False), ("a\"b", "x", False),
        ("[0-9]", "x", False),
    ],
)  # fmt: skip
def test_only_what_json_writes_as_it_is_rules_a_pattern_out(pattern: str, text: str, is_ruled_out: bool) -> None:
    for is_ascii in (True, False):
        body = json.dumps([text], ensure_ascii=is_ascii).encode()
        assert Finder([pattern], "p").finds_nothing_in(body) is is_ruled_out


@given(st.text(ASCII, max_size=10))
@example("0x\n")
def test_in_ascii_it_is_found_exactly_as_python_would(text: str) -> None:
    for pattern in PATTERNS:
        assert finders()[pattern].finds(text) == (re.search(pattern, text) is not None), pattern


@cache
def every_character() -> str:
    return "".join(chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF)


@pytest.mark.parametrize(
    "pattern", [r"\w", r"\W", r"\d", r"\D", r"\s", r"\S", "(?i)s", "(?i)k", "(?i)[a-z]", "(?i)[^i]", "(?i)å", "."]
)
def test_classes_and_cases_are_pythons_over_all_of_unicode(pattern: str) -> None:
    repeated = f"{pattern}+"
    assert Finder([repeated], "p").replaced(every_character(), "") == re.sub(repeated, "", every_character())


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(?:[A-Za-z0-9]{1,64}[._-]?){1,10}@corp[.]example", "a" * 300),
        ("(?:a|aa){40}b", "a" * 100_000),
        ("(?x)(a+) +b", "a" * 100_000),
        ("(a+)+$", "a" * 100_000 + "b"),
        (r"(\w+\s)*x\b", "a " * 50_000 + "-"),
        ("(.*a){20}c", "a" * 20_000),
    ],
)
def test_a_text_made_to_take_for_ever_is_searched_at_once(pattern: str, text: str) -> None:
    """With Python's engine any of these would outlast the test's time limit."""
    assert not Finder([pattern], "p").finds(text)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        (r"(a)\1", "refers back"), (r"(?P<n>a)(?P=n)", "refers back"), (r"(a)?(?(1)b|c)", "asks whether"), ("(?=a)b", "looks ahead"),
        ("(?<!a)b", "looks ahead"), (r"\Bx", r"\B"), ("(", "not a regular expression"), ("*", "not a regular expression"),
        ("a{5,2}", "not a regular expression"), ("x" * 3000, "at most 2000"), (r"\w{2000}", "too much"), (r"\b", "may be nothing"),
        (r"\b\d*", "may be nothing"), ("(?:a{0,999}){0,999}", "too much"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_with_its_place_and_a_reason(pattern: str, says: str) -> None:
    with pytest.raises(SettingsError, match="guardrail 'p', pattern 2") as wrong:
        Finder(["fine", pattern], "guardrail 'p'")
    assert says in str(wrong.value)
