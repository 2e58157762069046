"""Checks of `tidegate doctor` about deployments and resources, both those of the
settings and those added at run time.

They only ask and never change anything; a server that does not answer is a finding, not an error.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from tidegate.cli.operators.deployments import STATES, shown
from tidegate.cli.server.examine import DoctorFinding, Grade
from tidegate.core.deployments import Deployment, Resource
from tidegate.settings import Settings, deployments, resources
from tidegate.settings.capacity import ModelTerms

if TYPE_CHECKING:
    from tidegate.upstream.routing.probe import Probe
    from tidegate.web.admin.deployments import RoutingShown

NAMES_SHOWN_MAX = 5
CHAT = "/v1/chat/completions"
# The one model that `tidegate simulate` lists.
SIMULATED = "simulated"


class RoutingExamined(msgspec.Struct, frozen=True):
    """The deployments and resources that can be called. `unusable` has the reason for each added
    one that cannot be used here."""

    deployments: tuple[Deployment, ...]
    resources: tuple[Resource, ...]
    added: frozenset[str] = frozenset()
    models: Mapping[str, ModelTerms] = msgspec.field(default_factory=dict)
    unusable: Mapping[tuple[str, str], str] = msgspec.field(default_factory=dict)
    has_server: bool = False


async def routing(settings: Settings) -> RoutingExamined:
    """Return the deployments and resources of the settings, and those added if there is a store
    that can be read."""
    from tidegate import storage
    from tidegate.control import running_control

    more = await storage.added_deployments(settings)
    return RoutingExamined(
        (*deployments(settings), *more.deployments),
        (*resources(settings), *more.resources),
        frozenset([one.name for one in more.deployments] + [one.name for one in more.resources]),
        more.models,
        more.unusable,
        running_control(settings.data_dir) is not None,
    )


async def findings(settings: Settings, known: RoutingExamined) -> AsyncIterator[DoctorFinding]:
    from tidegate import service

    for (kind, name), why in known.unusable.items():
        about, to_do = ("upstream" if kind == "deployment" else kind), f"fix it, or: tidegate {kind}s remove {name}"
        yield DoctorFinding(about, Grade.WRONG, f"the added {kind} {name} cannot be used here: {why}", to_do)
    if not known.deployments:
        used = [one for one in await shown(settings) if one.kind == "deployment"] if known.has_server else []
        for one in used:
            yield await _used(settings, one)
        if used:
            return
        to_do = "name one with --upstream http://HOST:PORT/v1, under models in a --config file, or by `tidegate deployments add`"
        yield DoctorFinding("upstream", Grade.WARNING, "no model server is known, so no batch can run", to_do)
        return
    by_name = {one.name: one for one in known.deployments}
    more = [one for one in known.deployments if one.name in known.added]
    answers: dict[str, bool] = {}
    for probe in await service.probe_upstreams(settings, more):
        answers[probe.deployment] = probe.reachable and probe.status not in (401, 403)
        yield _tried(by_name[probe.deployment], probe, is_added=probe.deployment in known.added)
    for warning in (one_warning for one in more for one_warning in one.warnings):
        yield DoctorFinding("upstream", Grade.WARNING, warning)
    for finding in _not_served(settings, known):
        yield finding
    for resource in known.resources:
        for finding in _led(resource, known, answers):
            yield finding


async def _used(settings: Settings, one: "RoutingShown") -> DoctorFinding:
    """Check a deployment of the server that runs here. This command does not know its key, so it
    checks only whether it answers."""
    from tidegate import service

    where = one.url if one.name == "upstream" else f"{one.name} at {one.url}"
    text = f"the server that runs here uses {where}: {STATES.get(one.state, one.state) or 'not tried yet'}"
    if one.state not in ("", "closed", "resting"):
        return DoctorFinding("upstream", Grade.WARNING, text, "its log says why; `tidegate top` too")
    [probe] = await service.probe_upstreams(settings, [Deployment(one.name, one.url)])
    if not probe.reachable:
        text = f"the server that runs here uses {where}, which does not answer us: {probe.message}"
        return DoctorFinding("upstream", Grade.WARNING, text, "start it, or name another to the server")
    return DoctorFinding("upstream", Grade.OK, text)


def _tried(one: Deployment, probe: "Probe", *, is_added: bool) -> DoctorFinding:
    name = f"{one.name} (added)" if is_added else one.name
    where = one.url if one.name == "upstream" else f"{name} at {one.url}"
    if not probe.reachable:
        to_do = f"start it, or fix its url: tidegate deployments change {one.name} --set url=…" if is_added else ""
        to_do = to_do or "start it, or fix its url"
        return DoctorFinding("upstream", Grade.WRONG, f"{where} does not answer: {probe.message}", to_do)
    if probe.message:
        grade = Grade.WRONG if probe.status in (401, 403) else Grade.WARNING
        return DoctorFinding("upstream", grade, f"{where} answers, but {probe.message}", "fix it, then ask again")
    if probe.models == (SIMULATED,) and probe.listed[SIMULATED].owned_by == "tidegate":
        text = f"{where} is `tidegate simulate`: it serves every model, and its answers are made up"
        return DoctorFinding("upstream", Grade.WARNING, text, "name a real model server before you rely on the answers")
    expected = (one.upstream_model,) if one.upstream_model else one.models
    if expected and probe.is_whole and not set(expected) & set(probe.models):
        served = ", ".join(probe.models[:NAMES_SHOWN_MAX]) or "none"
        text = f"{where} does not list {expected[0]}; it serves: {served}"
        to_do = "correct upstream_model" if one.upstream_model else "check the model's name, or set upstream_model"
        return DoctorFinding("upstream", Grade.WARNING, text, to_do)
    return DoctorFinding("upstream", Grade.OK, f"{where} answers in {probe.took_ms:.0f} ms")


def _not_served(settings: Settings, known: RoutingExamined) -> Iterator[DoctorFinding]:
    """Yield findings about endpoints that an engine lacks, and models that serve only batches or
    only interactive calls."""
    from tidegate.upstream.calls.translation import unserved_endpoints
    from tidegate.web.gateway.gateway import ENDPOINTS

    for one in known.deployments:
        if lacking := unserved_endpoints(one.engine, (*ENDPOINTS, *settings.endpoints)):
            text = (
                f"{one.name} speaks Anthropic's Messages: {CHAT} is translated, and not served are {', '.join(lacking)}"
            )
            yield DoctorFinding("upstream", Grade.OK, text)
    for model in dict.fromkeys(model for one in known.deployments for model in one.models):
        places = _serving(model, known)
        if not any(one.takes_interactive for one in places):
            yield DoctorFinding(
                "upstream", Grade.OK, f"{model} is served to batches only, and not to interactive calls"
            )
        if not any(one.takes_background for one in places):
            yield DoctorFinding(
                "upstream", Grade.OK, f"{model} is served to interactive calls only, and not to batches"
            )


def _led(resource: Resource, known: RoutingExamined, answers: Mapping[str, bool]) -> Iterator[DoctorFinding]:
    """Check where a named route leads and whether a deployment there answers. A queue
    has findings of its own."""
    aims = {one.name: one.model for one in known.resources}
    ways = [aims.get(name, name) for name in (resource.name, *resource.fallbacks)]
    lost = [model for model in ways if not _serving(model, known)]
    name = f"{resource.name} (added)" if resource.name in known.added else resource.name
    if ways[0] in lost:
        text = f"{name} leads to {ways[0]!r}, which no deployment serves"
        yield DoctorFinding("resource", Grade.WRONG, text, "add a deployment of it, or fix the resource's model")
        return
    for model in lost:
        text = f"{name} falls back to {model!r}, which no deployment serves"
        yield DoctorFinding("resource", Grade.WARNING, text, "add a deployment of it, or take it from the fallbacks")
    places = [one for model in ways for one in _serving(model, known)]
    if not any(one.queue is not None or answers.get(one.name) for one in places):
        text = f"{name} leads to {ways[0]!r}, and none of the {len(places)} deployments behind it answers"
        yield DoctorFinding("resource", Grade.WRONG, text, "fix those first: see above")
        return
    yield DoctorFinding("resource", Grade.OK, f"{name} leads to {', then '.join(dict.fromkeys(ways))}")


def _serving(model: str, known: RoutingExamined) -> list[Deployment]:
    return [one for one in known.deployments if not one.models or model in one.models]
