"""A Redis that all processes share, under the real client code and with our real scripts, and what can go wrong with such a server.

It forgets everything, forgets its scripts, goes away, takes too long, carries a command out and loses the answer, and is replaced by a
copy that missed the last writes. Only what `RedisLine` asks of a connection is here, and the commands that the scripts call.
"""

import asyncio
import copy
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tests.simulation.world.loop import VirtualLoop
from tests.simulation.world.process import EPOCH_MS, Process
from tests.simulation.world.redis_scripts import Hash, Keys
from tests.simulation.world.weather import Weather
from tidegate.backends import redis_line

T = TypeVar("T")

_SCHEME = "redis://"
_REPLICA_BEHIND_S = 0.3


def url_of(process: Process) -> str:
    """How a process names the server: the connection that it opens is its own."""
    return _SCHEME + process.name


class RedisServer:
    def __init__(self, loop: VirtualLoop, weather: Weather, broken: Callable[[str], None]) -> None:
        self._loop = loop
        self._weather = weather
        self._broken = broken
        self._keys = Keys(self._now_ms)
        self._past: deque[tuple[float, dict[bytes, Hash]]] = deque()
        self._scripts: dict[str, str] = {}
        self._runs = 0
        self._skew_ms = 0
        self.away = False

    @property
    def run_id(self) -> str:
        return f"run{self._runs}"

    def flush(self) -> None:
        self._keys.hashes.clear()
        self._scripts.clear()

    def fail_over(self) -> None:
        """Another server goes on with what it had copied, a moment behind, with a clock of its own. Connections break."""
        dice = self._weather.dice
        seen_s = self._loop.time() - dice.uniform(0.0, _REPLICA_BEHIND_S)
        self._keys.hashes = next((hashes for at_s, hashes in reversed(self._past) if at_s <= seen_s), {})
        self._past.clear()
        self._scripts.clear()
        self._runs += 1
        self._skew_ms += dice.choice((0, 0, -20, 20, -5_000, 5_000))

    def _remember(self) -> None:
        """What a replica may still believe in a moment."""
        now_s = self._loop.time()
        self._past.append((now_s, copy.deepcopy(self._keys.hashes)))
        while self._past[0][0] < now_s - 2 * _REPLICA_BEHIND_S:
            self._past.popleft()

    def run(self, run_id: str, command: Sequence[Any]) -> Any:
        if self.away or run_id != self.run_id:
            raise RedisConnectionError("the connection was reset")
        verb, script, _, key, *words = command
        if verb == "EVAL":
            known = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
            self._scripts[known] = script
            script = known
        if script not in self._scripts:
            return NoScriptError("no matching script")
        if self._weather.plan.strength("redis_fail_over"):
            self._remember()
        answer = self._keys.run_script(self._scripts[script], key, words)
        self._check_block(key)
        return answer

    def _check_block(self, key: str) -> None:
        """A block holds what the store lent and nothing more, so dealing it out never leaves less than nothing."""
        block = self._keys.hashes[key.encode()].fields
        for name in (b"requests", b"tokens"):
            if int(block.get(name, b"0")) < 0:
                self._broken(f"P15: Redis dealt out more {name.decode()} than it was lent: {block}")

    def _now_ms(self) -> int:
        return EPOCH_MS + int(self._loop.time() * 1000) + self._skew_ms

    # ---- clients

    @contextmanager
    def serving(self, process_of: Callable[[str], Process]) -> Iterator[None]:
        """While this lasts, connections lead here."""

        def open_connection(url: str, timeout_s: float | None) -> "Connection":
            return Connection(self, process_of(url.removeprefix(_SCHEME)), timeout_s)

        before = redis_line.open_connection
        redis_line.open_connection = open_connection  # type: ignore[assignment]
        try:
            yield
        finally:
            redis_line.open_connection = before


class Connection:
    """What `RedisLine` asks of a connection."""

    def __init__(self, server: RedisServer, process: Process, timeout_s: float | None) -> None:
        self._server = server
        self._process = process
        self._timeout_s = timeout_s
        self._run_id = ""
        self._answers: list[Any] = []
        self.is_connected = False

    async def connect(self) -> None:
        def accept() -> str:
            if self._server.away:
                raise RedisConnectionError("connection refused")
            return self._server.run_id

        self._run_id = await self._ask(accept)
        self.is_connected = True

    async def send_command(self, *words: str, check_health: bool) -> None:
        self._answers.append(f"# Server\r\nrun_id:{self._run_id}\r\n".encode())

    def pack_commands(self, commands: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
        return list(commands)

    async def send_packed_command(self, commands: list[Sequence[Any]], *, check_health: bool) -> None:
        loses = self._process.weather.strikes("redis_lost")

        def act() -> list[Any]:
            answers = [self._server.run(self._run_id, command) for command in commands]
            if self._process.weather.strikes("redis_fail_over"):
                self._server.fail_over()
            if loses:
                raise RedisConnectionError("the connection broke before the answer came")
            return answers

        self._answers += await self._ask(act)

    async def read_response(self) -> Any:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def disconnect(self, *, nowait: bool) -> None:
        self.is_connected = False

    async def _ask(self, act: Callable[[], T]) -> T:
        weather = self._process.weather
        slow_s = weather.dice.uniform(0.02, 0.4) if weather.strikes("redis_slow") else 0.0
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._process.ask(act, slow_s)
        except TimeoutError:
            raise RedisTimeoutError("the server took too long") from None
        except RedisConnectionError:
            self.is_connected = False
            raise
