"""Verbs about what processes tell each other of their calls; a row that was not told again lately counts for nothing."""

from collections.abc import Mapping

from tidegate.core.ports import Present
from tidegate.store.driver import Tx
from tidegate.store.table import Table

LATELY_MS = 3_000
SHOWN_MS = 15_000
KEEP_MS = 3_600_000
_SHOWN_MAX = 200


class Presence(Table):
    async def tell_presence(self, worker_id: str, mine: Mapping[str, Present]) -> dict[str, Present]:
        """Say what this process has at each deployment; gives the sum over all others that spoke lately."""

        async def body(tx: Tx) -> dict[str, Present]:
            rows = [
                (name, worker_id, one.workers, one.calls, one.interactive, one.interactive_awaiting, int(one.has_gateway), one.why)
                for name, one in sorted(mine.items())
            ]  # fmt: skip
            await tx.many("presence_put", rows)
            others = await tx.all("presence_others", worker_id=worker_id, lately_ms=LATELY_MS)
            return {row[0]: Present(row[1], row[2], row[3], row[4], bool(row[5])) for row in others}

        return await self._driver.write(body)

    async def tides(self) -> list[tuple[str, str]]:
        """Why the tide of each deployment stands as it does, in the words of each process that spoke lately."""

        async def body(tx: Tx) -> list[tuple[str, str]]:
            rows = await tx.all("presence_list", lately_ms=SHOWN_MS, count_max=_SHOWN_MAX)
            return [(row[0], row[1]) for row in rows]

        return await self._driver.read(body)

    async def forget_presence(self) -> None:
        async def body(tx: Tx) -> None:
            await tx.all("presence_forget", keep_ms=KEEP_MS)

        await self._driver.write(body)
