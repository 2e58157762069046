"""`tidegate top`: shows what runs, waits and is stuck, on one screen that is redrawn every 2 s."""

from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tidegate.cli.operators.deployments import STATES
from tidegate.cli.terminal import options, server_client, terminal
from tidegate.cli.terminal.signals import Stopping
from tidegate.core.errors import TidegateError
from tidegate.core.wording import in_words

EVERY_S = 2.0
ROWS_MAX = 12


def top(
    once: Annotated[
        bool, typer.Option("--once", help="Print it once and end.", show_default="not on a terminal")
    ] = False,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the overview as JSON, once.")] = False,
) -> None:
    """Watch queues, deployments, tides and batches.

    Elsewhere it needs a key with the scope admin:read. Ctrl-C ends it.

    Example: tidegate top --server https://gateway:8080 --api-key env:OPERATOR_KEY
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    asked = server_client.any_server(settings)
    console = Console(highlight=False)
    if as_json or once or not console.is_terminal:
        overview = uvloop.run(_look(asked))
        if as_json:
            terminal.show_json(overview)
        else:
            console.print(picture(overview))
        return
    uvloop.run(_follow(asked, console))


async def _look(asked: server_client.AskedServer) -> dict[str, Any]:
    return await asked.get("/admin/v1/overview", dict[str, Any])


async def _follow(asked: server_client.AskedServer, console: Console) -> None:
    stopping = Stopping().listen()
    shown = picture(await _look(asked))
    with Live(shown, console=console, screen=True, auto_refresh=False) as live:
        while not await stopping.wait(EVERY_S):
            try:
                shown = picture(await _look(asked))
            except TidegateError as error:
                # The last picture stays, with the reason above it, until the server is back.
                live.update(Group(Text(terminal.clean(error), style="red"), shown), refresh=True)
                continue
            live.update(shown, refresh=True)


def picture(overview: dict[str, Any]) -> RenderableType:
    """Return the overview as it is drawn, without characters that control a terminal."""
    alive = overview["workers_alive"]
    head = Text(f"{in_words(alive, 'worker')} alive", style="bold" if alive else "bold red")
    if not alive:
        head.append(": nothing runs until one is started (tidegate worker)")
    batches = [
        [one["status"], one["batches"], f"{one['completed'] + one['failed']:,}/{one['requests']:,}", one["failed"]]
        for one in overview["batches"]
    ]
    models = [
        [
            one["model"],
            one["requests"],
            one["batches"],
            terminal.duration(one["oldest_seconds"]),
            f"{one['requests_per_second']:g}/s",
            one["closed"],
        ]
        for one in overview["models"]
    ]
    places = [
        [
            one["name"],
            STATES.get(one["state"], one["state"]),
            f"{one['in_flight']}/{one['in_flight_max'] or 'learned'}",
            sum(one["failures"].values()),
            one["last_failure"] if one.get("unhealthy_seconds") is not None else "; ".join(one["tide"]),
        ]
        for one in overview["deployments"]
    ]
    stuck = [
        [one["id"], one["org"], one["status"], one["failures"], terminal.duration(one["expires_in_seconds"])]
        for one in overview["attention"]
    ]
    parts: list[RenderableType] = [head]
    for title, headings, rows in (
        ("Batches that have not ended", ["status", "batches", "done", "failed"], batches),
        ("Models", ["model", "waiting", "batches", "oldest", "rate", "nothing is sent: why"], models),
        ("Deployments", ["deployment", "state", "in flight", "failures", "tide, or why not"], places),
        ("Look at these", ["batch", "organization", "status", "failures", "time left"], stuck),
    ):
        if rows:
            parts += [Text(), _table(title, headings, rows)]
    return Group(*parts)


def _table(title: str, headings: list[str], rows: list[list[object]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, expand=False)
    for heading in headings:
        table.add_column(heading, header_style="dim", overflow="ellipsis", no_wrap=heading != headings[-1])
    for row in rows[:ROWS_MAX]:
        table.add_row(*(Text(f"{one:,}" if isinstance(one, int) else terminal.clean(one)) for one in row))
    if len(rows) > ROWS_MAX:
        table.add_row(Text(f"and {len(rows) - ROWS_MAX:,} more", style="dim"))
    return table
