-- Canaries: a sample of a job's items runs first, and the others wait for its result.

-- job_canary_put --
update jobs set canary_items = :items, canary_ppm = :error_ppm, canary_then = :then_do, canary_state = 'running' where id = :id;

-- job_canary_begin --
-- The job starts, and :items of its items are the sample. No row: its caller has ended the canary.
update jobs set canary_items = :items where id = :id and canary_state = 'running' returning id;

-- job_canary_set --
update jobs set canary_state = :state where id = :id and canary_state in ('running', 'waiting');

-- slices_hold_back --
-- The slices after the sample rest until they are released.
update slices set ready_at = :forever where job_id = :job_id and first >= :first and state = 'ready';

-- slices_let_go --
update slices set ready_at = now_ms() where job_id = :job_id and state = 'ready' and ready_at = :forever;

-- job_flows --
-- The flows of a job's open models.
select model, share_owner from job_models where job_id = :job_id and state in ('open', 'held') order by model, share_owner;
