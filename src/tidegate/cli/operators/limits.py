"""`tidegate limits`: shows how much the limits of a caller have left."""

from typing import Any

import uvloop

from tidegate.cli.terminal import options, server_client, terminal

_SIDES = ("requests", "tokens", "cost")


def limits(
    org: options.Org = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what limits have left: requests, tokens and money.

    With a key these are the limits of the key and of its user, team and organization; on the machine of the server, those of --org.

    Example: tidegate limits --server https://gateway:8080 --api-key env:GATEWAY_KEY
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    asked = server_client.any_server(settings)
    found = uvloop.run(asked.get("/v1/limits", dict[str, Any], tenant=org))["data"]
    if as_json:
        terminal.show_json(found)
    elif not found:
        terminal.say("No limit binds these calls.")
    else:
        rows = [[one["bound"], one["period"], *(_left(one, side) for side in _SIDES)] for one in found]
        terminal.show_table(["limit of", "period", *(f"{side} left" for side in _SIDES)], rows)


def _left(limit: dict[str, Any], side: str) -> str:
    most, left = limit["limit"][side], limit["remaining"][side]
    return "" if most is None else f"{_text(left)} of {_text(most)}"


def _text(amount: object) -> str:
    return f"{amount:,}" if isinstance(amount, int) else str(amount)
