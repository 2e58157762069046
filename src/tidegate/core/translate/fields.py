"""Read objects field by field, so that no field is overlooked: a field that was not taken is
refused by its path.

This module knows neither API: only that null means absent, and how a refusal is worded.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from tidegate.core.errors import ApiProblem


class Translated(msgspec.Struct, frozen=True):
    """A body in the other shape.

    `left_out` are the paths of fields that are only hints and have no counterpart there.
    """

    body: bytes
    left_out: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False


class Voice(msgspec.Struct):
    """The side that is at fault when a translation fails: a caller's request (400) or an upstream's
    answer (502).
    """

    status: int
    unknown_code: str
    malformed_code: str
    other_side: str
    whole: str
    left_out: list[str] = msgspec.field(default_factory=list)

    @classmethod
    def request(cls, other_side: str) -> "Voice":
        return cls(400, "unsupported_parameter", "invalid_request", other_side, "The body")

    @classmethod
    def answer(cls, other_side: str) -> "Voice":
        code = "invalid_upstream_response"
        return cls(502, code, code, other_side, "The model server's answer")

    def unsupported(self, path: str, why: str = "") -> ApiProblem:
        """Return the refusal of a valid field that the other API does not have."""
        message = (
            why
            or f"`{path}` has no counterpart at {self.other_side}: remove it, or name a model that takes it as it is."
        )
        return ApiProblem(self.status, self.unknown_code, message, param=path)

    def malformed(self, path: str, why: str) -> ApiProblem:
        return ApiProblem(self.status, self.malformed_code, f"`{path}` {why}.", param=path)


def decode(body: bytes, voice: Voice) -> Any:
    try:
        body.decode()
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
        why = "it is nested too deeply" if isinstance(wrong, RecursionError) else str(wrong)[:200]
        raise ApiProblem(voice.status, voice.malformed_code, f"{voice.whole} is not valid JSON: {why}.") from None


def encode(value: Any) -> bytes:
    return msgspec.json.encode(value)


class Fields:
    """One object under translation. The caller calls `done` once it has taken every known field."""

    __slots__ = ("_left", "path", "voice")

    def __init__(self, value: Any, path: str, voice: Voice) -> None:
        if not isinstance(value, dict):
            raise voice.malformed(path or "body", "must be an object")
        self._left: dict[str, Any] = {name: one for name, one in value.items() if one is not None}
        self.path = path
        self.voice = voice

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def field_value(self, name: str, *kinds: type) -> Any:
        """Return the field's value, of one of these kinds; None when it is absent or null."""
        value = self._left.pop(name, None)
        if value is not None and kinds and type(value) not in kinds:
            raise self.voice.malformed(self.at(name), f"must be {' or '.join(_KINDS[kind] for kind in kinds)}")
        return value

    def need(self, name: str, *kinds: type) -> Any:
        value = self.field_value(name, *kinds)
        if value is None:
            raise self.voice.malformed(self.at(name), "is missing")
        return value

    def hint(self, *names: str) -> None:
        """Leave out fields that change no answer, and note their names."""
        for name in names:
            if self._left.pop(name, None) is not None:
                self.voice.left_out.append(self.at(name))

    def only(self, name: str, *harmless: Any) -> None:
        """Refuse a field without a counterpart on the other side, unless its value is harmless or
        null.
        """
        value = self._left.pop(name, None)
        if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
            raise self.voice.unsupported(self.at(name))

    def inner(self, name: str) -> "Fields | None":
        value = self.field_value(name)
        return None if value is None else Fields(value, self.at(name), self.voice)

    def each(self, name: str) -> "Iterator[Fields]":
        for index, value in enumerate(self.field_value(name, list) or ()):
            yield Fields(value, f"{self.at(name)}[{index}]", self.voice)

    def done(self) -> None:
        for name in self._left:
            raise self.voice.unsupported(self.at(name))


def each_of(values: list[Any], path: str, voice: Voice) -> Iterator[Fields]:
    for index, value in enumerate(values):
        yield Fields(value, f"{path}[{index}]", voice)


_KINDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
