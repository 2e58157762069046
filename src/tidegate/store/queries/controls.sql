-- Changes of a running job by its caller: pause, resume, change; and the thresholds that stop it.

-- job_pause --
-- Nothing new is leased from now on. The deadline does not move.
update jobs set paused_at = now_ms()
where tenant_id = :tenant_id and id = :id and state in ('validating', 'in_progress') and closing is null and paused_at is null
returning id;

-- job_models_hold --
-- moves: job_models: open -> held
update job_models set state = 'held' where job_id = :job_id and state = 'open';

-- job_resume --
update jobs set paused_at = null
where tenant_id = :tenant_id and id = :id and state in ('validating', 'in_progress') and closing is null and paused_at is not null
returning id;

-- job_models_resume --
-- moves: job_models: held -> open
update job_models set state = 'open' where job_id = :job_id and state = 'held' returning model, share_owner;

-- job_change --
update jobs set priority = :priority, not_before = :not_before, window_text = :window_text, expires_at = :expires_at,
    max_cost_nano = :max_cost_nano, max_errors_count = :max_errors_count, max_errors_ppm = :max_errors_ppm, max_errors_after = :max_errors_after
where id = :id and state in ('validating', 'in_progress') and closing is null
returning id;

-- job_models_change --
-- The scheduler's copies of a job's priority and times. A new `not_before` ends a rest because of a
-- budget, which is then set again.
update job_models set priority = :priority, expires_at = :expires_at,
    due_at = case when begun_at is null and begin_by < :expires_at then begin_by else :expires_at end,
    rests_until = case when cast(:not_before as bigint) is null then rests_until else :not_before end
where job_id = :job_id and state in ('open', 'held')
returning model, share_owner;

-- job_stop --
-- The job passed a threshold. Results are kept, and items that never ran become `batch_failed`. The
-- last flush of a job may pass it too: then this transaction has just completed the job.
update jobs set closing = 'failed', closing_at = coalesce(closing_at, now_ms()), stopped_by = :stopped_by, errors = :errors
where id = :id and ((state = 'in_progress' and closing is null) or (state = 'finalizing' and closing = 'completed'))
returning id;
