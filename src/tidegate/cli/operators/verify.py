"""`tidegate verify`: prints the judge's verdict on one batch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import uvloop

from tidegate.cli.terminal import options, server_client, terminal
from tidegate.settings import Settings, local_path

if TYPE_CHECKING:
    from tidegate.judge import Report

VIOLATED = 1


def verify(
    batch: options.BatchId,
    witness: Annotated[
        Path | None,
        typer.Option("--witness", metavar="FILE", help="The simulated engine's log of calls, to check against."),
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Every promise with what was looked at.", show_default="what is broken")
    ] = False,
    data: options.Data = None,
    config: options.Config = None,
    as_json: options.AsJson = False,
) -> None:
    """Check one batch against every promise.

    Nothing lost, nothing twice, nothing changed: judged from its files and records by code of its own.
    Exit codes: 0 every promise holds, 1 one is broken, 2 there is no verdict.

    Example: tidegate verify batch_0f3kQ2mZ8s1xW7vB4nD9Lc
    """
    options.check_batch_id(batch)
    settings = options.loaded(config, data).settings
    report = uvloop.run(_judge(settings, batch, witness))
    if as_json:
        terminal.show_json(report.to_json())
    else:
        for line in report.to_text(is_short=not details).splitlines():
            typer.echo(terminal.clean(line))
    raise typer.Exit(0 if report.ok else VIOLATED)


async def _judge(settings: Settings, batch: str, witness: Path | None) -> "Report":
    from tidegate.judge import Allowance, judge, postgres_records, sqlite_records

    allowance = Allowance(
        attempts_max=settings.retry.attempts_max,
        grace_ms=settings.worker.grace_ms + settings.worker.lease_ms,
        overridden=frozenset(name for level in settings.parameters.levels() for name in level.overrides),
        defaulted=frozenset(name for level in settings.parameters.levels() for name in level.defaults),
    )
    async with server_client.reading(settings) as parts:
        if settings.store.is_postgresql:
            async with postgres_records(settings.store.location) as records:
                return await judge(records, parts.blobs, batch, witness, allowance)
        async with sqlite_records(local_path(settings.store.location)) as own_records:
            return await judge(own_records, parts.blobs, batch, witness, allowance)
