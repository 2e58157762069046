"""Turns what an operator wrote about bodies into the rules that bind the callers of each name."""

from collections.abc import Iterable, Iterator, Mapping

from tidegate.core.body_names import ENGINE_FIELDS, KNOWN_FIELDS
from tidegate.core.caller_fields import OTHER, FieldRules
from tidegate.core.deployments import Deployment, Engine, Resource, fallbacks
from tidegate.core.media_hosts import is_host_pattern
from tidegate.settings.capacity import Model, ModelTerms
from tidegate.settings.groups import Settings
from tidegate.settings.yaml_file import KeyPath


def field_rules(
    settings: Settings,
    served: Iterable[Deployment],
    named: Iterable[Resource],
    more: Mapping[str, ModelTerms] | None = None,
) -> dict[str, FieldRules]:
    """Return the rules of every model and resource, and under `OTHER` those of all other names.

    Several deployments may serve a model: what one of their engines refuses is refused. A call to a resource may come to its fallbacks:
    only what all of their models allow is allowed. `more` was added at run time; the settings win.
    """
    engines: dict[str, set[Engine]] = {}
    for deployment in served:
        for model in deployment.models:
            engines.setdefault(model, set()).add(deployment.engine)
    terms: dict[str, Model | ModelTerms] = {**(more or {}), **settings.models}
    upstream = settings.upstream
    other = _rules({Engine(upstream.engine)}, upstream.allowed_fields, upstream.media_hosts)
    found = {}
    for model, kinds in engines.items():
        said = terms.get(model) or ModelTerms()
        found[model] = _rules(kinds, said.allowed_fields, said.media_hosts)
    by_name = {one.name: one for one in named}
    of_resources = {}
    for name, own in by_name.items():
        rules = found.get(own.model, other)
        for fallback in fallbacks(own, by_name).values():
            rules = rules.both(found.get(fallback.model, other))
        of_resources[name] = rules
    return {OTHER: other, **found, **of_resources}


def problems(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    """Return what is wrong with the fields and hosts that the settings allow, by its path."""
    upstream = settings.upstream
    yield from field_problems(("upstream",), upstream.allowed_fields, upstream.media_hosts)
    for model, entry in settings.models.items():
        yield from field_problems(("models", model), entry.allowed_fields, entry.media_hosts)


def field_problems(path: KeyPath, fields: Iterable[str], hosts: Iterable[str]) -> Iterator[tuple[KeyPath, str]]:
    """Return what is wrong with fields and hosts that are allowed."""
    for index, name in enumerate(fields):
        if name not in KNOWN_FIELDS:
            yield (
                (*path, "allowed_fields", index),
                f"is {name!r}, which is not refused anyway; remove it or correct the name",
            )
    for index, host in enumerate(hosts):
        if not is_host_pattern(host):
            said = f"is {host!r}; write a host, with its port where it is not 80 or 443, or `*.` before one for all names below it"
            yield (*path, "media_hosts", index), said


def _rules(engines: Iterable[Engine], fields: Iterable[str], hosts: Iterable[str]) -> FieldRules:
    refused = frozenset[str]().union(*(ENGINE_FIELDS[one] for one in engines))
    return FieldRules(refused, frozenset(fields), frozenset(one.lower() for one in hosts))
