-- Every statement, written in the intersection of SQLite and PostgreSQL. `-- name --` opens a statement, the lines under it say
-- why it is as it is, and `moves:` names the state moves it makes (table: from -> to), which a test holds against core/states.py.
-- PostgreSQL alone sees what stands in /*! … */.

-- now --
-- The database's clock, which decides everything about leases and deadlines.
select now_ms();

-- tenant_put --
insert into tenants (id, name, created_at) values (:id, :name, now_ms())
on conflict do nothing;

-- tenant_by_name --
select id from tenants where name = :name;

-- tenant_lock --
-- Serialises what must be counted before it is allowed: pending jobs, queued items, stored bytes.
select id from tenants where id = :tenant_id /*! for update */;

-- key_put --
insert into keys (id, tenant_id, secret_hash, label, team, user_name, scopes, models, created_at, expires_at)
values (:id, :tenant_id, :secret_hash, :label, :team, :user_name, :scopes, :models, now_ms(), :expires_at)
on conflict (id) do nothing;

-- key_get --
select k.id, k.tenant_id, k.secret_hash, k.team, k.user_name, k.scopes, k.models, k.expires_at, k.revoked_at, now_ms() as now
from keys k
where k.id = :id;

-- key_list --
select k.id, t.name as tenant, k.label, k.team, k.user_name, k.scopes, k.models, k.created_at, k.expires_at, k.revoked_at, k.last_used_at
from keys k
join tenants t on t.id = k.tenant_id
order by k.created_at, k.id
limit :count_max;

-- key_any --
-- Whether any key was ever made: then every call needs one.
select 1 from keys limit 1;

-- key_revoke --
update keys set revoked_at = now_ms() where id = :id and revoked_at is null returning id;

-- key_used --
update keys set last_used_at = now_ms() where id = :id and (last_used_at is null or last_used_at < now_ms() - 60000);

-- worker_put --
-- A process introduces itself; its leases hang on this row.
insert into workers (id, host, version, state, started_at, beat_at, alive_until)
values (:id, :host, :version, 'alive', now_ms(), now_ms(), now_ms() + :lease_ms)
on conflict (id) do nothing;

-- worker_beat --
-- The only write of a heartbeat. No row: this incarnation was declared gone and may not come back.
update workers set beat_at = now_ms(), alive_until = now_ms() + :lease_ms
where id = :id and state = 'alive'
returning alive_until;

-- worker_leases --
-- What the store believes this worker holds, and how the jobs stand: an unknown token is handed back, a closing job stops sending.
select s.job_id, s.first, s.lease_token, j.state, j.closing, coalesce(now_ms() - j.closing_at, 0) as closing_for_ms
from slices s
join jobs j on j.id = s.job_id
where s.worker_id = :id and s.state = 'leased';

-- workers_overdue --
select id from workers where state = 'alive' and alive_until < now_ms() order by alive_until limit :count_max;

-- worker_gone --
-- moves: workers: alive -> gone
update workers set state = 'gone' where id = :id and state = 'alive' and (alive_until < now_ms() or :leaving = 1) returning id;

-- workers_list --
select id, host, version, state, started_at, beat_at, alive_until, now_ms() as now from workers order by started_at desc limit :count_max;

-- workers_prune --
-- Forgets incarnations that ended long ago and own nothing any more.
delete from workers
where state = 'gone' and beat_at < now_ms() - :keep_ms
    and not exists (select 1 from blobs b where b.worker_id = workers.id and b.state = 'writing');

-- blob_put --
-- A blob has a row before it has bytes.
insert into blobs (id, kind, state, worker_id, size_bytes, uses, recorded_to, created_at)
values (:id, :kind, 'writing', :worker_id, 0, 0, 0, now_ms())
on conflict (id) do nothing;

-- blob_keep --
-- Its bytes are durable and something needs them. No row: it was condemned meanwhile, so the bytes do not count.
-- moves: blobs: writing -> kept
update blobs set state = 'kept', size_bytes = :size_bytes, uses = uses + :uses
where id = :id and state = 'writing'
returning id;

