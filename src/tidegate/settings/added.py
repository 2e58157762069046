"""Deployments, resources and models' terms that were added at run time, as documents in the store.

- The rules of the settings hold for them, and the settings win. An entry is left out, with a
  reason, if the settings have one of its name or name one gateway for every model.
- A document holds a secret only as a reference. The process that needs the secret looks it up, if
  the settings allow that.

This module knows no store.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, inspect
from msgspec.structs import replace

from tidegate.core.deployments import Deployment, Resource, Secret
from tidegate.core.errors import SettingsError
from tidegate.settings import body_fields, models, secrets
from tidegate.settings.allowed import Allowed
from tidegate.settings.capacity import ModelDeployment, ModelTerms, ResourceEntry
from tidegate.settings.check import Checker, RefusedSettings
from tidegate.settings.groups import Settings
from tidegate.settings.key_path import KeyPath
from tidegate.settings.renewal import Renewal
from tidegate.settings.rules import is_http_url

EntryKind = Literal["deployment", "resource", "model"]


class DrainState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an operator wants of a deployment, which may be an added one or one of the settings.

    A drained one gets no new calls. A higher `refresh_count` than before asks to try it at once.
    """

    is_drained: bool = False
    refresh_count: int = 0


class AddedDeployment(ModelDeployment, frozen=True, kw_only=True):
    """A deployment with the name of the model that it serves."""

    model: Annotated[str, Meta(min_length=1, max_length=255)]


class Added(msgspec.Struct):
    """The store's entries that can be used here.

    `unusable` has the reason for each of the others, by kind and name. `states` are by the
    deployment's name.
    """

    deployments: list[Deployment] = msgspec.field(default_factory=list)
    resources: list[Resource] = msgspec.field(default_factory=list)
    models: dict[str, ModelTerms] = msgspec.field(default_factory=dict)
    unusable: dict[tuple[str, str], str] = msgspec.field(default_factory=dict)
    states: dict[str, DrainState] = msgspec.field(default_factory=dict)

    def in_state(self, deployment: Deployment) -> Deployment:
        """Return a deployment with the state that operators asked for."""
        state = self.states.get(deployment.name)
        if state is None:
            return deployment
        return replace(deployment, is_drained=state.is_drained, refresh_count=state.refresh_count)


def drain_state(document: str) -> DrainState:
    """Return a deployment's state from the store's document; the default if it cannot be read."""
    try:
        return msgspec.json.decode(document, type=DrainState)
    except msgspec.MsgspecError:
        return DrainState()


class _EntryProblems:
    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, path: KeyPath, text: str) -> None:
        named = path[1:] if path[:1] in (("models",), ("resources",)) else path
        self.found.append(f"{'.'.join(map(str, named))} {text}".strip())


def added(
    settings: Settings,
    entries: Iterable[tuple[str, str, str]],
    *,
    looks_up: bool = True,
    renewal: Renewal | None = None,
) -> Added:
    """Turn the store's entries (kind, name, document) into nouns of the core.

    Without `looks_up` no secret is read, because this process calls no model server. `renewal`
    remembers the contents of files.
    """
    renewal = renewal or Renewal()
    reading = _DeploymentReader(
        Allowed(settings.added.env_names, settings.added.folders), renewal if looks_up else None
    )
    taken_names = {one.name for one in models.deployments(settings)}
    configured = models.resources(settings)
    found = Added()
    for kind, name, document in entries:
        try:
            if kind == "drain_state":
                found.states[name] = drain_state(document)
                continue
            if settings.upstream.url:
                raise SettingsError("the settings name one gateway for every model (upstream.url), and that one wins")
            if name in {"deployment": taken_names, "model": settings.models}.get(kind, settings.resources):
                raise SettingsError(f"the settings have a {kind} of this name, and that one wins; remove this one")
            fields = _decoded(document)
            if kind == "deployment":
                found.deployments.append(renewal.stamped(reading.deployment(name, fields)))
            elif kind == "model":
                found.models[name] = _terms(settings, fields)
            else:
                found.resources.append(_resource(settings, name, fields))
        except SettingsError as error:
            found.unusable[kind, name] = str(error)
    by_name = {one.name: one for one in (*configured, *found.resources)}
    for one in list(found.resources):
        if way := models.fallback_loop(one.name, by_name):
            found.resources.remove(one)
            found.unusable["resource", one.name] = f"its fallbacks lead back to it: {' -> '.join(way)}"
    return found


