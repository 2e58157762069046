"""`tidegate batches`: lists and shows batches, follows, cancels or abandons one, and
reads its results.

Reading works beside a running server.
"""

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
import uvloop

from tidegate.cli.batches import batch_facts, remote_batches, watching
from tidegate.cli.batches.explain import explained_by
from tidegate.cli.terminal import input_file, moments, options, results, server_client, terminal
from tidegate.cli.terminal.signals import Stopping
from tidegate.core.errors import SettingsError
from tidegate.core.job_lists import FILTER_PAIRS_MAX, JobFilter, JobSort
from tidegate.core.nouns import FOREVER_MS, Job
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.settings import Settings

if TYPE_CHECKING:
    pass

FOLLOW_EVERY_S = 0.5
PAGE_COUNT_MAX = 100

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Batches: create, list, watch, pause, cancel, retry and more.",
)


Every = Annotated[
    bool, typer.Option("--all", help="Of every organization; elsewhere with a key that has the scope admin:read.")
]
CountMax = Annotated[int, typer.Option("--limit", metavar="N", min=1, max=10_000, help="How many at most.")]
SortBy = Annotated[
    JobSort,
    typer.Option(
        "--sort",
        metavar="BY",
        help="created (newest first), deadline (next one first), size, failed (largest share) or cost.",
    ),
]
WithStatus = Annotated[
    JobState | None, typer.Option("--status", metavar="STATUS", help="Only batches with this status.")
]
WithModel = Annotated[str | None, typer.Option("--model", metavar="NAME", help="Only batches for this model.")]
WithMetadata = Annotated[
    list[str] | None, typer.Option("--metadata", metavar="KEY=VALUE", help="Only batches that say so; up to four.")
]
WithErrorCode = Annotated[
    str | None, typer.Option("--error-code", metavar="CODE", help="Only batches with such an error.")
]
CreatedAfter = Annotated[
    str | None,
    typer.Option("--created-after", metavar="MOMENT", help="Only batches from then on: 2026-11-01, or with T22:00."),
]
CreatedBefore = Annotated[
    str | None, typer.Option("--created-before", metavar="MOMENT", help="Only batches from before then.")
]
WithWords = Annotated[
    str | None,
    typer.Option("--search", metavar="TEXT", help="Only batches whose id, model, input or metadata has it."),
]


