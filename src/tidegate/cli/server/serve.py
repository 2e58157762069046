"""`tidegate serve`, `api` and `worker`: the same process in three roles."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import structlog
import typer
import uvloop

from tidegate.cli.terminal import logs, options, summary, terminal
from tidegate.cli.terminal.loading import settle_memory
from tidegate.cli.terminal.signals import Stopping, exit_now
from tidegate.core.errors import TidegateError, WorkerBroken
from tidegate.settings import Loaded, Settings, redacted
from tidegate.settings.reload import SettingsFile

if TYPE_CHECKING:
    from tidegate.service import Started

# EX_SOFTWARE of sysexits.h: an internal error, so that a supervisor can tell it from a
# wrong setting.
BROKEN = 70

HostOption = Annotated[
    str | None, typer.Option("--host", metavar="H", help="Address to listen on.", show_default="127.0.0.1")
]
Port = Annotated[
    int | None, typer.Option("--port", metavar="P", help="Port to listen on; 0 takes a free one.", show_default="8080")
]


def serve(
    data: options.Data = None,
    config: options.Config = None,
    host: HostOption = None,
    port: Port = None,
    upstream: options.UpstreamOption = None,
    api_key: options.ApiKey = None,
) -> None:
    """Serve the API and run its batches, in one process.

    It speaks OpenAI's Files and Batches API; the official SDK works unchanged.

    Example: tidegate serve --upstream http://localhost:8000/v1 --port 8080
    """
    given: dict[str, Any] = {
        "server__host": host,
        "server__port": port,
        "upstream__url": upstream,
        "upstream__api_key": api_key,
    }
    _run(lambda: options.read(config, data, **given), api=True, worker=True)


def api(
    data: options.Data = None,
    config: options.Config = None,
    host: HostOption = None,
    port: Port = None,
) -> None:
    """Serve the API only, beside `tidegate worker`.

    They meet in PostgreSQL and S3.

    Example: tidegate api --config tidegate.yaml --host 0.0.0.0
    """
    _run(lambda: options.read(config, data, server__host=host, server__port=port), api=True, worker=False)


def worker(
    data: options.Data = None,
    config: options.Config = None,
    upstream: options.UpstreamOption = None,
    api_key: options.ApiKey = None,
) -> None:
    """Run batches only, beside `tidegate api`.

    They meet in PostgreSQL and S3.

    Example: tidegate worker --config tidegate.yaml
    """
    given: dict[str, Any] = {"upstream__url": upstream, "upstream__api_key": api_key}
    _run(lambda: options.read(config, data, **given), api=False, worker=True)


def _run(read: Callable[[], Loaded], *, api: bool, worker: bool) -> None:
    loaded = read()
    settings = loaded.settings
    file = SettingsFile(loaded.path, lambda: read().settings) if loaded.path is not None else None
    logs.configure(settings)
    for warning in loaded.warnings:
        _say(settings, "settings_warning", warning, terminal.warn)
    try:
        uvloop.run(_serve(settings, file, api=api, worker=worker))
    except WorkerBroken as error:
        why = f"The worker ended after an internal error ({error}). Nothing is lost; start it again."
        _say(settings, "worker_ended", why, terminal.say)
        raise typer.Exit(BROKEN) from None
    except TidegateError as error:
        if not _is_json(settings):
            raise
        structlog.get_logger().error("start_failed", why=str(error))
        raise typer.Exit(summary.UNUSABLE) from None


def _is_json(settings: Settings) -> bool:
    return settings.logging.format == "json"


def _say(settings: Settings, event: str, text: str, show: Callable[[str], None]) -> None:
    """Print a sentence, or log it if the log is JSON, so that a reader of the log can
    parse every line."""
    if _is_json(settings):
        structlog.get_logger().warning(event, why=text)
    else:
        show(text)


def _say_started(settings: Settings, started: "Started") -> None:
    """Print the addresses of this process, its store and its files."""
    places = {
        "console": f"{started.admin}/console" if started.admin else "",
        "metrics": f"{started.metrics}/metrics" if started.metrics else "",
        "store": redacted(settings.store.location),
        "files": settings.blobs.url,
    }
    if _is_json(settings):
        named = {name: place for name, place in places.items() if place}
        structlog.get_logger().info("process_started", id=started.worker_id, api=started.api or None, **named)
        return
    first = f"listening on {started.api}" if started.api else f"{started.worker_id} running"
    typer.echo("\n".join([f"tidegate {first}", *(f"  {name:<8} {place}" for name, place in places.items() if place)]))


async def _serve(settings: Settings, file: SettingsFile | None, *, api: bool, worker: bool) -> None:
    from tidegate import service

    def on_ready(started: "Started") -> None:
        settle_memory()
        _say_started(settings, started)

    words = "Stopping; calls in flight are finished first. Once more stops at once."
    stopping = Stopping(lambda: _say(settings, "process_stopping", words, terminal.say))
    stopping.listen()

    def on_wait(words: str) -> None:
        _say(settings, "store_awaited", words, terminal.say)

    await service.run(settings, service.Roles(api=api, worker=worker), stopping.asked, on_ready, file, on_wait)
    exit_now(0)
