"""Verbs about what was used and what it cost. Writing is record's affair (`charges`); here it is only read."""

from datetime import UTC, datetime

from tidegate.core.nouns import Usage
from tidegate.core.prices import Cost, Spend
from tidegate.core.spending import Entry
from tidegate.store.driver import Row, Tx
from tidegate.store.table import Table

DAY_S = 86_400
ENTRIES_MAX = 1_000_000


class UsageBook(Table):
    async def usage(
        self,
        from_day: int,
        to_day: int,
        *,
        tenant_id: str = "",
        by_job: bool = False,
        count_max: int = ENTRIES_MAX,
    ) -> list[Entry]:
        """What was spent from one UTC day up to another that is not in it (days since 1970), by anyone or by one tenant."""

        async def body(tx: Tx) -> list[Entry]:
            wanted = {"from_day": from_day, "to_day": to_day, "tenant_id": tenant_id, "count_max": count_max}
            rows = await tx.all("usage_by_job", **wanted) if by_job else await tx.all("usage_by_day", **wanted)
            return [_entry(row) for row in rows]

        return await self._driver.read(body)


def _entry(row: Row) -> Entry:
    day, organization, team, user, key, job, model, deployment, calls, fresh, cached, output, reasoning, *paid = row
    spend = Spend(calls, Usage(fresh, cached, output, reasoning), Cost(*paid))
    text = datetime.fromtimestamp(day * DAY_S, UTC).strftime("%Y-%m-%d")
    return Entry(spend, text, organization, team, user, key, job, model, deployment)
