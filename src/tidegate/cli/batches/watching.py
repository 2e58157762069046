"""`tidegate batches watch`: follows one batch until it ends, by the events of the
server that runs it.

On the machine of the server the batch is read from the store, and events only say when
to look. So a batch can be watched without a server, and while one restarts. With
`--server` everything comes from the events.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress

import msgspec

from tidegate.cli.batches import batch_facts, explain, remote_batches
from tidegate.cli.batches.batch_events import BatchEvent, BatchEvents, LookedAtBatch
from tidegate.cli.terminal import progress, progress_display, server_client, terminal
from tidegate.cli.terminal.signals import Stopping
from tidegate.core.errors import ApiProblem, StoreError, TidegateError
from tidegate.core.nouns import Usage
from tidegate.core.schedule import explain as reasons
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.settings import Settings

# The period of looks at a batch without a server, and the longest time between two
# looks with events.
LOOK_S, LOOK_WITH_EVENTS_S = 0.5, 2.0
# A batch that did not move for this long is explained.
STILL_S = 3.0
AWAY = "the server does not answer"
_ENDS = frozenset(f"batch.{state}" for state in JOB_ENDED)


class _WatchedCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class _WatchedUsage(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0


class _WatchedBatch(msgspec.Struct):
    """The content of an event about the whole batch; a progress event has no status."""

    id: str
    request_counts: _WatchedCounts
    usage: _WatchedUsage
    status: JobState | None = None


_decode = msgspec.json.Decoder(_WatchedBatch).decode


async def watch_here(settings: Settings, org: str | None, batch: str, *, as_json: bool) -> tuple[list[str], int]:
    """Follow a batch in the store of these settings. Return lines about its state, and the
    command's exit code."""
    async with server_client.reading(settings) as parts, _news(settings, org, batch) as news:
        stopping = Stopping().listen()
        display = None if as_json else progress_display.display()
        last, moved_s, why = await batch_facts.job_of(parts, org, batch), time.monotonic(), ""
        is_first, explained_s = True, 0.0
        try:
            while True:
                job = await batch_facts.job_of(parts, org, batch)
                if job != last:
                    moved_s, why = time.monotonic(), ""
                elif (
                    display is not None
                    and time.monotonic() - max(moved_s, explained_s) >= STILL_S
                    and job.state not in JOB_ENDED
                ):
                    why, explained_s = await _why(settings, org, batch), time.monotonic()
                    if why:
                        display.explain(why)
                if display is not None:
                    display.show(progress.snapshot(job, time.monotonic(), why))
                elif job != last or is_first:
                    terminal.show_json_line(batch_facts.facts(job))
                if job.state in JOB_ENDED:
                    break
                last, is_first = job, False
                if await _wait(stopping, news):
                    return [_line(progress.snapshot(job, 0.0), batch)], stopping.exit_code
        finally:
            if display is not None:
                display.close()
    code = batch_facts.exit_code(job)
    causes = reasons.explain(*await explain.explain_inputs_of(settings, org, batch)) if code else []
    return [_line(progress.snapshot(job, 0.0), batch), *causes], code


async def watch_server(server: server_client.RemoteServer, batch: str, *, as_json: bool) -> tuple[list[str], int]:
    """Follow a batch of a server elsewhere. Return lines about its state, and the
    command's exit code."""
    stopping = Stopping().listen()
    watched = _Watched(server, batch, as_json=as_json)
    explaining = asyncio.create_task(watched.explain_stalls())
    try:
        async with aclosing(_until_stopped(_events_of(server, batch), stopping)) as events:
            async for event in events:
                watched.show_event(event)
                # An event before the end may already show a batch that has ended.
                if event.kind in _ENDS:
                    break
    finally:
        explaining.cancel()
        await asyncio.gather(explaining, return_exceptions=True)
        watched.close()
    shown = watched.shown
    if shown.state not in JOB_ENDED:
        return [_line(shown, batch)], stopping.exit_code
    code = int(shown.state is not JobState.COMPLETED or shown.failed_count > 0)
    causes: list[str] = []
    if code:
        # The result stands even if the server does not explain it.
        with suppress(TidegateError):
            causes = (await explain.explained_by(server, batch)).why
    return [_line(shown, batch), *causes], code


async def _events_of(server: server_client.RemoteServer, batch: str) -> AsyncGenerator[BatchEvent, None]:
    """Yield the events of a batch: its owner gets them as they happen, an operator
    polls the batch."""
    is_known = False
    try:
        async with aclosing(BatchEvents(server, batch, None).read()) as events:
            async for event in events:
                if not is_known and not event.kind:
                    # Raises if the server never answered, with what to check; a server that goes
                    # away later is waited for.
                    await server.get(f"{remote_batches.OWN}/{batch}", msgspec.Raw)
                is_known = True
                yield event
        return
    except ApiProblem as refused:
        if refused.code not in (server_client.LACKS_SCOPE, server_client.UNKNOWN_URL):
            raise
    async with aclosing(LookedAtBatch(server, f"{remote_batches.EVERY}/{batch}").read()) as events:
        async for event in events:
            yield event