-- blob_extend --
-- Record takes a log's bytes into use. No row: the log was condemned, and record must refuse its extents.
update blobs
set uses = uses + :uses,
    size_bytes = case when size_bytes > :recorded_to then size_bytes else :recorded_to end,
    recorded_to = case when recorded_to > :recorded_to then recorded_to else :recorded_to end
where id = :id and state in ('writing', 'kept')
returning id;

-- blob_recorded_to --
-- How far a log was recorded: what lies before is a replay.
select recorded_to from blobs where id = :id;

-- blob_release --
-- Something that needed these bytes is gone.
update blobs set uses = uses - :uses where id = :id;

-- blob_settle --
-- A log whose owner is gone is finished: nothing more of it will be recorded by its owner's hand unless it wakes.
-- moves: blobs: writing -> kept
update blobs set state = 'kept' where id = :id and state = 'writing' returning uses;

-- blobs_condemn_unused --
-- Bytes that nothing needs: kept but unused, and old enough that a transaction under way cannot be about to use them.
-- moves: blobs: kept -> condemned
update blobs set state = 'condemned', condemned_at = now_ms()
where id in (
    select id from blobs where state = 'kept' and uses = 0 and created_at < now_ms() - :age_ms order by created_at limit :count_max
) and state = 'kept' and uses = 0
returning id;

-- blob_condemn --
-- The owner gave this one up itself: a void log, an aborted upload.
-- moves: blobs: writing -> condemned
update blobs set state = 'condemned', condemned_at = now_ms() where id = :id and state = 'writing' and uses = 0 returning id;

-- blobs_abandoned --
-- Blobs still being written whose owner is gone: logs to adopt, uploads and work files to condemn.
select b.id, b.kind, b.recorded_to, b.worker_id, now_ms() - coalesce(w.alive_until, 0) as gone_for_ms
from blobs b
left join workers w on w.id = b.worker_id
where b.state = 'writing' and (w.state is null or w.state <> 'alive')
order by b.created_at
limit :count_max;

-- blobs_condemned --
select id from blobs where state = 'condemned' and condemned_at < now_ms() - :age_ms order by condemned_at limit :count_max;

-- blob_forget --
delete from blobs where id = :id and state = 'condemned' returning id;

-- blob_get --
select id, kind, state, worker_id, size_bytes, uses, recorded_to, created_at from blobs where id = :id;

-- file_put --
insert into files (id, tenant_id, job_id, purpose, filename, state, size_bytes, line_count, sha256, created_at, expires_at)
values (:id, :tenant_id, :job_id, :purpose, :filename, :state, :size_bytes, :line_count, :sha256, now_ms(), now_ms() + cast(:expires_after_ms as bigint));

-- file_get --
-- A caller's own file, while it may be seen.
select * from files where tenant_id = :tenant_id and id = :id and state = 'ready' and (expires_at is null or expires_at > now_ms());

-- file_any --
-- The engine's own look at a file, whatever its state.
select * from files where id = :id;

-- file_cursor --
-- Where a page begins; deleted files still mark a place.
select created_at, id from files where tenant_id = :tenant_id and id = :id and state <> 'growing';

-- file_list_desc --
select * from files
where tenant_id = :tenant_id and state = 'ready' and (expires_at is null or expires_at > now_ms())
    and (cast(:purpose as text) is null or purpose = :purpose)
    and (created_at < :created_at or (created_at = :created_at and id < :id))
order by created_at desc, id desc
limit :count_max;

-- file_list_asc --
select * from files
where tenant_id = :tenant_id and state = 'ready' and (expires_at is null or expires_at > now_ms())
    and (cast(:purpose as text) is null or purpose = :purpose)
    and (created_at > :created_at or (created_at = :created_at and id > :id))
order by created_at asc, id asc
limit :count_max;

-- file_needed --
-- An input is needed until its job has been ingested.
select id from jobs where input_file_id = :id and state = 'validating' limit 1;

-- file_delete --
-- moves: files: ready -> deleted
update files set state = 'deleted', deleted_at = now_ms()
where tenant_id = :tenant_id and id = :id and state = 'ready'
returning id;

-- file_lock --
-- Held by whoever exchanges the pieces of a file, so that nobody else lets go of the same pieces meanwhile.
select id from files where id = :id and state <> 'deleted' /*! for update */;

