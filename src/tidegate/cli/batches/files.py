"""`tidegate files`: manages inputs and results at a server, over the data directory or
elsewhere."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer
import uvloop

from tidegate.cli.terminal import input_file, options, results, server_client, terminal
from tidegate.core import ids
from tidegate.core.errors import SettingsError
from tidegate.core.wording import in_words
from tidegate.settings import Settings

PAGE_COUNT_MAX = 1_000

FileId = Annotated[str, typer.Argument(metavar="FILE", help="A file id (file-…).", show_default=False)]

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Files at a server: upload, list, show, download, delete."
)


@app.command()
def upload(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A JSONL file of requests.", show_default=False)],
    org: options.Org = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Upload an input and print its id.

    Example: tidegate files upload requests.jsonl --server https://gateway:8080 --api-key env:GATEWAY_KEY
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    input_file.check_source(path)
    made = uvloop.run(server_client.any_server(settings).upload(path, dict[str, Any], tenant=org))
    if as_json:
        terminal.show_json(made)
        return
    typer.echo(made["id"])
    where = options.as_arguments(config, data, server, api_key, org)
    run = f"tidegate batches create {made['id']} --endpoint /v1/chat/completions{where}"
    terminal.say(f"{in_words(made['bytes'], 'byte')}. Run them with: {run}")


@app.command("list")
def list_files(
    purpose: Annotated[
        str | None, typer.Option("--purpose", metavar="P", help="Only those: batch, batch_output.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=10_000, help="How many, newest first.")] = 20,
    org: options.Org = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """List files, newest first.

    Example: tidegate files list --purpose batch_output
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    found = terminal.first(uvloop.run(_newest(server_client.any_server(settings), org, purpose, limit + 1)), limit)
    if as_json:
        terminal.show_json(found)
    elif not found:
        more = "" if settings.remote.url or org is not None else " --org NAME lists those of another organization."
        terminal.say(f"There are no files.{more}")
    else:
        now_s = time.time()
        rows = [
            [
                one["id"],
                one["purpose"],
                f"{one['bytes']:,}",
                terminal.duration(now_s - one["created_at"]),
                one["filename"],
            ]
            for one in found
        ]
        terminal.show_table(["file", "purpose", "bytes", "age", "name"], rows)


@app.command()
def show(
    file: FileId,
    org: options.Org = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what is known of one file.

    Example: tidegate files show file-0f3kQ2mZ8s1xW7vB4nD9Lc
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    asked, owner = uvloop.run(_server_and_owner(settings, org, file))
    found = uvloop.run(asked.get(f"/v1/files/{file}", dict[str, Any], tenant=owner))
    if as_json:
        terminal.show_json(found)
    else:
        facts = [(name, _when(value) if name.endswith("_at") else value) for name, value in found.items() if value]
        terminal.show_facts(facts)


@app.command()
def download(
    file: FileId,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="PATH", help="Where to write.", show_default="stdout")
    ] = None,
    org: options.Org = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
) -> None:
    """Print a file, or write it to a place.

    Example: tidegate files download file-0f3kQ2mZ8s1xW7vB4nD9Lc -o results.jsonl
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    if output is not None:
        input_file.check_target(output, [], "-o")
    asked, owner = uvloop.run(_server_and_owner(settings, org, file))
    stream = asked.content(f"/v1/files/{file}/content", tenant=owner)
    uvloop.run(results.pour(stream) if output is None else results.save(stream, output))


@app.command()
def delete(
    file: FileId,
    org: options.Org = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
) -> None:
    """Remove a file.

    Example: tidegate files delete file-0f3kQ2mZ8s1xW7vB4nD9Lc --yes
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    asked, owner = uvloop.run(_server_and_owner(settings, org, file))
    if not yes:
        terminal.agree(f"Remove {file}?")
    uvloop.run(asked.delete(f"/v1/files/{file}", dict[str, Any], tenant=owner))
    terminal.say(f"{file} is gone.")


async def _newest(
    server: server_client.AskedServer, org: str | None, purpose: str | None, limit: int
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while len(found) < limit:
        query = {"limit": str(min(limit - len(found), PAGE_COUNT_MAX))}
        if purpose is not None:
            query["purpose"] = purpose
        if found:
            query["after"] = found[-1]["id"]
        page = await server.get(f"/v1/files?{urlencode(query)}", dict[str, Any], tenant=org)
        found += page["data"]
        if not page["has_more"]:
            break
    return found


async def _server_and_owner(
    settings: Settings, org: str | None, file: str
) -> tuple[server_client.AskedServer, str | None]:
    """Return the server to ask for a file, and the organization to name: on this machine the file's
    owner if none was given."""
    if not ids.is_valid("file", file):
        raise SettingsError("That is no file id; ids look like file-0f3kQ2mZ8s1xW7vB4nD9Lc. See `tidegate files list`.")
    server = server_client.any_server(settings)
    if org is not None or settings.remote.url:
        return server, org
    async with server_client.reading(settings) as parts:
        owner = await parts.store.file_owner(file)
    if owner is None:
        raise SettingsError(f"There is no file {file}; see `tidegate files list`.")
    return server, owner


def _when(at_s: int) -> str:
    return datetime.fromtimestamp(at_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
