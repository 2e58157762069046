"""The SQL text, the schema and the tables of legal moves say the same, and every statement is used and understood."""

from __future__ import annotations

import ast
import re
from enum import StrEnum
from pathlib import Path

import apsw
import asyncpg
import pytest

import tidegate.store
from tidegate.core.states import (
    BLOB_MOVES,
    DELIVERY_MOVES,
    FILE_MOVES,
    FLOW_MOVES,
    JOB_MODEL_MOVES,
    JOB_MOVES,
    OPERATION_MOVES,
    SLICE_MOVES,
    UPLOAD_MOVES,
    WORKER_MOVES,
    BlobState,
    DeliveryState,
    FileState,
    FlowState,
    JobModelState,
    JobState,
    OperationState,
    Outcome,
    SliceState,
    UploadState,
    WorkerState,
)
from tidegate.store.database.queries import Statement, for_each_on_postgres, for_postgres, statements
from tidegate.store.database.schema import current_schema
from tidegate.store.store import Store

STATES: dict[str, type[StrEnum]] = {
    "jobs": JobState,
    "slices": SliceState,
    "files": FileState,
    "blobs": BlobState,
    "workers": WorkerState,
    "flows": FlowState,
    "job_models": JobModelState,
    "webhook_deliveries": DeliveryState,
    "uploads": UploadState,
    "operations": OperationState,
}
MOVES = {
    (table, source.value, target.value)
    for table, moves in {
        "jobs": JOB_MOVES,
        "slices": SLICE_MOVES,
        "files": FILE_MOVES,
        "blobs": BLOB_MOVES,
        "workers": WORKER_MOVES,
        "flows": FLOW_MOVES,
        "job_models": JOB_MODEL_MOVES,
        "webhook_deliveries": DELIVERY_MOVES,
        "uploads": UPLOAD_MOVES,
        "operations": OPERATION_MOVES,
    }.items()
    for source, targets in moves.items()  # type: ignore[attr-defined]
    for target in targets
}
EVERY = sorted(statements().values(), key=lambda statement: statement.name)
CHANGES = re.compile(r"(?:with .*? ?\) )?update (\w+) set (.*?) (?:from (?:picked|moment) )?where (.*)")
LOCKS = re.compile(r"/\*!.*?\*/", re.DOTALL)
SETS_STATE = re.compile(r"(?:^|, )state = (.*)")


def changed(statement: Statement) -> tuple[str, str, str] | None:
    """The table that a statement updates, what it sets and under which condition."""
    match = CHANGES.fullmatch(" ".join(LOCKS.sub("", statement.sql).split()))
    return (match[1], match[2], match[3]) if match else None


def test_every_update_can_be_read_by_this_test() -> None:
    updates = {one.name for one in EVERY if re.search(r"(?<!do )\bupdate\b", LOCKS.sub("", one.sql))}
    assert updates == {one.name for one in EVERY if changed(one)}


def test_every_stated_move_is_legal_and_every_legal_move_is_made() -> None:
    stated = {move for statement in EVERY for move in statement.moves}
    assert stated == MOVES


def move_faults(statement: Statement) -> list[str]:
    """What is wrong between the moves that a statement's header tells and those that it makes."""
    found = changed(statement)
    set_to = SETS_STATE.search(found[1]) if found else None
    if (set_to is not None) != bool(statement.moves):
        return ["a move without a header, or a header without a move"]
    if found is None or set_to is None:
        return []
    table, sets, where = found
    states = {state.value for state in STATES[table]}
    sources = set(re.findall(r"'(\w+)'", "".join(re.findall(r"\bstate (?:= '\w+'|in \([^)]*\))", where)))) & states
    text = set_to.group(1)
    if text.startswith("'"):
        targets = set(re.findall(r"^'(\w+)'", text))
    elif text.startswith("closing"):
        targets = set(re.findall(r"closing = '(\w+)'", sets))
    else:
        targets = set(re.findall(r"then '(\w+)' else state end", text))
    holds = {
        "its header names another table": {move[0] for move in statement.moves} == {table},
        "the guard does not stand in the statement": sources >= {source for _, source, _ in statement.moves},
        f"it moves to {targets}": targets == {target for _, _, target in statement.moves},
    }
    return [fault for fault, is_right in holds.items() if not is_right]


def test_a_statement_makes_the_moves_that_its_header_tells() -> None:
    assert {one.name: faults for one in EVERY if (faults := move_faults(one))} == {}


def test_no_statement_writes_a_state_that_does_not_exist() -> None:
    known = {state.value for enum in STATES.values() for state in enum} | {outcome.value for outcome in Outcome}
    for statement in EVERY:
        for words in re.findall(
            r"\b(?:state|closing|outcome) (?:=|<>|in) \(?('[^)\n]*?')\)?(?=[\s,;)]|$)", statement.sql
        ):
            assert set(re.findall(r"'(\w+)'", words)) <= known, statement.name


