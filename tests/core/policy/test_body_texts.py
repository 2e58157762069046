"""What of a body can be looked at, text by text, and what is reported of the rest."""

import base64
import json
from typing import Any

import pytest

from tidegate.core.json_limits import NODES_MAX
from tidegate.core.policy import body_texts
from tidegate.core.policy.body_texts import FILE_CHARS_MIN, BodyTexts, is_api_word, readings

ELSEWHERE = "it refers to a file elsewhere"
STORED = "it refers to what is stored elsewhere"
FILE = "it has an image or another file"
TOKENS = "it has token ids in the place of a text"
TWICE = "a field is named twice"


def looked_at(body: Any, *, is_answer: bool = False) -> tuple[list[str], str]:
    found = BodyTexts(body if type(body) is bytes else json.dumps(body).encode(), is_answer=is_answer)
    return sorted(found.texts), found.unseen


def encoded(data: str | bytes) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


LONG = 123456
PICTURE = encoded(bytes(range(128, 256)))
LONG_TEXT = "long " * 120
TEXT_FILE = "a text in a file " * 40


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ([{"max_tokens": LONG, "card": LONG}], ["123456", "card"]),
        ("only a text", ["only a text"]),
        (LONG, ["123456"]),
        ({"model": "m", "messages": [{"role": "user", "content": "hi"}]}, ["hi"]),
        ({"model": {"odd": "m"}}, ["m", "odd"]),
        ({"messages": [{"model": "m"}]}, ["m"]),
        # Numbers: settings are none of a caller's words, others are from five digits on, and what a caller names is looked at whole.
        ({"seed": LONG, "top_k": LONG, "content": 1234, "text": 12345, "title": True}, ["12345"]),
        ({"logit_bias": [LONG], "value": [LONG, 12.5, True]}, ["123456"]),
        ({"arguments": {"seed": LONG}}, ["123456"]),
        ({"arguments": [{"seed": LONG}]}, ["123456"]),
        ({"arguments": {"items": [{"seed": LONG}]}}, ["123456"]),
        ({"arguments": {"items": {"seed": LONG}}}, ["123456"]),
        ({"arguments": [[{"seed": LONG}]]}, ["123456"]),
        ({"schema": [{"seed": LONG}], "format": {"seed": LONG}}, []),
        ({"metadata": {"seed": [LONG]}}, ["123456"]),
        ({"embedding": [0.25, LONG]}, []),
        ({"value": [12345.5, False, None], "text": False, "title": None}, ["12345.5"]),
        ({"value": [["deep"], [[LONG]]]}, ["123456", "deep"]),
        # A number that was rounded when it was read is looked at as it was written; others once.
        (b'{"value":1234567890123456789.0}', ["1.2345678901234568e+18", "1234567890123456789"]),
        (b'{"value":-1000000000000000.0}', ["-1000000000000000.0", "1000000000000000"]),
        (b'{"value":999999999999999.0,"text":"1234567890123456"}', ["1234567890123456", "999999999999999.0"]),
        ({"value": 1234567890123456}, ["1234567890123456"]),
        (b'{"value":123456789012345678901234}', ["123456789012345678901234"]),
        # Fixed words of the APIs are no texts where they belong.
        ({"type": "text", "text": "text", "role": "users"}, ["text", "users"]),
        ({"value": ["user"], "type": ["text", "texts"]}, ["texts", "user"]),
        ({"content": [LONG_TEXT], "text": " " + LONG_TEXT}, [" " + LONG_TEXT, LONG_TEXT]),
        # Parts that are read after one another, as far as they have one role and say something.
        ({"content": ["a", "b"]}, ["a", "a\nb", "ab", "b"]),
        ({"content": ["a", {"type": "image"}]}, ["a"]),
        ({"content": ["a"]}, ["a"]),
        ({"value": ["a", "b"]}, ["a", "b"]),
        ({"input": ["a", "b"]}, ["a", "b"]),
        ({"input": ["a", {"text": "b"}]}, ["a", "a\nb", "ab", "b"]),
        ({"content": [{"text": ["a", {"content": "b"}]}, "c"]}, ["a", "ab\nc", "abc", "b", "c"]),
        ({"content": [{"text": 1, "refusal": "a"}, "b"]}, ["a", "a\nb", "ab", "b"]),
        (
            {"messages": [{"role": role, "content": text} for role, text in zip("uuauu", "abcde", strict=True)]},
            ["a", "a\nb", "ab", "b", "c", "d", "d\ne", "de", "e", "u", "u", "a", "u", "u"],
        ),
        ({"messages": [{"role": role, "content": role} for role in ("user", "assistant", "user")]}, ["assistant", "user", "user"]),
        # A quote and a colon in a text are no name.
        ({"text": 'he wrote "x": y', "title": '"'}, ['"', 'he wrote "x": y']),
        # What a URL or a file holds itself, beside its own letters where they are few.
        ({"url": "data:,a%20b"}, ["a b", "data:,a%20b"]),
        ({"url": "data:," + LONG_TEXT}, ["data:," + LONG_TEXT, LONG_TEXT]),
        ({"url": " DATA:text/plain;charset=UTF-8,a%20b"}, [" DATA:text/plain;charset=UTF-8,a%20b", "a b"]),
        ({"image_url": "data:text/plain,x"}, ["data:text/plain,x", "x"]),
        ({"image_url": {"url": "\tData:text/plain,x"}}, ["\tData:text/plain,x", "x"]),
        ({"image_url": {"url": ""}, "audio_url": {}, "video_url": {"url": 5}, "file_id": ""}, ["", ""]),
        ({"file_ids": [], "prompt": [], "tokens": ["a"]}, ["a"]),
        ({"file_data": encoded("a plain text")}, sorted(["a plain text", encoded("a plain text")])),
        ({"data": encoded("a plain text"), "type": "text"}, [encoded("a plain text")]),
        ({"data": encoded("abc"), "type": "base64"}, [encoded("abc"), "abc"]),
        ({"data": encoded("abcdefg"), "type": "base64"}, [encoded("abcdefg"), "abcdefg"]),
        ({"data": PICTURE[:32]}, [PICTURE[:32]]),
        ({"data": "short"}, ["short"]),
        ({"value": encoded("a plain text")}, [encoded("a plain text")]),
        ({"file_data": encoded(TEXT_FILE)}, sorted([TEXT_FILE, encoded(TEXT_FILE)])),
        ({"data": encoded("subjects?>~~~").replace("/", "_").replace("+", "-")}, ["c3ViamVjdHM_Pn5-fg==", "subjects?>~~~"]),
    ],
)  # fmt: skip
def test_what_a_request_says_is_looked_at(body: Any, texts: list[str]) -> None:
    assert looked_at(body) == (sorted(texts), "")


