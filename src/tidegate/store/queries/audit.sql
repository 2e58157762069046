-- What operators changed. Each change is noted in its own transaction; before and after it the same look is taken at what is changed, without its secrets.

-- audit_put --
-- A change that is made again after an unknown commit is noted once.
insert into audit (id, happened_at, actor, action, kind, target, before, after, address)
values (:id, now_ms(), :actor, :action, :kind, :target, :before, :after, :address)
on conflict (id) do nothing;

-- audit_prune --
-- The oldest go first, a bounded number at a time.
delete from audit where id in (
    select id from audit where happened_at < (select now_ms()) - :keep_ms order by happened_at, id limit :count_max
);

-- audit_cursor --
select happened_at, id from audit where id = :id;

-- audit_list --
select id, happened_at, actor, action, kind, target, before, after, address from audit
where (happened_at < :happened_at or (happened_at = :happened_at and id < :id))
    and (cast(:actor as text) is null or actor = :actor)
    and (cast(:action as text) is null or action = :action)
    and (cast(:target as text) is null or target = :target)
order by happened_at desc, id desc
limit :count_max;

-- look_at_key --
select t.name as org, k.label, k.team, k.user_name, k.scopes, k.models, k.resources, k.limits, k.parallel_max, k.addresses, k.environments, k.expires_at,
    k.revoked_at, k.old_until, k.deleted_at
from keys k
join tenants t on t.id = k.tenant_id
where k.id = :target;

-- look_at_org --
-- The keys of an organization.
select k.id from keys k
where k.tenant_id = (select t.id from tenants t where t.name = :target) and k.deleted_at is null
order by k.id;

-- look_at_deployment --
select document from routing where kind = 'deployment' and name = :target;

-- look_at_drain_state --
select document from routing where kind = 'drain_state' and name = :target;

-- look_at_file --
select filename, purpose, size_bytes from files where id = :target;

-- look_at_input --
-- The job that waits to be ingested from a file.
select id as batch, endpoint from jobs where input_file_id = :target and state = 'validating' order by created_at desc, id desc limit 1;

-- look_at_resource --
select document from routing where kind = 'resource' and name = :target;

-- look_at_model --
select document from routing where kind = 'model' and name = :target;

-- look_at_scheduler --
select value from meta where name = :target;

-- look_at_batch --
select t.name as org, j.state, j.closing, j.paused_at, j.priority, j.not_before, j.expires_at, j.step_failures, j.step_not_before, j.retried_by,
    (select count(*) from slices s where s.job_id = j.id and s.state = 'ready' and s.ready_at > now_ms()) as slices_resting
from jobs j
join tenants t on t.id = j.tenant_id
where j.id = :target;

-- look_at_delivery --
-- `EVENT.ENDPOINT`; ids of events have 26 characters.
select d.state, d.attempt_count from webhook_deliveries d
where d.event_id = substr(cast(:target as text), 1, 26) and d.endpoint_id = substr(cast(:target as text), 28);

-- look_at_operation --
select o.action, o.scope, o.state, o.matched_jobs from operations o where o.id = :target;
