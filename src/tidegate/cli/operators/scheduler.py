"""`tidegate scheduler`: shows the mode that chooses what runs next, and switches it
while everything runs."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
import uvloop

from tidegate.cli.terminal import options, server_client, terminal
from tidegate.core.wording import in_words
from tidegate.settings import Settings

if TYPE_CHECKING:
    from tidegate.web.admin.scheduler import SchedulerStatus

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Show or switch what chooses the next slice: show, set."
)


class ModeWord(StrEnum):
    FIFO = "fifo_v1"
    SLICE = "slice_v1"
    MODEL_CAPACITY = "model_capacity_v1"
    FAIR_SHARE = "fair_share_v1"
    SMART = "smart_v1"
    CONFIGURED = "configured"


class ShadowWord(StrEnum):
    NONE = "none"
    FIFO = "fifo_v1"
    SLICE = "slice_v1"
    MODEL_CAPACITY = "model_capacity_v1"
    FAIR_SHARE = "fair_share_v1"
    SMART = "smart_v1"
    CONFIGURED = "configured"


@app.command()
def show(
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Show the mode in force and what it counted.

    Counts are those of the server on this machine since it began; without one there are none.

    Example: tidegate scheduler show
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    _tell(uvloop.run(_status(settings)), as_json=as_json)


@app.command("set")
def set_mode(
    mode: Annotated[
        ModeWord,
        typer.Argument(metavar="MODE", help="A mode, or `configured` for what the settings say.", show_default=False),
    ],
    shadow: Annotated[
        ShadowWord | None,
        typer.Option(
            "--shadow",
            metavar="MODE",
            help="A second mode that only reports; `none` ends it, `configured` is that of the settings.",
            show_default="as it is",
        ),
    ] = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Switch the mode while everything runs.

    Every process of the store follows within a heartbeat. It stays until it is switched again; `configured` gives it back to the settings,
    and `--shadow configured` the shadow mode.

    Example: tidegate scheduler set fair_share_v1 --shadow smart_v1
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    _tell(uvloop.run(_override(settings, mode, shadow)), as_json=as_json)


async def _status(settings: Settings) -> "SchedulerStatus":
    from tidegate.web.admin.scheduler import SchedulerStatus, status_of

    if (server := server_client.remote(settings) or server_client.running_server(settings)) is not None:
        return await server.get("/admin/v1/scheduler", SchedulerStatus)
    async with server_client.reading(settings) as parts:
        return status_of(settings, await parts.store.mode_override())


async def _override(settings: Settings, mode: ModeWord, shadow: ShadowWord | None) -> "SchedulerStatus":
    from tidegate import storage
    from tidegate.web.admin.audit import COMMAND, AuditTrail
    from tidegate.web.admin.scheduler import SchedulerRequest, SchedulerStatus, override_mode, status_of

    wanted = SchedulerRequest(mode.value, shadow.value if shadow else None)
    if (server := server_client.asked(settings)) is not None:
        return await server.post("/admin/v1/scheduler", SchedulerStatus, wanted)
    async with storage.opened(settings) as parts:
        return status_of(settings, await override_mode(AuditTrail(parts.store, parts.entropy, COMMAND), wanted))


def _tell(status: "SchedulerStatus", *, as_json: bool) -> None:
    if as_json:
        terminal.show_json(status)
        return
    rows = [
        ("mode", f"{status.mode}{' (switched at run time)' if status.mode_switched else ''}"),
        ("shadow mode", f"{status.shadow_mode}{' (switched at run time)' if status.shadow_mode_switched else ''}"),
    ]
    if status.shadow_decisions:
        rows.append(("shadow differed in", f"{status.shadow_differences:,} of {status.shadow_decisions:,} decisions"))
    rows += [(f"picked as {why}", f"{count:,} slices") for why, count in sorted(status.picks.items())]
    rows += [(f"passed over: {reason}", in_words(count, "time")) for reason, count in sorted(status.skips.items())]
    terminal.show_facts(rows)
