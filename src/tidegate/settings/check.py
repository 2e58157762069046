"""A checker that turns plain values into the declared types, and describes those that do not fit.

It collects all problems instead of stopping at the first, so that a configuration is fixed in one
round. A secret's value never appears in a problem.
"""

import difflib
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, Protocol

import msgspec
from msgspec import inspect

from tidegate.core.deployments import Secret
from tidegate.core.errors import SettingsError
from tidegate.settings import catalog, quantities
from tidegate.settings.key_path import KeyPath

SHOWN_MAX = 60
_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


class Problems(Protocol):
    def add(self, path: KeyPath, text: str) -> None:
        """Remember that the value at this path is wrong."""


class RefusedSettings(Exception):
    """The value cannot be used; the problem has been noted."""


class Checker:
    def __init__(self, problems: Problems, resolve_secret: Callable[[str, KeyPath], Secret]) -> None:
        self._problems = problems
        self._resolve_secret = resolve_secret

    def typed_value(self, kind: inspect.Type, value: object, path: KeyPath) -> Any:
        """Return the value as the declared type.

        If it does not fit, note the problem and raise RefusedSettings.
        """
        kind = catalog.bare(kind)
        if catalog.is_secret(kind):
            return self._take_secret(value, path)
        match kind:
            case inspect.StructType():
                return self._take_struct(kind, value, path)
            case inspect.DictType():
                return self._take_dict(kind, value, path)
            case inspect.VarTupleType():
                return self._take_list(kind, value, path)
            case inspect.UnionType():
                inner = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
                return self.typed_value(inner[0], value, path)
            case inspect.AnyType():
                # For example a JSON Schema, which its reader checks.
                return value
            case inspect.FloatType() if type(value) is int:
                value = float(value)
            case inspect.LiteralType() if isinstance(value, str) and value.lower() in kind.values:
                value = value.lower()
        return self._take_plain(kind, value, path)

    def _take_plain(self, kind: inspect.Type, value: object, path: KeyPath) -> object:
        wanted: dict[type, type | tuple[type, ...]] = {
            inspect.IntType: int,
            inspect.FloatType: float,
            inspect.BoolType: bool,
            inspect.StrType: str,
            inspect.LiteralType: str,
        }
        given, name = value, str(path[-1]) if path else ""
        if isinstance(kind, inspect.IntType | inspect.FloatType) and isinstance(value, str):
            value = _number(kind, quantities.parse(name, value), value)
        if type(value) is not wanted[type(kind)] or not _fits(kind, value):
            examples = quantities.examples(name) if isinstance(kind, inspect.IntType | inspect.FloatType) else ""
            also = f", or text such as {examples}" if examples else ""
            self._refuse(path, f"is {_shown(given)}, but must be {catalog.allowed(kind)}{also}")
        return value

    def _take_secret(self, value: object, path: KeyPath) -> Secret:
        if isinstance(value, Secret):
            return value
        if not isinstance(value, str) or not value:
            self._refuse(path, f"must be {catalog.allowed(inspect.type_info(Secret))}, as text in quotes")
        try:
            return self._resolve_secret(value, path)
        except SettingsError as error:
            self._refuse(path, str(error))

    def _take_struct(self, kind: inspect.StructType, value: object, path: KeyPath) -> object:
        if not isinstance(value, dict):
            self._refuse(path, f"is {_shown(value)}, but must be a mapping of: {', '.join(_names(kind))}")
        fields = {field.encode_name: field for field in kind.fields}
        taken: dict[str, object] = {}
        sound = True
        for name, inner in value.items():
            if name not in fields:
                self._problems.add((*path, name), f"is not a known key; {nearest(name, _names(kind))}")
                sound = False
            elif inner is not None:
                try:
                    taken[fields[name].name] = self.typed_value(fields[name].type, inner, (*path, name))
                except RefusedSettings:
                    sound = False
        missing = [
            name for name, field in fields.items() if field.required and field.name not in taken and name not in value
        ]
        for name in missing:
            self._problems.add((*path, name), "is missing")
        if not sound or missing:
            raise RefusedSettings
        return kind.cls(**taken)

    def _take_dict(self, kind: inspect.DictType, value: object, path: KeyPath) -> dict[str, object]:
        if not isinstance(value, dict):
            self._refuse(path, f"is {_shown(value)}, but must be a mapping from name to value")
        if kind.max_length is not None and len(value) > kind.max_length:
            self._refuse(path, f"has {len(value):,} entries, but may have {kind.max_length:,}")
        taken = {}
        for name, inner in value.items():
            with suppress(RefusedSettings):
                key = self._take_plain(catalog.bare(kind.key_type), name, (*path, name))
                taken[str(key)] = self.typed_value(kind.value_type, inner, (*path, name))
        if len(taken) < len(value):
            raise RefusedSettings
        return taken

    def _take_list(self, kind: inspect.VarTupleType, value: object, path: KeyPath) -> tuple[object, ...]:
        if not isinstance(value, list | tuple):
            self._refuse(path, f"is {_shown(value)}, but must be {catalog.allowed(kind)}")
        if kind.max_length is not None and len(value) > kind.max_length:
            self._refuse(path, f"has {len(value):,} entries, but may have {kind.max_length:,}")
        if kind.min_length is not None and len(value) < kind.min_length:
            self._refuse(path, f"has {len(value):,} entries, but needs {kind.min_length:,}")
        taken = []
        for index, inner in enumerate(value):
            with suppress(RefusedSettings):
                taken.append(self.typed_value(kind.item_type, inner, (*path, index)))
        if len(taken) < len(value):
            raise RefusedSettings
        return tuple(taken)

    def _refuse(self, path: KeyPath, text: str) -> NoReturn:
        self._problems.add(path, text)
        raise RefusedSettings


