-- Webhook endpoints and the deliveries to them.

-- webhook_endpoint_put --
with moment as materialized (select now_ms() as ms)
insert into webhook_endpoints (id, tenant_id, job_id, name, url, event_types, secret, created_at, updated_at, door, headers)
values (:id, :tenant_id, :job_id, :name, :url, :event_types, :secret, (select ms from moment), (select ms from moment), :door, :headers);

-- webhook_endpoint_count --
select count(*) from webhook_endpoints where tenant_id = :tenant_id and job_id is null;

-- webhook_endpoint_get --
-- An endpoint of one job is shown only with its job.
select * from webhook_endpoints where tenant_id = :tenant_id and id = :id and job_id is null;

-- webhook_endpoint_of_job --
select * from webhook_endpoints where tenant_id = :tenant_id and job_id = :job_id;

-- webhook_endpoint_cursor --
-- The place where a page begins. Deleted endpoints still have one.
select created_at, id from webhook_endpoints where tenant_id = :tenant_id and id = :id and job_id is null
union all
select created_at, id from list_places where tenant_id = :tenant_id and id = :id;

-- webhook_endpoint_list --
select * from webhook_endpoints
where tenant_id = :tenant_id and job_id is null
    and (created_at < :created_at or (created_at = :created_at and id < :id))
order by created_at desc, id desc
limit :count_max;

-- webhook_endpoint_change --
-- An owner who changes or confirms an endpoint wants its events again. `updated_at` changes only if
-- something else does.
update webhook_endpoints set name = coalesce(:name, name), url = coalesce(:url, url),
    event_types = coalesce(:event_types, event_types), failing_since = null, disabled_at = null, disabled_why = null,
    updated_at = case when coalesce(:name, name) <> name or coalesce(:url, url) <> url
        or coalesce(:event_types, event_types) <> event_types then now_ms() else updated_at end
where tenant_id = :tenant_id and id = :id and job_id is null
returning id;

-- webhook_secret_rotate --
-- A repeat with the same secret changes nothing.
update webhook_endpoints set old_secret = secret, old_until = now_ms() + :keep_ms, secret = :secret, updated_at = now_ms()
where tenant_id = :tenant_id and id = :id and job_id is null and secret <> :secret
returning id;

-- webhook_endpoint_place_put --
insert into list_places (id, tenant_id, created_at, deleted_at)
select id, tenant_id, created_at, now_ms() from webhook_endpoints where tenant_id = :tenant_id and id = :id and job_id is null
on conflict (id) do nothing;

-- webhook_endpoint_delete --
delete from webhook_endpoints where tenant_id = :tenant_id and id = :id and job_id is null returning id;

-- webhook_endpoint_forget --
-- An endpoint of one job is removed once the job is gone and no delivery to it is left.
delete from webhook_endpoints
where job_id = :job_id
    and not exists (select 1 from jobs j where j.id = webhook_endpoints.job_id)
    and not exists (select 1 from webhook_deliveries d where d.endpoint_id = webhook_endpoints.id);

-- webhook_endpoint_lock --
select disabled_at from webhook_endpoints where id = :id /*! for no key update */;

-- webhook_endpoint_recovered --
update webhook_endpoints set failing_since = null, disabled_at = null, disabled_why = null
where id = :id and (failing_since is not null or disabled_at is not null);

-- webhook_endpoint_failing --
update webhook_endpoints set failing_since = now_ms() where id = :id and failing_since is null;

-- webhook_endpoint_disable --
-- A receiver that is gone is disabled at once. One that fails is disabled after a while without any
-- success.
update webhook_endpoints set disabled_at = now_ms(), disabled_why = :why
where id = :id and disabled_at is null and failing_since <= now_ms() - :failing_ms
returning id;