def test_the_schema_checks_exactly_the_states_there_are() -> None:
    schema = current_schema().fresh
    tables = dict(re.findall(r"create table (\w+) \((.*?)\n\)", schema, re.DOTALL))
    for table, enum in STATES.items():
        found = re.search(r"check \(\s*state in \(([^)]*)\)", tables[table])
        assert found, f"{table} has no check on its state"
        assert set(re.findall(r"'(\w+)'", found.group(1))) == {state.value for state in enum}
    outcome = re.search(r"check \(outcome in \(([^)]*)\)", tables["outcomes"])
    closing = re.search(r"check \(closing in \(([^)]*)\)", tables["jobs"])
    assert outcome
    assert closing
    assert set(re.findall(r"'(\w+)'", outcome.group(1))) == {state.value for state in Outcome}
    ends = {state.value for state, moves in JOB_MOVES.items() if not moves}
    assert set(re.findall(r"'(\w+)'", closing.group(1))) == ends


def store_modules() -> list[tuple[str, ast.Module]]:
    folder = Path(tidegate.store.__file__).parent
    return [(path.name, ast.parse(path.read_text())) for path in sorted(folder.rglob("*.py"))]


def test_every_statement_is_used_and_every_used_one_exists() -> None:
    used: set[str] = set()
    for name, tree in store_modules():
        for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
            method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if method not in ("all", "one", "dicts", "many", "many_returning", "for_each", "_ids") or not call.args:
                continue
            first = call.args[0]
            if isinstance(first, ast.Constant):
                assert first.value in statements(), f"{name} asks for {first.value!r}"
                used.add(str(first.value))
            elif isinstance(first, ast.IfExp):
                used |= {str(one.value) for one in (first.body, first.orelse) if isinstance(one, ast.Constant)}
            elif isinstance(first, ast.JoinedStr):
                assert isinstance(first.values[0], ast.Constant)
                used |= {known for known in statements() if known.startswith(str(first.values[0].value))}
        used |= {
            str(element.value)
            for loop in ast.walk(tree)
            if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Tuple)
            for element in loop.iter.elts
            if isinstance(element, ast.Constant) and element.value in statements()
        }
    assert used == set(statements())


def test_every_verb_of_the_store_is_in_its_behaviour_suite() -> None:
    folder = Path(__file__).parents[2]
    suite = "".join(
        path.read_text() for path in [*folder.glob("contracts/*store_*.py"), *folder.glob("store/**/test_*.py")]
    )
    verbs = {name for name in dir(Store) if not name.startswith("_")}
    assert {"lease_picks", "record_outcomes", "publish_job"} <= verbs
    assert {verb for verb in verbs if not re.search(rf"\.{verb}\b", suite)} == set()


@pytest.fixture(scope="module")
def fresh() -> apsw.Connection:
    """An empty embedded store."""
    connection = apsw.Connection(":memory:")
    connection.create_scalar_function("now_ms", lambda *_: 0, 0)
    connection.create_scalar_function("wall_ms", lambda *_: 0, 0)
    for step in current_schema().missing("sqlite", {}):
        connection.execute(step.text)
    return connection


def test_every_statement_prepares_on_sqlite(fresh: apsw.Connection) -> None:
    for statement in EVERY:
        fresh.execute(f"explain {statement.sql}", dict.fromkeys(statement.parameters, 0)).fetchall()


