"""The schema and its numbered steps, and the stamps in `meta` that say which steps a database has.

An empty database gets `schema.sql`. `migrations/` brings databases of earlier versions to it, step
by step. A released step is never edited. Each version leaves a checksum in `meta`, so that a
program notices if its text is not the one that ran.

A program runs on each schema whose `compatible_from` is at most the program's own version. So two
versions can work side by side, after a step that allows it.
"""

import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import msgspec

from tidegate.core.errors import StoreRefused
from tidegate.store.database.driver import Migration
from tidegate.store.database.queries import schema_for

STAMPS = "select name, value from meta where name in ('schema_version', 'compatible_from') or name like 'checksum_%'"

_COMPATIBLE_FROM = re.compile(r"^-- compatible_from: (\d+)$", re.MULTILINE)


class Step(msgspec.Struct, frozen=True):
    """The change of one version. The text of the first version is its whole schema."""

    version: int
    text: str

    @property
    def compatible_from(self) -> int:
        """Return the oldest version whose program can work after this step."""
        found = _COMPATIBLE_FROM.search(self.text)
        if found is None:
            raise ValueError(f"step {self.version} does not say `-- compatible_from: N`")
        return int(found.group(1))

    @property
    def stamp(self) -> str:
        return f"checksum_{self.version:04}"

    @property
    def checksum(self) -> str:
        """Return the checksum of the text without comments and spaces, which change no database."""
        return _checksum(self.text)


@cache
def _checksum(text: str) -> str:
    # Cached, because each start needs the checksum of each step, and that of the first three times.
    bare = re.sub(r"--[^\n]*", "", text)
    return hashlib.sha256(" ".join(bare.split()).encode()).hexdigest()


class StoreSchema(msgspec.Struct, frozen=True):
    """The schema that a program knows: the whole of it, and each version since the first."""

    fresh: str
    steps: tuple[Step, ...]

    @property
    def version(self) -> int:
        return self.steps[-1].version

    def missing(self, dialect: str, stamps: Mapping[str, str]) -> list[Migration]:
        """Return the migrations that bring a database with these stamps to this version.

        Refuse a database that this program cannot work with.
        """
        self._refuse_foreign(stamps)
        present = version_of(stamps)
        if present == 0:
            return [Migration(self.version, f"{schema_for(dialect, self.fresh)}\n{_stamping(self.steps)}")]
        return [
            Migration(step.version, f"{schema_for(dialect, step.text)}\n{_stamping((step,))}")
            for step in self.steps
            if step.version > present
        ]

    def require(self, stamps: Mapping[str, str]) -> None:
        """Refuse a database that is older than this program, or that this program cannot work
        with."""
        self._refuse_foreign(stamps)
        present = version_of(stamps)
        if present == 0:
            raise StoreRefused("The store is empty. Run `tidegate migrate`, or start a process that may write to it.")
        if present < self.version:
            raise StoreRefused(
                f"The store has schema version {present} and this program needs {self.version}. Run `tidegate migrate` with this program."
            )

    def _refuse_foreign(self, stamps: Mapping[str, str]) -> None:
        if not stamps:
            return
        first = self.steps[0]
        if "compatible_from" not in stamps or stamps.get(first.stamp) != first.checksum:
            raise StoreRefused(
                "The store was made by a version of Tidegate from before the first release, which cannot be migrated. "
                "Let its batches end and fetch their results with the program that made it. Then give this program an empty store: "
                "another --data directory, or another PostgreSQL database in store.url."
            )
        compatible_from = int(stamps["compatible_from"])
        if self.version < compatible_from:
            raise StoreRefused(
                f"The store has schema version {version_of(stamps)}, which needs a program of schema version {compatible_from} or later; "
                f"this program has {self.version}. Run the newer tidegate that migrated the store."
            )
        edited = [step.stamp for step in self.steps if stamps.get(step.stamp, step.checksum) != step.checksum]
        if edited:
            raise StoreRefused(
                f"{', '.join(edited)} in `meta` is not the checksum of this program's migration: its text was edited after it ran here. "
                "Run the program that migrated this store, or restore the edited files."
            )


@cache
def current_schema() -> StoreSchema:
    """Return this program's schema."""
    folder = files("tidegate.store")
    fresh = folder.joinpath("schema.sql").read_text("utf-8")
    pages = sorted(
        (page for page in folder.joinpath("migrations").iterdir() if page.name.endswith(".sql")),
        key=lambda page: page.name,
    )
    steps = [Step(int(page.name[:4]), page.read_text("utf-8")) for page in pages]
    return StoreSchema(fresh, tuple(steps))


def version_of(stamps: Mapping[str, str]) -> int:
    """Return the schema version of a database with these stamps; 0 if it is empty."""
    return int(stamps.get("schema_version", 0))


def _stamping(steps: tuple[Step, ...]) -> str:
    """Return the statements that stamp these steps.

    The last one gives the version of the database.
    """
    stamps = {step.stamp: step.checksum for step in steps}
    stamps |= {"schema_version": str(steps[-1].version), "compatible_from": str(steps[-1].compatible_from)}
    return "".join(
        f"insert into meta (name, value) values ('{name}', '{value}') on conflict (name) do update set value = excluded.value;\n"  # noqa: S608 - names and numbers of our own
        for name, value in stamps.items()
    )