-- webhook_events_put --
-- The outbox: one row for each endpoint that wants events of this job's end. Events of a disabled
-- endpoint are listed as failed. Endpoints are locked until the commit, so that one that is being
-- deleted leaves no row behind.
insert into webhook_deliveries (
    event_id, endpoint_id, tenant_id, job_id, event_type, state, attempt_count, created_at, due_at, ended_at, failure
)
select 'evt_' || substr(j.id, 7), e.id, j.tenant_id, j.id, j.event_type,
    case when e.disabled_at is null then 'pending' else 'failed' end, 0,
    j.ended_at, now_ms(),
    case when e.disabled_at is not null then now_ms() end,
    case when e.disabled_at is not null then 'endpoint_disabled' end
from (
    select id, tenant_id, coalesce(completed_at, failed_at, expired_at, cancelled_at) as ended_at,
        case when kind = 'batch' then 'batch.' || state when state = 'cancelled' then 'response.cancelled'
            when answered_count > 0 then 'response.' || cast(:response_status as text) else 'response.failed' end as event_type
    from jobs
    where id = :job_id and kind in ('batch', 'response') and state in ('completed', 'failed', 'expired', 'cancelled')
) j
join webhook_endpoints e on (e.job_id is null and e.tenant_id = j.tenant_id) or e.job_id = j.id
where ',' || e.event_types || ',' like '%,' || j.event_type || ',%'
/*! for key share of e */
on conflict do nothing;

-- webhook_responses_wanted --
-- Whether an endpoint of the tenant wants events of responses.
select 1 from webhook_endpoints where tenant_id = :tenant_id and job_id is null and event_types like '%response.%' limit 1;

-- webhook_wanted_of_job --
-- The events that the callback of a job wants.
select event_types from webhook_endpoints where job_id = :job_id;

-- webhook_item_event_put --
-- An event of one item, for the callback of its job. Events of a disabled endpoint are listed as
-- failed.
insert into webhook_deliveries (
    event_id, endpoint_id, tenant_id, job_id, event_type, item, state, attempt_count, created_at, due_at, ended_at, failure
)
select cast(:event_id as text), e.id, e.tenant_id, e.job_id, cast(:event_type as text), cast(:item as bigint),
    case when e.disabled_at is null then 'pending' else 'failed' end, 0, now_ms(), now_ms(),
    case when e.disabled_at is not null then now_ms() end,
    case when e.disabled_at is not null then 'endpoint_disabled' end
from webhook_endpoints e
where e.job_id = :job_id
on conflict do nothing;

-- webhook_deliveries_due --
-- Whether a delivery is due that no living worker has leased.
select 1 from webhook_deliveries
where state = 'pending' and due_at <= now_ms()
    and (worker_id is null or not exists (select 1 from workers w where w.id = worker_id and w.state = 'alive'))
limit 1;

-- webhook_tenants_due --
-- The tenants with a delivery that is due and free, and how many deliveries each has under way,
-- fewest first. Each tenant is found by one step in the index, however many deliveries it has.
with recursive waiting (tenant_id) as (
    select min(d.tenant_id) from webhook_deliveries d where d.state = 'pending'
    union all
    select (select min(d.tenant_id) from webhook_deliveries d where d.state = 'pending' and d.tenant_id > w.tenant_id)
    from waiting w where w.tenant_id is not null
),
ranked as (
    select w.tenant_id, (
        select d.due_at from webhook_deliveries d
        where d.state = 'pending' and d.tenant_id = w.tenant_id and d.due_at <= now_ms()
            and (d.worker_id is null or not exists (select 1 from workers a where a.id = d.worker_id and a.state = 'alive'))
        order by d.due_at
        limit 1
    ) as first_due_at, (
        select count(*) from webhook_deliveries o
        where o.lease_token is not null and o.tenant_id = w.tenant_id
            and exists (select 1 from workers a where a.id = o.worker_id and a.state = 'alive')
    ) as out_count
    from waiting w where w.tenant_id is not null
)
select tenant_id, out_count from ranked
where first_due_at is not null and out_count < :tenant_max
order by out_count, first_due_at
limit :count_max;

