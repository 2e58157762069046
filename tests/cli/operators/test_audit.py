"""`tidegate audit`: the chain is checked beside a running server and without one, and entries are exported."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

from tests.cli.conftest import Desk, Serving
from tests.contracts.test_store_audit import GUARDS
from tidegate.store.database.schema import StoreSchema, current_schema


def change(path: Path, sql: str) -> None:
    """Do to the database what no command does, without the triggers that keep the audit."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for name in GUARDS:
            connection.execute(f"drop trigger if exists {name}")
        connection.execute(sql)
        connection.commit()


def test_a_check_names_the_entry_that_was_altered_or_removed(desk: Desk) -> None:
    for name in ("a", "b", "c"):
        desk.done("keys", "create", "--org", name)
    Serving(desk)
    desk.done("keys", "create", "--org", "d")
    whole = desk.done("audit", "verify").stdout().splitlines()
    assert whole[0].split() == ["whole", "4", "entries"]
    last = whole[1].split()[1]
    entries = [json.loads(line) for line in desk.done("audit", "export").stdout().splitlines()]
    assert [(one["number"], one["action"]) for one in entries] == [(number, "key.create") for number in range(1, 5)]
    assert last == f"4:{entries[-1]['hash']}"
    assert [one["previous_hash"] for one in entries[1:]] == [one["hash"] for one in entries[:-1]]
    assert len(desk.done("audit", "export", "--after", "3").stdout().splitlines()) == 1
    desk.done("audit", "verify", "--expect", last)
    wrong = f"4:{'0' * 64}"
    assert "entry 4" in desk.done("audit", "verify", "--expect", wrong, code=1).stdout()
    assert "64 hexadecimal digits" in desk.done("audit", "verify", "--expect", "4", code=2).stderr()

    database = desk.here / ".tidegate/tidegate.db"
    change(database, "update audit set actor = 'unknown' where number = 2")
    assert f"entry 2 ({entries[1]['id']}) was altered" in desk.done("audit", "verify", code=1).stdout()
    change(database, "delete from audit where number = 3")
    report = desk.json_of("audit", "verify", "--json", code=1)
    assert [(one["kind"], one["number"]) for one in report["findings"]] == [("altered", 2), ("removed", 3)]
    assert (report["whole"], report["entries"], report["last_number"]) == (False, 3, 4)


def test_entries_of_the_first_schema_are_chained_when_a_store_is_brought_to_this_one(desk: Desk) -> None:
    first = StoreSchema("", current_schema().steps[:1])
    database = desk.here / ".tidegate/tidegate.db"
    database.parent.mkdir()
    (step,) = StoreSchema(first.steps[0].text, first.steps).missing("sqlite", {})
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.executescript(step.text)
        connection.executemany(
            "insert into audit (id, happened_at, actor, action, kind, target) values (?, ?, 'operator', 'key.create', 'key', 'k')",
            [(f"aud_{number}", 1_700_000_000_000 - number) for number in range(1_500)],
        )
        connection.commit()
    desk.done("migrate")
    assert desk.done("audit", "verify").stdout().split()[:3] == ["whole", "1,500", "entries"]
    entries = [json.loads(line) for line in desk.done("audit", "export").stdout().splitlines()]
    assert [entries[0]["id"], entries[-1]["id"]] == ["aud_1499", "aud_0"]
