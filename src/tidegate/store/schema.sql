-- The whole schema of Tidegate, for SQLite and PostgreSQL.
--
-- The road of a job:
--
-- 1. A caller's bytes become a blob and a file. A job names a file and starts as `validating`.
-- 2. Ingest cuts the job into slices and moves it to `in_progress`.
-- 3. A worker leases slices. Each finished item becomes one row in outcomes and a byte range in
--    extents.
-- 4. When no item is left, the job passes through `finalizing` and ends.
--
-- An item that waits has no row. One that is done has exactly one.
--
-- Order of locks inside a transaction: tenants, uploads, jobs (by id), slices, outcomes,
-- job_event_counts, blobs, files, job_models, flows (by model and share_owner), model_clocks,
-- rates, webhook_endpoints, webhook_deliveries, operations, audit_chain, audit. A lease locks a
-- job's row only against transactions that close it. It never waits for a slice, but takes the next
-- one.
--
-- Times are unix milliseconds from now_ms(), which both drivers define. Text collates as C. `uses`
-- of a blob counts the extents, jobs and parts of uploads that need its bytes.
--
-- compatible_from: 1

-- Facts about the database: the version of its schema, `compatible_from` and a checksum of each
-- version (see schema.py), and what operators switch at run time.
create table meta (
    name text primary key,
    value text not null
);
/*postgresql:
-- SQLite's connections define these functions themselves. `wall_ms` is the machine's clock,
-- `now_ms` the store's time.
create function wall_ms() returns bigint language sql volatile parallel safe
as 'select cast(extract(epoch from clock_timestamp()) * 1000 as bigint)';
create function now_ms() returns bigint language sql volatile parallel safe as 'select wall_ms()';
create function instr(text, text) returns integer language sql immutable parallel safe as 'select strpos($1, $2)';
create function assert_clock() returns void language plpgsql as $$
declare age_ms bigint;
begin
    select now_ms() - ticked_at into age_ms from clock where id = 1;
    if age_ms < 0 or age_ms > 3000 then
        raise exception 'the clock of the database was set, or no process has checked it for a while' using errcode = 'TG001';
    end if;
end $$;
*/

-- How the store's time is read from the machine's clock, and when a process last looked at it (see
-- core/store_clock.py). One row.
create table clock (
    id bigint primary key,
    ticked_at bigint not null,
    behind_ms bigint not null,
    from_ms bigint not null,
    since_ms bigint not null,
    stepped_at bigint not null,
    boot_id text not null,
    boot_ms bigint not null
);

-- The owners of files, jobs and keys.
create table tenants (
    id text primary key,
    name text not null unique,
    created_at bigint not null
);

-- API keys: the public id, and a keyed hash of the secret. The secret itself is shown once and
-- never stored. `old_hash` is the hash of the secret before the last rotation, which works until
-- `old_until`.
create table keys (
    id text primary key,
    tenant_id text not null,
    secret_hash bytea not null,
    label text not null,
    team text,
    user_name text,
    scopes text not null,
    models text not null,
    created_at bigint not null,
    expires_at bigint,
    revoked_at bigint,
    last_used_at bigint,
    resources text not null,
    limits text,
    old_hash bytea,
    old_until bigint,
    parallel_max bigint not null,
    deleted_at bigint,
    changed_at bigint not null default 0,
    addresses text not null,
    environments text not null
);
create index keys_by_tenant on keys (tenant_id);

-- One row for each process incarnation. Its leases live exactly as long as `alive_until` is ahead
-- of the database's clock. `share_owner` is the only owner whose jobs it ingests and leases; empty
-- for a worker of all. `servers` is a name for the model servers of a `tidegate run`; empty for a
-- process of a gateway.
create table workers (
    id text primary key,
    host text not null,
    version text not null,
    state text not null check (state in ('alive', 'gone')),
    started_at bigint not null,
    beat_at bigint not null,
    alive_until bigint not null,
    alone_job_id text,
    alone_number bigint,
    alone_checked bigint,
    -- Whether it runs items; an API process without a worker beats too, for the blobs that it receives.
    runs_items bigint not null,
    -- What keeps it from work, as JSON; empty while nothing does.
    report text not null,
    share_owner text not null default '',
    servers text not null default ''
);
create index workers_alive on workers (alive_until) where state = 'alive';

