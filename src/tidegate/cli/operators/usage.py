"""`tidegate usage`: shows usage and cost as a table, JSON Lines or CSV. Sums are exact, however
they are grouped."""

import sys
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from typing import Annotated
from urllib.parse import urlencode

import msgspec
import typer
import uvloop

from tidegate.cli.terminal import options, results, server_client, terminal
from tidegate.core.errors import SettingsError
from tidegate.core.usage import spending
from tidegate.settings import Settings

_EPOCH = date(1970, 1, 1)
DAYS_SHOWN = 31
# The sums in a table, as far as the terminal is wide enough; JSON and CSV have more.
COUNTED = ("cost", "calls", "input_tokens", "output_tokens", "cached_tokens")


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def usage(
    by: Annotated[
        str, typer.Option("--by", metavar="A,B", help=f"Grouped by: {', '.join(spending.DIMENSIONS)}.")
    ] = "day,organization,model",
    first: Annotated[
        str | None,
        typer.Option("--from", metavar="DATE", help="First UTC day, as 2026-11-01.", show_default="30 days ago"),
    ] = None,
    last: Annotated[
        str | None, typer.Option("--to", metavar="DATE", help="Last UTC day, included.", show_default="today")
    ] = None,
    org: Annotated[
        str | None, typer.Option("--org", metavar="NAME", help="One organization alone.", show_default="all")
    ] = None,
    form: Annotated[
        Format | None,
        typer.Option("--format", help="A table, JSON Lines or CSV.", show_default="a table on a terminal, else json"),
    ] = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
) -> None:
    """Print what was used and what it cost.

    Money is in the currency of the prices in the settings, exact to a billionth. Elsewhere it needs a key with the scope admin:read.

    Example: tidegate usage --by organization,model --from 2026-11-01 --format csv
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    names = [name.strip() for name in by.split(",") if name.strip()]
    unknown = [name for name in names if name not in spending.DIMENSIONS]
    if unknown or not names:
        raise SettingsError(f"--by {by!r} is no part of a usage report; use any of: {', '.join(spending.DIMENSIONS)}.")
    today = datetime.now(UTC).date()
    to_day = _day("--to", last) or today
    from_day = _day("--from", first) or to_day - timedelta(days=DAYS_SHOWN - 1)
    if from_day > to_day:
        raise SettingsError("--from is after --to: give the earlier day first.")
    form = form or (Format.TABLE if sys.stdout.isatty() else Format.JSON)
    written_as = Format.CSV if form is Format.CSV else Format.JSON
    if (remote := server_client.remote(settings)) is not None:
        asked = {
            "by": ",".join(names),
            "from": str(from_day),
            "to": str(to_day),
            "org": org,
            "format": written_as.value,
        }
        query = urlencode({name: value for name, value in asked.items() if value is not None})
        chunks = remote.content(f"/admin/v1/usage?{query}")
    else:
        chunks = _chunks(settings, names, (from_day, to_day), org, written_as)
    written = uvloop.run(_show(chunks, names) if form is Format.TABLE else results.pour(chunks))
    if not written:
        terminal.say(f"Nothing was used from {from_day} to {to_day}.")


async def _show(chunks: AsyncIterator[bytes], by: list[str]) -> int:
    """Print JSON Lines as a table, and return the number of rows."""
    rows = [msgspec.json.decode(line) for line in b"".join([chunk async for chunk in chunks]).splitlines()]
    if rows:
        names = [*by, *COUNTED]
        shown = [[f"{row[name]:,}" if isinstance(row[name], int) else row[name] for name in names] for row in rows]
        terminal.show_table([name.replace("_", " ") for name in names], shown)
    return len(rows)


async def _chunks(
    settings: Settings, by: list[str], days: tuple[date, date], org: str | None, form: Format
) -> AsyncIterator[bytes]:
    async with server_client.reading(settings) as parts:
        tenant_id = await parts.store.tenant_by_name(org) if org is not None else ""
        if tenant_id is None:
            raise SettingsError(f"There is no organization {org!r}; `tidegate keys list` shows those with keys.")
        from_day, to_day = ((day - _EPOCH).days for day in days)
        entries = await parts.store.usage(from_day, to_day + 1, tenant_id=tenant_id, by_job="job" in by)
    summed = spending.sum_by(entries, by)
    for chunk in spending.csv_lines(summed, by) if form is Format.CSV else spending.json_lines(summed, by):
        yield chunk


def _day(option: str, text: str | None) -> date | None:
    if text is None:
        return None
    try:
        day = date.fromisoformat(text)
    except ValueError:
        raise SettingsError(f"{option} needs a day, as 2026-11-01.") from None
    if day < _EPOCH:
        raise SettingsError(f"{option} needs a day since {_EPOCH}: there was nothing to use before.")
    return day
