-- Jobs from their creation until they close: requests of callers, and the steps that one process
-- takes at a time.

-- job_put --
-- The clock is read once, so that the deadline is exactly one window after the creation.
with moment as materialized (select now_ms() as ms)
insert into jobs (
    id, tenant_id, kind, words, key_id, user_name, endpoint, input_file_id, window_text, state, created_at, expires_at, begin_by, metadata,
    output_expires_after_s, ordered, prefix_order, invalid_lines, errors, item_count, answered_count, failed_count, expired_count,
    cancelled_count, unused_count, input_tokens, cached_tokens, output_tokens, reasoning_tokens, output_bytes, error_bytes, work_bytes,
    prompt_bytes, shared_prefix_bytes, step_not_before, step_failures, share_owner, queue, limits, ingest_bytes, webhook, door,
    priority, not_before, max_cost_nano, max_errors_count, max_errors_ppm, max_errors_after, shape, answers, traceparent
)
values (
    :id, :tenant_id, :kind, :words, :key_id, :user_name, :endpoint, :input_file_id, :window_text, 'validating', (select ms from moment),
    (select ms from moment) + :window_ms, (select ms from moment) + cast(:begin_within_ms as bigint),
    :metadata, :output_expires_after_s, :ordered, :prefix_order, :invalid_lines, '[]',
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, :share_owner, :queue, :limits, :ingest_bytes, :webhook, :door,
    :priority, :not_before, :max_cost_nano, :max_errors_count, :max_errors_ppm, :max_errors_after, :shape, :answers, :traceparent
);

-- job_turns_interactive --
-- The wait counts from the job's creation.
update jobs set interactive_at = created_at + :after_ms where id = :id;

-- job_input_put --
insert into job_inputs (job_id, number, file_id) values (:job_id, :number, :file_id);

-- job_inputs_forget --
delete from job_inputs where job_id = :job_id;

-- job_get --
-- A caller's own job, while it is visible.
select * from jobs where tenant_id = :tenant_id and id = :id and kind <> 'deleted';

-- job_any --
-- A job of any tenant, for the engine.
select * from jobs where id = :id;

-- job_marks --
-- The states of jobs that callers wait for. `ids` are the jobs' ids one after the other, 28
-- characters each.
with recursive places (start_at) as (
    select 1 union all select start_at + 28 from places where start_at + 28 <= length(cast(:ids as text))
)
select j.id, j.state, j.closing, j.answered_count, j.failed_count, j.expired_count, j.cancelled_count, j.output_bytes, j.error_bytes,
    (select e.count from job_event_counts e where e.job_id = j.id) as event_count
from places p
join jobs j on j.id = substr(cast(:ids as text), p.start_at, 28);

-- job_cursor --
-- The place where a page begins. Deleted batches still have one.
select created_at, id from jobs where tenant_id = :tenant_id and id = :id
union all
select created_at, id from list_places where tenant_id = :tenant_id and id = :id;

-- job_place --
-- The place of a batch in sorted lists, or the last place of a deleted one.
select expires_at as deadline, item_count as size,
    case when item_count > 0 then 1000000 * failed_count / item_count else 0 end as failed, cost_nano as cost
from jobs where id = :id
union all
select deadline_at, item_count, failed_ppm, cost_nano from list_places where id = :id;

-- job_list --
-- A page of batches. Responses are in no list.
select * from jobs
where tenant_id = :tenant_id and kind = 'batch' and (created_at < :created_at or (created_at = :created_at and id < :id))
    and (cast(:endpoint as text) is null or endpoint = :endpoint)
order by created_at desc, id desc
limit :count_max;

-- job_list_newer --
-- The page before a place, from its nearest job on.
select * from jobs
where tenant_id = :tenant_id and kind = 'batch' and (created_at > :created_at or (created_at = :created_at and id > :id))
    and (cast(:endpoint as text) is null or endpoint = :endpoint)
order by created_at, id
limit :count_max;

