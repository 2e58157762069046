"""Every statement that changes rows says what it names them by, and a statement that takes an unknown name is noticed."""

from __future__ import annotations

import re

import pytest

from tests.contracts.store_world import StoreHandClock
from tests.contracts.unknown_names import NAMES, UnknownNamesDriver
from tests.support.store_verbs import run_statement
from tidegate.store.database import queries
from tidegate.store.database.queries import Statement, statements
from tidegate.store.store import Store

pytestmark = pytest.mark.anyio

# These change all rows that are in some state, or the one row that there is.
NAMELESS = {
    "audit_chain_extend",
    "audit_chain_shorten",
    "audit_prune",
    "clock_move_attempts",
    "clock_move_budget",
    "clock_move_slices",
    "clock_move_workers",
    "clock_set",
    "clock_tick",
    "every_model_wake",
    "every_slice_wake",
    "flows_refresh",
    "key_flows_wake",
    "usage_writers_prune",
}


def changes_rows(statement: Statement) -> bool:
    return re.search(r"(^|\)\s*)(update|delete)\b", statement.sql) is not None


def test_every_statement_that_changes_rows_names_them() -> None:
    changing = {name for name, statement in statements().items() if changes_rows(statement)}
    assert changing - NAMES.keys() == NAMELESS
    for statement, names in NAMES.items():
        assert set(names) <= set(statements()[statement].parameters), statement


async def test_a_statement_that_looks_past_a_name_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(UnknownNamesDriver(None, StoreHandClock()))
    await store.migrate()
    await run_statement(store, "tenant_put", id="t1", name="acme")
    assert await run_statement(store, "tenant_lock", tenant_id="t1")
    forgetful = queries.Statement("tenant_lock", "", "select id from tenants", ("tenant_id",), (), False, False)
    monkeypatch.setitem(statements(), "tenant_lock", forgetful)
    with pytest.raises(AssertionError, match="tenant_lock looks past its tenant_id"):
        await run_statement(store, "tenant_lock", tenant_id="t1")
    await store.close()
