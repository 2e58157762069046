"""Whether a value fits a JSON Schema: the common part of the language, checked at start and bounded in depth and work.

Known: type, properties, required, additionalProperties, items, enum, const, minimum, maximum, exclusiveMinimum, exclusiveMaximum,
minLength, maxLength, minItems, maxItems, pattern, anyOf, oneOf, allOf, $ref to a local $defs, and words that only describe. A schema with
any other word is refused when it is read, so a word that means something is never passed over. It fetches nothing.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from tidegate.core.errors import SettingsError
from tidegate.core.policy.patterns import Finder

SCHEMA_DEPTH_MAX = 64
SCHEMA_NODES_MAX = 10_000
# One check looks at so many (value, schema) pairs at most: references that repeat themselves cannot hold a process.
STEPS_MAX = 50_000
PATTERN_CHARS_MAX = 20_000

_DESCRIBES = frozenset(
    (
        "$schema",
        "$id",
        "$comment",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "format",
    )
)
_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: (
        (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())
    ),
}
_LISTS = ("anyOf", "oneOf", "allOf")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_SIZES = ("minLength", "maxLength", "minItems", "maxItems")
_REFERENCE = re.compile(r"#/\$defs/([^/]+)")


class Schema:
    """A schema that was read and understood whole. `problem` says the first way in which a value does not fit."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._patterns: dict[str, Finder] = {}
        self._nodes = 0
        self._definitions: dict[str, Any] = {}
        if isinstance(schema, dict):
            definitions = schema.get("$defs", {})
            if not isinstance(definitions, dict):
                raise SettingsError("schema.$defs must be an object of schemas")
            self._definitions = definitions
        self._read(schema, "schema", 0)

    def problem(self, value: Any) -> str | None:
        """None when the value fits; otherwise where and why not, naming fields but no value."""
        try:
            return _Check(self._definitions, self._patterns).against(self._root, value, "$")
        except RecursionError:
            return "$ is nested too deeply"

    def _read(self, schema: Any, path: str, depth: int) -> None:
        self._nodes += 1
        if depth > SCHEMA_DEPTH_MAX or self._nodes > SCHEMA_NODES_MAX:
            raise SettingsError(f"{path} is nested too deeply, or the schema is too large: make it simpler")
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise SettingsError(f"{path} must be an object, true or false")
        for word, said in schema.items():
            self._read_word(word, said, f"{path}.{word}", depth)

    def _read_word(self, word: str, said: Any, path: str, depth: int) -> None:
        if word in _DESCRIBES:
            return
        if word == "type":
            kinds = said if isinstance(said, list) and said else [said]
            if not all(isinstance(kind, str) and kind in _TYPES for kind in kinds):
                raise SettingsError(f"{path} must be one of {', '.join(_TYPES)}, or a list of them")
        elif word in ("properties", "$defs"):
            _need(isinstance(said, dict), path, "must be an object of schemas")
            for name, inner in said.items():
                self._read(inner, f"{path}.{name}", depth + 1)
        elif word in ("items", "additionalProperties"):
            self._read(said, path, depth + 1)
        elif word in _LISTS:
            _need(isinstance(said, list) and bool(said), path, "must be a list of schemas")
            for index, inner in enumerate(said):
                self._read(inner, f"{path}[{index}]", depth + 1)
        elif word == "required":
            _need(isinstance(said, list) and all(isinstance(one, str) for one in said), path, "must be a list of names")
        elif word == "enum":
            _need(isinstance(said, list) and bool(said), path, "must be a list of values")
        elif word in _NUMBERS:
            _need(_TYPES["number"](said), path, "must be a number")
        elif word in _SIZES:
            _need(_TYPES["integer"](said) and said >= 0, path, "must be a whole number of at least 0")
        elif word == "pattern":
            _need(isinstance(said, str), path, "must be text")
            self._patterns[said] = Finder([said], path, exact=True)
        elif word == "$ref":
            found = _REFERENCE.fullmatch(said) if isinstance(said, str) else None
            known = found is not None and found[1] in self._definitions
            _need(known, path, "must point to the schema's own $defs, like #/$defs/name")
        elif word != "const":
            raise SettingsError(f"{path}: this validator does not know {word!r}: remove it, or say it in other words")


