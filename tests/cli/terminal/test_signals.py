"""What asks a command to stop, and what does not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import uvloop

from tidegate.cli.terminal.signals import Stopping

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Give back the handlers of the test run."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_signal_asks_for_a_stop_and_gives_the_exit_code(number: signal.Signals) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    asked: list[str] = []

    async def stop() -> int:
        stopping = Stopping(lambda: asked.append("once")).listen()
        os.kill(os.getpid(), number)
        await stopping.asked.wait()
        return stopping.exit_code

    assert uvloop.run(stop()) == 128 + number
    assert asked == ["once"]


def test_under_nohup_a_command_outlives_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def listen() -> object:
        Stopping().listen()
        return signal.getsignal(signal.SIGHUP)

    assert uvloop.run(listen()) is signal.SIG_IGN
