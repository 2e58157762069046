"""`tidegate simulate`: the simulated model server, to try everything against without a GPU."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import uvloop

from tidegate.cli.terminal import options
from tidegate.core.errors import SettingsError
from tidegate.settings import secrets
from tidegate.settings.renewal import Renewal
from tidegate.settings.rules import redacted

if TYPE_CHECKING:
    from tidegate.simulate.engine import EngineOptions


class Speed(StrEnum):
    INSTANT = "instant"
    FIXED = "fixed"
    MODELLED = "modelled"


def simulate(
    host: Annotated[str, typer.Option("--host", metavar="H", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="P", min=0, max=65_535, help="Port; 0 takes a free one.")
    ] = 8000,
    mode: Annotated[
        Speed, typer.Option("--mode", help="At once, after --latency-ms, or in the time that an H200 would take.")
    ] = Speed.INSTANT,
    latency_ms: Annotated[
        float,
        typer.Option(
            "--latency-ms", metavar="N", min=0, max=3_600_000, help="How long an answer takes; means --mode fixed."
        ),
    ] = 0.0,
    calls_log: Annotated[
        Path | None, typer.Option("--calls-log", metavar="FILE", help="Write a JSON line for every call that comes in.")
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            "--fault",
            metavar="KIND=RATE",
            help="Share of calls that go wrong: 429=0.05, 503:ra=1=0.1, hang=0.01, reset=0.01…",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", metavar="N", help="Sequences that run at once (modelled).")
    ] = 256,
    processes: Annotated[int, typer.Option("--processes", metavar="N", help="Processes that share the port.")] = 1,
    api_key: Annotated[
        str | None, typer.Option("--require-key", metavar="KEY", help="Refuse calls without this key.")
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option(
            "--queue", metavar="URL", help="Also take from queues in this Redis (URL, env:NAME or file:PATH)."
        ),
    ] = None,
    pool: Annotated[
        list[str] | None, typer.Option("--pool", metavar="NAME", help="A pool whose queue is served; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Makes faults and answers repeatable.")] = 0,
    data: options.Data = None,
    config: options.Config = None,
) -> None:
    """Serve a simulated model: any model name, no GPU.

    Example: tidegate simulate --port 8000 --mode fixed --latency-ms 200
    """
    from tidegate.simulate.engine import EngineOptions, serve
    from tidegate.simulate.engine.faults import rate_from_option

    try:
        chosen = EngineOptions(
            host=host,
            port=port,
            mode="fixed" if latency_ms and mode is Speed.INSTANT else mode.value,
            latency_ms=latency_ms,
            calls_log=str(calls_log) if calls_log is not None else None,
            faults=dict(rate_from_option(text) for text in fault or []),
            max_num_seqs=max_num_seqs,
            processes=processes,
            api_key=api_key,
            seed=seed,
        )
        uvloop.run(serve(chosen) if queue is None and not pool else _serve_queue(chosen, queue, pool))
    except (ValueError, OSError, RuntimeError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise SettingsError(f"{why}; see `tidegate simulate --help`.") from error


async def _serve_queue(options: "EngineOptions", redis_url: str | None, pools: list[str] | None) -> None:
    """Serve the engine, and run the processor that takes calls from the queues and
    sends them to the engine."""
    if redis_url is None or not pools:
        raise ValueError("--queue and --pool go together: name the Redis and at least one pool")
    if not options.port:
        raise ValueError(
            "--queue needs a --port of its own: the processor that takes from the queue must know where to call"
        )
    import asyncio

    from tidegate.simulate.engine import serve
    from tidegate.simulate.processor import Processor, ProcessorOptions

    if not secrets.is_reference(redis_url) and redacted(redis_url) != redis_url:
        raise ValueError(
            "--queue has a password in it, and the list of processes shows it to every user of this machine: "
            "put the URL into a variable or a file, and write env:NAME or file:PATH"
        )
    location = Renewal().secret(redis_url).reveal()
    address = f"http://{options.host}:{options.port}"
    processor = asyncio.create_task(Processor(ProcessorOptions(location, pools, address)).run())
    try:
        await serve(options)
    finally:
        # Redis's client may mistake a cancellation for a time-out and go on.
        while not processor.done():
            processor.cancel()
            await asyncio.wait({processor}, timeout=1.0)