def _need(fine: bool, path: str, why: str) -> None:
    if not fine:
        raise SettingsError(f"{path} {why}")


class _Check:
    """One value on its way through a schema."""

    def __init__(self, definitions: dict[str, Any], patterns: dict[str, Finder]) -> None:
        self._definitions = definitions
        self._patterns = patterns
        self._steps = 0
        self._depth = 0

    def against(self, schema: Any, value: Any, path: str) -> str | None:
        self._steps += 1
        if self._steps > STEPS_MAX or self._depth > SCHEMA_DEPTH_MAX:
            return f"{path} takes too long to check against this schema"
        if isinstance(schema, bool):
            return None if schema else f"{path} is not allowed"
        self._depth += 1
        try:
            return next((why for why in self._faults(schema, value, path) if why is not None), None)
        finally:
            self._depth -= 1

    def _faults(self, schema: dict[str, Any], value: Any, path: str) -> Iterator[str | None]:
        if "$ref" in schema:
            yield self.against(self._definitions[schema["$ref"].removeprefix("#/$defs/")], value, path)
        if "type" in schema:
            kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            yield None if any(_TYPES[kind](value) for kind in kinds) else f"{path} is not of type {' or '.join(kinds)}"
        if "const" in schema and not _same(schema["const"], value):
            yield f"{path} is not the one value allowed"
        if "enum" in schema and not any(_same(one, value) for one in schema["enum"]):
            yield f"{path} is none of the {len(schema['enum'])} values allowed"
        if isinstance(value, dict):
            yield from self._object(schema, value, path)
        elif isinstance(value, list):
            yield _size(schema, len(value), "Items", path)
            if "items" in schema:
                for index, one in enumerate(value):
                    yield self.against(schema["items"], one, f"{path}[{index}]")
        elif isinstance(value, str):
            yield _size(schema, len(value), "Length", path)
            yield self._pattern(schema, value, path)
        elif _TYPES["number"](value):
            yield _range(schema, value, path)
        yield from self._combined(schema, value, path)

    def _object(self, schema: dict[str, Any], value: dict[str, Any], path: str) -> Iterator[str | None]:
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{path}.{name} is missing"
        known = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        for name, one in value.items():
            if name in known:
                yield self.against(known[name], one, f"{path}.{name}")
            elif others is not True:
                yield self.against(others, one, f"{path}.{name[:100]}")

    def _pattern(self, schema: dict[str, Any], value: str, path: str) -> str | None:
        if "pattern" not in schema:
            return None
        if len(value) > PATTERN_CHARS_MAX:
            return f"{path} is longer than the {PATTERN_CHARS_MAX} characters that a pattern is tried on"
        return None if self._patterns[schema["pattern"]].finds(value) else f"{path} does not match its pattern"

    def _combined(self, schema: dict[str, Any], value: Any, path: str) -> Iterator[str | None]:
        for inner in schema.get("allOf", ()):
            yield self.against(inner, value, path)
        if "anyOf" in schema and all(self.against(inner, value, path) for inner in schema["anyOf"]):
            yield f"{path} fits none of the {len(schema['anyOf'])} schemas in anyOf"
        if "oneOf" in schema:
            fitting = sum(self.against(inner, value, path) is None for inner in schema["oneOf"])
            yield None if fitting == 1 else f"{path} fits {fitting} of the schemas in oneOf, not exactly one"


def _size(schema: dict[str, Any], size: int, what: str, path: str) -> str | None:
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}", size)
    return None if least <= size <= most else f"{path} has a size of {size}, not from {least} to {most}"


def _range(schema: dict[str, Any], value: float, path: str) -> str | None:
    fits = (
        value >= schema.get("minimum", value)
        and value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
    )
    return None if fits else f"{path} is out of range"


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return bool(one == other)