-- webhook_endpoints_due --
-- The endpoints of one tenant with a delivery that is due and free, and how many deliveries each
-- has under way, fewest first. Each endpoint is found by one step in the index, however many
-- deliveries it has.
with recursive waiting (endpoint_id) as (
    select min(d.endpoint_id) from webhook_deliveries d where d.state = 'pending' and d.tenant_id = :tenant_id
    union all
    select (
        select min(d.endpoint_id) from webhook_deliveries d
        where d.state = 'pending' and d.tenant_id = :tenant_id and d.endpoint_id > w.endpoint_id
    )
    from waiting w where w.endpoint_id is not null
),
ranked as (
    select w.endpoint_id, (
        select d.due_at from webhook_deliveries d
        where d.state = 'pending' and d.tenant_id = :tenant_id and d.endpoint_id = w.endpoint_id and d.due_at <= now_ms()
            and (d.worker_id is null or not exists (select 1 from workers a where a.id = d.worker_id and a.state = 'alive'))
        order by d.due_at
        limit 1
    ) as first_due_at, (
        select count(*) from webhook_deliveries o
        where o.lease_token is not null and o.tenant_id = :tenant_id and o.endpoint_id = w.endpoint_id
            and exists (select 1 from workers a where a.id = o.worker_id and a.state = 'alive')
    ) as out_count
    from waiting w where w.endpoint_id is not null
)
select endpoint_id, out_count from ranked
where first_due_at is not null and out_count < :endpoint_max
order by out_count, first_due_at
limit :count_max;

-- webhook_deliveries_lease --
-- Lease the next deliveries to one endpoint. A row that another transaction changes is skipped, so
-- a lease never waits. The rows are picked in a separate query: as a condition of the update,
-- PostgreSQL might pick again for each row, and lease too many.
with picked as (
    select d.event_id as picked_event, d.endpoint_id as picked_endpoint from webhook_deliveries d
    where d.state = 'pending' and d.tenant_id = :tenant_id and d.endpoint_id = :endpoint_id and d.due_at <= now_ms()
        and (d.worker_id is null or not exists (select 1 from workers a where a.id = d.worker_id and a.state = 'alive'))
    order by d.due_at, d.event_id
    limit :count_max /*! for update skip locked */
)
update webhook_deliveries set worker_id = :worker_id, lease_token = :token
where (event_id, endpoint_id) in (select picked_event, picked_endpoint from picked)
    and exists (select 1 from workers w where w.id = :worker_id and w.state = 'alive')
returning event_id;

-- webhook_deliveries_leased --
select d.event_id, d.endpoint_id, d.tenant_id, d.job_id, d.event_type, d.item, d.created_at, d.attempt_count, e.url, e.secret, e.door,
    e.headers,
    case when e.old_until > now_ms() then e.old_secret end as old_secret, now_ms() as now
from webhook_deliveries d
join webhook_endpoints e on e.id = d.endpoint_id
where d.lease_token = :token;

-- webhook_delivered --
-- moves: webhook_deliveries: pending -> delivered
update webhook_deliveries set state = 'delivered', attempt_count = attempt_count + 1, status = :status, failure = null,
    ended_at = now_ms(), worker_id = null, lease_token = null
where event_id = :event_id and endpoint_id = :endpoint_id and state = 'pending' and lease_token = :token
returning event_id;

-- webhook_postponed --
update webhook_deliveries set attempt_count = attempt_count + 1, status = :status, failure = :failure,
    due_at = now_ms() + :wait_ms, worker_id = null, lease_token = null
where event_id = :event_id and endpoint_id = :endpoint_id and state = 'pending' and lease_token = :token
returning event_id;

-- webhook_failed --
-- moves: webhook_deliveries: pending -> failed
update webhook_deliveries set state = 'failed', attempt_count = attempt_count + 1, status = :status, failure = :failure,
    ended_at = now_ms(), worker_id = null, lease_token = null
where event_id = :event_id and endpoint_id = :endpoint_id and state = 'pending' and lease_token = :token
returning event_id;

-- webhook_deliveries_fail_rest --
-- Fail some deliveries that wait for a disabled endpoint. Those that are being sent end by
-- themselves.
-- moves: webhook_deliveries: pending -> failed
update webhook_deliveries set state = 'failed', failure = 'endpoint_disabled', ended_at = now_ms()
where (event_id, endpoint_id) in (
    select d.event_id, d.endpoint_id from webhook_deliveries d
    where d.endpoint_id = :endpoint_id and d.state = 'pending' and d.lease_token is null
    limit :count_max
) and state = 'pending' and lease_token is null
returning event_id;

