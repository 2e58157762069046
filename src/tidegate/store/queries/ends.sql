-- The end of a job: draining, closing, publishing, forgetting.

-- jobs_draining --
-- Jobs that close, with no leased slice or after their grace. Here and elsewhere all states of open
-- jobs are named, because SQLite uses a partial index only if a query repeats its condition.
select j.id from jobs j
where j.state in ('validating', 'in_progress', 'cancelling', 'finalizing') and j.state in ('in_progress', 'cancelling')
    and j.closing is not null
    and (j.closing_at + :grace_ms <= now_ms()
        or not exists (select 1 from slices s where s.job_id = j.id and s.state = 'leased'))
order by j.created_at
limit :count_max;

-- job_close --
-- From now on record refuses lines of the job, so its items without an outcome are fixed.
-- moves: jobs: in_progress -> finalizing
-- moves: jobs: cancelling -> finalizing
update jobs set state = 'finalizing', finalizing_at = now_ms(), step_token = null, step_worker_id = null, step_not_before = 0
where id = :id and state in ('in_progress', 'cancelling') and closing is not null
    and (closing_at + :grace_ms <= now_ms()
        or not exists (select 1 from slices s where s.job_id = jobs.id and s.state = 'leased'))
returning id;

-- jobs_to_publish --
-- The first due job of each tenant, then the second of each, and so on. The cost of publishing a
-- job is in bytes: those that are read again, and 512 for each line that is written.
select id from (
    select id, finalizing_at, row_number() over (partition by tenant_id order by finalizing_at, id) as turn from jobs
    where state in ('validating', 'in_progress', 'cancelling', 'finalizing') and state = 'finalizing' and step_not_before <= now_ms()
        and (step_worker_id is null or not exists (select 1 from workers w where w.id = step_worker_id and w.state = 'alive'))
        and 512 * (item_count - answered_count - failed_count)
            + case when ordered = 1 or deduplicated_count > 0 then output_bytes + error_bytes else 0 end between :bytes_min and :bytes_max
) waiting
where turn <= :tenant_max
order by turn, finalizing_at, id
limit :count_max;

-- job_publish --
-- End a job. The step's token guards this: a worker that lost it changes nothing. `expired_at` is
-- never before the deadline, also if the clock was set back a little since.
-- moves: jobs: finalizing -> completed
-- moves: jobs: finalizing -> failed
-- moves: jobs: finalizing -> expired
-- moves: jobs: finalizing -> cancelled
update jobs set state = closing, step_token = null, step_worker_id = null,
    completed_at = case when closing = 'completed' then now_ms() end,
    failed_at = case when closing = 'failed' then now_ms() end,
    expired_at = case when closing = 'expired' and closing_at > now_ms() then closing_at when closing = 'expired' then now_ms() end,
    cancelled_at = case when closing = 'cancelled' then now_ms() end,
    answered_count = answered_count + :answered, schema_invalid_count = schema_invalid_count + :schema_invalid,
    failed_count = failed_count + :failed, expired_count = expired_count + :expired, cancelled_count = cancelled_count + :cancelled,
    final_cost_nano = cost_nano,
    final_failed_ppm = case when item_count > 0 then 1000000 * (failed_count + :failed) / item_count end,
    output_bytes = :output_bytes, error_bytes = :error_bytes,
    output_file_id = case when answered_count + :answered > 0 then output_file_id end,
    error_file_id = case when failed_count + expired_count + cancelled_count + :failed + :expired + :cancelled > 0 then error_file_id end
where id = :id and state = 'finalizing' and step_token = :token
returning id;

-- outcome_sizes --
-- The sizes of the lines of a result file, in the order of the file.
select size_bytes from outcomes
where job_id = :job_id and case when outcome = 'answered' then 1 else 0 end = cast(:is_answered as bigint)
order by at;

-- job_set_parts --
update jobs set parts = :parts where id = :id;

-- job_abandon --
-- An operator abandons a job that cannot be published. Recorded lines are shown, and items that
-- never ran get no line.
-- moves: jobs: finalizing -> failed
update jobs set state = 'failed', closing = 'failed', failed_at = now_ms(), errors = :errors, step_token = null, step_worker_id = null,
    final_cost_nano = cost_nano, final_failed_ppm = case when item_count > 0 then 1000000 * failed_count / item_count end,
    output_file_id = case when answered_count > 0 then output_file_id end,
    error_file_id = case when failed_count + expired_count + cancelled_count > 0 then error_file_id end
where tenant_id = :tenant_id and id = :id and state = 'finalizing'
returning id;

-- jobs_ended_before --
-- Jobs whose records may be forgotten, but not while an event waits for its delivery or a result
-- file has not expired. The time is selected, so it is read once: PostgreSQL uses no index for a
-- time that may change from row to row.
select id, tenant_id from jobs
where state in ('completed', 'failed', 'expired', 'cancelled')
    and coalesce(completed_at, failed_at, expired_at, cancelled_at) < (select now_ms()) - :keep_ms
    and not exists (select 1 from webhook_deliveries d where d.job_id = jobs.id and d.state = 'pending')
    and not exists (
        select 1 from files f
        where f.id in (jobs.output_file_id, jobs.error_file_id) and f.state = 'ready' and f.expires_at > now_ms()
    )
order by coalesce(completed_at, failed_at, expired_at, cancelled_at)
limit :count_max;

-- jobs_deleted --
-- Responses that their callers deleted, and that have ended.
select id, tenant_id from jobs
where kind = 'deleted' and state in ('completed', 'failed', 'expired', 'cancelled')
order by id
limit :count_max;

-- job_models_forget --
delete from job_models where job_id = :job_id;

-- job_place_put --
insert into list_places (id, tenant_id, created_at, deleted_at, deadline_at, item_count, failed_ppm, cost_nano)
select id, tenant_id, created_at, now_ms(), expires_at, item_count,
    case when item_count > 0 then 1000000 * failed_count / item_count else 0 end, cost_nano
from jobs where id = :job_id and kind = 'batch'
on conflict (id) do nothing;

-- list_places_prune --
delete from list_places where id in (
    select id from list_places where deleted_at < (select now_ms()) - :keep_ms order by deleted_at limit :count_max
)
returning 1;

-- job_forget --
delete from jobs where id = :job_id and state in ('completed', 'failed', 'expired', 'cancelled') returning id;
