"""Answer schemas: words mean what the standard says, unknown ones are refused, nothing is fetched, nothing takes long."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.errors import SettingsError
from tidegate.core.policy.json_schema import PATTERN_BYTES_MAX, WHY_CHARS_MAX, Schema

UNCHECKABLE = "$ cannot be checked: it is nested too deeply or has text that is not Unicode"
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
        ({"pattern": r"^\d\w$"}, ["3a"], ["3a\n", "٣a", "3é"]),
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
        {"type": "text"},
        {"type": []},
        {"type": 5},
        {"properties": []},
        {"properties": {"a": 1}},
        {"required": "a"},
        {"required": [1]},
        {"minimum": "1"},
        {"minimum": True},
        {"minLength": -1},
        {"maxItems": 1.5},
        {"pattern": "("},
        {"pattern": r"(a+)\1"},
        {"pattern": r"(?=a)b"},
        {"pattern": "(a{1000}){1000}"},
        {"pattern": 5},
        {"anyOf": []},
        {"anyOf": {}},
        {"oneOf": [5]},
        {"items": [{}]},
        {"$ref": "#/$defs/none"},
        {"$ref": 5},
        {"$defs": []},
    ],
)
def test_a_schema_that_is_not_valid_is_refused(schema: Any) -> None:
    with pytest.raises(SettingsError, match="schema"):
        Schema(schema)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"requird": ["a"]}, "schema: JSON Schema has no word 'requird'"),
        ({"$defs": {"a": {"surprise": 1}}}, "schema.$defs.a: JSON Schema has no word 'surprise'"),
        ({"anyOf": [True, {"items": {"typ": "string"}}]}, "schema.anyOf[1].items: JSON Schema has no word 'typ'"),
        # A word of older drafts, which would check nothing.
        ({"dependencies": {"a": ["b"]}}, "schema.dependencies: "),
    ],
)
def test_a_word_that_would_check_nothing_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        Schema(schema)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "https://example.test/schema"},
        {"$ref": "file:///etc/hostname"},
        {"$id": "http://127.0.0.1/a", "$ref": "other"},
        {"$id": "http://127.0.0.1/a", "$dynamicRef": "other#meta"},
    ],
)
def test_no_other_document_is_fetched(schema: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="schema"):
        Schema(schema)
    there = tmp_path / "schema.json"
    there.write_text("{}")
    with pytest.raises(SettingsError, match="Retrieval is disabled"):
        Schema({"$ref": there.as_uri()})


def test_the_schema_of_a_named_draft_or_a_format_only_describes() -> None:
    older = {"$schema": "http://json-schema.org/draft-07/schema#", "$defs": {"a": {"type": "string"}}}
    assert Schema({**older, "$ref": "#/$defs/a", "minLength": 3}).problem("ab")
    assert Schema({"$schema": "https://example.test/meta", "format": "email"}).problem("no address") is None


def test_a_deep_schema_is_refused() -> None:
    deep: Any = {}
    for _ in range(900):
        deep = {"items": deep}
    with pytest.raises(SettingsError):
        Schema(deep)


def test_a_deep_value_gets_a_verdict() -> None:
    linked: Any = {}
    for _ in range(900):
        linked = {"value": 1, "next": linked}
    assert Schema(TREE).problem(linked) == "$ does not fit"
    assert Schema({"type": "string"}).problem("\ud800") == UNCHECKABLE


def both_ways(inner: Any) -> Any:
    """A schema that tries each inner value in two ways."""
    return {
        "anyOf": [
            {"type": "object", "properties": {"next": inner}},
            {"type": ["object"], "properties": {"next": inner}},
        ]
    }


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"$defs": {"a": {"type": "string", "anyOf": [{"$ref": "#/$defs/a"}] * 8}}, "$ref": "#/$defs/a"}, 1),
        ({"$defs": {"a": both_ways({"$ref": "#/$defs/a"})}, "$ref": "#/$defs/a"}, 40),
        (both_ways({"$ref": "#"}), 40),
        ({"$dynamicAnchor": "a", **both_ways({"$dynamicRef": "#a"})}, 40),
        ({"pattern": "^(?:a|aa){1,40}b$"}, "a" * 100_000),
        ({"type": "array", "items": {"type": "integer"}}, [1] * 60_000 + [""]),
        ({"anyOf": [{"type": "integer"}] * 20_000}, ""),
    ],
)
@pytest.mark.timeout(60)
def test_no_schema_and_no_value_takes_for_ever(schema: Any, value: Any) -> None:
    """Tried one after another, the ways through most of these are 2^40."""
    if value == 40:
        for _ in range(40):
            value = {"next": value}
    assert Schema(schema).problem(value) is not None


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({}, '$: "name" is a required property'),
        ({"name": "A", "age": -1}, "$.age: the value is less than the minimum of 0"),
        ({"name": "A", "tags": ["a", "hush"]}, '$.tags[1]: the value is not one of "a" or "b"'),
        ({"name": "hush"}, '$.name: the value does not match "^[A-Z]"'),
    ],
)
def test_the_reason_names_the_place_and_no_value(value: Any, why: str) -> None:
    assert Schema(PERSON).problem(value) == why
    # Definitions that do not contain themselves change nothing about it.
    assert Schema({"$defs": {"person": PERSON}, "$ref": "#/$defs/person"}).problem(value) == why


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(VALUES)
def test_any_value_gets_a_verdict_and_is_never_quoted(value: Any) -> None:
    for schema in (PERSON, TREE, {"const": value}):
        Schema(schema).problem(value)
    assert Schema({"const": value}).problem(value) is None
    assert Schema({"enum": [value]}).problem(value) is None


def test_reasons_and_places_are_cut_short() -> None:
    name = "n" * 1_000
    schema = {"properties": {name: {"properties": {"id": {"type": "string"}}, "required": [name]}}}
    place, _, why = str(Schema(schema).problem({name: {}})).partition(": ")
    assert place == "$." + "n" * (WHY_CHARS_MAX - 1)
    assert why == '"' + "n" * (WHY_CHARS_MAX - 1)
    with pytest.raises(SettingsError) as caught:
        Schema({"properties": {name: {"type": name}}})
    place, _, why = str(caught.value).partition(": ")
    assert place == "schema" + f".properties.{name}"[:WHY_CHARS_MAX]
    assert len(why) == WHY_CHARS_MAX == 200


def test_a_pattern_is_bounded_by_what_it_is_compiled_to() -> None:
    assert PATTERN_BYTES_MAX == 1 << 20
    Schema({"pattern": "a{1000}"})
    with pytest.raises(SettingsError, match="pattern"):
        Schema({"pattern": "(a{1000}){1000}"})
    with pytest.raises(SettingsError, match="pattern"):
        Schema({"pattern": "a{1000}"}, pattern_bytes_max=1_000)
