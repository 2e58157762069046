"""The Store: every verb about what Tidegate remembers, over either driver.

It knows the domain's nouns and the names of statements; it does not know which database answers.
"""

from collections.abc import Mapping

from tidegate.core.errors import StoreRefused
from tidegate.store.budgets import StoredBudgets
from tidegate.store.driver import Driver, Tx
from tidegate.store.files import StoredFiles
from tidegate.store.fleet import Presence
from tidegate.store.flows import StoredFlows
from tidegate.store.forecasts import Prospects
from tidegate.store.ingests import Ingests
from tidegate.store.jobs import Jobs
from tidegate.store.keys import Keys
from tidegate.store.mode_overrides import Switches
from tidegate.store.outcomes import Outcomes
from tidegate.store.routing import StoredRouting
from tidegate.store.schema import edited_steps, migration_steps, version_of
from tidegate.store.slices import Slices
from tidegate.store.snapshots import Snapshots
from tidegate.store.usage import UsageBook
from tidegate.store.workers import Workers

SCHEMA_VERSION = 15


class Store(
    StoredBudgets,
    StoredFiles,
    StoredFlows,
    Ingests,
    Jobs,
    Keys,
    Outcomes,
    Presence,
    Prospects,
    StoredRouting,
    Slices,
    Snapshots,
    Switches,
    UsageBook,
    Workers,
):
    """One Store over one driver."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.dialect = driver.dialect

    async def now_ms(self) -> int:
        """The database's clock."""

        async def body(tx: Tx) -> int:
            row = await tx.one("now")
            assert row is not None
            return int(row[0])

        return await self._driver.read(body)

    async def look_at_clock(self) -> None:
        """Take a step of the store's clock out of its time. A process that works does so every second, and before it sweeps."""
        await self._driver.look_at_clock()

    async def schema_version(self) -> int:
        """Which numbered migration this database stands at; 0 when it is empty."""
        return version_of(await self._driver.schema_stamps())

    async def migrate(self) -> list[int]:
        """Bring the database to this version; safe to call from many processes at once. Says which steps ran."""
        stamps = await self._driver.schema_stamps()
        present = version_of(stamps)
        if present > SCHEMA_VERSION:
            raise StoreRefused(
                f"the store is at version {present}, newer than this program's {SCHEMA_VERSION}. Run a newer tidegate."
            )
        _refuse_edited(stamps)
        return await self._driver.migrate(migration_steps(self.dialect)) if present < SCHEMA_VERSION else []

    async def require_current(self) -> None:
        """Refuse to work on a database of another version; wait first while another process migrates it."""
        stamps = await self._driver.schema_stamps()
        if version_of(stamps) != SCHEMA_VERSION:
            stamps = await self._driver.schema_stamps(is_settled=True)
        present = version_of(stamps)
        if present != SCHEMA_VERSION:
            raise StoreRefused(
                f"the store is at version {present} and this program needs {SCHEMA_VERSION}. Run `tidegate migrate` with the newer program."
            )
        _refuse_edited(stamps)

    async def close(self) -> None:
        await self._driver.close()


def _refuse_edited(stamps: Mapping[str, str]) -> None:
    edited = edited_steps(stamps)
    if edited:
        raise StoreRefused(
            f"{', '.join(edited)} said something else when it ran on this store: the program's migrations were edited since. "
            "Run the program that made this store, or restore the edited files."
        )
