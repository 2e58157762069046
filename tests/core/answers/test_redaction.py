"""Our key and the provider's account in what a model server says."""

from __future__ import annotations

import json

import pytest

from tidegate.core.answers.redaction import KeyRedactor, StreamRedactor, without_account

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
    texts = [key, key[:5] + key, key + key, key[:-1], key.replace("/", "\\/"), "x" + key[:3]]
    body = json.dumps({"said": texts}).encode() + key[:4].encode()
    whole = redactor.whole(body)
    assert key.encode() not in whole
    assert key[:-1].encode() in whole, "what is not the key stays"
    for size in range(1, len(body)):
        stream = StreamRedactor(redactor)
        pieces = [stream.feed(body[at : at + size]) for at in range(0, len(body), size)]
        assert b"".join(pieces) + stream.end() == whole


@pytest.mark.parametrize("key", ["", "EMPTY", "none", "not-needed", "x1"])
def test_a_placeholder_is_no_secret(key: str) -> None:
    assert not KeyRedactor(key)
    assert KeyRedactor(key).whole(b"EMPTY none not-needed x1") == b"EMPTY none not-needed x1"