-- part matches --
-- Jobs that match all given filters. `words` and `errors` exclude most jobs before the row itself
-- is read. Metadata and errors are JSON with one spelling, in which no text has a bare quote.
    and j.created_at >= :from_ms
    and (cast(:words as text) is null or instr(j.words, :words) > 0)
    and (cast(:model_words as text) is null or instr(j.words, :model_words) > 0)
    and (cast(:pair_words as text) is null or instr(j.words, :pair_words) > 0)
    and (cast(:pair2_words as text) is null or instr(j.words, :pair2_words) > 0)
    and (cast(:pair3_words as text) is null or instr(j.words, :pair3_words) > 0)
    and (cast(:pair4_words as text) is null or instr(j.words, :pair4_words) > 0)
    and (cast(:error as text) is null or instr(j.errors, :error) > 0)
    and (cast(:status as text) is null
        or case when j.state = 'validating' and j.closing = 'cancelled' then 'cancelling' else j.state end = :status)
    and (cast(:model as text) is null or exists (select 1 from job_models m where m.job_id = j.id and m.model = :model))
    and (cast(:pair as text) is null or instr(',' || substr(j.metadata, 2), :pair) > 0)
    and (cast(:pair2 as text) is null or instr(',' || substr(j.metadata, 2), :pair2) > 0)
    and (cast(:pair3 as text) is null or instr(',' || substr(j.metadata, 2), :pair3) > 0)
    and (cast(:pair4 as text) is null or instr(',' || substr(j.metadata, 2), :pair4) > 0)

-- part matching --
-- A page of matching jobs, newest first.
{matches}
order by j.created_at desc, j.id desc
limit :count_max;

-- job_search --
-- A page of a tenant's jobs that match all given filters.
select j.* from jobs j
where j.tenant_id = :tenant_id and j.kind = 'batch' and (j.created_at < :created_at or (j.created_at = :created_at and j.id < :id))
{matching};

-- jobs_search --
-- A page of matching jobs of one tenant or of all, with the tenant's name.
select j.*, t.name as org from jobs j
join tenants t on t.id = j.tenant_id
where j.kind = 'batch' and (j.created_at < :created_at or (j.created_at = :created_at and j.id < :id))
    and (cast(:tenant_id as text) is null or j.tenant_id = :tenant_id)
{matching};

-- jobs_search_open --
-- A page of matching jobs that have not ended, of one tenant or of all.
select j.*, t.name as org from jobs j
join tenants t on t.id = j.tenant_id
where j.kind = 'batch' and j.state in ('validating', 'in_progress', 'cancelling', 'finalizing')
    and (j.created_at < :created_at or (j.created_at = :created_at and j.id < :id))
    and (cast(:tenant_id as text) is null or j.tenant_id = :tenant_id)
{matching};

-- jobs_search_ended --
-- A page of matching jobs that ended in one state, of one tenant or of all.
select j.*, t.name as org from jobs j
join tenants t on t.id = j.tenant_id
where j.kind = 'batch' and j.state in ('completed', 'failed', 'expired', 'cancelled') and j.state = :status
    and (j.created_at < :created_at or (j.created_at = :created_at and j.id < :id))
    and (cast(:tenant_id as text) is null or j.tenant_id = :tenant_id)
{matching};

-- part sorted --
-- Matching batches of one tenant or of all.
    and (cast(:tenant_id as text) is null or j.tenant_id = :tenant_id)
    and j.created_at < :created_at
{matches}

-- jobs_matching_few --
-- The first matching jobs, unordered, with their sort keys: size, share of failed items in parts of
-- a million, and cost. The last two are null if a list sorted by them leaves the job out.
select j.id, j.item_count,
    case when j.state not in ('validating', 'in_progress', 'cancelling', 'finalizing') then case when j.final_failed_ppm > 0 then j.final_failed_ppm end
        when j.failed_count > 0 then 1000000 * j.failed_count / j.item_count end as failed_ppm,
    case when j.state not in ('validating', 'in_progress', 'cancelling', 'finalizing') then case when j.final_cost_nano > 0 then j.final_cost_nano end
        when j.cost_nano > 0 then j.cost_nano end as nano
