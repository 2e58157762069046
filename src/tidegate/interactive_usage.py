"""Sums up what interactive calls used and cost, and writes the sums to the store about
once a second.

A flush has a number. A flush whose commit is unknown is sent again under its number until it is
known; the store counts it once. A process that is killed loses what it had not written: the calls
of about its last second, and those that had not ended. The module judges nothing.
"""

import asyncio

import structlog

from tidegate.core.deployments import Deployment
from tidegate.core.errors import StoreError
from tidegate.core.nouns import Caller, Usage
from tidegate.core.ports import Entropy
from tidegate.core.usage.prices import Cost, Spend, cost
from tidegate.core.usage.spending import SpendEntry
from tidegate.store.store import Store

log = structlog.get_logger()

FLUSH_S = 1.0
CLOSE_S_MAX = 5.0
_RETRY_S = 0.5

# The owner of a call and what answered it: tenant, key, team, user, model, deployment.
_Whose = tuple[str, str, str, str, str, str]


class InteractiveUsageBook:
    def __init__(self, store: Store, entropy: Entropy) -> None:
        self._store = store
        self._writer = entropy.token_bytes(16).hex()
        self._number = 0
        self._open: dict[_Whose, list[int]] = {}
        self._writing: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    def add(self, caller: Caller, model: str, deployment: Deployment, usage: Usage) -> None:
        """Count one call that ended."""
        price = deployment.price
        paid = Cost() if price is None else cost(usage, price, batch=False)
        whose = (
            caller.tenant_id, caller.key_id or "", caller.team or "", caller.user or "", model, deployment.name
        )  # fmt: skip
        sums = self._open.setdefault(whose, [0] * 8)
        used = (1, usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.reasoning_tokens)
        for place, number in enumerate((*used, paid.input_nano, paid.cached_nano, paid.output_nano)):
            sums[place] += number
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_while_any_is_open())

    async def _write_while_any_is_open(self) -> None:
        try:
            while self._open:
                await self._pause(FLUSH_S)
                taken, self._open = self._open, {}
                self._number += 1
                await self._write([_entry(whose, sums) for whose, sums in taken.items()])
        finally:
            self._writing = None

    async def _write(self, entries: list[SpendEntry]) -> None:
        is_logged = False
        while True:
            try:
                await self._store.add_interactive(self._writer, self._number, entries)
                return
            except StoreError as error:
                if not is_logged:
                    log.warning("usage_postponed", error=str(error), calls=sum(one.spend.calls for one in entries))
                is_logged = True
            await asyncio.sleep(_RETRY_S)

    async def _pause(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self._closing.wait()
        except TimeoutError:
            pass

    async def close(self) -> None:
        """Write what is known; wait only a few seconds for a store that does not answer."""
        self._closing.set()
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=CLOSE_S_MAX)
        if self._writing is not None:
            log.error(
                "usage_lost",
                advice="the store was away at the end: what the last interactive calls used is not counted",
            )
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)


def _entry(whose: _Whose, sums: list[int]) -> SpendEntry:
    tenant_id, key_id, team, user, model, deployment = whose
    calls, *tokens = sums[:5]
    spend = Spend(calls, Usage(*tokens), Cost(*sums[5:]))
    return SpendEntry(
        spend, organization=tenant_id, team=team, user=user, key=key_id, model=model, deployment=deployment
    )
