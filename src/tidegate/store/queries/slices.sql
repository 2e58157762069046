-- The scheduler's look, leases, and what becomes of slices.

-- job_model_put --
insert into job_models (job_id, model, item_count, slice_count, work_units, share_owner, queue, created_at, expires_at, due_at, begin_by, state,
    rests_until, priority)
values (:job_id, :model, :item_count, :slice_count, :work_units, :share_owner, :queue, :created_at, :expires_at, :due_at, :begin_by, :state,
    :rests_until, :priority);

-- job_models_named --
-- Lines that cannot be sent have no model.
select model from job_models where job_id = :job_id and model <> '' order by model;

-- job_models_rest --
-- The job's own budgets are spent: no worker looks at it before this moment. A shorter rest never overwrites a longer one. Not for
-- longer than a second when its key was changed a moment ago: the worker that asks for this may not know it.
with rest as (
    select case when cast(:wait_ms as bigint) > 1000 and exists (
        select 1 from jobs j join keys k on k.id = j.key_id where j.id = :job_id and k.changed_at > now_ms() - 3000
    ) then 1000 else cast(:wait_ms as bigint) end as ms
)
update job_models set rests_until = now_ms() + rest.ms
from rest
where job_id = :job_id and model = :model and rests_until < now_ms() + rest.ms;

-- job_models_leased --
-- When the last slice of it was leased, to the second: many leases of one job do not wait for each other.
update job_models set leased_at = now_ms()
where job_id = :job_id and model = :model and (leased_at is null or leased_at < now_ms() - 1000);

-- job_models_begun --
-- It has begun: from now on it is due when its window ends.
update job_models set begun_at = now_ms(), due_at = expires_at where job_id = :job_id;

-- job_models_done --
update job_models set done_count = done_count + :done_count where job_id = :job_id and model = :model;

-- job_models_close --
-- The job closes: the scheduler sees nothing of it any more.
-- moves: job_models: open -> closed
-- moves: job_models: held -> closed
update job_models set state = 'closed' where job_id = :job_id and state in ('open', 'held');

-- job_models_spent --
-- No slice of the model is left, though the job goes on with others. That stays so: slices are only ever made of unfinished ones.
-- moves: job_models: open -> closed
update job_models set state = 'closed'
where model = :model and share_owner = :share_owner and state = 'open'
    and not exists (select 1 from slices s where s.job_id = job_models.job_id and s.model = job_models.model and s.state = 'ready')
    and not exists (select 1 from slices s where s.job_id = job_models.job_id and s.model = job_models.model and s.state = 'leased');

-- job_open_for_lease --
-- Held until the lease commits, so that no job is closed between the look and the lease. The weakest hold there is: leases wait neither
-- for each other nor for record, only for the transaction that closes the job (`job_halt`). Says too whether the time of the last lease is old, whether
-- this very lease was made before, and what its slices say of the job.
select cast(:token as text) as token,
    coalesce((select m.leased_at from job_models m where m.job_id = j.id and m.model = :model), 0) + 1000 < now_ms() as is_old,
    exists (select 1 from slices s
        where s.job_id = :job_id and s.lease_token = :token and s.worker_id = :worker_id and s.state = 'leased') as is_held,
    j.tenant_id, j.work_blob_id, j.expires_at - now_ms() as expires_in_ms,
    coalesce((select t.name from tenants t where t.id = j.tenant_id), '') as tenant, j.share_owner, j.key_id, j.user_name,
    (select k.team from keys k where k.id = j.key_id) as team, j.limits, j.answers, j.shape, j.traceparent,
    j.interactive_at - now_ms() as interactive_in_ms, j.door is not null as has_item_events
from jobs j
where j.id = :job_id and j.state = 'in_progress' and j.closing is null and j.expires_at > now_ms() and j.begun_at is not null
    and j.paused_at is null and j.not_before <= now_ms() /*! for key share */;

-- job_open_to_begin --
-- The same for a job's first lease, which also writes the row: two that shared it could both never go on to write.
select j.id, j.tenant_id, j.work_blob_id, j.expires_at - now_ms() as expires_in_ms,
    coalesce((select t.name from tenants t where t.id = j.tenant_id), '') as tenant, j.share_owner, j.key_id, j.user_name,
    (select k.team from keys k where k.id = j.key_id) as team, j.limits, j.answers, j.shape, j.traceparent,
    j.interactive_at - now_ms() as interactive_in_ms, j.door is not null as has_item_events
