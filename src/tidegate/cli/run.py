"""`tidegate run`: one file in, results out, no server. Whatever stops it, the same command goes on where it was."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
import uvloop

from tidegate.cli import input_file, logs, options, progress, results, server_client, summary, terminal
from tidegate.cli.serve import require_upstream
from tidegate.cli.signals import Stopping
from tidegate.core.errors import SettingsError, StoreUnavailable
from tidegate.core.nouns import Caller, Job, JobRequest
from tidegate.core.queues import QueueState
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.settings import Settings, deployments

if TYPE_CHECKING:
    from tidegate.service import Parts, Working

LOOK_EVERY_S = 0.2
# A run has no deadline of its own: whoever comes back after a holiday finds the work where it was.
WINDOW_TEXT, WINDOW_MS = "365d", 365 * 86_400_000
NAME_CHARS_MAX = 255
GAVE_UP = (JobState.FAILED, JobState.EXPIRED, JobState.CANCELLED, JobState.CANCELLING)


class InvalidLines(StrEnum):
    FAIL = "fail"
    ERROR_FILE = "error_file"


@dataclass(frozen=True, slots=True)
class Errand:
    """Everything that one run was asked for."""

    settings: Settings
    source: input_file.Input
    targets: input_file.Targets
    wishes: input_file.Wishes
    fresh: bool
    wait: bool
    where: str


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
        wishes = input_file.Wishes(_endpoint(endpoint, source), ordered, prefix_order, invalid_lines.value)
        logs.configure(settings, quiet=True)
        errand = Errand(settings, source, targets, wishes, fresh, wait, options.said_again(config, data))
        ending, exit_code = uvloop.run(_perform(errand))
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


async def _perform(errand: Errand) -> tuple[summary.Ending, int]:
    from tidegate import service

    async with service.working(errand.settings) as working:
        began_s = time.monotonic()
        job = await _known_job(errand, working)
        if job is None or job.state not in JOB_ENDED:
            await _refuse_silence(errand)
        found_done_count = job.done_count if job is not None else 0
        if job is None:
            job = await _begin(errand, working)
        elif job.state in JOB_ENDED:
            terminal.say("This run was done before; its results are copied again. --fresh begins anew.")
        elif found_done_count:
            terminal.say(
                f"Going on: {found_done_count:,} of {terminal.in_words(job.item_count, 'item')} were done before."
            )
        stopping = Stopping(lambda: _say_stopping(working, errand.settings)).listen()
        if job.state not in JOB_ENDED:
            job = await _watch(job, working, stopping)
        ending = summary.Ending(job, errand.targets, time.monotonic() - began_s, found_done_count, errand.where)
        if job.state in JOB_ENDED:
            if ending.exit_code != summary.UNUSABLE:
                await _deliver(ending, working.parts)
            return ending, ending.exit_code
    # The worker has finished what was in flight by now, so this look is the one to tell.
    async with server_client.reading(errand.settings) as parts:
        job = await parts.store.get_job(parts.tenant_id, job.id) or job
    _say_how_to_go_on(job)
    return replace(ending, job=job), stopping.exit_code


async def _refuse_silence(errand: Errand) -> None:
    """A model server that is not there is most often a wrong address: say so before anything begins."""
    from tidegate import service

    if errand.wait:
        return
    probes = await service.probe_upstreams(errand.settings)
    queues = [state for _, state in await service.queue_states(deployments(errand.settings))]
    if any(isinstance(state, QueueState) for state in queues):
        return
    if not any(probe.reachable for probe in probes):
        urls = ", ".join(dict.fromkeys(one.url for one in deployments(errand.settings)))
        why = [probe.message for probe in probes] + [f"its queue cannot be reached ({away})" for away in queues]
        raise SettingsError(
            f"Nothing answers at {urls}: {why[0].rstrip('.?')}. Start the model server or mend --upstream; --wait waits for it."
        )
    if all(probe.status == 401 for probe in probes):
        raise SettingsError(f"The model server refuses us: {probes[0].message}. Name a key with --api-key env:NAME.")


async def _known_job(errand: Errand, working: "Working") -> Job | None:
    """The batch that this very run began before. One that ended or is ending early does not count: it is begun again."""
    last: Job | None = None
    async for job in _turns(errand, working):
        last = job
    if last is None or errand.fresh or (last.closing or last.state) in GAVE_UP:
        return None
    return last


async def _turns(errand: Errand, working: "Working") -> AsyncIterator[Job]:
    """Every batch that this run began so far, oldest first."""
    turn = 0
    while (job := await working.parts.store.get_job(working.parts.tenant_id, _id(errand, turn))) is not None:
        yield job
        turn += 1


def _id(errand: Errand, turn: int) -> str:
    return input_file.job_id(errand.source, errand.settings, errand.wishes, turn)


async def _begin(errand: Errand, working: "Working") -> Job:
    from tidegate.failpoints import hit
    from tidegate.stages.accept import Reception

    parts, source, wishes = working.parts, errand.source, errand.wishes
    job_id = _id(errand, len([job async for job in _turns(errand, working)]))
    caller = Caller(parts.tenant_id)
    reception = Reception(parts.store, parts.blobs, parts.clock, parts.entropy, lambda: working.incarnation.id)
    upload = await reception.begin_upload(errand.settings.limits.file_bytes_max)
    try:
        with source.path.open("rb") as stream:
            while chunk := stream.read(input_file.PIECE_BYTES):
                await upload.write(chunk)
        file = await upload.keep(
            caller,
            purpose="batch",
            filename=source.name[:NAME_CHARS_MAX],
            expires_after_ms=errand.settings.retention.file_s * 1000,
        )
    except BaseException:
        await upload.abandon()
        raise
    if file.sha256 != source.sha256:
        await parts.store.delete_file(parts.tenant_id, file.id)
        raise SettingsError(f"{source.name} changed while it was read; run the command again when it is complete.")
    request = JobRequest(
        endpoint=wishes.endpoint,
        input_file_id=file.id,
        window_ms=WINDOW_MS,
        window_text=WINDOW_TEXT,
        metadata={"command": "run", "input": source.name[:NAME_CHARS_MAX]},
        ordered=wishes.ordered,
        prefix_order=wishes.prefix_order,
        invalid_lines=wishes.invalid_lines,
    )
    job = await reception.replayed(lambda: parts.store.create_job(caller, job_id, request))
    await hit("create_committed")
    parts.wake.notify()
    return job


async def _watch(job: Job, working: "Working", stopping: Stopping) -> Job:
    """Show the batch until it ends or a stop is asked for."""
    parts = working.parts
    display = progress.display()
    try:
        while True:
            trouble = _trouble(working)
            try:
                job = await parts.store.get_job(parts.tenant_id, job.id) or job
            except StoreUnavailable as error:
                trouble = str(error)
            if job.state in JOB_ENDED:
                return job
            display.show(progress.snapshot(job, time.monotonic(), trouble))
            if await stopping.wait(LOOK_EVERY_S):
                return job
    finally:
        display.close()


def _trouble(working: "Working") -> str:
    """Why nothing moves, in words; empty while all is well."""
    for status in working.router.status():
        if status.state != "closed" and status.last_failure:
            return f"{status.url}: {status.last_failure}"
    return working.worker.trouble() or ""


async def _deliver(ending: summary.Ending, parts: "Parts") -> None:
    """Put answers and failed lines where they were wanted; an error file from an earlier run must not outlive its errors."""
    job, targets = ending.job, ending.targets
    if targets.errors is not None and job.error_file_id is not None and job.error_bytes:
        await results.save(results.content(parts, job.error_file_id, job.error_bytes), targets.errors)
    elif targets.errors is not None:
        results.remove(targets.errors)
    answers = results.content(parts, job.output_file_id, job.output_bytes)
    if targets.results is not None:
        await results.save(answers, targets.results)
    else:
        await results.pour(answers)


def _say_stopping(working: "Working", settings: Settings) -> None:
    count = working.worker.in_flight
    if count:
        terminal.say(
            f"Stopping: {terminal.in_words(count, 'call')} in flight may take up to "
            f"{terminal.duration(settings.worker.grace_ms / 1000)}; once more leaves at once."
        )


def _say_how_to_go_on(job: Job) -> None:
    done = (
        f"{job.done_count:,} of {terminal.in_words(job.item_count, 'item')} done"
        if job.item_count
        else "nothing sent yet"
    )
    terminal.say(f"Stopped: {done}. Nothing is lost; run the same command again to go on.")
