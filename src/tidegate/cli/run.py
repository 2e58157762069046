"""`tidegate run`: one file in, results out, no server. Whatever stops it, the same command goes on where it was."""

from enum import StrEnum
from typing import Annotated

import typer
import uvloop

from tidegate.cli import input_file, logs, options, run_job, summary, terminal
from tidegate.cli.serve import require_upstream
from tidegate.core.errors import SettingsError
from tidegate.core.states import JOB_ENDED


class InvalidLines(StrEnum):
    FAIL = "fail"
    ERROR_FILE = "error_file"


def run(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="JSONL with one request per line; - reads stdin.", show_default=False)
    ],
    upstream: options.Upstream = None,
    output: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Where results go; - is stdout.", show_default="FILE.results.jsonl"
        ),
    ] = None,
    errors: Annotated[
        str | None,
        typer.Option("--errors", metavar="FILE", help="Where failed lines go.", show_default="beside the results"),
    ] = None,
    data: options.Data = None,
    config: options.Config = None,
    api_key: options.ApiKey = None,
    in_flight: Annotated[
        int | None, typer.Option("--in-flight", metavar="N", help="Calls in flight at once.", show_default="64")
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", metavar="PATH", help="Which endpoint.", show_default="the first line's url"),
    ] = None,
    ordered: Annotated[bool, typer.Option("--ordered", help="Results in the order of the input.")] = False,
    prefix_order: Annotated[
        bool,
        typer.Option(
            "--prefix-order/--no-prefix-order", help="Send requests that share a prompt's beginning together."
        ),
    ] = True,
    invalid_lines: Annotated[
        InvalidLines, typer.Option("--invalid-lines", help="A bad line fails the run, or goes to the errors file.")
    ] = InvalidLines.FAIL,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start from the beginning, though the same run exists already.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for a model server that does not answer yet.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
) -> None:
    """Turn a file of requests into a file of results.

    Interrupt it, kill it, lose power: the same command goes on where it stopped and repeats nothing that was answered.
    Exit codes: 0 all succeeded, 1 some failed, 2 not possible as asked, 130 interrupted.

    Example: tidegate run requests.jsonl --upstream http://localhost:8000/v1 -o results.jsonl
    """
    settings = options.loaded(
        config, data, upstream__url=upstream, upstream__api_key=api_key, worker__in_flight_max=in_flight,
        http__connections_max=_connections(in_flight),
    ).settings  # fmt: skip
    require_upstream(settings)
    source = input_file.read_input(file, settings.data_dir / "scratch", settings.limits.file_bytes_max)
    try:
        targets = input_file.targets(output, errors, source)
        if as_json and targets.results is None:
            raise SettingsError("--json and results on stdout would mix; send the results to a file with -o FILE.")
        run_options = input_file.RunOptions(_endpoint(endpoint, source), ordered, prefix_order, invalid_lines.value)
        logs.configure(settings, quiet=True)
        errand = run_job.Errand(settings, source, targets, run_options, fresh, wait, options.as_arguments(config, data))
        ending, exit_code = uvloop.run(run_job.perform(errand))
    finally:
        if source.is_spooled:
            source.path.unlink(missing_ok=True)
    if as_json:
        terminal.show_json({**summary.for_scripts(ending), "exit_code": exit_code})
    elif ending.job.state in JOB_ENDED:
        terminal.say(summary.for_people(ending))
    raise typer.Exit(exit_code)


def _connections(in_flight: int | None) -> int | None:
    """Who asks for more calls than the default ceiling has connections means the ceiling, too."""
    return in_flight if in_flight is not None and in_flight > 500 else None


def _endpoint(given: str | None, source: input_file.Input) -> str:
    if given is not None and not given.startswith("/"):
        raise SettingsError(f"--endpoint {given} is no path: write it like /v1/chat/completions.")
    endpoint = given or source.endpoint
    if endpoint is None:
        raise SettingsError(f"{source.name} names no endpoint: {source.trouble}")
    return endpoint
