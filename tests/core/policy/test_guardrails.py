"""The built-in guardrails: what passes, what is changed and how little, what is refused, and what must not pass by."""

import base64
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.errors import SettingsError
from tidegate.core.policy.body_texts import BodyTexts
from tidegate.core.policy.guardrails import (
    PASS,
    Action,
    AnswerShape,
    GuardrailRefusal,
    Length,
    Patterns,
    Transformed,
    Unseen,
    answer_texts,
)


def packed(value: Any) -> bytes:
    return json.dumps(value).encode()


def chat(text: str) -> bytes:
    return packed({"model": "m", "messages": [{"role": "user", "content": text}]})


def test_length_counts_bytes_and_tokens() -> None:
    rail = Length(prompt_bytes_max=100, prompt_tokens_max=20, answer_bytes_max=10)
    assert rail.check_prompt(b"x" * 80) is PASS
    for body in (b"x" * 81, b"x" * 101):
        verdict = rail.check_prompt(body)
        assert isinstance(verdict, GuardrailRefusal)
        assert verdict.code == "guardrail_length"
    assert rail.check_answer(b"x" * 10) is PASS
    assert isinstance(rail.check_answer(b"x" * 11), GuardrailRefusal)
    assert Length().check_prompt(b"x" * 10**6) is PASS
    assert Length(prompt_bytes_max=100).check_prompt(b"x" * 100) is PASS
    assert isinstance(Length(prompt_bytes_max=100).check_prompt(b"x" * 101), GuardrailRefusal)
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
        assert isinstance(verdict, GuardrailRefusal)
        assert verdict.code == "guardrail_pattern"
        assert "secret" not in verdict.message.lower()


def test_words_of_the_api_are_no_texts() -> None:
    rail = Patterns("words", ["user", "text", "assistant", "stop", "messages"])
    body = packed(
        {
            "model": "text-1",
            "messages": [{"role": "user", "content": [{"type": "text", "content": "hello"}]}],
        }
    )
    assert rail.check_prompt(body) is PASS
    answer = {"id": "stop-1", "choices": [{"finish_reason": "stop", "message": {"role": "assistant"}}]}
    assert rail.check_answer(packed(answer)) is PASS
    for hidden in ({"role": "user text"}, {"type": "assistant!"}, {"nonstop": 1}, {"finish_reason": "stop it"}):
        assert isinstance(rail.check_prompt(packed({**hidden})), GuardrailRefusal)


