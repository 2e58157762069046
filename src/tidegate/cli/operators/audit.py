"""`tidegate audit`: checks that no entry of the audit was altered or removed, and
exports the entries."""

import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
import uvloop

from tidegate.cli.terminal import options, server_client, terminal
from tidegate.core.audit_chain import AuditEntry, ChainCheck
from tidegate.core.wording import in_words
from tidegate.settings import Settings

if TYPE_CHECKING:
    from tidegate.store.store import Store

BROKEN = 1
PAGE_COUNT = 1_000
_PLACE = re.compile(r"([1-9][0-9]{0,17}):([0-9a-f]{64})")

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What operators changed: verify, export.")


@app.command()
def verify(
    expect: Annotated[
        str | None,
        typer.Option(
            "--expect",
            metavar="NUMBER:HASH",
            help="An entry as an earlier check or an export showed it, noted outside of this store.",
            show_default="the store's own note of the last entry",
        ),
    ] = None,
    data: options.Data = None,
    config: options.Config = None,
    as_json: options.AsJson = False,
) -> None:
    """Check that no entry of the audit was altered or removed.

    Each entry carries the hash of the one before it. Someone who may write to the database could compute all hashes again: note
    the last number and hash elsewhere, and give them to a later check with --expect.

    Exit codes: 0 the chain is whole, 1 it is broken, 2 it could not be read.

    Example: tidegate audit verify
    """
    expected = _expected(expect)
    settings = options.loaded(config, data).settings
    check, unchained = uvloop.run(_checked(settings, expected))
    if as_json:
        terminal.show_json(_as_json(check, unchained))
    else:
        _tell(check, unchained, expected)
    raise typer.Exit(BROKEN if check.finding_count else 0)


@app.command()
def export(
    after: Annotated[
        int, typer.Option("--after", min=0, metavar="NUMBER", help="Only entries behind this one.", show_default="all")
    ] = 0,
    data: options.Data = None,
    config: options.Config = None,
) -> None:
    """Print the entries of the audit as JSON lines.

    Oldest first, with their numbers and hashes. To go on where an export ended, give its last number with --after.

    Example: tidegate audit export > audit.jsonl
    """
    uvloop.run(_export(options.loaded(config, data).settings, after))


async def _export(settings: Settings, after: int) -> None:
    async with server_client.reading(settings) as parts:
        async for entry in _entries(parts.store, after):
            terminal.show_json_line(entry)


async def _entries(store: "Store", number: int) -> AsyncIterator[AuditEntry]:
    while True:
        _, entries = await store.audit_entries(number, PAGE_COUNT)
        if not entries:
            return
        for entry in entries:
            yield entry
        number = entries[-1].number or 0


async def _checked(settings: Settings, expected: tuple[int, str] | None) -> tuple[ChainCheck, int]:
    check = ChainCheck(expected)
    async with server_client.reading(settings) as parts:
        is_more = True
        while is_more:
            ends, entries = await parts.store.audit_entries(check.number, PAGE_COUNT)
            check.look(ends, entries)
            is_more = bool(entries)
        return check, await parts.store.unchained_audit_count()


def _expected(text: str | None) -> tuple[int, str] | None:
    if text is None:
        return None
    found = _PLACE.fullmatch(text)
    if found is None:
        raise typer.BadParameter("give a number, a colon and 64 hexadecimal digits", param_hint="--expect")
    return int(found[1]), found[2]


def _tell(check: ChainCheck, unchained: int, expected: tuple[int, str] | None) -> None:
    for finding in check.findings:
        typer.echo(f"broken   {terminal.clean(finding.text)}")
    if check.finding_count > len(check.findings):
        typer.echo(
            f"broken   {in_words(check.finding_count - len(check.findings), 'more finding is', 'more findings are')} not shown"
        )
    if unchained:
        typer.echo(f"open     {in_words(unchained, 'entry', 'entries')} of an earlier version: not chained yet")
    if expected is not None and expected[0] < (check.first_number or 0):
        typer.echo(f"open     entry {expected[0]} was removed by retention: its hash cannot be compared")
    if not check.finding_count:
        typer.echo(f"whole    {in_words(check.entry_count, 'entry', 'entries')}")
    if check.number:
        typer.echo(f"last     {check.number}:{check.hash}")


def _as_json(check: ChainCheck, unchained: int) -> dict[str, Any]:
    return {
        "whole": not check.finding_count,
        "entries": check.entry_count,
        "unchained": unchained,
        "first_number": check.first_number,
        "last_number": check.number or None,
        "last_hash": check.hash or None,
        "findings": check.findings,
        "finding_count": check.finding_count,
    }
