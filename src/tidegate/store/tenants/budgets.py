"""Verbs about shared limits: budgets, slots in flight, and limits that upstreams report.

Each is one short transaction over a few rows, locked in sorted order. A debit whose commit is
unknown is released under its number: if it was committed, its grants come back, and if not, it
never will be. A settlement has a number and counts once.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import structlog

from tidegate.core.budgets.budget import Budget, BudgetRequest, Grant, Limit, LimitRoom, Period, Settlement
from tidegate.core.budgets.deal import deal, settle
from tidegate.core.budgets.flights import mark_of
from tidegate.core.budgets.ledger import Ledger
from tidegate.core.budgets.money import MoneyLedger
from tidegate.core.budgets.slots import fair_shares, next_holding
from tidegate.core.errors import StoreUnavailable
from tidegate.store.database.driver import Row, Tx
from tidegate.store.database.table import Table, reads, writes

log = structlog.get_logger()

T = TypeVar("T")
# Acts on locked ledgers at a moment, and returns an answer and the ids of the ledgers that changed.
Act = Callable[[Tx, Mapping[str, Ledger], int], Awaitable[tuple[T, set[str]]]]

_IDS_PER_LOCK = 8
_BEGIN_TRIES_MAX = 5
_TURN_MS = 10_000
_DAY_MS = 24 * 3600 * 1000
DISCOVERED_KEEP_MS = 7 * _DAY_MS


class DebitAttempt:
    """One numbered debit of a writer, which can be released even if its commit is unknown.

    The next number stays free, for the release.
    """

    def __init__(self, asks: Sequence[BudgetRequest], writer: str, number: int, holder: str) -> None:
        self.asks = asks
        self.writer = writer
        self.number = number
        self.holder = holder
        self.grants: list[Grant] = []

    def note(self, grants: list[Grant]) -> None:
        """Note the grants that the debit takes if it is committed."""
        self.grants = grants

    def unsent(self) -> list[Settlement]:
        """Return the settlements of its grants if nothing is sent under them."""
        return [
            Settlement(grant.id, ask.budgets, grant.requests, grant.tokens, 0, grant.nano)
            for ask, grant in zip(self.asks, self.grants, strict=True)
            if grant.requests
        ]


class StoredBudgets(Table):
    async def debit_budgets(
        self, asks: Sequence[BudgetRequest], holder: str = "", attempt: DebitAttempt | None = None
    ) -> list[Grant]:
        """Grant what the budgets allow now: one grant for each ask, from all its budgets or none.

        `holder` is the incarnation that makes the calls. With an `attempt` the debit can be
        released if its commit is unknown.
        """

        async def act(tx: Tx, ledgers: Mapping[str, Ledger], now: int) -> tuple[list[Grant], set[str]]:
            grants = deal(asks, ledgers, now)
            gave = {
                budget.id for ask, grant in zip(asks, grants, strict=True) if grant.requests for budget in ask.budgets
            }
            if gave and attempt is not None:
                if await tx.one("usage_writer", writer=attempt.writer, number=attempt.number) is None:
                    return attempt.grants, set()
                attempt.note(grants)
            short = [ask for ask, grant in zip(asks, grants, strict=True) if grant.requests < ask.requests]
            forgot = await _forget_the_gone(tx, {one.id: ledgers[one.id] for ask in short for one in ask.budgets})
            return grants, gave | forgot

        budgets = {budget.id: budget for ask in asks for budget in ask.budgets}
        return await self._with_ledgers(budgets, act, holder)

    async def release_debit(self, attempt: DebitAttempt) -> None:
        """Give back the grants of a debit whose commit is unknown. May be repeated.

        If it was not committed, it never will be.
        """
        settlements = attempt.unsent()
        budgets = {budget.id: budget for one in settlements for budget in one.budgets}

        async def act(tx: Tx, ledgers: Mapping[str, Ledger], now: int) -> tuple[None, set[str]]:
            was_entered = await tx.one("usage_writer", writer=attempt.writer, number=attempt.number) is None
            is_new = await tx.one("usage_writer", writer=attempt.writer, number=attempt.number + 1) is not None
            if not (was_entered and is_new):
                return None, set()
            settle(settlements, ledgers, now)
            return None, set(ledgers)

        await self._with_ledgers(budgets, act, attempt.holder)

    @reads
    async def look_at_budgets(self, tx: Tx, asks: Sequence[BudgetRequest]) -> list[Grant]:
        """Return what each of these would be granted now alone.

        This takes nothing and waits for no lock.
        """
        packed: dict[str, bytes] = {}
        for ids in few_at_a_time({budget.id for ask in asks for budget in ask.budgets}):
            packed |= {id: bytes(ledger) for id, ledger in await tx.all("budgets_look", **ids)}
        row = await tx.one("now")
        assert row is not None
        return [
            deal([ask], {one.id: _ledger(one, packed.get(one.id, b""), "") for one in ask.budgets}, row[0])[0]
            for ask in asks
        ]

    @reads
    async def budget_rooms(self, tx: Tx, budgets: Sequence[Budget]) -> list[LimitRoom]:
        """Return what each limit of these budgets has left now.

        This takes nothing and waits for no lock.
        """
        packed: dict[str, bytes] = {}
        for ids in few_at_a_time({budget.id for budget in budgets}):
            packed |= {id: bytes(ledger) for id, ledger in await tx.all("budgets_look", **ids)}
        row = await tx.one("now")
        assert row is not None
        return [
            _ledger(budget, packed.get(budget.id, b""), "").room(budget, limit, row[0])
            for budget in budgets
            for limit in budget.limits
            if limit.enabled
        ]

    async def settle_budgets(
        self, settlements: Sequence[Settlement], writer: str, number: int, holder: str = ""
    ) -> None:
        """Replace what was reserved by what was used.

        `holder` is the incarnation that made the calls. A writer numbers its settlements from 1 on,
        and each number counts once, however often it is sent.
        """
        budgets = {budget.id: budget for one in settlements for budget in one.budgets}

        async def act(tx: Tx, ledgers: Mapping[str, Ledger], now: int) -> tuple[None, set[str]]:
            if await tx.one("usage_writer", writer=writer, number=number) is None:
                return None, set()
            settle(settlements, ledgers, now)
            return None, set(ledgers)

        await self._with_ledgers(budgets, act, holder)

    async def _with_ledgers(
        self,
        budgets: Mapping[str, Budget],
        act: Act[T],
        holder: str,
    ) -> T:
        """Act on these ledgers under lock, and write those that changed."""
        for _ in range(_BEGIN_TRIES_MAX):
            done = await self._change_ledgers(budgets, act, holder)
            if done is not None:
                return done[0]
            await self._begin_budgets(budgets)
        raise StoreUnavailable("the rows of budgets are removed as fast as they are made: look for what deletes them")

    @writes
    async def _change_ledgers(
        self,
        tx: Tx,
        budgets: Mapping[str, Budget],
        act: Act[T],
        holder: str,
    ) -> tuple[T, set[str]] | None:
        """Return the result of `act`; None if a budget has no row yet."""
        ledgers: dict[str, Ledger] = {}
        now = 0
        for ids in few_at_a_time(budgets):
            for id, packed, at in await tx.all("budgets_lock", **ids):
                ledgers[id] = _ledger(budgets[id], bytes(packed), holder)
                now = max(now, at)
        if len(ledgers) < len(budgets):
            return None
        answer, changed = await act(tx, ledgers, now)
        for id, ledger in ledgers.items():
            if ledger.is_damaged:
                log.error("budget_ledger_unreadable", budget=id, advice="it counts as full for one period")
                changed.add(id)
        if changed:
            rows = [(ledgers[id].pack(), ledgers[id].empty_at(), id) for id in sorted(changed)]
            await tx.many("budget_write", rows)
        return answer, changed

    @writes
    async def _begin_budgets(self, tx: Tx, budgets: Mapping[str, Budget]) -> None:
        rows = [(id, budget.bound.value, budget.name, b"") for id, budget in sorted(budgets.items())]
        await tx.many("budget_begin", rows)

    async def prune_budgets(self, idle_ms: int, count_max: int) -> None:
        """Forget empty budgets, slots of lost processes, and limits that were reported long ago."""
        # Two transactions, because one that locks budgets must lock nothing else.
        await self._prune_ledgers(idle_ms, count_max)
        await self._prune_slots(idle_ms, count_max)

    @writes
    async def _prune_ledgers(self, tx: Tx, idle_ms: int, count_max: int) -> None:
        await tx.all("budgets_prune", idle_ms=idle_ms, count_max=count_max)

    @writes
    async def _prune_slots(self, tx: Tx, idle_ms: int, count_max: int) -> None:
        await tx.all("slots_prune", idle_ms=idle_ms, count_max=count_max)
        await tx.all("discovered_prune", keep_ms=DISCOVERED_KEEP_MS)

    async def share_slots(
        self, worker_id: str, wanted: Mapping[str, int], in_use: Mapping[str, int], caps: Mapping[str, int]
    ) -> dict[str, int]:
        """Return how many calls this process may have in flight for each name of `caps`.

        The Limits port explains it. A process that was declared gone may have none.
        """
        for _ in range(_BEGIN_TRIES_MAX):
            shares = await self._share_slots(worker_id, wanted, in_use, caps)
            if shares is not None:
                return shares
            await self._begin_slots(caps)
        raise StoreUnavailable("the rows of slots are removed as fast as they are made: look for what deletes them")

    @writes
    async def _share_slots(
        self, tx: Tx, worker_id: str, wanted: Mapping[str, int], in_use: Mapping[str, int], caps: Mapping[str, int]
    ) -> dict[str, int] | None:
        """Return this process's share of each name; None if a name has no row yet."""
        if await tx.one("worker_alive", id=worker_id) is None:
            return dict.fromkeys(caps, 0)
        now = 0
        found: set[str] = set()
        for ids in few_at_a_time(caps):
            for name, at in await tx.all("slots_lock", **ids):
                found.add(name)
                now = max(now, at)
        if len(found) < len(caps):
            return None
        rows: list[Row] = []
        for ids in few_at_a_time(caps):
            rows += await tx.all("slots_held", **ids)
        answers, changed = _share(worker_id, wanted, in_use, caps, rows, now // _TURN_MS)
        if changed:
            await tx.many("slot_write", changed)
        return answers

    @writes
    async def _begin_slots(self, tx: Tx, names: Iterable[str]) -> None:
        await tx.many("slots_anchor", [(name,) for name in sorted(names)])

    @writes
    async def put_discovered(self, tx: Tx, deployment: str, limit: Limit) -> None:
        """Note a limit that a deployment has just reported.

        A part that it did not report is not changed.
        """
        await tx.all("discovered_put", deployment=deployment, requests=limit.requests, tokens=limit.tokens)

    @reads
    async def discovered(self, tx: Tx) -> dict[str, Limit]:
        """Return the limits that deployments reported in the last week."""
        rows = await tx.all("discovered_list", keep_ms=DISCOVERED_KEEP_MS)
        return {row[0]: Limit(Period.MINUTE, row[1], row[2]) for row in rows}

    @writes
    async def store_name(self, tx: Tx, candidate: str) -> str:
        """Return the permanent name of this store: the first candidate of any process.

        It separates installations that use one Redis: a budget that one store lent must never be
        spent for another.
        """
        await tx.all("store_name_put", value=candidate)
        row = await tx.one("store_name_get")
        assert row is not None
        return str(row[0])


def _ledger(budget: Budget, packed: bytes, holder: str) -> Ledger:
    if not budget.in_money:
        return Ledger.unpack(packed)
    return MoneyLedger.unpack(packed).for_holder(mark_of(holder))


async def _forget_the_gone(tx: Tx, ledgers: Mapping[str, Ledger]) -> set[str]:
    """Count the calls in flight of processes that are gone as spent, in short budgets of money.

    A process that waits for such a budget learns this with its next debit. Return the budgets that
    changed.
    """
    money = {id: ledger for id, ledger in ledgers.items() if isinstance(ledger, MoneyLedger)}
    if not money:
        return set()
    living = {mark_of(row[0]) for row in await tx.all("holders_living")}
    return {id for id, ledger in money.items() if ledger.forget_flights(living)}


def few_at_a_time(ids: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yield sorted ids as parameters of one statement after the other.

    The last ones are filled up with an id that no row has.
    """
    ordered = sorted(ids)
    for first in range(0, len(ordered), _IDS_PER_LOCK):
        some = ordered[first : first + _IDS_PER_LOCK]
        some += [""] * (_IDS_PER_LOCK - len(some))
        yield {f"id_{place}": id for place, id in enumerate(some)}


def _share(
    worker_id: str,
    wanted: Mapping[str, int],
    in_use: Mapping[str, int],
    caps: Mapping[str, int],
    rows: Sequence[Row],
    turn: int,
) -> tuple[dict[str, int], list[tuple[str, str, int, int]]]:
    answers: dict[str, int] = {}
    writes: list[tuple[str, str, int, int]] = []
    for name in sorted(caps):
        others = [row for row in rows if row[0] == name and row[1] != worker_id]
        wants = {row[1]: int(row[3]) for row in others} | {worker_id: max(0, wanted.get(name, 0))}
        fair = fair_shares(caps[name], wants, turn)[worker_id]
        others_share = sum(row[2] for row in others)
        answers[name], recorded = next_holding(caps[name], others_share, fair, max(0, in_use.get(name, 0)))
        mine = next((row for row in rows if row[0] == name and row[1] == worker_id), None)
        if (recorded, wants[worker_id]) != ((mine[2], mine[3]) if mine else (0, 0)):
            writes.append((name, worker_id, recorded, wants[worker_id]))
    return answers, writes
