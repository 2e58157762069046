"""`tidegate serve`, `api` and `worker`: the same process in three roles."""

from typing import Annotated

import typer
import uvloop

from tidegate.cli import logs, options, terminal
from tidegate.cli.signals import Stopping, exit_now
from tidegate.core.errors import SettingsError, WorkerBroken
from tidegate.settings import Settings, deployments

# What sysexits.h calls EX_SOFTWARE: an internal error, so that a supervisor can tell it from a setting that is wrong.
BROKEN = 70

Host = Annotated[
    str | None, typer.Option("--host", metavar="H", help="Address to listen on.", show_default="127.0.0.1")
]
Port = Annotated[
    int | None, typer.Option("--port", metavar="P", help="Port to listen on; 0 takes a free one.", show_default="8080")
]


def serve(
    data: options.Data = None,
    config: options.Config = None,
    host: Host = None,
    port: Port = None,
    upstream: options.Upstream = None,
    api_key: options.ApiKey = None,
) -> None:
    """Serve the API and run its batches, in one process.

    It speaks OpenAI's Files and Batches API; the official SDK works unchanged.

    Example: tidegate serve --upstream http://localhost:8000/v1 --port 8080
    """
    loaded = options.loaded(
        config, data, server__host=host, server__port=port, upstream__url=upstream, upstream__api_key=api_key
    )
    _run(loaded.settings, api=True, worker=True)


def api(
    data: options.Data = None,
    config: options.Config = None,
    host: Host = None,
    port: Port = None,
) -> None:
    """Serve the API only, beside `tidegate worker`.

    They meet in PostgreSQL and S3.

    Example: tidegate api --config tidegate.yaml --host 0.0.0.0
    """
    _run(options.loaded(config, data, server__host=host, server__port=port).settings, api=True, worker=False)


def worker(
    data: options.Data = None,
    config: options.Config = None,
    upstream: options.Upstream = None,
    api_key: options.ApiKey = None,
) -> None:
    """Run batches only, beside `tidegate api`.

    They meet in PostgreSQL and S3.

    Example: tidegate worker --config tidegate.yaml
    """
    loaded = options.loaded(config, data, upstream__url=upstream, upstream__api_key=api_key)
    _run(loaded.settings, api=False, worker=True)


def _run(settings: Settings, *, api: bool, worker: bool) -> None:
    logs.configure(settings)
    try:
        uvloop.run(_serve(settings, api=api, worker=worker))
    except WorkerBroken as error:
        terminal.say(f"The worker ended after an internal error ({error}). Nothing is lost; start it again.")
        raise typer.Exit(BROKEN) from None


def require_upstream(settings: Settings) -> None:
    """Without a model server every batch would wait for ever: better to say so now."""
    if not deployments(settings):
        raise SettingsError(
            "No model server is known: name one with --upstream http://HOST:PORT/v1, or list models in a --config file. "
            "`tidegate simulate` is one to try with."
        )


async def _serve(settings: Settings, *, api: bool, worker: bool) -> None:
    from tidegate import service

    def on_ready(address: str) -> None:
        typer.echo(f"tidegate listening on {address}" if api else f"tidegate {address} running")

    stopping = Stopping(lambda: terminal.say("Stopping; calls in flight are finished first. Once more stops at once."))
    stopping.listen()
    await service.run(settings, service.Roles(api=api, worker=worker), stopping.asked, on_ready)
    exit_now(0)
