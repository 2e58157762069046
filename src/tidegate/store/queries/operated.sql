-- Statements of operators across all tenants: jobs, repairs, flows, organizations and deliveries.

-- jobs_cursor --
select created_at, id from jobs where id = :id
union all
select created_at, id from list_places where id = :id;

-- job_of_anyone --
select j.*, t.name as org from jobs j
join tenants t on t.id = j.tenant_id
where j.id = :id and j.kind = 'batch';

-- job_retry_finalization --
-- End the rest after failures. A process that publishes the job now keeps it.
update jobs set step_not_before = 0, step_failures = 0 where id = :id and state = 'finalizing' returning id;

-- job_fail_asked --
-- An operator ends the job. Results are kept, and items that never ran become `batch_failed`. A job
-- that waits for ingest ends when no ingest has it.
update jobs set closing = 'failed', closing_at = now_ms(), errors = :errors
where id = :id and state in ('validating', 'in_progress') and closing is null
returning id;

-- job_steps_wake --
update jobs set step_not_before = 0 where id = :job_id and state in ('validating', 'finalizing') and step_not_before > now_ms();

-- job_slices_wake --
-- Wake the resting slices of a job. Items that wait for an upstream have their own times, and
-- slices behind a canary keep resting.
update slices set ready_at = now_ms() where job_id = :job_id and state = 'ready' and ready_at > now_ms() and ready_at < :forever;

-- job_models_wake --
-- A job with a `not_before` still waits for that moment.
update job_models set rests_until = (
    select case when j.not_before > now_ms() then j.not_before else now_ms() end from jobs j where j.id = job_models.job_id
)
where job_id = :job_id and state = 'open' and rests_until > now_ms();

-- job_flows_wake --
-- The next sweep wakes these flows.
update flows set wakes_at = now_ms()
where state = 'asleep' and wakes_at > now_ms() and exists (
    select 1 from job_models m
    where m.job_id = :job_id and m.model = flows.model and m.share_owner = flows.share_owner and m.state = 'open'
);

-- overview_jobs --
-- Open batches by state. Ended ones are not counted, because there may be millions. The condition
-- on the deadline makes the database use the index of open batches.
select j.state, count(*) as jobs, sum(j.item_count) as items, sum(j.answered_count) as answered,
    sum(j.failed_count + j.expired_count + j.cancelled_count) as failed,
    sum(case when j.paused_at is not null then 1 else 0 end) as paused
from jobs j
where j.state in ('validating', 'in_progress', 'cancelling', 'finalizing') and j.kind = 'batch' and j.expires_at > 0
group by j.state;

-- overview_ended --
-- Batches that ended lately, by state. The number is bounded, because there may be very many small
-- ones. The kind is checked afterwards, so that only the index of ended jobs fits.
select e.state, count(*) as jobs, cast(sum(e.item_count) as bigint) as items,
    cast(sum(e.failed_count) as bigint) as failed
from (
    select j.state, j.kind, j.item_count, j.failed_count from jobs j
    where j.state in ('completed', 'failed', 'expired', 'cancelled')
        and coalesce(j.completed_at, j.failed_at, j.expired_at, j.cancelled_at) > :since
    order by coalesce(j.completed_at, j.failed_at, j.expired_at, j.cancelled_at) desc
    limit :count_max
) e
where e.kind = 'batch'
group by e.state
order by e.state;

-- overview_models --
-- The waiting work of each model: jobs, items and work units that are not done, and the age of the
-- oldest job.
select m.model, count(*) as jobs, sum(m.item_count - m.done_count) as items,
    cast(sum(m.work_units - m.work_units * m.done_count / m.item_count) as bigint) as units,
    now_ms() - min(m.created_at) as oldest_ms, min(m.due_at) - now_ms() as due_in_ms
from job_models m
where m.state = 'open'
group by m.model
order by m.model
limit :count_max;

-- overview_rates --
-- Answered items and tokens of the last full minutes and this one, by model.
select r.model, sum(r.items) as items, sum(r.tokens) as tokens
from rates r
where r.minute >= now_ms() / 60000 - :minutes
group by r.model;

