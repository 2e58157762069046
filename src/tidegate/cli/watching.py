"""`tidegate batches watch`: follow one batch until it ends, by the events of the server that runs it.

On the machine of the server the batch itself is read from the store, and events only say when to look; so a batch can be watched without
a server, and while one restarts. With `--server` everything comes from the events.
"""

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress

import msgspec

from tidegate.cli import batches, explain, progress, server_client, terminal
from tidegate.cli.batch_events import BatchEvent, BatchEvents
from tidegate.cli.signals import Stopping
from tidegate.core.errors import StoreError, TidegateError
from tidegate.core.nouns import Job, Usage
from tidegate.core.schedule import explain as reasons
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.settings import Settings

# How often a batch is looked at where no server tells of it, and at the least where one does.
LOOK_S, LOOK_WITH_EVENTS_S = 0.5, 2.0
# What did not move for so long is explained.
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
    """What an event about the whole batch says; one about progress has no status."""

    id: str
    request_counts: _WatchedCounts
    usage: _WatchedUsage
    status: JobState | None = None


_decode = msgspec.json.Decoder(_WatchedBatch).decode


async def watch_here(settings: Settings, org: str | None, batch: str, *, as_json: bool) -> tuple[Job, int]:
    """Follow a batch in the store of these settings; returns it with the command's exit code."""
    async with server_client.reading(settings) as parts, _news(settings, org, batch) as news:
        stopping = Stopping().listen()
        display = None if as_json else progress.display()
        last, moved_s, why = await batches.job_of(parts, org, batch), time.monotonic(), ""
        is_first = True
        try:
            while True:
                job = await batches.job_of(parts, org, batch)
                if job != last:
                    moved_s, why = time.monotonic(), ""
                elif display is not None and time.monotonic() - moved_s >= STILL_S and job.state not in JOB_ENDED:
                    why = await _why(settings, org, batch)
                if display is not None:
                    display.show(progress.snapshot(job, time.monotonic(), why))
                elif job != last or is_first:
                    terminal.show_json_line(batches.facts(job))
                if job.state in JOB_ENDED:
                    return job, batches.exit_code(job)
                last, is_first = job, False
                if await _wait(stopping, news):
                    return job, stopping.exit_code
        finally:
            if display is not None:
                display.close()


async def watch_server(server: server_client.RemoteServer, batch: str, *, as_json: bool) -> tuple[str, int]:
    """Follow a batch of a server elsewhere; returns how it stands in words, with the command's exit code."""
    stopping = Stopping().listen()
    display = None if as_json else progress.display()
    shown = progress.ProgressSnapshot(time.monotonic(), JobState.VALIDATING, 0, 0, 0, Usage())
    try:
        async with aclosing(_until_stopped(BatchEvents(server, batch, None).read(), stopping)) as events:
            async for event in events:
                if event.kind.startswith("batch."):
                    shown = _moved(shown, _decode(event.data))
                    if as_json:
                        terminal.show_json_line({"event": event.kind, **msgspec.json.decode(event.data)})
                trouble = "" if event.kind else AWAY
                shown = dataclasses.replace(shown, at_s=time.monotonic(), trouble=trouble)
                if display is not None:
                    display.show(shown)
                # An event before the end may already show a batch that has ended.
                if event.kind in _ENDS:
                    break
    finally:
        if display is not None:
            display.close()
    line = f"{batch} {shown.state}: {shown.done_count:,}/{shown.item_count:,} done, {shown.failed_count:,} failed"
    if shown.state not in JOB_ENDED:
        return line, stopping.exit_code
    return line, int(shown.state is not JobState.COMPLETED or shown.failed_count > 0)


def _moved(shown: progress.ProgressSnapshot, batch: _WatchedBatch) -> progress.ProgressSnapshot:
    counts, usage = batch.request_counts, batch.usage
    return dataclasses.replace(
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
    """The same events, until a stop is asked for."""
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
    """Set whenever a server on this machine tells of the batch; None where no server runs."""
    server = server_client.running_server(settings)
    if server is None:
        yield None
        return
    news = asyncio.Event()

    async def read() -> None:
        # Changes that no event brings are found by looking.
        with suppress(TidegateError):
            async with aclosing(BatchEvents(server, batch, org).read()) as events:
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
    """Wait for the next look; says whether a stop was asked for."""
    if news is None:
        return await stopping.wait(LOOK_S)
    waits = [asyncio.create_task(one.wait()) for one in (stopping.asked, news)]
    await asyncio.wait(waits, timeout=LOOK_WITH_EVENTS_S, return_when=asyncio.FIRST_COMPLETED)
    for one in waits:
        one.cancel()
    news.clear()
    return stopping.asked.is_set()


async def _why(settings: Settings, org: str | None, batch: str) -> str:
    """The first sentence of `tidegate explain`; empty while the store cannot be read."""
    try:
        sentences = reasons.explain(*await explain.explain_inputs_of(settings, org, batch))
    except StoreError:
        return ""
    return sentences[0] if sentences else ""
