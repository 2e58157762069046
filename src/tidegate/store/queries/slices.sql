-- Models of jobs, leases, and the states of slices.

-- job_model_put --
insert into job_models (job_id, model, item_count, slice_count, work_units, share_owner, queue, created_at, expires_at, due_at, begin_by, state,
    rests_until, priority)
values (:job_id, :model, :item_count, :slice_count, :work_units, :share_owner, :queue, :created_at, :expires_at, :due_at, :begin_by, :state,
    :rests_until, :priority);

-- job_models_named --
-- Lines that cannot be sent have no model.
select model from job_models where job_id = :job_id and model <> '' order by model;

-- job_models_rest --
-- The job's own budgets are spent: no worker looks at it before this moment. A shorter rest never
-- replaces a longer one. The rest is at most a second if the job's key has just been changed,
-- because the worker may not know that yet.
with rest as (
    select case when cast(:wait_ms as bigint) > 1000 and exists (
        select 1 from jobs j join keys k on k.id = j.key_id where j.id = :job_id and k.changed_at > now_ms() - 3000
    ) then 1000 else cast(:wait_ms as bigint) end as ms
)
update job_models set rests_until = now_ms() + rest.ms
from rest
where job_id = :job_id and model = :model and rests_until < now_ms() + rest.ms;

-- job_models_leased --
-- The time of the last lease is exact only to a second, so that many leases of one job do not wait
-- for each other.
update job_models set leased_at = now_ms()
where job_id = :job_id and model = :model and (leased_at is null or leased_at < now_ms() - 1000);

-- job_models_begun --
-- The job has begun: from now on it is due when its window ends.
update job_models set begun_at = now_ms(), due_at = expires_at where job_id = :job_id;

-- job_models_done --
update job_models set done_count = done_count + :done_count where job_id = :job_id and model = :model;

-- job_models_close --
-- The job closes: the scheduler does not see it any more.
-- moves: job_models: open -> closed
-- moves: job_models: held -> closed
update job_models set state = 'closed' where job_id = :job_id and state in ('open', 'held');

-- job_models_spent --
-- No slice of the model is left, while the job continues with other models. No new one can appear:
-- slices are made only from unfinished ones.
-- moves: job_models: open -> closed
update job_models set state = 'closed'
where model = :model and share_owner = :share_owner and state = 'open'
    and not exists (select 1 from slices s where s.job_id = job_models.job_id and s.model = job_models.model and s.state = 'ready')
    and not exists (select 1 from slices s where s.job_id = job_models.job_id and s.model = job_models.model and s.state = 'leased');

-- job_open_for_lease --
-- The lock is kept until the lease commits, so that no job is closed between this look and the
-- lease. It is the weakest lock: leases wait neither for each other nor for record, only for a
-- transaction that closes the job (`job_halt`). Return also whether the last lease is old, whether
-- this is a replay of a lease, and the facts about the job that a leased slice gets.
select cast(:token as text) as token,
    coalesce((select m.leased_at from job_models m where m.job_id = j.id and m.model = :model), 0) + 1000 < now_ms() as is_old,
    exists (select 1 from slices s
        where s.job_id = :job_id and s.lease_token = :token and s.worker_id = :worker_id and s.state = 'leased') as is_replay,
    j.tenant_id, j.work_blob_id, j.expires_at - now_ms() as expires_in_ms,
    coalesce((select t.name from tenants t where t.id = j.tenant_id), '') as tenant, j.share_owner, j.key_id, j.user_name,
    (select k.team from keys k where k.id = j.key_id) as team, j.limits, j.answers, j.shape, j.traceparent,
    j.interactive_at - now_ms() as interactive_in_ms, j.door is not null as has_item_events
from jobs j
where j.id = :job_id and j.state = 'in_progress' and j.closing is null and j.expires_at > now_ms() and j.begun_at is not null
    and j.paused_at is null and j.not_before <= now_ms() /*! for key share */;

-- job_open_to_begin --
-- Lock a job for its first lease, which also writes the row. A shared lock would deadlock two first
-- leases.
select j.id, j.tenant_id, j.work_blob_id, j.expires_at - now_ms() as expires_in_ms,
    coalesce((select t.name from tenants t where t.id = j.tenant_id), '') as tenant, j.share_owner, j.key_id, j.user_name,
    (select k.team from keys k where k.id = j.key_id) as team, j.limits, j.answers, j.shape, j.traceparent,
    j.interactive_at - now_ms() as interactive_in_ms, j.door is not null as has_item_events
from jobs j
where j.id = :job_id and j.state = 'in_progress' and j.closing is null and j.expires_at > now_ms()
    and j.paused_at is null and j.not_before <= now_ms() /*! for no key update */;

-- job_of_lease --
-- Return the facts about a job for a replayed lease, whatever the job's state.
select j.id, j.tenant_id, j.work_blob_id, j.expires_at - now_ms() as expires_in_ms,
    coalesce((select t.name from tenants t where t.id = j.tenant_id), '') as tenant, j.share_owner, j.key_id, j.user_name,
    (select k.team from keys k where k.id = j.key_id) as team, j.limits, j.answers, j.shape, j.traceparent,
    j.interactive_at - now_ms() as interactive_in_ms, j.door is not null as has_item_events
from jobs j
where j.id = :job_id;

