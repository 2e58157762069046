"""The store's seam under one simulated process: real SQL on the shared in-memory database, behind a network that fails.

A transaction may fail before it begins, or commit and have its answer lost; either way its caller gets StoreUnavailable.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from tests.simulation.world.process import Process
from tests.simulation.world.rules import Rules
from tests.simulation.world.trace import Trace
from tidegate.core.errors import StoreUnavailable
from tidegate.store.database.driver import Missing, TransactionBody
from tidegate.store.database.sqlite import SqliteDriver

T = TypeVar("T")


class ProcessDriver:
    dialect = "sqlite"

    def __init__(self, process: Process, inner: SqliteDriver, rules: Rules, trace: Trace) -> None:
        self._process = process
        self._inner = inner
        self._rules = rules
        self._trace = trace

    async def write(self, body: TransactionBody[T]) -> T:
        return await self._send(body, lambda: self._commit(body))

    async def read(self, body: TransactionBody[T]) -> T:
        return await self._send(body, lambda: now(self._inner.read(body)))

    async def free(self, body: TransactionBody[T]) -> T:
        return await self.write(body)

    async def beat(self, body: TransactionBody[T]) -> T:
        done_s = 0.0

        def act() -> T:
            nonlocal done_s
            done_s = self._process.loop.time()
            return self._commit(body)

        result = await self._send(body, act)
        self._process.beats.append((done_s, self._process.loop.time()))
        return result

    async def _send(self, body: TransactionBody[T], act: Callable[[], T]) -> T:
        weather = self._process.weather
        verbs = weather.plan.store_verbs
        is_meant = not verbs or _verb(body) in verbs
        is_slow = is_meant and weather.strikes("store_slow")
        slow_s = weather.dice.uniform(0.1, weather.plan.store_slow_s_max) if is_slow else 0.0
        fails = is_meant and weather.strikes("store_fail")
        unknown = is_meant and weather.strikes("store_unknown")

        def carry_out() -> T:
            if fails or weather.store_away:
                raise StoreUnavailable("the store did not answer")
            result = act()
            if unknown:
                self._trace.note(self._process.name, "answer lost")
                raise StoreUnavailable("the connection broke after the commit was sent")
            return result

        return await self._process.ask(carry_out, slow_s)

    def _commit(self, body: TransactionBody[T]) -> T:
        with self._rules.acting(self._process):
            result = now(self._inner.write(body))
            self._trace.note(self._process.name, _verb(body), _steady(result))
            self._rules.after_commit(_verb(body))
        return result

    async def look_at_clock(self) -> None:
        before = self._rules.leases_left_ms()
        await self._inner.look_at_clock()
        self._rules.check_leases_go_on(before)

    async def schema_stamps(self, *, is_settled: bool = False) -> Mapping[str, str]:
        return await self._inner.schema_stamps(is_settled=is_settled)

    async def migrate(self, missing: Missing) -> list[int]:
        return await self._inner.migrate(missing)

    async def close(self) -> None:
        """The database outlives its clients."""


def now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise RuntimeError("the in-memory store suspended")


def _steady(result: Any) -> Any:
    """The same words in every process: the order of a set differs from one to the next."""
    if isinstance(result, tuple):
        return tuple(_steady(part) for part in result)
    return sorted(result) if isinstance(result, set) else result


def _verb(body: Callable[..., Any]) -> str:
    return body.__qualname__.partition(".")[2].partition(".")[0]