def from_text(kind: inspect.Type, text: str, name: str) -> object:
    """Return the value that a variable or an option spells; text that cannot be read stays text."""
    kind = catalog.bare(kind)
    match kind:
        case inspect.BoolType():
            word = text.strip().lower()
            return True if word in _TRUE else False if word in _FALSE else text
        case inspect.IntType() | inspect.FloatType():
            try:
                return int(text) if isinstance(kind, inspect.IntType) else float(text)
            except ValueError:
                return text
        case inspect.VarTupleType() | inspect.DictType():
            if isinstance(kind, inspect.VarTupleType) and not text.lstrip().startswith("["):
                return [part.strip() for part in text.split(",") if part.strip()]
            # The YAML parser takes a while to load, and few variables hold YAML.
            from tidegate.settings.yaml_file import parse

            return parse(text, name).values
    return text


def nearest(name: str, known: list[str]) -> str:
    """Return a sentence that names the closest known word, or all of them if none is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean `{close[0]}`?" if close else f"known are: {', '.join(known)}"


def _names(kind: inspect.StructType) -> list[str]:
    return [field.encode_name for field in kind.fields]


def _number(kind: inspect.IntType | inspect.FloatType, quantity: float | None, text: str) -> object:
    """Return a duration or size as the declared type.

    Return the text itself if it is neither, or if it is no whole number but must be one.
    """
    if quantity is None:
        return text
    if isinstance(kind, inspect.FloatType):
        return quantity
    return int(quantity) if quantity.is_integer() else text


def _fits(kind: inspect.Type, value: Any) -> bool:
    match kind:
        case inspect.IntType() | inspect.FloatType():
            return (kind.ge is None or value >= kind.ge) and (kind.le is None or value <= kind.le)
        case inspect.LiteralType():
            return value in kind.values
        case inspect.StrType():
            long_enough = kind.min_length is None or len(value) >= kind.min_length
            short_enough = kind.max_length is None or len(value) <= kind.max_length
            matches = kind.pattern is None or re.search(kind.pattern, value) is not None
            return long_enough and short_enough and matches and value.isprintable()
    return True


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value) if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
