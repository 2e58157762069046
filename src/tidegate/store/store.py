"""The Store: all verbs about what Tidegate remembers, over either driver.

It knows the domain's nouns and the names of statements, but not which database answers.
"""

from functools import partial

from tidegate.store.database.driver import Driver, Tx
from tidegate.store.database.schema import StoreSchema, current_schema, version_of
from tidegate.store.database.table import ChangeWitness, reads
from tidegate.store.fleet.census import Census
from tidegate.store.fleet.fleet import FleetReports
from tidegate.store.fleet.mode_overrides import ModeOverrides
from tidegate.store.fleet.routing import StoredRouting
from tidegate.store.fleet.workers import Workers
from tidegate.store.jobs.canaries import Canaries
from tidegate.store.jobs.flows import StoredFlows
from tidegate.store.jobs.job_events import JobEvents
from tidegate.store.operators.audit import Audit, AuditNote, AuditWitness
from tidegate.store.operators.changeable_jobs import ChangeableJobs
from tidegate.store.operators.operations import Operations
from tidegate.store.road.forecasts import Forecasts
from tidegate.store.road.ingests import Ingests
from tidegate.store.road.leases import Leases
from tidegate.store.road.outcomes import Outcomes
from tidegate.store.road.responses import BackgroundResponses
from tidegate.store.road.slices import Slices
from tidegate.store.tenants.budgets import StoredBudgets
from tidegate.store.tenants.files import StoredFiles
from tidegate.store.tenants.keys import Keys
from tidegate.store.tenants.uploads import StoredUploads
from tidegate.store.tenants.usage import UsageBook
from tidegate.store.tenants.webhooks import Webhooks


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
    Outcomes,
    BackgroundResponses,
    Canaries,
    FleetReports,
    Forecasts,
    StoredRouting,
    StoredUploads,
    Slices,
    Leases,
    ModeOverrides,
    UsageBook,
    Webhooks,
    Workers,
):
    """One Store over one driver."""

    def __init__(self, driver: Driver, schema: StoreSchema | None = None, witness: ChangeWitness | None = None) -> None:
        """Create a store.

        Tests that run two versions side by side pass another version's `schema`.
        """
        super().__init__(driver, witness)
        self._driver: Driver = driver
        self.dialect = driver.dialect
        self._schema = schema or current_schema()

    def audited(self, note: AuditNote) -> "Store":
        """Return this store with writes that are noted in the audit as this change."""
        return Store(self._driver, self._schema, AuditWitness(note))

    @reads
    async def now_ms(self, tx: Tx) -> int:
        """Return the time of the database's clock."""
        row = await tx.one("now")
        assert row is not None
        return int(row[0])

    async def look_at_clock(self) -> None:
        """Take a step of the store's clock out of its time.

        A process that works does so every second, and before it sweeps.
        """
        await self._driver.look_at_clock()

    @property
    def program_version(self) -> int:
        """Return the version of the schema that this program was written for."""
        return self._schema.version

    async def schema_version(self) -> int:
        """Return the version of this database's schema; 0 if it is empty."""
        return version_of(await self._driver.schema_stamps())

    async def migrate(self) -> list[int]:
        """Bring the database to this program's schema. Return which versions ran.

        Many processes may call this at once. A newer database that this program can work with is
        not changed.
        """
        return await self._driver.migrate(partial(self._schema.missing, self.dialect))

    async def require_schema(self) -> None:
        """Refuse a database that this program cannot work with.

        Wait first while a process migrates it.
        """
        stamps = await self._driver.schema_stamps()
        if version_of(stamps) < self._schema.version:
            stamps = await self._driver.schema_stamps(is_settled=True)
        self._schema.require(stamps)

    async def close(self) -> None:
        await self._driver.close()