-- The places of bytes. The row is written before the bytes, and `condemned` is set before their
-- removal.
create table blobs (
    id text primary key,
    kind text not null check (kind in ('upload', 'work', 'answers', 'errors', 'rest', 'compacted')),
    state text not null check (state in ('writing', 'kept', 'condemned')),
    worker_id text,
    size_bytes bigint not null,
    uses bigint not null,
    recorded_to bigint not null,
    created_at bigint not null,
    condemned_at bigint
);
create index blobs_writing on blobs (created_at) where state = 'writing';
create index blobs_unused on blobs (created_at) where state = 'kept' and uses = 0;
create index blobs_condemned on blobs (condemned_at) where state = 'condemned';

-- The files of callers, uploaded or made for them. `growing` files are the hidden results of a
-- running job.
create table files (
    id text primary key,
    tenant_id text not null,
    job_id text,
    purpose text not null,
    filename text not null,
    state text not null check (state in ('growing', 'ready', 'deleted')),
    size_bytes bigint not null,
    line_count bigint not null,
    sha256 text not null,
    created_at bigint not null,
    expires_at bigint,
    deleted_at bigint
);
create index files_by_tenant on files (tenant_id, created_at, id);
create index files_listed on files (tenant_id, created_at, id) where purpose not in ('response', 'response_output', 'whole');
create index files_expiring on files (expires_at) where state = 'ready';
create index files_stored on files (tenant_id, size_bytes) where state = 'ready' and purpose <> 'whole';
create index files_deleted on files (deleted_at) where state = 'deleted';

-- A file is the list of its extents in order of `at`.
create table extents (
    file_id text not null,
    at bigint not null,
    size_bytes bigint not null,
    blob_id text not null,
    blob_at bigint not null,
    primary key (file_id, at)
) /*sqlite: without rowid */;

-- Files that come in parts. A pending upload lives until `expires_at`. `file_id` is the file that
-- it became, `parts_hash` identifies the parts of that file, and `md5` is the MD5 of its bytes.
create table uploads (
    id text primary key,
    tenant_id text not null,
    state text not null check (state in ('pending', 'completed', 'cancelled', 'expired')),
    size_bytes bigint not null,
    purpose text not null,
    filename text not null,
    mime_type text not null,
    expires_after_ms bigint not null,
    created_at bigint not null,
    expires_at bigint not null,
    file_id text,
    parts_hash text,
    md5 text
);
create index uploads_by_tenant on uploads (tenant_id) where state = 'pending';
create index uploads_by_end on uploads (expires_at);

-- The parts of pending uploads. Each row uses a blob.
create table upload_parts (
    id text primary key,
    upload_id text not null,
    blob_id text not null,
    size_bytes bigint not null,
    sha256 text not null,
    created_at bigint not null
);
create index upload_parts_by_upload on upload_parts (upload_id);

