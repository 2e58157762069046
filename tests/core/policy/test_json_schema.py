"""The small validator: each word does what the standard says, unknown words are refused, and no schema or value holds it up."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.errors import SettingsError
from tidegate.core.policy.json_schema import Schema

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5, "pattern": "^[A-Z]"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["value"]}},
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (True, [None, 1, {}], []),
        (False, [], [None, 1]),
        ({}, [None, "x", [1]], []),
        ({"type": ["string", "null"]}, ["", None], [1, [], True]),
        ({"type": "integer"}, [1, 2.0, 10**30], [1.5, "1", True, None]),
        ({"type": "number"}, [1, 1.5], [True, "1"]),
        ({"const": {"a": [1, None]}}, [{"a": [1.0, None]}], [{"a": [True, None]}, {"a": [1]}, None]),
        ({"enum": [1, "x"]}, [1, 1.0, "x"], [True, "y", [1]]),
        ({"minimum": 2, "exclusiveMaximum": 5}, [2, 4.9, "not a number"], [1, 5]),
        ({"exclusiveMinimum": 2, "maximum": 5}, [2.1, 5], [2, 6]),
        ({"minLength": 2}, ["éé", 7], ["é"]),
        ({"pattern": "b+"}, ["abc", 5], ["ac"]),
        (PERSON, [{"name": "Ada"}, {"name": "B", "age": 3, "tags": ["a"]}], [
            {}, {"name": ""}, {"name": "ada"}, {"name": "Adaline"}, {"name": "A", "age": -1}, {"name": "A", "x": 1},
            {"name": "A", "tags": []}, {"name": "A", "tags": ["c"]}, {"name": "A", "tags": ["a"] * 3}, [],
        ]),
        ({"additionalProperties": {"type": "integer"}}, [{"a": 1}, {}], [{"a": "1"}]),
        ({"anyOf": [{"type": "string"}, {"minimum": 3}]}, ["x", 4, None], [1]),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, [1, 3.5], [4, 1.5]),
        ({"allOf": [{"minimum": 1}, {"maximum": 2}]}, [1, 2], [0, 3]),
        (TREE, [{"value": 1}, {"value": 1, "next": {"value": 2}}], [{}, {"value": 1, "next": {}}, 3]),
    ],
)  # fmt: skip
def test_each_word_means_what_the_standard_says(schema: Any, good: list[Any], bad: list[Any]) -> None:
    read = Schema(schema)
    for value in good:
        assert read.problem(value) is None
    for value in bad:
        assert read.problem(value)


@pytest.mark.parametrize(
    "schema",
    [
        None,
        [],
        {"patternProperties": {}},
        {"not": {}},
        {"if": {}},
        {"dependentRequired": {}},
        {"multipleOf": 2},
        {"propertyNames": {}},
        {"type": "text"},
        {"type": []},
        {"type": 5},
        {"properties": []},
        {"properties": {"a": 1}},
        {"required": "a"},
        {"required": [1]},
        {"enum": []},
        {"minimum": "1"},
        {"minimum": True},
        {"minLength": -1},
        {"maxItems": 1.5},
        {"pattern": "("},
        {"pattern": r"(a+)\1"},
        {"pattern": r"\bword\b"},
        {"pattern": "a++"},
        {"pattern": 5},
        {"anyOf": []},
        {"anyOf": {}},
        {"oneOf": [5]},
        {"items": [{}]},
        {"$ref": "#/$defs/none"},
        {"$ref": "https://example.test/schema"},
        {"$ref": 5},
        {"$defs": []},
        {"$defs": {"a": {"surprise": 1}}},
    ],
)
def test_a_schema_that_is_not_understood_whole_is_refused(schema: Any) -> None:
    with pytest.raises(SettingsError, match="schema"):
        Schema(schema)


def test_a_deep_or_huge_schema_is_refused() -> None:
    deep: Any = {}
    for _ in range(200):
        deep = {"items": deep}
    with pytest.raises(SettingsError):
        Schema(deep)
    with pytest.raises(SettingsError):
        Schema({"anyOf": [{}] * 20_000})


def test_a_deep_value_is_not_followed_for_ever() -> None:
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    linked: Any = {"value": 1}
    for _ in range(900):
        linked = {"value": 1, "next": linked}
    assert Schema({"enum": [deep]}).problem(deep) in (None, "$ is nested too deeply")
    assert Schema(TREE).problem(linked)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, 1),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 8}}, "$ref": "#/$defs/a"}, 1),
        ({"type": "array", "items": {"type": "integer"}}, [1] * 60_000),
    ],
)
def test_a_check_that_would_not_end_is_ended(schema: Any, value: Any) -> None:
    why = Schema(schema).problem(value)
    assert why is not None
    assert "too long" in why or "none of" in why


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(VALUES)
def test_any_value_gets_a_verdict_and_is_never_quoted(value: Any) -> None:
    for schema in (PERSON, TREE, {"const": value}):
        Schema(schema).problem(value)
    assert Schema({"const": value}).problem(value) is None
    assert Schema({"enum": [value]}).problem(value) is None
