-- Tenants and their API keys.

-- tenant_put --
insert into tenants (id, name, created_at) values (:id, :name, now_ms())
on conflict do nothing;

-- tenant_by_name --
select id from tenants where name = :name;

-- tenant_name --
select name from tenants where id = :id;

-- tenant_lock --
-- Serialize changes that must be counted before they are allowed: pending jobs, queued items,
-- stored bytes.
select id from tenants where id = :tenant_id /*! for update */;

-- key_put --
insert into keys (id, tenant_id, secret_hash, label, team, user_name, scopes, models, created_at, expires_at, resources, limits,
    parallel_max, addresses, environments)
values (:id, :tenant_id, :secret_hash, :label, :team, :user_name, :scopes, :models, now_ms(), :expires_at, :resources, :limits,
    :parallel_max, :addresses, :environments)
on conflict (id) do nothing;

-- key_get --
select k.id, k.tenant_id, k.secret_hash, k.team, k.user_name, k.scopes, k.models, k.expires_at, k.revoked_at, k.resources, k.limits,
    k.old_hash, k.old_until, k.parallel_max, k.addresses, k.environments, k.label, now_ms() as now
from keys k
where k.id = :id and k.deleted_at is null;

-- key_facts --
-- The states of keys with open calls. `ids` are the keys' ids one after the other, 8 characters
-- each.
with recursive places (start_at) as (
    select 1 union all select start_at + 8 from places where start_at + 8 <= length(cast(:ids as text))
)
select k.id, k.secret_hash, k.old_hash, k.old_until, k.expires_at, k.revoked_at, now_ms() as now
from places p
join keys k on k.id = substr(cast(:ids as text), p.start_at, 8)
where k.deleted_at is null;

-- key_states --
-- The facts that a worker needs about the keys whose slices it has leased. Of a key that is gone
-- only the id in its job is left.
select distinct j.key_id, case when k.deleted_at is null then k.id end as known_id, k.models, k.resources, k.expires_at - now_ms() as expires_in_ms, k.revoked_at, k.limits,
    k.parallel_max
from slices s
join jobs j on j.id = s.job_id
left join keys k on k.id = j.key_id
where s.worker_id = :worker_id and s.state = 'leased' and j.key_id is not null;

-- key_list --
select k.id, t.name as tenant, k.label, k.team, k.user_name, k.scopes, k.models, k.created_at, k.expires_at, k.revoked_at, k.last_used_at,
    k.resources, k.limits, k.old_until, k.parallel_max, k.addresses, k.environments
from keys k
join tenants t on t.id = k.tenant_id
where k.deleted_at is null
order by k.created_at, k.id
limit :count_max;

-- key_cursor --
-- The place where a page begins. Deleted keys still have one.
select created_at, id from keys where id = :id;

-- key_page --
select k.id, t.name as tenant, k.label, k.team, k.user_name, k.scopes, k.models, k.created_at, k.expires_at, k.revoked_at, k.last_used_at,
    k.resources, k.limits, k.old_until, k.parallel_max, k.addresses, k.environments
from keys k
join tenants t on t.id = k.tenant_id
where k.deleted_at is null and (cast(:org as text) is null or t.name = :org)
    and (k.created_at < :created_at or (k.created_at = :created_at and k.id < :id))
order by k.created_at desc, k.id desc
limit :count_max;

-- pepper_fingerprint --
select value from meta where name = 'pepper_fingerprint';

-- pepper_claim --
-- Note the pepper of the keys. No row: there are keys already, and another pepper was noted.
insert into meta (name, value) values ('pepper_fingerprint', :fingerprint)
on conflict (name) do update set value = excluded.value
where meta.value = excluded.value or not exists (select 1 from keys k where k.deleted_at is null)
returning value;

-- key_any --
-- Whether any key was ever made: then each call needs one.
select 1 from keys limit 1;

-- key_revoke --
update keys set revoked_at = now_ms(), changed_at = now_ms()
where id = :id and revoked_at is null and deleted_at is null
returning id;

-- key_delete --
-- The key cannot be used again. The row stays, because calls need a key once there was any.
update keys set deleted_at = now_ms(), changed_at = now_ms(), secret_hash = :no_hash, old_hash = null, old_until = null, label = ''
where id = :id and deleted_at is null
returning id;

-- keys_delete_of --
-- Delete all keys of an organization.
update keys set deleted_at = now_ms(), changed_at = now_ms(), secret_hash = :no_hash, old_hash = null, old_until = null, label = ''
where tenant_id = (select t.id from tenants t where t.name = :org) and deleted_at is null
returning id;

-- key_change --
-- Parts that are not given are not changed.
update keys set models = coalesce(:models, models), resources = coalesce(:resources, resources), limits = coalesce(:limits, limits),
    scopes = coalesce(:scopes, scopes), expires_at = coalesce(:expires_at, expires_at),
    parallel_max = coalesce(:parallel_max, parallel_max), addresses = coalesce(:addresses, addresses),
    environments = coalesce(:environments, environments), changed_at = now_ms()
where id = :id and revoked_at is null and deleted_at is null
returning id;

-- key_slices_wake --
-- Wake the resting slices of a changed key's jobs. Items that wait for an upstream have their own
-- times, and slices behind a canary keep resting.
update slices set ready_at = now_ms()
where state = 'ready' and ready_at > now_ms() and ready_at < :forever
    and job_id in (
        select j.id from jobs j where j.key_id = :key_id and j.state in ('validating', 'in_progress', 'cancelling', 'finalizing')
    );

-- key_models_wake --
-- A job with a `not_before` still waits for that moment.
update job_models set rests_until = (
    select case when j.not_before > now_ms() then j.not_before else now_ms() end from jobs j where j.id = job_models.job_id
)
where state = 'open' and rests_until > now_ms()
    and job_id in (
        select j.id from jobs j where j.key_id = :key_id and j.state in ('validating', 'in_progress', 'cancelling', 'finalizing')
    );

-- key_flows_wake --
-- The next sweep wakes these flows.
update flows set wakes_at = now_ms()
where state = 'asleep' and wakes_at > now_ms() and exists (
    select 1 from job_models m join jobs j on j.id = m.job_id
    where m.model = flows.model and m.share_owner = flows.share_owner and m.state = 'open' and j.key_id = :key_id
);

-- key_rotate --
-- A replay with the same secret changes nothing: the old secret remains.
update keys set old_hash = secret_hash, old_until = now_ms() + :grace_ms, secret_hash = :secret_hash
where id = :id and revoked_at is null and deleted_at is null and (expires_at is null or expires_at > now_ms())
    and secret_hash <> :secret_hash
returning id;

-- key_used --
update keys set last_used_at = now_ms() where id = :id and (last_used_at is null or last_used_at < now_ms() - 60000);

-- tenant_bytes --
-- The stored bytes of a tenant: files, and parts of pending uploads.
select (select coalesce(sum(size_bytes), 0) from files where tenant_id = :tenant_id and state = 'ready' and purpose <> 'whole')
    + (select coalesce(sum(p.size_bytes), 0) from uploads u join upload_parts p on p.upload_id = u.id
        where u.tenant_id = :tenant_id and u.state = 'pending');

-- session_end --
insert into ended_sessions (nonce, ends_at) values (:nonce, :ends_at) on conflict (nonce) do nothing;

-- session_ended --
select 1 from ended_sessions where nonce = :nonce;

-- sessions_prune --
delete from ended_sessions where ends_at <= now_ms() - :keep_ms;
