"""One batch of a `tidegate run`: begun or found again, watched to its end, its results put where they belong."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tidegate.cli import failures, input_file, progress, results, run_again, run_check, server_client, summary, terminal
from tidegate.cli.signals import Stopping
from tidegate.core.errors import SettingsError, StoreUnavailable
from tidegate.core.job_controls import FollowUp, JobControls
from tidegate.core.job_shape import PLAIN, JobShape
from tidegate.core.nouns import Caller, Job, JobRequest
from tidegate.core.states import JOB_ENDED
from tidegate.settings import Settings

if TYPE_CHECKING:
    from tidegate.service import Parts, Working
    from tidegate.stages.accept import Reception

LOOK_EVERY_S = 0.2
# A run has no deadline of its own: a caller who comes back after a holiday finds the work where it was.
WINDOW_TEXT, WINDOW_MS = "365d", 365 * 86_400_000
NAME_CHARS_MAX = 255
# Results of a small run are in the order of its input without being asked for.
KEPT_IN_ORDER_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Begin:
    """How a run begins: from the beginning, with the lines that failed, once its server is there, after a look at the server."""

    fresh: bool
    retry_failed: bool
    wait: bool
    is_checked: bool


@dataclass(frozen=True, slots=True)
class Errand:
    """Everything that one run was asked for."""

    settings: Settings
    source: input_file.Input
    targets: input_file.Targets
    run_options: input_file.RunOptions
    begin: Begin
    where: str


async def perform(errand: Errand) -> tuple[summary.Ending, int]:
    from tidegate import service

    asked = errand.begin
    async with service.working(errand.settings) as working:
        began_s = time.monotonic()
        chain = await _known_chain(errand, working)
        again = bool(chain) and run_again.is_wanted(chain, errand.run_options, retry_failed=asked.retry_failed)
        is_done = bool(chain) and chain[-1].state in JOB_ENDED and not again
        if not is_done and asked.is_checked and not asked.wait:
            await run_check.check_upstream(errand.settings, errand.source, errand.run_options.model)
        found = run_again.whole(chain) if chain else None
        found_done_count = 0 if found is None else found.answered_count if again else found.done_count
        if found is None:
            chain.append(await _begin(errand, working))
        elif again:
            left = terminal.in_words(found.item_count - found.answered_count, "line")
            kept = terminal.in_words(found.answered_count, "answer")
            terminal.say(f"Running the {left} without an answer; {kept} kept from before.")
            chain.append(await _retry(errand, chain, working))
        elif is_done:
            terminal.say(run_again.found_ended(chain))
        elif found_done_count:
            count = terminal.in_words(found.item_count, "item")
            terminal.say(f"Going on: {found_done_count:,} of {count} were done before.")
        stopping = Stopping(lambda: _say_stopping(working, errand.settings)).listen()
        if chain[-1].state not in JOB_ENDED:
            chain[-1] = await _watch(chain[-1], working, stopping)
        if len(chain) > 1 and run_again.ran_nothing(chain[-1]):
            refused = chain.pop()
            terminal.say(refused.errors[0].message if refused.errors else f"{refused.id} ended before it ran anything.")
        took_s = time.monotonic() - began_s
        ending = summary.Ending(run_again.whole(chain), errand.targets, took_s, found_done_count, errand.where)
        if chain[-1].state in JOB_ENDED:
            if ending.exit_code != summary.UNUSABLE:
                ending = await _deliver(errand, ending, chain, working.parts)
            return ending, ending.exit_code
    # The worker has finished what was in flight by now, so this look is the one to tell.
    async with server_client.reading(errand.settings) as parts:
        chain[-1] = await parts.store.get_job(parts.tenant_id, chain[-1].id) or chain[-1]
    job = run_again.whole(chain)
    _say_how_to_go_on(job)
    return replace(ending, job=job), stopping.exit_code


async def _known_chain(errand: Errand, working: "Working") -> list[Job]:
    """The batch that this very run began before, and its retries. One that ended early and has no answers to keep does not
    count: it is begun again."""
    last: Job | None = None
    async for job in _turns(errand, working):
        last = job
    if last is None or errand.begin.fresh:
        return []
    chain = await run_again.chain_from(last, working.parts)
    return chain if run_again.goes_on(chain, retry_failed=errand.begin.retry_failed) else []


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

    parts = working.parts
    job_id = _id(errand, len([job async for job in _turns(errand, working)]))
    reception = Reception(parts.store, parts.blobs, parts.clock, parts.entropy, lambda: working.incarnation.id)
    request = await send_in(errand, parts, reception)
    job = await reception.replayed(lambda: parts.store.create_job(Caller(parts.tenant_id), job_id, request))
    await hit("create_committed")
    parts.wakes.inputs.notify()
    return job


async def _retry(errand: Errand, chain: Sequence[Job], working: "Working") -> Job:
    """Begin a batch of the lines that have no answer yet."""
    from tidegate.failpoints import hit
    from tidegate.stages.accept import Reception

    parts = working.parts
    reception = Reception(parts.store, parts.blobs, parts.clock, parts.entropy, lambda: working.incarnation.id)
    asked = _controls(errand, chain[-1].item_count - chain[-1].answered_count)
    wanted = FollowUp(
        of=chain[-1].id,
        choice=run_again.NO_ANSWER,
        job_id=reception.new_id("batch"),
        retry_file_id=reception.new_id("file"),
        merged_file_id=reception.new_id("file"),
        # A run has no webhook that would be signed with it.
        webhook_secret=b"",
        controls=run_again.controls(chain, asked, retry_failed=errand.begin.retry_failed),
        canary=errand.run_options.canary,
    )
    job = await reception.replayed(lambda: parts.store.retry_job(Caller(parts.tenant_id), wanted))
    if job is None:
        raise SettingsError(f"{chain[-1].id} was deleted meanwhile; run the same command again.")
    await hit("create_committed")
    parts.wakes.inputs.notify()
    return job


async def send_in(errand: Errand, parts: "Parts", reception: "Reception") -> JobRequest:
    """Keep the input as a file, and return the batch that is asked for."""
    source, run_options = errand.source, errand.run_options
    upload = await reception.begin_upload(errand.settings.limits.file_bytes_max)
    try:
        with source.path.open("rb") as stream:
            while chunk := stream.read(input_file.PIECE_BYTES):
                await upload.write(chunk)
        file = await upload.keep(
            Caller(parts.tenant_id),
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
    return JobRequest(
        endpoint=run_options.endpoint,
        input_file_id=file.id,
        window_ms=WINDOW_MS,
        window_text=WINDOW_TEXT,
        metadata={"command": "run", "input": source.name[:NAME_CHARS_MAX]},
        ordered=run_options.ordered,
        prefix_order=run_options.prefix_order,
        invalid_lines=run_options.invalid_lines,
        controls=_controls(errand, source.line_count),
        canary=run_options.canary,
        answers=run_options.answers,
        shape=JobShape(overrides={"model": run_options.model}) if run_options.model else PLAIN,
    )


def _controls(errand: Errand, line_count: int) -> JobControls:
    """The thresholds that were asked for; without any, a run all of whose first answers are failures is stopped."""
    asked = errand.run_options.controls
    if asked.max_errors is not None or not errand.begin.is_checked or errand.run_options.invalid_lines != "fail":
        return asked
    if line_count <= run_again.ALL_FAILED.after:
        return asked
    return replace(asked, max_errors=run_again.ALL_FAILED)


async def _watch(job: Job, working: "Working", stopping: Stopping) -> Job:
    """Show the batch until it ends or a stop is asked for."""
    parts = working.parts
    display = progress.display()
    away = ""
    try:
        while True:
            now_away, trouble = _trouble(working)
            if now_away != away:
                _say_where_it_is(away, now_away, trouble)
                away = now_away
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


def _trouble(working: "Working") -> tuple[str, str]:
    """The model server that is away, if one is, and why nothing moves, in words; empty while all is well."""
    for status in working.router.status():
        if status.state != "closed" and status.last_failure:
            return status.url, f"{status.url}: {status.last_failure}"
    return "", working.worker.trouble() or ""


def _say_where_it_is(was_away: str, is_away: str, trouble: str) -> None:
    """One sentence when a model server goes away, and one when it is back."""
    if is_away:
        terminal.say(f"The model server went away ({trouble}). The run goes on when it is back.")
    else:
        terminal.say(f"The model server is back: {was_away}")


async def _deliver(errand: Errand, ending: summary.Ending, chain: Sequence[Job], parts: "Parts") -> summary.Ending:
    """Put answers and failed lines where they were wanted; an error file from an earlier run must not outlive its errors."""
    job, targets = await run_again.with_merged(ending.job, parts), ending.targets
    order: dict[str, int] | None = None
    if not job.ordered and (errand.run_options.ordered or job.output_bytes + job.error_bytes <= KEPT_IN_ORDER_BYTES):
        order = input_file.order_of(errand.source.path)

    def placed(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        return chunks if order is None else results.in_order(chunks, order)

    causes = await failures.causes(_error_lines(chain, parts))
    if targets.errors is not None and causes:
        await results.save(placed(_error_lines(chain, parts)), targets.errors)
    elif targets.errors is not None:
        results.remove(targets.errors)
    answers = placed(results.content(parts, job.output_file_id, job.output_bytes))
    if targets.results is not None:
        if (kept := results.set_aside(targets.results, [one.id for one in chain])) is not None:
            terminal.say(f"{targets.results} held other results than this run's; they are now in {kept}.")
        await results.save(answers, targets.results)
    else:
        await results.pour(answers)
    is_futile = job.stopped_by == "max_errors" and job.controls.max_errors == run_again.ALL_FAILED
    return replace(ending, causes=tuple(causes), is_futile=is_futile)


async def _error_lines(chain: Sequence[Job], parts: "Parts") -> AsyncIterator[bytes]:
    """The failed lines of the last batch, behind those of the first that no retry runs."""
    first, last = chain[0], chain[-1]
    if len(chain) > 1:
        async for line in run_again.never_retried(results.content(parts, first.error_file_id, first.error_bytes)):
            yield line
    async for chunk in results.content(parts, last.error_file_id, last.error_bytes):
        yield chunk


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
