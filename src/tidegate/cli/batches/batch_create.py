"""`tidegate batches create`: gives files of requests to a server, over the data
directory or elsewhere."""

from collections.abc import Iterable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
import uvloop

from tidegate.cli.batches import batch_control, batch_fields, remote_batches
from tidegate.cli.terminal import estimates, input_file, moments, options, server_client, summary, terminal
from tidegate.core import ids
from tidegate.core.errors import ApiProblem, SettingsError

if TYPE_CHECKING:
    from tidegate.web.openai.schemas import Validation

_LINE_BYTES_MAX = 8 << 20
# Fields of the API that this command has other arguments for.
OTHER_WORDS = {
    "input_file_id": "name the file, or its id, in front of the options.",
    "input_file_ids": "name the files, or their ids, in front of the options.",
    "endpoint": "give --endpoint.",
    "validate_only": "give --dry-run.",
}

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH|FILE",
        help="JSONL files of requests, or their ids (file-…); several are one batch.",
        show_default=False,
    ),
]
BatchEndpointOption = Annotated[
    str | None,
    typer.Option("--endpoint", metavar="PATH", help="Such as /v1/chat/completions.", show_default="of the first line"),
]
WindowOption = Annotated[
    str | None, typer.Option("--window", metavar="TIME", help="Be done within this time.", show_default="24h")
]
Metadata = Annotated[
    list[str] | None, typer.Option("--metadata", metavar="KEY=VALUE", help="A note to find it by; may be repeated.")
]
BatchDryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", help="Say what it would take: errors, tokens, cost, time, limits. Nothing is kept."),
]
BatchCanaryOption = Annotated[
    int | None,
    typer.Option("--canary", metavar="N", min=1, help="Run N requests first; stop if more than a tenth of them fail."),
]
NotBeforeOption = Annotated[
    str | None, typer.Option("--not-before", metavar="MOMENT", help="Begin then at the earliest: 2026-11-01T22:00.")
]
BatchMaxCostOption = Annotated[
    str | None, typer.Option("--max-cost", metavar="AMOUNT", help="Stop when its answers cost more.")
]
BatchMaxErrorsOption = Annotated[
    str | None,
    typer.Option("--max-errors", metavar="N|SHARE", help="Stop when more requests fail, such as 100 or 5%."),
]
BatchDedupeOption = Annotated[
    bool, typer.Option("--dedupe", help="Run identical requests once, where chance has no part.")
]


class _FirstLine(msgspec.Struct):
    url: str


