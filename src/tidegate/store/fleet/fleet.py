"""Verbs about the reports of processes on their calls. Only recent reports count."""

from collections.abc import Mapping

from tidegate.core.ports import FleetReport, Present
from tidegate.store.database.driver import Tx
from tidegate.store.database.table import Table, reads, writes

LATELY_MS = 3_000
SHOWN_MS = 15_000
KEEP_MS = 3_600_000
_SHOWN_MAX = 200
_OTHERS_MAX = 10_000


class FleetReports(Table):
    @writes
    async def report_to_fleet(
        self, tx: Tx, worker_id: str, mine: Mapping[str, Present]
    ) -> dict[str, dict[str, FleetReport]]:
        """Report what this process has at each deployment.

        Return the recent reports of all other processes, by deployment and process.
        """
        rows = [
            (name, worker_id, one.workers, one.calls, one.interactive, one.interactive_awaiting, int(one.has_gateway), one.why, one.tide)
            for name, one in sorted(mine.items())
        ]  # fmt: skip
        await tx.many("fleet_report_put", rows)
        others: dict[str, dict[str, FleetReport]] = {}
        for name, other, workers, calls, interactive, awaiting, has_gateway, age_ms in await tx.all(
            "fleet_report_others", worker_id=worker_id, lately_ms=LATELY_MS, count_max=_OTHERS_MAX
        ):
            present = Present(workers, calls, interactive, awaiting, bool(has_gateway))
            others.setdefault(name, {})[other] = FleetReport(present, max(0, age_ms))
        return others

    @reads
    async def learned_calls(self, tx: Tx, worker_id: str) -> dict[str, int]:
        """Return how many background calls each deployment took at this process's last report.

        A report that is older than an hour does not count.
        """
        rows = await tx.all("fleet_report_learned", worker_id=worker_id, lately_ms=KEEP_MS, count_max=_OTHERS_MAX)
        return {row[0]: int(row[1]) for row in rows}

    @reads
    async def tides(self, tx: Tx) -> list[tuple[str, str]]:
        """Return the reason for each deployment's tide, from each process that reported lately."""
        rows = await tx.all("fleet_report_list", lately_ms=SHOWN_MS, count_max=_SHOWN_MAX)
        return [(row[0], row[1]) for row in rows]

    @reads
    async def loads(self, tx: Tx) -> dict[str, tuple[int, int, int]]:
        """Return each deployment's allowed and present background calls, and its interactive
        ones."""
        rows = await tx.all("fleet_report_loads", lately_ms=SHOWN_MS)
        return {row[0]: (int(row[1]), int(row[2]), int(row[3])) for row in rows}

    @writes
    async def forget_fleet_reports(self, tx: Tx) -> None:
        await tx.all("fleet_report_forget", keep_ms=KEEP_MS)