from jobs j
where j.kind = 'batch'
{sorted}
limit :few_max;

-- jobs_named --
-- Jobs with the names of their tenants. `ids` are the jobs' ids one after the other, 28 characters
-- each.
with recursive places (start_at) as (
    select 1 union all select start_at + 28 from places where start_at + 28 <= length(cast(:ids as text))
)
select j.*, t.name as org from places p
join jobs j on j.id = substr(cast(:ids as text), p.start_at, 28)
join tenants t on t.id = j.tenant_id;

-- jobs_by_deadline --
-- Batches that have not ended, by deadline, earliest first.
select j.*, t.name as org from jobs j
join tenants t on t.id = j.tenant_id
where j.kind = 'batch' and j.state in ('validating', 'in_progress', 'cancelling', 'finalizing')
    and (j.expires_at > :sort_key or (j.expires_at = :sort_key and j.id > :sort_id))
{sorted}
order by j.expires_at, j.id
limit :count_max;

-- jobs_by_size --
select j.*, t.name as org from jobs j
join tenants t on t.id = j.tenant_id
where j.kind = 'batch' and j.item_count >= 0 and j.item_count <= :sort_key
    and (j.item_count < :sort_key or (j.item_count = :sort_key and j.id < :sort_id))
{sorted}
order by j.item_count desc, j.id desc
limit :count_max;

-- jobs_by_cost_open --
-- The cost of open jobs is in no index, because it changes with each record. There are few open
-- jobs.
select j.*, t.name as org from jobs j
join tenants t on t.id = j.tenant_id
where j.kind = 'batch' and j.state in ('validating', 'in_progress', 'cancelling', 'finalizing') and j.cost_nano > 0
    and (j.cost_nano < :sort_key or (j.cost_nano = :sort_key and j.id < :sort_id))
{sorted}
order by j.cost_nano desc, j.id desc
limit :count_max;

-- jobs_by_cost_ended --
select j.*, t.name as org from jobs j
join tenants t on t.id = j.tenant_id
where j.kind = 'batch' and j.final_cost_nano > 0
    and (j.final_cost_nano < :sort_key or (j.final_cost_nano = :sort_key and j.id < :sort_id))
{sorted}
order by j.final_cost_nano desc, j.id desc
limit :count_max;

-- jobs_by_failed_open --
-- The share of failed items of open jobs, in parts of a million.
select j.*, t.name as org from jobs j
join tenants t on t.id = j.tenant_id
where j.kind = 'batch' and j.state in ('validating', 'in_progress', 'cancelling', 'finalizing') and j.failed_count > 0
    and (1000000 * j.failed_count / j.item_count < :sort_key
        or (1000000 * j.failed_count / j.item_count = :sort_key and j.id < :sort_id))
{sorted}
order by 1000000 * j.failed_count / j.item_count desc, j.id desc
limit :count_max;

-- jobs_by_failed_ended --
select j.*, t.name as org from jobs j
join tenants t on t.id = j.tenant_id
where j.kind = 'batch' and j.final_failed_ppm > 0
    and (j.final_failed_ppm < :sort_key or (j.final_failed_ppm = :sort_key and j.id < :sort_id))
{sorted}
order by j.final_failed_ppm desc, j.id desc
limit :count_max;

-- part changeable --
-- Jobs of one organization or of all, after a place in the list, that an action can change.
    and (j.created_at < :created_at or (j.created_at = :created_at and j.id < :id))
    and (cast(:org as text) is null or t.name = :org)
    and case cast(:action as text)
        when 'pause' then j.state in ('validating', 'in_progress') and j.closing is null and j.paused_at is null
        when 'resume' then j.state in ('validating', 'in_progress') and j.closing is null and j.paused_at is not null
        when 'cancel' then j.state in ('validating', 'in_progress') and j.closing is null
        when 'fail' then j.state in ('validating', 'in_progress') and j.closing is null
        when 'requeue' then j.state in ('validating', 'in_progress', 'finalizing')
        else j.state = 'finalizing' end

