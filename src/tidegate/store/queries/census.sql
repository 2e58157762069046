-- Counts of everything, for gauges. Use these seldom: they read each job once.

-- census_jobs --
select state, count(*) as jobs, cast(sum(answered_count) as bigint) as answered, cast(sum(failed_count) as bigint) as failed,
    cast(sum(expired_count) as bigint) as expired, cast(sum(cancelled_count) as bigint) as cancelled
from jobs group by state;

-- census_queue --
-- Open parts of jobs by model, kind of share owner, tenant and size class, with the age of the
-- oldest. The join begins with open jobs, because they are few and SQLite makes a cross join in the
-- written order.
select case when m.state = 'held' then 'paused' when m.leased_at is null then 'queued' else 'in_progress' end as status, m.model,
    substr(m.share_owner, 1, 4) as scope, t.name as tenant,
    case when m.item_count <= 10 then 'xs' when m.item_count <= 100 then 's' when m.item_count <= 1000 then 'm'
        when m.item_count <= 10000 then 'l' else 'xl' end as size_class,
    count(*) as jobs, cast(sum(m.work_units) as bigint) as work_units, cast(sum(m.item_count - m.done_count) as bigint) as items,
    now_ms() - min(m.created_at) as age_ms
from jobs j
cross join job_models m
join tenants t on t.id = j.tenant_id
where m.job_id = j.id and j.state in ('validating', 'in_progress', 'cancelling', 'finalizing') and m.state in ('open', 'held')
group by 1, 2, 3, 4, 5;

-- census_leased --
select cast(coalesce(sum(s.count), 0) as bigint) as items, count(distinct s.worker_id) as workers,
    coalesce(now_ms() - min(m.created_at), 0) as age_ms
from slices s
join job_models m on m.job_id = s.job_id and m.model = s.model
where s.state = 'leased';

-- census_workers --
select count(*) as workers from workers where state = 'alive' and alive_until > now_ms() and runs_items = 1;