-- Jobs: batches, and background responses.
--
-- - `door`: the state of a front door that wants events of items. The engine does not read it.
-- - `endpoint`: 'mixed' if each line of the input names its own. The endpoint of an item is in its
--   slice.
-- - `shape`: the caller's wishes for all lines and files, as JSON; null if there are none (see
--   core/job_shape.py).
-- - `parts`: the files into which the results were cut. Then the job's own files are in no list,
--   with the purpose 'whole'.
-- - `kind`: a batch, or one background response. A response that its caller deleted is forgotten at
--   its end.
-- - `retry_of`: a retry runs lines of the same input again, those that `retry_choice` picks from
--   the error lines in `retry_file_id`. Its answers follow the first job's in `merged_file_id`.
--   Both files have their own extents, so the first job may be deleted at any time.
-- - `canary_items`: the number of the first items, which run alone until they are done. Meanwhile
--   the other slices rest for ever.
-- - `deduplicated_count` and `reused_count`: so many of the last items are not run. They are in no
--   slice, and in the work file from `copies_at` on. Publish gives each the line of another item,
--   or of an earlier job's item (see core/answers/copied_lines.py).
-- - `interactive_at`: from then on, the items of a response go as interactive calls.
-- - `words`: the text for searches, without differences of case: the id, the endpoint, the name of
--   the input, keys and values of metadata, and the models, each with a newline on both sides.
-- - `final_cost_nano` and `final_failed_ppm`: set at the job's end, for lists by cost and by
--   failures. The counts that they are made of change with each record, so those are in no index.
create table jobs (
    id text primary key,
    tenant_id text not null,
    kind text not null check (kind in ('batch', 'response', 'deleted')),
    words text not null default '',
    key_id text,
    user_name text,
    endpoint text not null,
    input_file_id text not null,
    window_text text not null,
    state text not null check (
        state in ('validating', 'in_progress', 'cancelling', 'finalizing', 'completed', 'failed', 'expired', 'cancelled')
    ),
    closing text check (closing in ('completed', 'failed', 'expired', 'cancelled')),
    closing_at bigint,
    created_at bigint not null,
    expires_at bigint not null,
    begin_by bigint,
    begun_at bigint,
    in_progress_at bigint,
    finalizing_at bigint,
    completed_at bigint,
    failed_at bigint,
    expired_at bigint,
    cancelling_at bigint,
    cancelled_at bigint,
    metadata text,
    output_expires_after_s bigint,
    ordered bigint not null,
    prefix_order bigint not null,
    invalid_lines text not null,
    errors text not null,
    model text,
    item_count bigint not null,
    answered_count bigint not null,
    failed_count bigint not null,
    expired_count bigint not null,
    cancelled_count bigint not null,
    unused_count bigint not null,
    input_tokens bigint not null,
    cached_tokens bigint not null,
    output_tokens bigint not null,
    reasoning_tokens bigint not null,
    output_file_id text,
    error_file_id text,
    output_bytes bigint not null,
    error_bytes bigint not null,
    work_blob_id text,
    work_bytes bigint not null,
    prompt_bytes bigint not null,
    shared_prefix_bytes bigint not null,
    step_token text,
    step_worker_id text,
    step_not_before bigint not null,
    step_failures bigint not null,
    share_owner text not null,
    queue text not null,
    limits text,
    cost_nano bigint not null default 0,
    ingest_bytes bigint not null,
    webhook text,
    door text,
    priority bigint not null default 0,
    not_before bigint not null default 0,
    paused_at bigint,
    max_cost_nano bigint,
    max_errors_count bigint,
    max_errors_ppm bigint,
    max_errors_after bigint,
    shape text,
    parts text,
    stopped_by text check (stopped_by in ('max_cost', 'max_errors', 'canary')),
    answers text,
    schema_invalid_count bigint not null default 0,
    deduplicated_count bigint not null default 0,
    reused_count bigint not null default 0,
    copies_at bigint not null default 0,
    retry_of text,
    retry_choice text,
    retry_file_id text,
    merged_file_id text,
    retried_by text,
    traceparent text,
    interactive_at bigint,
    canary_items bigint,
    canary_ppm bigint,
    canary_then text check (canary_then in ('continue', 'stop', 'wait')),
    canary_state text check (canary_state in ('running', 'waiting', 'passed', 'failed')),
    final_cost_nano bigint,
    final_failed_ppm bigint,
    unsent_count bigint not null default 0
);
create index jobs_by_tenant on jobs (tenant_id, created_at, id);
-- SQLite reads only these indexes for a search with few matches. Recording changes none of their
-- columns.
create index jobs_listed on jobs (tenant_id, created_at, id /*sqlite: , words, errors */) where kind = 'batch';
create index jobs_by_age on jobs (created_at, id /*sqlite: , tenant_id, words, errors */) where kind = 'batch';
create index jobs_by_end on jobs (state, created_at, id /*sqlite: , tenant_id, words, errors */)
    where kind = 'batch' and state in ('completed', 'failed', 'expired', 'cancelled');
