"""The Store: every verb about what Tidegate remembers, over either driver.

It knows the domain's nouns and the names of statements; it does not know which database answers.
"""

from functools import partial

from tidegate.store.audit import Audit, AuditNote, AuditWitness
from tidegate.store.budgets import StoredBudgets
from tidegate.store.canaries import Canaries
from tidegate.store.census import Census
from tidegate.store.changeable_jobs import ChangeableJobs
from tidegate.store.driver import Driver, Tx
from tidegate.store.files import StoredFiles
from tidegate.store.fleet import FleetReports
from tidegate.store.flows import StoredFlows
from tidegate.store.forecasts import Forecasts
from tidegate.store.ingests import Ingests
from tidegate.store.job_events import JobEvents
from tidegate.store.keys import Keys
from tidegate.store.mode_overrides import ModeOverrides
from tidegate.store.operations import Operations
from tidegate.store.responses import BackgroundResponses
from tidegate.store.routing import StoredRouting
from tidegate.store.schema import StoreSchema, current_schema, version_of
from tidegate.store.slices import Slices
from tidegate.store.snapshots import Snapshots
from tidegate.store.table import ChangeWitness, reads
from tidegate.store.uploads import StoredUploads
from tidegate.store.usage import UsageBook
from tidegate.store.webhooks import Webhooks
from tidegate.store.workers import Workers


class Store(
    Audit,
    StoredBudgets,
    Census,
    StoredFiles,
    StoredFlows,
    Ingests,
    ChangeableJobs,
    JobEvents,
    Keys,
    Operations,
    BackgroundResponses,
    Canaries,
    FleetReports,
    Forecasts,
    StoredRouting,
    StoredUploads,
    Slices,
    Snapshots,
    ModeOverrides,
    UsageBook,
    Webhooks,
    Workers,
):
    """One Store over one driver."""

    def __init__(self, driver: Driver, schema: StoreSchema | None = None, witness: ChangeWitness | None = None) -> None:
        """`schema` is that of another version of the program, for tests that run two side by side."""
        super().__init__(driver, witness)
        self._driver: Driver = driver
        self.dialect = driver.dialect
        self._schema = schema or current_schema()

    def audited(self, note: AuditNote) -> "Store":
        """Return this store, whose writes note themselves as this change."""
        return Store(self._driver, self._schema, AuditWitness(note))

    @reads
    async def now_ms(self, tx: Tx) -> int:
        """The database's clock."""
        row = await tx.one("now")
        assert row is not None
        return int(row[0])

    async def look_at_clock(self) -> None:
        """Take a step of the store's clock out of its time. A process that works does so every second, and before it sweeps."""
        await self._driver.look_at_clock()

    @property
    def program_version(self) -> int:
        """Return the version of the schema that this program was written for."""
        return self._schema.version

    async def schema_version(self) -> int:
        """Return the version of this database's schema; 0 when it is empty."""
        return version_of(await self._driver.schema_stamps())

    async def migrate(self) -> list[int]:
        """Bring the database to this program's schema; safe to call from many processes at once. Return which versions ran.

        A newer database that this program can work with is left as it is."""
        return await self._driver.migrate(partial(self._schema.missing, self.dialect))

    async def require_schema(self) -> None:
        """Refuse a database that this program cannot work with; wait first while another process migrates it."""
        stamps = await self._driver.schema_stamps()
        if version_of(stamps) < self._schema.version:
            stamps = await self._driver.schema_stamps(is_settled=True)
        self._schema.require(stamps)

    async def close(self) -> None:
        await self._driver.close()