-- webhook_delivery_replay --
-- moves: webhook_deliveries: delivered -> pending
-- moves: webhook_deliveries: failed -> pending
update webhook_deliveries set state = 'pending', attempt_count = 0, due_at = now_ms(), ended_at = null, status = null, failure = null
where tenant_id = :tenant_id and event_id = :event_id and endpoint_id = :endpoint_id and state in ('delivered', 'failed')
returning event_id;

-- webhook_delivery_get --
select d.*, e.url from webhook_deliveries d
join webhook_endpoints e on e.id = d.endpoint_id
where d.tenant_id = :tenant_id and d.event_id = :event_id and d.endpoint_id = :endpoint_id;

-- webhook_delivery_cursor --
-- The place where a page begins. Removed deliveries still have one.
select tenant_id, created_at from webhook_deliveries where event_id = :event_id and endpoint_id = :endpoint_id
union all
select tenant_id, created_at from list_places where id = cast(:event_id as text) || '.' || cast(:endpoint_id as text);

-- webhook_delivery_list --
select d.*, e.url from webhook_deliveries d
join webhook_endpoints e on e.id = d.endpoint_id
where d.tenant_id = :tenant_id and (cast(:state as text) is null or d.state = :state)
    and (d.created_at < :created_at or (d.created_at = :created_at and (d.event_id < :event_id
        or (d.event_id = :event_id and d.endpoint_id < :endpoint_id))))
order by d.created_at desc, d.event_id desc, d.endpoint_id desc
limit :count_max;

-- webhook_delivery_place_put --
insert into list_places (id, tenant_id, created_at, deleted_at)
values (cast(:event_id as text) || '.' || cast(:endpoint_id as text), :tenant_id, :created_at, now_ms())
on conflict (id) do nothing;

-- webhook_deliveries_delete --
-- Remove some deliveries of an endpoint, whatever their state.
delete from webhook_deliveries where (event_id, endpoint_id) in (
    select d.event_id, d.endpoint_id from webhook_deliveries d
    where d.endpoint_id = :endpoint_id and d.tenant_id = :tenant_id
    limit :count_max
)
returning event_id, endpoint_id, tenant_id, created_at;

-- webhook_deliveries_forget --
-- Remove some completed deliveries of an ended job. Pending ones outlive their job, and failed ones
-- are listed for a while.
delete from webhook_deliveries where (event_id, endpoint_id) in (
    select d.event_id, d.endpoint_id from webhook_deliveries d
    where d.job_id = :job_id and d.state = 'delivered'
        and exists (select 1 from jobs j where j.id = d.job_id and j.state in ('completed', 'failed', 'expired', 'cancelled'))
    limit :count_max
)
returning event_id, endpoint_id, tenant_id, created_at;

-- webhook_delivered_forget --
-- Remove a completed delivery that outlived its job.
delete from webhook_deliveries
where event_id = :event_id and endpoint_id = :endpoint_id and state = 'delivered'
    and not exists (select 1 from jobs j where j.id = webhook_deliveries.job_id)
returning job_id, tenant_id, created_at;

-- webhook_jobs_gone --
-- Jobs that are gone, with deliveries that were listed as long as the jobs would have been. A job
-- may appear several times. The time is selected, as in jobs_ended_before.
select d.job_id from webhook_deliveries d
where d.created_at < (select now_ms()) - :keep_ms and d.state <> 'pending'
    and not exists (select 1 from jobs j where j.id = d.job_id)
order by d.created_at
limit :count_max;

-- webhook_deliveries_drop --
-- Remove some listed deliveries of a job that is gone.
delete from webhook_deliveries where (event_id, endpoint_id) in (
    select d.event_id, d.endpoint_id from webhook_deliveries d where d.job_id = :job_id and d.state <> 'pending' limit :count_max
)
returning event_id, endpoint_id, tenant_id, created_at;