class _DeploymentReader:
    """A reader of added deployments.

    With a `renewal` it reads secrets and certificates from the places that the operator allows.
    Without one it only checks their names.
    """

    def __init__(self, allowed: Allowed, renewal: Renewal | None) -> None:
        self._allowed = allowed
        self._renewal = renewal

    def deployment(self, name: str, fields: Mapping[str, object]) -> Deployment:
        found = _deployment(name, fields, self._secret)
        tls = found.tls
        paths = {kind: getattr(tls, kind) for kind in ("ca_file", "cert_file", "key_file") if getattr(tls, kind)}
        for kind, path in paths.items():
            try:
                if self._renewal is None:
                    self._allowed.check_path(Path(path))
                else:
                    paths[kind] = str(self._allowed.readable_path(Path(path)))
            except SettingsError as error:
                raise SettingsError(f"tls.{kind} {error}") from None
        return replace(found, tls=replace(tls, **paths)) if paths else found

    def _secret(self, text: str) -> Secret:
        if self._renewal is None:
            self._allowed.check_reference(text)
            return _only_references(text)
        return self._renewal.secret(self._allowed.readable_reference(text))


def check(kind: str, name: str, document: Mapping[str, object]) -> None:
    """Refuse a document that could not be used with any settings. References are not looked up."""
    if not _is_name(name):
        raise SettingsError("`name` needs 1 to 255 printable characters, without spaces around them")
    if kind == "deployment":
        _deployment(name, document, _only_references)
    elif kind == "model":
        _model_terms(document)
    else:
        _entry(ResourceEntry, document, _only_references)


def _deployment(name: str, fields: Mapping[str, object], resolve: Callable[[str], Secret]) -> Deployment:
    if "name" in fields:
        raise SettingsError("name is given beside the document, not in it; take it away")
    entry: AddedDeployment = _entry(AddedDeployment, fields, resolve)
    problems = _EntryProblems()
    for path, text in models.deployment_problems(("models",), name, entry.model, entry):
        problems.add(path, text)
    if entry.metrics_url and not is_http_url(entry.metrics_url):
        problems.add(("metrics_url",), "must be a URL such as http://10.0.0.5:8000/metrics, without a key in it")
    _raise_for(problems)
    return models.deployment_of(name, entry.model, entry)


def _terms(settings: Settings, fields: Mapping[str, object]) -> ModelTerms:
    entry = _model_terms(fields)
    if problem := models.retry_problem(settings, entry):
        raise SettingsError(f"retry {problem}")
    return entry


def _model_terms(fields: Mapping[str, object]) -> ModelTerms:
    entry: ModelTerms = _entry(ModelTerms, fields, _only_references)
    problems = _EntryProblems()
    for path, text in body_fields.field_problems(("models",), entry.allowed_fields, entry.media_hosts):
        problems.add(path, text)
    _raise_for(problems)
    return entry


def _resource(settings: Settings, name: str, fields: Mapping[str, object]) -> Resource:
    entry: ResourceEntry = _entry(ResourceEntry, fields, _only_references)
    if name in settings.models and (entry.model or name) != name:
        raise SettingsError(f"{name!r} is itself a model; give the resource another name")
    return models.resource_of(name, entry)


def _entry(kind: Any, fields: Mapping[str, object], resolve: Callable[[str], Secret]) -> Any:
    problems = _EntryProblems()
    try:
        entry = Checker(problems, lambda text, _: resolve(text)).typed_value(inspect.type_info(kind), dict(fields), ())
    except RefusedSettings:
        entry = None
    for path, text in models.limit_problems(("resources", "limits"), getattr(entry, "limits", ())):
        problems.add(path, text)
    _raise_for(problems)
    return entry


def _only_references(text: str) -> Secret:
    if not secrets.is_reference(text):
        raise SettingsError(
            "holds the secret itself, which is not kept in the store: put it into the environment or a file of every process, "
            "and write env:NAME or file:PATH"
        )
    return Secret("redis://looked-up-where-it-is-needed")


def _decoded(document: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(document, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError):
        raise SettingsError("what the store has of it cannot be read; remove it and add it again") from None


def _raise_for(problems: _EntryProblems) -> None:
    if problems.found:
        raise SettingsError("; ".join(dict.fromkeys(problems.found)))


def _is_name(text: str) -> bool:
    return 1 <= len(text) <= 255 and text.isprintable() and text.strip() == text
