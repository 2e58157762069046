"""Whether the text of an answer fits, in the shape of each endpoint, and how it is asked for again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidegate.core.answer_terms import AnswerTerms
from tidegate.core.answers import answer_checks
from tidegate.core.answers.answer_checks import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    REJECTED_CHARS_MAX,
    RESPONSES,
    InvalidSchema,
    check_of,
)

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
TERMS = AnswerTerms(json.dumps(SCHEMA))
OWN = AnswerTerms()
GOOD, BAD = '{"age": 3}', '{"age": "old"}'


def chat(text: str | None, finish: str = "stop") -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}]}


def completion(text: str, finish: str = "stop") -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def response(text: str, status: str = "completed") -> dict[str, Any]:
    parts = [{"type": "output_text", "text": text}]
    return {"status": status, "output": [{"type": "reasoning"}, {"type": "message", "content": parts}]}


def message(text: str, stop: str = "end_turn") -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text[:4]}, {"type": "text", "text": text[4:]}], "stop_reason": stop}


def problem(terms: AnswerTerms, answer: Any, ask: Any = None) -> str | None:
    return check_of(terms, json.dumps(ask or {}).encode()).problem(json.dumps(answer).encode())


@pytest.mark.parametrize("shape", [chat, completion, response, message])
def test_the_text_of_every_shape_is_checked(shape: Any) -> None:
    assert problem(TERMS, shape(GOOD)) is None
    assert "$.age" in str(problem(TERMS, shape(BAD)))
    assert "not valid JSON" in str(problem(TERMS, shape("here you are: {}")))


@pytest.mark.parametrize(
    "answer",
    [chat(GOOD, "length"), completion(GOOD, "length"), response(GOOD, "incomplete"), message(GOOD, "max_tokens")],
)
def test_an_answer_that_was_cut_off_never_fits(answer: Any) -> None:
    assert "cut off" in str(problem(TERMS, answer))
    assert "cut off" in str(problem(OWN, answer)), "nor where its request asks for plain text"


@pytest.mark.parametrize(
    "answer",
    [chat(None), {"choices": [{"message": {"tool_calls": []}}]}, {"output": []}, {"content": []}, {}, {"choices": 3}],
)
def test_an_answer_without_a_text_does_not_fit(answer: Any) -> None:
    assert problem(TERMS, answer)


def test_an_answer_that_is_nested_too_deeply_does_not_fit() -> None:
    assert problem(AnswerTerms("true"), chat("[" * 100_000 + "]" * 100_000)) == "the answer is nested too deeply"


def test_every_choice_must_fit() -> None:
    assert problem(TERMS, {"choices": chat(GOOD)["choices"] + chat(BAD)["choices"]})


@pytest.mark.parametrize(
    ("ask", "shape"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, chat),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, completion),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}, response),
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, message),
        ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, message),
    ],
)
def test_a_request_says_itself_what_its_answer_must_fit(ask: Any, shape: Any) -> None:
    assert problem(OWN, shape(GOOD), ask) is None
    assert "$.age" in str(problem(OWN, shape(BAD), ask))


def test_json_without_a_schema_must_be_an_object_and_plain_text_may_be_anything() -> None:
    ask = {"response_format": {"type": "json_object"}}
    assert problem(OWN, chat("{}"), ask) is None
    assert problem(OWN, chat("[]"), ask)
    assert problem(OWN, chat("hello"), {"response_format": {"type": "text"}}) is None
    assert problem(OWN, chat("hello")) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"$ref": "https://example.com/a"},
        {"type": "objekt"},
        {"pattern": "(a{99}){99}"},
        "[",
        3,
    ],
)
def test_a_requests_own_schema_that_cannot_be_used_is_refused(schema: Any) -> None:
    ask = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    with pytest.raises(InvalidSchema):
        check_of(OWN, json.dumps(ask).encode())
    with pytest.raises(InvalidSchema):
        check_of(OWN, b'{"response_format": 3}')
    with pytest.raises(InvalidSchema):
        answer_checks.check_schema(json.dumps(schema))


def test_feedback_shows_the_model_its_answer_and_what_is_wrong_with_it() -> None:
    def asked_again(endpoint: str, ask: Any) -> Any:
        return json.loads(answer_checks.with_feedback(endpoint, json.dumps(ask).encode(), "$.age: wrong", BAD))

    messages = [{"role": "user", "content": "hi"}]
    for endpoint, field in ((CHAT, "messages"), (MESSAGES, "messages"), (RESPONSES, "input")):
        turns = asked_again(endpoint, {"model": "m", field: messages, "seed": 1})[field]
        assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
        assert turns[1]["content"] == BAD
        assert "$.age: wrong" in turns[2]["content"]
    assert asked_again(RESPONSES, {"input": "hi"})["input"][0] == messages[0]
    assert asked_again(COMPLETIONS, {"prompt": "hi"})["prompt"].startswith("hi\n\n" + BAD)
    assert asked_again(COMPLETIONS, {"prompt": [1, 2]}) == {"prompt": [1, 2]}, "tokens are asked again as they are"
    first_try = answer_checks.with_feedback(CHAT, json.dumps({"messages": messages}).encode(), "wrong", "")
    assert [turn["role"] for turn in json.loads(first_try)["messages"]] == ["user", "user"]


def test_the_model_is_shown_the_first_text_unless_it_is_too_long() -> None:
    longest = "x" * REJECTED_CHARS_MAX
    for answer, shown in (
        ({"choices": chat(BAD)["choices"] + chat(GOOD)["choices"]}, BAD),
        (message(longest), longest),
        (message(longest + "x"), ""),
        ({"content": []}, ""),
        (chat(None), ""),
        ({"choices": 3}, ""),
    ):
        assert answer_checks.rejected_text(json.dumps(answer).encode()) == shown
