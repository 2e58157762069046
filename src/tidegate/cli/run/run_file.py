"""Runs the file or the table of one `tidegate run`: reads it, runs it, and puts the
results where they belong."""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path, PurePath

import msgspec
import uvloop
from msgspec.structs import replace

from tidegate.cli.batches import batch_fields
from tidegate.cli.run import remote_files, run_dry, run_job, run_table, tables, template
from tidegate.cli.run import run_options as asked
from tidegate.cli.terminal import input_file, logs, options, results, server_client, summary, terminal
from tidegate.core.answer_terms import AnswerTerms
from tidegate.core.errors import SettingsError, StoreRefused
from tidegate.core.job_controls import Canary, JobControls, MaxErrors
from tidegate.core.states import JOB_ENDED
from tidegate.core.usage.prices import nano_of
from tidegate.settings import Settings, openai_names
from tidegate.settings.groups import Retry

OPENAI_URL = "https://api.openai.com/"
ERRORS_AFTER = 100
# Limits for the user's own file: it may be a table of millions of rows, or have lines with images.
OWN_LIMITS = {"items_max": 10_000_000, "line_bytes_max": 64 << 20, "file_bytes_max": 1 << 40}
_MAX_ERRORS = re.compile(r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,4})?)(?P<percent>\s?%)?", re.ASCII)


class Order(msgspec.Struct, frozen=True):
    """The command line of one run."""

    file: str
    output: str | None
    errors: str | None
    template: str | None
    run_options: input_file.RunOptions
    fields: Sequence[str]
    fresh: bool
    retry_failed: bool
    wait: bool
    is_checked: bool
    is_dry: bool
    as_json: bool
    where: str

    @property
    def remote_output(self) -> str | None:
        return self.output if self.output is not None and remote_files.is_remote(self.output) else None


def perform(order: Order, settings: Settings) -> int:
    """Run the order, and return the exit code."""
    options.require_upstream(settings)
    settings = _for_ones_own_file(settings)
    _check_together(order)
    try:
        with ExitStack() as passing:
            return _run_table(order, settings, passing) if order.template else _run_file(order, settings, passing)
    except StoreRefused as error:
        if order.template or not Path(order.file).is_file() or server_client.running_server(settings) is None:
            raise
        raise StoreRefused(f"{error} Or give the file to that server: tidegate batches create {order.file}") from error


def _run_file(order: Order, settings: Settings, passing: ExitStack) -> int:
    source = _input(order, settings, passing)
    targets = input_file.targets(_local_output(order, settings, passing), order.errors, source)
    if order.as_json and targets.results is None:
        raise SettingsError("--json and results on stdout would mix; send the results to a file with -o FILE.")
    if source.is_blank:
        return _finish_empty(order, targets, settings)
    run_options = _for_endpoint(order, _endpoint(order.run_options.endpoint, source))
    logs.configure(settings, quiet=True)
    begin = run_job.Begin(order.fresh, order.retry_failed, order.wait, order.is_checked)
    read_from = "" if source.is_spooled else _place(order.file)
    written_to = order.remote_output or (_place(str(targets.results)) if targets.results is not None else "")
    series = input_file.series(settings, run_options, read_from, written_to) if read_from else ""
    errand = run_job.Errand(settings, source, targets, run_options, begin, order.where, series)
    if order.is_dry:
        return run_dry.report([errand], as_json=order.as_json)
    ending, exit_code = uvloop.run(run_job.perform(errand))
    is_done = ending.job.state in JOB_ENDED
    if is_done and exit_code != summary.UNUSABLE and order.remote_output:
        shown = uvloop.run(remote_files.send_both(targets, order.remote_output, settings, ending.job_ids))
        ending = replace(ending, targets=shown)
    if order.as_json:
        terminal.show_json({**summary.for_scripts(ending), "exit_code": exit_code})
    elif is_done:
        terminal.say(summary.for_people(ending))
    return exit_code


def _finish_empty(order: Order, targets: input_file.Targets, settings: Settings) -> int:
    """Finish a run without requests: send nothing, and leave the files as after any other run."""
    if targets.results is not None:
        results.set_aside(targets.results)
        uvloop.run(results.save_nothing(targets.results))
    if targets.errors is not None:
        results.set_aside(targets.errors)
        results.remove(targets.errors)
    if order.remote_output:
        targets = uvloop.run(remote_files.send_both(targets, order.remote_output, settings, ()))
    if order.as_json:
        terminal.show_json(summary.of_nothing(targets))
    else:
        terminal.say("done     0 of 0 items succeeded: the input has no requests")
    return summary.ALL_SUCCEEDED


