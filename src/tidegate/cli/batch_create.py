"""`tidegate batches create`: give a file of requests to a server, the one over the data directory or one elsewhere."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import uvloop

from tidegate.cli import input_file, options, remote_batches, server_client, terminal
from tidegate.core import ids
from tidegate.core.errors import SettingsError

_LINE_BYTES_MAX = 8 << 20


class _FirstLine(msgspec.Struct):
    url: str


def create(
    source: Annotated[
        str,
        typer.Argument(metavar="PATH|FILE", help="A JSONL file of requests, or its id (file-…).", show_default=False),
    ],
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint", metavar="PATH", help="Such as /v1/chat/completions.", show_default="of the first line"
        ),
    ] = None,
    window: Annotated[str, typer.Option("--window", metavar="TIME", help="Be done within this time.")] = "24h",
    metadata: Annotated[
        list[str] | None, typer.Option("--metadata", metavar="KEY=VALUE", help="A note to find it by; may be repeated.")
    ] = None,
    ordered: Annotated[bool, typer.Option("--ordered", help="Results in the order of the input.")] = False,
    org: options.Org = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Upload a file, create a batch of it, and print its id.

    Example: tidegate batches create requests.jsonl --server https://gateway:8080 --api-key env:GATEWAY_KEY
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    pairs = dict(one.partition("=")[::2] for one in metadata or [])
    wish = {"completion_window": window, "metadata": pairs or None, "ordered": ordered or None}
    wish = {name: value for name, value in wish.items() if value is not None}
    made = uvloop.run(_create(server_client.any_server(settings), org, source, endpoint, wish))
    if as_json:
        terminal.show_json(remote_batches.facts(made))
        return
    typer.echo(made["id"])
    where = options.as_arguments(config, data, server, api_key, org)
    terminal.say(f"Follow it with: tidegate batches watch {made['id']}{where}")


async def _create(
    server: server_client.AskedServer, org: str | None, source: str, endpoint: str | None, wish: dict[str, Any]
) -> dict[str, Any]:
    if ids.is_valid("file", source):
        if endpoint is None:
            raise SettingsError("A file at the server needs --endpoint, such as --endpoint /v1/chat/completions.")
        file_id = source
    else:
        path = Path(source)
        input_file.check_source(path)
        endpoint = endpoint or _first_url(path)
        file_id = (await server.upload(path, dict[str, Any], tenant=org))["id"]
    return await server.post(
        "/v1/batches", dict[str, Any], {"input_file_id": file_id, "endpoint": endpoint, **wish}, tenant=org
    )


def _first_url(path: Path) -> str:
    """Return the endpoint that the first line names."""
    with path.open("rb") as stream:
        line = stream.readline(_LINE_BYTES_MAX)
    try:
        return msgspec.json.decode(line, type=_FirstLine).url
    except msgspec.MsgspecError as error:
        raise SettingsError(
            f"The first line of {path} is no request with a `url` ({error}). `tidegate run` takes other kinds of files."
        ) from None
