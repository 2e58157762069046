"""Parameters in the bodies of requests: which counts, what a line becomes, and what is left alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.input.line_faults import LineFault
from tidegate.core.input.lines import MIXED, LineRules
from tidegate.core.input.parameters import BodyShaper, check_parameters
from tidegate.core.job_shape import ParameterLevel

CHAT = "/v1/chat/completions"
RULES = LineRules(CHAT)
LEVELS = (
    ParameterLevel({"temperature": 0, "top_p": 0.1, "seed": 1}, {"user": "all"}),
    ParameterLevel({"temperature": 0.2}, {"user": "chat"}, endpoint=CHAT),
    ParameterLevel({"temperature": 0.3}, {}, endpoint="/v1/embeddings"),
    ParameterLevel({"temperature": 0.4}, {"user": "m"}, model="m"),
    ParameterLevel({"max_tokens": 9}, {"top_p": 1}),
)


def shaped(line: bytes, levels: tuple[ParameterLevel, ...] = LEVELS, rules: LineRules = RULES) -> bytes:
    return BodyShaper(levels, rules).shaped(line)


def body_of(line: bytes) -> Any:
    return json.loads(line)["body"]


def test_the_more_particular_level_counts_and_overrides_replace() -> None:
    line = b'{"custom_id":"a","body":{"model":"m","temperature":0.9,"top_p":0.5,"user":"mine","messages":[1]}}'
    assert body_of(shaped(line)) == {
        "model": "m", "temperature": 0.9, "top_p": 1, "user": "m", "messages": [1], "seed": 1, "max_tokens": 9,
    }  # fmt: skip
    other = b'{"custom_id":"a","body":{"model":"other","messages":[1]}}'
    assert body_of(shaped(other)) == {
        "model": "other", "messages": [1], "temperature": 0.2, "top_p": 1, "seed": 1, "user": "chat", "max_tokens": 9,
    }  # fmt: skip
    mixed = b'{"custom_id":"a","url":"/v1/embeddings","body":{"model":"x","input":"y"}}'
    assert body_of(shaped(mixed, rules=LineRules(MIXED)))["temperature"] == 0.3


def test_a_line_that_nothing_changes_keeps_its_bytes() -> None:
    levels = (ParameterLevel({"a": None}, {"b": {"x": [1, 2]}}),)
    line = b'{ "custom_id" : "a", "body": {"b" : { "x":[ 1,2 ] }, "a":0} }\r'
    assert shaped(line, levels) == line


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{not json",
        b"[1]",
        b'{"custom_id":"a"}',
        b'{"custom_id":"a","body":[]}',
        b'{"custom_id":"a","body":{"top_p":1,"top_p":2,"model":"m"}}',
        b'{"custom_id":"a","body":' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"custom_id":"a","body":{"a":"\xff"}}',
    ],
)
def test_what_cannot_be_read_is_left_for_the_check(line: bytes) -> None:
    assert shaped(line, (ParameterLevel({}, {"top_p": 0}),)) == line


def test_a_body_that_stands_twice_in_its_line_is_changed_where_it_is_the_body() -> None:
    line = b'{"custom_id":"a","note":{"model":"m"},"body":{"model":"m"}}'
    read = json.loads(shaped(line, (ParameterLevel({"n": 1}),)))
    assert (read["note"], read["body"]) == ({"model": "m"}, {"n": 1, "model": "m"})


def test_a_name_that_stands_twice_beside_such_a_body_is_left_for_the_check() -> None:
    line = b'{"custom_id":"a","custom_id":"b","note":{"model":"m"},"body":{"model":"m"}}'
    assert shaped(line, (ParameterLevel({"n": 1}),)) == line


def test_a_line_that_is_nested_too_deeply_is_left_for_the_check() -> None:
    def nested(depth: int) -> bytes:
        return b'{"custom_id":"a","body":{"model":"m","x":' + b"[" * (depth - 2) + b"]" * (depth - 2) + b"}}"

    levels = (ParameterLevel({"n": 1}),)
    assert body_of(shaped(nested(RULES.depth_max), levels))["n"] == 1
    assert shaped(nested(RULES.depth_max + 1), levels) == nested(RULES.depth_max + 1)


NAMES = st.sampled_from(["a", "b", "c", "model", "max_tokens", 'odd"name', "ü"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=5,
)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=5)


@given(OBJECTS, OBJECTS, OBJECTS, st.sampled_from([None, 1]))
def test_every_body_becomes_what_the_rule_says(
    body: dict[str, Any], defaults: dict[str, Any], overrides: dict[str, Any], indent: int | None
) -> None:
    text = json.dumps({"custom_id": "a", "x": body, "body": body}, indent=indent).replace("\n", " ").encode()
    read = json.loads(shaped(text, (ParameterLevel(defaults, overrides),)))
    assert read == {"custom_id": "a", "x": body, "body": defaults | body | overrides}


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"model": "x"}, "model"),
        ({"stream": False}, "stream"),
        ({"messages": []}, "messages"),
        ({"max_tokens": "ten"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 1_000}, "n"),
        ({"tools": [{"type": "mcp"}]}, "tools"),
        ({"": 1}, None),
        ({"a\0": 1}, None),
        ({f"k{number}": 1 for number in range(65)}, None),
        ({"a": "x" * 70_000}, None),
    ],
)
def test_what_no_line_may_have_is_refused(values: dict[str, Any], param: str | None) -> None:
    with pytest.raises(LineFault) as refused:
        check_parameters(values, CHAT)
    assert refused.value.param == param


def test_a_prompt_of_another_endpoint_and_everything_unknown_may_be_set() -> None:
    check_parameters({"prompt": {"id": "p"}, "reasoning": {"effort": "low"}}, "/v1/responses")
    check_parameters({f"k{number}": 1 for number in range(64)}, CHAT)
    check_parameters({"truncate_prompt_tokens": 12}, "/v1/score")