def _input(order: Order, settings: Settings, passing: ExitStack) -> input_file.Input:
    """Return the input on this disk: a local file itself, or else a copy or several
    files joined."""
    bytes_max = settings.limits.file_bytes_max
    if not remote_files.is_remote(order.file) and not remote_files.is_pattern(order.file):
        is_passing = input_file.is_passing(order.file)
        spool_dir = passing.enter_context(_scratch(settings)) if is_passing else settings.data_dir
        return input_file.read_input(order.file, spool_dir, bytes_max)
    if order.output is None:
        raise SettingsError(f"{order.file} is no file here to name the results after; say where they go with -o FILE.")
    scratch = passing.enter_context(_scratch(settings))
    files = uvloop.run(remote_files.bring(order.file, settings, scratch))
    if order.output != input_file.STREAM and not order.remote_output:
        input_file.check_target(Path(order.output), [one.path for one in files], "-o")
    remote_files.check_apart(order.output, order.file)
    name = PurePath(order.file).name
    if len(files) == 1:
        return replace(input_file.read_input(str(files[0].path), scratch, bytes_max), name=name)
    path = scratch / "joined.jsonl"
    found = remote_files.joined(files, path)
    return replace(input_file.read_input(str(path), scratch, bytes_max), name=name, places=found)


def _run_table(order: Order, settings: Settings, passing: ExitStack) -> int:
    order = replace(order, output=_table_output(order))
    scratch = passing.enter_context(_scratch(settings))
    tables.format_of(order.output or "", "written")
    paths = [one.path for one in uvloop.run(remote_files.bring(order.file, settings, scratch))]
    target = Path(_local_output(order, settings, passing) or "")
    input_file.check_target(target, paths, "-o")
    remote_files.check_apart(order.output, order.file)
    if results.is_stream(target):
        raise SettingsError(f"{target} is no file: rows and their answers need one, so choose another place with -o.")
    table = tables.RowTable(paths)
    request = template.read(Path(order.template or ""), order.run_options.endpoint or None)
    run_table.check_columns(table, request)
    logs.configure(settings, quiet=True)
    # Rows and results are joined in one order, and one bad row must not stop the others.
    run_options = replace(
        _for_endpoint(order, request.endpoint), ordered=True, invalid_lines=asked.InvalidLines.ERROR_FILE.value
    )
    begin = run_job.Begin(order.fresh, order.retry_failed, order.wait, order.is_checked)
    names = (_place(order.file), order.remote_output or _place(str(target)))
    errand = run_table.TableErrand(table, request, target, settings, run_options, begin, order.where, names)
    if order.is_dry:
        each = (part for part, _ in run_table.parts(errand, scratch))
        return run_dry.report(each, as_json=order.as_json, name=PurePath(order.file).name)
    ending, exit_code = run_table.perform(errand, scratch)
    if ending is None:
        return exit_code
    if order.remote_output:
        uvloop.run(remote_files.send(target, order.remote_output, settings))
    shown = order.remote_output or str(target)
    if order.as_json:
        terminal.show_json(ending.for_scripts(shown))
    else:
        has_bound = order.run_options.controls.max_cost_nano is not None
        terminal.say(ending.for_people(shown, order.where, has_bound=has_bound))
    return exit_code


def _table_output(order: Order) -> str:
    """Return where the rows and their answers go: beside the table if the caller names no place."""
    is_here = (
        not remote_files.is_remote(order.file)
        and not remote_files.is_pattern(order.file)
        and order.file != input_file.STREAM
    )
    if order.output is None and is_here:
        path = Path(order.file)
        tables.format_of(path.name, "read")
        return f"{path.stem}.results{path.suffix}"
    if order.output in (None, input_file.STREAM):
        raise SettingsError(
            "A table needs a place for its rows and their answers: say -o FILE.csv, .jsonl or .parquet."
        )
    return order.output or ""


def _place(name: str) -> str:
    """Return a name that means the same from every directory."""
    return name if remote_files.is_remote(name) else str(Path(name).absolute())


def _scratch(settings: Settings) -> AbstractContextManager[Path]:
    """Return a directory for files that only pass through this run."""
    from tidegate.storage import passing_files

    return passing_files(settings)


def _local_output(order: Order, settings: Settings, passing: ExitStack) -> str | None:
    """Return where results are written on this disk; those for a bucket are copied
    there when they are whole."""
    if not order.remote_output:
        return order.output
    remote_files.check_address(order.remote_output)
    scratch = passing.enter_context(_scratch(settings))
    return str(scratch / PurePath(order.remote_output).name)


def _check_together(order: Order) -> None:
    """Refuse options that contradict each other."""
    if order.retry_failed and (order.fresh or order.is_dry):
        other = "--fresh begins again" if order.fresh else "--dry-run is about the whole file"
        raise SettingsError(f"{other}, while --retry-failed is about some lines of the last run: leave one out.")


def named_once(files: Sequence[str], named_file: str | None) -> str:
    if len(files) > 1:
        raise SettingsError(
            f"{len(files):,} files are named, from {files[0]} to {files[-1]}: run them as one with a pattern in quotes, "
            "such as 'data/*.jsonl', or one after another."
        )
    if files and named_file is not None:
        raise SettingsError("The input is named twice: write FILE or -i FILE.")
    if not files and named_file is None:
        raise SettingsError("Name the file of requests: tidegate run FILE, or - for stdin.")
    return files[0] if files else named_file or ""


