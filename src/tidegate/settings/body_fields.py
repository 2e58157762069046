"""The rules for fields of request bodies, made from the settings, for each model and resource."""

from collections.abc import Iterable, Iterator, Mapping

from tidegate.core.body_rules.body_names import ENGINE_FIELDS, KNOWN_FIELDS
from tidegate.core.body_rules.caller_fields import OTHER, FieldRules
from tidegate.core.body_rules.media_hosts import is_host_pattern
from tidegate.core.deployments import Deployment, EngineKind, Resource, fallbacks
from tidegate.settings.capacity import ModelSettings, ModelTerms
from tidegate.settings.groups import Settings
from tidegate.settings.key_path import KeyPath


def field_rules(
    settings: Settings,
    served: Iterable[Deployment],
    named: Iterable[Resource],
    more: Mapping[str, ModelTerms] | None = None,
) -> dict[str, FieldRules]:
    """Return the rules of every model and resource, and under `OTHER` those of all other names.

    - If several deployments serve a model, a field that one of them refuses is refused.
    - A call to a resource may go to its fallbacks, so all of their models must allow a field.
    - `more` has terms of models that were added at run time; the settings win.
    """
    refused: dict[str, frozenset[str]] = {}
    for deployment in served:
        # The operator's hint for the server: how urgent a call is.
        steering = ENGINE_FIELDS[deployment.engine] | {deployment.hints.priority_field}
        for model in deployment.models:
            refused[model] = refused.get(model, frozenset()) | steering
    terms: dict[str, ModelSettings | ModelTerms] = {**(more or {}), **settings.models}
    upstream = settings.upstream
    other = _rules(ENGINE_FIELDS[EngineKind(upstream.engine)], upstream.allowed_fields, upstream.media_hosts)
    found = {}
    for model, steering in refused.items():
        of_model = terms.get(model) or ModelTerms()
        found[model] = _rules(steering - {""}, of_model.allowed_fields, of_model.media_hosts)
    by_name = {one.name: one for one in named}
    of_resources = {}
    for name, own in by_name.items():
        rules = found.get(own.model, other)
        for fallback in fallbacks(own, by_name).values():
            rules = rules.both(found.get(fallback.model, other))
        of_resources[name] = rules
    return {OTHER: other, **found, **of_resources}


def problems(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    """Return the mistakes among the fields and hosts that the settings allow, by path."""
    upstream = settings.upstream
    yield from field_problems(("upstream",), upstream.allowed_fields, upstream.media_hosts)
    for model, entry in settings.models.items():
        steering = {one.hints.priority_field for one in entry.deployments}
        fields = [one for one in entry.allowed_fields if one not in steering]
        yield from field_problems(("models", model), fields, entry.media_hosts)


def field_problems(path: KeyPath, fields: Iterable[str], hosts: Iterable[str]) -> Iterator[tuple[KeyPath, str]]:
    """Return the mistakes among the fields and hosts that one entry allows."""
    for name in fields:
        if name not in KNOWN_FIELDS:
            yield (
                (*path, "allowed_fields"),
                f"is {name!r}, which is not refused anyway; remove it or correct the name",
            )
    for index, host in enumerate(hosts):
        if not is_host_pattern(host):
            problem = f"is {host!r}; write a host, with its port where it is not 80 or 443, or `*.` before one for all names below it"
            yield (*path, "media_hosts", index), problem


def _rules(refused: frozenset[str], fields: Iterable[str], hosts: Iterable[str]) -> FieldRules:
    return FieldRules(refused, frozenset(fields), frozenset(one.lower() for one in hosts))
