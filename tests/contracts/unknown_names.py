"""A store of SQLite that tries every statement before it runs: with an unknown name in the place of any one of its names, it must find and
change nothing. So no statement reaches a row that its caller did not name, whatever a test itself looks at.

A name is a parameter that rows must match. Two more kinds are tried: a bound of rows is tried with none, and a time for which things are
kept is tried with one that nothing has been kept for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import apsw

from tidegate.store.database.driver import Row, TransactionBody
from tidegate.store.database.queries import statements
from tidegate.store.database.sqlite import SqliteDriver, SqliteTx

T = TypeVar("T")

# Of many rows that one statement is run for, so many are tried.
ROWS_MAX = 2
LONG = 10**9

NAMES_OF = """
attempt_lost_alone: job_id number
attempts_forget: job_id
attempts_waiting: job_id
audit_cursor: id
audit_entries: count_max
audit_list: actor action target count_max
audit_number: id
audit_oldest: count_max
audit_unchained: count_max
awake_models: count_max
blob_condemn: id
blob_condemn_upload: id
blob_extend: id
blob_files: id count_max
blob_forget: id
blob_get: id
blob_hold: id
blob_keep: id
blob_lend: id
blob_recorded_to: id
blob_release: id
blob_settle: id
blob_share: id
blob_use: id
blobs_abandoned: count_max
blobs_condemn_unused: count_max
blobs_condemned: count_max
blobs_page: count_max
budget_write: id
budgets_prune: count_max idle_ms
deliveries_page: state org count_max
delivery_of_anyone: event_id endpoint_id
discovered_prune: keep_ms
due_work: count_max
extent_blobs: file_id
extent_delete: file_id
extent_grow: file_id blob_id
extent_list: file_id count_max
extents_share: file_id
file_any: id
file_cursor: tenant_id id
file_delete: tenant_id id
file_drop: id
file_get: tenant_id id
file_get_growing: tenant_id id
file_hide: id
file_is_shown: id
file_list_asc: tenant_id purpose count_max
file_list_desc: tenant_id purpose count_max
file_lock: id
file_needed: id
file_owner: id
file_show: id
file_used: id
files_expired: count_max
files_prune: count_max keep_ms
fleet_report_forget: keep_ms
fleet_report_learned: worker_id count_max
fleet_report_list: count_max
fleet_report_others: count_max
flow_charge: model share_owner
flow_hold: model share_owner
flow_sleep: model share_owner
flow_wake: model share_owner
flow_weigh: model share_owner
flows_backlog: model flows_max
flows_forget: keep_ms
flows_page: count_max
flows_rested: count_max
flows_shown: model count_max
idempotency_forget: tenant_id route key keep_ms
idempotency_get: tenant_id route key
idempotency_prune: count_max keep_ms
idempotency_take_back: tenant_id route key object_id
ingest_candidates: tenant_id count_max
ingest_clock_set: lane
ingest_give_back: worker_id token
ingest_more: id
ingest_places_forget: lane
ingest_source: id
ingest_take: worker_id id
ingest_taken: worker_id token
ingest_tenants: tenants_max
job_abandon: tenant_id id
job_add: id
job_add_unused: id
job_any: id
job_attempts: job_id
job_begin: job_id
job_canary_begin: id
job_canary_put: id
job_canary_set: id
job_cancel_running: tenant_id id
job_cancel_waiting: tenant_id id
job_change: id
job_close: id
job_cursor: tenant_id id
job_delete_response: tenant_id id
job_drop_step: id token
job_end_unstarted: id
job_event_counts_forget: job_id
job_events_count: job_id
job_events_forget: job_id
job_events_page: job_id count_max
job_events_recorded: job_id
job_events_total: job_id
job_expire: id
job_explain_inputs: job_id
job_fail_asked: id
job_fail_open: id
job_flows: job_id
job_flows_wake: job_id
job_forget: job_id
job_get: tenant_id id
job_halt: id
job_inputs_forget: job_id
job_leased_spans: job_id
job_list: tenant_id endpoint count_max
job_list_newer: tenant_id endpoint count_max
job_lock: id
job_merged_none: id
job_models_begun: job_id
job_models_change: job_id
job_models_close: job_id
job_models_done: job_id model
job_models_forget: job_id
job_models_hold: job_id
job_models_leased: job_id model
job_models_named: job_id
job_models_rest: job_id model
job_models_resume: job_id
job_models_spent: model share_owner
job_models_wake: job_id
job_of_anyone: id
job_of_lease: job_id
job_open_for_lease: job_id
job_open_to_begin: job_id
job_pause: tenant_id id
job_place: id
job_place_put: job_id
job_publish: id token
job_refuse: id token
job_resume: tenant_id id
job_retried: id
job_retry_finalization: id
job_retry_put: id
job_search: tenant_id model count_max
job_set_parts: id
job_slices_wake: job_id
job_start: id token
job_steps_wake: job_id
job_stop: id
job_take_step: worker_id id state
job_turns_interactive: id
jobs_by_cost_ended: count_max
jobs_by_cost_open: tenant_id count_max
jobs_by_deadline: tenant_id count_max
jobs_by_failed_ended: count_max
jobs_by_failed_open: tenant_id count_max
jobs_by_size: tenant_id count_max
jobs_closing_unstarted: count_max
jobs_cursor: id
jobs_deleted: count_max
jobs_draining: count_max
jobs_ended_before: count_max keep_ms
jobs_matching_few: tenant_id few_max
jobs_overdue: count_max
jobs_search: tenant_id count_max
jobs_search_ended: status tenant_id count_max
jobs_search_open: tenant_id count_max
jobs_to_publish: count_max
jobs_waiting_ingest: count_max
jobs_waiting_long: count_max
key_change: id
key_cursor: id
key_delete: id
key_get: id
key_list: count_max
key_models_wake: key_id
key_page: org count_max
key_revoke: id
key_rotate: id
key_slices_wake: key_id
key_states: worker_id
key_used: id
keys_delete_of: org
list_places_prune: count_max keep_ms
look_at_batch: target
look_at_deployment: target
look_at_drain_state: target
look_at_file: target
look_at_input: target
look_at_key: target
look_at_model: target
look_at_operation: target
look_at_org: target
look_at_resource: target
look_at_scheduler: target
mode_override_get: name
mode_override_lock: name
operation_advance: id worker_id
operation_cancel: id
operation_cursor: id
operation_end: id worker_id
operation_get: id
operation_jobs_ended: count_max
operation_jobs_open: count_max
operation_page: count_max
operation_take: id
operations_prune: keep_ms
org_cursor: id
org_page: count_max
outcome_move: job_id number
outcome_place: job_id
outcome_sizes: job_id
outcomes_forget: job_id
outcomes_of_span: job_id
outcomes_page: job_id count_max
outcomes_within: job_id
outlook_job: job_id
overview_models: count_max
overview_stuck: count_max
rates_forget: keep_minutes
rates_recent: model
routing_drop: kind name
routing_one: kind name
routing_wanted: model
runs_of_file: file_id count_max
session_ended: nonce
sessions_prune: keep_ms
slice_attempts: job_id
slice_blame: job_id first
slice_drop: job_id first
slice_finish: job_id first token
slice_get: job_id first
slice_of_item: job_id
slice_outcomes: job_id
slice_release: job_id first token
slice_shorten: job_id first token
slice_tokens: job_id token
slices_drop_job: job_id
slices_hold_back: job_id
slices_lease: job_id model worker_id count_max
slices_let_go: job_id forever
slices_of_span: job_id
slices_of_token: job_id token worker_id
slices_reclaim: worker_id
slices_stranded: count_max
slices_unfinished: job_id
slots_prune: count_max
snapshot_due: model due_max
snapshot_flows: model flows_max
snapshot_oldest: model share_owner jobs_max
snapshot_smallest: model share_owner jobs_max
tenant_by_name: name
tenant_lock: tenant_id
tenant_name: id
unleased_models: count_max
upload_cancel: tenant_id id
upload_complete: tenant_id id
upload_expire: id
upload_get: tenant_id id
upload_part_get: id
upload_part_list: upload_id
upload_parts_delete: upload_id
uploads_overdue: count_max
uploads_prune: keep_ms
usage_add: job_id
usage_by_day: count_max
usage_by_job: count_max
webhook_delivered: event_id endpoint_id token
webhook_delivered_forget: event_id endpoint_id
webhook_deliveries_delete: endpoint_id tenant_id count_max
webhook_deliveries_drop: job_id count_max
webhook_deliveries_fail_rest: endpoint_id count_max
webhook_deliveries_forget: job_id count_max
webhook_deliveries_lease: tenant_id endpoint_id worker_id count_max
webhook_deliveries_leased: token
webhook_delivery_cursor: event_id endpoint_id
webhook_delivery_get: tenant_id event_id endpoint_id
webhook_delivery_list: tenant_id state count_max
webhook_delivery_replay: tenant_id event_id endpoint_id
webhook_endpoint_change: tenant_id id
webhook_endpoint_cursor: tenant_id id
webhook_endpoint_delete: tenant_id id
webhook_endpoint_disable: id
webhook_endpoint_failing: id
webhook_endpoint_forget: job_id
webhook_endpoint_get: tenant_id id
webhook_endpoint_list: tenant_id count_max
webhook_endpoint_lock: id
webhook_endpoint_of_job: tenant_id job_id
webhook_endpoint_place_put: tenant_id id
webhook_endpoint_recovered: id
webhook_endpoints_due: tenant_id count_max
webhook_events_put: job_id
webhook_failed: event_id endpoint_id token
webhook_item_event_put: job_id
webhook_jobs_gone: count_max keep_ms
webhook_postponed: event_id endpoint_id token
webhook_responses_wanted: tenant_id
webhook_secret_rotate: tenant_id id
webhook_tenants_due: count_max
webhook_wanted_of_job: job_id
worker_alive: id
worker_beat: id
worker_gone: id
worker_leases: id
worker_ran_alone: id
worker_report: id
worker_reports: count_max
worker_runs_alone: id
workers_list: count_max
workers_overdue: count_max
workers_prune: keep_ms
"""
NAMES = {
    statement: names.split() for statement, _, names in (line.partition(": ") for line in NAMES_OF.strip().split("\n"))
}


class UnknownNamesDriver(SqliteDriver):
    """A driver whose transactions try unknown names."""

    async def write(self, body: TransactionBody[T]) -> T:
        return await super().write(lambda tx: body(UnknownNamesTx(tx)))

    async def free(self, body: TransactionBody[T]) -> T:
        return await super().free(lambda tx: body(UnknownNamesTx(tx)))

    async def read(self, body: TransactionBody[T]) -> T:
        return await super().read(lambda tx: body(UnknownNamesTx(tx)))


class UnknownNamesTx(SqliteTx):
    def __init__(self, tx: Any) -> None:
        super().__init__(tx._connection)

    async def all(self, query: str, /, **parameters: Any) -> list[Row]:
        try_unknown_names(self._connection, query, parameters)
        return await super().all(query, **parameters)

    async def one(self, query: str, /, **parameters: Any) -> Row | None:
        try_unknown_names(self._connection, query, parameters)
        return await super().one(query, **parameters)

    async def dicts(self, query: str, /, **parameters: Any) -> list[dict[str, Any]]:
        try_unknown_names(self._connection, query, parameters)
        return await super().dicts(query, **parameters)

    async def many(self, query: str, rows: Iterable[Sequence[Any]]) -> None:
        every = list(rows)
        self._try_rows(query, every)
        await super().many(query, every)

    async def many_returning(self, query: str, rows: Sequence[Sequence[Any]]) -> list[Row]:
        self._try_rows(query, rows)
        return await super().many_returning(query, rows)

    async def for_each(self, query: str, given: Mapping[str, Sequence[str]], /, **shared: Any) -> list[Row]:
        for values in list(zip(*given.values(), strict=True))[:ROWS_MAX]:
            try_unknown_names(self._connection, query, shared | dict(zip(given, values, strict=True)))
        return await super().for_each(query, given, **shared)

    def _try_rows(self, query: str, rows: Sequence[Sequence[Any]]) -> None:
        for row in rows[:ROWS_MAX]:
            try_unknown_names(self._connection, query, dict(zip(statements()[query].parameters, row, strict=True)))


def try_unknown_names(connection: apsw.Connection, query: str, parameters: Mapping[str, Any]) -> None:
    for name in NAMES.get(query, ()):
        unknown = unknown_name_of(name, parameters[name])
        if unknown is None:
            continue
        connection.execute("savepoint unknown_name")
        try:
            before = connection.total_changes()
            found = connection.execute(statements()[query].sql, {**parameters, name: unknown}).fetchall()
            changed = connection.total_changes() - before
        finally:
            connection.execute("rollback to unknown_name")
            connection.execute("release unknown_name")
        assert (found, changed) == ([], 0), f"{query} looks past its {name}"


def unknown_name_of(name: str, value: str | int | None) -> str | int | None:
    """Return what names no row; None where nothing was named."""
    if isinstance(value, str):
        return value + "~"
    if value is None:
        return None
    return 0 if name.endswith("_max") else value + LONG