def _line(shown: progress.ProgressSnapshot, batch: str) -> str:
    return f"{batch} {shown.state}: {shown.done_count:,}/{shown.item_count:,} done, {shown.failures}"


class _Watched:
    """The state of a batch at a server elsewhere, from its events, and the reason for a
    stall when there are none."""

    def __init__(self, server: server_client.RemoteServer, batch: str, *, as_json: bool) -> None:
        self._server = server
        self._batch = batch
        self._display = None if as_json else progress_display.display()
        self._moved_s = time.monotonic()
        self.shown = progress.ProgressSnapshot(self._moved_s, JobState.VALIDATING, 0, 0, 0, Usage())

    def show_event(self, event: BatchEvent) -> None:
        """Show an event; one without a kind means that the server does not answer."""
        if event.kind.startswith("batch."):
            self._moved_s = time.monotonic()
            self.shown = _moved(self.shown, _decode(event.data))
            if self._display is None:
                terminal.show_json_line({"event": event.kind, **msgspec.json.decode(event.data)})
        self._show("" if event.kind else AWAY)

    async def explain_stalls(self) -> None:
        """Ask the server, while nothing moves, why."""
        while self._display is not None:
            await asyncio.sleep(STILL_S)
            if time.monotonic() - self._moved_s < STILL_S or self.shown.state in JOB_ENDED:
                continue
            # The display already shows a server that does not answer, and the watch
            # goes on without an explanation.
            with suppress(TidegateError):
                cause = (await explain.explained_by(self._server, self._batch)).waits_for or ""
                if cause:
                    self._display.explain(cause)
                self._show(cause)

    def close(self) -> None:
        if self._display is not None:
            self._display.close()

    def _show(self, trouble: str) -> None:
        self.shown = msgspec.structs.replace(self.shown, at_s=time.monotonic(), trouble=trouble)
        if self._display is not None:
            self._display.show(self.shown)


def _moved(shown: progress.ProgressSnapshot, batch: _WatchedBatch) -> progress.ProgressSnapshot:
    counts, usage = batch.request_counts, batch.usage
    return msgspec.structs.replace(
        shown,
        state=batch.status or shown.state,
        item_count=counts.total,
        answered_count=counts.completed,
        failed_count=counts.failed,
        usage=Usage(usage.input_tokens, 0, usage.output_tokens),
    )


async def _until_stopped(
    events: AsyncGenerator[BatchEvent, None], stopping: Stopping
) -> AsyncGenerator[BatchEvent, None]:
    """Yield the events until a stop is asked for."""
    asked = asyncio.create_task(stopping.asked.wait())
    async with aclosing(events):
        try:
            while True:
                coming = asyncio.ensure_future(anext(events, None))
                await asyncio.wait((coming, asked), return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    coming.cancel()
                    await asyncio.gather(coming, return_exceptions=True)
                    return
                event = coming.result()
                if event is None:
                    return
                yield event
        finally:
            asked.cancel()


@asynccontextmanager
async def _news(settings: Settings, org: str | None, batch: str) -> AsyncIterator[asyncio.Event | None]:
    """Yield an event that is set whenever a server on this machine reports a change of the batch;
    None if no server runs."""
    server = server_client.running_server(settings)
    if server is None:
        yield None
        return
    news = asyncio.Event()

    async def read() -> None:
        # Changes without an event are found by the regular looks.
        with suppress(TidegateError):
            owner = await remote_batches.owner(server, org, batch)
            async with aclosing(BatchEvents(server, batch, owner).read()) as events:
                async for event in events:
                    if event.kind.startswith("batch."):
                        news.set()

    reading = asyncio.create_task(read())
    try:
        yield news
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _wait(stopping: Stopping, news: asyncio.Event | None) -> bool:
    """Wait for the next look. Return whether a stop was asked for."""
    if news is None:
        return await stopping.wait(LOOK_S)
    waits = [asyncio.create_task(one.wait()) for one in (stopping.asked, news)]
    await asyncio.wait(waits, timeout=LOOK_WITH_EVENTS_S, return_when=asyncio.FIRST_COMPLETED)
    for one in waits:
        one.cancel()
    news.clear()
    return stopping.asked.is_set()


async def _why(settings: Settings, org: str | None, batch: str) -> str:
    """Return why the batch does not move, as `tidegate explain` does; empty while the
    store cannot be read."""
    try:
        return reasons.waits_for(*await explain.explain_inputs_of(settings, org, batch))
    except StoreError:
        return ""
