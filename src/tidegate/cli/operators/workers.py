"""`tidegate workers`: lists the processes that run batches, or did, as a server knows them."""

import time
from typing import Annotated, Any

import typer
import uvloop

from tidegate.cli.terminal import options, server_client, terminal


def workers(
    every: Annotated[bool, typer.Option("--all", help="Also those that are gone, and API processes.")] = False,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """List the processes that run batches, newest first.

    Elsewhere it needs a key with the scope admin:read.

    Example: tidegate workers --server https://gateway:8080 --api-key env:OPERATOR_KEY
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    asked = server_client.any_server(settings)
    found = uvloop.run(asked.get("/admin/v1/workers", dict[str, Any]))["data"]
    shown = [one for one in found if every or (one["state"] == "alive" and one["runs_items"])]
    if as_json:
        terminal.show_json(shown)
    elif not shown:
        terminal.say("No worker is alive: batches wait. Start one with: tidegate worker")
    else:
        now_s = time.time()
        rows = [
            [
                one["id"],
                one["state"] if one["runs_items"] else f"{one['state']} (API only)",
                one["host"],
                one["version"],
                f"{terminal.duration(now_s - one['started_at'])}",
                f"{terminal.duration(now_s - one['last_beat_at'])} ago",
            ]
            for one in shown
        ]
        terminal.show_table(["worker", "state", "host", "version", "age", "heartbeat"], rows)
        for one in shown:
            if one["trouble"]:
                terminal.warn(f"{one['host']}: {one['trouble']}.")
