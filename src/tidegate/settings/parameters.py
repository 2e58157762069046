"""Parameters that an operator puts into requests of batches: into all, by endpoint, or by model."""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tidegate.core.input.line_faults import LineFault
from tidegate.core.input.parameters import check_parameters
from tidegate.core.job_shape import ParameterLevel
from tidegate.settings.declare import DeclaredSetting, Group
from tidegate.settings.declare import about as _about
from tidegate.settings.key_path import KeyPath

ParameterName = Annotated[str, Meta(min_length=1, max_length=128)]


class ParameterEntry(DeclaredSetting, frozen=True):
    """Parameters for one endpoint or one model."""

    defaults: dict[ParameterName, Any] = msgspec.field(default_factory=dict)
    overrides: dict[ParameterName, Any] = msgspec.field(default_factory=dict)


class ParametersSettings(Group, frozen=True):
    defaults: Annotated[
        dict[ParameterName, Any],
        _about("Parameters of a request in a batch that leaves them out, such as {temperature: 0}."),
    ] = msgspec.field(default_factory=dict)
    overrides: Annotated[
        dict[ParameterName, Any],
        _about("Parameters of every request in a batch, whatever it says itself."),
    ] = msgspec.field(default_factory=dict)
    endpoints: Annotated[
        dict[Annotated[str, Meta(min_length=1, max_length=132)], ParameterEntry],
        Meta(
            max_length=64,
            description="`defaults` and `overrides` by endpoint, such as /v1/chat/completions; they count more than those for all.",
        ),
    ] = msgspec.field(default_factory=dict)
    models: Annotated[
        dict[Annotated[str, Meta(min_length=1, max_length=255)], ParameterEntry],
        Meta(
            max_length=10_000,
            description="`defaults` and `overrides` by the model that a request names; they count more than an endpoint's.",
        ),
    ] = msgspec.field(default_factory=dict)

    def levels(self) -> tuple[ParameterLevel, ...]:
        """Return the levels with parameters: for all requests, then by endpoint, then by model."""
        found = [ParameterLevel(self.defaults, self.overrides)]
        found += [ParameterLevel(one.defaults, one.overrides, endpoint=name) for name, one in self.endpoints.items()]
        found += [ParameterLevel(one.defaults, one.overrides, model=name) for name, one in self.models.items()]
        return tuple(level for level in found if level.defaults or level.overrides)


def problems(settings: ParametersSettings) -> Iterator[tuple[KeyPath, str]]:
    """Return the parameters that no request may have, each with its path and the reason."""
    places: list[tuple[KeyPath, str, ParametersSettings | ParameterEntry]] = [(("parameters",), "", settings)]
    places += [(("parameters", "endpoints", name), name, one) for name, one in settings.endpoints.items()]
    places += [(("parameters", "models", name), "", one) for name, one in settings.models.items()]
    for path, endpoint, one in places:
        for kind, values in (("defaults", one.defaults), ("overrides", one.overrides)):
            try:
                check_parameters(values, endpoint)
            except LineFault as fault:
                yield (*path, kind, *([fault.param] if fault.param else [])), fault.message.rstrip(".")
