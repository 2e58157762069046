"""What bounds an answer is read as a lenient server would read it, and what cannot be read bounds nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidegate.core.usage.answer_bounds import COUNTS, LENGTHS, REREAD_BYTES_MAX, output_tokens_max

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"max_tokens": 10}, 10),
        ({"max_tokens": 10.0}, 10),
        ({"max_tokens": 10.2}, 11),
        ({"max_tokens": "10"}, 10),
        ({"max_tokens": " 1e3 "}, 1_000),
        ({"max_tokens": True}, 1),
        ({"max_tokens": None, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 100_000.0, "max_completion_tokens": 1}, 100_000),
        ({"max_output_tokens": "9", "max_tokens": 2}, 9),
        ({"max_output_tokens": 9}, None),
        ({"max_output_tokens": 9, "max_tokens": None}, None),
        ({"MAX_TOKENS": 50, "max_tokens": 1}, 50),
        ({"max_tokens": 1, "extra_body": {"max_tokens": 90, "n": 2}}, 180),
        ({"max_tokens": 1, "extra_body": [1]}, 1),
        ({"max_tokens": 1, "extra_body": {"a": "extra_body"}}, 1),
        ({"max_tokens": 1, "min_tokens": 400}, 400),
        ({"max_tokens": 1, "min_tokens": 0}, 1),
        ({"max_tokens": 10, "thinking": {"type": "enabled", "budget_tokens": "4000"}}, 4_000),
        ({"max_tokens": 10, "n": 128.0}, 1_280),
        ({"max_tokens": 10, "n": "128"}, 1_280),
        ({"max_tokens": 10, "n": 1.28e2, "best_of": "200"}, 2_000),
        ({"max_tokens": 10, "n": None}, 10),
        ({"max_tokens": 10, "n": False}, 10),
        ({"max_tokens": 10, "n": -3}, 10),
        ({"max_tokens": 10, "n": 1.5}, 20),
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": 0}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": False}, None),
        ({"max_tokens": ""}, None),
        ({"max_tokens": "many"}, None),
        ({"max_tokens": "inf"}, None),
        ({"max_tokens": "nan"}, None),
        ({"max_tokens": "9" * 60}, None),
        ({"max_tokens": [10]}, None),
        ({"max_tokens": {"a": 1}}, None),
        ({"max_tokens": 10, "max_completion_tokens": "many"}, None),
        ({"max_tokens": 10, "n_predict": -1}, None),
        ({"max_tokens": 10, "n": [1]}, None),
        ({"max_tokens": 10, "best_of": "many"}, None),
        ({"max_tokens": 10, "tools": [{"properties": {"n": {"type": "integer"}, "max_tokens": 7}}]}, 10),
    ],
)
def test_numbers_are_read_as_a_lenient_server_would(fields: dict[str, Any], most: int | None) -> None:
    assert output_tokens_max(CHAT, json.dumps(fields).encode()) == most


@pytest.mark.parametrize(
    ("body", "most"),
    [
        (b'{"max_tokens":100,"max_tokens":1}', 100),
        (b'{"max_tokens":1,"max_tokens":100}', 100),
        (b'{"max\\u005ftokens":100,"max_tokens":1}', 100),
        (b'{"n":9,"max_tokens":1,"n":1}', 9),
        (b'{"max_tokens":1e400}', None),
        (b'{"max_tokens":', None),
        (b"[1]", None),
    ],
)
def test_names_given_twice_all_count_and_what_is_no_request_bounds_nothing(body: bytes, most: int | None) -> None:
    assert output_tokens_max(CHAT, body) == most


@pytest.mark.parametrize(
    ("prediction", "most"),
    [
        ({"type": "content", "content": "a" * 400}, 400 + len("content") + 10),
        ({"content": [{"type": "text", "text": "\u00e4" * 100}, {"text": "b"}]}, 201 + len("text") + 10),
        ("a" * 50, 60),
        ({}, 10),
        ([7, None], 10),
        (None, 10),
    ],
)
def test_a_predicted_text_may_be_billed_as_an_answer(prediction: Any, most: int) -> None:
    """OpenAI counts what the model did not follow as completion tokens, and does not cut it at the length."""
    fields = {"max_tokens": 10, "prediction": prediction}
    assert output_tokens_max(CHAT, json.dumps(fields).encode()) == most
    assert output_tokens_max(CHAT, json.dumps({**fields, "n": 2}).encode()) == 2 * most


def test_each_of_two_predicted_texts_counts() -> None:
    body = b'{"max_tokens":1,"prediction":{"content":"aaaa"},"prediction":{"content":"b","content":"cc"}}'
    assert output_tokens_max(CHAT, body) == 1 + 4 + 1 + 2


def test_every_name_counts() -> None:
    for name in LENGTHS:
        assert output_tokens_max(CHAT, json.dumps({name: 30, "max_tokens": 30}).encode()) == 30
    for name in COUNTS:
        assert output_tokens_max(CHAT, json.dumps({name: 3, "max_tokens": 10}).encode()) == 30


@pytest.mark.parametrize(
    ("endpoint", "own"),
    [
        (CHAT, {"max_tokens", "max_completion_tokens"}),
        ("/v1/chat/completions/batch", {"max_tokens", "max_completion_tokens"}),
        (COMPLETIONS, {"max_tokens"}),
        ("/v1/messages", {"max_tokens"}),
        ("/v1/responses", {"max_output_tokens"}),
        ("/v1/audio/transcriptions", {"max_completion_tokens"}),
        ("/v1/audio/translations", {"max_completion_tokens"}),
        ("/v1/odd", set(LENGTHS)),
    ],
)
def test_a_length_that_its_endpoint_does_not_have_bounds_nothing(endpoint: str, own: set[str]) -> None:
    """A server ignores such a field, and answers as long as it likes."""
    bounding = {name for name in LENGTHS if output_tokens_max(endpoint, json.dumps({name: 1}).encode()) == 1}
    assert bounding == own
    assert {output_tokens_max(endpoint, json.dumps({name: 1}).encode(), 50) for name in set(LENGTHS) - own} <= {50}


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("a", 1),
        (["a"] * 200, 200),
        ([1, 2, 3], 1),
        ([[1], [2, 3]], 2),
        (["a", [1]], 2),
        ([], 1),
        (["a"], 1),
        ([["a"] * 200], 200),
        ([[["a", "b"], [1, 2]], "c", []], 5),
    ],
)
def test_each_prompt_is_answered(prompt: Any, count: int) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": 10, "n": 2}).encode()
    assert output_tokens_max(COMPLETIONS, body) == 20 * count
    assert output_tokens_max("/v1/odd", body) == 20 * count
    assert output_tokens_max(CHAT, body) == 20


def test_deep_lists_of_prompts_do_no_harm() -> None:
    for depth in (500, 900, 100_000):
        body = b'{"max_tokens":10,"prompt":%b"a","b"%b}' % (b"[" * depth, b"]" * depth)
        assert output_tokens_max(COMPLETIONS, body) in (20, None)


def test_conversations_in_one_call_are_counted_once() -> None:
    body = json.dumps({"messages": [[{"role": "user"}], [{"role": "user"}]], "max_tokens": 10}).encode()
    assert output_tokens_max(CHAT, body) == 20
    assert output_tokens_max(CHAT, body, items=2) == 20
    assert output_tokens_max(CHAT, b'{"max_tokens":10,"messages":[{"n":1}]}', items=3) == 30


def test_an_operators_bound_holds_where_the_caller_gives_none() -> None:
    assert output_tokens_max(CHAT, b'{"n":2}', 50) == 100
    assert output_tokens_max(CHAT, b'{"max_tokens":0}', 50) == 50
    assert output_tokens_max(CHAT, b'{"max_tokens":"many","max_completion_tokens":80}', 50) == 80
    assert output_tokens_max(CHAT, b'{"max_tokens":10}', 50) == 10
    assert output_tokens_max(CHAT, b'{"n":"many"}', 50) is None


def test_a_huge_body_that_may_say_a_name_twice_is_bounded_by_nothing() -> None:
    padding = b" " * REREAD_BYTES_MAX
    assert output_tokens_max(CHAT, b'{"max_tokens":1,"max_tokens":2%b}' % padding) is None
    assert output_tokens_max(CHAT, b'{"max_tokens":1%b}' % padding) == 1