@app.command("list")
def list_batches(
    org: options.Org = None,
    every: Every = False,
    limit: CountMax = 20,
    sort: SortBy = JobSort.CREATED,
    status: WithStatus = None,
    model: WithModel = None,
    metadata: WithMetadata = None,
    error_code: WithErrorCode = None,
    created_after: CreatedAfter = None,
    created_before: CreatedBefore = None,
    search: WithWords = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """List batches, newest first or as --sort says.

    Example: tidegate batches list --status failed --metadata team=search
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    wanted = JobFilter(
        status,
        model,
        _pairs(metadata or []),
        from_ms=0 if created_after is None else 1000 * moments.unix_s(created_after, "--created-after"),
        to_ms=FOREVER_MS if created_before is None else 1000 * moments.unix_s(created_before, "--created-before"),
        error_code=error_code,
        words=search,
    )
    look = _matching_of_all if every else _matching
    found = terminal.first(uvloop.run(look(settings, org, wanted, sort, limit + 1)), limit)
    if as_json:
        terminal.show_json(found)
    elif not found and (wanted != JobFilter() or sort is not JobSort.CREATED or org is not None):
        terminal.say("No batch matches.")
    elif not found and not settings.remote.url and uvloop.run(_any_batch(settings)):
        terminal.say("Only other organizations have batches: --org NAME lists those of one, --all those of every one.")
    elif not found:
        begin = (
            "batches create requests.jsonl"
            if settings.remote.url
            else "run requests.jsonl --upstream http://localhost:8000/v1"
        )
        terminal.say(f"There are no batches yet. Begin with: tidegate {begin}")
    else:
        last = "org" if "org" in found[0] else "endpoint"
        rows = [[one["id"], one["status"], *_progress(one), one[last]] for one in found]
        terminal.show_table(["batch", "status", "done", "failed", "age", last], rows)


@app.command()
def show(
    batch: options.BatchId,
    org: options.BatchOrg = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Show all that is known of one batch.

    Example: tidegate batches show batch_0f3kQ2mZ8s1xW7vB4nD9Lc
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    known = uvloop.run(_one(settings, org, batch))
    if as_json:
        terminal.show_json(known)
    else:
        # The list of all models replaces the first model.
        known["model"] = ", ".join(known.pop("models")) or known["model"]
        shown = {name: value for name, value in known.items() if value not in (None, [], {})}
        terminal.show_facts([(name, _text(name, value)) for name, value in shown.items()])


@app.command()
def watch(
    batch: options.BatchId,
    org: options.BatchOrg = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line at every change.")] = False,
) -> None:
    """Follow one batch until it ends, over restarts of its server.

    Exit codes: 0 all succeeded, 1 some failed, 130 interrupted (the batch goes on).

    Example: tidegate batches watch batch_0f3kQ2mZ8s1xW7vB4nD9Lc
    """
    options.check_batch_id(batch)
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    if (remote := server_client.remote(settings)) is not None:
        lines, code = uvloop.run(watching.watch_server(remote, batch, as_json=as_json))
    else:
        lines, code = uvloop.run(watching.watch_here(settings, org, batch, as_json=as_json))
    for line in () if as_json else lines:
        terminal.say(terminal.clean(line))
    raise typer.Exit(code)


@app.command()
def cancel(
    batch: options.BatchId,
    org: options.BatchOrg = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Stop a batch; what was answered so far is kept.

    Example: tidegate batches cancel batch_0f3kQ2mZ8s1xW7vB4nD9Lc
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    status = uvloop.run(_cancel(settings, org, batch))
    if as_json:
        terminal.show_json({"id": batch, "status": status})
    else:
        where = options.as_arguments(config, data, server, api_key, org)
        terminal.say(f"{batch} is {status}. Its results so far: tidegate batches output {batch}{where}")


@app.command()
def abandon(
    batch: options.BatchId,
    org: options.BatchOrg = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Give up a batch that is stuck in finalizing.

    It fails with what was recorded of it; what never ran gets no line. For storage that will not come back.

    Example: tidegate batches abandon batch_0f3kQ2mZ8s1xW7vB4nD9Lc --yes
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    if not yes:
        terminal.agree(f"Give up publishing {batch}? What never ran will be in no file.")
    status = uvloop.run(_abandon(settings, org, batch))
    if as_json:
        terminal.show_json({"id": batch, "status": status})
    else:
        where = options.as_arguments(config, data, server, api_key, org)
        terminal.say(f"{batch} is {status}. What was recorded of it: tidegate batches output {batch}{where}")


@app.command()
def output(
    batch: options.BatchId,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to write.", show_default="stdout")
    ] = None,
    errors: Annotated[bool, typer.Option("--errors", help="The failed lines instead of the answers.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as results arrive, until the batch ends.")
    ] = False,
    org: options.BatchOrg = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
) -> None:
    """Print a batch's results, also while it still runs.

    Example: tidegate batches output batch_0f3kQ2mZ8s1xW7vB4nD9Lc -o results.jsonl
    """
    if follow and output is not None:
        raise SettingsError("--follow writes to stdout; leave out -o, or leave out --follow.")
    if output is not None:
        input_file.check_target(output, [], "-o")
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    raise typer.Exit(uvloop.run(_output(settings, org, batch, output, errors=errors, follow=follow)))


def _pairs(given: list[str]) -> dict[str, str]:
    """Return the filters by metadata."""
    pairs = dict(one.split("=", 1) for one in given if "=" in one)
    if len(pairs) < len(given) or len(pairs) > FILTER_PAIRS_MAX:
        raise SettingsError(f"--metadata takes KEY=VALUE, each key once and at most {FILTER_PAIRS_MAX} of them.")
    return pairs


async def _matching_of_all(
    settings: Settings, org: str | None, wanted: JobFilter, sort: JobSort, limit: int
) -> list[dict[str, Any]]:
    server = server_client.any_server(settings)
    return await remote_batches.matching(server, org, wanted, sort, limit, remote_batches.EVERY)


async def _matching(
    settings: Settings, org: str | None, wanted: JobFilter, sort: JobSort, limit: int
) -> list[dict[str, Any]]:
    if (remote := server_client.remote(settings)) is not None:
        if org is not None:
            return await remote_batches.matching(remote, org, wanted, sort, limit, remote_batches.EVERY)
        return await remote_batches.at_either(
            remote, lambda path: remote_batches.matching(remote, None, wanted, sort, limit, path)
        )
    async with server_client.reading(settings) as parts:
        tenant_id = await server_client.tenant(parts, org)
        found: list[Job] = []
        while len(found) < limit:
            after = found[-1].id if found else None
            page = await parts.store.search_jobs(
                tenant_id, wanted, after=after, count_max=min(limit - len(found), PAGE_COUNT_MAX), sort=sort
            )
            if not page:
                break
            found += page
        return [batch_facts.facts(job) for job in found]


async def _any_batch(settings: Settings) -> bool:
    """Return whether any organization has a batch."""
    async with server_client.reading(settings) as parts:
        return bool(await parts.store.search_every_job(None, JobFilter(), after=None, count_max=1))


async def _one(settings: Settings, org: str | None, batch: str) -> dict[str, Any]:
    if (remote := server_client.remote(settings)) is not None:
        options.check_batch_id(batch)
        found = await remote_batches.at_either(
            remote, lambda path: remote.get(f"{path}/{batch}", dict[str, Any], tenant=org)
        )
        models = (await explained_by(remote, batch)).models
        return {**remote_batches.facts(found), "models": models}
    async with server_client.reading(settings) as parts:
        job = await batch_facts.job_of(parts, org, batch)
        return {**batch_facts.facts(job), "models": await parts.store.models_of_job(job.id)}


async def _cancel(settings: Settings, org: str | None, batch: str) -> str:
    from tidegate import storage

    options.check_batch_id(batch)
    if (server := server_client.asked(settings)) is not None:
        owner = await remote_batches.owner(server, org, batch)
        answer = await remote_batches.at_either(
            server, lambda path: server.post(f"{path}/{batch}/cancel", dict[str, msgspec.Raw], tenant=owner)
        )
        return str(msgspec.json.decode(answer["status"], type=str))
    async with storage.opened(settings) as parts:
        job = await parts.store.cancel_job(await batch_facts.owner_id(parts, org, batch), batch)
        if job is None:
            raise batch_facts.absent(batch, org)
        return str(job.state)


async def _abandon(settings: Settings, org: str | None, batch: str) -> str:
    from tidegate import storage
    from tidegate.web.admin.audit import COMMAND, AuditTrail

    options.check_batch_id(batch)
    if (server := server_client.asked(settings)) is not None:
        found = await server.get(f"/admin/v1/batches/{batch}", dict[str, msgspec.Raw])
        if org is not None and msgspec.json.decode(found["org"], type=str) != org:
            raise batch_facts.absent(batch, org)
        answer = await server.post(f"/admin/v1/batches/{batch}/abandon", dict[str, msgspec.Raw])
        return str(msgspec.json.decode(answer["status"], type=str))
    async with storage.opened(settings) as parts:
        noting = AuditTrail(parts.store, parts.entropy, COMMAND).noting("batch.abandon", "batch", batch)
        job = await noting.abandon_job(
            await batch_facts.owner_id(parts, org, batch), batch, settings.retention.failed_s * 1000
        )
        if job is None:
            raise batch_facts.absent(batch, org)
        return str(job.state)


async def _output(
    settings: Settings, org: str | None, batch: str, target: Path | None, *, errors: bool, follow: bool
) -> int:
    if (remote := server_client.remote(settings)) is not None:
        return await remote_batches.output(remote, batch, target, errors=errors, follow=follow)
    async with server_client.reading(settings) as parts:
        stopping = Stopping().listen()
        at = 0
        while True:
            job = await batch_facts.job_of(parts, org, batch)
            file_id, size_bytes = (
                (job.error_file_id, job.error_bytes) if errors else (job.output_file_id, job.output_bytes)
            )
            has_ended = job.state in JOB_ENDED
            if job.ordered and not has_ended:
                size_bytes = 0
            stream = results.content(parts, file_id, size_bytes, at)
            if target is not None:
                await results.save(stream, target)
            else:
                at += await results.pour(stream)
            if has_ended or not follow:
                if not has_ended and not follow and sys.stderr.isatty():
                    terminal.say(
                        f"The batch is {job.state}: this is what it has so far. --follow goes on until it ends."
                    )
                return 0
            if await stopping.wait(FOLLOW_EVERY_S):
                return stopping.exit_code


def _progress(known: dict[str, Any]) -> list[str]:
    done = known["completed"] + known["failed"]
    age = terminal.duration(time.time() - known["created_at"])
    return [f"{done:,}/{known['total']:,}", f"{known['failed']:,}", age]


def _when(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _text(name: str, value: object) -> str:
    if (name.endswith("_at") or name == "not_before") and isinstance(value, int):
        return _when(value * 1000)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
