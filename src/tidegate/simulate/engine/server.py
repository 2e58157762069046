"""The server of the simulated engine: one process in the caller's loop, or several behind a port.

Several processes bind the same port with SO_REUSEPORT, and share the board and the calls log. Each
has the read end of a pipe that closes when the parent ends, in whatever way, and then ends too.
"""

import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec

from tidegate.simulate.engine.board import Board
from tidegate.simulate.engine.handler import EngineHandler
from tidegate.simulate.engine.http1 import SimulatedConnection
from tidegate.simulate.engine.options import EngineOptions

BACKLOG = 4096
CHILD_START_S = 30.0
CHILD_STOP_S = 5.0


class ChildPart(msgspec.Struct):
    """The part of a child process, from its stdin: options, number, and the board's descriptor."""

    options: EngineOptions
    index: int
    board: int


async def serve(options: EngineOptions, *, handle_signals: bool = True) -> None:
    """Serve until cancelled or, with `handle_signals`, until SIGTERM or SIGINT.

    Print the address at the start.
    """
    stop = asyncio.Event()
    if handle_signals:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
    async with running(options) as engine:
        sys.stdout.write(f"simulated engine listening on {engine.url}\n")
        sys.stdout.flush()
        await _until(stop, engine.failure)


async def _until(stop: asyncio.Event, failure: "asyncio.Future[None]") -> None:
    """Wait for the stop or the failure, and raise a failure."""
    failure.add_done_callback(lambda _: stop.set())
    await stop.wait()
    if failure.done():
        failure.result()


class RunningEngine:
    """An engine that listens at `url`; `failure` gets the reason if it cannot go on."""

    def __init__(self, url: str, failure: "asyncio.Future[None]") -> None:
        self.url = url
        self.failure = failure


@asynccontextmanager
async def running(options: EngineOptions) -> AsyncIterator[RunningEngine]:
    """Run an engine for the length of a block."""
    shared = options.processes > 1
    if shared and options.port:
        # Any process may share a shared port, so a second engine would take half of the calls.
        _bound(options.host, options.port, shared=False).close()
    with _bound(options.host, options.port, shared=shared) as placeholder:
        host, port = placeholder.getsockname()[:2]
        # Children bind the same address again. Until then this socket keeps the chosen port for
        # them.
        options = msgspec.structs.replace(options, port=port)
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{port}/v1"
        # The file has no name, so an engine that is killed leaves no file behind.
        with tempfile.TemporaryFile() as board:
            if options.processes == 1:
                async with _process(options, 0, board.fileno(), placeholder) as failure:
                    yield RunningEngine(url, failure)
            else:
                async with _children(options, board.fileno()) as failure:
                    yield RunningEngine(url, failure)


@asynccontextmanager
async def _process(
    options: EngineOptions, index: int, board_fd: int, bound: socket.socket
) -> AsyncIterator["asyncio.Future[None]"]:
    """Run one process's share of an engine in this event loop."""
    loop = asyncio.get_running_loop()
    board = Board(board_fd, options.processes, index)
    handler = EngineHandler(options, board, index)
    pacing = loop.create_task(handler.pace.run()) if handler.pace is not None else None
    if pacing is not None:
        pacing.add_done_callback(
            lambda task: (
                None if task.cancelled() else handler.fail(task.exception() or RuntimeError("the clock stopped"))
            )
        )
    server = await loop.create_server(lambda: SimulatedConnection(handler), sock=bound, backlog=BACKLOG)
    try:
        yield handler.failure
    finally:
        server.close()
        if pacing is not None:
            pacing.cancel()
            with suppress(asyncio.CancelledError):
                await pacing
        handler.close()
        # One more turn of the loop lets aborted connections report their end while the counters are
        # there.
        await server.wait_closed()
        await asyncio.sleep(0)
        if not handler.failure.done():
            handler.failure.cancel()
        board.close()


@asynccontextmanager
async def _children(options: EngineOptions, board: int) -> AsyncIterator["asyncio.Future[None]"]:
    """Run an engine's processes; the first one that ends early is the engine's failure."""
    loop = asyncio.get_running_loop()
    failure: asyncio.Future[None] = loop.create_future()
    children: list[asyncio.subprocess.Process] = []
    watches: list[asyncio.Task[None]] = []

    async def watch(index: int, child: asyncio.subprocess.Process) -> None:
        code = await child.wait()
        if not failure.done():
            failure.set_exception(
                RuntimeError(f"process {index} of the simulated engine ended by itself (code {code})")
            )

    try:
        for index in range(options.processes):
            child = await _spawn(ChildPart(options, index, board))
            children.append(child)
        for index, child in enumerate(children):
            assert child.stdout is not None
            if await asyncio.wait_for(child.stdout.readline(), CHILD_START_S) != b"ready\n":
                raise RuntimeError(f"process {index} of the simulated engine did not start: its error is above")
            watches.append(loop.create_task(watch(index, child)))
        yield failure
    finally:
        for task in watches:
            task.cancel()
        if not failure.done():
            failure.cancel()
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
        for child in children:
            try:
                await asyncio.wait_for(child.wait(), CHILD_STOP_S)
            except TimeoutError:
                child.kill()
                await child.wait()


async def _spawn(part: ChildPart) -> asyncio.subprocess.Process:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tidegate.simulate.engine.child",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        pass_fds=(part.board,),
    )
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(part) + b"\n")
    await child.stdin.drain()
    return child


async def serve_child(part: ChildPart, parent_gone: int) -> None:
    """Serve as a child process until the file descriptor `parent_gone` ends."""
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(parent_gone, gone.set)
    try:
        with _bound(part.options.host, part.options.port, shared=True) as bound:
            async with _process(part.options, part.index, part.board, bound) as failure:
                sys.stdout.write("ready\n")
                sys.stdout.flush()
                await _until(gone, failure)
    finally:
        loop.remove_reader(parent_gone)
        os.close(part.board)


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    """Return a socket bound to the address; other processes of the engine bind a shared one too."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(error.errno, f"{host} is not an address of this machine: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}; choose another port") from error
    return bound
