"""The shape of a job's work: what its caller asks of all lines at once, and the files that its input is made of.

These are plain values that are stored with a job and sent to the process that reads its input. What they mean stands where they are used.
"""

from typing import Any

import msgspec


class ParameterLevel(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters for the bodies of requests: a default fills what a body leaves out, an override replaces what it says. They hold for one
    endpoint or one model where either is named."""

    defaults: dict[str, Any] = msgspec.field(default_factory=dict)
    overrides: dict[str, Any] = msgspec.field(default_factory=dict)
    endpoint: str = ""
    model: str = ""


class InputPart(msgspec.Struct, frozen=True):
    """One of the files that an input is made of: where its bytes lie, and what they were when it was uploaded (empty: unknown)."""

    file_id: str
    path: str
    sha256: str = ""


class JobShape(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a caller asks for when a job is created, and what never changes afterwards."""

    defaults: dict[str, Any] = msgspec.field(default_factory=dict)
    overrides: dict[str, Any] = msgspec.field(default_factory=dict)

    def levels(self) -> tuple[ParameterLevel, ...]:
        """The job's own parameters, which count more than any of the operator's."""
        if not self.defaults and not self.overrides:
            return ()
        return (ParameterLevel(self.defaults, self.overrides),)


PLAIN = JobShape()
_decode = msgspec.json.Decoder(JobShape).decode


def shape_text(shape: JobShape) -> str | None:
    """A shape as the store keeps it; None where nothing was asked for."""
    return None if shape == PLAIN else msgspec.json.encode(shape).decode()


def shape_from(text: str | None) -> JobShape:
    return PLAIN if text is None else _decode(text)
