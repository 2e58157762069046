"""The list of all settings, made from their declarations.

The loader, the reference page and `tidegate config` use it.
"""

from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from tidegate.core.deployments import Secret
from tidegate.settings.groups import Group, Settings


class Setting(msgspec.Struct, frozen=True):
    """One setting as the reference page and `tidegate config` show it."""

    key: str
    variable: str
    about: str
    default: object
    allowed: str
    type: inspect.Type
    is_secret: bool
    is_advanced: bool


@cache
def declaration() -> inspect.Type:
    """Return the type of all settings. It is cached, because it is slow to make."""
    return inspect.type_info(Settings)


@cache
def settings() -> tuple[Setting, ...]:
    """Return all settings in the order of their declarations."""
    return tuple(_walk(declaration(), ""))


@cache
def by_key() -> dict[str, Setting]:
    return {setting.key: setting for setting in settings()}


def bare(kind: inspect.Type) -> inspect.Type:
    """Return a type without its description."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    return kind


def is_secret(kind: inspect.Type) -> bool:
    kind = bare(kind)
    if isinstance(kind, inspect.UnionType):
        return any(is_secret(one) for one in kind.types)
    return getattr(kind, "cls", None) is Secret


def allowed(kind: inspect.Type) -> str:
    """Return in words what a value of this type may be."""
    kind = bare(kind)
    if is_secret(kind):
        return "env:NAME, file:PATH or the secret itself"
    match kind:
        case inspect.UnionType():
            return " or ".join(allowed(one) for one in kind.types if not isinstance(one, inspect.NoneType))
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return f"a whole number from {_bound(kind.ge)} to {_bound(kind.le)}"
        case inspect.FloatType():
            return f"a number from {_bound(kind.ge)} to {_bound(kind.le)}"
        case inspect.LiteralType():
            return " or ".join(str(value) for value in kind.values)
        case inspect.VarTupleType():
            return f"a list; each {allowed(kind.item_type)}"
        case inspect.DictType() | inspect.StructType():
            return "a mapping"
        case inspect.StrType():
            pattern = f" that matches {kind.pattern}" if kind.pattern else ""
            return f"text of at most {_bound(kind.max_length)} characters{pattern}"
    raise TypeError(f"settings cannot be of type {kind}")


def _bound(bound: float | None) -> str:
    if bound is None:
        raise TypeError("every setting declares its bounds")
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _walk(kind: inspect.Type, prefix: str) -> list[Setting]:
    found: list[Setting] = []
    assert isinstance(kind, inspect.StructType)
    for field in kind.fields:
        inner = bare(field.type)
        if isinstance(inner, inspect.StructType) and issubclass(inner.cls, Group):
            found += _walk(inner, f"{prefix}{field.name}.")
            continue
        key = f"{prefix}{field.name}"
        found.append(
            Setting(
                key=key,
                variable="TIDEGATE_" + key.upper().replace(".", "_"),
                about=_about(field.type),
                default=_default(field),
                allowed=allowed(field.type),
                type=field.type,
                is_secret=is_secret(field.type),
                is_advanced=_is_advanced(field.type),
            )
        )
    return found


def _about(kind: inspect.Type) -> str:
    schema: dict[str, Any] = (kind.extra_json_schema or {}) if isinstance(kind, inspect.Metadata) else {}
    return str(schema.get("description", ""))


def _is_advanced(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.Metadata) and bool((kind.extra or {}).get("advanced"))


def _default(field: inspect.Field) -> object:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return field.default_factory() if field.default_factory is not msgspec.NODEFAULT else None