@pytest.mark.parametrize(
    ("body", "unseen"),
    [
        ({"input": [1]}, TOKENS),
        ({"prompt": [[["a"], [7]]]}, TOKENS),
        ({"prompt": [True, 1.5, "a"]}, ""),
        ({"prompt": ["a", 1.0]}, TOKENS),
        ({"query": [1]}, TOKENS),
        ({"query": "a", "items": [[1]]}, TOKENS),
        ({"arguments": {"items": [1]}}, ""),
        ({"value": [1]}, ""),
        ({"file_ids": ["f"]}, STORED),
        ({"file_ids": [{"number": 7}]}, STORED),
        ({"previous_response_id": "r"}, STORED),
        ({"input": [1], "file_ids": ["f"], "image_url": "https://a.test", "file_data": PICTURE}, TOKENS),
        ({"file_ids": ["f"], "input": [1], "image_url": "https://a.test"}, STORED),
        ({"file_id": "f", "image_url": "https://a.test"}, STORED),
        ({"image_url": "https://a.test", "file_id": "f"}, ELSEWHERE),
        ({"image_url": "https://a.test", "file_data": PICTURE}, ELSEWHERE),
        ({"file_data": PICTURE, "image_url": "https://a.test", "input": [1]}, FILE),
        ({"image_url": ["https://a.test"]}, ELSEWHERE),
        ({"source": {"type": "url", "url": "file:///a"}}, ELSEWHERE),
        ({"source": {"url": "https://a.test"}, "url": "https://a.test"}, ""),
        ({"url": "data:image/png,x"}, FILE),
        ({"url": "data:text/plain;charset=utf-7,x"}, FILE),
        ({"url": 'data:text/plain;charset="utf-8",x'}, ""),
        ({"url": f"data:;base64,{encoded('a')}"}, ""),
        ({"url": f"data:text/plain;base64,{PICTURE}"}, FILE),
        ({"url": f"data:image/png;base64,{encoded('a')}"}, FILE),
        ({"url": f"data:text/plain;charset=utf-16;base64,{encoded('a')}"}, FILE),
        ({"data": PICTURE}, ""),
        ({"data": PICTURE, "format": "wav"}, FILE),
        ({"data": PICTURE, "filename": "x"}, FILE),
        ({"data": PICTURE, "media_type": "text/plain"}, FILE),
        ({"data": encoded("a plain text"), "media_type": "TEXT/plain"}, ""),
        ({"data": encoded("a plain text"), "media_type": "image/png"}, FILE),
        ({"data": encoded("a plain\0text"), "type": "base64"}, FILE),
        ({"data": "A" * (FILE_CHARS_MIN - 1)}, ""),
        ({"data": "A" * FILE_CHARS_MIN}, FILE),
        ({"b64_json": PICTURE}, FILE),
        # Readers of Base64 skip letters that are none of it, and no server asks these objects for their kind.
        ({"input_audio": {"data": f"!{PICTURE}", "format": "wav"}}, FILE),
        ({"input_audio": {"data": PICTURE, "format": "wav", "type": "text"}}, FILE),
        ({"file": {"file_data": f"!{PICTURE}"}}, FILE),
        ({"file": {"file_data": PICTURE, "type": "text"}}, FILE),
        ({"source": {"data": "a plain text", "media_type": "text/plain", "type": "text"}}, ""),
        ({"arguments": {"data": "a plain text", "format": "csv", "filename": "a"}}, ""),
        (b'{"text":"a","text":"b"}', TWICE),
        (b'{"model":"m","text":"a","text":"b"}', TWICE),
        (b'{"text" : "a", "text"\n:"b", "file_id":"f"}', STORED),
        (b'{"messages":[{"content":"a","content":"b\\":"}]}', TWICE),
    ],
)
def test_what_a_request_hides_is_named_by_the_first_that_was_met(body: Any, unseen: str) -> None:
    assert looked_at(body)[1] == unseen


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("text", {"type": "text", "data": "decoy"}),
        ("refusal", {"type": "refusal", "text": "decoy"}),
        ("thinking", {"type": "thinking", "text": "decoy", "content": "decoy"}),
        ("content", {"type": "tool_result", "text": "decoy"}),
    ],
)
@pytest.mark.parametrize("are_messages", [False, True])
def test_a_text_in_parts_is_put_together_whatever_else_the_parts_say(
    name: str, beside: dict[str, str], are_messages: bool
) -> None:
    parts: list[dict[str, Any]] = [{**beside, name: "sec"}, {**beside, name: "ret"}]
    if are_messages:
        parts = [{"role": "user", "content": [part]} for part in parts]
    texts, unseen = looked_at({"messages" if are_messages else "content": parts})
    assert "secret" in texts
    assert unseen == ""


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ("content", "value"),
        ("outputs", "logs"),
        ("reasoning_details", "text"),
        ("reasoning_details", "summary"),
        ("segments", "text"),
        ("words", "word"),
    ],
)
def test_parts_of_every_list_that_is_read_on_are_put_together(parts: str, name: str) -> None:
    assert "secret" in looked_at({parts: [{name: "sec"}, {name: "ret"}]}, is_answer=True)[0]


