"""The parts of a setting's declaration: groups, bounds with a sentence, and kinds of text."""

from typing import Annotated

import msgspec
from msgspec import Meta

Host = Annotated[str, Meta(min_length=1, max_length=255)]
Text = Annotated[str, Meta(max_length=2048)]
Name = Annotated[str, Meta(max_length=255)]
ShortName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]
ImportPath = Annotated[str, Meta(max_length=255, pattern=r"^$|^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
Weight = Annotated[float, Meta(ge=0.001, le=1_000_000.0)]
DAY_S = 86_400
# Marks a setting that tunes the inside: its default is right unless a measurement shows otherwise.
ADVANCED = Meta(extra={"advanced": True})


def whole(low: int, high: int, about: str) -> Meta:
    return Meta(ge=low, le=high, description=about)


def number(low: float, high: float, about: str) -> Meta:
    return Meta(ge=float(low), le=float(high), description=about)


def about(text: str) -> Meta:
    return Meta(description=text)


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named set of settings: `server`, `store`, …"""


class DeclaredSetting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One value of a mapping or list that an operator fills: a deployment, a tenant, a limit."""