KEY = "AKIA" + "Q" * 16


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def content(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


HIDDEN: list[Any] = [
    content({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": KEY}}),
    content({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": KEY}]}}),
    content({"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": encoded(KEY)}}),
    content({"type": "document", "title": KEY, "source": {"type": "text", "data": "x"}}),
    content({"type": "text", "text": KEY[:2]}, {"type": "text", "text": KEY[2:]}),
    content({"type": "text", "text": KEY[:9], "id": "x"}, KEY[9:]),
    content({"type": "input_text", "text": KEY[:3]}, {"type": "input_text", "text": KEY[3:]}),
    content({"type": "tool_result", "content": [{"text": KEY[:3]}, {"text": KEY[3:]}]}),
    content({"type": "image_url", "image_url": {"url": f"data:text/plain,{KEY}"}}),
    content({"type": "image_url", "image_url": {"url": f"data:text/plain;base64,{encoded(KEY)}"}}),
    content({"type": "image_url", "image_url": {"url": f"DATA:image/png;base64,{encoded(KEY)}"}}),
    content({"type": "file", "file": {"file_data": f"data:application/json;base64,{encoded(KEY)}"}}),
    {"messages": [{"role": "user", "content": KEY[:5]}, {"role": "user", "content": KEY[5:]}]},
    {"messages": [{"role": "user", "type": KEY}]},
    {"messages": [{"role": KEY, "content": "x"}]},
    {"messages": [{"id": KEY, "data": "x"}]},
    {"messages": [{"data": KEY}]},
    {"messages": [{"model": KEY}]},
    {"metadata": {KEY: "x"}},
    {"tools": [{"function": {"parameters": {"type": "object", "properties": {KEY: {"type": "string"}}}}}]},
    {"tools": [{"function": {"name": KEY}}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": json.dumps({"k": KEY})}}]}]},
    {"messages": [{"tool_calls": [{"function": {"arguments": '{"k": "\\u0041KIA' + KEY[4:] + '"}'}}]}]},
    {"messages": [{"tool_calls": [{"function": {"arguments": json.dumps(json.dumps("\\u0041" + KEY[1:]))}}]}]},
    {"system": [{"type": "text", "text": KEY[:6]}, {"type": "text", "text": KEY[6:]}]},
    {"input": [KEY, "x"]},
    {"input": {"embedding": [KEY]}},
    {"messages": [{"content": [{"type": "tool_use", "input": {"embedding": [KEY], "id": "x"}}]}]},
    {"messages": [{"content": [{"type": "tool_use", "input": {"data": encoded(KEY)}}]}]},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": KEY}]}]},
    {"query": "x", "documents": [{"text": KEY}]},
    {"text_1": "x", "text_2": [KEY]},
    {"prompt": KEY},
    {"suffix": KEY},
    {"stop": [KEY]},
    {"user": KEY},
    {"messages": [{"role": "user", "content": "ＡＫＩＡ" + KEY[4:]}]},
    {"messages": [{"role": "user", "content": "A\u200bK\u2060I\ufeffA" + KEY[4:]}]},
    {"messages": [{"role": "user", "content": "".join(chr(0xE0000 + ord(letter)) for letter in KEY)}]},
    # JSON within a string writes such letters as two halves.
    {"messages": [{"tool_calls": [{"function": {"arguments": json.dumps({"k": "\U0001d400" + KEY[1:]})}}]}]},
    {"messages": [{"role": "user", "content": json.dumps("".join(chr(0xE0000 + ord(letter)) for letter in KEY))}]},
    {"messages": [{"role": "user", "content": "\\" * 64 + "u0041" + KEY[1:]}]},
    *({"messages": [{"role": "user", "content": f"say A{nothing}KIA{KEY[4:]}"}]} for nothing in "\0\b\f\x1f\x7f\x80\ufff9\u2800\U00013430"),
    {"messages": [{"role": "user", "content": "foo"}, {"role": "assistant", "content": json.dumps(f"A\0KIA{KEY[4:]}")}]},
    content({"type": "file", "file": {"file_data": f"\1data:text/plain;base64,{encoded(KEY)}"}}),
    content({"type": "file", "file": {"file_data": f"da\nta:text/pl\tain;base64,{encoded(KEY)}"}}),
    content({"type": "file", "file": {"file_data": f"data:text/plain;name=a b;base64,{encoded(KEY)}"}}),
    content({"type": "file", "file": {"file_data": f"data:text/plain;name=a b,{KEY.replace('A', '%41')}"}}),
    content({"type": "file", "file": {"file_data": f"{encoded(KEY)[:7]} {encoded(KEY)[7:]}"}}),
    {"prompt": f"data:text/plain;name=a b;base64,{encoded(KEY)}"},
    content({"type": "document", "source": {"type": "text", "data": KEY[:6]}}, {"type": "text", "text": KEY[6:]}),
    content(
        {"type": "document", "source": {"type": "content", "content": KEY[:6]}},
        {"type": "document", "source": {"type": "text", "data": KEY[6:]}},
    ),
    {"input": [{"type": "function_call_output", "output": KEY[:6]}, {"type": "function_call_output", "output": KEY[6:]}]},
    {"messages": [{"role": "user", "text": "", "content": KEY[:6]}, {"role": "User", "text": "", "content": KEY[6:]}]},
    {"messages": [{"role": "system", "content": KEY[:6]}, {"role": "developer", "content": KEY[6:]}]},
]  # fmt: skip


@pytest.mark.parametrize("body", HIDDEN)
@pytest.mark.parametrize("unseen", list(Unseen))
def test_nothing_passes_by_in_another_place_or_shape(body: Any, unseen: Unseen) -> None:
    """Neither in a request nor in an answer; `deny` refuses it, and `redact` takes it away or refuses it."""
    for action in Action:
        rail = Patterns("keys", ["AKIA[0-9A-Z]{16}"], action, unseen=unseen)
        for check in (rail.check_prompt, rail.check_answer):
            if check == rail.check_answer and ("user" in body or "model" in str(body)):
                continue
            verdict = check(packed({"model": "m", **body}))
            if isinstance(verdict, Transformed):
                assert action is Action.REDACT
                assert check(verdict.body) is PASS
            else:
                assert isinstance(verdict, GuardrailRefusal)
                assert verdict.code == "guardrail_pattern"


CANNOT_BE_SEEN: list[Any] = [
    {"prompt": [1, 2, 3]},
    {"prompt": [[1, 2], [3]]},
    {"input": [15339, 1917]},
    {"prompt_token_ids": [5]},
    {"prompt_embeds": base64.b64encode(bytes(range(128, 240))).decode()},
    content({"type": "image_url", "image_url": {"url": "https://example.test/a.png"}}),
    content({"type": "input_image", "image_url": "https://example.test/a.png"}),
    content({"type": "image", "source": {"type": "url", "url": "https://example.test/a.png"}}),
    content({"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUg=="}}),
    content({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}),
    content({"type": "input_audio", "input_audio": {"data": "UklGRv///38AAAAAV0FWRQ==", "format": "wav"}}),
    content({"type": "file", "file": {"file_id": "file-1"}}),
    content({"type": "image_url", "image_url": {"url": "data:text/plain;charset=utf-7,+AEEASwBJAEE-"}}),
    content({"type": "image_url", "image_url": {"url": f"data:text/plain;base64,{base64.b64encode(b'A' + bytes(20)).decode()}"}}),
    {"previous_response_id": "resp_1", "input": "x"},
    # Files that are written in ASCII alone and are no plain text.
    content({"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:;base64,{encoded('%PDF-1.4 <414B4941> Tj')}"}}),
    content({"type": "file", "file": {"filename": "a.rtf", "file_data": encoded("{\\rtf1 \\'41\\'4b}")}}),
    content({"type": "image_url", "image_url": {"url": "\1https://example.test/a.png"}}),
]  # fmt: skip


@pytest.mark.parametrize("body", CANNOT_BE_SEEN)
def test_what_cannot_be_looked_at_is_refused_unless_the_operator_lets_it_pass(body: Any) -> None:
    request = packed({"model": "m", **body})
    for action in Action:
        verdict = Patterns("keys", ["AKIA[0-9A-Z]{16}"], action).check_prompt(request)
        assert isinstance(verdict, GuardrailRefusal)
        assert verdict.code == "guardrail_unseen"
        assert Patterns("keys", ["AKIA[0-9A-Z]{16}"], action, unseen=Unseen.PASS).check_prompt(request) is PASS


def test_a_field_named_twice_hides_nothing() -> None:
    body = b'{"messages":[{"content":"%b","content":"x"}]}'
    rail = Patterns("keys", ["AKIA[0-9A-Z]{16}"], unseen=Unseen.PASS)
    verdict = rail.check_prompt(body % KEY.encode())
    assert isinstance(verdict, GuardrailRefusal)
    assert verdict.code == "guardrail_pattern"
    verdict = Patterns("keys", ["AKIA[0-9A-Z]{16}"]).check_prompt(body % b"y")
    assert isinstance(verdict, GuardrailRefusal)
    assert verdict.code == "guardrail_unseen"


def test_long_numbers_are_texts_and_settings_are_not() -> None:
    rail = Patterns("cards", [r"\b\d{10,16}\b"])
    assert isinstance(
        rail.check_prompt(packed({"messages": [{"content": {"card": 4111111111111111}}]})), GuardrailRefusal
    )
    assert isinstance(rail.check_prompt(b'{"messages":[{"content":4111111111111111}]}'), GuardrailRefusal)
    call = {"type": "tool_use", "input": {"seed": 4111111111111111, "embedding": [4111111111111111]}}
    assert isinstance(rail.check_prompt(packed({"messages": [{"content": [call]}]})), GuardrailRefusal)
    assert isinstance(rail.check_answer(packed({"content": [call]})), GuardrailRefusal)
    assert rail.check_prompt(packed({"seed": 4111111111111111, "max_tokens": 100})) is PASS
    long = Patterns("long", ["123456789012345678901234567890"])
    assert isinstance(long.check_prompt(b'{"messages":[{"content":123456789012345678901234567890}]}'), GuardrailRefusal)
    assert rail.check_answer(packed({"created": 1731700000, "choices": [{"index": 0, "message": {}}]})) is PASS


def test_a_letter_may_carry_marks_wherever_a_text_is_cut() -> None:
    rail = Patterns("names", ["Müller", "\uac01"])
    for before in range(250, 260):
        for name in ("Mu\u0308ller", "\u1100\u1161\u11a8"):
            body = packed({"prompt": "x" * before + name})
            assert isinstance(rail.check_prompt(body), GuardrailRefusal), (before, name)


def test_parts_that_lie_too_deeply_within_one_another_are_not_joined_again_and_again() -> None:
    """Each level would add the whole text twice more."""
    parts: list[Any] = [{"type": "text", "text": "x" * 5_000}, "y"]
    for _ in range(20):
        parts = [{"type": "tool_result", "content": parts}, "y"]
    body = packed(content(*parts))
    assert sum(map(len, BodyTexts(body, is_answer=False).texts)) < 10 * len(body)
    verdict = Patterns("keys", ["AKIA[0-9A-Z]{16}"]).check_prompt(body)
    assert isinstance(verdict, GuardrailRefusal)
    assert verdict.code == "guardrail_unseen"


def test_harmless_calls_pass() -> None:
    """With tools, parts, several turns and answers of every kind, under patterns that find nothing in them."""
    rail = Patterns("keys", ["AKIA[0-9A-Z]{16}", r"(?i)\bsecret\b", r"\b\d{3}-\d{2}-\d{4}\b"])
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
    for body in (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": [tool]},
        content({"type": "text", "text": "one"}, {"type": "text", "text": "two"}),
        {"input": ["a", "b"], "encoding_format": "float"},
        {"prompt": ["a", "b"], "logit_bias": {"50256": -100}, "stop": ["x"]},
        {"messages": [{"role": "user", "content": "größer als 5 – naïve"}]},
        {"messages": [{"role": "user", "content": "data: these are figures, and more"}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "input": {"data": "customer_1234567890ab"}}]}]},
        {"input": ["SSN 123-45", "-6789"]},
    ):
        assert rail.check_prompt(packed({"model": "m", **body})) is PASS
    for answer in (
        {"id": "x", "object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.1, 0.2]}], "usage": {"n": 1}},
        {"choices": [{"index": 0, "logprobs": {"content": [{"token": "a", "logprob": -0.1, "bytes": [97]}]}}]},
        {"content": [{"type": "text", "text": "x"}], "stop_reason": "end_turn"},
    ):  # fmt: skip
        assert rail.check_answer(packed(answer)) is PASS


def test_a_word_that_comes_in_tokens_is_found() -> None:
    rail = Patterns("words", ["secret"], Action.REDACT)
    tokens = [{"token": "sec", "logprob": -0.1}, {"token": "ret", "logprob": -0.2}]
    answer = {"choices": [{"message": {"content": "a secret"}, "logprobs": {"content": tokens}}]}
    verdict = rail.check_answer(packed(answer))
    assert isinstance(verdict, GuardrailRefusal), "the text could be replaced, but its tokens would tell it"


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


def test_redaction_leaves_words_of_the_api_alone() -> None:
    rail = Patterns("words", ["secret"], Action.REDACT, replacement="x")
    text = b'{"model":"secret-1","messages":[{"id":"%b","content":["%b"]}],"stop":"%b"}'
    assert rail.check_prompt(text % ((b"secret",) * 3)) == Transformed(text % ((b"x",) * 3))
    spaced = b'{ "object" : "secret", "id"\n:\t"secret" ,"choices" : [ {"text" : "%b"} ]}'
    assert rail.check_answer(spaced % b"a secret") == Transformed(spaced % b"a x")
    # What a model says in a field of that name is no word of the API: it cannot be replaced, so it does not pass.
    assert isinstance(rail.check_answer(b'{"choices":[{"id":"secret"}]}'), GuardrailRefusal)


def test_what_is_quick_depends_on_the_body_and_on_the_patterns() -> None:
    light, heavy = Patterns("light", ["x"]), Patterns("heavy", [r"x\w{900}"])
    assert (light.is_quick(b"x" * 16_000), light.is_quick(b"x" * 16_001)) == (True, False)
    assert (heavy.is_quick(b"x" * 1_000), heavy.is_quick(b"x" * 2_000)) == (True, False)


def test_a_text_too_long_to_look_at_is_refused_and_not_left_unseen() -> None:
    for action in Action:
        rail = Patterns("words", ["x"], action, replacement="", text_chars_max=100)
        for text in ("y" * 101, "x" * 101):
            verdict = rail.check_prompt(chat(text))
            assert isinstance(verdict, GuardrailRefusal), "nor is it made shorter and let pass"
            assert verdict.code == "guardrail_length"
        assert rail.check_prompt(chat("y" * 100)) is PASS


@given(st.text(max_size=60), st.sampled_from(["a", "[0-9]+", "é", '"', r"\\\\"]))
def test_a_redacted_text_is_what_the_pattern_says(text: str, pattern: str) -> None:
    rail = Patterns("p", [pattern], Action.REDACT, replacement="#")
    body = chat(text)
    verdict = rail.check_prompt(body)
    plain = text.encode("utf-8", "replace").decode()
    want = re.sub(pattern, "#", plain)
    if isinstance(verdict, GuardrailRefusal):
        # It is still there when the text is read in another way.
        assert "\\" in text or not text.isascii()
        return
    got = json.loads(verdict.body if isinstance(verdict, Transformed) else body)
    assert got == {"model": "m", "messages": [{"role": "user", "content": want if verdict is not PASS else text}]}


def test_half_a_character_hides_nothing() -> None:
    assert isinstance(Patterns("p", ["secret"]).check_prompt(b'{"input":"\\ud800 secret"}'), GuardrailRefusal)
    got = Patterns("p", ["secret"], Action.REDACT).check_prompt(b'{"input":"\\ud800 secret"}')
    assert isinstance(got, Transformed)
    assert json.loads(got.body)["input"] == "\\ud800 [redacted]", "it is written as it was read"
    got = Patterns("p", ["secret"], Action.REDACT).check_prompt(b'["secret\\ud800x"]')
    assert got == Transformed(b'["[redacted]\\\\ud800x"]')


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


def test_a_guardrail_without_sense_is_refused_by_name() -> None:
    for make in (
        lambda: Patterns("empty", []),
        lambda: Patterns("empty", ["a"], text_chars_max=0),
        lambda: Patterns("empty", ["a*"]),
        lambda: Length(answer_bytes_max=-1),
        lambda: AnswerShape("empty", {"surprise": 1}),
    ):
        with pytest.raises(SettingsError, match=r"guardrail ('empty'|length)"):
            make()
    assert Patterns("one", ["a"], text_chars_max=1).check_prompt(b'["b"]') is PASS


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
        ({"content": ["a", {"type": "thinking", "text": "so"}, {"type": "text", "text": '{"name":1}'}]}, True),
        ({"content": [{"type": "tool_use", "input": {}}]}, True),
        ({"output": [{"type": "message", "content": [{"type": "output_text", "text": '{"name":1}'}]}]}, True),
        ({"output": [{"type": "message", "content": [{"type": "output_text", "text": "{}"}]}]}, False),
    ],
)
def test_the_text_of_an_answer_fits_its_schema(answer: dict[str, Any], passes: bool) -> None:
    verdict = SHAPE.check_answer(packed(answer))
    assert (verdict is PASS) is passes
    if isinstance(verdict, GuardrailRefusal):
        assert verdict.code == "guardrail_schema"
    assert SHAPE.check_prompt(packed(answer)) is PASS


@pytest.mark.parametrize(
    "nothing",
    [None, [], {}, {"choices": {}}, {"choices": [5]}, {"output": [7, {"type": "message", "content": 5}]}],
)
def test_what_is_no_answer_has_no_texts(nothing: Any) -> None:
    assert [text for text in answer_texts(nothing) if text] == []
    assert isinstance(SHAPE.check_answer(b"{"), GuardrailRefusal)