-- file_show --
-- moves: files: growing -> ready
update files set state = 'ready', size_bytes = :size_bytes, line_count = :line_count, created_at = now_ms(),
    expires_at = now_ms() + cast(:expires_after_ms as bigint)
where id = :id and state = 'growing'
returning id;

-- file_drop --
-- A result file that stayed empty is never shown.
-- moves: files: growing -> deleted
update files set state = 'deleted', deleted_at = now_ms() where id = :id and state = 'growing' returning id;

-- files_expired --
select tenant_id, id from files
where state = 'ready' and expires_at <= now_ms()
    and not exists (select 1 from jobs j where j.input_file_id = files.id and j.state = 'validating')
order by expires_at
limit :count_max;

-- files_prune --
delete from files where state = 'deleted' and deleted_at < now_ms() - :keep_ms;

-- tenant_bytes --
-- What a tenant stores now.
select coalesce(sum(size_bytes), 0) from files where tenant_id = :tenant_id and state = 'ready';

-- extent_put --
insert into extents (file_id, at, size_bytes, blob_id, blob_at) values (:file_id, :at, :size_bytes, :blob_id, :blob_at);

-- extent_grow --
-- The new bytes follow the last extent in the file and in the same blob: one extent instead of two.
update extents set size_bytes = size_bytes + :size_bytes
where file_id = :file_id
    and at = (select max(e.at) from extents e where e.file_id = :file_id)
    and at + size_bytes = :at and blob_id = :blob_id and blob_at + size_bytes = :blob_at
returning at;

-- extent_list --
-- The extents of a file that end behind a place, in order.
select at, size_bytes, blob_id, blob_at from extents
where file_id = :file_id and at + size_bytes > :from_at
order by at
limit :count_max;

-- extent_delete --
delete from extents where file_id = :file_id and at >= :from_at and at < :to_at returning at, size_bytes, blob_id, blob_at;

-- extent_crowded --
-- Files in more pieces than is good for readers.
select file_id, count(*) as pieces from extents group by file_id having count(*) > :count_max order by count(*) desc limit 4;

-- idempotency_get --
select body_hash, object_id from idempotency where tenant_id = :tenant_id and route = :route and key = :key and created_at > now_ms() - :keep_ms;

-- idempotency_forget --
delete from idempotency where tenant_id = :tenant_id and route = :route and key = :key and created_at <= now_ms() - :keep_ms;

-- idempotency_put --
insert into idempotency (tenant_id, route, key, body_hash, object_id, created_at)
values (:tenant_id, :route, :key, :body_hash, :object_id, now_ms());

-- idempotency_prune --
delete from idempotency where created_at < now_ms() - :keep_ms;

-- job_put --
insert into jobs (
    id, tenant_id, key_id, user_name, endpoint, input_file_id, window_text, state, created_at, expires_at, begin_by, metadata,
    output_expires_after_s, ordered, prefix_order, invalid_lines, errors, item_count, answered_count, failed_count, expired_count,
    cancelled_count, unused_count, input_tokens, cached_tokens, output_tokens, reasoning_tokens, output_bytes, error_bytes, work_bytes,
    prompt_bytes, shared_prefix_bytes, step_not_before, step_failures
)
values (
    :id, :tenant_id, :key_id, :user_name, :endpoint, :input_file_id, :window_text, 'validating', now_ms(), now_ms() + :window_ms,
    now_ms() + cast(:begin_within_ms as bigint), :metadata, :output_expires_after_s, :ordered, :prefix_order, :invalid_lines, '[]',
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
);

-- job_get --
select * from jobs where tenant_id = :tenant_id and id = :id;

-- job_any --
-- The engine's own look at a job.
select * from jobs where id = :id;

-- job_cursor --
select created_at, id from jobs where tenant_id = :tenant_id and id = :id;

-- job_list --
select * from jobs
where tenant_id = :tenant_id and (created_at < :created_at or (created_at = :created_at and id < :id))
order by created_at desc, id desc
limit :count_max;

