"""Check whether a value fits a JSON Schema (draft 2020-12), with jsonschema-rs.

A schema is refused when it is not valid, uses a word that draft 2020-12 does not have (a misspelled
word would otherwise check nothing), or refers to another document: nothing is ever fetched.
Patterns run in linear time. `format` only describes.
"""

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

from jsonschema_rs import Draft202012Validator, RegexOptions, ValidationError, ValidationErrorKind

from tidegate.core.errors import SettingsError

PATTERN_BYTES_MAX = 1 << 20
WHY_CHARS_MAX = 200
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_DEFINITION = "#/$defs/"
# The draft's own schema of schemas, closed to words that it does not name or that have no meaning
# in it any more.
_CLOSED_DRAFT = Draft202012Validator(
    {
        "$schema": _DRAFT,
        "$dynamicAnchor": "meta",
        "$ref": _DRAFT,
        "properties": {"dependencies": False, "$recursiveAnchor": False, "$recursiveRef": False},
        "unevaluatedProperties": False,
    },
    offline=True,
)


class Schema:
    """A valid schema. `problem` returns the first way in which a value does not fit."""

    def __init__(self, schema: Any, pattern_bytes_max: int = PATTERN_BYTES_MAX) -> None:
        """Compile a schema; `pattern_bytes_max` bounds what each pattern is compiled to, and so the
        time that it takes.
        """
        try:
            wrong = max(_CLOSED_DRAFT.iter_errors(schema), key=lambda error: len(error.instance_path), default=None)
            if wrong is not None:
                raise wrong
            self._validator = Draft202012Validator(
                schema,
                pattern_options=RegexOptions(size_limit=pattern_bytes_max, dfa_size_limit=pattern_bytes_max),
                validate_formats=False,
                offline=True,
                mask="the value",
            )
        except ValidationError as error:
            raise SettingsError(f"{_place('schema', error)}: {_meant(error)}") from None
        except ValueError as error:
            raise SettingsError(f"schema cannot be read: {error}") from None
        self._is_finite = _is_finite(schema)

    def problem(self, value: Any) -> str | None:
        """Return where and why the value does not fit, naming fields but no value; None when it
        fits.
        """
        try:
            if self._validator.is_valid(value):
                return None
            # To find the reason takes exponential time where a schema contains itself; the verdict
            # does not.
            if self._is_finite:
                self._validator.validate(value)
        except ValidationError as error:
            return f"{_place('$', error)}: {error.message[:WHY_CHARS_MAX]}"
        except ValueError:
            return "$ cannot be checked: it is nested too deeply or has text that is not Unicode"
        return "$ does not fit"


def _meant(error: ValidationError) -> str:
    """Return what is wrong with a schema, for its author."""
    if isinstance(error.kind, ValidationErrorKind.UnevaluatedProperties):
        return f"JSON Schema has no word {error.kind.unexpected[0]!r}: correct its spelling, or remove it"
    return error.message[:WHY_CHARS_MAX]


def _place(root: str, error: ValidationError) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path)
    return root + "".join(steps)[:WHY_CHARS_MAX]


def _is_finite(schema: Any) -> bool:
    """Return whether all references lead to the schema's own $defs, and none of them back to
    itself.
    """
    if not isinstance(schema, dict):
        return True
    references = {name: set(_references(one)) for name, one in schema.get("$defs", {}).items()}
    references[""] = set(_references({word: one for word, one in schema.items() if word != "$defs"}))
    try:
        TopologicalSorter(references).prepare()
    except CycleError:
        return False
    return set().union(*references.values()) <= references.keys()


def _references(schema: Any) -> Iterator[str]:
    """Yield the name of each definition that a schema refers to, and any other reference
    unchanged."""
    if isinstance(schema, dict):
        for word, inner in schema.items():
            if word in ("$ref", "$dynamicRef") and isinstance(inner, str):
                yield inner.removeprefix(_DEFINITION) if inner.startswith(_DEFINITION) else inner
            else:
                yield from _references(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _references(inner)
