-- The changes of operators. Each is noted in its own transaction. The same look at the object,
-- without its secrets, is taken before and after the change.

-- audit_chain_hold --
-- Lock the chain until the transaction ends: one process at a time adds or prunes entries.
insert into audit_chain (id, number, hash, pruned_number, pruned_hash) values (1, 0, '', 0, '')
on conflict (id) do update set id = 1
returning number, hash, pruned_number, pruned_hash, now_ms();

-- audit_chain_ends --
select number, hash, pruned_number, pruned_hash from audit_chain where id = 1;

-- audit_chain_extend --
update audit_chain set number = :number, hash = :hash where id = 1;

-- audit_chain_shorten --
update audit_chain set pruned_number = :number, pruned_hash = :hash where id = 1;

-- audit_put --
-- A change that is repeated after an unknown commit is noted once.
insert into audit (id, happened_at, actor, action, kind, target, before, after, address, number, previous_hash, hash)
values (:id, :happened_at, :actor, :action, :kind, :target, :before, :after, :address, :number, :previous_hash, :hash)
on conflict (id) do nothing
returning id;

-- audit_unchained --
-- Entries that programs of an earlier version wrote, oldest first.
select id, happened_at, actor, action, kind, target, before, after, address from audit
where number is null
order by happened_at, id
limit :count_max;

-- audit_number --
-- Give an entry of an earlier version its place in the chain.
update audit set number = :number, previous_hash = :previous_hash, hash = :hash where id = :id and number is null;

-- audit_unchained_count --
select count(*) from audit where number is null;

-- audit_entries --
-- Entries in the order of the chain.
select id, happened_at, actor, action, kind, target, before, after, address, number, previous_hash, hash from audit
where number > :number
order by number
limit :count_max;

-- audit_oldest --
-- The first entries of the chain, and whether each is old enough to be removed.
select number, hash, case when happened_at < (select now_ms()) - :keep_ms then 1 else 0 end from audit
where number is not null
order by number
limit :count_max;

-- audit_places_put --
insert into list_places (id, tenant_id, created_at, deleted_at)
select id, '', happened_at, now_ms() from audit where number <= :number
on conflict (id) do nothing;

-- audit_prune --
delete from audit where number <= :number;

-- audit_cursor --
-- The place where a page begins. Pruned entries still have one.
select happened_at, id from audit where id = :id
union all
select created_at, id from list_places where tenant_id = '' and id = :id;

-- audit_list --
select id, happened_at, actor, action, kind, target, before, after, address, number, hash from audit
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
-- The target is `EVENT.ENDPOINT`. Ids of events have 26 characters.
select d.state, d.attempt_count from webhook_deliveries d
where d.event_id = substr(cast(:target as text), 1, 26) and d.endpoint_id = substr(cast(:target as text), 28);

-- look_at_operation --
select o.action, o.scope, o.state, o.matched_jobs from operations o where o.id = :target;
