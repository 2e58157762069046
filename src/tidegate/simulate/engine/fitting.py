"""A maker of JSON values that fit a JSON Schema, the same value for the same seed.

It knows the keywords of OpenAI's and Anthropic's structured outputs, and the other common ones. A
schema that it cannot satisfy raises `Unfit`, and the server answers 400, because a wrong value
would be worse than none. It fetches no references.
"""

import re
from collections.abc import Callable
from math import ceil, floor
from random import Random
from typing import Any

from tidegate.simulate.engine.patterns import Unmatchable, text_matching

NODE_COUNT_MAX = 10_000
DEPTH_MAX = 64
# Below this depth only required parts are made, so that a schema that contains itself ends.
FULL_DEPTH = 4
ARRAY_COUNT = 2
STRING_CHARS = 24

_FORMATS = {
    "date-time": "2026-01-02T03:04:05Z",
    "date": "2026-01-02",
    "time": "03:04:05Z",
    "duration": "PT3M",
    "email": "{mark}@example.com",
    "hostname": "h{mark}.example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uuid": "{mark}-0000-4000-8000-000000000000",
    "uri": "https://example.com/{mark}",
}
_HINTS = (
    ("object", ("properties", "required", "additionalProperties", "minProperties", "patternProperties")),
    ("array", ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains")),
    ("string", ("pattern", "minLength", "maxLength", "format")),
    ("number", ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
)


class Unfit(ValueError):
    """No value is known that fits the schema."""


class Fitting:
    """A maker of values for one schema.

    Strings that the schema leaves free begin with `mark`, eight letters.
    """

    def __init__(self, schema: Any, seed: int, mark: str) -> None:
        self._root = schema
        self._random = Random(seed)
        self._mark = mark
        self._nodes = 0

    def value(self) -> Any:
        """Return a value that fits the schema."""
        return self._make(self._root, 0)

    def _make(self, schema: Any, depth: int) -> Any:
        self._nodes += 1
        if self._nodes > NODE_COUNT_MAX or depth > DEPTH_MAX:
            raise Unfit("the schema is too large or never ends")
        if schema is True:
            return self._string({})
        if not isinstance(schema, dict):
            raise Unfit("a schema must be an object that some value can fit")
        schema = self._flat(schema, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._choice(schema["enum"], "enum")
        makers: dict[str, Callable[[dict[str, Any], int], Any]] = {
            "object": self._object,
            "array": self._array,
            "string": lambda one, _: self._string(one),
            "integer": lambda one, _: self._number(one, whole=True),
            "number": lambda one, _: self._number(one, whole=False),
            "boolean": lambda _one, _: self._random.random() < 0.5,
            "null": lambda _one, _: None,
        }
        kind = self._kind(schema, depth)
        if kind not in makers:
            raise Unfit(f"type {kind!r} is not a JSON type")
        return makers[kind](schema, depth)

    def _flat(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        """Return one schema, with references and combinations resolved."""
        flat = dict(schema)
        for _ in range(DEPTH_MAX):
            if "$ref" in flat:
                found = self._reference(flat.pop("$ref"))
            elif flat.get("allOf"):
                first, *rest = flat.pop("allOf")
                found = first
                if rest:
                    flat["allOf"] = rest
            elif flat.get("anyOf") or flat.get("oneOf"):
                found = self._option(flat.pop("anyOf" if flat.get("anyOf") else "oneOf"), depth)
            else:
                return flat
            if isinstance(found, dict):
                flat = _merged(found, flat)
        raise Unfit("references lead to themselves")

    def _reference(self, path: Any) -> Any:
        if not isinstance(path, str) or not path.startswith("#"):
            raise Unfit("a $ref must point into the schema itself")
        found = self._root
        for step in path[1:].strip("/").split("/") if path != "#" else ():
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or step not in found:
                raise Unfit(f"$ref {path!r} points nowhere")
            found = found[step]
        return found

    def _option(self, options: Any, depth: int) -> Any:
        if depth < FULL_DEPTH:
            return self._choice(options, "anyOf")
        # Deep down the simplest option wins: null ends a schema that contains itself.
        return min(options, key=_weight)

    def _kind(self, schema: dict[str, Any], depth: int) -> Any:
        kind = schema.get("type")
        if isinstance(kind, list):
            return "null" if depth >= FULL_DEPTH and "null" in kind else self._choice(kind, "type")
        if kind is None:
            return next((hinted for hinted, words in _HINTS if any(word in schema for word in words)), "string")
        return kind

    def _choice(self, options: Any, word: str) -> Any:
        if not isinstance(options, list) or not options:
            raise Unfit(f"{word} must be a list of at least one")
        return self._random.choice(options)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        others = schema.get("additionalProperties", True)
        made: dict[str, Any] = {}
        for name, one in properties.items():
            if name in required or (depth < FULL_DEPTH and one is not False):
                made[name] = self._make(one, depth + 1)
        for name in required:
            if name not in made:
                made[name] = self._make(others, depth + 1)
        while len(made) < schema.get("minProperties", 0):
            made[f"{self._mark}{len(made)}"] = self._make(others, depth + 1)
        most = schema.get("maxProperties")
        for name in [name for name in made if name not in required]:
            if most is not None and len(made) > most:
                del made[name]
        return made

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        fixed = schema.get("prefixItems") or []
        rest = schema.get("items", True)
        count = max(least, min(ARRAY_COUNT, ARRAY_COUNT if most is None else most) if depth < FULL_DEPTH else 0)
        if rest is False:
            count = min(count, len(fixed))
        made = [self._make(one, depth + 1) for one in fixed[:count]]
        if "contains" in schema and len(made) < count + 1:
            made.append(self._make(schema["contains"], depth + 1))
        tries = 0
        while len(made) < count:
            one = self._make(rest, depth + 1)
            tries += 1
            if schema.get("uniqueItems") and one in made:
                if tries > NODE_COUNT_MAX // 10:
                    if len(made) >= least:
                        break
                    raise Unfit("uniqueItems asks for more values than there are")
                one = f"{one}{tries}" if isinstance(one, str) and not _bound(rest) else one
                if one in made:
                    continue
            made.append(one)
        return made

    def _number(self, schema: dict[str, Any], *, whole: bool) -> float | int:
        low, high = schema.get("minimum"), schema.get("maximum")
        step = schema.get("multipleOf") or (1 if whole else 0)
        below, above = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        if not step:
            least = below if low is None or (below is not None and below >= low) else low
            most = above if high is None or (above is not None and above <= high) else high
            if least is None:
                least = 0 if most is None else most - 100
            if most is None:
                most = least + 100
            value = round((least + most) / 2, 3)
            return value if least <= value <= most else (least + most) / 2
        first = ceil(low / step) if low is not None else None
        if below is not None:
            first = max(floor(below / step) + 1, first if first is not None else floor(below / step) + 1)
        last = floor(high / step) if high is not None else None
        if above is not None:
            last = min(ceil(above / step) - 1, last if last is not None else ceil(above / step) - 1)
        if first is None:
            first = 0 if last is None else min(0, last)
        if last is None:
            last = first + 100
        if first > last:
            raise Unfit("no number lies between the bounds")
        value = self._random.randint(first, min(last, first + 1000)) * step
        return int(value) if whole else value

    def _string(self, schema: dict[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if "pattern" in schema:
            try:
                text = text_matching(schema["pattern"], self._random, least)
            except (Unmatchable, re.error, RecursionError) as error:
                raise Unfit(f"pattern {schema['pattern']!r} is beyond this simulation: {error}") from error
        elif schema.get("format") in _FORMATS:
            text = _FORMATS[schema["format"]].format(mark=self._mark)
        else:
            size = max(least, STRING_CHARS if most is None else min(most, STRING_CHARS))
            text = f"{self._mark} {self._random.randrange(1 << 32):08x}".ljust(size, "~")[:size]
        if len(text) < least or (most is not None and len(text) > most):
            raise Unfit("no string is known that has the pattern or format and the length")
        return text


def _bound(schema: Any) -> bool:
    return not isinstance(schema, dict) or any(
        word in schema
        for word in ("enum", "const", "pattern", "format", "maxLength", "$ref", "anyOf", "oneOf", "allOf")
    )


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return both schemas in one: names and limits of both, and else the second one's keywords."""
    made = {**base, **over}
    for word in ("properties", "$defs"):
        if word in base and word in over:
            made[word] = {**base[word], **over[word]}
    if "required" in base and "required" in over:
        made["required"] = [*base["required"], *over["required"]]
    for word, tighter in (("minimum", max), ("maximum", min), ("minLength", max), ("maxLength", min)):
        if word in base and word in over:
            made[word] = tighter(base[word], over[word])
    if "allOf" in base and "allOf" in over:
        made["allOf"] = [*base["allOf"], *over["allOf"]]
    return made


def _weight(option: Any) -> int:
    if not isinstance(option, dict):
        return 3
    if option.get("type") == "null" or "const" in option or "enum" in option:
        return 0
    return 2 if any(word in option for word in ("$ref", "anyOf", "oneOf", "allOf", "properties", "items")) else 1
