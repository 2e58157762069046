"""`tidegate config`: the settings in force and where each came from, secrets hidden."""

from typing import Annotated

import msgspec
import typer

from tidegate.cli.terminal import options, terminal
from tidegate.core.deployments import Secret
from tidegate.settings import Loaded, catalog, redacted

HIDDEN = "***"
EXPLAINED = {
    "value": "value_text",
    "from": "origin",
    "what it is for": "about",
    "may be": "allowed",
    "variable": "variable",
}


def config(
    data: options.Data = None,
    config: options.Config = None,
    as_json: options.AsJson = False,
    changed: Annotated[bool, typer.Option("--changed", help="Only what is not a default.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also what each setting is for and what it may be.")
    ] = False,
) -> None:
    """Show the settings in force and where each came from.

    Example: tidegate config --config tidegate.yaml --changed
    """
    loaded = options.loaded(config, data)
    options.warn_of(loaded)
    entries = [entry for entry in _entries(loaded) if not changed or entry["origin"] != "default"]
    if as_json:
        terminal.show_json(entries)
    elif explain:
        for entry in entries:
            typer.echo(entry["key"])
            terminal.show_facts([(f"  {name}", entry[key]) for name, key in EXPLAINED.items()])
    else:
        # A value may be a long mapping of models, so it stands last in its line.
        terminal.show_table(["setting", "from", "value"], [[e["key"], e["origin"], e["value_text"]] for e in entries])


def _entries(loaded: Loaded) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = []
    for setting in catalog.settings():
        value: object = loaded.settings
        for part in setting.key.split("."):
            value = getattr(value, part)
        plain, short = _plain(setting.key, value), _plain(setting.key, _without_defaults(value))
        entries.append(
            {
                "key": setting.key,
                "value": plain,
                "value_text": short if isinstance(short, str) else msgspec.json.encode(short).decode(),
                "origin": loaded.origins[setting.key],
                "variable": setting.variable,
                "allowed": setting.allowed,
                "about": setting.about,
            }
        )
    return entries


def _without_defaults(value: object) -> object:
    """Return the value for people: a model or a guardrail has only the keys that were
    set, not all forty."""
    if isinstance(value, msgspec.Struct):
        given = {one.encode_name: (getattr(value, one.name), one) for one in msgspec.structs.fields(value)}
        return {name: _without_defaults(each) for name, (each, one) in given.items() if each != _default(one)}
    if isinstance(value, dict):
        return {name: _without_defaults(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_defaults(each) for each in value]
    return value


def _default(field: msgspec.structs.FieldInfo) -> object:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _plain(key: str, value: object) -> object:
    """Return the value as JSON data. URLs of servers are shown without passwords, other
    secrets are hidden."""
    if isinstance(value, Secret) and key in ("store.url", "redis.url"):
        return redacted(value.reveal())
    return msgspec.to_builtins(value, enc_hook=lambda _: HIDDEN) if not isinstance(value, Secret) else HIDDEN