from jobs j
where j.id = :job_id and j.state = 'in_progress' and j.closing is null and j.expires_at > now_ms()
    and j.paused_at is null and j.not_before <= now_ms() /*! for no key update */;

-- job_of_lease --
-- The same for a lease that is asked for again, wherever its job stands.
select j.id, j.tenant_id, j.work_blob_id, j.expires_at - now_ms() as expires_in_ms,
    coalesce((select t.name from tenants t where t.id = j.tenant_id), '') as tenant, j.share_owner, j.key_id, j.user_name,
    (select k.team from keys k where k.id = j.key_id) as team, j.limits, j.answers, j.shape, j.traceparent,
    j.interactive_at - now_ms() as interactive_in_ms, j.door is not null as has_item_events
from jobs j
where j.id = :job_id;

-- jobs_waiting_long --
-- Responses whose items have waited until they go like interactive calls, longest first: they are leased whatever the tide is.
select j.id, s.model
from jobs j
join slices s on s.job_id = j.id and s.state = 'ready' and s.ready_at <= now_ms()
where j.interactive_at <= now_ms() and j.state = 'in_progress' and j.closing is null and j.paused_at is null
order by j.interactive_at
limit :count_max;

-- slices_lease --
-- Takes ready slices under a token that the caller made, so that the call can be replayed. The lease is committed before any call
-- goes out. A worker that is gone gets nothing. Slices that lost three owners or more are suspects: a worker holds at most
-- :suspects_max of them at a time, and takes those that lost the most owners first. While slices of the job that
-- lost owners are out or were freed a moment ago, its last :kept slices that lost none are left for checks.
-- moves: slices: ready -> leased
with suspects as (
    select q.first as suspect_first from slices q
    where q.job_id = :job_id and q.model = :model and q.state = 'ready' and q.ready_at <= now_ms()
        and q.lost_count > 0 and q.lost_count >= 3
    order by q.lost_count desc, q.first
    limit (
        select case when count(*) < cast(:suspects_max as bigint) then cast(:suspects_max as bigint) - count(*) else 0 end
        from slices h where h.worker_id = :worker_id and h.state = 'leased' and h.lost_count >= 3
    )
), picked as (
    select s.job_id as picked_job, s.first as picked_first from slices s
    where s.job_id = :job_id and s.model = :model and s.state = 'ready' and s.ready_at <= now_ms()
        and (s.lost_count < 3 or s.first in (select suspect_first from suspects))
        and (s.lost_count > 0 or cast(:kept as bigint) = 0 or not (
            exists (select 1 from slices z where z.job_id = :job_id and z.model = :model and z.state = 'leased'
                and z.lost_count between 1 and :search_max)
            or exists (select 1 from slices y where y.job_id = :job_id and y.model = :model and y.state = 'ready' and y.lost_count > 0
                and y.lost_count <= :search_max and y.ready_at > now_ms() - 10000)
        ) or s.first < (
            select r.first from slices r where r.job_id = :job_id and r.model = :model and r.state = 'ready' and r.lost_count = 0
            order by r.first desc limit 1 offset case when cast(:kept as bigint) > 0 then cast(:kept as bigint) - 1 else 0 end
        ))
    order by s.first
    limit :count_max /*! for update skip locked */
)
update slices set state = 'leased', lease_token = :token, worker_id = :worker_id, lease_count = lease_count + 1, leased_as = :why
from picked
where job_id = picked_job and first = picked_first and state = 'ready'
    and exists (select 1 from workers w where w.id = :worker_id and w.state = 'alive' and w.alive_until > now_ms())
returning lease_token, endpoint, first, count, read_first, work_at, work_bytes, work_units, lost_count, lease_count;

-- slices_of_token --
-- What a token holds: the answer to a lease that is asked for again.
select lease_token, endpoint, first, count, read_first, work_at, work_bytes, work_units, lost_count, lease_count from slices
where job_id = :job_id and lease_token = :token and worker_id = :worker_id and state = 'leased'
order by first;