create index jobs_retryable on jobs (created_at, id)
    where kind = 'batch' and error_file_id is not null and retried_by is null and door is null;
create index jobs_pending on jobs (tenant_id)
    where kind = 'batch' and state in ('validating', 'in_progress', 'cancelling', 'finalizing');
create index jobs_responding on jobs (tenant_id)
    where kind = 'response' and state in ('validating', 'in_progress', 'cancelling', 'finalizing');
create index jobs_ended on jobs (coalesce(completed_at, failed_at, expired_at, cancelled_at))
    where state in ('completed', 'failed', 'expired', 'cancelled');
create index jobs_waiting_long on jobs (interactive_at) where interactive_at is not null and state = 'in_progress';
create index jobs_deleted on jobs (id) where kind = 'deleted';
create index jobs_open on jobs (created_at, id) where state in ('validating', 'in_progress', 'cancelling', 'finalizing');
create index jobs_by_deadline on jobs (expires_at, id)
    where kind = 'batch' and state in ('validating', 'in_progress', 'cancelling', 'finalizing');
create index jobs_by_size on jobs (item_count, id /*sqlite: , tenant_id, created_at, words, errors */) where kind = 'batch';
create index jobs_by_cost on jobs (final_cost_nano, id /*sqlite: , tenant_id, created_at, words, errors */)
    where kind = 'batch' and final_cost_nano > 0;
create index jobs_by_failed on jobs (final_failed_ppm, id) where kind = 'batch' and final_failed_ppm > 0;
create index jobs_by_input on jobs (input_file_id);
create index jobs_to_ingest on jobs (tenant_id, (ingest_bytes + 100 * created_at), id) where state = 'validating';
create index jobs_ingesting on jobs (step_worker_id) where state = 'validating' and step_worker_id is not null;

-- The files of an input that is made of several, without the first, which is in the job's row.
create table job_inputs (
    job_id text not null,
    number bigint not null,
    file_id text not null,
    primary key (job_id, number)
);
create index job_inputs_by_file on job_inputs (file_id);

-- The last places in lists of removed batches, webhook endpoints, deliveries, operations and audit
-- entries. For a while, a page after one of them begins there. Operations and audit entries have no
-- tenant. Lists of batches are also sorted by the last four columns.
create table list_places (
    id text primary key,
    tenant_id text not null,
    created_at bigint not null,
    deleted_at bigint not null,
    deadline_at bigint not null default 0,
    item_count bigint not null default 0,
    failed_ppm bigint not null default 0,
    cost_nano bigint not null default 0
);
create index list_places_by_age on list_places (deleted_at);

-- The turns of ingest: a clock for small inputs and one for large ones, and the places of tenants
-- that are ahead of it.
create table ingest_clocks (
    lane text primary key,
    clock bigint not null
);

create table ingest_turns (
    lane text not null,
    tenant_id text not null,
    place bigint not null,
    primary key (lane, tenant_id)
);
create index ingest_turns_by_place on ingest_turns (lane, place);

