"""A TCP proxy with faults, for every wire the product speaks over: database, objects, upstream, callbacks.

It runs in a thread with an event loop of its own; the controls are plain calls that return when the fault is in force.
It forwards bytes and knows no protocol. `up` is client to target, `down` is target to client.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Direction = Literal["up", "down", "both"]

CHUNK_BYTES = 16_384
QUEUED_CHUNKS_MAX = 64
CONTROL_TIMEOUT_S = 10
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass
class Faults:
    """What is done to the bytes of one direction."""

    latency_s: float = 0.0
    jitter_s: float = 0.0
    rate_bytes_per_s: float = 0.0
    cut_after_bytes: int | None = None
    corrupt: bool = False
    passing: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.passing.set()


@dataclass(eq=False)
class Link:
    """One client's connection and the one made for it to the target."""

    client: socket.socket
    target: socket.socket
    cut_left: dict[str, int | None]
    ended: set[str] = field(default_factory=set)
    reset: bool = False
    task: asyncio.Task[None] | None = None

    def close(self) -> None:
        for end in (self.client, self.target):
            with contextlib.suppress(OSError):
                if self.reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                end.close()


class Proxy:
    """Listens on `port` and forwards to the target; every fault lasts until `heal`."""

    def __init__(self, target_host: str, target_port: int, *, seed: int = 0) -> None:
        self.target = (target_host, target_port)
        self.connections_accepted = 0
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._faults = {"up": Faults(), "down": Faults()}
        self._links: set[Link] = set()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self.port = 0
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp-proxy", daemon=True)
        self._thread.start()
        self._do(self._listen)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def links(self) -> int:
        """How many connections are open through the proxy."""
        return len(self._links)

    def latency(self, seconds: float, jitter_s: float = 0.0, direction: Direction = "both") -> None:
        """Deliver every byte this much later; order is kept."""

        def apply(faults: Faults) -> None:
            faults.latency_s, faults.jitter_s = seconds, jitter_s

        self._apply(direction, apply)

    def rate(self, bytes_per_s: float, direction: Direction = "both") -> None:
        """Forward at most this fast, per connection."""
        self._apply(direction, lambda faults: setattr(faults, "rate_bytes_per_s", bytes_per_s))

    def corrupt(self, direction: Direction = "both") -> None:
        """Flip one bit in every chunk."""
        self._apply(direction, lambda faults: setattr(faults, "corrupt", True))

    def cut(self, after_bytes: int, direction: Direction = "both") -> None:
        """Reset each connection, open or yet to come, once it has forwarded this many more bytes in the direction."""

        async def apply() -> None:
            for name in _names(direction):
                self._faults[name].cut_after_bytes = after_bytes
                for link in self._links:
                    link.cut_left[name] = after_bytes
            if after_bytes == 0:
                await self._drop_links(reset=True)

        self._do(apply)

    def blackhole(self, direction: Direction = "both") -> None:
        """Read and forward nothing, close nothing: what a lost network looks like from both ends."""
        self._apply(direction, lambda faults: faults.passing.clear())

    def half_close(self, direction: Direction = "both") -> None:
        """End the stream of one direction on every open connection; the other direction goes on."""

        async def apply() -> None:
            for link in self._links:
                for name in _names(direction):
                    link.ended.add(name)
                    with contextlib.suppress(OSError):
                        (link.target if name == "up" else link.client).shutdown(socket.SHUT_WR)

        self._do(apply)

    def reset(self) -> None:
        """Break every open connection with RST; new ones are served."""
        self._do(lambda: self._drop_links(reset=True))

    def close_links(self) -> None:
        """Close every open connection in the orderly way; new ones are served."""
        self._do(lambda: self._drop_links(reset=False))

    def pause_accept(self) -> None:
        """Let new connections hang in the backlog: they connect, and get no answer."""
        self._do(self._stop_accepting)

    def refuse(self) -> None:
        """Refuse new connections, as if the server were down; open ones stay."""
        self._do(self._stop_listening)

    def heal(self) -> None:
        """Undo every fault; what a black hole held is delivered."""

        async def apply() -> None:
            for faults in self._faults.values():
                faults.latency_s = faults.jitter_s = faults.rate_bytes_per_s = 0.0
                faults.cut_after_bytes, faults.corrupt = None, False
                faults.passing.set()
            for link in self._links:
                link.cut_left = {"up": None, "down": None}
            await self._listen()

        self._do(apply)

    def close(self) -> None:
        """Stop for good; every connection is reset."""

        async def finish() -> None:
            await self._stop_listening()
            await self._drop_links(reset=True)

        if not self._loop.is_closed():
            self._do(finish)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CONTROL_TIMEOUT_S)
            self._loop.close()

    def _do(self, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
        asyncio.run_coroutine_threadsafe(action(), self._loop).result(CONTROL_TIMEOUT_S)

    def _apply(self, direction: Direction, change: Callable[[Faults], None]) -> None:
        async def apply() -> None:
            for name in _names(direction):
                change(self._faults[name])

        self._do(apply)

    async def _listen(self) -> None:
        if self._listener is None:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self.port))
            listener.listen(128)
            listener.setblocking(False)
            self._listener, self.port = listener, listener.getsockname()[1]
        if self._accepting is None:
            self._accepting = self._loop.create_task(self._accept(self._listener))

    async def _stop_accepting(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait({self._accepting})
            self._accepting = None

    async def _stop_listening(self) -> None:
        await self._stop_accepting()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _drop_links(self, reset: bool) -> None:
        tasks = []
        for link in self._links:
            link.reset = reset
            if link.task is not None:
                link.task.cancel()
                tasks.append(link.task)
        if tasks:
            await asyncio.wait(tasks)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            client, _ = await self._loop.sock_accept(listener)
            client.setblocking(False)
            target = socket.socket()
            target.setblocking(False)
            for end in (client, target):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections_accepted += 1
            link = Link(client, target, {name: faults.cut_after_bytes for name, faults in self._faults.items()})
            self._links.add(link)
            link.task = self._loop.create_task(self._serve(link))

    async def _serve(self, link: Link) -> None:
        """Carry both directions until both have ended; a break in one breaks the other."""
        try:
            await self._loop.sock_connect(link.target, self.target)
            async with asyncio.TaskGroup() as group:
                for name, source, sink in (("up", link.client, link.target), ("down", link.target, link.client)):
                    # The queue lets latency overlap with reading.
                    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUED_CHUNKS_MAX)
                    group.create_task(self._read(source, self._faults[name], queue))
                    group.create_task(self._deliver(link, sink, name, queue))
        except* OSError:
            # The target refused, or one end broke: the other end must see a break too, not a clean end.
            link.reset = True
        finally:
            link.close()
            self._links.discard(link)

    async def _read(self, source: socket.socket, faults: Faults, queue: asyncio.Queue[tuple[float, bytes]]) -> None:
        data = b"more"
        while data:
            await faults.passing.wait()
            data = await self._loop.sock_recv(source, CHUNK_BYTES)
            await queue.put((self._loop.time() + faults.latency_s + self._random.uniform(0, faults.jitter_s), data))

    async def _deliver(
        self, link: Link, sink: socket.socket, name: str, queue: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        faults = self._faults[name]
        while True:
            due, data = await queue.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            # What was read before a black hole opened is held here until it closes.
            await faults.passing.wait()
            if not data:
                with contextlib.suppress(OSError):
                    sink.shutdown(socket.SHUT_WR)
                return
            if name in link.ended:
                continue
            if faults.corrupt:
                place = self._random.randrange(len(data))
                data = data[:place] + bytes([data[place] ^ 0x01]) + data[place + 1 :]
            left = link.cut_left[name]
            if left is not None:
                data = data[:left]
                link.cut_left[name] = left - len(data)
            await self._send(sink, data, faults)
            if link.cut_left[name] == 0:
                raise ConnectionAbortedError("cut")

    async def _send(self, sink: socket.socket, data: bytes, faults: Faults) -> None:
        while data:
            if faults.rate_bytes_per_s <= 0:
                await self._loop.sock_sendall(sink, data)
                return
            # Twenty small steps a second keep a slow stream a stream.
            step = max(1, int(faults.rate_bytes_per_s / 20))
            await self._loop.sock_sendall(sink, data[:step])
            await asyncio.sleep(min(len(data), step) / faults.rate_bytes_per_s)
            data = data[step:]


class WiredDatabase(NamedTuple):
    """A database whose `url` leads through a wire that can be cut."""

    url: str
    wire: Proxy


class Proxies:
    """All proxies of one test."""

    def __init__(self) -> None:
        self.opened: list[Proxy] = []

    def open(self, target_port: int, target_host: str = "127.0.0.1", *, seed: int = 0) -> Proxy:
        proxy = Proxy(target_host, target_port, seed=seed)
        self.opened.append(proxy)
        return proxy

    def close(self) -> None:
        for proxy in self.opened:
            proxy.close()


def _names(direction: Direction) -> tuple[str, ...]:
    return ("up", "down") if direction == "both" else (direction,)