def named_upstream(upstream: str | None, api_key: str | None) -> tuple[str | None, str | None]:
    """Return the model server's address and its key; without options, from the environment
    variables of OpenAI's SDK.

    The key goes only to the server that the environment names with it, or to OpenAI's own."""
    base_url, key = openai_names()
    named = upstream or base_url
    if api_key is None and named is not None and (upstream is None or named.startswith(OPENAI_URL)):
        api_key = key
    return named, api_key


def _for_ones_own_file(settings: Settings) -> Settings:
    """Raise the limits that protect a public API from callers, and the retry budget,
    unless the settings name one.

    A restarted server may get all failed calls again at once, because one file is no
    crowd of callers."""
    raised = {name: max(getattr(settings.limits, name), most) for name, most in OWN_LIMITS.items()}
    retry = settings.retry
    if retry.budget_min == Retry().budget_min:
        retry = msgspec.structs.replace(retry, budget_min=max(retry.budget_min, settings.worker.in_flight_max))
    limits = msgspec.structs.replace(settings.limits, **raised)
    return msgspec.structs.replace(settings, limits=limits, retry=retry)


def answer_terms(schema: str | None) -> AnswerTerms | None:
    """Return the terms of `--schema` for answers: the schema in a file, or each line's own."""
    if schema is None:
        return None
    if schema == batch_fields.OWN_SCHEMA:
        return AnswerTerms()
    # Loading the validator takes a while, and most runs need none.
    from tidegate.core.answers.answer_checks import InvalidSchema, check_schema

    try:
        text = Path(schema).read_text()
        check_schema(text)
    except OSError as error:
        raise SettingsError(f"--schema {schema} cannot be read: {error.strerror or error}.") from None
    except (InvalidSchema, UnicodeDecodeError) as error:
        raise SettingsError(f"--schema {schema} cannot be used: {error}.") from None
    return AnswerTerms(text)


def canary(items: int | None) -> Canary | None:
    """Return the sample that `--canary` asks for, with the same share of allowed
    failures as in the API."""
    if items is None:
        return None
    # This module of the API is loaded only here, because other runs do not need it.
    from tidegate.web.requests.control_requests import CanaryFields, job_canary

    return job_canary(CanaryFields(items))


def controls(max_cost: str | None, max_errors: str | None) -> JobControls:
    """Return the bounds that `--max-cost` and `--max-errors` ask for."""
    return JobControls(max_cost_nano=None if max_cost is None else _nano(max_cost), max_errors=_max_errors(max_errors))


def _nano(amount: str) -> int:
    try:
        nano = nano_of(amount)
    except SettingsError as error:
        raise SettingsError(f"--max-cost {amount}{str(error).removeprefix('cost')}.") from None
    if not nano:
        raise SettingsError("--max-cost must be above 0.")
    return nano


def _max_errors(text: str | None) -> MaxErrors | None:
    """Return the bound of failed lines: `20` is a count, `5%` a share of the done lines, once a
    hundred are done."""
    if text is None:
        return None
    found = _MAX_ERRORS.fullmatch(text)
    if found is None or (found["percent"] and not float(found["number"]) < 100):
        raise SettingsError(
            f"--max-errors {text}: write how many lines may fail, such as 20, or a share below 100 %, such as 5%."
        )
    if not found["percent"]:
        if "." in found["number"]:
            raise SettingsError(f"--max-errors {text}: a count has no fraction; write a share with %.")
        return MaxErrors(count=int(found["number"]))
    return MaxErrors(share_ppm=round(10_000 * float(found["number"])), after=ERRORS_AFTER)


def checked_endpoint(endpoint: str | None) -> str:
    """Return the path that `--endpoint` names; empty for each line's own."""
    if endpoint is not None and not endpoint.startswith("/"):
        raise SettingsError(f"--endpoint {endpoint} is no path: write it like /v1/chat/completions.")
    return endpoint or ""


def connections(in_flight: int | None) -> int | None:
    """Return the most connections that `--concurrency` needs; None if the default of
    the settings is enough."""
    return in_flight if in_flight is not None and in_flight > 500 else None


def _for_endpoint(order: Order, endpoint: str) -> input_file.RunOptions:
    """Return the options with this endpoint, and with the fields that can be checked only now."""
    run_options = replace(order.run_options, endpoint=endpoint)
    if not order.fields:
        return run_options
    # This module of the API is loaded only here, because other runs do not need it.
    from tidegate.cli.run import run_fields

    return run_fields.with_fields(run_options, order.fields)


def _endpoint(given: str, source: input_file.Input) -> str:
    endpoint = given or source.endpoint
    if endpoint is None:
        if tables.is_table(source.name):
            raise SettingsError(f"{source.name} is a table: say with --template FILE how its rows become requests.")
        raise SettingsError(f"{source.name} cannot be run: {source.trouble}")
    return endpoint