-- part retryable --
-- Ended jobs of one organization or of all, after a place in the list, with failed items that were
-- not run again. A condition on `state` would make the database use the index of all ended jobs.
    and j.error_file_id is not null and j.retried_by is null and j.door is null and j.failed_count > 0
    and coalesce(j.completed_at, j.failed_at, j.expired_at, j.cancelled_at) is not null
    and (j.created_at < :created_at or (j.created_at = :created_at and j.id < :id))
    and (cast(:org as text) is null or t.name = :org)

-- operation_jobs_open --
-- The next open jobs of an operation.
select j.* from jobs j
join tenants t on t.id = j.tenant_id
where j.kind = 'batch' and j.state in ('validating', 'in_progress', 'cancelling', 'finalizing')
{changeable}
{matching};

-- operation_jobs_ended --
-- The next jobs of an operation that retries.
select j.* from jobs j
join tenants t on t.id = j.tenant_id
where j.kind = 'batch'
{retryable}
{matching};

-- operation_impact_open --
-- The rest of the open jobs that an operation would change. The cost of the rest is estimated from
-- the cost so far.
select count(*) as jobs, cast(coalesce(sum(found.left_count), 0) as bigint) as items, cast(coalesce(sum(found.left_units), 0) as bigint) as tokens,
    cast(coalesce(sum(case when found.answered_count = 0 then 0 else found.cost_nano / found.answered_count * found.left_count end), 0) as bigint) as nano,
    min(found.expires_at) as first_due,
    coalesce(sum(case when found.expires_at < now_ms() + 3600000 then 1 else 0 end), 0) as due_soon
from (
    select j.answered_count, j.cost_nano, j.expires_at,
        j.item_count - j.answered_count - j.failed_count - j.expired_count - j.cancelled_count as left_count,
        (select sum(u.work_units - u.work_units * u.done_count / u.item_count) from job_models u where u.job_id = j.id) as left_units
    from jobs j
    join tenants t on t.id = j.tenant_id
    where j.kind = 'batch' and j.state in ('validating', 'in_progress', 'cancelling', 'finalizing')
{changeable}
{matching}
) found;

-- operation_impact_ended --
-- The failed items of the ended jobs that an operation would retry. Their tokens and cost are
-- estimated from the jobs' answers.
select count(*) as jobs, cast(coalesce(sum(found.failed_count), 0) as bigint) as items,
    cast(coalesce(sum(case when found.answered_count = 0 then 0 else found.tokens / found.answered_count * found.failed_count end), 0) as bigint) as tokens,
    cast(coalesce(sum(case when found.answered_count = 0 then 0 else found.cost_nano / found.answered_count * found.failed_count end), 0) as bigint) as nano,
    cast(null as bigint) as first_due, 0 as due_soon
from (
    select j.answered_count, j.failed_count, j.cost_nano, j.input_tokens + j.output_tokens as tokens
    from jobs j
    join tenants t on t.id = j.tenant_id
    where j.kind = 'batch'
{retryable}
{matching}
) found;

-- job_pending --
-- Counts of waiting and running batches, for limits: jobs of the same share owner, jobs of the same
-- key, and items of the tenant that are not done. An input that was not ingested counts its lines.
select coalesce(sum(case when j.share_owner = :share_owner then 1 else 0 end), 0) as jobs,
    coalesce(sum(case when j.key_id = :key_id then 1 else 0 end), 0) as key_jobs,
    coalesce(sum(case when j.state = 'validating' then coalesce(f.line_count, 0) + coalesce((
            select sum(g.line_count) from job_inputs i join files g on g.id = i.file_id where i.job_id = j.id), 0)
        else j.item_count - j.answered_count - j.failed_count - j.expired_count - j.cancelled_count end), 0) as items
from jobs j
left join files f on f.id = j.input_file_id
where j.tenant_id = :tenant_id and j.kind = 'batch' and j.state in ('validating', 'in_progress', 'cancelling', 'finalizing');

