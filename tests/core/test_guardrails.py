"""The built-in guardrails: what passes, what is changed and how little, what is refused, and patterns that could take for ever."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.errors import SettingsError
from tidegate.core.guardrails import (
    PASS,
    Action,
    AnswerShape,
    Guardrail,
    Length,
    Patterns,
    Refuse,
    Transformed,
    answer_texts,
    run,
)
from tidegate.core.patterns import Needle, compile_pattern, needle_of


def packed(value: Any) -> bytes:
    return json.dumps(value).encode()


def chat(text: str) -> bytes:
    return packed({"model": "m", "messages": [{"role": "user", "content": text}]})


def test_length_counts_bytes_and_tokens() -> None:
    rail = Length(prompt_bytes_max=100, prompt_tokens_max=20, answer_bytes_max=10)
    assert rail.check_prompt(b"x" * 80) is PASS
    for body in (b"x" * 81, b"x" * 101):
        verdict = rail.check_prompt(body)
        assert isinstance(verdict, Refuse)
        assert verdict.code == "guardrail_length"
    assert rail.check_answer(b"x" * 10) is PASS
    assert isinstance(rail.check_answer(b"x" * 11), Refuse)
    assert Length().check_prompt(b"x" * 10**6) is PASS
    with pytest.raises(SettingsError):
        Length(prompt_bytes_max=-1)


def test_a_denied_word_is_found_wherever_a_text_can_stand() -> None:
    rail = Patterns("words", ["(?i)secret", r"\bSSN\b"])
    assert rail.check_prompt(chat("nothing here")) is PASS
    for body in (
        chat("my SECRET"),
        chat("a line\nSSN\tthen"),
        packed({"input": ["a", "the secret"]}),
        packed({"input": [{"type": "x"}, "secret"]}),
        packed({"messages": [{"role": "user", "content": [{"type": "text", "text": "secret"}]}]}),
        packed({"system": "secret", "messages": []}),
        packed({"tools": [{"function": {"description": "secret"}}]}),
        b'{"input":"\\u0073ecret"}',
        b'{"input" :\t"secret"}',
        b'"secret"',
    ):
        verdict = rail.check_prompt(body)
        assert isinstance(verdict, Refuse)
        assert verdict.code == "guardrail_pattern"
        assert "secret" not in verdict.message.lower()


def test_words_of_the_api_and_media_are_no_texts() -> None:
    rail = Patterns("words", ["user", "text", "assistant", "AAAA", "stop"])
    body = packed(
        {
            "model": "text-1",
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "content": "hello"},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                        {"source": {"data": "AAAA"}},
                    ],
                }
            ],
        }
    )
    assert rail.check_prompt(body) is PASS
    assert rail.check_answer(packed({"choices": [{"finish_reason": "stop", "message": {"role": "assistant"}}]})) is PASS


def test_redaction_changes_the_text_and_not_a_byte_around_it() -> None:
    rail = Patterns("cards", [r"\d{4}-\d{4}", "Zoë"], Action.REDACT, replacement=r"<\1>")
    body = b'{ "x": 1.50e3, "messages":[{"role":"user","content":"pay 1234-5678 for Zo\\u00eb \\"now\\""}], "input":["1111-2222","ok"]}'
    verdict = rail.check_prompt(body)
    assert verdict == Transformed(
        b'{ "x": 1.50e3, "messages":[{"role":"user","content":"pay <\\\\1> for <\\\\1> \\"now\\""}], "input":["<\\\\1>","ok"]}'
    )
    assert isinstance(verdict, Transformed)
    assert json.loads(verdict.body)["messages"][0]["content"] == r'pay <\1> for <\1> "now"'
    assert rail.check_prompt(chat("nothing")) is PASS


def test_sides_can_be_chosen() -> None:
    rail = Patterns("words", ["x"], prompts=False)
    assert rail.check_prompt(b'"x"') is PASS
    assert isinstance(rail.check_answer(b'"x"'), Refuse)
    assert Patterns("words", ["x"], answers=False).check_answer(b'"x"') is PASS


def test_a_text_too_long_to_look_at_is_refused_and_not_left_unseen() -> None:
    for action in Action:
        rail = Patterns("words", ["x"], action, text_chars_max=100)
        verdict = rail.check_prompt(chat("y" * 101))
        assert isinstance(verdict, Refuse)
        assert verdict.code == "guardrail_length"
        assert rail.check_prompt(chat("y" * 100)) is PASS


@given(st.text(max_size=60), st.sampled_from(["a", "[0-9]+", "é", '"', r"\\", "."]))
def test_a_redacted_text_is_what_the_pattern_says(text: str, pattern: str) -> None:
    rail = Patterns("p", [pattern], Action.REDACT, replacement="#")
    body = chat(text)
    verdict = rail.check_prompt(body)
    got = json.loads(verdict.body if isinstance(verdict, Transformed) else body)
    want = compile_pattern(pattern, "p").sub("#", text.encode("utf-8", "replace").decode())
    assert got == {"model": "m", "messages": [{"role": "user", "content": want}]}


def test_half_a_character_hides_nothing() -> None:
    assert isinstance(Patterns("p", ["secret"]).check_prompt(b'{"input":"\\ud800 secret"}'), Refuse)
    got = Patterns("p", ["secret"], Action.REDACT).check_prompt(b'{"input":"\\ud800 secret"}')
    assert isinstance(got, Transformed)
    assert "secret" not in json.loads(got.body)["input"]


@given(st.binary(max_size=80))
def test_garbage_gets_a_verdict(garbage: bytes) -> None:
    for rail in (
        Patterns("p", ["x"]),
        Patterns("p", ["x"], Action.REDACT),
        AnswerShape("s", {"type": "object"}),
        Length(),
    ):
        rail.check_prompt(garbage)
        rail.check_answer(garbage)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+$", r"(a|a)*b", r"(a*)*", r"(\w+\s)*x", r"((ab)*c)+", r"([a-z]+)*", r"(a{2,})+", r"(x+x+)+y", r"(?P<n>a+)+",
        r"(.*a){20}", r"(a+){2,9}", r"(\\+)+", r"(a)\1", r"(?P<n>a)(?P=n)", r"([^)]+)*", r"([]a]+)*", "(?:(?:a|b)c)+",
        "(", "[", "*", "a{5,2}", "x" * 3000,
    ],
)  # fmt: skip
def test_a_pattern_that_can_take_for_ever_is_refused_at_start(pattern: str) -> None:
    with pytest.raises(SettingsError, match="guardrail 'p', pattern 1"):
        Patterns("p", [pattern])


@pytest.mark.parametrize(
    "pattern",
    [
        r"\b\d{3}-\d{2}-\d{4}\b", r"(?:foo|bar)\s+baz", "[^]]+", "(?>a+)+", "(a++)+", "(?i:secret)", "(?i)secret",
        r"(?:\d[ -]?){13,16}", r"[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}", "a|b|c+", "sk-[A-Za-z0-9]{20,}", "(?:ab?)+",
        r"\(a+\)+", "[(a+)]+", r"(a+){2}",
    ],
)  # fmt: skip
def test_patterns_that_people_write_are_taken(pattern: str) -> None:
    Patterns("p", [pattern])


def test_a_guardrail_without_sense_is_refused_by_name() -> None:
    for make in (
        lambda: Patterns("empty", []),
        lambda: Patterns("empty", ["a"], text_chars_max=0),
        lambda: AnswerShape("empty", {"surprise": 1}),
    ):
        with pytest.raises(SettingsError, match="guardrail 'empty'"):
            make()


SHAPE = AnswerShape("person", {"type": "object", "required": ["name"]})


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        ({"choices": [{"message": {"content": '{"name":"x"}'}}]}, True),
        ({"choices": [{"message": {"content": '{"name":"x"}'}}, {"message": {"content": "{}"}}]}, False),
        ({"choices": [{"message": {"content": "not json"}}]}, False),
        ({"choices": [{"message": {"content": ""}}]}, False),
        ({"choices": [{"message": {"content": None, "tool_calls": [{}]}}]}, True),
        ({"choices": [{"text": '{"name":1}'}]}, True),
        ({"content": [{"type": "text", "text": '{"na'}, {"type": "text", "text": 'me":1}'}]}, True),
        ({"content": [{"type": "text", "text": "[]"}]}, False),
        ({"content": [{"type": "tool_use", "input": {}}]}, True),
        ({"output": [{"type": "message", "content": [{"type": "output_text", "text": '{"name":1}'}]}]}, True),
        ({"output": [{"type": "message", "content": [{"type": "output_text", "text": "{}"}]}]}, False),
    ],
)
def test_the_text_of_an_answer_fits_its_schema(answer: dict[str, Any], passes: bool) -> None:
    verdict = SHAPE.check_answer(packed(answer))
    assert (verdict is PASS) is passes
    if isinstance(verdict, Refuse):
        assert verdict.code == "guardrail_schema"
    assert SHAPE.check_prompt(packed(answer)) is PASS


@pytest.mark.parametrize(
    "nothing",
    [None, [], {}, {"choices": {}}, {"choices": [5]}, {"output": [7, {"type": "message", "content": 5}]}],
)
def test_what_is_no_answer_has_no_texts(nothing: Any) -> None:
    assert [text for text in answer_texts(nothing) if text] == []
    assert isinstance(SHAPE.check_answer(b"{"), Refuse)


def test_one_after_the_other_until_one_refuses() -> None:
    redact = Patterns("a", ["secret"], Action.REDACT, replacement="public")
    deny = Patterns("b", ["secret"])
    rails: list[Guardrail] = [redact, deny]
    verdict = run([rail.check_prompt for rail in rails], chat("a secret"))
    assert verdict == Transformed(chat("a public"))
    assert isinstance(run([rail.check_prompt for rail in reversed(rails)], chat("a secret")), Refuse)
    assert run([rail.check_prompt for rail in rails], chat("fine")) is PASS
    assert run([], b"") is PASS


NEEDLES = [
    ("AKIA[0-9A-Z]{16}", Needle(b"AKIA", False)),
    (r"\b\d{3}-\d{2}\b", Needle(b"-", False)),
    ("(?i)PASS(word)?", Needle(b"pass", True)),
    ("(foo|fox)bar", Needle(b"bar", False)),
    ("(?:ab){2,3}c", Needle(b"ab", False)),
    ("(?!no)yes", Needle(b"yes", False)),
    ("(?>ab)c", Needle(b"ab", False)),
    ("(?i:abc)d", Needle(b"d", False)),
    ("foo|bar", None),
    ("(ab)?", None),
    ("(ab){0,3}x*", None),
    ('"', None),
    ("/", None),
    ("\u00fc", None),
    (r"\n", None),
]


@pytest.mark.parametrize(("text", "needle"), NEEDLES)
def test_every_match_of_a_pattern_contains_its_needle(text: str, needle: Needle | None) -> None:
    assert needle_of(text) == needle


SEARCHED = [text for text, _ in NEEDLES] + ["(?i)sky", "(?i)kiss", "a.b", "^ab", "ab$", "<b>"]
# Letters that fold to plain ones, letters that JSON must or may escape, and pieces of what is searched for.
PARTS = st.sampled_from(
    [
        *'ab-x<>/"\\\n\u00fc\u212a\u017f',
        "foobar",
        "bar",
        "AKIA" + "Z" * 16,
        "123-45",
        "pass",
        "PASS",
        "yes",
        "abab",
        "abcd",
        "sKy",
        "k",
    ]
)


def escaped(text: str, escapes: list[bool]) -> str:
    """The same text as JSON, with any of its letters as escapes."""
    said = [
        f"\\u{ord(letter):04x}" if escape else json.dumps(letter)[1:-1]
        for letter, escape in zip(text, escapes, strict=False)
    ]
    return '"' + "".join(said) + json.dumps(text[len(said) :], ensure_ascii=False)[1:]


@given(
    st.lists(st.sampled_from(SEARCHED), min_size=1, max_size=3),
    st.lists(PARTS, max_size=6).map("".join),
    st.one_of(st.just([]), st.lists(st.booleans(), max_size=12)),
)
def test_looking_for_a_needle_first_changes_nothing(patterns: list[str], text: str, escapes: list[bool]) -> None:
    body = b'{"model":"m","input":%b}' % escaped(text, escapes).encode()
    assert json.loads(body)["input"] == text
    is_found = any(re.search(pattern, text) for pattern in patterns)
    assert isinstance(Patterns("p", patterns).check_prompt(body), Refuse) is is_found
    changed = Patterns("p", patterns, Action.REDACT, replacement="_").check_prompt(body)
    kept = text
    for pattern in patterns:
        kept = re.sub(pattern, "_", kept)
    assert json.loads(changed.body if isinstance(changed, Transformed) else body)["input"] == kept
