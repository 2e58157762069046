"""Schemas of callers: what people write is taken, and what could take long to check is refused before it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tidegate.core.errors import SettingsError
from tidegate.core.policy.schema_cost import check_cost

TREE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]+$"},
        "left": {"$ref": "#/$defs/tree"},
        "right": {"$ref": "#/$defs/tree"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
    },
}
DOUBLING = {f"d{level}": {"allOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 2} for level in range(40)} | {"d40": {}}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        {
            "$defs": {"tree": TREE},
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/tree"}, "b": {"$ref": "#/$defs/tree"}},
        },
        {"type": "array", "items": {"$ref": "#"}},
        {"definitions": {"word": {"type": "string"}}, "anyOf": [{"$ref": "#/definitions/word"}, {"type": "null"}]},
    ],
)
def test_schemas_as_people_write_them_are_taken(schema: Any) -> None:
    check_cost(schema)


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"$ref": "https://example.com/schema.json"}, id="another document"),
        pytest.param({"$ref": "#/$defs/absent"}, id="nothing there"),
        pytest.param({"$id": "https://example.com/", "type": "object"}, id="another base"),
        pytest.param({"$ref": "#"}, id="itself"),
        pytest.param({"$defs": DOUBLING, "$ref": "#/$defs/d0"}, id="doubling"),
        pytest.param({"properties": {"x": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}}}, id="twice back"),
        pytest.param(
            {"properties": {"x": {"$ref": "#", "properties": {"x": {"$ref": "#"}}}}}, id="back after one and two steps"
        ),
        pytest.param({"patternProperties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}}, id="two patterns of one name"),
        pytest.param(
            {
                "$defs": {
                    "a": {"properties": {"x": {"$ref": "#/$defs/b"}}},
                    "b": {
                        "allOf": [
                            {"properties": {"x": {"$ref": "#/$defs/a"}}},
                            {"properties": {"x": {"$ref": "#/$defs/b"}}},
                        ]
                    },
                },
                "$ref": "#/$defs/a",
            },
            id="two that lead to each other",
        ),
        pytest.param({"properties": {f"p{n}": {"description": "x" * 100} for n in range(1_000)}}, id="too large"),
        pytest.param({"properties": {f"p{n}": {"pattern": "(a|b)*" * 10} for n in range(100)}}, id="many patterns"),
    ],
)
@pytest.mark.timeout(60)
def test_schemas_that_could_take_for_ever_are_refused(schema: Any) -> None:
    """The check does not try out what it refuses."""
    with pytest.raises(SettingsError):
        check_cost(schema)


def nested(steps: int) -> Any:
    """A schema that leads so many steps into a value."""
    schema: Any = True
    for _ in range(steps):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("made", "most"),
    [
        pytest.param(lambda count: {"description": "x" * (count - len('{"description":""}'))}, 65_536, id="bytes"),
        pytest.param(lambda count: {"pattern": "x" * count}, 4_096, id="bytes of patterns"),
        pytest.param(lambda count: {"patternProperties": {"x" * count: True}}, 4_096, id="bytes of patterns of names"),
        pytest.param(lambda count: {"allOf": [True] * (count - 1)}, 10_000, id="schemas with references followed"),
        pytest.param(lambda count: {"properties": {f"p{n}": {"$ref": "#"} for n in range(count)}}, 200, id="ways back"),
        pytest.param(nested, 63, id="steps into a value"),
    ],
)
def test_a_schema_is_taken_up_to_each_bound_and_refused_behind_it(made: Callable[[int], Any], most: int) -> None:
    check_cost(made(most))
    with pytest.raises(SettingsError):
        check_cost(made(most + 1))