THINKING = {"type": "thinking", "thinking": "hm", "signature": "s"}
REASONING = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "content": []}


@pytest.mark.parametrize("thought", [THINKING, {"type": "redacted_thinking", "data": "hm"}, REASONING])
@pytest.mark.parametrize("is_answer", [False, True])
def test_texts_around_a_thought_meet_because_servers_drop_thoughts(thought: dict[str, Any], is_answer: bool) -> None:
    parts = [{"type": "text", "text": "sec"}, thought, {"type": "text", "text": "ret"}]
    assert "secret" in looked_at({"content": parts}, is_answer=is_answer)[0]


@pytest.mark.parametrize(
    "body",
    [
        {"input": [{"role": "user", "content": "sec"}, REASONING, {"role": "user", "content": "ret"}]},
        {"messages": [{"role": "assistant", "content": ["sec", THINKING]}, {"role": "assistant", "content": "ret"}]},
        {"messages": [{"role": "assistant", "content": [{"content": ["sec", THINKING]}, "ret"]}]},
    ],
)
def test_texts_of_neighbours_around_a_thought_meet(body: dict[str, Any]) -> None:
    texts, unseen = looked_at(body)
    assert ("secret" in texts, unseen) == (True, "")
    assert "hm" in texts


def test_what_has_too_many_values_is_one_text() -> None:
    body = b'{"text":"secret","odd":[' + b"{}," * NODES_MAX + b"{}]}"
    assert looked_at(body) == ([body.decode()], "it has too many values")


def test_half_a_character_is_not_seen() -> None:
    assert "secret" in list(readings("sec\ud800ret"))


def test_the_letters_of_a_long_file_that_is_no_text_are_not_looked_at() -> None:
    picture = encoded(bytes(range(128, 256)) * 3)
    assert len(picture) == FILE_CHARS_MIN
    assert looked_at({"file_data": picture, "url": f"data:image/png;base64,{picture}"}) == ([], FILE)
    assert looked_at({"file_data": PICTURE}) == ([PICTURE], FILE)


def test_what_is_no_json_is_one_text_and_a_field_named_twice_shows_all() -> None:
    why = "it is not JSON, or nested too deeply"
    assert looked_at(b'{"a": secret \xff') == (['{"a": secret \ufffd'], why)
    deep = b"[" * 100_000 + b"]" * 100_000
    assert looked_at(deep) == ([deep.decode()], why)
    assert looked_at(b'{"text":"\\u0061\\n\xff","text":"b"}') == (
        sorted(["b", "text", "text", "a\n\ufffd", "b"]),
        TWICE,
    )


