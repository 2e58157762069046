"""How a bug is planted: another text for a part of one statement or script, or another value in the place of one name, for a while."""

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

from msgspec.structs import replace

from tidegate.backends import redis_line
from tidegate.store.database.queries import statements

Planting = Callable[[ExitStack], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted bug: the family of plans in which a handful of seeds shows it, what is wrong in words, and how it is planted."""

    family: str
    words: str
    plant: Planting


def sql(name: str, old: str, new: str) -> Planting:
    """Another text for a part of one statement."""

    def plant(stack: ExitStack) -> None:
        known = statements()
        right = known[name]
        if old not in right.sql:
            raise ValueError(f"{name} does not say {old!r} any more: this planted bug must be planted again")
        known[name] = replace(right, sql=right.sql.replace(old, new))
        stack.callback(known.__setitem__, name, right)

    return plant


def lua(name: str, old: str, new: str) -> Planting:
    """Another text for a part of one Lua script."""

    def plant(stack: ExitStack) -> None:
        right = redis_line.script_text
        if old not in right(name):
            raise ValueError(f"{name}.lua does not say {old!r} any more: this planted bug must be planted again")

        def text(asked: str) -> str:
            return right(asked).replace(old, new) if asked == name else right(asked)

        stack.enter_context(mock.patch.object(redis_line, "script_text", text))

    return plant


def patch(target: Any, name: str, new: Any) -> Planting:
    """Another value in the place of one name; a function that names its parameters names those of the one it replaces."""

    def plant(stack: ExitStack) -> None:
        if not _fits(getattr(target, name, None), new):
            raise ValueError(f"{name} has other parameters by now: this planted bug must be planted again")
        stack.enter_context(mock.patch.object(target, name, new))

    return plant


def _fits(right: Any, new: Any) -> bool:
    if not inspect.isfunction(new) or not inspect.isfunction(right):
        return True
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own, theirs = (inspect.signature(one).parameters.values() for one in (new, right))
    return any(one.kind in rest for one in own) or [one.name for one in own] == [one.name for one in theirs]


def both(*plantings: Planting) -> Planting:
    def plant(stack: ExitStack) -> None:
        for planting in plantings:
            planting(stack)

    return plant
