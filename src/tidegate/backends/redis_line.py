"""One connection to Redis that runs our scripts, owned by one task.

- Callers give their questions to the task and wait for the answers. If a caller is cancelled or
  stops waiting, the task still reads its answer and drops it, so answers and questions stay in
  step.
- After any error the connection is dropped, and Redis is not asked for a second.
- A connection knows the run id of its server, and never reconnects unnoticed.
- This module does not know what the scripts mean.
"""

import asyncio
import hashlib
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import msgspec
import structlog

from tidegate.backends.redis_client import (
    AbstractConnection,
    Connection,
    NoBackoff,
    NoScriptError,
    RedisError,
    Retry,
    parse_url,
)

log = structlog.get_logger()

CONNECT_TIMEOUT_S = 2.0
AWAY_S = 1.0
CANCEL_AGAIN_S = 0.1
_PIPELINE_MAX = 256


class RedisAway(Exception):
    """Raised if Redis cannot be asked now, or if it is unknown what it did."""


class RedisUnsure(RedisAway):
    """Raised if Redis was asked and it is unknown what it did."""


class _Question(msgspec.Struct, frozen=True):
    script: str
    key: str
    arguments: Sequence[str | bytes | int]
    run_id: str
    answer: asyncio.Future[Any]


def script_text(name: str) -> str:
    return files("tidegate.backends").joinpath("lua", f"{name}.lua").read_text("utf-8")


def open_connection(url: str, timeout_s: float | None) -> AbstractConnection:
    """Return a connection that never retries by itself."""
    options: dict[str, Any] = dict(parse_url(url))
    kind = options.pop("connection_class", Connection)
    options |= {"socket_timeout": timeout_s, "socket_connect_timeout": CONNECT_TIMEOUT_S, "protocol": 2}
    connection: AbstractConnection = kind(**options, retry=Retry(NoBackoff(), 0))
    return connection


class RedisLine:
    """The connection to Redis and its task.

    `meanwhile` is logged: what happens while Redis is away.
    """

    def __init__(
        self, url: str, scripts: Sequence[str], timeout_s: float, meanwhile: str = "limits come from the store"
    ) -> None:
        self._url = url
        self._meanwhile = meanwhile
        self._timeout_s = timeout_s
        self._texts = {name: script_text(name) for name in scripts}
        self._shas: Mapping[str, str] = {
            name: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() for name, text in self._texts.items()
        }
        self._connection: AbstractConnection | None = None
        self._run_id = ""
        self._away_until = -math.inf
        self._is_away = False
        self._questions: list[_Question] = []
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def run_id(self) -> str:
        """Return the run id of the server that the connection leads to."""
        return self._run_id or str(await self._ask("", "", (), ""))

    async def call(self, script: str, key: str, *arguments: str | bytes | int, run_id: str = "") -> Any:
        """Run a script on one key. With `run_id`, run it only on the server with this run id."""
        return await self._ask(script, key, arguments, run_id)

    async def _ask(self, script: str, key: str, arguments: Sequence[str | bytes | int], run_id: str) -> Any:
        loop = asyncio.get_running_loop()
        if loop.time() < self._away_until:
            raise RedisAway("Redis did not answer a moment ago")
        question = _Question(script, key, arguments, run_id, loop.create_future())
        self._questions.append(question)
        self._asked.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._answer_all())
        try:
            async with asyncio.timeout(self._timeout_s):
                return await question.answer
        except TimeoutError:
            raise RedisUnsure("Redis takes too long") from None

    async def _answer_all(self) -> None:
        while True:
            await self._asked.wait()
            some, self._questions = self._questions[:_PIPELINE_MAX], self._questions[_PIPELINE_MAX:]
            if not self._questions:
                self._asked.clear()
            some = [question for question in some if not question.answer.done()]
            try:
                await self._answer(some)
            except (RedisError, OSError, ValueError) as error:
                self._away_until = asyncio.get_running_loop().time() + AWAY_S
                self._is_away = True
                log.warning("redis_unavailable", error=f"{type(error).__name__}: {error}", meanwhile=self._meanwhile)
                was_connected = self._connection is not None
                await self._drop()
                _fail(some, f"Redis cannot be used: {error}", RedisUnsure if was_connected else RedisAway)
                _fail(self._questions, f"Redis cannot be used: {error}")
                self._questions = []
            except BaseException:
                _fail(some, "this process is stopping", RedisUnsure)
                _fail(self._questions, "this process is stopping")
                await self._drop()
                raise

    async def _answer(self, questions: Sequence[_Question]) -> None:
        connection = await self._connected()
        for question in questions:
            if question.run_id and question.run_id != self._run_id:
                _fail([question], "this is another server than before")
            elif not question.script and not question.answer.done():
                question.answer.set_result(self._run_id)
        left = [question for question in questions if question.script and not question.answer.done()]
        # A script that the server does not know has not run: send it again with its text.
        unknown = await self._run(connection, left, "EVALSHA", self._shas)
        if await self._run(connection, unknown, "EVAL", self._texts):
            raise RedisError("the server forgets scripts faster than they are loaded")

    async def _run(
        self, connection: AbstractConnection, questions: Sequence[_Question], verb: str, scripts: Mapping[str, str]
    ) -> list[_Question]:
        """Send all questions at once and deliver the answers.

        Return those whose script was not known.
        """
        if not questions:
            return []
        commands = [(verb, scripts[one.script], 1, one.key, *one.arguments) for one in questions]
        await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        unknown = []
        for question in questions:
            try:
                answer = await connection.read_response()
            except NoScriptError:
                unknown.append(question)
                continue
            if not question.answer.done():
                question.answer.set_result(answer)
        return unknown

    async def _connected(self) -> AbstractConnection:
        if self._connection is None:
            connection = open_connection(self._url, self._timeout_s)
            try:
                await connection.connect()  # type: ignore[no-untyped-call]
                await connection.send_command("INFO", "server", check_health=False)
                self._run_id = _run_id_of(await connection.read_response())
            except BaseException:
                await connection.disconnect(nowait=True)
                raise
            self._connection = connection
            if self._is_away:
                self._is_away = False
                log.info("redis_restored")
        elif not self._connection.is_connected:
            raise ConnectionError("the connection was lost")
        return self._connection

    async def _drop(self) -> None:
        connection, self._connection, self._run_id = self._connection, None, ""
        if connection is not None:
            await connection.disconnect(nowait=True)

    async def close(self) -> None:
        if self._task is not None:
            await ended(self._task)
        await self._drop()


async def ended(task: asyncio.Task[None]) -> None:
    """End a task that uses Redis. Its library may swallow a cancellation, so repeat it."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)
    if not task.cancelled():
        task.exception()


def _fail(questions: Sequence[_Question], why: str, kind: type[RedisAway] = RedisAway) -> None:
    for question in questions:
        if not question.answer.done():
            question.answer.set_exception(kind(why))


def _run_id_of(info: bytes | str) -> str:
    text = info.decode() if isinstance(info, bytes) else info
    for line in text.splitlines():
        if line.startswith("run_id:"):
            return line.removeprefix("run_id:").strip()
    raise ValueError("the server does not say which run it is (INFO server): limits cannot be kept there")
