"""`tidegate batches items`: lists the outcomes of a batch's requests, or shows one
request with its response.

It works beside a running server.
"""

from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer
import uvloop

from tidegate.cli.batches import batch_facts, remote_batches
from tidegate.cli.terminal import options, server_client, terminal
from tidegate.core.errors import SettingsError
from tidegate.core.states import Outcome
from tidegate.settings import Settings

PAGE_COUNT = 100


def items(
    batch: options.BatchId,
    custom_id: Annotated[
        str | None,
        typer.Argument(metavar="CUSTOM_ID", help="One request, with its response, as JSON.", show_default=False),
    ] = None,
    outcome: Annotated[
        Outcome | None, typer.Option("--outcome", metavar="OUTCOME", help="answered, failed, expired or cancelled.")
    ] = None,
    code: Annotated[
        str | None, typer.Option("--code", metavar="CODE", help="Only requests with this error code.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=1_000_000, help="How many.")] = 20,
    org: options.BatchOrg = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what became of a batch's requests.

    Those that are done are listed, answers first; with a custom_id, that one is shown with its request and response. An operator's key
    needs the scope admin:content for that.

    Example: tidegate batches items batch_0f3kQ2mZ8s1xW7vB4nD9Lc --outcome failed --limit 100
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    options.check_batch_id(batch)
    if custom_id is not None:
        if outcome is not None or code is not None:
            raise SettingsError("--outcome and --code choose from a list; leave them out, or leave out the custom_id.")
        terminal.show_json(uvloop.run(_one_item(settings, org, batch, custom_id)))
        return
    asked = {name: value for name, value in (("outcome", outcome), ("code", code)) if value is not None}
    found = terminal.first(uvloop.run(_listed(settings, org, batch, asked, limit + 1)), limit)
    if as_json:
        terminal.show_json(found)
    elif not found:
        terminal.say("No request of the batch that is done matches." if asked else "No request of the batch is done.")
    else:
        rows = [
            [one["custom_id"] or "", one["outcome"], one["status_code"] or "", (one["error"] or {}).get("code", "")]
            for one in found
        ]
        terminal.show_table(["custom_id", "outcome", "status", "error"], rows)


async def _listed(
    settings: Settings, org: str | None, batch: str, asked: dict[str, str], limit: int
) -> list[dict[str, Any]]:
    from tidegate.web.jobs.job_items import ItemFilter, JobItems

    if (remote := server_client.remote(settings)) is not None:
        return await remote_batches.at_either(
            remote, lambda path: remote_batches.items(remote, org, f"{path}/{batch}", asked, limit)
        )
    wanted = ItemFilter(asked.get("outcome"), asked.get("code"))
    async with server_client.reading(settings) as parts:
        job = await batch_facts.job_of(parts, org, batch)
        reader = JobItems(parts.store, parts.blobs)
        found: list[dict[str, Any]] = []
        after: str | None = None
        while len(found) < limit:
            page = await reader.page(job, wanted, after, min(limit - len(found), PAGE_COUNT))
            if page is None:
                break
            found += [msgspec.to_builtins(item) for item in page.items]
            after = page.last_id
            if not page.has_more:
                break
        return found


async def _one_item(settings: Settings, org: str | None, batch: str, custom_id: str) -> object:
    from tidegate.web.jobs.job_items import JobItems

    if (remote := server_client.remote(settings)) is not None:
        item = f"{batch}/items/{quote(custom_id, safe='')}"
        return await remote_batches.at_either(
            remote, lambda path: remote.get(f"{path}/{item}", dict[str, Any], tenant=org)
        )
    async with server_client.reading(settings) as parts:
        return await JobItems(parts.store, parts.blobs).one(await batch_facts.job_of(parts, org, batch), custom_id)
