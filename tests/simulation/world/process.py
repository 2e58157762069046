"""One simulated process: it lives, is stopped, goes on, is killed; its wall clock may be wrong; its line to the outside has latency.

A request that has left a process is carried out even if the process dies meanwhile, as on a real network; only the answer is lost.
When the power is cut, the store and the disk lose what is on its way to them too.
"""

import asyncio
import random
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, TypeVar

from tests.simulation.world.loop import OWNER, Timer, VirtualLoop
from tests.simulation.world.weather import Weather
from tidegate.core.ports import Blobs
from tidegate.interactive_usage import InteractiveUsageBook
from tidegate.store.store import Store
from tidegate.upstream.calls.router import Router
from tidegate.worker.registration import Registration
from tidegate.worker.worker import Worker

T = TypeVar("T")

EPOCH_MS = 1_800_000_000_000
_OUTSIDE = Context()


class Over(BaseException):
    """The run has ended: code that still asks the outside for something gets this."""


class Process:
    def __init__(self, name: str, loop: VirtualLoop, weather: Weather, seed: str) -> None:
        self.name = name
        self.loop = loop
        self.weather = weather
        self.dead = False
        self.stopped = False
        self.over = False
        self.frozen: list[asyncio.Handle | Timer] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.random = random.Random(f"{seed}/{name}")
        self.skew_ms = 0
        self.incarnations: set[str] = set()
        self.beats: list[tuple[float, float]] = []
        self.lost_at_s: list[float] = []
        self.ending = asyncio.Event()
        self.ended = False
        self.is_ended_in_trouble = False
        self.on_death: Callable[[], None] = lambda: None
        self.me: Registration | None = None
        self.worker: Worker | None = None
        self.router: Router | None = None
        self.book: InteractiveUsageBook | None = None
        self.store: Store | None = None
        self.blobs: Blobs | None = None

    @property
    def takes_users(self) -> bool:
        """Whether a caller would find this process at its door."""
        is_open = self.router is not None and not self.ending.is_set()
        return is_open and not self.dead and not self.stopped and not self.ended

    # ---- fate

    def begin(self, life: Callable[["Process"], Any]) -> None:
        context = copy_context()
        context.run(OWNER.set, self)
        self.loop.create_task(life(self), context=context)

    def kill(self) -> None:
        if not self.dead:
            self.dead = True
            self.lost_at_s.append(self.loop.time())
            self.on_death()

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        if not self.stopped:
            self.stopped = True
            self.loop.call_later(seconds, self.resume, context=_OUTSIDE)

    def resume(self) -> None:
        if self.stopped:
            self.stopped = False
            if not self.dead:
                self.loop.thaw(self)

    # ---- Clock

    def now_ms(self) -> int:
        return EPOCH_MS + int(self.loop.time() * 1000) + self.skew_ms

    def monotonic_ms(self) -> float:
        return self.loop.time() * 1000

    # ---- Entropy

    def token_bytes(self, count: int) -> bytes:
        return self.random.randbytes(count)

    def uniform(self, low: float, high: float) -> float:
        return self.random.uniform(low, high)

    # ---- the line to the outside

    async def ask(self, act: Callable[[], T], slow_s: float = 0.0) -> T:
        """Have something done outside, once, after some latency; the answer comes back after some more."""
        if self.over:
            raise Over
        weather, loop = self.weather, self.loop
        answer: asyncio.Future[T] = loop.create_future()
        dies = weather.border_death()
        power_cuts = weather.power_cuts

        def carry_out() -> None:
            if weather.power_cuts != power_cuts:
                return
            if dies in ("unsent", "before"):
                self.kill()
            if dies == "unsent":
                return
            try:
                result = act()
            except Exception as error:
                back: Callable[[], None] = lambda error=error: _fail(answer, error)  # type: ignore[misc]  # noqa: E731
            else:
                back = lambda: _succeed(answer, result)  # noqa: E731
            if dies == "after":
                self.kill()
            loop.call_later(weather.latency_s(), back, context=_OUTSIDE)

        loop.call_later(weather.latency_s() + slow_s, carry_out, context=_OUTSIDE)
        return await answer


def outside(loop: VirtualLoop, seconds: float, act: Callable[[], None]) -> None:
    """Let something happen later that belongs to no process."""
    loop.call_later(seconds, act, context=_OUTSIDE)


def _succeed(answer: "asyncio.Future[T]", result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _fail(answer: "asyncio.Future[T]", error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
