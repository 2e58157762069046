"""Reads fields of a batch from the command line: `--field NAME=VALUE`, with dots in the
names of nested fields."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tidegate.core.errors import SettingsError

OWN_SCHEMA = "response_format"
Given = Annotated[
    list[str] | None,
    typer.Option(
        "--field",
        metavar="NAME=VALUE",
        help="Another field of the API, such as retry.attempts_max=5 or defaults.temperature=0; may be repeated.",
        show_default=False,
    ),
]


def read(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the given fields, nested as in a body of the API."""
    fields: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign or not all(name.split(".")):
            raise SettingsError(f"--field {pair}: write NAME=VALUE, such as retry.attempts_max=5.")
        put(fields, name, _value(text))
    return fields


def put(fields: dict[str, Any], name: str, value: object) -> None:
    """Put a value into nested fields, at its dotted name."""
    *steps, last = name.split(".")
    inner: Any = fields
    for step in steps:
        inner = inner.setdefault(step, {})
        if not isinstance(inner, dict):
            raise _twice(name)
    if last in inner:
        raise _twice(name)
    inner[last] = value


def read_schema(name: str) -> Any:
    """Return the schema that `--schema` names: the content of a file, or
    `response_format` for each request's own."""
    if name == OWN_SCHEMA:
        return name
    try:
        return msgspec.json.decode(Path(name).read_bytes())
    except OSError as error:
        raise SettingsError(f"--schema {name} cannot be read: {error.strerror or error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"--schema {name} cannot be used: it is no JSON ({error}).") from None


def _value(text: str) -> Any:
    """Return the value of a JSON text, or the text itself if it is no JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def _twice(name: str) -> SettingsError:
    return SettingsError(f"{name} is given twice: by two --field, or by one and an option. Give it once.")