-- responses_pending --
-- How many background responses of a tenant are waiting or running, for their limit.
select count(*) from jobs
where tenant_id = :tenant_id and kind = 'response' and state in ('validating', 'in_progress', 'cancelling', 'finalizing');

-- tenant_units --
-- The work units of a tenant that are not done, for its limit. Jobs that were not ingested have
-- none.
select cast(coalesce(sum(m.work_units - m.work_units * m.done_count / m.item_count), 0) as bigint)
from jobs j
join job_models m on m.job_id = j.id
where j.tenant_id = :tenant_id and j.state = 'in_progress' and m.state <> 'closed';

-- job_created_since --
-- The jobs and input bytes that a user or tenant created lately, for the limits per period.
select count(*) as jobs, coalesce(sum(f.size_bytes), 0) + coalesce(sum((
    select sum(g.size_bytes) from job_inputs i join files g on g.id = i.file_id where i.job_id = j.id)), 0) as bytes
from jobs j
left join files f on f.id = j.input_file_id
where j.tenant_id = :tenant_id and j.kind = 'batch' and j.created_at > (select now_ms()) - :period_ms
    and (cast(:user_name as text) is null or j.user_name = :user_name);

-- job_halt --
-- A transaction that closes a running job first takes the strongest lock: then no lease is under
-- way, and none begins.
select id from jobs where id = :id /*! for update */;

-- job_cancel_running --
-- A job that closes already for another reason keeps that reason.
-- moves: jobs: in_progress -> cancelling
update jobs set state = 'cancelling', closing = 'cancelled', closing_at = now_ms(), cancelling_at = now_ms()
where tenant_id = :tenant_id and id = :id and state = 'in_progress' and closing is null
returning *;

-- job_cancel_waiting --
-- A job that was not ingested is asked to close. It ends when no ingest has it.
update jobs set closing = 'cancelled', closing_at = now_ms(), cancelling_at = now_ms()
where tenant_id = :tenant_id and id = :id and state = 'validating' and closing is null
returning id;

-- job_delete_response --
-- The caller of a response has deleted it. It is forgotten when its job has ended.
update jobs set kind = 'deleted' where tenant_id = :tenant_id and id = :id and kind = 'response' returning id;

-- job_fail_open --
-- Stop a job and keep its results: unfinished items become `batch_failed`.
update jobs set closing = 'failed', closing_at = now_ms(), errors = :errors
where id = :id and state in ('in_progress') and closing is null
returning id;

-- jobs_overdue --
-- Jobs whose window, or whose time to begin, has passed, and that do not close yet.
select id, state from jobs
where state in ('validating', 'in_progress', 'cancelling', 'finalizing') and state in ('validating', 'in_progress') and closing is null
    and (expires_at <= now_ms() or (begin_by <= now_ms() and begun_at is null))
order by created_at
limit :count_max;

-- job_expire --
-- No new call begins after this. A job that waits for ingest ends when no ingest has it.
update jobs set closing = 'expired', closing_at = now_ms()
where id = :id and state in ('validating', 'in_progress') and closing is null
    and (expires_at <= now_ms() or (begin_by <= now_ms() and begun_at is null))
returning id;

-- jobs_closing_unstarted --
select id, closing from jobs
where state = 'validating' and closing is not null
    and (step_worker_id is null or not exists (select 1 from workers w where w.id = step_worker_id and w.state = 'alive'))
order by created_at, id
limit :count_max;

-- job_end_unstarted --
-- moves: jobs: validating -> cancelled
-- moves: jobs: validating -> expired
-- moves: jobs: validating -> failed
update jobs set state = closing, step_token = null, step_worker_id = null,
    failed_at = case when closing = 'failed' then now_ms() end,
    cancelled_at = case when closing = 'cancelled' then now_ms() end,
    expired_at = case when closing = 'expired' and closing_at > now_ms() then closing_at when closing = 'expired' then now_ms() end