@pytest.mark.anyio
async def test_every_statement_prepares_on_postgresql(postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    for step in current_schema().missing("postgresql", {}):
        await connection.execute(step.text)
    for statement in EVERY:
        prepared = await connection.prepare(for_postgres(statement))
        assert len(prepared.get_parameters()) == len(statement.parameters), statement.name
    await connection.close()


def test_a_parameter_is_found_where_it_is_and_nowhere_else() -> None:
    assert statements()["slice_release"].parameters == ("delay_ms", "job_id", "first", "token")
    assert "sha256" in statements()["file_put"].parameters
    for statement in EVERY:
        assert "/*!" not in for_postgres(statement)
        assert not re.search(r"(?<!:):[a-z]", for_postgres(statement)), statement.name


# What every decision of every worker reads: each list is the beginning of an index, however much is queued.
LOOKS = ("snapshot_flows", "snapshot_oldest", "snapshot_smallest", "snapshot_due")


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_of_the_scheduler_sorts_and_scans_nothing_on_sqlite(name: str) -> None:
    connection = apsw.Connection(":memory:")
    for step in current_schema().missing("sqlite", {}):
        connection.execute(step.text)
    rows = connection.execute(
        f"explain query plan {statements()[name].sql}", dict.fromkeys(statements()[name].parameters, 0)
    )
    steps = [row[3] for row in rows]
    assert [step for step in steps if "USING" in step]
    # Only the few rows that a limit let through may be read as they are.
    assert [step for step in steps if "TEMP B-TREE" in step or (step.startswith("SCAN") and step != "SCAN due")] == []


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_of_the_scheduler_joins_no_table(name: str) -> None:
    """Plans whose costs differ by a percent are equal to PostgreSQL, and beside a costly condition that is a scan of all flows."""
    assert not re.search(r"\bjoin\b", statements()[name].sql)


@pytest.mark.anyio
async def test_a_look_of_the_scheduler_sorts_and_scans_nothing_on_postgresql(postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    for step in current_schema().missing("postgresql", {}):
        await connection.execute(step.text)
    # Tables are empty here, and no planner needs an index for those: so what is left of scans are those without an index to use.
    await connection.execute(
        "set enable_seqscan = off; set enable_bitmapscan = off; set plan_cache_mode = force_generic_plan"
    )
    for name in LOOKS:
        statement = statements()[name]
        given = tuple(one for one in ("model", "share_owner") if one in statement.parameters)
        sql, shared = for_each_on_postgres(statement, given)
        await connection.execute(f"prepare look as {sql}")
        values = ", ".join([*["array['a']"] * len(given), *["1"] * len(shared)])
        plan = "\n".join(row[0] for row in await connection.fetch(f"explain execute look ({values})"))
        await connection.execute("deallocate look")
        assert "Index" in plan
        assert not re.search(r"Seq Scan on|Hash Join|Merge Join", plan), f"{name}\n{plan}"
        sorts = [line.strip() for line in plan.splitlines() if "Sort Key" in line]
        assert sorts in ([], ["Sort Key: given.given_at"]), f"{name}\n{plan}"
    await connection.close()


# What is queued for one endpoint is read in the order of an index; tenants and endpoints themselves are sorted, one row each.
DELIVERIES = {
    "webhook_tenants_due": ("webhook_deliveries_turn", ["USE TEMP B-TREE FOR ORDER BY"]),
    "webhook_endpoints_due": ("webhook_deliveries_endpoint_turn", ["USE TEMP B-TREE FOR ORDER BY"]),
    "webhook_deliveries_lease": ("webhook_deliveries_endpoint_turn", []),
}


@pytest.mark.parametrize("name", DELIVERIES)
def test_no_delivery_is_sorted_when_some_are_leased_on_sqlite(name: str) -> None:
    connection = apsw.Connection(":memory:")
    for step in current_schema().missing("sqlite", {}):
        connection.execute(step.text)
    connection.create_scalar_function("now_ms", lambda *_: 0, 0)
    statement = statements()[name]
    rows = connection.execute(f"explain query plan {statement.sql}", dict.fromkeys(statement.parameters, 0))
    steps = [row[3] for row in rows]
    index, sorted_steps = DELIVERIES[name]
    assert any(index in step for step in steps), steps
    assert [step for step in steps if "TEMP B-TREE" in step] == sorted_steps
    assert not [step for step in steps if step.startswith("SCAN") and step not in ("SCAN w", "SCAN ranked")]


@pytest.mark.anyio
async def test_no_delivery_is_sorted_when_some_are_leased_on_postgresql(postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    for step in current_schema().missing("postgresql", {}):
        await connection.execute(step.text)
    await connection.execute(
        "set enable_seqscan = off; set enable_bitmapscan = off; set plan_cache_mode = force_generic_plan"
    )
    values = {"tenant_max": "1", "count_max": "1", "worker_id": "'w'", "token": "'t'", "tenant_id": "'a'"}
    values |= {"endpoint_id": "'e'", "endpoint_max": "1"}
    for name, (index, _) in DELIVERIES.items():
        statement = statements()[name]
        await connection.execute(f"prepare look as {for_postgres(statement)}")
        given = ", ".join(values[one] for one in statement.parameters)
        plan = "\n".join(row[0] for row in await connection.fetch(f"explain execute look ({given})"))
        await connection.execute("deallocate look")
        assert index in plan
        sorts = [line.strip() for line in plan.splitlines() if "Sort Key" in line]
        assert all("out_count" in line or "first_due_at" in line or "SubPlan" in line for line in sorts), (
            f"{name}\n{plan}"
        )
        assert not re.search(r"Seq Scan on webhook_deliveries", plan), f"{name}\n{plan}"
    await connection.close()


def test_a_row_that_ends_some_time_after_its_creation_takes_both_moments_from_one_look_at_the_clock() -> None:
    twice = [
        name
        for name, statement in statements().items()
        if re.search(r"insert into|update ", statement.sql)
        and re.search(r"created_at\b.*\b(expires_at|updated_at)", statement.sql, re.DOTALL)
        and statement.sql.count("now_ms()") > 1
    ]
    assert twice == []


# Rows that stay for as long as jobs are kept; of each, the indexes that hold only what is open, waits or is to go.
KEPT = {
    "jobs": {"jobs_open", "jobs_to_ingest", "jobs_by_deadline", "jobs_deleted"},
    "job_models": {"job_models_due"},
    "slices": {"slices_leased", "slices_ready", "slices_suspect", "slices_out"},
    "outcomes": set[str](),
    "files": set[str](),
    "blobs": {"blobs_unused", "blobs_writing", "blobs_condemned"},
    "usage": set[str](),
}
# What counts everything, and is asked seldom.
COUNTS = {"census_jobs", "jobs_state_counts"}


def whole_scans(statement: Statement, plan: list[str]) -> list[str]:
    """The steps of a plan that read every row of a table that is kept."""
    found = []
    for step in plan:
        scan = re.fullmatch(r"SCAN (\w+)(?: USING (?:COVERING )?INDEX (\w+))?", step)
        if scan is None:
            continue
        named = re.search(rf"\b(?:from|join) (\w+) {scan[1]}\b", statement.sql)
        tables = {scan[1], named[1] if named else ""} & KEPT.keys()
        if not all(scan[2] in KEPT[table] for table in tables):
            found.append(step)
    return found


def test_no_statement_reads_every_row_that_is_kept_on_sqlite(fresh: apsw.Connection) -> None:
    scans: dict[str, list[str]] = {}
    for one in EVERY:
        if one.name not in COUNTS:
            rows = fresh.execute(f"explain query plan {one.sql}", dict.fromkeys(one.parameters, 0))
            scans[one.name] = whole_scans(one, [row[3] for row in rows])
    assert len(scans) > 400
    assert {name: steps for name, steps in scans.items() if steps} == {}


@pytest.mark.anyio
async def test_what_is_old_is_searched_by_time_on_postgresql(postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    for step in current_schema().missing("postgresql", {}):
        await connection.execute(step.text)
    await connection.execute("set enable_seqscan = off; set plan_cache_mode = force_generic_plan")
    aged = (
        "jobs_ended_before",
        "files_expired",
        "files_prune",
        "idempotency_prune",
        "webhook_jobs_gone",
    )
    for name in aged:
        await connection.execute(f"prepare look as {for_postgres(statements()[name])}")
        values = ", ".join(["null"] * len(statements()[name].parameters))
        plan = "\n".join(row[0] for row in await connection.fetch(f"explain execute look ({values})"))
        await connection.execute("deallocate look")
        # The moment is read once, before the search.
        assert re.search(r"Index Cond: .*InitPlan", plan), f"{name}\n{plan}"
    await connection.close()


def test_rows_to_lock_are_picked_apart() -> None:
    """As a condition of the update, PostgreSQL may look for them again for each row: then a limit bounds nothing."""
    locking = [one for one in statements().values() if "for update" in one.sql]
    writing = [one for one in locking if re.search(r"^(?:update|delete) ", one.sql, re.MULTILINE)]
    assert len(writing) == 5
    assert [one.name for one in writing if not one.sql.startswith("with ")] == []


# What PostgreSQL holds until a transaction ends, beside the rows that are written. An embedded store writes one transaction at a time.
HELD = {
    "blob_hold": "for update",
    "budgets_lock": "for update",
    "budgets_prune": "for update skip locked",
    "clock_lock_budgets": "for update",
    "file_lock": "for update",
    "flow_halt": "for update",
    "flow_hold": "for update skip locked",
    "job_halt": "for update",
    "job_lock": "for no key update",
    "job_open_for_lease": "for key share",
    "job_open_to_begin": "for no key update",
    "mode_override_lock": "for update",
    "slice_tokens": "for update",
    "slices_lease": "for update skip locked",
    "slices_reclaim": "for update skip locked",
    "slots_lock": "for update",
    "slots_prune": "for update of s skip locked",
    "tenant_lock": "for update",
    "webhook_deliveries_lease": "for update skip locked",
    "webhook_endpoint_lock": "for no key update",
    "webhook_events_put": "for key share of e",
}


def test_a_statement_holds_the_rows_that_it_is_known_to_hold() -> None:
    holds = re.compile(r"\bfor (?:no key update|update|key share)(?: of \w+)?(?: skip locked)?")
    found = {name: holds.findall(for_postgres(statement)) for name, statement in statements().items()}
    assert {name: clauses for name, clauses in found.items() if clauses} == {name: [one] for name, one in HELD.items()}