-- The models of a job, so that a scheduler's snapshot never reads items. A row is `open` until the
-- job closes or no slice of the model is left, and `held` while the job is paused. `due_at` is when
-- the job must begin, and once it has begun, when it must be done. `leased_at` may be a second old.
-- `priority` is the job's: among a share owner's jobs, a higher one goes first.
create table job_models (
    job_id text not null,
    model text not null,
    item_count bigint not null,
    slice_count bigint not null,
    work_units bigint not null,
    state text not null default 'open' check (state in ('open', 'held', 'closed')),
    share_owner text not null,
    created_at bigint not null,
    expires_at bigint not null,
    due_at bigint not null,
    done_count bigint not null default 0,
    leased_at bigint,
    begin_by bigint,
    begun_at bigint,
    queue text not null,
    rests_until bigint not null default 0,
    priority bigint not null default 0,
    primary key (job_id, model)
);
create index job_models_oldest on job_models (model, share_owner, priority desc, created_at, job_id) where state = 'open';
create index job_models_smallest on job_models (model, share_owner, priority desc, work_units, job_id) where state = 'open';
create index job_models_due on job_models (model, due_at, job_id) where state = 'open';

-- Runs of neighbouring items of one job, one endpoint and one model. `read_first` is the first item
-- in the byte range: the parts of a slice that was cut all read the old range.
create table slices (
    job_id text not null,
    first bigint not null,
    count bigint not null,
    model text not null,
    endpoint text not null,
    state text not null check (state in ('ready', 'leased', 'done')),
    ready_at bigint not null,
    lease_token text,
    worker_id text,
    lease_count bigint not null,
    lost_count bigint not null,
    read_first bigint not null,
    work_at bigint not null,
    work_bytes bigint not null,
    work_units bigint not null,
    leased_as text,
    primary key (job_id, first)
);
create index slices_ready on slices (job_id, model, first) where state = 'ready';
create index slices_leased on slices (worker_id) where state = 'leased';
create index slices_out on slices (job_id, model) where state = 'leased';
create index slices_suspect on slices (job_id, model, lost_count, first) where state = 'ready' and lost_count > 0;

-- The outcome of an item, written once. `at` is the line's place in the job's output file
-- (answered) or error file.
create table outcomes (
    job_id text not null,
    number bigint not null,
    outcome text not null check (outcome in ('answered', 'failed', 'expired', 'cancelled')),
    at bigint not null,
    size_bytes bigint not null,
    crc32 bigint,
    primary key (job_id, number)
) /*sqlite: without rowid */;

-- Items that failed at least once and may be tried again. Other items have no row. `tries` are the
-- answers that did not fit, as JSON.
create table attempts (
    job_id text not null,
    number bigint not null,
    count bigint not null,
    not_before bigint not null,
    reason text not null,
    hand_backs bigint not null default 0,
    alone_losses bigint not null default 0,
    tries text not null default '',
    primary key (job_id, number)
) /*sqlite: without rowid */;

-- The number of events of a job whose door wants events of items. Other jobs have no row. New
-- events take their numbers from it.
create table job_event_counts (
    job_id text primary key,
    count bigint not null
);

-- The events of the items of such a job: items from `first` on began to run, or lines were added to
-- both result files. A row stands for `count` events, the first of which has this number. The job's
-- creation is event 1, and there are no gaps.
create table job_events (
    job_id text not null,
    number bigint not null,
    count bigint not null,
    kind text not null check (kind in ('running', 'recorded')),
    first bigint not null,
    output_at bigint not null,
    output_bytes bigint not null,
    error_at bigint not null,
    error_bytes bigint not null,
    happened_at bigint not null,
    primary key (job_id, number)
) /*sqlite: without rowid */;

-- The Idempotency-Keys of callers, and the objects that they made.
create table idempotency (
    tenant_id text not null,
    route text not null,
    key text not null,
    body_hash text not null,
    object_id text not null,
    created_at bigint not null,
    primary key (tenant_id, route, key)
);
create index idempotency_by_age on idempotency (created_at);

