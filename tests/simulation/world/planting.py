"""How a bug is planted: another text for a part of one statement or script, or another value in the place of one name, for a while."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

from msgspec.structs import replace

from tidegate.backends import redis_line
from tidegate.store.queries import statements

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
            raise ValueError(f"{name} does not say {old!r} any more: this planted bug must be planted anew")
        known[name] = replace(right, sql=right.sql.replace(old, new))
        stack.callback(known.__setitem__, name, right)

    return plant


def lua(name: str, old: str, new: str) -> Planting:
    """Another text for a part of one Lua script."""

    def plant(stack: ExitStack) -> None:
        right = redis_line.script_text
        if old not in right(name):
            raise ValueError(f"{name}.lua does not say {old!r} any more: this planted bug must be planted anew")

        def text(asked: str) -> str:
            return right(asked).replace(old, new) if asked == name else right(asked)

        stack.enter_context(mock.patch.object(redis_line, "script_text", text))

    return plant


def patch(target: Any, name: str, new: Any) -> Planting:
    return lambda stack: stack.enter_context(mock.patch.object(target, name, new)) and None


def both(*plantings: Planting) -> Planting:
    def plant(stack: ExitStack) -> None:
        for planting in plantings:
            planting(stack)

    return plant
