"""What `tidegate run` asks the model server before the first call: most mistakes show there, before anything is paid for."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from tidegate.cli import input_file
from tidegate.core.errors import SettingsError
from tidegate.core.queues import QueueState
from tidegate.settings import Settings, deployments

if TYPE_CHECKING:
    from tidegate.upstream.routing.probe import Probe

SHOWN_MAX = 8
# More names than these that a server does not list, and every line is read to see which are models.
UNLISTED_MAX = 8
_ANYWAY = "--no-check sends the requests all the same."


async def check_upstream(settings: Settings, source: input_file.Input, model: str | None) -> None:
    """Refuse a model server that is not there, is none, refuses our key, or does not serve a model that is asked for."""
    from tidegate import service

    probes = await service.probe_upstreams(settings)
    queues = [state for _, state in await service.queue_states(deployments(settings))]
    if any(isinstance(state, QueueState) for state in queues):
        return
    urls = ", ".join(dict.fromkeys(one.url for one in deployments(settings)))
    if not any(probe.reachable for probe in probes):
        messages = [probe.message for probe in probes] + [f"its queue cannot be reached ({away})" for away in queues]
        why = messages[0] if messages[0].endswith("?") else f"{messages[0].rstrip('.')}."
        raise SettingsError(
            f"Nothing answers at {urls}: {why} Start the model server or fix --upstream; --wait waits for it."
        )
    if all(probe.status == 401 for probe in probes):
        raise SettingsError(f"The model server refuses us: {probes[0].message}. Name a key with --api-key env:NAME.")
    if all(probe.reachable and probe.status != 200 for probe in probes):
        raise SettingsError(_not_a_model_server(urls, probes[0].status))
    if all(probe.reachable and not probe.models for probe in probes):
        raise SettingsError(
            f"{urls} answers, but not as a model server: {probes[0].message or 'it lists no model'}. Fix --upstream; {_ANYWAY}"
        )
    await _check_models(settings, source, model, probes)


def _not_a_model_server(urls: str, status: int) -> str:
    if status == 404:
        hint = "Model servers have it under /v1: write --upstream http://HOST:PORT/v1"
    else:
        hint = "Is it the address of a model server? Fix --upstream"
    return f"{urls} answers GET /v1/models with status {status}. {hint}; {_ANYWAY}"


async def _serves_all(settings: Settings, names: Sequence[str], listed: Collection[str]) -> bool:
    """Whether a server has every one of these, which are few."""
    from tidegate import service

    unlisted = [name for name in names if name not in listed]
    return len(unlisted) <= UNLISTED_MAX and all([await service.knows_model(settings, name) for name in unlisted])


async def _check_models(
    settings: Settings, source: input_file.Input, model: str | None, probes: Sequence["Probe"]
) -> None:
    """Where one address serves every model, the models of the lines must be among those that it lists or knows by name."""
    from tidegate import service

    if settings.models or not settings.upstream.url or not all(probe.is_whole for probe in probes):
        return
    listed = {name for probe in probes for name in probe.models}
    perhaps = [name.decode(errors="replace") for name in source.perhaps_models]
    if not model and await _serves_all(settings, perhaps, listed):
        return
    asked = {model: 0} if model else input_file.models_of(source.path)
    for name, line in asked.items():
        if name in listed or await service.knows_model(settings, name):
            continue
        shown = ", ".join(sorted(listed)[:SHOWN_MAX]) + (", …" if len(listed) > SHOWN_MAX else "")
        whose = "" if source.places.names or source.places.rows_before is not None else f" of {source.name}"
        place = f"{source.places.words(line)}{whose} asks for" if line else "--model names"
        raise SettingsError(
            f"{settings.upstream.url} does not serve the model {name!r}, which {place}; it serves {shown}. "
            f"Fix the name, or choose one for all lines with --model; {_ANYWAY}"
        )