-- The queue of one share owner for one model. `served` is what record charged it, in tokens divided
-- by its weight. A flow that wakes is lifted to the least served awake flow of its model. If an
-- `asleep` flow has `wakes_at`, all its work rests until then.
create table flows (
    model text not null,
    share_owner text not null,
    tenant_id text not null,
    state text not null check (state in ('awake', 'asleep')),
    weight_milli bigint not null,
    served bigint not null,
    served_tokens bigint not null,
    changed_at bigint not null,
    wakes_at bigint,
    primary key (model, share_owner)
);
create index flows_awake on flows (model, served, share_owner) where state = 'awake';
create index flows_resting on flows (wakes_at) where state = 'asleep' and wakes_at is not null;
create index flows_idle on flows (changed_at) where state = 'asleep';

-- The highest service at which a flow of the model went to sleep. If no flow is awake, the next one
-- begins there.
create table model_clocks (
    model text primary key,
    clock bigint not null
);

-- The answers of each worker by minute: estimated units, the tokens they really cost, and items;
-- for how long any call was in flight, how long all calls took together, when the last one ended,
-- and the tokens of the prompts. The last three are sums over the requests, which show how a
-- request's time and tokens depend on its units. Only the worker itself writes its rows.
create table rates (
    model text not null,
    minute bigint not null,
    worker_id text not null,
    units bigint not null,
    tokens bigint not null,
    items bigint not null,
    busy_ms bigint not null default 0,
    call_ms bigint not null default 0,
    last_at bigint not null default 0,
    input_tokens bigint not null default 0,
    servers text not null default '',
    unit_squares double precision not null default 0,
    unit_ms double precision not null default 0,
    unit_tokens double precision not null default 0,
    primary key (model, minute, worker_id)
);
create index rates_by_age on rates (minute);

-- The counts of each budget (`bound`:`name`), with all periods in one packed ledger. From
-- `empty_at` on nothing in it counts any more. Rows are locked in order of id, in transactions that
-- lock nothing else. The key is the only index, because the columns change all the time.
create table budgets (
    id text primary key,
    bound text not null,
    name text not null,
    ledger bytea not null,
    used_at bigint not null,
    empty_at bigint not null
);

-- How many calls each process may have in flight for a name, and how many it wants. The row of
-- worker '' is the name's lock.
create table slots (
    name text not null,
    worker_id text not null,
    held bigint not null,
    wanted bigint not null,
    reported_at bigint not null,
    primary key (name, worker_id)
);

-- The limits per minute that deployments reported.
create table discovered_limits (
    deployment text primary key,
    requests bigint,
    tokens bigint,
    reported_at bigint not null
);

-- The calls of each process at deployments that batch shares with others, and the reason for its
-- tide. Processes repeat these reports.
create table fleet_reports (
    deployment text not null,
    worker_id text not null,
    workers bigint not null,
    calls bigint not null,
    interactive bigint not null,
    interactive_awaiting bigint not null,
    has_gateway bigint not null,
    why text not null,
    tide bigint not null,
    reported_at bigint not null,
    primary key (deployment, worker_id)
);

-- Usage and cost by UTC day (days since 1970). Only record writes it, and only while it has locked
-- the job's row. Rows outlive the job. Money is in billionths of the operator's currency.
create table usage (
    day bigint not null,
    job_id text not null,
    model text not null,
    deployment text not null,
    tenant_id text not null,
    team text not null,
    user_name text not null,
    key_id text not null,
    calls bigint not null,
    input_tokens bigint not null,
    cached_tokens bigint not null,
    output_tokens bigint not null,
    reasoning_tokens bigint not null,
    input_nano bigint not null,
    cached_nano bigint not null,
    output_nano bigint not null,
    primary key (day, job_id, model, deployment)
);
create index usage_by_tenant on usage (tenant_id, day);

-- Usage and cost of interactive calls, which belong to no job. Processes add to it in flushes,
-- about once a second.
create table usage_interactive (
    day bigint not null,
    tenant_id text not null,
    key_id text not null,
    model text not null,
    deployment text not null,
    team text not null,
    user_name text not null,
    calls bigint not null,
    input_tokens bigint not null,
    cached_tokens bigint not null,
    output_tokens bigint not null,
    reasoning_tokens bigint not null,
    input_nano bigint not null,
    cached_nano bigint not null,
    output_nano bigint not null,
    primary key (day, tenant_id, key_id, model, deployment)
);

