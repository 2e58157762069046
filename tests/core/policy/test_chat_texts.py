"""An ordinary chat is read with one decode, and what is found is what the walk over all its values finds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.policy.body_texts import BodyTexts
from tidegate.core.policy.chat_texts import chat_texts

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Describe a tide."}]
REQUEST = {"model": "m", "messages": TURNS, "max_tokens": 100_000, "temperature": 0.123456, "seed": 1_234_567}
# As vLLM sends it.
MESSAGE: dict[str, Any] = {
    "role": "assistant",
    "content": "It rises.",
    "refusal": None,
    "annotations": None,
    "tool_calls": [],
}
CHOICE = {"index": 0, "message": MESSAGE, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1_800_000_000,
    "model": "m",
    "choices": [CHOICE],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}},
    "prompt_logprobs": None,
    "kv_transfer_params": None,
}


def written(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("body", "is_answer", "texts"),
    [
        (REQUEST, False, ["Be brief.", "Describe a tide."]),
        (ANSWER, True, ["It rises."]),
        ({**ANSWER, "choices": [CHOICE, CHOICE]}, True, ["It rises.", "It rises."]),
        ({**REQUEST, "messages": [{"role": "user", "content": 'say {"a": 1}'}]}, False, ['say {"a": 1}']),
        ({**REQUEST, "messages": [{"role": "user", "content": '\\ "a": 1'}]}, False, ['\\ "a": 1']),
    ],
    ids=["a request", "an answer", "two choices", "JSON in a text", "a backslash in a text"],
)
def test_an_ordinary_chat_is_read_with_one_decode(body: Any, is_answer: bool, texts: list[str]) -> None:
    assert chat_texts(written(body), is_answer=is_answer) == texts


@pytest.mark.parametrize(
    ("body", "is_answer"),
    [
        (REQUEST, True),
        (ANSWER, False),
        ({**REQUEST, "tools": []}, False),
        ({**REQUEST, "user": "someone"}, False),
        ({**REQUEST, "messages": [*TURNS, TURNS[1]]}, False),
        ({**REQUEST, "messages": [{"role": "developer", "content": "x"}, *TURNS]}, False),
        ({**REQUEST, "messages": [{"role": "poet", "content": "x"}]}, False),
        ({**REQUEST, "messages": [{"role": "user", "content": " data:text/plain,x"}]}, False),
        ({**REQUEST, "messages": [{"role": "user", "content": ["x"]}]}, False),
        ({**ANSWER, "choices": [{**CHOICE, "finish_reason": "because"}]}, True),
        ({**ANSWER, "choices": [{**CHOICE, "message": {**MESSAGE, "refusal": "No."}}]}, True),
        ({**ANSWER, "choices": [{**CHOICE, "message": {**MESSAGE, "tool_calls": [{}]}}]}, True),
        (b'{"model": "m", "messages": [{"role": "user", "content": "x", "content": "y"}]}', False),
        (b'{"model": "m", "model": "n", "messages": [{"role": "user", "content": "x"}]}', False),
        (written({**ANSWER, "usage": 0}).replace(b'"usage": 0', b'"usage": {"a": 1, "a": 2}'), True),
        (written({**ANSWER, "usage": 0}).replace(b'"usage": 0', b'"usage": {"a": "b"}, "usage": {}'), True),
        (written({**REQUEST, "seed": 0}).replace(b'"seed": 0', b'"model": "a\\\\", "model": "b\\\\"'), False),
        (written({**REQUEST, "seed": 0}).replace(b'"seed": 0', b'"model": "' + 4 * b"\\u0022" + b'"'), False),
        ({**REQUEST, "messages": [TURNS[1], {"role": "assistant", "content": "x"}] * 17_000}, False),
        (b"[]", False),
        (b"\xff", False),
    ],
)
def test_any_other_body_is_walked_through(body: Any, is_answer: bool) -> None:
    assert chat_texts(body if type(body) is bytes else written(body), is_answer=is_answer) is None


NAMES = st.sampled_from(
    ("role", "content", "refusal", "tool_calls", "model", "max_tokens", "n", "usage", "id", "own", "messages")
)
TEXTS = st.sampled_from(
    (
        "",
        "x",
        "Do it",
        "data:text/plain,x",
        "data: none",
        'a": 1',
        "a\\",
        "\x01",
        "é",
        "user",
        "system",
        "developer",
        "stop",
    )
)
SIMPLE = st.one_of(
    TEXTS, st.none(), st.integers(-3, 10**6), st.floats(0, 1e6), st.just([]), st.just([None]), st.just({})
)
FIELDS = st.lists(st.tuples(NAMES, SIMPLE), max_size=2)


def _object(pairs: list[tuple[str, Any]]) -> str:
    """An object with all these fields, also those that are named twice."""
    return "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in pairs) + "}"


def _dumped(pairs: list[tuple[str, Any]]) -> list[tuple[str, str]]:
    return [(name, json.dumps(value)) for name, value in pairs]


@st.composite
def chats(draw: st.DrawFn) -> tuple[bytes, bool]:
    """A chat that is ordinary but for a few fields."""
    is_answer = draw(st.booleans())
    rarely = st.one_of(st.just([]), st.just([]), FIELDS)
    turns: list[str] = []
    for _ in range(draw(st.integers(0, 3))):
        fields = _dumped([("role", draw(TEXTS | st.sampled_from(("user", "assistant")))), ("content", draw(TEXTS))])
        turn = _object([*fields, *_dumped(draw(rarely))])
        turns.append(_object([("message", turn), *_dumped(draw(rarely))]) if is_answer else turn)
    body = [("choices" if is_answer else "messages", f"[{', '.join(turns)}]"), *_dumped(draw(rarely))]
    return _object(body).encode(), is_answer


@given(chats())
def test_what_is_found_is_what_the_walk_finds(chat: tuple[bytes, bool]) -> None:
    body, is_answer = chat
    found = chat_texts(body, is_answer=is_answer)
    walked = BodyTexts(body, is_answer=is_answer)
    assert found is None or (sorted(found), "") == (sorted(walked.texts), walked.unseen)
