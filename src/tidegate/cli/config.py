"""`tidegate config`: the settings in force and where each came from, secrets hidden."""

from typing import Annotated

import msgspec
import typer

from tidegate.cli import options, terminal
from tidegate.core.deployments import Secret
from tidegate.settings import Loaded, catalog, redacted

HIDDEN = "***"


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
        rows = [[e["key"], e["origin"], e["variable"], e["allowed"], e["about"], e["value_text"]] for e in entries]
        terminal.show_table(["setting", "from", "variable", "may be", "what it is for", "value"], rows)
    else:
        # A mapping of models is long: last in its line, it pushes nothing away.
        terminal.show_table(["setting", "from", "value"], [[e["key"], e["origin"], e["value_text"]] for e in entries])


def _entries(loaded: Loaded) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = []
    for setting in catalog.settings():
        value: object = loaded.settings
        for part in setting.key.split("."):
            value = getattr(value, part)
        plain = _plain(setting.key, value)
        entries.append(
            {
                "key": setting.key,
                "value": plain,
                "value_text": plain if isinstance(plain, str) else msgspec.json.encode(plain).decode(),
                "origin": loaded.origins[setting.key],
                "variable": setting.variable,
                "allowed": setting.allowed,
                "about": setting.about,
            }
        )
    return entries


def _plain(key: str, value: object) -> object:
    """The value as JSON can say it. URLs of servers are worth seeing without their passwords; other secrets never are."""
    if isinstance(value, Secret) and key in ("store.url", "redis.url"):
        return redacted(value.reveal())
    return msgspec.to_builtins(value, enc_hook=lambda _: HIDDEN) if not isinstance(value, Secret) else HIDDEN
