"""Verbs about usage and its cost.

Record writes the usage of jobs (`road/outcomes.py`). Here it is read, and the usage of interactive
calls, which belong to no job, is added.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

from tidegate.core.nouns import Usage
from tidegate.core.usage.prices import Cost, Spend
from tidegate.core.usage.spending import SpendEntry
from tidegate.store.database.driver import Row, Tx
from tidegate.store.database.table import Table, reads, writes

DAY_S = 86_400
ENTRIES_MAX = 1_000_000


class UsageBook(Table):
    @writes
    async def add_interactive(self, tx: Tx, writer: str, number: int, entries: Sequence[SpendEntry]) -> None:
        """Add the usage of interactive calls to today.

        `organization` is the tenant's id here. A writer numbers its flushes from 1 on, and each
        counts once, however often it is sent.
        """
        if await tx.one("usage_writer", writer=writer, number=number) is not None:
            await tx.many("usage_interactive_add", sorted(_added(entry) for entry in entries))

    @writes
    async def prune_usage_writers(self, tx: Tx) -> None:
        await tx.all("usage_writers_prune")

    @reads
    async def usage(
        self,
        tx: Tx,
        from_day: int,
        to_day: int,
        *,
        tenant_id: str = "",
        by_job: bool = False,
        count_max: int = ENTRIES_MAX,
    ) -> list[SpendEntry]:
        """Return what all tenants or one spent from one UTC day up to another, which is excluded.

        Days count from 1970.
        """
        wanted = {"from_day": from_day, "to_day": to_day, "tenant_id": tenant_id, "count_max": count_max}
        rows = await tx.all("usage_by_job", **wanted) if by_job else await tx.all("usage_by_day", **wanted)
        return [_entry(row) for row in rows]


def _added(entry: SpendEntry) -> tuple[str | int, ...]:
    usage, paid = entry.spend.usage, entry.spend.cost
    return (
        entry.organization,
        entry.key,
        entry.model,
        entry.deployment,
        entry.team,
        entry.user,
        entry.spend.calls,
        usage.input_tokens,
        usage.cached_tokens,
        usage.output_tokens,
        usage.reasoning_tokens,
        paid.input_nano,
        paid.cached_nano,
        paid.output_nano,
    )


def _entry(row: Row) -> SpendEntry:
    day, organization, team, user, key, job, model, deployment, calls, fresh, cached, output, reasoning, *paid = row
    spend = Spend(calls, Usage(fresh, cached, output, reasoning), Cost(*paid))
    text = datetime.fromtimestamp(day * DAY_S, UTC).strftime("%Y-%m-%d")
    return SpendEntry(spend, text, organization, team, user, key, job, model, deployment)