def create(
    sources: Sources,
    endpoint: BatchEndpointOption = None,
    window: WindowOption = None,
    metadata: Metadata = None,
    ordered: options.Ordered = False,
    dry_run: BatchDryRunOption = False,
    canary: BatchCanaryOption = None,
    priority: options.PriorityOption = None,
    not_before: NotBeforeOption = None,
    max_cost: BatchMaxCostOption = None,
    max_errors: BatchMaxErrorsOption = None,
    dedupe: BatchDedupeOption = False,
    schema: options.SchemaFile = None,
    field: batch_fields.Given = None,
    org: options.Org = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Upload files, create a batch of them, and print its id.

    Example: tidegate batches create requests.jsonl --server https://gateway:8080 --api-key env:GATEWAY_KEY
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    named: dict[str, Any] = {
        "completion_window": window,
        "metadata": _metadata(metadata or []) or None,
        "ordered": ordered or None,
        "canary.items": canary,
        "priority": priority,
        "not_before": None if not_before is None else moments.unix_s(not_before, "--not-before"),
        "max_cost": max_cost,
        "max_errors": None if max_errors is None else batch_control.errors_wanted(max_errors),
        "dedupe": dedupe or None,
        "answers.schema": None if schema is None else batch_fields.read_schema(schema),
        "validate_only": dry_run or None,
    }
    wanted = batch_fields.read(field or [])
    for name in OTHER_WORDS.keys() & wanted.keys():
        raise SettingsError(f"--field {name}: {OTHER_WORDS[name]}")
    for name, value in named.items():
        if value is not None:
            batch_fields.put(wanted, name, value)
    asked = server_client.any_server(settings)
    if dry_run:
        raise typer.Exit(uvloop.run(_validate(asked, org, sources, endpoint, wanted, as_json=as_json)))
    made = uvloop.run(_create(asked, org, sources, endpoint, wanted))
    if as_json:
        terminal.show_json(remote_batches.facts(made))
        return
    typer.echo(made["id"])
    where = options.as_arguments(config, data, server, api_key, org)
    terminal.say(f"Follow it with: tidegate batches watch {made['id']}{where}")


async def _create(
    server: server_client.AskedServer, org: str | None, sources: Sequence[str], endpoint: str | None, wanted: Any
) -> dict[str, Any]:
    """Create the batch. If the server refuses it, remove the files that were uploaded for it."""
    endpoint = _endpoint(sources, endpoint)
    sent: list[str] = []
    try:
        for one in sources:
            sent.append(await _sent(server, org, one))
        return await _post(server, org, sent, {"endpoint": endpoint, **wanted})
    except ApiProblem as problem:
        if problem.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            await _remove(server, org, set(sent).difference(sources))
        raise


async def _validate(
    server: server_client.AskedServer,
    org: str | None,
    sources: Sequence[str],
    endpoint: str | None,
    wanted: Any,
    *,
    as_json: bool,
) -> int:
    """Print what a batch would take, remove the files that were uploaded for that, and
    return the exit code."""
    from tidegate.web.openai.schemas import Validation

    endpoint = _endpoint(sources, endpoint)
    sent: list[str] = []
    try:
        for one in sources:
            sent.append(await _sent(server, org, one))
        answer = await _post(server, org, sent, {"endpoint": endpoint, **wanted})
    finally:
        await _remove(server, org, set(sent).difference(sources))
    for error in answer["errors"]["data"]:
        error["message"] = _as_given(error["message"], sent, sources)
    exit_code = summary.ALL_SUCCEEDED if answer["valid"] else summary.UNUSABLE
    if as_json:
        terminal.show_json(answer)
        return exit_code
    terminal.say(f"input    {', '.join(sources)}\n{_for_people(msgspec.convert(answer, Validation))}")
    terminal.say(
        "Nothing was kept; leave --dry-run out to create it."
        if answer["valid"]
        else "Nothing was kept; fix this and try again."
    )
    return exit_code


async def _remove(server: server_client.AskedServer, org: str | None, file_ids: Iterable[str]) -> None:
    for file_id in file_ids:
        await server.delete(f"/v1/files/{file_id}", dict[str, Any], tenant=org)


def _as_given(message: str, sent: Sequence[str], sources: Sequence[str]) -> str:
    """Return a message with the names of the command line in place of the ids of uploaded files,
    which are removed."""
    for file_id, source in zip(sent, sources, strict=True):
        message = message.replace(file_id, source)
    return message


def _metadata(given: Sequence[str]) -> dict[str, str]:
    pairs = dict(one.split("=", 1) for one in given if "=" in one)
    if len(pairs) < len(given):
        raise SettingsError("--metadata takes KEY=VALUE, each key once.")
    return pairs


def _for_people(found: "Validation") -> str:
    from tidegate.core.nouns import LineError
    from tidegate.web.jobs.validation import JobEstimate

    lines = [LineError(one.code, one.message, one.param, one.line) for one in found.errors.data]
    counts = found.request_counts
    # If failed lines are counted, the errors are theirs; otherwise they stop the whole batch.
    errors, bad_lines = ([], lines) if counts.failed else (lines, [])
    estimate = JobEstimate(
        errors, counts.total, counts.failed, bad_lines, found.deduplicated, found.reused, found.tokens, found.cost,
        found.eta_seconds, found.shared_prefix_share, found.limits, found.refused,
    )  # fmt: skip
    return estimates.for_people(estimate, is_valid=found.valid)


async def _post(
    server: server_client.AskedServer, org: str | None, files: Sequence[str], wanted: dict[str, Any]
) -> dict[str, Any]:
    inputs = {"input_file_id": files[0]} if len(files) == 1 else {"input_file_ids": list(files)}
    return await server.post("/v1/batches", dict[str, Any], {**inputs, **wanted}, tenant=org)


async def _sent(server: server_client.AskedServer, org: str | None, source: str) -> str:
    """Return the id of an input at the server; upload it if it is a local file."""
    if ids.is_valid("file", source):
        return source
    return str((await server.upload(Path(source), dict[str, Any], tenant=org))["id"])


def _endpoint(sources: Sequence[str], given: str | None) -> str:
    """Return the endpoint of the batch. Check all local files first, so that nothing is sent of a
    list with a wrong one."""
    paths = [Path(one) for one in sources if not ids.is_valid("file", one)]
    for path in paths:
        input_file.check_source(path)
    if given is not None:
        return given
    if not paths:
        raise SettingsError("A file at the server needs --endpoint, such as --endpoint /v1/chat/completions.")
    return _first_url(paths[0])


def _first_url(path: Path) -> str:
    """Return the endpoint that the first line names."""
    with path.open("rb") as stream:
        line = stream.readline(_LINE_BYTES_MAX)
    try:
        return msgspec.json.decode(line, type=_FirstLine).url
    except msgspec.MsgspecError as error:
        raise SettingsError(
            f"The first line of {path} is no request with a `url` ({error}). `tidegate run` takes other kinds of files."
        ) from None
