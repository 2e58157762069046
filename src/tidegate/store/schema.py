"""The schema's numbered steps: their texts, their checksums, and the stamps by which a database says which of them it has.

A step that has run somewhere is never edited. Each step stamps its number and a checksum of what it does into `meta`, so a program
whose steps say something else than those that ran is told so instead of meeting a table that is not as it expects.
"""

import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from tidegate.store.driver import Migration
from tidegate.store.queries import schema_for

STAMPS = "select name, value from meta where name = 'schema_version' or name like 'migration_%'"

# Functions are PostgreSQL's alone: in SQLite a connection brings its own.
_POSTGRES_PRELUDES = {
    1: """
create or replace function now_ms() returns bigint language sql volatile parallel safe
as 'select cast(extract(epoch from clock_timestamp()) * 1000 as bigint)';
""",
    12: """
create or replace function wall_ms() returns bigint language sql volatile parallel safe
as 'select cast(extract(epoch from clock_timestamp()) * 1000 as bigint)';
create or replace function now_ms() returns bigint language sql volatile parallel safe as 'select wall_ms()';
create or replace function assert_clock() returns void language plpgsql as $$
declare age_ms bigint;
begin
    select now_ms() - ticked_at into age_ms from clock where id = 1;
    if age_ms < 0 or age_ms > 3000 then
        raise exception 'the clock of the database was set, or nobody looked at it for a while' using errcode = 'TG001';
    end if;
end $$;
""",
}


def migrations() -> list[str]:
    """The numbered migrations, in order."""
    folder = files("tidegate.store").joinpath("migrations")
    return sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))


def fresh_schema(dialect: str) -> str:
    """The whole schema as it stands now, which the migrations must add up to."""
    return schema_for(dialect, files("tidegate.store").joinpath("schema.sql").read_text("utf-8"))


def migration_steps(dialect: str) -> list[Migration]:
    """Every step in this dialect, in order."""
    return [Migration(int(name[:4]), _text(dialect, name)) for name in migrations()]


@cache
def checksums() -> Mapping[str, str]:
    """The checksum of each step by the name of its stamp. Comments and spaces do not count: they change no database."""
    return {f"migration_{name[:4]}": _checksum(_source(name)) for name in migrations()}


def version_of(stamps: Mapping[str, str]) -> int:
    """The step that a database with these stamps stands at; 0 when it is empty."""
    return int(stamps.get("schema_version", 0))


def edited_steps(stamps: Mapping[str, str]) -> list[str]:
    """The steps that said something else when they ran on a database with these stamps."""
    return sorted(name for name, checksum in checksums().items() if stamps.get(name, checksum) != checksum)


def _source(name: str) -> str:
    return files("tidegate.store").joinpath("migrations", name).read_text("utf-8")


def _checksum(text: str) -> str:
    bare = re.sub(r"--[^\n]*", "", text)
    return hashlib.sha256(" ".join(bare.split()).encode()).hexdigest()


def _text(dialect: str, name: str) -> str:
    """The step, then its stamps. A database from before there were checksums gets those of its earlier steps with its next one."""
    version = int(name[:4])
    prelude = _POSTGRES_PRELUDES.get(version, "") if dialect == "postgresql" else ""
    done = [(stamp, checksum) for stamp, checksum in checksums().items() if stamp <= f"migration_{name[:4]}"]
    known = "".join(
        f"insert into meta (name, value) values ('{stamp}', '{checksum}') on conflict (name) do nothing;\n"  # noqa: S608 - names and digests of our own
        for stamp, checksum in done
    )
    number = (
        f"insert into meta (name, value) values ('schema_version', '{version}') "  # noqa: S608 - a number of our own
        "on conflict (name) do update set value = excluded.value;"
    )
    return f"{prelude}{schema_for(dialect, _source(name))}\n{known}{number}"
