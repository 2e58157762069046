"""Runs one input of a `tidegate run`: begins or finds its batch, watches it to its end, and puts
the results where they belong."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.structs import replace

from tidegate.cli.run import run_again, run_changed, run_check
from tidegate.cli.terminal import (
    failures,
    input_file,
    progress,
    progress_display,
    results,
    server_client,
    summary,
    terminal,
)
from tidegate.cli.terminal.loading import settle_memory
from tidegate.cli.terminal.signals import Stopping
from tidegate.core.errors import ApiProblem, SettingsError, StoreUnavailable
from tidegate.core.follow_up import FollowUp
from tidegate.core.job_controls import JobControls, RetryChoice
from tidegate.core.job_shape import AS_WRITTEN, JobShape
from tidegate.core.nouns import Caller, Job, JobRequest
from tidegate.core.states import JOB_ENDED
from tidegate.core.wording import in_words
from tidegate.settings import Settings

if TYPE_CHECKING:
    from tidegate.service import Working
    from tidegate.stages.accept import Reception
    from tidegate.storage import Parts
    from tidegate.upstream.calls.router import Router

T = TypeVar("T")

# A short run is looked at more often, so that its end shows at once.
LOOK_EVERY_S_MIN, LOOK_EVERY_S = 0.01, 0.2
LOOK_SHARE = 0.1
# A run has practically no deadline: a caller who comes back after a holiday can go on.
WINDOW_TEXT, WINDOW_MS = "365d", 365 * 86_400_000
NAME_CHARS_MAX = 255
# Results up to this size are always in the order of the input.
KEPT_IN_ORDER_BYTES = 32 << 20


class Begin(msgspec.Struct, frozen=True):
    """The way a run begins: from the start, with failed lines again, waiting for its server, after
    a check of the server.
    """

    fresh: bool
    retry_failed: bool
    wait: bool
    is_checked: bool


class Errand(msgspec.Struct, frozen=True):
    """All that one run was asked for. Runs of the same file, edited or not, are one series; an
    input without a name has none."""

    settings: Settings
    source: input_file.Input
    targets: input_file.Targets
    run_options: input_file.RunOptions
    begin: Begin
    where: str
    series: str


async def perform(errand: Errand) -> tuple[summary.Ending, int]:
    from tidegate import service

    names = [_id(errand, 0), *([errand.series] if errand.series else [])]
    async with service.working(errand.settings, names) as working:
        settle_memory()
        version = None if errand.begin.fresh else errand.source.sha256
        # Before the worker begins, so that nothing of an older version of the file is sent.
        outdated = await run_changed.end_outdated(working.parts, errand.series, version)
        async with working.running():
            began_s = time.monotonic()
            stopping = Stopping().listen()
            chain, found_done_count = await _run(errand, outdated, working, stopping)
            took_s = time.monotonic() - began_s
            ending = _ending(errand, chain, took_s, found_done_count)
            if chain[-1].state in JOB_ENDED and not stopping.asked.is_set():
                if ending.exit_code != summary.UNUSABLE:
                    ending = await _deliver(errand, ending, chain[0], working.parts)
                return ending, ending.exit_code
    # The worker has finished what was in flight by now, so this state is reported.
    async with server_client.reading(errand.settings) as parts:
        chain[-1] = await parts.store.get_job(parts.tenant_id, chain[-1].id) or chain[-1]
    job = run_again.whole(chain)
    _say_how_to_go_on(job)
    return replace(ending, job=job), stopping.exit_code


def _ending(errand: Errand, chain: Sequence[Job], took_s: float, found_done_count: int) -> summary.Ending:
    job, unit = run_again.whole(chain), errand.source.places.unit
    has_bound = errand.run_options.controls.max_cost_nano is not None
    return summary.Ending(
        job, errand.targets, took_s, found_done_count, errand.where, unit=unit, has_cost_bound=has_bound
    )


async def _run(
    errand: Errand, outdated: Sequence[Job], working: "Working", stopping: Stopping
) -> tuple[list[Job], int]:
    """Begin or continue this run, until it ends or a stop is asked for. Return its batches, and how
    many items were done before."""
    for job in outdated:
        job = await _watch(job, working, stopping)
        if stopping.asked.is_set():
            return [job], 0
    history = await _known_history(errand, working, stopping)
    again = [] if history is None else _retries(errand, history)
    await _check_and_say(errand, working.router, history, again)
    if history is None:
        job = await _watch(await _begin(errand, working), working, stopping)
        return [job], job.copied.reused
    chain = list(history.jobs)
    found = run_again.whole(chain)
    found_done_count = found.answered_count if again else found.done_count
    if chain[-1].state not in JOB_ENDED:
        chain[-1] = await _watch(chain[-1], working, stopping)
    for job, choice in again:
        if stopping.asked.is_set():
            break
        if (retry := await _retry(errand, chain, (job, choice), working)) is not None:
            chain.append(await _watch(retry, working, stopping))
        if run_again.ran_nothing(chain[-1]):
            refused = chain.pop()
            why = refused.errors[0].message if refused.errors else f"{refused.id} ended before it ran anything."
            terminal.say(why)
    return chain, found_done_count


def _retries(errand: Errand, history: run_again.History) -> list[tuple[Job, RetryChoice]]:
    return run_again.retries(history, errand.run_options, retry_failed=errand.begin.retry_failed)


async def _check_and_say(
    errand: Errand, router: "Router", history: run_again.History | None, again: Sequence[tuple[Job, RetryChoice]]
) -> None:
    """Check the model server if anything is to be sent, and print what an earlier run left."""
    is_done = history is not None and history.is_ended and not again
    if not is_done and errand.begin.is_checked and not errand.begin.wait:
        await run_check.check_upstream(errand.settings, router, errand.source, errand.run_options)
    if history is None:
        return
    found = run_again.whole(history.jobs)
    if again:
        kept = in_words(found.answered_count, "answer")
        terminal.say(f"Running lines without an answer again; {kept} kept from before.")
    elif is_done:
        terminal.say(run_again.found_ended(history.jobs))
    elif found.done_count:
        count = in_words(found.item_count, "item")
        terminal.say(f"Going on: {found.done_count:,} of {count} were done before.")


async def _known_history(errand: Errand, working: "Working", stopping: Stopping) -> run_again.History | None:
    """Return the history of this same run, after waiting for a batch of it that is about to end."""
    history = await find_history(errand, working.parts)
    if history is None or history.is_ended or not run_again.is_closing(history.last):
        return history
    # For example a cancelled batch: its other lines can run again after it has ended.
    await _watch(history.last, working, stopping)
    return await find_history(errand, working.parts)


async def find_history(errand: Errand, parts: "Parts") -> run_again.History | None:
    """Return the history of this same run. It is None if there is none, if the run begins from the
    start, or if its batch ended before it ran anything."""
    first: Job | None = None
    async for job in _turns(errand, parts):
        first = job
    if first is None or errand.begin.fresh or (run_again.is_closing(first) and not first.item_count):
        return None
    return await run_again.history_from(first.id, parts)


async def _turns(errand: Errand, parts: "Parts") -> AsyncIterator[Job]:
    """Yield every batch that this run began so far, oldest first."""
    turn = 0
    while (job := await parts.store.get_job(parts.tenant_id, _id(errand, turn))) is not None:
        yield job
        turn += 1


def _id(errand: Errand, turn: int) -> str:
    return input_file.job_id(errand.source, errand.settings, errand.run_options, turn)


async def _begin(errand: Errand, working: "Working") -> Job:
    from tidegate.failpoints import hit
    from tidegate.stages.accept import Reception

    parts = working.parts
    job_id = _id(errand, len([job async for job in _turns(errand, parts)]))
    reception = Reception(parts.store, parts.blobs, parts.clock, parts.entropy, lambda: working.incarnation.id)

    async def create(request: JobRequest) -> Job:
        caller = Caller(parts.tenant_id)
        return await reception.replayed(
            lambda: parts.store.create_job(caller, job_id, request, share_owner=working.share_owner)
        )

    job = await with_earlier_answers(errand, parts, await send_in(errand, parts, reception), create)
    await hit("create_committed")
    parts.wakes.inputs.notify()
    return job


async def with_earlier_answers(
    errand: Errand, parts: "Parts", request: JobRequest, act: Callable[[JobRequest], Awaitable[T]]
) -> T:
    """Create or check a batch that reuses the answers of earlier versions of its file; if they
    cannot be reused, one without them."""
    earlier = None if errand.begin.fresh else await run_changed.find_answered(parts, errand.series)
    if earlier is None:
        return await act(request)
    terminal.say(
        f"{errand.source.name} changed since the last run: lines that were answered then are kept, the others run. "
        "--fresh runs them all."
    )
    try:
        return await act(replace(request, shape=msgspec.structs.replace(request.shape, reuse_from=earlier.id)))
    except ApiProblem as problem:
        if problem.param != "reuse_from":
            raise
        terminal.say(f"Every line runs: {problem}")
        return await act(request)


async def _retry(
    errand: Errand, chain: Sequence[Job], chosen: tuple[Job, RetryChoice], working: "Working"
) -> Job | None:
    """Begin a batch of chosen lines of an earlier one. Return None if that cannot be
    done any more."""
    from tidegate.failpoints import hit
    from tidegate.stages.accept import Reception

    parts, (first, choice) = working.parts, chosen
    reception = Reception(parts.store, parts.blobs, parts.clock, parts.entropy, lambda: working.incarnation.id)
    asked = _controls(errand, first.item_count - first.answered_count)
    wanted = FollowUp(
        of=first.id,
        choice=choice,
        job_id=reception.new_id("batch"),
        retry_file_id=reception.new_id("file"),
        merged_file_id=reception.new_id("file"),
        # A run has no webhook that would be signed with it.
        webhook_secret=b"",
        controls=run_again.controls(chain, asked, retry_failed=errand.begin.retry_failed),
        canary=errand.run_options.canary,
        retry=errand.run_options.retry,
        answers=errand.run_options.answers,
    )
    try:
        caller, share_owner = Caller(parts.tenant_id), working.share_owner
        job = await reception.replayed(lambda: parts.store.retry_job(caller, wanted, share_owner=share_owner))
    except ApiProblem as problem:
        terminal.say(f"{problem} --fresh runs the whole file again.")
        return None
    if job is None:
        raise SettingsError(f"{first.id} was deleted meanwhile; run the same command again.")
    await hit("create_committed")
    parts.wakes.inputs.notify()
    return job


async def send_in(errand: Errand, parts: "Parts", reception: "Reception") -> JobRequest:
    """Store the input as a file, and return the request for its batch."""
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
        metadata={"command": "run", "input": source.name[:NAME_CHARS_MAX], **_series(errand)},
        ordered=run_options.ordered,
        prefix_order=run_options.prefix_order,
        invalid_lines=run_options.invalid_lines,
        controls=_controls(errand, source.line_count),
        canary=run_options.canary,
        answers=run_options.answers,
        shape=JobShape(
            defaults=run_options.defaults,
            overrides=run_options.overrides | ({"model": run_options.model} if run_options.model else {}),
            retry=run_options.retry,
            dedupe=run_options.dedupe,
            places=None if source.places == AS_WRITTEN else source.places,
        ),
    )


def _series(errand: Errand) -> dict[str, str]:
    return {run_changed.SERIES: errand.series} if errand.series else {}


def _controls(errand: Errand, line_count: int) -> JobControls:
    """Return the thresholds that were asked for; by default, a run stops if all its
    first results are failures."""
    asked = errand.run_options.controls
    if asked.max_errors is not None or not errand.begin.is_checked:
        return asked
    if line_count <= run_again.ALL_FAILED.after:
        return asked
    return replace(asked, max_errors=run_again.ALL_FAILED)


async def _watch(job: Job, working: "Working", stopping: Stopping) -> Job:
    """Show the batch until it ends or a stop is asked for."""
    parts = working.parts
    display = progress_display.display()
    began_s = time.monotonic()
    away = ""
    try:
        while True:
            now_away, trouble = _trouble(working)
            if now_away != away:
                display.say(_where_it_is(working, away, now_away, trouble))
                away = now_away
            try:
                job = await parts.store.get_job(parts.tenant_id, job.id) or job
            except StoreUnavailable as error:
                trouble = str(error)
            if job.state in JOB_ENDED:
                return job
            now_s = time.monotonic()
            display.show(progress.snapshot(job, now_s, trouble))
            if await stopping.wait(min(LOOK_EVERY_S, max(LOOK_EVERY_S_MIN, LOOK_SHARE * (now_s - began_s)))):
                return job
    finally:
        # What is printed while the bar is drawn would stay behind it.
        display.close()
        if stopping.asked.is_set():
            _say_stopping(working)


def _trouble(working: "Working") -> tuple[str, str]:
    """Return the address of a model server that does not answer, and why nothing moves;
    both may be empty.

    A server that refuses calls for now does answer."""
    troubled = [status for status in working.router.status() if status.state != "closed" and status.last_failure]
    away = [status for status in troubled if status.open_for_ms is not None]
    if not troubled:
        return "", working.worker.trouble() or ""
    status = away[0] if away else troubled[0]
    # The cause comes first: a narrow terminal cuts off the address.
    return status.url if away else "", f"{status.last_failure} ({status.url})"


def _where_it_is(working: "Working", was_away: str, is_away: str, trouble: str) -> str:
    """Return a sentence about a model server that went away or came back. For a rejected key, say
    to stop: waiting does not help."""
    if any(status.is_key_rejected and status.url == is_away for status in working.router.status()):
        return (
            f"The model server refuses our key: {trouble}. Stop this run, name the right key with --api-key env:NAME or in the "
            "configuration, and run the command again: it goes on."
        )
    if is_away:
        return f"The model server went away: {trouble}. The run goes on when it is back."
    return f"The model server is back: {was_away}"


async def _deliver(errand: Errand, ending: summary.Ending, first: Job, parts: "Parts") -> summary.Ending:
    """Put answers and failed lines where they belong. Remove an error file of an
    earlier run if no line failed."""
    job, targets = ending.job, ending.targets
    history = await run_again.history_from(first.id, parts)
    order: dict[str, int] | None = None
    if not job.ordered and (errand.run_options.ordered or job.output_bytes + job.error_bytes <= KEPT_IN_ORDER_BYTES):
        order = input_file.order_of(errand.source.path)

    def placed(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        return chunks if order is None else results.in_order(chunks, order)

    job_ids = tuple(one.id for one in history.jobs)
    for path in (targets.results, targets.errors):
        if path is not None:
            results.set_aside(path, job_ids)
    causes = await failures.causes(history.error_lines(parts))
    if targets.errors is not None and causes:
        await results.save(placed(history.error_lines(parts)), targets.errors)
    elif targets.errors is not None:
        results.remove(targets.errors)
    answers = placed(_answers(history.jobs, parts))
    if targets.results is not None:
        await results.save(answers, targets.results)
    else:
        await results.pour(answers)
    is_futile = job.stopped_by == "max_errors" and job.controls.max_errors == run_again.ALL_FAILED
    return replace(ending, causes=tuple(causes), is_futile=is_futile, job_ids=job_ids)


async def _answers(jobs: Sequence[Job], parts: "Parts") -> AsyncIterator[bytes]:
    for job in jobs:
        async for chunk in results.content(parts, job.output_file_id, job.output_bytes):
            yield chunk


def _say_stopping(working: "Working") -> None:
    count = working.worker.in_flight
    if count:
        terminal.say(
            f"Stopping: {in_words(count, 'call')} in flight may take up to "
            f"{terminal.duration(working.parts.settings.worker.grace_ms / 1000)}; press Ctrl-C again to stop at once."
        )


def _say_how_to_go_on(job: Job) -> None:
    done = f"{job.done_count:,} of {in_words(job.item_count, 'item')} done" if job.item_count else "nothing sent yet"
    terminal.say(f"Stopped: {done}. Nothing is lost; run the same command again to go on.")
