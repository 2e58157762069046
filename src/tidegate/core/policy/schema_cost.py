"""Refuse callers' schemas that could take long: too large, with too many patterns, or unfolding
without end.

The validator follows a reference each time it meets it. A few definitions that refer to the next
one twice, or one definition that refers to itself twice for the same place of a value, double the
work at every step. Such schemas are refused before they are used.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from tidegate.core.errors import SettingsError

SCHEMA_BYTES_MAX = 64 << 10
PATTERNS_BYTES_MAX = 4 << 10
UNFOLDED_MAX = 10_000
LOOPS_MAX = 200
DEPTH_MAX = 64
_ANY = "*"
# Words whose schemas judge the value itself, one or several of them; and below, words whose schemas
# judge parts of the value.
_IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
_OF_PARTS = (
    "items",
    "prefixItems",
    "contains",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "propertyNames",
)
_REFUSED = ("$dynamicRef", "$dynamicAnchor", "$anchor", "$id", "$recursiveRef", "dependencies")

_Steps = tuple[str, ...]


def check_cost(schema: Any) -> None:
    """Raise SettingsError when checking a value against this schema could take much longer than
    reading the value.
    """
    size_bytes = len(msgspec.json.encode(schema))
    if size_bytes > SCHEMA_BYTES_MAX:
        raise SettingsError(f"schema has {size_bytes:,} bytes; {SCHEMA_BYTES_MAX:,} are allowed")
    unfolding = _Unfolding(schema)
    unfolding.walk(schema, (), {"#": 0})
    if unfolding.pattern_bytes > PATTERNS_BYTES_MAX:
        raise SettingsError(f"the patterns of the schema have more than {PATTERNS_BYTES_MAX:,} bytes together")


class _Unfolding:
    """A walk through a schema as the validator goes: it follows a reference unless that leads back
    to the walk's own path.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._count = 0
        self._loops: list[_Steps] = []
        self.pattern_bytes = 0

    def walk(self, schema: Any, steps: _Steps, open_at: dict[str, int]) -> None:
        """Walk through one schema.

        `steps` lead to the part of the value that it judges; `open_at` has the references that lead
        here, and their steps.
        """
        self._count += 1
        if self._count > UNFOLDED_MAX or len(open_at) + len(steps) > DEPTH_MAX:
            raise SettingsError("schema is too large with its references followed: repeat fewer of them")
        if not isinstance(schema, dict):
            return
        for word in _REFUSED:
            if word in schema:
                raise SettingsError(f"schema may not use {word!r} here: refer to `#/$defs/...` with `$ref`")
        self._count_patterns(schema)
        for inner, step in _inner(schema):
            self.walk(inner, steps if step is None else (*steps, step), open_at)
        if "$ref" in schema:
            self._follow(schema["$ref"], steps, open_at)

    def _follow(self, reference: Any, steps: _Steps, open_at: dict[str, int]) -> None:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise SettingsError("schema may refer only to itself, as `#/$defs/...`: nothing is fetched")
        if reference not in open_at:
            self.walk(self._target(reference), steps, {**open_at, reference: len(steps)})
            return
        leads_nowhere = len(steps) == open_at[reference]
        if leads_nowhere or len(self._loops) >= LOOPS_MAX or any(_overlap(steps, other) for other in self._loops):
            raise SettingsError(
                f"schema refers back to {reference[:100]!r} more than once for one part of a value, which could take for ever to check"
            )
        self._loops.append(steps)

    def _target(self, reference: str) -> Any:
        target = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, dict) else None
        if target is None:
            raise SettingsError(f"schema refers to {reference[:100]!r}, which it does not have")
        return target

    def _count_patterns(self, schema: dict[str, Any]) -> None:
        patterns = [schema["pattern"]] if isinstance(schema.get("pattern"), str) else []
        if isinstance(schema.get("patternProperties"), dict):
            patterns += schema["patternProperties"]
        self.pattern_bytes += sum(len(pattern.encode("utf-8", "replace")) for pattern in patterns)


def _inner(schema: dict[str, Any]) -> Iterator[tuple[Any, str | None]]:
    """Yield the schemas inside this one, each with the step to the part that it judges; None stands
    for the value itself.
    """
    for word in _IN_PLACE:
        if word in schema:
            inner = schema[word]
            for one in inner if isinstance(inner, list) else [inner]:
                yield one, None
    for one in _values(schema, "dependentSchemas"):
        yield one, None
    for word in _OF_PARTS:
        if word in schema:
            inner = schema[word]
            for one in inner if isinstance(inner, list) else [inner]:
                yield one, _ANY
    if isinstance(schema.get("properties"), dict):
        for name, one in schema["properties"].items():
            yield one, "." + name
    for one in _values(schema, "patternProperties"):
        yield one, _ANY


def _values(schema: dict[str, Any], word: str) -> list[Any]:
    found = schema.get(word)
    return list(found.values()) if isinstance(found, dict) else []


def _overlap(one: _Steps, other: _Steps) -> bool:
    """Return whether two references back can meet in one part of a value, where each round trip
    would double the work.
    """
    return all(a == b or _ANY in (a, b) for a, b in zip(one, other, strict=False))