-- job_pending --
-- What a tenant has waiting or running, for its limits: jobs, and items not yet done (an input that was not ingested counts its lines).
select count(*) as jobs,
    coalesce(sum(case when j.state = 'validating' then coalesce(f.line_count, 0)
        else j.item_count - j.answered_count - j.failed_count - j.expired_count - j.cancelled_count end), 0) as items
from jobs j
left join files f on f.id = j.input_file_id
where j.tenant_id = :tenant_id and j.state in ('validating', 'in_progress', 'cancelling', 'finalizing');

-- job_created_since --
-- What a user created lately, for the limits per period.
select count(*) as jobs, coalesce(sum(f.size_bytes), 0) as bytes
from jobs j
left join files f on f.id = j.input_file_id
where j.tenant_id = :tenant_id and j.created_at > now_ms() - :period_ms
    and (cast(:user_name as text) is null or j.user_name = :user_name);

-- job_cancel_running --
-- A job that closes already for another reason keeps that reason.
-- moves: jobs: in_progress -> cancelling
update jobs set state = 'cancelling', closing = 'cancelled', closing_at = now_ms(), cancelling_at = now_ms()
where tenant_id = :tenant_id and id = :id and state = 'in_progress' and closing is null
returning id;

-- job_cancel_waiting --
-- A job that was not ingested yet is told to close; it ends when no ingest holds it.
update jobs set closing = 'cancelled', closing_at = now_ms(), cancelling_at = now_ms()
where tenant_id = :tenant_id and id = :id and state = 'validating' and closing is null
returning id;

-- job_fail_open --
-- Stop a job and keep its results: unfinished items become `batch_failed`.
update jobs set closing = 'failed', closing_at = now_ms(), errors = :errors
where id = :id and state in ('in_progress') and closing is null
returning id;

-- jobs_overdue --
-- Jobs whose window, or whose time to begin, has passed and that are not closing yet.
select id, state from jobs
where state in ('validating', 'in_progress') and closing is null
    and (expires_at <= now_ms() or (begin_by <= now_ms() and begun_at is null))
order by created_at
limit :count_max;

-- job_expire --
-- No new call after this. The same for a job that waits for ingest: it ends when no ingest holds it.
update jobs set closing = 'expired', closing_at = now_ms()
where id = :id and state in ('validating', 'in_progress') and closing is null
    and (expires_at <= now_ms() or (begin_by <= now_ms() and begun_at is null))
returning id;

-- jobs_waiting_ingest --
-- Inputs that nobody ingests now.
select id from jobs
where state = 'validating' and closing is null and step_not_before <= now_ms()
    and (step_worker_id is null or not exists (select 1 from workers w where w.id = step_worker_id and w.state = 'alive'))
order by created_at, id
limit :count_max;

-- jobs_closing_unstarted --
select id, closing from jobs
where state = 'validating' and closing is not null
    and (step_worker_id is null or not exists (select 1 from workers w where w.id = step_worker_id and w.state = 'alive'))
order by created_at, id
limit :count_max;

-- job_end_unstarted --
-- moves: jobs: validating -> cancelled
-- moves: jobs: validating -> expired
update jobs set state = closing, step_token = null, step_worker_id = null,
    cancelled_at = case when closing = 'cancelled' then now_ms() end,
    expired_at = case when closing = 'expired' then now_ms() end
where id = :id and state = 'validating' and closing in ('cancelled', 'expired')
    and (step_worker_id is null or step_token = cast(:token as text)
        or not exists (select 1 from workers w where w.id = step_worker_id and w.state = 'alive'))
returning id;

-- job_take_step --
-- One process ingests or publishes a job at a time; the right to it dies with the process's heartbeat.
update jobs set step_token = :token, step_worker_id = :worker_id
where id = :id and state = :state and step_not_before <= now_ms()
    and (step_token = :token or step_worker_id is null
        or not exists (select 1 from workers w where w.id = step_worker_id and w.state = 'alive'))
    and exists (select 1 from workers w where w.id = :worker_id and w.state = 'alive')
returning id;

-- job_drop_step --
-- The step did not work out: let anyone try again, not before a moment that lies twice as far ahead each time, up to 32 times.
update jobs set step_token = null, step_worker_id = null, step_failures = step_failures + 1,
    step_not_before = now_ms() + :delay_ms * (1 << case when step_failures < 5 then cast(step_failures as integer) else 5 end)