-- job_begin --
update jobs set begun_at = now_ms() where id = :job_id and begun_at is null;

-- slice_outcomes --
-- Which items of a slice are done already: a slice that comes back is not run again from its start.
select number from outcomes where job_id = :job_id and number >= :first and number < :first + :count order by number;

-- slice_attempts --
select number, count, not_before - now_ms() as wait_ms, reason, hand_backs, alone_losses, tries from attempts where job_id = :job_id and number >= :first and number < :first + :count order by number;

-- slice_finish --
-- Every item of it has an outcome. Not so when the job closed first: then its owner's outcomes were refused, and publish must
-- still find the items here.
-- moves: slices: leased -> done
update slices set state = 'done', lease_token = null, worker_id = null
where job_id = :job_id and first = :first and state = 'leased' and lease_token = :token
    and exists (select 1 from jobs j where j.id = :job_id and (j.state in ('in_progress', 'cancelling') or j.closing = 'completed'));

-- slice_release --
-- Given back by its owner: nothing of it is lost, and no item is to blame. It rests for a second at most when its key was changed a moment
-- ago: the worker that gives it back may not know it.
-- moves: slices: leased -> ready
update slices set state = 'ready', lease_token = null, worker_id = null, ready_at = now_ms() + case
    when cast(:delay_ms as bigint) > 1000 and exists (
        select 1 from jobs j join keys k on k.id = j.key_id where j.id = :job_id and k.changed_at > now_ms() - 3000
    ) then 1000 else cast(:delay_ms as bigint) end
where job_id = :job_id and first = :first and state = 'leased' and lease_token = :token
returning first;

-- slices_reclaim --
-- The owner is gone: its slices may be run by someone else. The living keep theirs. What a late owner is recording at this moment is left
-- for the next sweep.
-- moves: slices: leased -> ready
with picked as (
    select s.job_id as picked_job, s.first as picked_first from slices s
    where s.state = 'leased' and s.worker_id = :worker_id
        and not exists (select 1 from workers w where w.id = :worker_id and w.state = 'alive') /*! for update skip locked */
)
update slices set state = 'ready', lease_token = null, worker_id = null, ready_at = now_ms()
from picked
where job_id = picked_job and first = picked_first and state = 'leased'
returning job_id, first, count, lost_count;

-- slice_blame --
-- A slice that lost its owner remembers how many it has lost.
update slices set lost_count = :lost_count where job_id = :job_id and first = :first and state = 'ready';

-- slices_stranded --
-- Leased to an incarnation that is gone: a lease that committed while its worker was being declared gone.
select distinct s.worker_id from slices s
where s.state = 'leased' and not exists (select 1 from workers w where w.id = s.worker_id and w.state = 'alive')
limit :count_max;

-- slice_of_item --
-- The slice that an item belongs to, also when it is done: for answers that were found in a dead worker's log.
select first, count, model, work_units from slices where job_id = :job_id and first <= :number order by first desc limit 1;

-- slice_get --
select first, count, model, endpoint, read_first, work_at, work_bytes, work_units, lost_count, state, lease_token
from slices where job_id = :job_id and first = :first;

-- slice_drop --
-- A suspect slice gives way to smaller ones.
delete from slices where job_id = :job_id and first = :first and state = 'ready' returning first;

-- slice_shorten --
-- Its owner will send nothing from this item on: the slice ends before it, and the rest becomes a slice of its own.
update slices set count = :to_item - first, work_units = :work_units
where job_id = :job_id and first = :first and state = 'leased' and lease_token = :token
    and first < :to_item and first + count > :to_item
returning first;

-- slices_drop_job --
-- A job that ended needs no slices.
delete from slices where job_id = :job_id;

-- slices_unfinished --
-- Where the items without an outcome lie in the work file, for the one who publishes.
select first, count, read_first, work_at, work_bytes from slices where job_id = :job_id and state <> 'done' order by first;

-- slice_tokens --
-- Which of a job's slices a token still holds: the verdicts of anyone else are refused. Held, so that no slice changes hands meanwhile.
select first, count from slices where job_id = :job_id and lease_token = :token and state = 'leased' order by first /*! for update */;
