"""The signals that end a command: the first asks, the second insists."""

import asyncio
import atexit
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED = 130


def exit_now(code: int) -> NoReturn:
    """End the process when everything is closed. Taking the interpreter apart after many connections can take longer than the grace that is
    left; what others registered for the end of the process is still done."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Stopping:
    """Set at the first SIGINT, SIGTERM or SIGHUP; at the second the process is gone at once, which costs only what was in flight."""

    def __init__(self, on_first: Callable[[], None] = lambda: None) -> None:
        self.asked = asyncio.Event()
        self.exit_code = INTERRUPTED
        self._on_first = on_first

    def listen(self) -> "Stopping":
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            # Otherwise nohup started it, to outlive its terminal.
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
        """Whether a stop was asked for within this time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.asked.wait()
        except TimeoutError:
            pass
        return self.asked.is_set()
