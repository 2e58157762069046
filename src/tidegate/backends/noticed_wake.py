"""A wake-up that reaches the other processes of an installation, by notices.

A process that waits announces this now and then. The others send notices only while a process
waits, so otherwise a wake-up costs nothing. Notices may be lost: a process that waits also polls.
"""

import asyncio
import math

from tidegate.backends.system import LocalListener, LocalWake
from tidegate.core.ports import Clock, Notices

# How often a process announces that it waits, and how long an announcement counts.
WANT_EVERY_S = 2.0
WANTED_MS = 10_000.0
# At most fifty notices a second from one process: many wake-ups in a moment become one.
NOTICE_GAP_S = 0.02


class NoticedWake:
    """A wake-up under a name.

    `name` is unique among the wake-ups that share the notices, `me` among processes.
    """

    def __init__(self, notices: Notices, clock: Clock, name: str, me: str) -> None:
        self._notices = notices
        self._clock = clock
        self._ring, self._want = f"{name}:ring:{me}", f"{name}:want:{me}"
        self._rings, self._wants = f"{name}:ring:", f"{name}:want:"
        self._local = LocalWake()
        self._wanted_until_ms = -math.inf
        self._waiting_count = 0
        self._announced_ms = -math.inf
        self._due: set[str] = set()
        self._something = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        notices.on_notice(self._take)

    def start(self) -> None:
        """Start the task that sends notices."""
        self._task = asyncio.create_task(self._send())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def notify(self) -> None:
        self._local.notify()
        if self._clock.monotonic_ms() < self._wanted_until_ms:
            self._put(self._ring)

    def listen(self) -> "NoticedListener":
        return NoticedListener(self, self._local.listen())

    async def wait(self, listener: LocalListener, timeout_s: float) -> None:
        """Wait for a wake-up. The other processes send theirs meanwhile."""
        self._waiting_count += 1
        self._announce()
        try:
            await listener.wait(timeout_s)
        finally:
            self._waiting_count -= 1

    def _announce(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._waiting_count and now_ms >= self._announced_ms + 1000 * WANT_EVERY_S:
            self._announced_ms = now_ms
            self._put(self._want)

    def _put(self, notice: str) -> None:
        self._due.add(notice)
        self._something.set()

    def _take(self, text: str) -> None:
        if text in (self._ring, self._want):
            return
        if text.startswith(self._rings):
            self._local.notify()
        elif text.startswith(self._wants):
            self._wanted_until_ms = self._clock.monotonic_ms() + WANTED_MS

    async def _send(self) -> None:
        while True:
            try:
                async with asyncio.timeout(WANT_EVERY_S):
                    await self._something.wait()
            except TimeoutError:
                self._announce()
            self._something.clear()
            due, self._due = self._due, set()
            for notice in sorted(due):
                await self._notices.send_notice(notice)
            await asyncio.sleep(NOTICE_GAP_S)


class NoticedListener:
    """A listener whose waits are announced to the other processes."""

    def __init__(self, wake: NoticedWake, listener: LocalListener) -> None:
        self._wake = wake
        self._listener = listener

    def notify(self) -> None:
        self._listener.notify()

    async def wait(self, timeout_s: float) -> None:
        await self._wake.wait(self._listener, timeout_s)
