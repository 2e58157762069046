"""Checks that `tidegate run` makes at the model server before the first call: most mistakes show
there, before anything is paid."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from tidegate.cli.terminal import input_file
from tidegate.cli.terminal.input_file import RunOptions
from tidegate.core.deployments import Deployment, EngineKind
from tidegate.core.errors import SettingsError
from tidegate.core.queues import QueueState
from tidegate.settings import Settings, deployments

if TYPE_CHECKING:
    from tidegate.upstream.calls.router import Router
    from tidegate.upstream.routing.probe import Probe

SHOWN_MAX = 8
# If a server does not list more names than this, every line is read to see which of
# them are models.
UNLISTED_MAX = 8
_ANYWAY = "--no-check sends the requests all the same."


async def check_upstream(settings: Settings, router: "Router", source: input_file.Input, asked: RunOptions) -> None:
    """Refuse a model that is not served, and a server that does not answer, is no model
    server, or refuses our key."""
    from tidegate import service

    # The configuration alone may be enough, without a server.
    await AskedModels(settings, router).check(source, asked)
    probes = await service.probe_upstreams(settings)
    queues = [state for _, state in await service.queue_states(deployments(settings))]
    if any(isinstance(state, QueueState) for state in queues):
        return
    urls = ", ".join(dict.fromkeys(one.url for one in deployments(settings)))
    if not any(probe.reachable for probe in probes):
        messages = [probe.message for probe in probes] + [f"its queue cannot be reached ({away})" for away in queues]
        raise SettingsError(
            f"Nothing answers at {urls}: {_sentence(messages[0])} Start the model server or fix {_named_by(settings)}; --wait waits for it."
        )
    if all(probe.status == 401 for probe in probes):
        key = "Fix api_key under models" if settings.models else "Name a key with --api-key env:NAME"
        raise SettingsError(f"The model server refuses us: {probes[0].message}. {key}.")
    if all(probe.reachable and probe.status != 200 for probe in probes):
        raise SettingsError(_not_a_model_server(settings, urls, probes[0]))
    if all(probe.reachable and not probe.models for probe in probes):
        raise SettingsError(
            f"{urls} answers, but not as a model server: {_sentence(probes[0].message or 'it lists no model')} "
            f"Fix {_named_by(settings)}; {_ANYWAY}"
        )
    await AskedModels(settings, router, probes).check(source, asked)


def _sentence(words: str) -> str:
    return words if words.endswith("?") else f"{words.rstrip('.')}."


def _named_by(settings: Settings) -> str:
    """Return where the user wrote the address of a model server."""
    return "its url under models" if settings.models else "--upstream"


def _not_a_model_server(settings: Settings, urls: str, probe: "Probe") -> str:
    return f"{urls} answers GET /v1/models with status {probe.status}. {_hint(settings, urls, probe)}; {_ANYWAY}"


def _hint(settings: Settings, urls: str, probe: "Probe") -> str:
    """Return what the user can do about such an answer."""
    named_by = _named_by(settings)
    if 300 <= probe.status <= 399:
        where = f"It leads to {probe.leads_to}" if probe.leads_to else "It leads nowhere"
        return f"{where}, and redirects are not followed: write the final address in {named_by}"
    if probe.status >= 500 and probe.status != 501:
        return f"If it is still starting, --wait waits for it; otherwise fix {named_by}"
    if probe.status == 404 and not urls.rstrip("/").endswith("/v1"):
        example = "url: http://HOST:PORT/v1" if settings.models else "--upstream http://HOST:PORT/v1"
        return f"Model servers have it under /v1: write {example}"
    return f"Is it the address of a model server? Fix {named_by}"


class AskedModels:
    """The check that the model servers of a run serve the models of its lines, as far as their
    answers and the configuration show."""

    def __init__(self, settings: Settings, router: "Router", probes: Sequence["Probe"] = ()) -> None:
        self._settings = settings
        self._router = router
        self._probes = {probe.deployment: probe for probe in probes}

    async def check(self, source: input_file.Input, asked: RunOptions) -> None:
        """Refuse a model that is not served: the stronger one of `answers.escalate_to`, the one for
        all lines, or the lines' own."""
        model, stronger = asked.model, asked.answers.escalate_to if asked.answers is not None else None
        if stronger is not None and (fault := await self._fault(stronger)):
            who, rest = fault
            raise SettingsError(f"{who} the model {stronger!r}, which answers.escalate_to names; {rest}; {_ANYWAY}")
        perhaps = [name.decode(errors="replace") for name in source.perhaps_models]
        if not model and await self._serves_all(perhaps):
            return
        for name, line in ({model: 0} if model else input_file.models_of(source.path)).items():
            if fault := await self._fault(name):
                whose = "" if source.places.names or source.places.rows_before is not None else f" of {source.name}"
                place = f"{source.places.words(line)}{whose} asks for" if line else "--model names"
                who, rest = fault
                raise SettingsError(f"{who} the model {name!r}, which {place}; {rest}; {_ANYWAY}")

    async def _serves_all(self, names: Sequence[str]) -> bool:
        """Return whether all these models are served; False if many names look unserved, so that
        the lines are read instead."""
        doubtful = [name for name in names if self._denied_by(name) != ()]
        return len(doubtful) <= UNLISTED_MAX and not any([await self._fault(name) for name in doubtful])

    def _denied_by(self, name: str) -> Sequence[Deployment] | None:
        """Return the deployments of a name if none of them lists it, and nothing if one
        lists it or may serve it.

        None means that there is no deployment of the name."""
        if not self._router.knows(name):
            return None
        own = [one for one in deployments(self._settings) if name in one.models]
        if not own and name not in self._router.names():
            own = [one for one in deployments(self._settings) if not one.models]
        # A named route may fall back to other models.
        is_open = name in self._settings.resources or not all(self._denies(one, name) for one in own)
        return () if is_open else own

    def _denies(self, one: Deployment, name: str) -> bool:
        """Return whether a server lists all its models without this one.

        An OpenAI engine that was configured for models by name is not judged: it may know names
        that it does not list, as Azure does."""
        probe = self._probes.get(one.name)
        if probe is None or not probe.models or not probe.is_whole or (one.models and one.engine is EngineKind.OPENAI):
            return False
        return (one.upstream_model or name) not in probe.models

    async def _fault(self, name: str) -> tuple[str, str] | None:
        """Return why a model cannot be run, as the words before and after its name;
        None if it can."""
        from tidegate import service

        denying = self._denied_by(name)
        if denying is None:
            served = _some([other for other in self._router.names() if self._router.knows(other)])
            return (
                "The configuration has no deployment of",
                f"it has {served or 'none that takes batches'}. Fix the name, or add it under models",
            )
        sent_names = {one.upstream_model or name for one in denying}
        if not denying or any([await service.knows_model(self._settings, sent) for sent in sent_names]):
            return None
        urls = ", ".join(dict.fromkeys(one.url for one in denying))
        listed = _some({model for one in denying for model in self._probes[one.name].models})
        if not denying[0].models:
            return (
                f"{urls} does not serve",
                f"it serves {listed}. Fix the name, or choose one for all lines with --model",
            )
        sent = denying[0].upstream_model
        known = f" under the name {sent!r}" if sent else ""
        return f"{urls} does not serve{known}", f"it serves {listed}. Fix the name, or its upstream_model under models"


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:SHOWN_MAX]) + (", …" if len(names) > SHOWN_MAX else "")
