"""Notices between processes through PostgreSQL's NOTIFY, on a separate connection.

Notices may be lost: while the connection is away, none are sent or received, and the polls of the
store go on. A connection that listens needs its own session, so this does not work through a
transaction-mode pooler.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import asyncpg
import structlog

log = structlog.get_logger(__name__)

_AGAIN_S = 1.0
_CHECK_S = 10.0
_AWAY = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError)


class PostgresNotices:
    """The notices of one process. `name` is unique for each installation in the same database."""

    def __init__(self, url: str, name: str, timeout_s: float) -> None:
        self._url = url
        self._channel = f"tidegate_{name}"
        self._timeout_s = timeout_s
        self._listeners: list[Callable[[str], None]] = []
        self._connection: Any = None
        self._asking = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._is_reached = True

    def start(self) -> None:
        """Start the task that listens."""
        self._task = asyncio.create_task(self._listen())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def on_notice(self, listener: Callable[[str], None]) -> None:
        self._listeners.append(listener)

    async def send_notice(self, text: str) -> None:
        connection = self._connection
        if connection is not None:
            await self._ask(connection, "select pg_notify($1, $2)", self._channel, text)

    async def _ask(self, connection: Any, query: str, *arguments: str) -> None:
        """Run a query. A connection that does not answer is dropped."""
        async with self._asking:
            try:
                await connection.execute(query, *arguments, timeout=self._timeout_s)
            except _AWAY:
                connection.terminate()

    async def _listen(self) -> None:
        while True:
            try:
                await self._listen_once()
            except _AWAY as error:
                self._note(reached=False, error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(_AGAIN_S)

    async def _listen_once(self) -> None:
        """Listen on a fresh connection until it is lost."""
        # Notices may be lost, so their commits need not wait for the disk.
        settings = {"application_name": "tidegate notices", "synchronous_commit": "off", "jit": "off"}
        connection = await asyncpg.connect(self._url, timeout=self._timeout_s, server_settings=settings)
        lost = asyncio.Event()
        try:
            connection.add_termination_listener(lambda _: lost.set())
            await connection.add_listener(self._channel, self._receive)
            self._connection = connection
            self._note(reached=True)
            while not lost.is_set():
                try:
                    await asyncio.wait_for(lost.wait(), _CHECK_S)
                except TimeoutError:
                    await self._ask(connection, "select 1")
        finally:
            self._connection = None
            connection.terminate()

    def _receive(self, connection: object, pid: int, channel: str, text: object) -> None:
        for listener in self._listeners:
            listener(str(text))

    def _note(self, *, reached: bool, error: str = "") -> None:
        """Log once when the connection is lost, and once when it is restored."""
        if reached == self._is_reached:
            return
        self._is_reached = reached
        if reached:
            log.info("notices_restored")
        else:
            log.warning("notices_lost", error=error, meanwhile="other processes' users are seen by polls of the store")