where id = :id and step_token = :token
returning step_failures;

-- job_start --
-- Ingest is done. Refused when the job was told to close meanwhile, or someone else holds the step.
-- moves: jobs: validating -> in_progress
update jobs set state = 'in_progress', in_progress_at = now_ms(), model = :model, item_count = :item_count,
    output_file_id = :output_file_id, error_file_id = :error_file_id, work_blob_id = :work_blob_id, work_bytes = :work_bytes,
    prompt_bytes = :prompt_bytes, shared_prefix_bytes = :shared_prefix_bytes,
    step_token = null, step_worker_id = null, step_not_before = 0, step_failures = 0
where id = :id and state = 'validating' and step_token = :token and closing is null
returning id, tenant_id;

-- job_refuse --
-- The input is no good. Results: none; reasons: in `errors`.
-- moves: jobs: validating -> failed
update jobs set state = 'failed', failed_at = now_ms(), errors = :errors, step_token = null, step_worker_id = null
where id = :id and state = 'validating' and step_token = :token and closing is null
returning id;

-- job_model_put --
insert into job_models (job_id, model, item_count, slice_count, work_units)
values (:job_id, :model, :item_count, :slice_count, :work_units);

-- candidates --
-- The scheduler's snapshot: open jobs with a slice that is ready for this worker, oldest first, per model, without the models that it
-- calls closed (each between :before and :behind, characters that no model's name contains). Never looks at items.
select j.id, m.model, j.tenant_id, j.created_at, j.expires_at
from jobs j
join job_models m on m.job_id = j.id
where j.state = 'in_progress' and j.closing is null and j.expires_at > now_ms()
    and replace(cast(:closed as text), cast(:before as text) || m.model || cast(:behind as text), '') = cast(:closed as text)
    and exists (
        select 1 from slices s
        where s.job_id = j.id and s.model = m.model and s.state = 'ready' and s.ready_at <= now_ms()
            and (s.lost_count < :suspect_after or not exists (
                select 1 from slices h where h.worker_id = :worker_id and h.state = 'leased' and h.lost_count >= :suspect_after
            ))
    )
order by j.created_at, j.id, m.model
limit :count_max;

-- job_open_for_lease --
-- Held until the lease commits, so that no job is closed between the look and the lease. Shared: leases do not wait for each other.
select id from jobs
where id = :job_id and state = 'in_progress' and closing is null and expires_at > now_ms() and begun_at is not null /*! for share */;

-- job_open_to_begin --
-- The same for a job's first lease, which also writes the row: two that shared it could both never go on to write.
select id from jobs
where id = :job_id and state = 'in_progress' and closing is null and expires_at > now_ms() /*! for no key update */;

-- slices_lease --
-- Takes ready slices under a token that the caller made, so that the call can be replayed. The lease is committed before any call
-- goes out. A worker that is gone gets nothing. Single items that lost owners before are suspects: a worker holds one of them at a
-- time, so that the next loss tells the poison from its neighbours.
-- moves: slices: ready -> leased
with picked as (
    select s.job_id as picked_job, s.first as picked_first from slices s
    where s.job_id = :job_id and s.model = :model and s.state = 'ready' and s.ready_at <= now_ms()
        and (s.lost_count < :suspect_after
            or s.first = (
                select min(q.first) from slices q
                where q.job_id = :job_id and q.model = :model and q.state = 'ready' and q.ready_at <= now_ms()
                    and q.lost_count >= :suspect_after
            ) and not exists (
                select 1 from slices h where h.worker_id = :worker_id and h.state = 'leased' and h.lost_count >= :suspect_after
            ))
    order by s.first
    limit :count_max /*! for update skip locked */
)
update slices set state = 'leased', lease_token = :token, worker_id = :worker_id, lease_count = lease_count + 1
from picked
where job_id = picked_job and first = picked_first and state = 'ready'
    and exists (select 1 from workers w where w.id = :worker_id and w.state = 'alive' and w.alive_until > now_ms())
returning first;

-- slices_of_token --
-- What a token holds: the answer to a lease, also to a replayed one.
select s.job_id, j.tenant_id, j.endpoint, s.model, s.first, s.count, s.read_first, j.work_blob_id, s.work_at, s.work_bytes, s.work_units,
    s.lost_count, s.lease_token, j.expires_at - now_ms() as expires_in_ms, s.lease_count
from slices s
join jobs j on j.id = s.job_id
where s.job_id = :job_id and s.lease_token = :token and s.worker_id = :worker_id and s.state = 'leased'
order by s.first;

-- job_begin --
update jobs set begun_at = now_ms() where id = :job_id and begun_at is null;

-- slice_outcomes --
-- Which items of a slice are done already: a slice that comes back is not run again from its start.
select number from outcomes where job_id = :job_id and number >= :first and number < :first + :count order by number;

-- slice_attempts --
select number, count, not_before - now_ms() as wait_ms, reason from attempts where job_id = :job_id and number >= :first and number < :first + :count order by number;

-- slice_finish --
-- Every item of it has an outcome. Not so when the job closed first: then its owner's outcomes were refused, and whoever publishes must
-- still find the items here.
-- moves: slices: leased -> done
update slices set state = 'done', lease_token = null, worker_id = null
where job_id = :job_id and first = :first and state = 'leased' and lease_token = :token
    and exists (select 1 from jobs j where j.id = :job_id and (j.state in ('in_progress', 'cancelling') or j.closing = 'completed'))
returning first;

-- slice_release --
-- Given back by its owner: nothing of it is lost, and nobody is to blame.
-- moves: slices: leased -> ready
update slices set state = 'ready', lease_token = null, worker_id = null, ready_at = now_ms() + :delay_ms
where job_id = :job_id and first = :first and state = 'leased' and lease_token = :token
returning first;

-- slices_reclaim --
-- The owner is gone: its slices may be run by someone else, and each remembers that it lost an owner. The living keep theirs. What a late
-- owner is recording at this moment is left for the next sweep.
-- moves: slices: leased -> ready
with picked as (
    select s.job_id as picked_job, s.first as picked_first from slices s
    where s.state = 'leased' and s.worker_id = :worker_id
        and not exists (select 1 from workers w where w.id = :worker_id and w.state = 'alive') /*! for update skip locked */
)
update slices set state = 'ready', lease_token = null, worker_id = null, ready_at = now_ms(), lost_count = lost_count + 1
from picked
where job_id = picked_job and first = picked_first and state = 'leased'
returning job_id, first, count, lost_count;

-- slices_stranded --
-- Leased to an incarnation that is gone: a lease that committed while its worker was being declared gone.
select distinct s.worker_id from slices s
where s.state = 'leased' and not exists (select 1 from workers w where w.id = s.worker_id and w.state = 'alive')
limit :count_max;

-- slice_get --
select first, count, model, read_first, work_at, work_bytes, work_units, lost_count, state, lease_token
from slices where job_id = :job_id and first = :first;

-- slice_drop --
-- A slice that lost two owners gives way to single items.
delete from slices where job_id = :job_id and first = :first and state = 'ready' and count > 1 returning first;

-- slice_shorten --
-- Its owner will send nothing from this item on: the slice ends before it, and the rest becomes a slice of its own.
update slices set count = :to_item - first, work_units = :work_units
where job_id = :job_id and first = :first and state = 'leased' and lease_token = :token
    and first < :to_item and first + count > :to_item
returning first;

-- slices_drop_job --
-- A job that ended needs no slices.
delete from slices where job_id = :job_id;

-- slices_count --
select state, count(*) as slices from slices where job_id = :job_id group by state;

-- slices_unfinished --
-- Where the items without an outcome lie in the work file, for the one who publishes.
select first, count, read_first, work_at, work_bytes from slices where job_id = :job_id and state <> 'done' order by first;

-- job_standing --
-- How a job stands among the others, for whoever asks why it is or is not running.
select now_ms() as now,
    (select count(*) from workers w where w.state = 'alive' and w.alive_until > now_ms()) as workers_alive,
    (select count(*) from slices s where s.job_id = j.id and s.state = 'ready' and s.ready_at <= now_ms()) as slices_ready,
    (select count(*) from slices s where s.job_id = j.id and s.state = 'ready' and s.ready_at > now_ms()) as slices_resting,
    coalesce((select min(s.ready_at) - now_ms() from slices s
        where s.job_id = j.id and s.state = 'ready' and s.ready_at > now_ms()), 0) as rest_ends_in_ms,
    (select count(*) from slices s where s.job_id = j.id and s.state = 'leased') as slices_leased,
    (select count(*) from jobs o
        where o.state = 'in_progress' and o.closing is null
            and (o.created_at < j.created_at or (o.created_at = j.created_at and o.id < j.id))
            and exists (select 1 from slices s where s.job_id = o.id and s.state = 'ready' and s.ready_at <= now_ms())) as jobs_ahead
from jobs j
where j.id = :job_id;

-- attempts_waiting --
-- Why items that were tried wait to be tried again.
select a.reason, count(*) as items from attempts a
where a.job_id = :job_id
    and not exists (select 1 from outcomes o where o.job_id = a.job_id and o.number = a.number)
group by a.reason
order by a.reason;

-- slice_tokens --
-- Which of a job's slices a token still holds: the verdicts of anyone else are refused. Held, so that no slice changes hands meanwhile.
select first, count from slices where job_id = :job_id and lease_token = :token and state = 'leased' order by first /*! for update */;

-- job_lock --
-- Record begins here: the job's row serialises everyone who adds to it. No row: the job closed, and the answer is paid but unused.
update jobs set item_count = item_count
where id = :id and state in ('in_progress', 'cancelling')
returning output_file_id, error_file_id, output_bytes, error_bytes;

-- outcome_put --
-- The first result wins; whoever comes second gets no row back.
insert into outcomes (job_id, number, outcome, at, size_bytes) values (:job_id, :number, :outcome, :at, :size_bytes)
on conflict (job_id, number) do nothing
returning number;

-- outcome_move --
update outcomes set at = :at where job_id = :job_id and number = :number;

-- job_add --
-- Counters, usage and offsets, only from what was new. A job whose last item is done goes on to be published.
-- moves: jobs: in_progress -> finalizing
update jobs set
    answered_count = answered_count + :answered, failed_count = failed_count + :failed,
    input_tokens = input_tokens + :input_tokens, cached_tokens = cached_tokens + :cached_tokens,
    output_tokens = output_tokens + :output_tokens, reasoning_tokens = reasoning_tokens + :reasoning_tokens,
    output_bytes = output_bytes + :output_bytes, error_bytes = error_bytes + :error_bytes,
    unused_count = unused_count + :unused,
    closing = case when state = 'in_progress' and closing is null
        and answered_count + failed_count + :answered + :failed = item_count then 'completed' else closing end,
    closing_at = case when state = 'in_progress' and closing is null
        and answered_count + failed_count + :answered + :failed = item_count then now_ms() else closing_at end,
    finalizing_at = case when state = 'in_progress' and closing is null
        and answered_count + failed_count + :answered + :failed = item_count then now_ms() else finalizing_at end,
    state = case when state = 'in_progress' and closing is null
        and answered_count + failed_count + :answered + :failed = item_count then 'finalizing' else state end
where id = :id and state in ('in_progress', 'cancelling')
returning state;

-- job_add_unused --
-- Answers that came after closing, or second: paid for, not used, counted.
update jobs set unused_count = unused_count + :unused where id = :id;

-- attempt_put --
-- A shorter deferral never overwrites a longer one.
insert into attempts (job_id, number, count, not_before, reason)
values (:job_id, :number, :count, now_ms() + :delay_ms, :reason)
on conflict (job_id, number) do update set
    count = case when attempts.count > excluded.count then attempts.count else excluded.count end,
    not_before = case when attempts.not_before > excluded.not_before then attempts.not_before else excluded.not_before end,
    reason = excluded.reason;

-- attempt_lost --
-- An item whose owner was lost may have been called already: whoever finds it called again finds the reason here.
insert into attempts (job_id, number, count, not_before, reason)
values (:job_id, :number, 0, now_ms(), 'owner_lost')
on conflict (job_id, number) do update set reason = excluded.reason;

-- jobs_draining --
-- Jobs that close, and of which nothing is leased any more or the grace has passed.
select j.id from jobs j
where j.state in ('in_progress', 'cancelling') and j.closing is not null
    and (j.closing_at + :grace_ms <= now_ms()
        or not exists (select 1 from slices s where s.job_id = j.id and s.state = 'leased'))
order by j.created_at
limit :count_max;

-- job_close --
-- From here on record refuses, so the set of items without an outcome is frozen.
-- moves: jobs: in_progress -> finalizing
-- moves: jobs: cancelling -> finalizing
update jobs set state = 'finalizing', finalizing_at = now_ms(), step_token = null, step_worker_id = null, step_not_before = 0
where id = :id and state in ('in_progress', 'cancelling') and closing is not null
    and (closing_at + :grace_ms <= now_ms()
        or not exists (select 1 from slices s where s.job_id = jobs.id and s.state = 'leased'))
returning id;

-- jobs_to_publish --
select id from jobs
where state = 'finalizing' and step_not_before <= now_ms()
    and (step_worker_id is null or not exists (select 1 from workers w where w.id = step_worker_id and w.state = 'alive'))
order by finalizing_at
limit :count_max;

-- outcomes_page --
-- The outcomes of a job in order of number, for everyone who must see all of them.
select number, outcome, at, size_bytes from outcomes where job_id = :job_id and number >= :from_number order by number limit :count_max;

-- job_publish --
-- The end. Guarded by the step's token: whoever lost it changes nothing.
-- moves: jobs: finalizing -> completed
-- moves: jobs: finalizing -> failed
-- moves: jobs: finalizing -> expired
-- moves: jobs: finalizing -> cancelled
update jobs set state = closing, step_token = null, step_worker_id = null,
    completed_at = case when closing = 'completed' then now_ms() end,
    failed_at = case when closing = 'failed' then now_ms() end,
    expired_at = case when closing = 'expired' then now_ms() end,
    cancelled_at = case when closing = 'cancelled' then now_ms() end,
    failed_count = failed_count + :failed, expired_count = expired_count + :expired, cancelled_count = cancelled_count + :cancelled,
    output_bytes = :output_bytes, error_bytes = :error_bytes,
    output_file_id = case when answered_count > 0 then output_file_id end,
    error_file_id = case when failed_count + expired_count + cancelled_count + :failed + :expired + :cancelled > 0 then error_file_id end
where id = :id and state = 'finalizing' and step_token = :token
returning id;

-- job_abandon --
-- An operator gives up on a job that cannot be published: what was recorded is shown as it lies, and what never ran gets no line.
-- moves: jobs: finalizing -> failed
update jobs set state = 'failed', closing = 'failed', failed_at = now_ms(), errors = :errors, step_token = null, step_worker_id = null,
    output_file_id = case when answered_count > 0 then output_file_id end,
    error_file_id = case when failed_count + expired_count + cancelled_count > 0 then error_file_id end
where tenant_id = :tenant_id and id = :id and state = 'finalizing'
returning id;

-- jobs_ended_before --
-- Jobs whose records may be forgotten.
select id, tenant_id from jobs
where state in ('completed', 'failed', 'expired', 'cancelled') and created_at < now_ms() - :keep_ms
    and coalesce(completed_at, failed_at, expired_at, cancelled_at) < now_ms() - :keep_ms
order by created_at
limit :count_max;

-- outcomes_forget --
delete from outcomes where job_id = :job_id;

-- attempts_forget --
delete from attempts where job_id = :job_id;

-- job_models_forget --
delete from job_models where job_id = :job_id;

-- job_forget --
delete from jobs where id = :job_id and state in ('completed', 'failed', 'expired', 'cancelled') returning id;

-- jobs_by_part --
-- Jobs by the letters that their items' ids carry: how an adopted log finds its owners. Those that closed too: what was answered for
-- them is counted as unused.
select id from jobs where id >= :low and id < :high and state <> 'validating' limit 2;

-- jobs_state_counts --
select state, count(*) as jobs from jobs group by state;