-- jobs_waiting_long --
-- Responses whose items have waited until they go as interactive calls, the longest wait first.
-- They are leased whatever the tide is.
select j.id, s.model
from jobs j
join slices s on s.job_id = j.id and s.state = 'ready' and s.ready_at <= now_ms()
where j.interactive_at <= now_ms() and j.state = 'in_progress' and j.closing is null and j.paused_at is null
order by j.interactive_at
limit :count_max;

-- slices_lease --
-- Lease ready slices under a token that the caller made, so that the call can be replayed. The
-- lease is committed before any call is sent. A worker that is gone gets nothing. Slices that lost
-- three or more owners are suspects: a worker has at most :suspects_max of them at a time, and
-- takes those that lost most owners first. While slices of the job that lost owners are leased,
-- rest, or have just been freed, its last :kept slices that lost none are left for checks; and
-- beside one that lost more than three, the last :kept that lost fewer than it.
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
        and (cast(:kept as bigint) = 0 or not (
            exists (select 1 from slices z where z.job_id = :job_id and z.model = :model and z.state = 'leased'
                and z.lost_count > s.lost_count and z.lost_count <= :search_max and (s.lost_count = 0 or z.lost_count > 3))
            or exists (select 1 from slices y where y.job_id = :job_id and y.model = :model and y.state = 'ready'
                and y.lost_count > s.lost_count and y.lost_count <= :search_max and (s.lost_count = 0 or y.lost_count > 3)
                and y.ready_at > now_ms() - 10000)
        ) or s.first < (
            select r.first from slices r where r.job_id = :job_id and r.model = :model and r.state = 'ready'
                and r.lost_count <= s.lost_count
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
-- The slices of a token: the answer to a replayed lease.
select lease_token, endpoint, first, count, read_first, work_at, work_bytes, work_units, lost_count, lease_count from slices
where job_id = :job_id and lease_token = :token and worker_id = :worker_id and state = 'leased'
order by first;

-- job_begin --
update jobs set begun_at = now_ms() where id = :job_id and begun_at is null;

-- slice_outcomes --
-- The items of a slice that are done: a slice that was given back continues where it stopped.
select number from outcomes where job_id = :job_id and number >= :first and number < :first + :count order by number;

-- slice_attempts --
select number, count, not_before - now_ms() as wait_ms, reason, hand_backs, alone_losses, tries from attempts where job_id = :job_id and number >= :first and number < :first + :count order by number;

-- slice_finish --
-- All items of the slice have an outcome. But if the job closed first, the outcomes were refused,
-- and publish must still find the items here.
-- moves: slices: leased -> done
update slices set state = 'done', lease_token = null, worker_id = null
where job_id = :job_id and first = :first and state = 'leased' and lease_token = :token
    and exists (select 1 from jobs j where j.id = :job_id and (j.state in ('in_progress', 'cancelling') or j.closing = 'completed'));

-- slice_release --
-- The owner gives the slice back, so it does not count as lost. It rests for at most a second if
-- the job's key has just been changed, because the worker may not know that yet.
-- moves: slices: leased -> ready
update slices set state = 'ready', lease_token = null, worker_id = null, ready_at = now_ms() + case
    when cast(:delay_ms as bigint) > 1000 and exists (
        select 1 from jobs j join keys k on k.id = j.key_id where j.id = :job_id and k.changed_at > now_ms() - 3000
    ) then 1000 else cast(:delay_ms as bigint) end
where job_id = :job_id and first = :first and state = 'leased' and lease_token = :token
returning first;

-- slices_reclaim --
-- Free the slices of a worker that is gone, never those of a living one. A slice that a late owner
-- is recording now is left for the next sweep.
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
-- Note how many owners a slice has lost.
update slices set lost_count = :lost_count where job_id = :job_id and first = :first and state = 'ready';

-- slices_stranded --
-- Incarnations that are gone and still have slices.
select distinct s.worker_id from slices s
where s.state = 'leased' and not exists (select 1 from workers w where w.id = s.worker_id and w.state = 'alive')
limit :count_max;

-- slice_of_item --
-- The slice of an item, also if it is done: for answers that were found in a lost worker's log.
select first, count, model, work_units from slices where job_id = :job_id and first <= :number order by first desc limit 1;

-- slice_get --
select first, count, model, endpoint, read_first, work_at, work_bytes, work_units, lost_count, state, lease_token
from slices where job_id = :job_id and first = :first;

-- slice_drop --
-- A suspect slice is replaced by smaller ones.
delete from slices where job_id = :job_id and first = :first and state = 'ready' returning first;

-- slice_shorten --
-- The owner sends nothing from this item on: the slice ends before it, and the rest becomes another
-- slice.
update slices set count = :to_item - first, work_units = :work_units
where job_id = :job_id and first = :first and state = 'leased' and lease_token = :token
    and first < :to_item and first + count > :to_item
returning first;

-- slices_drop_job --
-- A job that ended needs no slices.
delete from slices where job_id = :job_id;

-- slices_unfinished --
-- The places in the work file of slices that are not done, for publish.
select first, count, read_first, work_at, work_bytes from slices where job_id = :job_id and state <> 'done' order by first;

-- slice_tokens --
-- The job's slices that a token still has; verdicts under other tokens are refused. Locked, so that
-- no slice gets another owner meanwhile.
select first, count from slices where job_id = :job_id and lease_token = :token and state = 'leased' order by first /*! for update */;
