"""The Store: every verb about what Tidegate remembers, over either driver.

It knows the domain's nouns and the names of statements; it does not know which database answers.
"""

from importlib.resources import files

from tidegate.core.errors import StoreRefused
from tidegate.store.budgets import Budgets
from tidegate.store.driver import Driver, Tx
from tidegate.store.files import Files
from tidegate.store.flows import Flows
from tidegate.store.jobs import Jobs
from tidegate.store.keys import Keys
from tidegate.store.outcomes import Outcomes
from tidegate.store.presence import Presence
from tidegate.store.prospects import Prospects
from tidegate.store.queries import schema_for
from tidegate.store.routing import Routing
from tidegate.store.slices import Slices
from tidegate.store.snapshots import Snapshots
from tidegate.store.switches import Switches
from tidegate.store.usage import UsageBook
from tidegate.store.workers import Workers

SCHEMA_VERSION = 10


class Store(
    Budgets,
    Files,
    Flows,
    Jobs,
    Keys,
    Outcomes,
    Presence,
    Prospects,
    Routing,
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

    async def schema_version(self) -> int:
        """Which numbered migration this database stands at; 0 when it is empty."""

        return await self._driver.schema_version()

    async def migrate(self) -> list[int]:
        """Bring the database to this version; safe to call from many processes at once. Says which steps ran."""
        present = await self.schema_version()
        if present > SCHEMA_VERSION:
            raise StoreRefused(
                f"the store is at version {present}, newer than this program's {SCHEMA_VERSION}. Run a newer tidegate."
            )
        ran = []
        for version in range(present + 1, SCHEMA_VERSION + 1):
            name = next(path for path in migrations() if path.startswith(f"{version:04}_"))
            if await self._driver.migrate_to(version, migration_text(self.dialect, name, version)):
                ran.append(version)
        return ran

    async def require_current(self) -> None:
        """Refuse to work on a database of another version."""
        present = await self.schema_version()
        if present != SCHEMA_VERSION:
            raise StoreRefused(
                f"the store is at version {present} and this program needs {SCHEMA_VERSION}. Run `tidegate migrate` with the newer program."
            )

    async def close(self) -> None:
        await self._driver.close()


def migrations() -> list[str]:
    """The numbered migrations, in order."""
    folder = files("tidegate.store").joinpath("migrations")
    return sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))


def fresh_schema(dialect: str) -> str:
    """The whole schema as it stands now, which the migrations must add up to."""
    return schema_for(dialect, files("tidegate.store").joinpath("schema.sql").read_text("utf-8"))


def migration_text(dialect: str, name: str, version: int) -> str:
    text = files("tidegate.store").joinpath("migrations", name).read_text("utf-8")
    prelude = _POSTGRES_NOW if dialect == "postgresql" and version == 1 else ""
    stamp = (
        f"insert into meta (name, value) values ('schema_version', '{version}') "  # noqa: S608 - a number of our own
        "on conflict (name) do update set value = excluded.value;"
    )
    return f"{prelude}{schema_for(dialect, text)}\n{stamp}"


_POSTGRES_NOW = """
create or replace function now_ms() returns bigint language sql volatile parallel safe
as 'select cast(extract(epoch from clock_timestamp()) * 1000 as bigint)';
"""
