"""Messages between processes through Redis: wake-ups, deployments that rest, and notices.

Any message may be lost: a process without messages polls, and learns of a rest from one refused
call. A process knows its own messages at once, with or without Redis. The clock of Redis measures
rests, so processes do not compare their clocks.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from tidegate.backends.redis_client import RedisError
from tidegate.backends.redis_line import RedisAway, RedisLine, ended, open_connection
from tidegate.backends.system import LocalListener, LocalWake
from tidegate.core.ports import Clock, Entropy

log = structlog.get_logger()

_TIMEOUT_S = 1.0
_POLL_S = 2.0
_AGAIN_S = 1.0
_QUIET_S = 30.0
_RINGS_PER_S_MAX = 50
_REST_MS_MAX = 24 * 3600 * 1000


class LocalRests:
    """The deployments that rest, as far as this process knows."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_ms: dict[str, float] = {}

    def publish(self, deployment: str, rest_ms: int) -> None:
        self.learn(deployment, rest_ms)

    def learn(self, deployment: str, rest_ms: float) -> bool:
        """Note a rest.

        Return whether it is longer than the one that was known: the longer rest counts.
        """
        until_ms = self._clock.monotonic_ms() + min(rest_ms, _REST_MS_MAX)
        if rest_ms <= 0 or until_ms <= self._until_ms.get(deployment, -math.inf):
            return False
        self._until_ms[deployment] = until_ms
        return True

    def left_ms(self, deployment: str) -> int:
        """Return for how much longer a deployment rests."""
        return math.ceil(self._until_ms.get(deployment, 0.0) - self._clock.monotonic_ms())

    def current(self) -> Mapping[str, float]:
        now_ms = self._clock.monotonic_ms()
        self._until_ms = {name: until_ms for name, until_ms in self._until_ms.items() if until_ms > now_ms}
        return dict(self._until_ms)


class RedisShared:
    """The Wake, the Rests and the Notices of one process, shared through Redis.

    `name` is unique for each installation that uses the same Redis.
    """

    def __init__(self, url: str, name: str, clock: Clock, entropy: Entropy) -> None:
        self._url = url
        self._channel, self._rests_key, self._notices = f"{name}:wake", f"{name}:rests", f"{name}:notices"
        self._listeners: list[Callable[[str], None]] = []
        self._me = entropy.token_bytes(8).hex()
        self._wake, self._rests = LocalWake(), LocalRests(clock)
        self._line = RedisLine(url, ("ring", "rest", "rests"), _TIMEOUT_S)
        self._rung = False
        self._untold: set[str] = set()
        self._something = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the tasks that send and listen."""
        self._tasks = [asyncio.create_task(self._tell()), asyncio.create_task(self._listen())]

    async def close(self) -> None:
        for task in self._tasks:
            await ended(task)
        await self._line.close()

    def notify(self) -> None:
        self._wake.notify()
        self._rung = True
        self._something.set()

    def listen(self) -> LocalListener:
        return self._wake.listen()

    def publish(self, deployment: str, rest_ms: int) -> None:
        if self._rests.learn(deployment, rest_ms):
            self._untold.add(deployment)
            self._something.set()

    def current(self) -> Mapping[str, float]:
        return self._rests.current()

    async def send_notice(self, text: str) -> None:
        try:
            await self._line.call("ring", self._notices, text)
        except RedisAway:
            log.debug("notice_send_failed")

    def on_notice(self, listener: Callable[[str], None]) -> None:
        self._listeners.append(listener)

    async def _tell(self) -> None:
        """Send wake-ups and rests; many wake-ups in a moment become one.

        When idle, ask which deployments rest.
        """
        while True:
            try:
                async with asyncio.timeout(_POLL_S):
                    await self._something.wait()
            except TimeoutError:
                await self._ask_rests()
                continue
            self._something.clear()
            try:
                await self._tell_rests()
                if self._rung:
                    self._rung = False
                    await self._line.call("ring", self._channel, self._me)
            except RedisAway:
                await asyncio.sleep(_AGAIN_S)
                self._something.set()
            await asyncio.sleep(1 / _RINGS_PER_S_MAX)

    async def _tell_rests(self) -> None:
        while self._untold:
            deployment = min(self._untold)
            left_ms = self._rests.left_ms(deployment)
            if left_ms > 0:
                await self._line.call("rest", self._rests_key, deployment, left_ms, self._channel)
            self._untold.discard(deployment)

    async def _ask_rests(self) -> None:
        try:
            rests = await self._line.call("rests", self._rests_key)
        except RedisAway:
            return
        for name, left_ms in zip(rests[::2], rests[1::2], strict=True):
            self._rests.learn(name.decode("utf-8", "replace"), float(left_ms))

    async def _listen(self) -> None:
        while True:
            try:
                await self._listen_once()
            except (RedisError, OSError) as error:
                log.debug("redis_wake_ups_unavailable", error=f"{type(error).__name__}: {error}")
                await asyncio.sleep(_AGAIN_S)

    async def _listen_once(self) -> None:
        """Listen on a fresh connection until it breaks or is quiet for long."""
        connection = open_connection(self._url, _TIMEOUT_S)
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            await connection.send_command("SUBSCRIBE", self._channel, self._notices, check_health=False)
            # One answer for each channel.
            await connection.read_response()
            await connection.read_response()
            # Messages from before the subscription were lost: catch up.
            self._wake.notify()
            await self._ask_rests()
            while (message := await connection.read_response(timeout=_QUIET_S)) is not None:
                await self._receive(message)
        finally:
            await connection.disconnect(nowait=True)

    async def _receive(self, message: Any) -> None:
        payload = message[-1]
        if message[1] == self._notices.encode():
            for listener in self._listeners:
                listener(payload.decode("utf-8", "replace"))
        elif payload == b"rest":
            await self._ask_rests()
        elif payload != self._me.encode():
            self._wake.notify()