-- The last flush of each writer. A flush whose commit was unknown is sent again, and counts once.
create table usage_writers (
    id text primary key,
    flush_number bigint not null,
    wrote_at bigint not null
);

-- Deployments, resources and terms of models that an operator added at run time, beside those in
-- the settings, and which deployments of either kind are drained. `routing_number` in meta counts
-- the changes.
create table routing (
    kind text not null check (kind in ('deployment', 'resource', 'model', 'drain_state')),
    name text not null,
    document text not null,
    revision bigint not null,
    changed_at bigint not null,
    primary key (kind, name)
);

-- The changes of operators, with the states before and after as JSON without secrets. Rows are
-- added, never changed. `address` is where the request came from; null for a change without a
-- request. `number` and the hashes are the place in the chain (core/audit_chain.py). They are null
-- for entries of a program of an earlier version, until the next sweep.
create table audit (
    id text primary key,
    happened_at bigint not null,
    actor text not null,
    action text not null,
    kind text not null,
    target text not null,
    before text,
    after text,
    address text,
    number bigint,
    previous_hash text,
    hash text
);
create index audit_by_time on audit (happened_at, id);
create index audit_by_target on audit (target, happened_at, id);
create unique index audit_by_number on audit (number) where number is not null;
create index audit_unchained on audit (happened_at, id) where number is null;

-- The two ends of the audit's chain: its last entry, and the last one that retention removed. One
-- row, which a process locks while it adds or prunes entries.
create table audit_chain (
    id bigint primary key,
    number bigint not null,
    hash text not null,
    pruned_number bigint not null,
    pruned_hash text not null
);
-- A chained entry of the audit cannot be changed. It can be removed only after retention has moved
-- the beginning of the chain past it. Any other delete has no effect, because programs of the first
-- schema prune by age alone.
/*sqlite:
create trigger audit_unchanged before update on audit when old.number is not null
begin
    select raise(abort, 'entries of the audit are never changed');
end;
create trigger audit_kept before delete on audit when old.number > coalesce((select pruned_number from audit_chain where id = 1), 0)
begin
    select raise(ignore);
end;
create trigger audit_chain_goes_on before update on audit_chain
when new.number < old.number or new.pruned_number < old.pruned_number or new.pruned_number > new.number
begin
    select raise(abort, 'the chain of the audit only goes on');
end;
create trigger audit_chain_kept before delete on audit_chain
begin
    select raise(abort, 'the chain of the audit is kept');
end;
*/
/*postgresql:
create function keep_audit() returns trigger language plpgsql as $$
begin
    if tg_op = 'TRUNCATE' then
        raise exception 'the audit is kept';
    end if;
    if old.number is null then
        return case tg_op when 'DELETE' then old else new end;
    end if;
    if tg_op = 'UPDATE' then
        raise exception 'entries of the audit are never changed';
    end if;
    if old.number <= (select pruned_number from audit_chain where id = 1) then
        return old;
    end if;
    raise warning 'entries of the audit are removed by retention alone';
    return null;
end $$;
create function keep_audit_chain() returns trigger language plpgsql as $$
begin
    if tg_op <> 'UPDATE' then
        raise exception 'the chain of the audit is kept';
    end if;
    if new.number < old.number or new.pruned_number < old.pruned_number or new.pruned_number > new.number then
        raise exception 'the chain of the audit only goes on';
    end if;
    return new;
end $$;
create trigger audit_kept before update or delete on audit for each row execute function keep_audit();
create trigger audit_not_emptied before truncate on audit for each statement execute function keep_audit();
create trigger audit_chain_kept before update or delete on audit_chain for each row execute function keep_audit_chain();
create trigger audit_chain_not_emptied before truncate on audit_chain for each statement execute function keep_audit_chain();
*/