@pytest.mark.parametrize(
    ("answer", "texts", "unseen"),
    [
        ({"id": "i", "object": "o", "created": LONG, "model": "m", "usage": {"a": {"b": [{"c": LONG}]}}}, [], ""),
        ({"id": "i", "text": 'a": b'}, ['a": b'], ""),
        ({"choices": [{"id": "i", "created": LONG}]}, ["i"], ""),
        ({"data": [{"object": "embedding", "embedding": [0.123456, LONG]}]}, [], ""),
        ({"data": [{"embedding": [LONG, "hidden"]}]}, ["hidden"], ""),
        ({"content": [{"input": {"embedding": [LONG]}}]}, ["123456"], ""),
        ({"content": [LONG, 1]}, ["123456"], ""),
        ({"input": [1], "image_url": "https://a.test", "source": {"type": "url", "url": "https://a.test"}},
         ["https://a.test", "https://a.test"], ""),
        ({"file_id": "f"}, ["f"], STORED),
        (b'{"usage":{"a":1,"a":2},"text":"b"}', ["usage", "a", "a", "text", "b", "b"], TWICE),
    ],
)  # fmt: skip
def test_what_a_server_says_about_its_answer_is_no_text_of_the_model(
    answer: Any, texts: list[str], unseen: str
) -> None:
    assert looked_at(answer, is_answer=True) == (sorted(texts), unseen)


@pytest.mark.parametrize(
    ("name", "text", "in_request", "in_answer"),
    [
        ("model", "anything", True, True),
        ("role", "user", True, True),
        ("role", "secret", False, False),
        ("content", "user", False, False),
        ("id", "secret", False, True),
        ("usage", "secret", False, True),
        ("", "user", False, False),
    ],
)
def test_no_guardrail_changes_a_word_of_the_api(name: str, text: str, in_request: bool, in_answer: bool) -> None:
    assert is_api_word(name, text, is_answer=False) is in_request
    assert is_api_word(name, text, is_answer=True) is in_answer


@pytest.mark.parametrize(
    ("text", "others"),
    [
        ("plain", []),
        ("a\\b", ["a\b", "a"]),
        ("\\q", []),
        ("\\u0041\\x42\\n\\/\\\"", ["AB\n/\""]),
        ("\\\\u0041", ["\\u0041", "A"]),
        ("\\" * 32 + "x41", ["\\" * 16 + "x41", "\\" * 8 + "x41", "\\" * 4 + "x41", "\\\\x41", "A"]),
        ("\\ud835\\udc00", ["\U0001d400", "A"]),
        ("a\tb\r\nc\0\x7f", ["a\tb\r\nc"]),
        ("u\u0308" * 200, ["ü" * 200]),
        ("größe", []),
        ("ﬁne", ["fine"]),
        ("a\u200bb", ["ab"]),
        ("\\uFB01x \ufb01", ["\ufb01x \ufb01", "\\uFB01x fi", "fix fi"]),
        ("\U000e0041\U000e007e\U000e0020\U000e007f", ["A~ "]),
        ("x" * 16_384 + "\ufb01", ["x" * 16_384 + "fi"]),
    ],
)  # fmt: skip
def test_a_text_is_read_in_every_form_in_which_it_may_be_meant(text: str, others: list[str]) -> None:
    assert list(readings(text)) == [text, *others]


@pytest.mark.parametrize("levels", [3, 40])
def test_parts_without_a_text_are_not_read_for_ever(levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each list within a list reads all parts once more, and parts without a text join to nothing."""
    monkeypatch.setattr(body_texts, "JOINED_PARTS_MAX", 2_000)
    part: Any = {"content": [{"type": "text", "text": ""}] * 100}
    for _ in range(levels):
        part = {"content": [part, {"type": "text", "text": "secret"}]}
    texts, unseen = looked_at({"messages": [part]})
    assert unseen == ("" if levels == 3 else "its parts lie too deeply within one another")
    assert texts.count("secret") == levels


@pytest.mark.parametrize(("levels", "is_looked_at"), [(3, True), (8, False)])
def test_parts_that_lie_too_deeply_within_one_another_are_not_joined_for_ever(levels: int, is_looked_at: bool) -> None:
    """Each list repeats the text of all lists in it."""
    part: Any = "a long text " * 1_000
    for _ in range(levels):
        part = {"content": [part, "more"]}
    texts, unseen = looked_at({"messages": [part]})
    assert (unseen == "") is is_looked_at
    assert sum(map(len, texts)) < 20 * len(json.dumps(part))
