"""Turns what an operator wrote about models into the engine's deployments."""

from collections.abc import Iterator

import msgspec

from tidegate.core.deployments import Deployment, Engine, Tls
from tidegate.core.errors import SettingsError
from tidegate.settings.groups import ModelDeployment, Settings
from tidegate.settings.yaml_file import KeyPath

ANY_MODEL = "upstream"


def deployments(settings: Settings) -> tuple[Deployment, ...]:
    """Every deployment: one per entry of `models`, then the one for any other model where `upstream.url` is set."""
    found = [_one(model, index, entry) for _, model, index, entry in _entries(settings)]
    if settings.upstream.url:
        found.append(_any_model(settings))
    return tuple(found)


def problems(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    """Every deployment that cannot be used, by its path."""
    names: dict[str, KeyPath] = {ANY_MODEL: ("upstream", "url")} if settings.upstream.url else {}
    if settings.upstream.url:
        try:
            _any_model(settings)
        except SettingsError as error:
            yield ("upstream", "url"), f"cannot be used: {error}"
    for path, model, index, entry in _entries(settings):
        try:
            name = _one(model, index, entry).name
        except SettingsError as error:
            yield path, f"cannot be used: {error}"
            continue
        if name in names:
            other = ".".join(str(part) for part in names[name])
            yield path, f"has the name {name!r}, which {other} has already; give it another one"
        names[name] = path


def _entries(settings: Settings) -> Iterator[tuple[KeyPath, str, int, ModelDeployment]]:
    for model, entry in settings.models.items():
        for index, deployment in enumerate(entry.deployments):
            yield ("models", model, "deployments", index), model, index, deployment


def _one(model: str, index: int, entry: ModelDeployment) -> Deployment:
    return Deployment(
        name=entry.name or f"{model}/{index + 1}",
        url=entry.url,
        models=(model,),
        engine=Engine(entry.engine),
        api_key=entry.api_key,
        max_in_flight=entry.max_in_flight,
        weight=entry.weight,
        read_timeout_s=entry.read_timeout_s,
        total_timeout_s=entry.total_timeout_s,
        tls=Tls(**msgspec.structs.asdict(entry.tls)),
    )


def _any_model(settings: Settings) -> Deployment:
    # Its slots are the worker's own: whoever names one upstream and raises the worker's number means that one.
    return Deployment(
        name=ANY_MODEL,
        url=settings.upstream.url,
        api_key=settings.upstream.api_key,
        max_in_flight=settings.worker.in_flight_max,
    )