-- overview_minutes --
-- Answered items and tokens of each of the last minutes and this one, over all models.
select r.minute, sum(r.items) as items, sum(r.tokens) as tokens
from rates r
where r.minute >= now_ms() / 60000 - :minutes
group by r.minute
order by r.minute;

-- overview_stuck --
-- Jobs whose ingest or publishing failed and is retried, and jobs whose deadline is near.
select j.id, t.name as org, j.state, j.step_failures, j.expires_at - now_ms() as left_ms
from jobs j
join tenants t on t.id = j.tenant_id
where j.state in ('validating', 'in_progress', 'cancelling', 'finalizing') and j.kind = 'batch'
    and (j.step_failures > 0 or j.expires_at < now_ms() + :soon_ms)
order by j.expires_at
limit :count_max;

-- flows_shown --
select f.model, f.share_owner, t.name as org, f.state, f.weight_milli, f.served, f.served_tokens,
    f.wakes_at - now_ms() as wakes_in_ms
from flows f
left join tenants t on t.id = f.tenant_id
where cast(:model as text) is null or f.model = :model
order by f.model, f.state desc, f.served, f.share_owner
limit :count_max;

-- flows_refresh --
update flows set wakes_at = now_ms() where state = 'asleep' and wakes_at > now_ms() returning model;

-- org_cursor --
select created_at, id from tenants where id = :id;

-- runs_of_file --
-- With a plain condition on the tenant, SQLite would use an index of all its jobs.
select j.* from jobs j
where j.input_file_id = :file_id and j.tenant_id || '' = :tenant_id and j.kind || '' = 'batch'
order by j.created_at desc, j.id desc
limit :count_max;

-- org_page --
select t.id, t.name, t.created_at,
    (select count(*) from keys k where k.tenant_id = t.id and k.deleted_at is null) as key_count,
    (select count(*) from jobs j where j.tenant_id = t.id and j.state in ('validating', 'in_progress', 'cancelling', 'finalizing')
        and j.kind = 'batch') as open_count
from tenants t
where t.created_at < :created_at or (t.created_at = :created_at and t.id < :id)
order by t.created_at desc, t.id desc
limit :count_max;

-- deliveries_page --
select d.*, e.url, t.name as org from webhook_deliveries d
join webhook_endpoints e on e.id = d.endpoint_id
join tenants t on t.id = d.tenant_id
where (cast(:state as text) is null or d.state = :state) and (cast(:org as text) is null or t.name = :org)
    and (d.created_at < :created_at or (d.created_at = :created_at and (d.event_id < :event_id
        or (d.event_id = :event_id and d.endpoint_id < :endpoint_id))))
order by d.created_at desc, d.event_id desc, d.endpoint_id desc
limit :count_max;

-- delivery_of_anyone --
select d.*, e.url, t.name as org from webhook_deliveries d
join webhook_endpoints e on e.id = d.endpoint_id
join tenants t on t.id = d.tenant_id
where d.event_id = :event_id and d.endpoint_id = :endpoint_id;

-- due_work --
-- Work units that are not done, by model and by ten minutes of their deadline. All of them count as
-- due with the first.
select m.model, min(m.due_at) - now_ms() as due_in_ms,
    cast(coalesce(sum(m.work_units - m.work_units * m.done_count / m.item_count), 0) as bigint) as units
from job_models m
where m.state = 'open'
group by m.model, m.due_at / 600000
order by m.model, min(m.due_at)
limit :count_max;

-- steps_waiting --
-- Whether anything other than items waits for a worker: inputs, jobs to end or publish, operations,
-- deliveries.
select 1 from jobs
where state in ('validating', 'in_progress', 'cancelling', 'finalizing')
    and (state <> 'in_progress' or closing is not null or expires_at <= now_ms())
union all
select 1 from operations where state = 'running'
union all
select 1 from webhook_deliveries where state = 'pending'
limit 1;
