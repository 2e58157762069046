"""Our key and the provider's account in what a model server says."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.answers.redaction import LINE_BYTES_MAX, EventRedactor, KeyRedactor, StreamRedactor, without_account

UUID = "1f0c2d3e-1111-2222-3333-444455556666"


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("Rate limit reached for gpt-4o in organization org-AbC123dEf456 on tokens per min", "in organization org-*** on"),
        ("in organization `org_01abcdefgh` service tier", "in organization `org_***` service"),
        (f"would exceed the rate limit for your organization ({UUID}) of 40,000 input tokens", "organization (***) of 40,000"),
        (f'{{"organization_id": "{UUID}"}}', '"organization_id": "***"'),
        ("for project proj_AbC123dEf456.", "for project proj_***."),
        ('{"project_number": 1234567890}', '"project_number": 0'),
        ("Quota exceeded for projects/1234567890", "projects/0"),
        ("User: arn:aws:iam::123456789012:user/x is not authorized", "arn:aws:iam::0:user/x"),
    ],
)  # fmt: skip
def test_the_account_is_not_named(words: str, left: str) -> None:
    assert left in without_account(words.encode()).decode()


@pytest.mark.parametrize(
    "words",
    [
        "user_message must be a text, and the org-wide limit is 5",
        f'{{"request_id": "{UUID}", "max_tokens": 1234567}}',
        "this project has 12 files and an account",
    ],
)
def test_other_words_stay(words: str) -> None:
    assert without_account(words.encode()).decode() == words


@pytest.mark.parametrize("key", ["sk-canary-7f3a", "aaab1aaab1aaab2", "Zm9v/YmFy+123=", "a" * 16])
def test_a_key_is_found_wherever_a_body_is_cut(key: str) -> None:
    redactor = KeyRedactor(key)
    texts = [key, key[:5] + key, key[0] + key, key + key, key[:-1], key.replace("/", "\\/"), "x" + key[:3]]
    body = json.dumps({"texts": texts}).encode() + key[:4].encode()
    whole = redactor.whole(body)
    assert key.encode() not in whole
    assert key[:-1].encode() in whole, "what is not the key stays"
    for size in range(1, len(body)):
        stream = StreamRedactor(redactor)
        pieces = [stream.feed(body[at : at + size]) for at in range(0, len(body), size)]
        assert b"".join(pieces) + stream.end_stream() == whole


@pytest.mark.parametrize("written", ["Zm9v/YmFy+123=", "Zm9v\\/YmFy+123=", "Zm9v%2FYmFy%2B123%3D"])
def test_a_key_is_found_as_json_and_urls_write_it(written: str) -> None:
    assert KeyRedactor("Zm9v/YmFy+123=").whole(f'{{"at": "{written}"}}'.encode()) == b'{"at": "***"}'


def test_what_cannot_be_the_beginning_of_a_key_is_passed_on_at_once() -> None:
    stream = StreamRedactor(KeyRedactor("sk-canary-7f3a"))
    for piece in (b"data: 1\n\n", b"", b"any", b"is", b" not\n"):
        assert stream.feed(piece) == (b"i" if piece == b"is" else b"s not\n" if piece == b" not\n" else piece)


@pytest.mark.parametrize("key", ["", "EMPTY", "none", "not-needed", "x1"])
def test_a_placeholder_is_no_secret(key: str) -> None:
    assert not KeyRedactor(key)
    assert KeyRedactor(key).whole(b"EMPTY none not-needed x1") == b"EMPTY none not-needed x1"


KEY = "sk-canary-7f3a9c"


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"


def passed(body: bytes, size: int, key: str = KEY) -> bytes:
    """Return what a client gets of these events when they come in pieces of this size."""
    redactor = EventRedactor(KeyRedactor(key))
    pieces = [redactor.feed(body[at : at + size]) for at in range(0, len(body), size)]
    return b"".join(pieces) + redactor.end_stream()


def text_of(events: bytes) -> str:
    lines = [json.loads(line[6:]) for line in events.splitlines() if line.startswith(b"data: ")]
    return "".join(line["choices"][0]["delta"]["content"] for line in lines)


@pytest.mark.parametrize("size", [1, 11, 1_000])
@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["it is ", "sk-", "can", "ary-7", "f3a9c", ", ok"], "it is sk-***, ok"),
        (list(f"it is {KEY}, or sk-canary-8"), "it is sk-ca***, or sk-canary-8"),
        (["sk-canary-", KEY[:-1], "c"], "sk-canary-***"),
        (["sk-canary-", "7f3a9c sk-canary-7", "f3a9c"], "*** ***"),
        (["so", "me words", " sk-canary-7f3a9"], "some words sk-canary-7f3a9"),
        (["it i", "s", "k-canary-7f3a9c", " it is"], "it is*** it is"),
    ],
)
def test_a_key_that_several_events_spell_is_not_passed_on(size: int, texts: list[str], shown: str) -> None:
    body = b"".join(map(event, texts))
    found = passed(body, size)
    assert text_of(found) == shown
    assert found.count(b"data: ") == found.count(b"}\n\n") == len(texts), "every event is passed on, in order"


@pytest.mark.parametrize("size", [1, 11, 1_000])
@pytest.mark.parametrize("key", [KEY, ""])
def test_an_error_event_does_not_name_the_account(size: int, key: str) -> None:
    words = b"limit of organization org-AbC123dEf456"
    chat = b'data: {"error": {"message": "%b"}}\n\n' % words
    anthropic = b'event: error\ndata: {"type":"error","error":{"type":"x","message":"%b"}}\n\n' % words
    response = b'data: {"type":"error","code":"x","message":"%b"}\r\n\r\n' % words
    for one in (chat, anthropic, response):
        found = passed(event("a") + one, size, key)
        assert found == event("a") + one.replace(b"AbC123dEf456", b"***")


@given(st.lists(st.text(alphabet='sk-can7 \n"é', max_size=6)), st.integers(1, 50))
def test_other_events_are_passed_on_as_they_are(texts: list[str], size: int) -> None:
    body = b": ping\n\n" + b"".join(map(event, texts)) + b"data: [DONE]"
    assert passed(body, size) == body


def test_an_answer_may_name_accounts_beside_a_field_for_errors() -> None:
    body = b'data: {"error":null,"choices":[{"delta":{"content":"organization org-AbC123dEf456"}}]}\n\n'
    assert passed(body, 1_000) == body


def test_a_line_that_never_ends_is_passed_on_when_it_is_as_long_as_may_be() -> None:
    redactor = EventRedactor(KeyRedactor(KEY))
    assert redactor.feed(b"x" * (LINE_BYTES_MAX - 1)) == b""
    assert redactor.feed(b"y") == b"x" * (LINE_BYTES_MAX - 1) + b"y"
    assert redactor.feed(b"z\n") == b"z\n"
