"""The signals that end a command: the first asks it to stop, the second ends it at once."""

import asyncio
import atexit
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED = 130


def exit_now(code: int) -> NoReturn:
    """End the process when everything is closed; functions registered with atexit still run.

    Without this, the interpreter's own shutdown after many connections can take longer than the
    grace that is left."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Stopping:
    """A stop that SIGINT, SIGTERM or SIGHUP asks for. A second signal ends the process at once,
    which costs only what was in flight."""

    def __init__(self, on_first: Callable[[], None] = lambda: None) -> None:
        self.asked = asyncio.Event()
        self.exit_code = INTERRUPTED
        self._on_first = on_first

    def listen(self) -> "Stopping":
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            # nohup ignores SIGHUP so that the command outlives its terminal.
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._receive, number)
        return self

    def _receive(self, number: int) -> None:
        self.exit_code = 128 + number
        if self.asked.is_set():
            os._exit(self.exit_code)
        self.asked.set()
        self._on_first()

    async def wait(self, timeout_s: float) -> bool:
        """Wait up to this time for a stop, and return whether one was asked for."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.asked.wait()
        except TimeoutError:
            pass
        return self.asked.is_set()