-- Sessions of the console that were ended before their time. `ends_at` is when they would have
-- ended by themselves.
create table ended_sessions (
    nonce text primary key,
    ends_at bigint not null
);

-- Actions on all jobs that match a filter. A worker has an operation as long as it lives.
-- `cursor_at` and `cursor_id` are the creation and the id of the last changed job, newest first.
-- They move in the transaction that changes the job. The matched columns are the impact of the
-- operation at its creation.
create table operations (
    id text primary key,
    actor text not null,
    action text not null,
    scope text not null,
    state text not null check (state in ('running', 'completed', 'cancelled')),
    created_at bigint not null,
    ended_at bigint,
    worker_id text,
    cursor_at bigint not null,
    cursor_id text not null,
    matched_jobs bigint not null,
    matched_items bigint not null,
    matched_tokens bigint not null,
    matched_nano bigint not null,
    matched_due bigint,
    matched_due_soon bigint not null,
    done_count bigint not null,
    failed_count bigint not null,
    last_failure text
);
create index operations_by_age on operations (created_at, id);
create index operations_running on operations (created_at, id) where state = 'running';

-- The URLs at which tenants want events of their jobs. A row with a `job_id` belongs to that job
-- alone. Events are signed with `secret`, and until `old_until` also with `old_secret`.
-- `failing_since` is the first failed try since the last success. If `door` is set, that front door
-- writes the events, and `headers` are sent with them.
create table webhook_endpoints (
    id text primary key,
    tenant_id text not null,
    job_id text,
    name text not null,
    url text not null,
    event_types text not null,
    secret bytea not null,
    old_secret bytea,
    old_until bigint,
    created_at bigint not null,
    updated_at bigint not null,
    failing_since bigint,
    disabled_at bigint,
    disabled_why text check (disabled_why in ('gone', 'failing')),
    door text,
    headers text
);
create index webhook_endpoints_by_tenant on webhook_endpoints (tenant_id, created_at, id) where job_id is null;
create index webhook_endpoints_by_job on webhook_endpoints (job_id) where job_id is not null;

-- The outbox: one row for each event and endpoint, written in the transaction of the reported
-- change: the end of a job, or an event of one `item`. A worker leases a row as long as it is
-- alive, and `lease_token` guards the result. A row lives as long as its job and its endpoint. If
-- it is not delivered when its job is deleted, it lives until it is, or until the job would have
-- been forgotten.
create table webhook_deliveries (
    event_id text not null,
    endpoint_id text not null,
    tenant_id text not null,
    job_id text not null,
    event_type text not null,
    item bigint,
    state text not null check (state in ('pending', 'delivered', 'failed')),
    attempt_count bigint not null,
    created_at bigint not null,
    due_at bigint not null,
    ended_at bigint,
    worker_id text,
    lease_token text,
    status bigint,
    failure text,
    primary key (event_id, endpoint_id)
);
create index webhook_deliveries_due on webhook_deliveries (due_at) where state = 'pending';
create index webhook_deliveries_turn on webhook_deliveries (tenant_id, due_at, event_id) where state = 'pending';
create index webhook_deliveries_endpoint_turn on webhook_deliveries (tenant_id, endpoint_id, due_at, event_id) where state = 'pending';
create index webhook_deliveries_out on webhook_deliveries (tenant_id) where lease_token is not null;
create index webhook_deliveries_leased on webhook_deliveries (lease_token) where lease_token is not null;
create index webhook_deliveries_by_tenant on webhook_deliveries (tenant_id, created_at, event_id, endpoint_id);
create index webhook_deliveries_by_age on webhook_deliveries (created_at, event_id, endpoint_id);
create index webhook_deliveries_by_endpoint on webhook_deliveries (endpoint_id);
create index webhook_deliveries_by_job on webhook_deliveries (job_id);
