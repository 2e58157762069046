"""One batch of a `tidegate run`: begun or found again, watched to its end, its results put where they belong."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tidegate.cli import input_file, progress, results, server_client, summary, terminal
from tidegate.cli.signals import Stopping
from tidegate.core.errors import SettingsError, StoreUnavailable
from tidegate.core.nouns import Caller, Job, JobRequest
from tidegate.core.queues import QueueState
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.settings import Settings, deployments

if TYPE_CHECKING:
    from tidegate.service import Parts, Working

LOOK_EVERY_S = 0.2
# A run has no deadline of its own: a caller who comes back after a holiday finds the work where it was.
WINDOW_TEXT, WINDOW_MS = "365d", 365 * 86_400_000
NAME_CHARS_MAX = 255
GAVE_UP = (JobState.FAILED, JobState.EXPIRED, JobState.CANCELLED, JobState.CANCELLING)


@dataclass(frozen=True, slots=True)
class Errand:
    """Everything that one run was asked for."""

    settings: Settings
    source: input_file.Input
    targets: input_file.Targets
    run_options: input_file.RunOptions
    fresh: bool
    wait: bool
    where: str


async def perform(errand: Errand) -> tuple[summary.Ending, int]:
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
            terminal.say("This run was done before; its results are copied again. --fresh begins again.")
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
            f"Nothing answers at {urls}: {why[0].rstrip('.?')}. Start the model server or fix --upstream; --wait waits for it."
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
    return input_file.job_id(errand.source, errand.settings, errand.run_options, turn)


async def _begin(errand: Errand, working: "Working") -> Job:
    from tidegate.failpoints import hit
    from tidegate.stages.accept import Reception

    parts, source, run_options = working.parts, errand.source, errand.run_options
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
        endpoint=run_options.endpoint,
        input_file_id=file.id,
        window_ms=WINDOW_MS,
        window_text=WINDOW_TEXT,
        metadata={"command": "run", "input": source.name[:NAME_CHARS_MAX]},
        ordered=run_options.ordered,
        prefix_order=run_options.prefix_order,
        invalid_lines=run_options.invalid_lines,
    )
    job = await reception.replayed(lambda: parts.store.create_job(caller, job_id, request))
    await hit("create_committed")
    parts.wakes.inputs.notify()
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
