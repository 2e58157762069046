"""Engines in a thread of the test's own process, and a client that shows the bytes as they came."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import uvloop

from tests.simulate.engine.wire import Address
from tidegate.simulate.engine import EngineOptions, running


@contextmanager
def engine_running(options: EngineOptions) -> Iterator[Address]:
    """An engine that listens while the block lasts."""
    ready = threading.Event()
    found: list[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = []
    failures: list[BaseException] = []

    async def main() -> None:
        stop = asyncio.Event()
        async with running(options) as engine:
            found.append((engine.url, asyncio.get_running_loop(), stop))
            ready.set()
            await stop.wait()

    def run() -> None:
        try:
            uvloop.run(main())
        except BaseException as error:
            failures.append(error)
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(30)
    if failures:
        raise failures[0]
    url, loop, stop = found[0]
    try:
        yield Address(url)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
    assert not failures, failures


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    """An engine in instant mode that the tests of a module share."""
    with engine_running(EngineOptions(port=0)) as found:
        yield found


@pytest.fixture
def start() -> Iterator[Callable[[EngineOptions], Address]]:
    """Starts engines that end with the test."""
    with ExitStack() as stack:
        yield lambda options: stack.enter_context(engine_running(options))


@pytest.fixture
def plug(address: Address) -> Iterator[socket.socket]:
    """A bare connection to the shared engine."""
    with address.connect() as connection:
        yield connection