where id = :id and state = 'validating' and closing in ('cancelled', 'expired', 'failed')
    and (step_worker_id is null or step_token = cast(:token as text)
        or not exists (select 1 from workers w where w.id = step_worker_id and w.state = 'alive'))
returning id;

-- job_take_step --
-- One process at a time ingests or publishes a job. Its right to do so ends with its heartbeat.
update jobs set step_token = :token, step_worker_id = :worker_id
where id = :id and state = :state and step_not_before <= now_ms()
    and (step_token = :token or step_worker_id is null
        or not exists (select 1 from workers w where w.id = step_worker_id and w.state = 'alive'))
    and exists (select 1 from workers w where w.id = :worker_id and w.state = 'alive')
returning id;

-- job_drop_step --
-- The step failed. Any process may try again after a delay, which doubles with each failure, up to
-- 32 times the first one.
update jobs set step_token = null, step_worker_id = null, step_failures = step_failures + 1,
    step_not_before = now_ms() + :delay_ms * (1 << case when step_failures < 5 then cast(step_failures as integer) else 5 end)
where id = :id and step_token = :token
returning step_failures;

-- job_start --
-- Ingest is done. No row: the job was asked to close meanwhile, or another process has the step.
-- moves: jobs: validating -> in_progress
update jobs set state = 'in_progress', in_progress_at = now_ms(), model = :model, words = words || :words, item_count = :item_count,
    output_file_id = :output_file_id, error_file_id = :error_file_id, work_blob_id = :work_blob_id, work_bytes = :work_bytes,
    prompt_bytes = :prompt_bytes, shared_prefix_bytes = :shared_prefix_bytes,
    deduplicated_count = :deduplicated, reused_count = :reused, copies_at = :copies_at,
    step_token = null, step_worker_id = null, step_not_before = 0, step_failures = 0
where id = :id and state = 'validating' and step_token = :token and closing is null
returning id, tenant_id, kind, share_owner, queue, created_at, expires_at,
    case when begin_by < expires_at then begin_by else expires_at end as due_at, begin_by,
    case when paused_at is null then 'open' else 'held' end as model_state, not_before, priority;

-- job_refuse --
-- The input has errors, so the job fails without results.
-- moves: jobs: validating -> failed
update jobs set state = 'failed', failed_at = now_ms(), errors = :errors, step_token = null, step_worker_id = null
where id = :id and state = 'validating' and step_token = :token and closing is null
returning id;

-- job_explain_inputs --
-- The position of a job among the others, for `explain`. Only jobs of the same models count as
-- ahead.
select now_ms() as now,
    (select count(*) from workers w where w.state = 'alive' and w.alive_until > now_ms() and w.runs_items = 1) as workers_alive,
    (select count(*) from slices s where s.job_id = j.id and s.state = 'ready' and s.ready_at <= now_ms()) as slices_ready,
    (select count(*) from slices s where s.job_id = j.id and s.state = 'ready' and s.ready_at > now_ms()) as slices_resting,
    coalesce((select min(s.ready_at) - now_ms() from slices s
        where s.job_id = j.id and s.state = 'ready' and s.ready_at > now_ms()), 0) as rest_ends_in_ms,
    (select count(*) from slices s where s.job_id = j.id and s.state = 'leased') as slices_leased,
    (select count(*) from jobs o
        where o.state in ('validating', 'in_progress', 'cancelling', 'finalizing') and o.state = 'in_progress' and o.closing is null
            and (o.created_at < j.created_at or (o.created_at = j.created_at and o.id < j.id))
            and exists (select 1 from slices s
                where s.job_id = o.id and s.state = 'ready' and s.ready_at <= now_ms()
                    and exists (select 1 from job_models m where m.job_id = j.id and m.model = s.model))) as jobs_ahead,
    j.step_failures, case when j.step_not_before > now_ms() then j.step_not_before - now_ms() else 0 end as step_rests_ms
from jobs j
where j.id = :job_id;

-- jobs_state_counts --
select state, count(*) as jobs from jobs group by state;
